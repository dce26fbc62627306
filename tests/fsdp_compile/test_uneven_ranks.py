"""Ranks that use different parts of a model in one step, with the same units called: they train as with FSDP2."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

from fsdp_compile import RanksDisagree, fsdp_backend, fully_shard, optimizer_in_backward
from fsdp_compile.debug import capture
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import count_collectives
from tests.common.models import Block


class TowersFirst(nn.Module):
    """One rank has an image, and reads the tower first; another has none, and runs the tower on a dummy, after the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.towers = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def towered(self, image: Tensor) -> Tensor:
        for tower in self.towers:
            image = tower(image)
        return image

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        if variant:
            x = self.towered(image)
            x = x + self.tokens(tokens)
        else:
            x = self.tokens(tokens)
            x = x + 0.0 * self.towered(torch.zeros_like(image))
        return self.head(x)


class TwoHeads(nn.Module):
    """A head that only some ranks read, in the root's unit, and a parameter in a unit that all ranks call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.towers = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(8, 11)
        self.boxes = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.tokens(tokens)
        for tower in self.towers:
            x = tower(x, variant)
        logits = self.head(x)
        return torch.cat([logits, self.boxes(x)], -1) if variant else logits


class Gated(Block):
    """A block with gates that only some ranks read, and whose gradient is a permuted product."""

    def __init__(self) -> None:
        super().__init__(8, 12)
        self.gates = nn.Parameter(torch.randn(3, 8, 8) / 8)

    def forward(self, x: Tensor, is_gated: bool = False) -> Tensor:
        x = super().forward(x)
        return x * torch.sigmoid(torch.einsum("...d,edf->...ef", x, self.gates)).mean(-2) if is_gated else x


class Experts(Block):
    """Experts in a loop over those that tokens reach, which breaks graphs, as in Switch Transformers."""

    def __init__(self) -> None:
        super().__init__(8, 12)
        self.experts = nn.ModuleList(Block(8, 12) for _ in range(4))

    def forward(self, x: Tensor, variant: bool = False) -> Tensor:
        chosen = (x.sum(-1) > 0).long() + 2 * variant
        for index in chosen.unique().tolist():
            x = torch.where((chosen == index).unsqueeze(-1), self.experts[index](x), x)
        return super().forward(x)


class ExpertTowers(TwoHeads):
    """Experts that only some ranks read, in units that are not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(Experts() for _ in range(2))


class NoRows(TwoHeads):
    """One rank has no rows: torch computes the gradients of a norm without parameters then."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh()) for _ in range(2))

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.tokens(tokens).flatten(0, 1)
        for tower in self.towers:
            x = tower(x[:0] if variant else x)
        return torch.cat([self.head(x), self.boxes(x)], -1)


class OtherBranch(TowersFirst):
    """The ranks compute other things with the same parameters."""

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.towered(self.tokens(tokens))
        x = torch.tanh(x) if variant else x.sigmoid().square() - x
        return self.head(x)


class OtherSizes(TowersFirst):
    """One rank has no tokens at all."""

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.towered(self.tokens(tokens[:0] if variant else tokens))
        return self.head(x)


class OneRow(TowersFirst):
    """One rank has a single row. Inductor decomposes small products of one row, and so recomputes what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.towers = nn.ModuleList([nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8), nn.Linear(8, 8)])

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        return self.towered(image.flatten(0, 1)[: 1 if variant else None]) + 0.0 * self.head(self.tokens(tokens)).sum()


MODELS: dict[str, Callable[[], nn.Module]] = {
    "another reader first": TowersFirst,
    "parameters that some ranks read": TwoHeads,
    "experts in a loop": ExpertTowers,
    "no rows": NoRows,
    "one row": OneRow,
    "another branch": OtherBranch,
    "no tokens": OtherSizes,
}


def shard_all(model: nn.Module, shard: Callable[..., Any], mesh: Any) -> Any:
    for tower in model.towers:  # type: ignore[union-attr]
        shard(tower, mesh=mesh, reshard_after_forward=True)
        if isinstance(tower, Experts):
            tower.forward = torch.compiler.disable(tower.forward)
    shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(isinstance(model, TwoHeads))  # type: ignore[operator]
    return model


#: By name: options of ``fsdp_backend``; None: not compiled.
SYSTEMS: dict[str, dict[str, Any] | None] = {
    "uncompiled": None,
    "aot_eager": {"lowering": "aot_eager"},
    "unit by unit": {"lowering": "aot_eager", "min_bucket_bytes": 0},
    "in backward": {"lowering": "aot_eager"},
    "inductor": {},
}


