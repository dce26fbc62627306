"""Sharded modules: generated classes, sharded and full parameters, training, captured graphs and logs.

Tests that only inspect modules and graphs run in this process, on a ``fake`` process group. Tests that train run on two ranks
in float64, and compare with an unsharded twin that sees the batches of both.
"""

from __future__ import annotations

import copy
import gc
import inspect
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations

from fsdp_compile import FSDPModule, fsdp_backend, fully_shard, register_fsdp_forward_method
from fsdp_compile.debug import capture
from fsdp_compile.units.param_state import grad_slice
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


# --- Classes --------------------------------------------------------------------------------------


def _sharded_mlp() -> nn.Module:
    model = models.MLP()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def test_classes(fake_ranks: None) -> None:
    model = _sharded_mlp()
    block, linear = model.blocks[0], model.blocks[0].up
    assert type(model).__name__ == "FSDPMLP" and type(block).__name__ == "FSDPBlock"
    assert isinstance(model, models.MLP) and isinstance(model, FSDPModule)
    assert isinstance(block, models.Block) and isinstance(block, FSDPModule)
    # A module that owns shards but is no unit keeps its class: initialisation and groups of optimizers test exact types.
    assert type(linear) is nn.Linear
    assert type(model.blocks) is nn.ModuleList
    assert type(model).__module__ == models.__name__


