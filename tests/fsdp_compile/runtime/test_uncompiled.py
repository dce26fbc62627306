"""Units in uncompiled forwards: they communicate as FSDP2's do, and one unit is in memory at a time."""

from __future__ import annotations

import gc
import logging
import weakref
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.autograd.graph import save_on_cpu
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from fsdp_compile import GatherPolicy, fsdp_backend, fully_shard
from fsdp_compile.runtime.uncompiled import Gathered, state_of
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import FullyShard, shard_units
from tests.fsdp_compile.test_parity import CASES

pytestmark = pytest.mark.units_apart

# Gloo has no reduce-scatter; an all-to-all takes its place.
_KINDS = {
    "_allgather_base_": "gather",
    "all_gather_into_tensor": "gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "reduce_scatter_tensor": "reduce-scatter",
    "all_to_all_single": "reduce-scatter",
    "allreduce_": "all-reduce",
    "all_reduce": "all-reduce",
}


class _Counts(TorchDispatchMode):
    """A counter of collectives. ``CommDebugMode`` goes wrong if a module is called twice or recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._overloadpacket._qualified_op_name.split("::")
        if "c10d" in namespace and name in _KINDS:
            self.kinds[_KINDS[name]] += 1
        return func(*args, **(kwargs or {}))


def counted(work: Callable[[], Any]) -> dict[str, int]:
    """Return the numbers of collectives that ``work`` issues, by kind."""
    with _Counts() as counts:
        work()
    return dict(counts.kinds)


# --- As FSDP2 -------------------------------------------------------------------------------------


def change_reshard(
    fully_shard: FullyShard, before: bool | int, after: bool, gather_policy: GatherPolicy | None = None
) -> list[torch.Tensor]:
    """Return gradients of a step with checkpoints around units.

    ``set_reshard_after_forward`` is called between forward and backward.
    """
    torch.manual_seed(0)
    model: Any = models.MLP(checkpointed=True)
    policy = {"gather_policy": gather_policy} if gather_policy else {}
    shard_units(model, device_mesh((dist.get_world_size(),)), fully_shard, reshard_after_forward=before, **policy)
    loss = model(torch.ones(3, 8)).square().sum()
    model.set_reshard_after_forward(after)
    loss.backward()
    return [param.grad.full_tensor() for param in model.parameters()]


def change_reshard_in_both(before: bool | int, after: bool) -> None:
    """Compare with FSDP2, and rounded gathers with a run in which the flag stays. Every rank calls this."""
    theirs = change_reshard(torch.distributed.fsdp.fully_shard, bool(before), not before)
    torch.testing.assert_close(change_reshard(fully_shard, before, after), theirs)
    policy, kept = GatherPolicy(torch.int8), bool(before)
    rounded = change_reshard(fully_shard, kept, kept, policy)
    torch.testing.assert_close(change_reshard(fully_shard, before, after, policy), rounded)


@pytest.mark.parametrize(
    ("before", "after", "world"), [(True, False, 2), (False, True, 2), (2, True, 4), (2, False, 4)], ids=str
)
def test_reshard_after_forward_changes_between_forward_and_backward(
    before: bool | int, after: bool, world: int, rank_pools: RankPools
) -> None:
    rank_pools[world].run(change_reshard_in_both, before=before, after=after)


def communicate(name: str, fully_shard: FullyShard) -> list[dict[str, int]]:
    """Return the collectives of two steps of a case of ``test_parity.py``: forward, backward, forward, backward."""
    case = CASES[name]
    torch.manual_seed(0)
    model = case.build()
    world = dist.get_world_size()
    shape = (case.replicas, world // case.replicas) if case.replicas > 1 else (world,)
    case.shard(model, device_mesh(shape), fully_shard)
    optimizer = case.optimizer(model.parameters())
    counts = []
    for step in range(2):
        losses: list[Tensor] = []
        batch = case.batch(step, dist.get_rank(), world)
        counts.append(counted(lambda batch=batch, losses=losses: losses.append(case.loss(model, batch))))
        counts.append(counted(losses[0].backward))
        optimizer.step()
        optimizer.zero_grad()
    return counts


def communicate_as_fsdp2(names: list[str]) -> dict[str, tuple[Any, Any]]:
    systems = (fully_shard, torch.distributed.fsdp.fully_shard)
    return {name: tuple(communicate(name, system) for system in systems) for name in names}  # type: ignore[misc]


_TWO = [
    *("mlp", "uneven", "reshard_true", "reshard_false", "frozen_in_part", "unused_parameter", "bf16_mlp"),
    *("tied_in_root", "recurrent", "checkpoint_around_units", "checkpoint_inside_units", "list_of_modules"),
    *("outermost_units", "keywords_and_tuples", "shared_weight", "reads_child", "sgd_root_only", "ignored_params"),
]
_FOUR = ["reshard_int", "hsdp", "fewer_rows_than_ranks"]


@pytest.mark.parametrize(("world", "names"), [(2, _TWO), (4, _FOUR)], ids=["two ranks", "four ranks"])
def test_communicates_as_fsdp2(world: int, names: list[str], rank_pools: RankPools) -> None:
    for counts in rank_pools[world].run(communicate_as_fsdp2, names=names):
        ours, theirs = ({name: pair[index] for name, pair in counts.items()} for index in (0, 1))
        assert ours == theirs


def seen_by_torchs_mode(compile_model: str) -> tuple[dict[str, int], dict[str, int]]:
    """Count what ``CommDebugMode`` sees. It reads the parameters of each module in a hook before the module's forward."""
    model: Any = nn.Sequential(models.Block(8, 16), nn.Linear(8, 8), nn.Linear(8, 4))
    for module in (*model[:2], model):
        fully_shard(module, mesh=device_mesh((2,)))
    forward = model
    if compile_model == "in place":
        model.compile(backend=fsdp_backend, options={"lowering": "aot_eager"})
    elif compile_model == "wrapped":
        forward = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with CommDebugMode() as in_forward:
        loss = forward(torch.ones(3, 8)).sum()
    with CommDebugMode() as in_backward:
        loss.backward()
    first, second = ({str(op): number for op, number in mode.get_comm_counts().items()} for mode in (in_forward, in_backward))
    return first, second


