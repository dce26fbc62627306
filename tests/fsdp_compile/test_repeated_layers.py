"""Layers that are traced once: graphs and results equal those of layers that are traced one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

import passes.pipeline
import passes.transforms.repeated_layers
from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, capture
from passes.transforms.repeated_layers import fold_layers
from tests.common.graphs import operations

DEPTH, WIDTH = 3, 8


class Layer(nn.Module):
    """A residual layer with a view, a matmul and a bias; ``kind`` adds one peculiarity."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("calls", torch.zeros(()))
        self.up.weight.requires_grad_(kind != "frozen parameter")

    def forward(self, x: Tensor) -> Any:
        if self.kind == "residual outside":
            # Backward adds two gradients of the input to the gradient of the residual.
            x = x * x.square().mean(-1, keepdim=True)
        y = torch.tanh(self.up(x.unflatten(0, (2, -1)))).flatten(0, 1)
        if self.kind == "constant":
            y = torch.where(y > 0, y, torch.tensor(0.1))
        if self.kind == "dropout":
            y = F.dropout(y, 0.5)
        if self.kind == "reads sizes":
            y = y.view(-1, x.size(0) // 2, 2 * WIDTH).flatten(0, 1) * x.size(0) + y.new_ones(x.size(0), 1)
        if self.kind == "size of data":
            y = y * y[y > 0].sum()
        if self.kind == "written input":
            self.calls += 1
        if self.kind == "view of an input":
            return x + self.down(y), x[0]
        if self.kind == "several outputs":
            return x + self.down(y), y > 0, y * 2
        if self.kind == "cast":
            y = y.to(torch.float64).to(torch.float32)
        if self.kind == "vmap":
            y = torch.vmap(torch.mul, in_dims=1, out_dims=1)(y, y)
        if self.kind == "residual outside":
            return self.down(y)
        if self.kind == "autocast":
            with torch.autocast("cpu", torch.bfloat16):
                return x + self.down(y)
        return x + self.down(y)


class Model(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layers = nn.ModuleList(Layer(kind) for _ in range(DEPTH))
        if kind == "tied parameter":
            for layer in self.layers:
                layer.up.weight = self.layers[0].up.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.scale * x
        for layer in self.layers:
            if self.kind == "unused result":
                layer(x)
                continue
            residual = x
            result = checkpoint(layer, x, use_reentrant=False) if self.kind == "checkpoint" else layer(x)
            x = result if isinstance(result, Tensor) else result[0]
            if self.kind == "residual outside":
                x = residual + result
            if self.kind == "view of an input":
                x = x + result[1]
            if self.kind == "several outputs":
                # Backward does not use the last output.
                x = torch.where(result[1].any(), x, -x) + 0 * result[2].detach().sum()
        # The gradient of ``x.sum()`` is one number, expanded.
        return x.sum() if self.kind == "expanded gradient" else (x * x).sum()


#: Kinds of layers that can be traced once.
FOLDED = [
    "plain",
    "cast",
    "constant",
    "dropout",
    "expanded gradient",
    "frozen parameter",
    "reads sizes",
    "residual outside",
    "several outputs",
    "tied parameter",
]
TRACED_EACH = ["autocast", "checkpoint", "size of data", "unused result", "view of an input", "vmap", "written input"]
# Dynamo of torch 2.11 makes a function for each DTensor.
(FOLDED if torch.__version__ >= "2.12" else TRACED_EACH).append("tensor parallel")


def make_model(kind: str, units: bool = True) -> nn.Module:
    torch.manual_seed(0)
    model = Model(kind)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "tensor parallel":
        ranks = min(2, dist.get_world_size())
        both = init_device_mesh("cpu", (dist.get_world_size() // ranks, ranks), mesh_dim_names=("shard", "tp"))
        mesh = both["shard"]
        for layer in model.layers:
            parallelize_module(layer, both["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # A tied parameter belongs to the root.
    for layer in model.layers if units and kind != "tied parameter" else ():
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def run(
    model: nn.Module,
    monkeypatch: pytest.MonkeyPatch,
    min_layers: int,
    train: bool = True,
    lowering: str = "aot_eager",
    rows: Sequence[int] = (6,),
) -> tuple[Capture, Any, int]:
    """Compile and run with batches of ``rows``, of which sizes are symbols if there are several.

    Returns:
        The captured graphs, the last results, and the number of folded layers.
    """
    folded = []

    def fold_and_count(gm: torch.fx.GraphModule) -> bool:
        found = fold_layers(gm, min_layers)
        folded.extend(node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "call_layer")
        return found

    monkeypatch.setattr(passes.pipeline, "fold_layers", fold_and_count)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
    torch.manual_seed(1)
    with (
        capture() as captured,
        torch.set_grad_enabled(train),
        torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, error_on_recompile=True),
    ):
        for number in rows:
            model.zero_grad()
            x = torch.randn(number, WIDTH)
            if len(rows) > 1:
                torch._dynamo.mark_dynamic(x, 0)
            loss = compiled(x)
            if train:
                loss.backward()
    gradients = [None if param.grad is None else param.grad.full_tensor() for param in model.parameters()]
    return captured, (loss.detach(), gradients), len(folded)


# Kinds that fold, and kinds that do not fold for different reasons.
_FIXED = [
    *((kind, 1) for kind in ("plain", "tied parameter", "checkpoint", "tensor parallel", "written input", "unused result")),
    *((kind, 2) for kind in ("reads sizes", "several outputs", "size of data")),
]


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        pytest.param(kind, rows, marks=[] if (kind, len(rows)) in _FIXED else pytest.mark.night)
        for kind in FOLDED + TRACED_EACH
        for rows in ([6], [6, 8])
    ],
)
def test_graphs_are_the_same(kind: str, rows: list[int], fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Both runs use one model, as names of process groups are numbered.
    model = make_model(kind)
    one_by_one, _, _ = run(model, monkeypatch, DEPTH + 1, rows=rows)
    once, _, folded = run(model, monkeypatch, DEPTH, rows=rows)
    assert folded == (DEPTH if kind in FOLDED else 0)
    assert operations(once.forward[0].graph_module.graph) == operations(one_by_one.forward[0].graph_module.graph)
    if kind in ("expanded gradient", "residual outside", "several outputs", "tied parameter"):
        # Backward differs by a copy of the gradient, the place of an addition, zeros as a gradient, or the order of sums.
        return
    assert operations(once.backward[0].graph_module.graph) == operations(one_by_one.backward[0].graph_module.graph)


@pytest.mark.parametrize("kind", ["plain", "autocast"])
def test_observers_are_told_where_something_folds(kind: str, fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    captured, _, folded = run(make_model(kind), monkeypatch, DEPTH)
    ahead = [entry for entry in captured.passes if entry.stage in ("dynamo", "joint")]
    if not folded:
        assert [entry.name for entry in ahead] == ["deduplicate", "reshard_after_forward"]
        return
    assert [entry.name for entry in ahead] == ["deduplicate", "fold_layers", "unfold_layers", "reshard_after_forward"]
    _, fold, unfold, following = ahead
    assert (fold.before.count("_call_layer"), fold.after.count("_call_layer")) == (0, DEPTH)
    for operator in ("fsdp_compile.layer.default", "fsdp_compile.layer_backward.default"):
        assert (unfold.before.count(operator), unfold.after.count(operator)) == (DEPTH, 0)
    assert unfold.after == following.before


@pytest.mark.parametrize(
    ("kind", "rows"),
    [
        pytest.param(kind, rows, marks=() if (kind, len(rows)) in (("plain", 1), ("reads sizes", 2)) else pytest.mark.night)
        for kind in FOLDED
        for rows in ([6], [6, 8])
    ],
)
def test_results_are_the_same(kind: str, rows: list[int], one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one_by_one, _ = run(make_model(kind), monkeypatch, DEPTH + 1, rows=rows)
    _, once, folded = run(make_model(kind), monkeypatch, DEPTH, rows=rows)
    assert folded == DEPTH
    torch.testing.assert_close(once, one_by_one, rtol=0, atol=0)


def test_inference(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, one_by_one, _ = run(make_model("plain"), monkeypatch, DEPTH + 1, train=False)
    _, once, folded = run(make_model("plain"), monkeypatch, DEPTH, train=False)
    assert folded == DEPTH
    torch.testing.assert_close(once, one_by_one, rtol=0, atol=0)


def test_layers_that_differ_are_traced_each(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model("plain")
    layer: Any = model.layers[1]
    layer.kind = "cast"
    _, _, folded = run(fully_shard(model, mesh=init_device_mesh("cpu", (1,))), monkeypatch, DEPTH)
    assert folded == 0


@pytest.mark.inductor
def test_layers_with_seeds_of_inductor_are_traced_each(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, folded = run(make_model("dropout"), monkeypatch, DEPTH, lowering="inductor")
    assert folded == 0


def test_a_fold_that_fails_is_undone(one_rank: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If anything fails between the fold and the first lowering, the model compiles as without a fold."""
    _, expected, _ = run(make_model("plain"), monkeypatch, DEPTH + 1)

    def fail(*_: Any) -> None:
        raise KeyError("val")

    monkeypatch.setattr(passes.transforms.repeated_layers._Copy, "write_backward", fail)
    _, found, folded = run(make_model("plain"), monkeypatch, DEPTH)
    assert folded == DEPTH
    assert "traced one by one" in caplog.text
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