def test_where_ours_stands_in_the_place_of_torchs(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An instance check against torch's class holds even after code has put our ``FSDPModule`` in its place."""

    class Other(nn.Linear):
        pass

    kind = torch.distributed.fsdp.FSDPModule
    monkeypatch.setattr(torch.distributed.fsdp, "FSDPModule", FSDPModule)
    assert isinstance(fully_shard(Other(8, 8)), kind)


def test_equal_modules_share_a_class(fake_ranks: None) -> None:
    """Code that Dynamo traced for one block serves the others only if their classes are the same."""
    model = _sharded_mlp()
    assert type(model.blocks[0]) is type(model.blocks[1])
    assert type(model.blocks[0].up) is type(model.blocks[1].down)


def test_returns_what_it_was_given(fake_ranks: None) -> None:
    model = models.MLP()
    parts = [model.blocks[0], model.head]
    assert fully_shard(parts) is parts
    assert fully_shard(model) is model


def test_repr(fake_ranks: None) -> None:
    assert repr(_sharded_mlp()) == textwrap.dedent(
        """\
        FSDPMLP(
          (blocks): ModuleList(
            (0-1): 2 x FSDPBlock(
              (up): Linear(in_features=8, out_features=16, bias=True)
              (down): Linear(in_features=16, out_features=8, bias=True)
            )
          )
          (head): Linear(in_features=8, out_features=4, bias=True)
        )"""
    )


def test_slice_of_a_sequential(fake_ranks: None) -> None:
    """A slice is a plain container of the same modules, as with FSDP2."""
    layers = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    fully_shard(layers[0])
    fully_shard(layers)
    part = layers[:2]
    assert type(part) is nn.Sequential
    assert part[0] is layers[0] and len(part) == 2
    assert part(torch.zeros(2, 8)).shape == (2, 8)
    assert [type(layer).__name__ for layer in layers] == ["FSDPLinear", "ReLU", "Linear"]


def test_containers(fake_ranks: None) -> None:
    layers = fully_shard(nn.Sequential(nn.Linear(8, 8)))
    layers.append(nn.ReLU())
    layers.extend([nn.ReLU()])
    assert len(layers) == 3 and layers[-1] in list(layers)
    assert layers(torch.zeros(2, 8)).shape == (2, 8)


def test_different_instances_of_a_class(fake_ranks: None) -> None:
    """Parameters belong to the instance, not to the class."""
    with_bias, without = fully_shard(nn.Linear(8, 8)), fully_shard(nn.Linear(8, 8, bias=False))
    assert isinstance(with_bias.bias, DTensor) and without.bias is None
    assert type(with_bias) is type(without)
    assert [name for name, _ in without.named_parameters()] == ["weight"]
    assert with_bias(torch.zeros(2, 8)).shape == without(torch.zeros(2, 8)).shape


def test_signature(fake_ranks: None) -> None:
    """Trainers read the arguments of ``forward`` to choose what to pass."""
    plain, sharded = models.KeywordsAndTuples.Gated(8), models.KeywordsAndTuples.Gated(8)
    fully_shard(sharded)
    assert inspect.signature(sharded.forward) == inspect.signature(plain.forward)
    assert list(inspect.signature(sharded.forward).parameters) == ["x", "gate"]


def test_signature_of_patched_forward(fake_ranks: None) -> None:
    module = nn.Linear(8, 8)
    module.forward = lambda x, scale=2.0: F.linear(x, module.weight) * scale  # type: ignore[method-assign]
    expected = inspect.signature(module.forward)
    fully_shard(module)
    assert inspect.signature(module.forward) == expected


# --- Parameters -----------------------------------------------------------------------------------


class _Looks(nn.Module):
    """A module that records its parameters, and its child's, while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 8))
        self.child = nn.Linear(16, 8)
        self.seen: dict[str, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.seen = {"own": self.weight, "child": self.child.weight, "child bias": self.child.bias}
        return self.child(F.linear(x, self.weight))


@pytest.mark.parametrize("child_is_a_unit", [False, True])
def test_parameters_inside_and_outside_of_forward(child_is_a_unit: bool, fake_ranks: None) -> None:
    module = _Looks()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    if child_is_a_unit:
        fully_shard(module.child, mp_policy=policy)
    fully_shard(module, mp_policy=policy)
    for _ in range(2):
        for parameter, local in ((module.weight, (2, 8)), (module.child.weight, (1, 16))):
            assert isinstance(parameter, DTensor) and isinstance(parameter, nn.Parameter)
            assert parameter.is_leaf and parameter.to_local().shape == local
        module(torch.zeros(2, 8))
        full = {name: tensor for name, tensor in module.seen.items() if not isinstance(tensor, DTensor)}
        # Also full: parameters of a child unit, read outside of its forward. FSDP2 gives the parent shards there.
        shapes = {name: tuple(tensor.shape) for name, tensor in full.items()}
        assert shapes == {"own": (16, 8), "child": (8, 16), "child bias": (8,)}
        for tensor in full.values():
            assert tensor.dtype == torch.bfloat16 and tensor.requires_grad


@pytest.mark.parametrize("compiled", [False, True])
def test_parameter_tied_across_trees(compiled: bool, fake_ranks: None) -> None:
    """Both models read the parameter in their forwards, although only one of them has it in a unit."""
    first, second = nn.Linear(8, 8), nn.Linear(8, 8)
    second.weight = first.weight
    fully_shard(first)
    fully_shard(second)
    calls = [torch.compile(module, fullgraph=True, **_EAGER_LOWERING) if compiled else module for module in (first, second)]
    for dtype in (torch.float32, torch.bfloat16):
        # A cast moves the parameter into other memory.
        first.to(dtype)
        second.to(dtype)
        for call in calls:
            assert call(torch.zeros(2, 8, dtype=dtype)).dtype == dtype


def test_parameters_by_every_way(fake_ranks: None) -> None:
    """Outside of forward, an attribute, ``get_parameter``, iteration and ``state_dict`` give the same object."""
    model = _sharded_mlp()
    weight = model.blocks[0].up.weight
    assert model.get_parameter("blocks.0.up.weight") is weight
    assert dict(model.named_parameters())["blocks.0.up.weight"] is weight
    assert model.blocks[0].up._parameters["weight"] is weight
    assert any(parameter is weight for parameter in model.parameters())
    assert model.state_dict(keep_vars=True)["blocks.0.up.weight"] is weight


def test_names_are_unchanged(fake_ranks: None) -> None:
    for build in (models.MLP, models.Containers, models.ReadsChild, models.Buffers):
        expected, model = build(), build()
        shard_units(model, device_mesh_of_all(), fully_shard)
        for kind in ("named_parameters", "named_buffers", "named_modules"):
            names = [name for name, _ in getattr(model, kind)()]
            assert names == [name for name, _ in getattr(expected, kind)()]


def device_mesh_of_all() -> Any:
    return dist.init_device_mesh("cpu", (dist.get_world_size(),))


def test_containers_of_parameters(fake_ranks: None) -> None:
    """ParameterList and ParameterDict keep their own ways of access: by index, key, iteration, membership."""
    model = models.Containers()
    fully_shard(model.blocks[0])
    fully_shard(model)
    experts, heads = model.blocks[0].experts, model.heads
    assert isinstance(experts, nn.ParameterList) and len(experts) == 3
    assert all(isinstance(expert, DTensor) for expert in experts)
    assert experts[-1] is list(experts)[2] and experts[1] is experts._parameters["1"]
    assert isinstance(heads, nn.ParameterDict) and sorted(heads) == ["bias", "weight"] and "bias" in heads
    assert all(isinstance(value, DTensor) for value in heads.values())
    assert heads["weight"] is model.get_parameter("heads.weight")
    assert model(torch.zeros(2, 8)).shape == (2, 4)


def test_replacing_a_parameter_is_noticed(fake_ranks: None) -> None:
    """Assigning to ``module.weight`` raises an error that names the parameter and says that it is sharded."""
    model = _sharded_mlp()
    with pytest.raises((AttributeError, ValueError, NotImplementedError), match=r"head\.weight is sharded"):
        model.head.weight = nn.Parameter(torch.zeros(4, 8))


# --- Methods other than forward -------------------------------------------------------------------


class _Generates(models.MLP):
    def generate(self, x: Tensor, *, times: int = 2) -> Tensor:
        """Apply the head's weight directly, outside of any forward."""
        return F.linear(x, self.head.weight, self.head.bias) * times

    def describe(self) -> str:
        return type(self.head.weight).__name__


def test_register_forward_method(fake_ranks: None) -> None:
    model = _Generates()
    signature = inspect.signature(model.generate)
    fully_shard(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.generate(torch.zeros(2, 8))
    register_fsdp_forward_method(model, "generate")
    assert model.generate(torch.zeros(2, 8), times=3).shape == (2, 4)
    assert isinstance(model.head.weight, DTensor)
    assert inspect.signature(model.generate) == signature
    # Methods that are not registered stay as they are.
    assert model.describe() == "DTensor"
    # A module that is not sharded raises no error, as in FSDP2, so that code can run on both.
    register_fsdp_forward_method(nn.Linear(2, 2), "extra_repr")


# --- Training -------------------------------------------------------------------------------------


class _Attends(nn.Module):
    """A model with ``nn.MultiheadAttention``, which reads ``out_proj.weight`` without calling ``out_proj``."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(x + y)


class _Remembers(nn.Module):
    """A model with ``nn.LSTM``, which also keeps its weights in a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.lstm(x)
        return self.head(y)


class _WeightNorm(nn.Module):
    """A model whose weights are properties already: a parametrization computes them from parameters of another module."""

    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(8, 7))
        self.head = parametrizations.weight_norm(nn.Linear(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)))