def train_unevenly(kind: str, mesh_shape: tuple[int, ...], system: str, neighbours: int = 1) -> None:
    """Take steps with the library and with FSDP2, which is not compiled, and compare gradients. Runs on every rank.

    Args:
        kind: the name of a model.
        mesh_shape: the shape of the mesh.
        system: the name of a system.
        neighbours: the number of neighbouring ranks that use the same parameters.
    """
    rank, mesh = dist.get_rank(), device_mesh(mesh_shape)
    is_odd = rank // neighbours % 2 == 1
    models = []
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        torch.manual_seed(0)
        models.append(shard_all(MODELS[kind]().double(), shard, mesh))
    ours, theirs = models
    options = SYSTEMS[system]
    forward = ours if options is None else torch.compile(ours, backend=fsdp_backend, options=options)
    is_in_backward = system == "in backward"
    make_optimizer: Any = functools.partial(optimizer_in_backward, torch.optim.AdamW) if is_in_backward else torch.optim.AdamW
    optimizers = [make(model.parameters(), lr=1e-2) for make, model in ((make_optimizer, ours), (torch.optim.AdamW, theirs))]
    for step in range(4):
        # In the third step the ranks are alike, and in the fourth the other way round.
        variant = is_odd if step < 2 else (True if step == 2 else not is_odd)
        for last in (False, True):
            torch.manual_seed(20 * step + 10 * last + rank)
            tokens, image = torch.randint(11, (3, 5)), torch.randn(3, 5, 8, dtype=torch.float64)
            for model, call in ((ours, forward), (theirs, theirs)):
                model.set_requires_gradient_sync(last)
                call(tokens, image, variant).square().sum().backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None or is_in_backward), (step, name)
            if one.grad is not None:
                torch.testing.assert_close(
                    one.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-9, atol=1e-12, msg=f"{step} {name}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.full_tensor(), other.full_tensor(), rtol=1e-9, atol=1e-12, msg=name)


def _parameters() -> list[Any]:
    """Return the cases: every model on two ranks, one model in every system, and the other pairs on one mesh each."""
    parameters = []
    for number, (kind, system) in enumerate(itertools.product(MODELS, SYSTEMS)):
        is_plain = system in ("uncompiled", "aot_eager")
        # With Inductor at night: there is nothing uneven in its kernels.
        is_unit = kind == "parameters that some ranks read" and system != "inductor"
        fixed = [(2,)] * (is_plain or is_unit) + [(2, 2)] * (is_unit and system == "aot_eager")
        for mesh_shape in dict.fromkeys([*fixed, ((2,), (2, 2))[number % 2]]):
            marks = [pytest.mark.inductor] if system == "inductor" else []
            if mesh_shape not in fixed:
                marks.append(pytest.mark.night)
            name = "fsdp" if mesh_shape == (2,) else "hsdp"
            parameters.append(pytest.param(kind, system, mesh_shape, id=f"{kind}-{system}-{name}", marks=marks))
    return parameters


@pytest.mark.parametrize(("kind", "system", "mesh_shape"), _parameters())
def test_train_as_with_fsdp2(kind: str, system: str, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = torch.Size(mesh_shape).numel()
    rank_pools[world].run(train_unevenly, kind=kind, mesh_shape=mesh_shape, system=system)


@pytest.mark.parametrize(
    "kind", ["another reader first", pytest.param("parameters that some ranks read", marks=pytest.mark.night)]
)
def test_replicas_differ(kind: str, rank_pools: RankPools) -> None:
    """Ranks that shard together are alike, and replicas are not."""
    rank_pools[4].run(train_unevenly, kind=kind, mesh_shape=(2, 2), system="unit by unit", neighbours=2)


class Measured(nn.Module):
    """Gives a detached result beside another, and has a parameter that it never reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.unused = nn.Linear(8, 8), nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = self.layer(x)
        return {"x": x, "norm": x.detach().norm(), "rows": len(x), "largest": x.argmax()}


@pytest.mark.parametrize("compiled", [False, True])
def test_other_results_stay_as_they_are(compiled: bool, fake_ranks: None) -> None:
    model: Any = fully_shard(Measured())
    model.set_reduce_scatter_unused_params(True)
    forward = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) if compiled else model
    found = forward(torch.randn(3, 8))
    assert (found["x"].requires_grad, found["norm"].requires_grad, found["rows"]) == (True, False, 3)
    found["x"].sum().backward()
    assert not model.unused.grad.to_local().any()
    with torch.no_grad():
        assert not forward(torch.randn(3, 8))["x"].requires_grad


class OrderOfCalls(nn.Module):
    """Ranks call units in opposite orders."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.units = nn.ModuleList(nn.Linear(8, 8) for _ in range(units))

    def forward(self, x: Tensor, variant: bool) -> Tensor:
        for unit in reversed(self.units) if variant else self.units:
            x = torch.tanh(unit(x))
        return x


def train_in_other_order(units: int) -> str:
    """Take a step in which ranks call units in opposite orders. Return the error, or the largest error of a gradient."""
    rank, mesh = dist.get_rank(), device_mesh((2,))
    torch.manual_seed(0)
    model: Any = OrderOfCalls(units).double()
    reference = copy.deepcopy(model)
    for unit in (*model.units, model):
        fully_shard(unit, mesh=mesh)
    options = {"lowering": "aot_eager", "min_bucket_bytes": 0}
    compiled = torch.compile(model, backend=fsdp_backend, options=options)
    # With a gradient, so that backward reads the weights of every unit.
    batches = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
    try:
        compiled(batches[rank], rank == 1).square().sum().backward()
    except RanksDisagree as error:
        return str(error)
    sum(reference(batch, other == 1).square().sum() / 2 for other, batch in enumerate(batches)).backward()
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return f"{max((one.grad.full_tensor() - other.grad).abs().max().item() for one, other in pairs):.0e}"


def test_units_in_another_order(rank_pools: RankPools) -> None:
    """Two units may come in any order. Of three, one would be reduced before a gather that its gradient needs."""
    assert all(float(found) < 1e-12 for found in rank_pools[2].run(train_in_other_order, units=2))
    for found in rank_pools[2].run(train_in_other_order, units=4):
        assert "about to run different programs" in found


def recompile_alone() -> list[int]:
    """Return the number of graphs that this rank lowered in each of four steps. Runs on every rank.

    In the third step, one rank has an image for the first time, and compiles alone.
    """
    rank, mesh = dist.get_rank(), device_mesh((2,))
    torch.manual_seed(0)
    model = shard_all(TowersFirst(), fully_shard, mesh)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "min_bucket_bytes": 0})
    lowered = []
    for step in range(4):
        with capture() as captured:
            compiled(torch.randint(11, (3, 5)), torch.randn(3, 5, 8), rank == 1 and step >= 2).square().sum().backward()
        lowered.append(len(captured.forward) + len(captured.backward))
        model.zero_grad()
    return lowered


