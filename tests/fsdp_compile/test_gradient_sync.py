"""Gradient synchronisation: when gradients are reduced and how they are divided, for every way to accumulate microbatches.

torch's FSDP2 is the oracle: it runs the same schedules as the library and is itself held against a float64 reference.
The library runs compiled, mostly with the ``aot_eager`` lowering, which runs the same passes as ``inductor``. A job
trains by all schedules on one compiled model, which the flags should make possible. Each test then looks at one
schedule.

Tolerances. In float32, 1e-5 of the largest entry, some ten times the rounding error of FSDP2. Where parameters are
bfloat16 the comparison is with FSDP2 alone, which rounds where an operator-by-operator lowering rounds, so that only the
order of float32 sums can differ: hence 1e-3 in the norm, which one rounding to bfloat16 (2**-9 per entry) exceeds.
The numbers of the float16 cases are chosen such that every intermediate result is representable, and have to be exact.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fsdp_backend
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.microbatches import (
    DEFAULTS,
    FLAVOURS,
    GPT,
    HOOKED,
    SMALL,
    Flag,
    Microbatch,
    Run,
    Schedule,
    Task,
    Trainee,
    all_reduce,
    count_collectives,
    differences,
    divide_factor,
    force_sum,
    full,
    last_backward,
    reference,
    reshard_after_backward,
    reshard_after_forward,
    sgd,
    sync,
    train_schedules,
)
from tests.common.parity import FullyShard, adamw, regression_batch, shard_units, squared_error
from tests.common.versions import needs_fsdp2

pytestmark = pytest.mark.units_apart

AOT_EAGER = {"lowering": "aot_eager"}
FSDP, FSDP4, HSDP = (2,), (4,), (2, 2)
RTOL = 1e-5

# A string is the traceback of a schedule that failed.
Runs: TypeAlias = list[dict[str, Run | str]]
TrainAll: TypeAlias = Callable[..., tuple[Runs, list[int]]]


def _world(mesh_shape: tuple[int, ...]) -> int:
    return functools.reduce(lambda product, size: product * size, mesh_shape)


@dataclass(frozen=True)
class Job:
    """The schedules that one compiled model is trained by."""

    task: Task
    schedules: tuple[str, ...]
    policy: MixedPrecisionPolicy | None = None


def _each_unit(flag: Callable[..., Flag], value: Any, *modules: str) -> tuple[Flag, ...]:
    """Set a flag that does not recurse on each of the modules."""
    return tuple(flag(value, module) for module in modules)


_SMALL_UNITS = ("", "blocks.0", "blocks.1")
_old_divide_factor = partial(Flag, "set_reduce_scatter_divide_factor")

# Schedules of several steps, and by world size the factor that each step's gradients are multiplied with.
_FACTORS: dict[str, tuple[tuple[Schedule, ...], Callable[[int], tuple[float, ...]]]] = {
    "divide_factors": (
        (
            (Microbatch((*_each_unit(force_sum, True, *_SMALL_UNITS), *_each_unit(divide_factor, 3.0, *_SMALL_UNITS))),) * 2,
            (Microbatch(_each_unit(divide_factor, 8.0, *_SMALL_UNITS)),) * 2,
            (Microbatch(_each_unit(_old_divide_factor, 0.5, *_SMALL_UNITS)),) * 2,
        ),
        lambda world: (world / 3.0, world / 8.0, world / 0.5),
    ),
    # The factor of the last microbatch divides the sum of all.
    "divide_factors_accumulating": (
        (
            (
                Microbatch(
                    (
                        *_each_unit(force_sum, True, *_SMALL_UNITS),
                        *_each_unit(divide_factor, 3.0, *_SMALL_UNITS),
                        all_reduce(False),
                        sync(False, "blocks.0"),
                    )
                ),
                Microbatch((sync(True),)),
            ),
            (Microbatch((*_each_unit(divide_factor, 5.0, *_SMALL_UNITS), sync(False))), Microbatch((sync(True),))),
        ),
        lambda world: (world / 3.0, world / 5.0),
    ),
}
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

JOBS = {
    "gpt": Job(GPT, ("sharded", "unsharded_then_partial", "keep_unsharded", "partial_keep_one_block", "flags_between")),
    "gpt_more": Job(
        GPT,
        ("unsharded", "partial", "partial_then_unsharded", "every_second_block_defers", "only_root_defers", "sharded_keep"),
    ),
    # Without replicas, partial equals sharded.
    "gpt_fsdp": Job(GPT, ("unsharded", "keep_unsharded")),
    "small": Job(SMALL, ("unsharded", "partial", "unsharded_then_partial", "keep_unsharded", "flags_between")),
    # Only one block, as generating code takes most of the time.
    "kernels": Job(Task(partial(models.MLP, layers=1), SMALL.batch, SMALL.loss), ("unsharded_then_partial", "keep_unsharded")),
    "factors": Job(SMALL, tuple(_FACTORS)),
    "bf16": Job(SMALL, ("unsharded", "unsharded_then_partial", "keep_unsharded"), _BF16),
    # A mutant of "bf16" that accumulates in bfloat16.
    "bf16_accumulator": Job(SMALL, ("unsharded",), replace(_BF16, reduce_dtype=torch.bfloat16)),
}


def _small(flavour: Schedule) -> Schedule:
    """Reduce a flavour for four blocks to the flags of a model of two."""

    def fits(flag: Flag) -> bool:
        return flag.module not in ("blocks.2", "blocks.3")

    return tuple(Microbatch(tuple(filter(fits, mb.before)), tuple(filter(fits, mb.between))) for mb in flavour)


def _steps(job: Job, name: str) -> tuple[Schedule, ...]:
    if name in _FACTORS:
        return _FACTORS[name][0]
    return (FLAVOURS[name] if job.task is GPT else _small(FLAVOURS[name]),) * 2


@pytest.fixture(scope="session")
def train(rank_pools: RankPools) -> TrainAll:
    """A function that returns the ranks' runs by schedule, and the number of graphs that Dynamo captured on each rank."""

    @functools.cache
    def train(job: str, mesh_shape: tuple[int, ...], system: str) -> tuple[Runs, list[int]]:
        spec = JOBS[job]
        results = rank_pools[_world(mesh_shape)].run(
            train_schedules,
            system=system,
            mesh_shape=mesh_shape,
            task=spec.task,
            schedules={name: _steps(spec, name) for name in spec.schedules},
            policy=spec.policy,
            # A bfloat16 parameter is rounded after each step. With Adam, the result would hang on a gradient's last bit.
            optimizer=sgd if spec.policy is not None else adamw,
        )
        return [runs for runs, _ in results], [graphs for _, graphs in results]

    return train