class _ReadsChild(nn.Module):
    """A model that reads the weight of ``head``, a child in its own unit. ``child`` is another unit."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.child(x)) @ self.head.weight.t() @ self.head.weight)


class _BiasAndNone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 3)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class _Patched(nn.Module):
    """A model with a forward patched onto an instance, as quantisation and adapter libraries do."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)
        up = self.up
        original = up.forward
        self.up.forward = lambda x: original(x) + F.linear(x, up.weight)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.up(x)))


@dataclass(frozen=True)
class _Subject:
    build: Callable[[], nn.Module]
    # Names of the modules that become units before the root does.
    units: tuple[str, ...] = ()
    # Dynamo leaves recurrent layers to eager execution.
    compiles: bool = True


_SUBJECTS = {
    "attention": _Subject(_Attends),
    "attention_unit": _Subject(_Attends, ("attention",)),
    "lstm": _Subject(_Remembers, compiles=False),
    "lstm_unit": _Subject(_Remembers, ("lstm",), compiles=False),
    "weight_norm": _Subject(_WeightNorm),
    "weight_norm_unit": _Subject(_WeightNorm, ("up",)),
    "child": _Subject(_ReadsChild, ("child",)),
    "bias_and_none": _Subject(_BiasAndNone, ("layers.0", "layers.1")),
    "patched": _Subject(_Patched),
    "patched_unit": _Subject(_Patched, ("up",)),
}