@pytest.mark.parametrize("compile_model", ["not", "in place", "wrapped"])
def test_torchs_mode_sees_each_unit(compile_model: str, rank_pools: RankPools) -> None:
    """Dynamo compiles nothing in the mode, so all runs uncompiled."""
    for forward, backward in rank_pools[2].run(seen_by_torchs_mode, compile_model=compile_model):
        assert forward == {"c10d_functional.all_gather_into_tensor": 3}
        assert backward == {"c10d_functional.all_gather_into_tensor": 2, "c10d_functional.all_to_all_single": 3}


def test_hooks_before_a_units_forward(one_rank: None) -> None:
    """Hooks of all modules see DTensors, as they run before FSDP2 gathers. Hooks of the module itself see full parameters."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model[1])
    fully_shard(model)
    seen: list[tuple[str, type]] = []

    def note(by: str, module: nn.Module) -> None:
        seen.extend((by, type(param)) for param in (module.weight, next(module.parameters())))

    own = model[1].register_forward_pre_hook(lambda module, _: note("own", module))
    of_all = register_module_forward_pre_hook(lambda module, _: note("all", module) if module is not model else None)
    with own, of_all:
        model(torch.randn(2, 8)).sum().backward()
    full, sharded = Tensor, DTensor
    # The first layer belongs to the root, which is gathered by then.
    assert seen == [("all", full)] * 2 + [("all", sharded)] * 2 + [("own", full)] * 2


def accumulate(fully_shard: FullyShard, reshard_after_forward: bool | None, keep: bool, scatter_only: bool) -> list[Any]:
    """Return the collectives of three microbatches, of which the last synchronises."""
    torch.manual_seed(0)
    model: Any = models.MLP()
    world = dist.get_world_size()
    shape = (2, world // 2) if scatter_only else (world,)
    shard_units(model, device_mesh(shape), fully_shard, reshard_after_forward=reshard_after_forward)
    counts = []
    for micro in range(3):
        is_last = micro == 2
        if scatter_only:
            model.set_requires_all_reduce(is_last)
        else:
            model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last or not keep)
        counts.append(counted(lambda: model(torch.ones(3, 8)).sum().backward()))
    return counts


def accumulate_as_fsdp2(**flags: bool) -> list[Any]:
    return [accumulate(system, **flags) for system in (fully_shard, torch.distributed.fsdp.fully_shard)]


@pytest.mark.parametrize(
    ("world", "flags"),
    [
        (2, {"reshard_after_forward": True, "keep": False, "scatter_only": False}),
        (2, {"reshard_after_forward": False, "keep": False, "scatter_only": False}),
        (2, {"reshard_after_forward": False, "keep": True, "scatter_only": False}),
        (4, {"reshard_after_forward": True, "keep": False, "scatter_only": True}),
    ],
    ids=["reshard", "no reshard after forward", "no reshard", "replicas"],
)
def test_accumulates_as_fsdp2(world: int, flags: dict[str, bool], rank_pools: RankPools) -> None:
    for ours, theirs in rank_pools[world].run(accumulate_as_fsdp2, **flags):
        assert ours == theirs


# --- Memory ---------------------------------------------------------------------------------------


class _Watched(nn.Module):
    """A block that records how many full weights are alive when its forward and its backward run."""

    def __init__(self, alive: list[int]) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.alive = alive

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).tanh()
        self.alive.append(_full_weights())
        x.register_hook(lambda _: self.alive.append(_full_weights()))
        return x


_weights: list[weakref.ref[Tensor]] = []
_fill = Gathered.fill


def _noted(gathered: Gathered) -> None:
    _fill(gathered)
    _weights.extend(weakref.ref(full.untyped_storage()) for full in gathered.fulls.values())


def _full_weights() -> int:
    gc.collect()
    # Biases, of 8 elements, do not count.
    return len({storage._cdata for ref in _weights if (storage := ref()) is not None and storage.nbytes() > 8 * 4})


def memory(around: str, frozen: bool, tensor_parallel: bool = False) -> tuple[list[int], int]:
    """Return how many full weights of a chain of blocks are alive in each forward and backward, and after them."""
    alive: list[int] = []
    model: Any = nn.Sequential(*(_Watched(alive) for _ in range(4)))
    model.requires_grad_(not frozen)
    if tensor_parallel:
        whole = device_mesh((2, 2), ("dp", "tp"))
        mesh = whole["dp"]
        for block in model:
            parallelize_module(block, whole["tp"], {"linear": ColwiseParallel(output_layouts=Replicate())})
    else:
        mesh = device_mesh((2,))
    for block in model:
        fully_shard(block, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    Gathered.fill = _noted  # type: ignore[method-assign]
    try:
        x = torch.ones(2, 8, requires_grad=True)
        if around == "save_on_cpu":
            with save_on_cpu():
                y = model(x)
        elif around == "checkpoint":
            y = x
            for block in model:
                y = checkpoint(block, y, use_reentrant=False)
        else:
            y = model(x)
        y.sum().backward()
    finally:
        Gathered.fill = _fill  # type: ignore[method-assign]
    del y
    return alive, _full_weights()


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("around", ["nothing", "save_on_cpu", "checkpoint"])
def test_one_unit_is_in_memory_at_a_time(around: str, frozen: bool, rank_pools: RankPools) -> None:
    _assert_one_unit_at_a_time(rank_pools[2].run(memory, around=around, frozen=frozen))


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("around", ["nothing", "save_on_cpu", "checkpoint"])
def test_one_tensor_parallel_unit_is_in_memory_at_a_time(around: str, frozen: bool, rank_pools: RankPools) -> None:
    _assert_one_unit_at_a_time(rank_pools[4].run(memory, around=around, frozen=frozen, tensor_parallel=True))


def _assert_one_unit_at_a_time(found: list[tuple[list[int], int]]) -> None:
    for alive, afterwards in found:
        # The first four are forwards. In backward, none may be alive: a gradient arrives before the gather that it causes.
        assert alive[:4] == [1, 1, 1, 1]
        assert max(alive) == 1
        assert afterwards == 0


def reshard_by_hand(fully_shard: FullyShard) -> tuple[list[Any], list[Tensor]]:
    """Run FSDP2's test_manual_reshard_with_reshard_after_forward_false. Return collectives and gradients."""
    torch.manual_seed(0)
    model: Any = models.MLP()
    shard_units(model, device_mesh((2,)), fully_shard, reshard_after_forward=False)
    losses: list[Tensor] = []
    counts = [counted(lambda: losses.append(model(torch.ones(3, 8)).square().sum()))]
    for unit in (*model.blocks, model):
        unit.reshard()
    counts.append(counted(losses[0].backward))
    return counts, [parameter.grad.full_tensor() for parameter in model.parameters()]