def _runs(train: TrainAll, job: str, mesh_shape: tuple[int, ...], system: str, name: str) -> list[Run]:
    found = [runs[name] for runs in train(job, mesh_shape, system)[0]]
    runs = [run for run in found if isinstance(run, Run)]
    if len(runs) < len(found):
        pytest.fail("\n".join(sorted({run for run in found if isinstance(run, str)})))
    return runs


def _reference(job: str, name: str, world: int) -> Run:
    spec = JOBS[job]
    scales = _FACTORS[name][1](world) if name in _FACTORS else None
    return _cached_reference(spec.task, world, tuple(len(schedule) for schedule in _steps(spec, name)), adamw, scales)


# Most schedules share a reference: the tests show that they accumulate to the same gradients.
_cached_reference = functools.cache(reference)


def _marks(job: str, shape: tuple[int, ...] = HSDP) -> Any:
    # Smaller models have parts of the flavours of a whole transformer, and two ranks that shard show as much as four.
    return (
        pytest.mark.night
        if job in ("gpt", "gpt_more", "gpt_fsdp") or shape == FSDP4 or (job, shape) == ("factors", HSDP)
        else []
    )


def _ours(job: str, mesh_shapes: Sequence[tuple[int, ...]], systems: Sequence[str]) -> list[Any]:
    return [
        pytest.param(
            job, shape, system, name, marks=_marks(job, shape), id=f"{job}-{'x'.join(map(str, shape))}-{system}-{name}"
        )
        for shape in mesh_shapes
        for system in systems
        for name in JOBS[job].schedules
    ]


@pytest.mark.parametrize(
    ("job", "mesh_shape", "system", "name"),
    [
        *_ours("gpt_fsdp", [FSDP], ["fsdp2", "aot_eager"]),
        *_ours("gpt", [HSDP], ["fsdp2", "aot_eager"]),
        *_ours("gpt_more", [HSDP], ["fsdp2", "aot_eager"]),
        *_ours("small", [FSDP4], ["fsdp2", "aot_eager"]),
        *_ours("small", [HSDP], ["fsdp2", "eager"]),
        *_ours("kernels", [HSDP], ["fsdp2", "inductor"]),
        *_ours("factors", [FSDP, HSDP], ["fsdp2", "aot_eager"]),
        *_ours("factors", [HSDP], ["eager"]),
    ],
)
def test_matches(job: str, mesh_shape: tuple[int, ...], system: str, name: str, train: TrainAll) -> None:
    """Gradients, losses and parameters are the reference's and FSDP2's."""
    runs = _runs(train, job, mesh_shape, system, name)
    found = differences(runs, _reference(job, name, _world(mesh_shape)), RTOL)
    assert not found, "\n".join(found)
    if system != "fsdp2":
        found = differences(runs, _runs(train, job, mesh_shape, "fsdp2", name), RTOL)
        assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("job", "mesh_shape", "system"),
    [
        pytest.param("gpt_fsdp", FSDP, "aot_eager", marks=_marks("gpt_fsdp")),
        pytest.param("gpt", HSDP, "aot_eager", marks=_marks("gpt")),
        pytest.param("gpt_more", HSDP, "aot_eager", marks=_marks("gpt_more")),
        pytest.param("kernels", HSDP, "inductor", marks=_marks("kernels")),
        pytest.param("factors", HSDP, "aot_eager", marks=pytest.mark.night),
        ("factors", FSDP, "aot_eager"),
    ],
)
def test_no_flag_retraces(job: str, mesh_shape: tuple[int, ...], system: str, train: TrainAll) -> None:
    runs, graphs = train(job, mesh_shape, system)
    assert graphs == [1] * _world(mesh_shape)
    # If only the last schedule failed, the number of graphs would not show it.
    assert all(isinstance(run, Run) for run in runs[0].values())