def train_subject(name: str, compiled: bool) -> None:
    subject = _SUBJECTS[name]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin = subject.build().double()
    # Built anew, not copied: the patched forward of a copy would still call the original.
    torch.manual_seed(0)
    model = subject.build().double()
    for unit in subject.units:
        fully_shard(model.get_submodule(unit), mesh=device_mesh((world,)))
    fully_shard(model, mesh=device_mesh((world,)))
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.1, momentum=0.9) for either in (model, twin)]
    for step in range(3):
        torch.manual_seed(step)
        batch = torch.randn(world, 2, 4, 8, dtype=torch.float64)
        forward(batch[rank]).square().mean().backward()
        twin(batch.flatten(0, 1)).square().mean().backward()
        for (key, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor), f"step {step}: {key} has the gradient {ours.grad}"
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=f"{step} {key}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    # Without gradients some modules take another path, such as the fused kernel of attention.
    with torch.no_grad():
        model.eval(), twin.eval()
        inputs = batch[0]
        torch.testing.assert_close(forward(inputs), twin(inputs), rtol=1e-9, atol=1e-12)
    if compiled:
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("name", _SUBJECTS)
def test_trains_as_unsharded(name: str, compiled: bool, rank_pools: RankPools) -> None:
    if compiled and not _SUBJECTS[name].compiles:
        pytest.skip("torch.compile does not trace recurrent layers")
    rank_pools[2].run(train_subject, name=name, compiled=compiled)


# --- capture() ------------------------------------------------------------------------------------


def capture_graphs(shape: tuple[int, ...], lowering: str) -> tuple[list[str], list[bool]]:
    """Return graphs as text, equal for two compilations and on all ranks, and whether each graph has code."""
    torch.manual_seed(0)
    model = models.MLP(dim=5, hidden=7, out=3, layers=1)
    shard_units(model, device_mesh(shape), fully_shard)
    texts = []
    # Generating code is slow, and no graph depends on it.
    for _ in range(1 if lowering == "inductor" else 2):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
        with capture() as captured:
            compiled(torch.ones(2, 5)).sum().backward()
        # With gradients to add to, the next backward would have another plan.
        model.zero_grad()
        graphs = [*captured.forward, *captured.backward]
        assert (len(captured.forward), len(captured.backward)) == (1, 1)
        texts.append([graph.readable() for graph in graphs])
    assert texts[0] == texts[-1]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, texts[0])
    assert all(text == texts[0] for text in everywhere)
    if lowering == "inductor":
        assert all("all_gather" in graph.code for graph in captured.forward if graph.code)
        assert all("all_to_all_single" in graph.code for graph in captured.backward if graph.code)
    # Graphs after the block are not recorded.
    with torch.no_grad():
        compiled(torch.ones(2, 5))
    assert (len(captured.forward), len(captured.backward)) == (1, 1)
    return texts[0], [isinstance(graph.code, str) for graph in graphs]


@pytest.mark.units_apart
@pytest.mark.parametrize(
    ("shape", "lowering"),
    [
        ((2,), "aot_eager"),
        ((2,), "inductor"),
        pytest.param((2, 2), "aot_eager", marks=pytest.mark.night),
    ],
    ids=str,
)
def test_capture(shape: tuple[int, ...], lowering: str, rank_pools: RankPools) -> None:
    results = rank_pools[shape[0] * (shape[1] if len(shape) == 2 else 1)].run(capture_graphs, shape=shape, lowering=lowering)
    (forward, backward), has_code = results[0]
    assert has_code == [lowering == "inductor"] * 2
    gather = "_c10d_functional.all_gather_into_tensor.default("
    # Over Gloo, a reduce-scatter is an exchange.
    reduce = "_c10d_functional.all_to_all_single.default("
    gathers = [line for line in forward.splitlines() if gather in line]
    reductions = [line for line in backward.splitlines() if reduce in line]
    # Two units, the block and the root.
    assert len(gathers) == 2 and all("'shard'" in line for line in gathers)
    assert len(reductions) == 2 and all("'shard'" in line for line in reductions)
    replicated = [line for line in backward.splitlines() if "_c10d_functional.all_reduce" in line]
    assert len(replicated) == (2 if len(shape) == 2 else 0)
    assert all("'replicate'" in line for line in replicated)
    # Inputs are named after their parameters.
    assert "shard_blocks_0_up_weight" in forward and "shard_head_bias" in forward


def test_nested_captures(fake_ranks: None) -> None:
    """Captures may nest; each records what is lowered while it is open."""
    model = torch.compile(_sharded_mlp(), **_EAGER_LOWERING)
    with capture() as outer:
        with capture() as inner:
            output = model(torch.zeros(2, 8))
        output.sum().backward()
    assert (len(inner.forward), len(inner.backward)) == (1, 0)
    assert (len(outer.forward), len(outer.backward)) == (1, 1)
    assert outer.forward[0] is inner.forward[0]
    stages = {entry.stage for entry in outer.passes}
    assert stages == {"dynamo", "joint", "forward", "backward"}
    bucket = next(entry for entry in outer.passes if (entry.stage, entry.name) == ("forward", "bucket"))
    assert "fsdp_compile.unshard" in bucket.before and "fsdp_compile.unshard" not in bucket.after