def reshard_as_fsdp2() -> list[Any]:
    return [reshard_by_hand(system) for system in (fully_shard, torch.distributed.fsdp.fully_shard)]


def test_reshard_between_forward_and_backward(rank_pools: RankPools) -> None:
    for (counts, gradients), (expected, theirs) in rank_pools[2].run(reshard_as_fsdp2):
        assert counts == expected
        torch.testing.assert_close(gradients, theirs, rtol=0, atol=0)


def keep_outputs(fully_shard: FullyShard, reshard_after_forward: bool | int | None) -> list[dict[str, int]]:
    """Return the collectives of some forwards and backwards, of which rank 0 keeps the outputs of all, others of none."""
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, device_mesh((dist.get_world_size(),)), fully_shard, reshard_after_forward=reshard_after_forward)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    kept, counts = [], []
    gc.collect()
    gc.disable()
    try:
        for does in ("forward", "forward", "backward", "forward", "evaluate", "backward", "forward", "step", "backward"):
            if does == "step":
                counts.append(counted(optimizer.step))
                continue
            with torch.set_grad_enabled(does != "evaluate"), _Counts() as seen:
                output = model(torch.ones(2, 8))
                if does == "backward":
                    output.sum().backward()
            counts.append(dict(seen.kinds))
            # A cycle, as code that catches exceptions makes.
            cycle = [output]
            cycle.append(cycle)
            if dist.get_rank() == 0:
                kept.append(cycle)
            else:
                del output, cycle
                gc.collect()
    finally:
        gc.enable()
    return counts