@pytest.mark.parametrize("name", JOBS["bf16"].schedules)
@pytest.mark.parametrize("mesh_shape", [FSDP, pytest.param(HSDP, marks=pytest.mark.night)])
def test_bf16_gradients_accumulate_in_the_reduce_dtype(mesh_shape: tuple[int, ...], name: str, train: TrainAll) -> None:
    ours = _runs(train, "bf16", mesh_shape, "aot_eager", name)
    found = differences(ours, _runs(train, "bf16", mesh_shape, "fsdp2", name), 1e-3, order=2)
    assert not found, "\n".join(found)


def test_bf16_tolerance_finds_a_bf16_accumulator(train: TrainAll) -> None:
    mutant = _runs(train, "bf16_accumulator", FSDP, "fsdp2", "unsharded")
    assert differences(mutant, _runs(train, "bf16", FSDP, "fsdp2", "unsharded"), 1e-3, order=2)


def test_tolerance_finds_a_lost_microbatch() -> None:
    expected, lost = reference(GPT, 2, [4], adamw), reference(GPT, 2, [3], adamw)
    lost.losses = expected.losses
    found = " ".join(differences([lost], expected, RTOL))
    assert all(f"gradient of {name} " in found and f"final {name} " in found for name in expected.parameters)


# Collectives in each microbatch of a step; five are those of the four blocks and the root.
_REDUCE_SCATTERS = {
    "sharded": [5, 5, 5, 5],
    "unsharded": [0, 0, 0, 5],
    "partial": [5, 5, 5, 5],
    "unsharded_then_partial": [0, 5, 5, 5],
    "partial_then_unsharded": [5, 0, 0, 5],
    "every_second_block_defers": [3, 3, 3, 5],
    "only_root_defers": [4, 4, 4, 5],
    "keep_unsharded": [0, 0, 0, 5],
    "sharded_keep": [5, 5, 5, 5],
    "partial_keep_one_block": [5, 5, 5, 5],
    "flags_between": [0, 5, 4, 5],
}
_ALL_REDUCES = {
    **{name: [0, 0, 0, 5] for name in FLAVOURS},
    "sharded": [5, 5, 5, 5],
    "every_second_block_defers": [3, 3, 3, 5],
    "only_root_defers": [4, 4, 4, 5],
    "sharded_keep": [5, 5, 5, 5],
}
_GATHERS_IN_FORWARD = {
    **{name: [5, 5, 5, 5] for name in FLAVOURS},
    "keep_unsharded": [5, 0, 0, 0],
    "sharded_keep": [5, 0, 0, 0],
    "partial_keep_one_block": [5, 4, 4, 4],
    "flags_between": [5, 0, 1, 1],
}
# FSDP2 reshards a block after forward, and gathers it for each backward, even if backward is to leave it gathered.
_GATHERS_IN_BACKWARD = {
    **{name: [4, 4, 4, 4] for name in FLAVOURS},
    "keep_unsharded": [4, 0, 0, 0],
    "sharded_keep": [4, 0, 0, 0],
    "partial_keep_one_block": [4, 3, 3, 3],
    "flags_between": [4, 0, 1, 1],
}


@pytest.mark.parametrize(
    ("job", "mesh_shape", "system", "name"),
    [
        *_ours("gpt_fsdp", [FSDP], ["fsdp2", "aot_eager"]),
        *_ours("gpt", [HSDP], ["fsdp2", "aot_eager"]),
        *_ours("gpt_more", [HSDP], ["fsdp2", "aot_eager"]),
    ],
)
def test_collectives(job: str, mesh_shape: tuple[int, ...], system: str, name: str, train: TrainAll) -> None:
    """Each microbatch communicates as expected in both steps: no gathered parameter survives a step."""
    for run in _runs(train, job, mesh_shape, system, name):
        assert run.counts("reduce_scatter") == _REDUCE_SCATTERS[name] * 2
        assert run.counts("all_reduce") == ([0] * 8 if mesh_shape == FSDP else _ALL_REDUCES[name] * 2)
        # In backward, FSDP2 gathers whole units, and keeps them for the next forward. The library gathers what backward reads.
        kept_from_backward = name == "flags_between" and system != "fsdp2"
        assert run.counts("all_gather", "forward") == ([5, 5, 1, 1] if kept_from_backward else _GATHERS_IN_FORWARD[name]) * 2
        in_backward = run.counts("all_gather", "backward")
        if system == "fsdp2":
            assert in_backward == [4] * 8
        else:
            assert all(ours <= limit for ours, limit in zip(in_backward, _GATHERS_IN_BACKWARD[name] * 2, strict=True))


@pytest.mark.inductor
@pytest.mark.parametrize("name", JOBS["kernels"].schedules)
def test_collectives_of_generated_code(name: str, train: TrainAll) -> None:
    """The Inductor lowering has the collectives of FSDP2, and at most as many gathers in backward."""
    ours = _runs(train, "kernels", HSDP, "inductor", name)[0]
    theirs = _runs(train, "kernels", HSDP, "fsdp2", name)[0]
    for kind in ("reduce_scatter", "all_reduce"):
        assert ours.counts(kind) == theirs.counts(kind)
    assert ours.counts("all_gather", "forward") == theirs.counts("all_gather", "forward")
    in_backward = ours.counts("all_gather", "backward")
    assert all(mine <= other for mine, other in zip(in_backward, theirs.counts("all_gather", "backward"), strict=True))
    if name == "keep_unsharded":
        assert in_backward[1:4] == [0, 0, 0]