def test_a_rank_that_compiles_alone_follows_the_others(rank_pools: RankPools) -> None:
    assert rank_pools[2].run(recompile_alone) == [[2, 0, 0, 0], [2, 0, 2, 0]]


def take_known_order() -> list[float]:
    """Return the largest error of a gradient in each of three steps. Runs on every rank.

    In the first step, ranks agree on an order of calls; in the second one, which adds to gradients of a microbatch without
    sync, on the opposite one. In the third step, which does as the first, each rank has one of the two.
    """
    rank, mesh = dist.get_rank(), device_mesh((2,))
    torch.manual_seed(0)
    model: Any = OrderOfCalls(2).double()
    reference = copy.deepcopy(model)
    for unit in (*model.units, model):
        fully_shard(unit, mesh=mesh)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "min_bucket_bytes": 0})
    errors = []
    for microbatches, variants in [(1, (False, False)), (2, (True, True)), (1, (True, False))]:
        for left in reversed(range(microbatches)):
            model.set_requires_gradient_sync(left == 0)
            batches = torch.randn(2, 3, 8, dtype=torch.float64, requires_grad=True)
            compiled(batches[rank], variants[rank]).square().sum().backward()
            sum(reference(*each).square().sum() / 2 for each in zip(batches, variants, strict=True)).backward()
        pairs = zip(model.parameters(), reference.parameters(), strict=True)
        errors.append(max((one.grad.full_tensor() - other.grad).abs().max().item() for one, other in pairs))
        model.zero_grad()
        reference.zero_grad()
    return errors


def test_an_order_that_is_known_for_other_graphs(rank_pools: RankPools) -> None:
    assert all(error < 1e-12 for errors in rank_pools[2].run(take_known_order) for error in errors)


def gathers_by_options() -> list[int]:
    """Return the number of gathers in a forward of one model, compiled with small units merged, apart, and merged again."""
    torch.manual_seed(0)
    model = shard_all(TowersFirst(), fully_shard, device_mesh((2,)))
    inputs = torch.randint(11, (3, 5)), torch.randn(3, 5, 8), True
    counts = []
    for least in (1 << 20, 0, 1 << 20):
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "min_bucket_bytes": least})
        with count_collectives() as counted:
            compiled(*inputs)
        counts.append(counted.all_gather)
    return counts


def test_other_options_mean_other_buckets(rank_pools: RankPools) -> None:
    """Buckets follow the options of a compilation, not what ranks agreed on under other options."""
    assert rank_pools[2].run(gathers_by_options) == [[1, 3, 1]] * 2