def keep_outputs_in_both(reshard_after_forward: bool | int | None) -> tuple[Any, ...]:
    systems = (fully_shard, torch.distributed.fsdp.fully_shard)
    return tuple(keep_outputs(system, reshard_after_forward) for system in systems)  # type: ignore[arg-type]


@pytest.mark.parametrize(("reshard_after_forward", "world"), [(None, 2), (False, 2), (2, 4)])
def test_outputs_that_a_rank_keeps(reshard_after_forward: bool | int | None, world: int, rank_pools: RankPools) -> None:
    """Ranks gather at the same times, however long each keeps the output of a forward without a backward."""
    results = rank_pools[world].run(keep_outputs_in_both, reshard_after_forward=reshard_after_forward)
    for ours, theirs in results:
        assert ours == results[0][0]
        # FSDP2 reads old values after a step.
        assert ours[:-1] == theirs[:-1]


# --- What forwards read ---------------------------------------------------------------------------


def _unit(**options: Any) -> Any:
    return fully_shard(models.Block(8, 16), mesh=device_mesh((2,)), **options)


def gathers_of(name: str) -> dict[str, int]:
    return counted(partial(globals()[f"_{name}"], _unit(reshard_after_forward=True)))


def _evaluation(unit: Any) -> None:
    with torch.no_grad():
        unit(torch.ones(2, 8))