@pytest.mark.parametrize(
    ("job", "mesh_shape", "system", "name"),
    [
        *_ours("gpt_fsdp", [FSDP], ["aot_eager"]),
        *_ours("gpt", [HSDP], ["aot_eager"]),
        *_ours("gpt_more", [HSDP], ["aot_eager"]),
        *_ours("small", [HSDP], ["eager"]),
    ],
)
def test_post_accumulate_grad_hooks(job: str, mesh_shape: tuple[int, ...], system: str, name: str, train: TrainAll) -> None:
    """Hooks run once in each backward that gives their parameter a gradient. A backward that defers runs none."""
    for ours, theirs in zip(
        _runs(train, job, mesh_shape, system, name), _runs(train, job, mesh_shape, "fsdp2", name), strict=True
    ):
        assert ours.hooks == theirs.hooks
        assert all(sum(counts[parameter] for counts in ours.hooks) >= 2 for parameter in ours.hooks[0])
        assert {parameter.split(".")[0] for parameter in ours.hooks[0]} == {prefix.split(".")[0] for prefix in HOOKED}


def _shard_embedding_too(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard, **options: Any) -> None:
    fully_shard(model.get_submodule("embedding"), mesh=mesh, **options)
    shard_units(model, mesh, fully_shard, **options)


def test_backward_does_not_gather_what_it_does_not_read(rank_pools: RankPools) -> None:
    """Backward does not gather an embedding, as the embedding's gradient does not need its weight."""
    counts = {}
    for system in ("fsdp2", "aot_eager"):
        results, _ = rank_pools[2].run(
            train_schedules,
            system=system,
            mesh_shape=FSDP,
            task=Task(models.Transformer, GPT.batch, GPT.loss),
            schedules={"sharded": [FLAVOURS["sharded"][:1]]},
            shard=_shard_embedding_too,
        )[0]
        run = results["sharded"]
        assert isinstance(run, Run), run
        counts[system] = run.counts("all_gather", "forward"), run.counts("all_gather", "backward")
    assert counts == {"fsdp2": ([4], [3]), "aot_eager": ([4], [2])}


# Reshard after forward


_RESHARD = (
    (Microbatch(), Microbatch((reshard_after_forward(False),)), Microbatch((reshard_after_forward(True),))),
    (Microbatch((reshard_after_forward(False, "blocks.0"),)),),
)


@pytest.mark.parametrize("system", ["fsdp2", "aot_eager"])
def test_reshard_after_forward(system: str, rank_pools: RankPools) -> None:
    """Blocks reshard by default, and the root once the flag is set."""
    replies = rank_pools[2].run(
        train_schedules, system=system, mesh_shape=FSDP, task=SMALL, schedules={"reshard": _RESHARD}, optimizer=adamw
    )
    runs = [results["reshard"] for results, _ in replies]
    assert all(isinstance(run, Run) for run in runs), runs[0]
    found = differences(runs, reference(SMALL, 2, [3, 1], adamw), RTOL)
    assert not found, "\n".join(found)
    assert runs[0].counts("all_gather", "forward") == [3, 3, 3, 3]
    in_backward = runs[0].counts("all_gather", "backward")
    assert in_backward == [2, 0, 3, 2]


# Gathered parameters and changes to them


def keeps_and_steps(system: str, mesh_shape: tuple[int, ...], optimizer_name: str) -> Run:
    """Train with parameters that stay gathered, while an optimizer changes the shards. Runs on every rank."""
    trainee = Trainee(system, mesh_shape, SMALL.build)
    # The flag stays False until the end.
    schedule = (Microbatch((sync(False), reshard_after_backward(False))), Microbatch((sync(True),)))
    return trainee.train(SMALL, [schedule] * 3, OPTIMIZERS[optimizer_name])


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_foreach": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3, foreach=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3, fused=True),
    "sgd": sgd,
}


@pytest.mark.parametrize(
    ("system", "mesh_shape", "optimizer_name"),
    [
        ("aot_eager", HSDP, "adamw"),
        pytest.param("aot_eager", FSDP, "adamw_foreach", marks=pytest.mark.night),
        ("aot_eager", FSDP, "adamw_fused"),
        pytest.param("aot_eager", FSDP, "sgd", marks=pytest.mark.night),
        ("eager", FSDP, "sgd"),
    ],
)
def test_forward_after_a_step_sees_the_new_parameters(
    system: str, mesh_shape: tuple[int, ...], optimizer_name: str, rank_pools: RankPools
) -> None:
    """Forward sees new parameters even without ``reshard()``. FSDP2 would go on with the parameters that it gathered first."""
    world = _world(mesh_shape)
    runs = rank_pools[world].run(keeps_and_steps, system=system, mesh_shape=mesh_shape, optimizer_name=optimizer_name)
    found = differences(runs, reference(SMALL, world, [2, 2, 2], OPTIMIZERS[optimizer_name]), RTOL)
    assert not found, "\n".join(found)
    if system != "eager":
        # Parameters are kept within a step; otherwise the test would show nothing.
        assert [runs[0].counts("all_gather")[index] for index in (1, 3, 5)] == [0, 0, 0]


def _perturb(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)