def test_capture_ends_when_its_block_raises(fake_ranks: None) -> None:
    with pytest.raises(LookupError), capture() as captured:
        raise LookupError
    model = torch.compile(_sharded_mlp(), **_EAGER_LOWERING)
    model(torch.zeros(2, 8))
    assert not captured.forward


# --- Logs -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Logged:
    text: str
    trace: str


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> _Logged:
    """The passes' log and torch's structured trace of a process that trains for a step."""
    program = """
        import torch, torch.distributed as dist
        from torch.testing._internal.distributed.fake_pg import FakeStore
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
        from fsdp_compile import fsdp_backend, fully_shard
        model = fully_shard(torch.nn.Linear(4, 4))
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
        compiled(torch.ones(2, 4)).sum().backward()
        dist.destroy_process_group()
    """
    folder = tmp_path_factory.mktemp("trace")
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "TORCH_LOGS": "+passes", "TORCH_TRACE": str(folder)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return _Logged(done.stderr, "".join(path.read_text() for path in Path(folder).rglob("*.log")))


_PASSES = [
    ("dynamo", "deduplicate"),
    ("joint", "reshard_after_forward"),
    *[(stage, name) for stage in ("forward", "backward") for name in ("bucket", "flat_storage", "schedule")],
]


@pytest.mark.parametrize(("stage", "name"), _PASSES)
def test_log_of_passes(stage: str, name: str, logged: _Logged) -> None:
    for moment in ("before", "after"):
        assert f"fsdp_{stage}_{name}_{moment}:" in logged.text
        assert f'"name": "fsdp_{stage}_{name}_{moment}"' in logged.trace


def test_log_shows_graphs(logged: _Logged) -> None:
    _, _, bucketed = logged.text.partition("fsdp_forward_bucket_after:")
    assert "_c10d_functional.all_gather_into_tensor" in bucketed
    assert "def forward(" in bucketed
    assert "fsdp_compile.unshard.default" in logged.text and "fsdp_compile.unshard.default" in logged.trace


def test_cleared_gradients_are_freed(fake_ranks: None) -> None:
    model = _sharded_mlp()
    compiled = torch.compile(model, **_EAGER_LOWERING)
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
    slices = [grad_slice(param) for param in model.parameters()]
    held = [weakref.ref(param.grad._local_tensor) for param in model.parameters()]
    held += [weakref.ref(piece.flat) for piece in slices if piece is not None]
    assert len(held) == 2 * len(slices)
    del slices
    model.zero_grad()
    gc.collect()
    assert not any(ref() is not None for ref in held)


class _CastsInForward(nn.Module):
    """A model that casts a layer in its forward, as a router does to ensure its precision."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        self.linear = self.linear.to(torch.float64)
        return self.linear(x).square().sum()


def test_casting_to_the_same_dtype(one_rank: None) -> None:
    """A cast to the same dtype keeps parameters, to which guards of the compiled graph refer, in forward and outside."""
    torch.manual_seed(0)
    alone = _CastsInForward()
    model = fully_shard(copy.deepcopy(alone), mesh=init_device_mesh("cpu", (1,)))
    compiled = torch.compile(model, fullgraph=True, **_EAGER_LOWERING)
    params = list(model.parameters())
    for step in range(2):
        x = torch.randn(3, 4, dtype=torch.float64)
        alone.zero_grad()
        model.zero_grad()
        alone(x).backward()
        compiled(x).backward()
        for ours, theirs in zip(params, alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)  # type: ignore[union-attr]
        grads = [param.grad for param in params]
        assert model.to(torch.float64) is model
        assert all(ours is param for ours, param in zip(model.parameters(), params, strict=True))
        assert all(param.grad is grad for param, grad in zip(params, grads, strict=True)), step


def test_casting_gradients_alone(one_rank: None) -> None:
    """``_apply`` may change gradients with a function that leaves parameters as they are."""
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    model(torch.ones(2, 4)).sum().backward()
    grad = model.weight.grad.full_tensor()
    weight = model.weight
    model._apply(lambda tensor: tensor if isinstance(tensor, nn.Parameter) else 2 * tensor)
    assert model.weight is weight
    torch.testing.assert_close(model.weight.grad.full_tensor(), 2 * grad)