def _partly_without_gradients(unit: Any) -> None:
    twin = models.Block(8, 16)
    twin.load_state_dict({name: tensor.full_tensor() for name, tensor in unit.state_dict().items()})

    def forward(block: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = block.up(x)
        return block.down(x)

    type(unit).forward_in_parts = lambda self, x: forward(self, x)
    torch.distributed.fsdp.register_fsdp_forward_method(unit, "forward_in_parts")
    unit.forward_in_parts(torch.ones(2, 8)).sum().backward()
    forward(twin, torch.ones(2, 8)).sum().backward()
    for ours, theirs in zip(unit.parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None)
        if theirs.grad is not None:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def _twice_through_one_graph(unit: Any) -> None:
    loss = unit(torch.ones(2, 8)).square().sum()
    loss.backward(retain_graph=True)
    first = [parameter.grad.full_tensor() for parameter in unit.parameters()]
    loss.backward()
    for parameter, once in zip(unit.parameters(), first, strict=True):
        torch.testing.assert_close(parameter.grad.full_tensor(), 2 * once)


def _an_error_in_forward(unit: Any) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        unit(torch.ones(2, 7))
    assert state_of(unit._fsdp_unit).reading is None
    assert unit._fsdp_unit.scope.uncompiled_depth == 0
    unit(torch.ones(2, 8)).sum().backward()


@pytest.mark.parametrize(
    ("name", "gathers", "reductions"),
    [
        ("evaluation", 1, 0),
        ("partly_without_gradients", 2, 1),
        ("twice_through_one_graph", 3, 2),
        ("an_error_in_forward", 3, 1),
    ],
)
def test_gathers_and_reductions(name: str, gathers: int, reductions: int, rank_pools: RankPools) -> None:
    for counts in rank_pools[2].run(gathers_of, name=name):
        assert counts.get("reduce-scatter", 0) == reductions
        # More gathers are those of ``full_tensor()`` in the functions above.
        assert counts["gather"] >= gathers


def gradient_of_the_input_alone() -> None:
    unit = _unit(reshard_after_forward=True)
    x = torch.ones(2, 8, requires_grad=True)
    y = unit(x).sum()
    gathered = unit._fsdp_unit.gathered
    torch.autograd.grad(y, x)
    assert all(parameter.grad is None for parameter in unit.parameters())
    assert gathered.fulls == {}


def test_gradient_of_the_input_alone(rank_pools: RankPools) -> None:
    """Parameters are freed although no reduction runs, whose end frees them otherwise."""
    rank_pools[2].run(gradient_of_the_input_alone)


def backward_may_not_gather() -> tuple[str, dict[str, int]]:
    unit = _unit(reshard_after_forward=True)
    unit.set_unshard_in_backward(False)
    with pytest.raises(RuntimeError) as caught:
        unit(torch.ones(2, 8)).sum().backward()
    bias = fully_shard(_Bias(), mesh=device_mesh((2,)), reshard_after_forward=True)
    bias.set_unshard_in_backward(False)
    counts = counted(lambda: bias(torch.ones(2, 8)).sum().backward())
    return str(caught.value), counts


class _Bias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


def test_backward_may_do_without(rank_pools: RankPools) -> None:
    for message, counts in rank_pools[2].run(backward_may_not_gather):
        assert "down.weight" in message and "set_unshard_in_backward" in message
        assert counts == {"gather": 1, "reduce-scatter": 1}


class SharesTable(nn.Module):
    """A model that passes a parameter of the root to checkpointed blocks, as DeBERTa does."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 8)

        def forward(self, x: Tensor, table: Tensor) -> Tensor:
            return self.linear(x @ table.t()).tanh()

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(6, 8))
        self.blocks = nn.ModuleList(self.Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, table=self.table, use_reentrant=False)
        return x


def share_a_table() -> None:
    torch.manual_seed(0)
    twin, model = SharesTable(), SharesTable()
    model.load_state_dict(twin.state_dict())
    shard_units(model, device_mesh((2,)), fully_shard, reshard_after_forward=True)
    for system in (model, twin):
        system(torch.ones(2, 8)).sum().backward()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_blocks_are_given_a_parameter_of_the_root(rank_pools: RankPools) -> None:
    rank_pools[2].run(share_a_table)


def write_between() -> str:
    unit = _unit(reshard_after_forward=True)
    optimizer = torch.optim.SGD(unit.parameters(), lr=0.1)
    first, second = (unit(torch.ones(2, 8)).square().sum() for _ in range(2))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError) as caught:
        second.backward()
    return str(caught.value)


def test_a_parameter_that_was_written_between(rank_pools: RankPools) -> None:
    """Backward raises, as torch does. FSDP2 would use the new values, and its gradients would fit neither old nor new ones."""
    for message in rank_pools[2].run(write_between):
        assert "Parameter up.weight was written after a forward whose backward needs it" in message


def others_may_step() -> None:
    """Step another model's optimizer between forward and backward, as a GAN does."""
    unit = _unit(reshard_after_forward=True)
    other = nn.Linear(2, 2)
    loss = unit(torch.ones(2, 8)).square().sum()
    other(torch.ones(2, 2)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    loss.backward()


def test_other_optimizers_may_step_between(rank_pools: RankPools) -> None:
    rank_pools[2].run(others_may_step)


class Saved(nn.Module):
    """Two layers around an operator that saves its own output, which is changed in place if asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)
        self.changes = False
        self.hidden: weakref.ref[Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.up(x))
        self.hidden = weakref.ref(hidden)
        x = self.down(hidden)
        if self.changes:
            hidden.add_(1)
        return x


@pytest.mark.parametrize("shard", [fully_shard, torch.distributed.fsdp.fully_shard], ids=["here", "fsdp2"])
def test_saved_tensors_of_a_forward_go_with_its_loss(shard: FullyShard, one_rank: None) -> None:
    model: Any = nn.Sequential(Saved())
    shard(model[0])
    shard(model)
    loss = model(torch.ones(3, 8)).sum()
    del loss
    gc.collect()
    assert model[0].hidden() is None


@pytest.mark.parametrize("shard", [fully_shard, torch.distributed.fsdp.fully_shard], ids=["here", "fsdp2"])
def test_saved_tensors_that_are_changed_in_place_raise(shard: FullyShard, one_rank: None) -> None:
    model: Any = nn.Sequential(Saved())
    model[0].changes = True
    shard(model[0])
    shard(model)
    loss = model(torch.ones(3, 8)).sum()
    with pytest.raises(RuntimeError, match=r"modified by an inplace operation: .* is at version 1; expected version 0"):
        loss.backward()


class Experts(nn.Module):
    """A model that uses the expert that each rank passes, as a router would choose."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: Tensor, expert: int) -> Tensor:
        return self.experts[expert](x)


def use_other_experts(fully_shard: FullyShard) -> list[Tensor]:
    torch.manual_seed(0)
    model = fully_shard(Experts(), mesh=device_mesh((2,)))
    model.set_reduce_scatter_unused_params(True)
    model(torch.ones(2, 4), dist.get_rank()).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


def use_other_experts_as_fsdp2() -> list[list[Tensor]]:
    return [use_other_experts(system) for system in (fully_shard, torch.distributed.fsdp.fully_shard)]


@pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp.FSDPModule, "set_reduce_scatter_unused_params"), reason="FSDP2 has no such flag"
)
def test_ranks_may_use_other_parameters(rank_pools: RankPools) -> None:
    for ours, theirs in rank_pools[2].run(use_other_experts_as_fsdp2):
        torch.testing.assert_close(ours, theirs)
        assert [bool(gradient.any()) for gradient in ours] == [True, True, False]


class _Logs(nn.Module):
    """Its forward breaks the graph, and cannot be resumed after that, as a unit's forward is in a ``try``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        logging.getLogger("test").warning("here")
        return self.inner(x)


def test_a_forward_that_breaks_the_graph_breaks_it_once(one_rank: None) -> None:
    """Dynamo goes on with the functions that the broken forward calls, except the library's."""
    breaks = []
    for model in (_Logs(), fully_shard(_Logs())):
        torch._dynamo.reset()
        counters.clear()
        torch.compile(model, backend="eager")(torch.ones(2, 8)).sum().backward()
        breaks.append(sum(counters["graph_break"].values()))
    assert breaks[0] == breaks[1] > 0