def _perturb_by_load(model: nn.Module) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


CHANGES: dict[str, Callable[[nn.Module], None]] = {"in_place": _perturb, "load_state_dict": _perturb_by_load}


def keeps_and_changes(system: str, change: str) -> list[float]:
    """Return the losses of a microbatch before a change of the parameters and of one after it. Runs on every rank."""
    trainee = Trainee(system, FSDP, SMALL.build)
    for flag in (sync(False), reshard_after_backward(False)):
        flag.apply(trainee.model)
    losses = []
    for _ in range(2):
        loss = SMALL.loss(trainee.forward, SMALL.batch(0, dist.get_rank(), dist.get_world_size()))
        loss.backward()
        losses.append(loss.item())
        CHANGES[change](trainee.model)
    return losses


@pytest.mark.parametrize("change", CHANGES)
def test_forward_sees_parameters_changed_between_microbatches(change: str, rank_pools: RankPools) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = SMALL.build()
    expected = []
    for _ in range(2):
        expected.append([SMALL.loss(model, SMALL.batch(0, rank, 2)).item() for rank in range(2)])
        CHANGES[change](model)
    assert abs(expected[0][0] - expected[1][0]) > 1e-2
    losses = rank_pools[2].run(keeps_and_changes, system="aot_eager", change=change)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected).T, rtol=1e-5, atol=0)


# Reductions in float16, in numbers


class Dot(nn.Module):
    """A product with the input, so that the gradient of the weight is the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        return (self.weight * x).sum()


@dataclass(frozen=True)
class Numbers:
    """Microbatches, each with flags and one gradient value for each rank, and the expected average."""

    mesh_shape: tuple[int, ...]
    microbatches: tuple[tuple[tuple[Flag, ...], tuple[float, ...]], ...]
    expected: float


_ONE, _TWO = (1.0, 2.0, 3.0, 6.0), (2.0, 4.0, 4.0, 6.0)
_TINY = 2.0**-23

NUMBERS = {
    "partial": Numbers(HSDP, (((all_reduce(False),), _ONE), ((all_reduce(True),), _TWO)), 7.0),
    "unsharded": Numbers(HSDP, (((sync(False),), _ONE), ((sync(True),), _TWO)), 7.0),
    "sharded": Numbers(HSDP, (((), _ONE), ((), _TWO)), 7.0),
    "partial_user_factor": Numbers(
        HSDP, (((divide_factor(7.0), force_sum(True), all_reduce(False)), _ONE), ((all_reduce(True),), _TWO)), 4.0
    ),
    # Divides by 2 before the reduction and by 3 after it.
    "user_factor": Numbers(HSDP, (((divide_factor(6.0), force_sum(True)), _ONE),), 2.0),
    "overflow": Numbers(HSDP, (((), (30000.0,) * 4),), 30000.0),
    "overflow_partial": Numbers(HSDP, (((all_reduce(False),), (15000.0,) * 4), ((all_reduce(True),), (15000.0,) * 4)), 30000.0),
    "overflow_fsdp": Numbers(FSDP4, (((), (30000.0,) * 4),), 30000.0),
    "underflow": Numbers(HSDP, (((), (_TINY,) * 4),), _TINY),
    "underflow_partial": Numbers(HSDP, (((all_reduce(False),), (_TINY,) * 4), ((all_reduce(True),), (_TINY,) * 4)), 2 * _TINY),
    "underflow_fsdp": Numbers(FSDP4, (((), (_TINY,) * 4),), _TINY),
}


def _shard_root(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard, **options: Any) -> None:
    fully_shard(model, mesh=mesh, **options)


def _reduce_numbers(system: str, case: Numbers) -> list[float]:
    # A factor stays set, so each case has a model of its own.
    trainee = Trainee(system, case.mesh_shape, Dot, _shard_root, MixedPrecisionPolicy(reduce_dtype=torch.float16))
    for flags, values in case.microbatches:
        for flag in flags:
            flag.apply(trainee.model)
        trainee.forward(torch.full((6,), values[dist.get_rank()])).backward()
    gradient = trainee.model.get_parameter("weight").grad
    assert gradient is not None
    return full(gradient).tolist()


def reduce_numbers(system: str, names: list[str]) -> dict[str, list[float] | str]:
    """Return the full gradient after the microbatches of each case, or the traceback. Runs on every rank."""
    results: dict[str, list[float] | str] = {}
    for name in names:
        try:
            results[name] = _reduce_numbers(system, NUMBERS[name])
        except Exception:
            results[name] = traceback.format_exc()
    return results


@pytest.fixture(scope="session")
def numbers(rank_pools: RankPools) -> Callable[[str], list[dict[str, list[float] | str]]]:
    """A function from a system to the results of all cases on each rank."""
    return functools.cache(lambda system: rank_pools[4].run(reduce_numbers, system=system, names=list(NUMBERS)))


@pytest.mark.parametrize("system", ["fsdp2", "eager", "aot_eager"])
@pytest.mark.parametrize("name", NUMBERS)
def test_reduces_in_float16(name: str, system: str, numbers: Callable[[str], list[dict[str, list[float] | str]]]) -> None:
    for of_rank in numbers(system):
        assert of_rank[name] == [NUMBERS[name].expected] * 6


def test_numbers_tell_wrong_arithmetic() -> None:
    """Wrong reductions give other results than right ones, so that the cases above detect them."""
    microbatches = [values for _, values in NUMBERS["partial"].microbatches]
    first, second = microbatches
    # ``wrong``: the first microbatch is averaged over shards alone, so each replica keeps its own.
    wrong = [sum(first[rows]) / 2 + sum(second) / 4 for rows in (slice(0, 2), slice(2, 4))]
    # ``lost``: the first microbatch is added to the all-reduced gradient, so other replicas' parts are lost.
    lost = [sum(first[rows]) / 4 + sum(second) / 4 for rows in (slice(0, 2), slice(2, 4))]
    assert NUMBERS["partial"].expected == sum(first) / 4 + sum(second) / 4 == 7.0
    assert 7.0 not in wrong and 7.0 not in lost

    def in_half(values: Sequence[float], before: float, after: float) -> float:
        total = torch.zeros((), dtype=torch.float16)
        for value in values:
            total = total + torch.tensor(value, dtype=torch.float16) / before
        return (total / after).item()

    big, tiny = (30000.0,) * 4, (_TINY,) * 4
    # A single division overflows after the sum, and underflows before it.
    assert in_half(big, 1, 4) == torch.inf
    assert in_half(tiny, 4, 1) == 0.0
    assert in_half(big, 2, 2) == 30000.0
    assert in_half(tiny, 2, 2) == _TINY


# A changed set of parameters


class Switch(nn.Module):
    """Two layers, of which ``uses_left`` chooses one; None chooses both."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.uses_left: bool | None = True

    def forward(self, x: Tensor) -> Tensor:
        if self.uses_left is None:
            return x + torch.tanh(self.left(x)) + torch.tanh(self.right(x))
        return x + torch.tanh(self.left(x) if self.uses_left else self.right(x))


class Switched(nn.Module):
    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Switch(dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[0](x))


SWITCHED = Task(Switched, regression_batch, squared_error)
# Flags with which full gradients ("unsharded") or partial results ("partial") wait for the next microbatch.
PENDING = {"unsharded": sync(False), "partial": all_reduce(False)}
Branches: TypeAlias = Sequence[tuple[bool | None, Flag]]


def _backward(trainee: Trainee, task: Task) -> None:
    task.loss(trainee.forward, task.batch(50, dist.get_rank(), dist.get_world_size())).backward()


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(param.grad) for name, param in model.named_parameters() if param.grad is not None}


def switch_branches(system: str, mesh_shape: tuple[int, ...], branches: Branches, in_root: bool) -> dict[str, Tensor]:
    """Return the gradients after microbatches through one layer or both, each under a flag. Runs on every rank.

    Args:
        system, mesh_shape: arguments of ``Trainee``.
        branches: for each microbatch, the layer and the flag.
        in_root: whether the layers belong to the root's unit instead of one of their own.
    """
    trainee = Trainee(system, mesh_shape, Switched, _shard_root if in_root else shard_units)
    switch: Any = trainee.model.get_submodule("blocks.0")
    for index, (uses_left, flag) in enumerate(branches):
        switch.uses_left = uses_left
        flag.apply(trainee.model)
        batch = SWITCHED.batch(index, dist.get_rank(), dist.get_world_size())
        SWITCHED.loss(trainee.forward, batch).backward()
    return _gradients(trainee.model)


def _switched_alone(world: int, branches: Branches) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Switched().double()
    switch: Any = model.blocks[0]
    for index, (uses_left, _) in enumerate(branches):
        switch.uses_left = uses_left
        for rank in range(world):
            inputs, targets = SWITCHED.batch(index, rank, world)
            (SWITCHED.loss(model, (inputs.double(), targets.double())) / world).backward()
    return {name: param.grad for name, param in model.named_parameters() if param.grad is not None}


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    ("mesh_shape", "pending", "in_root"),
    [(FSDP, "unsharded", False), (FSDP, "unsharded", True), (HSDP, "unsharded", False), (HSDP, "partial", False)],
)
def test_each_microbatch_may_use_other_parameters(
    mesh_shape: tuple[int, ...], pending: str, in_root: bool, system: str, rank_pools: RankPools
) -> None:
    """The last backward also reduces pending gradients that it does not add to. Gradients of other parameters accumulate."""
    flag, world = PENDING[pending], _world(mesh_shape)
    # With both layers, one bucket has gradients that are pending and gradients that are not.
    branches = [(True, flag), (None, flag), (False, flag), (True, flag), (False, sync(True))]
    expected = _switched_alone(world, branches)
    arguments = {"system": system, "mesh_shape": mesh_shape, "branches": branches, "in_root": in_root}
    for found in rank_pools[world].run(switch_branches, **arguments):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-4, atol=1e-6, msg=name)


def reduced_when(system: str) -> list[set[str]]:
    """Return the parameters of the unit that have a gradient after each microbatch. Runs on every rank."""
    trainee = Trainee(system, FSDP, Switched)
    switch, model = trainee.model.get_submodule("blocks.0"), trainee.model
    found = []
    last_backward(False).apply(model)
    for uses_left, syncs in ((True, False), (False, True)):
        switch.uses_left = uses_left  # type: ignore[assignment]
        sync(syncs).apply(model)
        _backward(trainee, SWITCHED)
        found.append(set(_gradients(switch)))
    return found


@pytest.mark.parametrize("system", ["fsdp2", "eager", "aot_eager"])
def test_what_waits_is_reduced_although_no_backward_is_the_last(system: str, rank_pools: RankPools) -> None:
    """Pending gradients are reduced even for parameters that the microbatch does not use."""
    both = {f"{layer}.{name}" for layer in ("left", "right") for name in ("weight", "bias")}
    assert rank_pools[2].run(reduced_when, system=system) == [[set(), both]] * 2


class InChunks(nn.Module):
    """A body, and a head that is applied to the output of the body in chunks, one at a time."""

    def __init__(self, dim: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(dim, dim), nn.Linear(dim, dim)])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x


def loss_in_chunks(system: str, reduces_each: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients of losses in chunks, and gradients of whole losses in one process. Runs on every rank.

    Each microbatch has several backwards, of which the last reaches the body.
    """

    def shard(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
        fully_shard(model.get_submodule("head"), mesh=mesh)
        shard_units(model, mesh, fully_shard)

    trainee = Trainee(system, FSDP, InChunks, shard)
    model: Any = trainee.model
    head = model.head if trainee.forward is model else torch.compile(model.head, backend=fsdp_backend, options=AOT_EAGER)
    torch.manual_seed(0)
    alone = InChunks()
    for micro, is_last in enumerate((False, True)):
        model.set_requires_gradient_sync(is_last or reduces_each)
        model.head.set_requires_gradient_sync(reduces_each)
        model.set_is_last_backward(False)
        for rank in range(2):
            x, _ = regression_batch(micro, rank, 2)
            (alone.head(alone(x)).square().sum() / 2).backward()
        x, _ = regression_batch(micro, dist.get_rank(), 2)
        hidden = trainee.forward(x)
        chunks = [chunk.requires_grad_() for chunk in hidden.detach().chunk(3)]
        for chunk in chunks:
            head(chunk).square().sum().backward()
        model.head.set_requires_gradient_sync(is_last or reduces_each)
        model.set_is_last_backward(is_last)
        hidden.backward(torch.cat([chunk.grad for chunk in chunks]))
    return _gradients(trainee.model), {name: param.grad for name, param in alone.named_parameters()}


@pytest.mark.parametrize(
    ("system", "reduces_each"),
    [("fsdp2", True), ("fsdp2", False), ("eager", True), ("eager", False), ("aot_eager", True), ("aot_eager", False)],
)
def test_losses_in_chunks(system: str, reduces_each: bool, rank_pools: RankPools) -> None:
    for found, expected in rank_pools[2].run(loss_in_chunks, system=system, reduces_each=reduces_each):
        assert found.keys() == expected.keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5, msg=name)


# Recovery


def reset_of_unit(system: str) -> str | None:
    """Return the error of recovering a module that is not the root. Runs on every rank."""
    trainee = Trainee(system, FSDP, SMALL.build)
    _backward(trainee, SMALL)
    try:
        trainee.model.get_submodule("blocks.0").reset_iter_state()
    except RuntimeError as error:
        return str(error)
    return None


@pytest.mark.parametrize("system", [pytest.param("fsdp2", marks=needs_fsdp2("reset_iter_state")), "eager"])
def test_reset_iter_state_is_the_roots(system: str, rank_pools: RankPools) -> None:
    for message in rank_pools[2].run(reset_of_unit, system=system):
        assert message is not None and "root" in message


def reset_of_root(system: str) -> list[str]:
    """Return the parameters that have gradients after a backward and a recovery. Runs on every rank."""
    trainee = Trainee(system, FSDP, SMALL.build)
    _backward(trainee, SMALL)
    trainee.model.reset_iter_state()
    return [name for name, parameter in trainee.model.named_parameters() if parameter.grad is not None]


@needs_fsdp2("reset_iter_state")
def test_reset_iter_state_does_to_gradients_what_fsdp2_does(rank_pools: RankPools) -> None:
    assert rank_pools[2].run(reset_of_root, system="eager") == rank_pools[2].run(reset_of_root, system="fsdp2")


_armed: set[str] = set()


class InjectedError(Exception):
    pass


# Opaque to the compiler, so that the error is raised when the compiled code runs and not when it is traced.
@torch.library.custom_op("fsdp_compile_tests::fail_point", mutates_args=())
def fail_point(x: Tensor) -> Tensor:
    if "forward" in _armed:
        raise InjectedError("forward")
    return x.clone()


@torch.library.custom_op("fsdp_compile_tests::fail_point_backward", mutates_args=())
def fail_point_backward(grad: Tensor) -> Tensor:
    if "backward" in _armed:
        raise InjectedError("backward")
    return grad.clone()


fail_point.register_fake(torch.empty_like)
fail_point_backward.register_fake(torch.empty_like)
fail_point.register_autograd(lambda _context, grad: fail_point_backward(grad))


class Failing(models.MLP):
    """A model that can fail between its blocks, when some units have run forward or are reduced."""

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks[1](fail_point(self.blocks[0](x))) + self.bias)


FAILING = Task(Failing, regression_batch, squared_error)


def fail_and_recover(system: str, mesh_shape: tuple[int, ...], where: str, pending: str) -> Run:
    """Raise an error while gradients are pending; return a run after recovery. Runs on every rank."""
    trainee = Trainee(system, mesh_shape, Failing)
    for flag in (PENDING[pending], reshard_after_backward(False, "blocks.1")):
        flag.apply(trainee.model)
    _backward(trainee, FAILING)
    _armed.add(where)
    try:
        _backward(trainee, FAILING)
    except Exception as error:
        assert "InjectedError" in repr(error) or where in str(error), repr(error)
    else:
        raise AssertionError("nothing failed")
    finally:
        _armed.clear()
    trainee.model.reset_iter_state()
    trainee.reset()
    return trainee.train(FAILING, [FLAVOURS["sharded"][:1], _small(FLAVOURS["unsharded_then_partial"])])


@pytest.mark.parametrize(
    ("system", "mesh_shape", "pending", "where"),
    [
        # After an error in backward, FSDP2 adds full gradients that autograd has made to the next ones.
        pytest.param("fsdp2", HSDP, "partial", "forward", marks=needs_fsdp2("reset_iter_state")),
        ("aot_eager", HSDP, "partial", "backward"),
        *[
            pytest.param("aot_eager", HSDP, *setting, marks=pytest.mark.night)
            for setting in [("partial", "forward"), ("unsharded", "forward"), ("unsharded", "backward")]
        ],
        ("eager", FSDP, "unsharded", "forward"),
        ("eager", FSDP, "unsharded", "backward"),
    ],
)
def test_recovers_from_an_error(
    system: str, mesh_shape: tuple[int, ...], pending: str, where: str, rank_pools: RankPools
) -> None:
    """Recovery drops accumulated gradients, and gathered parameters are not used after it."""
    world = _world(mesh_shape)
    runs = rank_pools[world].run(fail_and_recover, system=system, mesh_shape=mesh_shape, where=where, pending=pending)
    found = differences(runs, reference(FAILING, world, [1, 4], adamw), RTOL)
    assert not found, "\n".join(found)


# Unused parameters


def train_with_unused(system: str) -> list[dict[str, float | None]]:
    """Return the largest gradient of each unused parameter, for each way to set the flag. Runs on every rank."""
    trainee = Trainee(system, FSDP, models.UnusedParameter)
    results: list[dict[str, float | None]] = []
    unused_flag = partial(Flag, "set_reduce_scatter_unused_params")
    for flags in (
        [],
        [unused_flag(True)],
        [unused_flag(False), unused_flag(True, "blocks.0", recurse=False)],
        [unused_flag(False)],
    ):
        trainee.reset()
        for flag in flags:
            flag.apply(trainee.model)
        for last in (False, True):
            sync(last).apply(trainee.model)
            _backward(trainee, SMALL)
        results.append(
            {
                name: None if parameter.grad is None else full(parameter.grad).abs().max().item()
                for name, parameter in trainee.model.named_parameters()
                if "unused" in name
            }
        )
        used = trainee.model.get_parameter("head.weight").grad
        assert used is not None and full(used).abs().max() > 0
    return results


@pytest.mark.parametrize("system", [pytest.param("fsdp2", marks=needs_fsdp2("set_reduce_scatter_unused_params")), "aot_eager"])
def test_unused_parameters(system: str, rank_pools: RankPools) -> None:
    """If the flag is set, a parameter that no forward reads gets a gradient of zeros; otherwise it gets none."""
    block, root = "blocks.0.unused", "unused"
    for results in rank_pools[2].run(train_with_unused, system=system):
        assert results == [
            {block: None, root: None},
            {block: 0.0, root: 0.0},
            {block: 0.0, root: None},
            {block: None, root: None},
        ]


# The counting of collectives


def count_some() -> dict[str, int]:
    """Count one collective of each kind through either interface. Runs on every rank."""
    functional = torch.ops._c10d_functional
    group = dist.group.WORLD
    assert group is not None
    name = group.group_name
    shard, whole = torch.ones(4), torch.ones(8)
    with count_collectives() as counts:
        dist.all_gather_into_tensor(whole, shard)
        functional.wait_tensor(functional.all_gather_into_tensor(shard, 2, name))
        functional.wait_tensor(functional.all_gather_into_tensor_out(shard, 2, name, out=whole))
        dist.reduce_scatter_tensor(shard, whole)
        functional.wait_tensor(functional.reduce_scatter_tensor(whole, "sum", 2, name))
        dist.all_reduce(shard)
        functional.wait_tensor(functional.all_reduce(shard, "sum", name))
        functional.wait_tensor(functional.all_reduce_(shard, "sum", name))
    return vars(counts)


def test_counts_each_collective_once(rank_pools: RankPools) -> None:
    assert rank_pools[2].run(count_some) == [{"all_gather": 3, "reduce_scatter": 2, "all_reduce": 3}] * 2


# The defaults


def test_flavours_restore_the_defaults() -> None:
    """Each schedule ends with all its flags at their defaults, from which the next schedule starts."""
    for name, schedule in FLAVOURS.items():
        flags = [flag for microbatch in schedule for flag in (*microbatch.before, *microbatch.between)]
        for flag in flags:
            if not flag.value:
                assert any(later.method in (flag.method, "set_requires_gradient_sync") and later.value for later in flags), name
        assert all(flag.value for flag in (*schedule[-1].before, *schedule[-1].between)), name
    assert all(flag.value for flag in DEFAULTS)
