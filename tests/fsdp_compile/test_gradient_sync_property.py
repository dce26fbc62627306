"""Random sequences of flags, microbatches and modules: the library equals torch's FSDP2 after each microbatch.

At the end of a step everything is reduced, so right gradients there say little about the flags. Hence the
comparison after every microbatch: which parameters have a gradient, this rank's shard of it, and the number of
reductions. Where small units share reductions, only whether there were any. Gathers must not exceed FSDP2's.

One compiled model serves all sequences, as it would serve a training run. A sequence that fails is printed as the calls
that it is made of; it is not shrunk, which would take a compilation per attempt.
"""

from __future__ import annotations

import itertools
import traceback
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.auto import small_units
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.microbatches import (
    DEFAULTS,
    Collectives,
    Flag,
    Microbatch,
    Schedule,
    Trainee,
    all_reduce,
    count_collectives,
    divide_factor,
    force_sum,
    last_backward,
    relative_error,
    reshard_after_backward,
    sgd,
    sync,
)
from tests.common.parity import regression_batch, squared_error

_UNITS = ("", "blocks.0", "blocks.1")
_RTOL = 1e-5

_booleans = st.booleans()
_modules = st.sampled_from(_UNITS)
_recurse = st.sampled_from([None, False])
_flags_of_backward = st.one_of(
    st.builds(sync, _booleans, _modules, _recurse),
    # Mostly False: it is True by default, and after each sync(True).
    st.builds(all_reduce, st.sampled_from([False, False, True]), _modules, _recurse),
    st.builds(all_reduce, st.just(False)),
    st.builds(last_backward, _booleans),
)
_flags = st.one_of(_flags_of_backward, st.builds(reshard_after_backward, _booleans, _modules, _recurse))
_some_flags = st.lists(_flags, max_size=4).map(tuple)
# Resharding is not set between forward and backward. FSDP2 gathers whole units in backward, and keeps them for the next
# forward; the library gathers and keeps what backward reads.
_some_flags_between = st.lists(_flags_of_backward, max_size=4).map(tuple)
# Set only before a step: with gradients pending, it depends on FSDP2's backend what a new factor divides.
_some_factors = st.lists(st.builds(divide_factor, st.sampled_from([1.0, 3.0, 8.0]), _modules), max_size=2).map(tuple)


@st.composite
def _steps(draw: st.DrawFn) -> Schedule:
    """Draw the microbatches of a step, the last of which reduces everything."""
    microbatches = [
        Microbatch(draw(_some_flags), draw(_some_flags_between)) for _ in range(draw(st.sampled_from([3, 2, 1, 0])))
    ]
    last = Microbatch(draw(_some_flags), DEFAULTS) if draw(_booleans) else Microbatch(DEFAULTS)
    first, *others = [*microbatches, last]
    return (Microbatch((*draw(_some_factors), *first.before), first.between), *others)


_sequences = st.lists(_steps(), min_size=1, max_size=2).map(tuple)


@dataclass
class _Observation:
    """The state after one microbatch."""

    loss: float
    # This rank's shards.
    gradients: dict[str, Tensor | None]
    forward: Collectives
    backward: Collectives


def _shard(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().to_local().clone()


def _observe(trainee: Trainee, steps: tuple[Schedule, ...]) -> tuple[list[_Observation], dict[str, Tensor]]:
    """Train; return the observation of each microbatch, and this rank's shards of the final parameters."""
    rank, world = dist.get_rank(), dist.get_world_size()
    trainee.reset()
    for unit in _UNITS:
        # Gloo has no reduction that scales by a factor.
        force_sum(True, unit).apply(trainee.model)
        divide_factor(float(world), unit).apply(trainee.model)
    optimizer = sgd(trainee.model.parameters())
    observed = []
    for schedule in steps:
        for microbatch in schedule:
            for flag in microbatch.before:
                flag.apply(trainee.model)
            with count_collectives() as in_forward:
                loss = squared_error(trainee.forward, regression_batch(len(observed), rank, world))
            for flag in microbatch.between:
                flag.apply(trainee.model)
            with count_collectives() as in_backward:
                loss.backward()
            # FSDP2 registers full parameters while it keeps them; the optimizer has the sharded ones.
            parameters = dict(zip(trainee.names, optimizer.param_groups[0]["params"], strict=True))
            gradients = {name: None if p.grad is None else _shard(p.grad) for name, p in parameters.items()}
            observed.append(_Observation(loss.item(), gradients, in_forward, in_backward))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return observed, {name: _shard(parameter) for name, parameter in trainee.model.named_parameters()}


def _is_close(actual: Tensor, expected: Tensor) -> bool:
    # A shard may be empty, or hold a few entries that nearly cancel.
    return (actual - expected).abs().max().item() < 1e-7 if expected.numel() else actual.shape == expected.shape


def _is_as_many(ours: int, theirs: int) -> bool:
    """Return whether we reduce as often as FSDP2 or, where small units share collectives, when FSDP2 does."""
    return 0 < ours <= theirs or ours == theirs if small_units.MIN_BUCKET_BYTES else ours == theirs


def _compare(
    ours: tuple[list[_Observation], dict[str, Tensor]], theirs: tuple[list[_Observation], dict[str, Tensor]]
) -> list[str]:
    found = []

    def check(what: str, actual: Tensor | None, expected: Tensor | None) -> None:
        if actual is None or expected is None:
            if actual is not expected:
                found.append(f"{what}: {'none' if actual is None else 'there'}, FSDP2's is not")
        elif not relative_error(actual, expected) <= _RTOL and not _is_close(actual, expected):
            found.append(f"{what}: relative error {relative_error(actual, expected):.1e}")

    for index, (mine, other) in enumerate(zip(ours[0], theirs[0], strict=True)):
        where = f"microbatch {index}"
        check(f"{where}: loss", torch.tensor(mine.loss), torch.tensor(other.loss))
        for name, gradient in mine.gradients.items():
            check(f"{where}: gradient of {name}", gradient, other.gradients[name])
        for phase in ("forward", "backward"):
            actual, expected = getattr(mine, phase), getattr(other, phase)
            reductions = ((actual.reduce_scatter, expected.reduce_scatter), (actual.all_reduce, expected.all_reduce))
            if actual.all_gather > expected.all_gather or not all(itertools.starmap(_is_as_many, reductions)):
                found.append(f"{where}: {phase} has {actual}, FSDP2's {expected}")
    for name, parameter in ours[1].items():
        check(f"final {name}", parameter, theirs[1][name])
    return found


def compare_sequences(system: str, mesh_shape: tuple[int, ...], sequences: list[tuple[Schedule, ...]]) -> list[list[str]]:
    """Return for each sequence the differences of a system from FSDP2. Runs on every rank."""
    subject = None
    found = []
    for steps in sequences:
        expected = _observe(Trainee("fsdp2", mesh_shape, models.MLP), steps)
        # FSDP2's gradients are kept, but not its model.
        subject = subject or Trainee(system, mesh_shape, models.MLP)
        try:
            found.append(_compare(_observe(subject, steps), expected))
        except Exception:
            found.append([traceback.format_exc()])
            # The next sequence must not see the state that this one left.
            subject = None
    return found


def _describe(steps: tuple[Schedule, ...]) -> str:
    lines = []
    for schedule in steps:
        for microbatch in schedule:
            lines += [*map(repr, microbatch.before), "forward", *map(repr, microbatch.between), "backward"]
        lines.append("optimizer step")
    return "\n".join(lines)


def _corpus(number: int) -> list[tuple[Schedule, ...]]:
    """Draw sequences with hypothesis, the same ones every time.

    All are drawn before the job that runs them: a model for each would take a compilation for each. Only every fifth one is
    used, as hypothesis makes many an example from the previous one.
    """
    found: list[tuple[Schedule, ...]] = []

    @settings(derandomize=True, deadline=None, max_examples=5 * number, phases=(Phase.generate,), database=None)
    @given(_sequences)
    def draw(steps: tuple[Schedule, ...]) -> None:
        found.append(steps)

    draw()
    return found[::5]


@pytest.mark.parametrize(
    ("mesh_shape", "number"),
    [
        pytest.param((2,), 20, marks=[pytest.mark.night, pytest.mark.units_apart]),
        pytest.param((2, 2), 10, marks=[pytest.mark.night, pytest.mark.units_apart]),
        ((2,), 5),
        pytest.param((2,), 10, marks=pytest.mark.night),
        pytest.param((2, 2), 10, marks=pytest.mark.night),
    ],
)
def test_does_what_fsdp2_does(mesh_shape: tuple[int, ...], number: int, rank_pools: RankPools) -> None:
    sequences = _corpus(number)
    world = 2 if mesh_shape == (2,) else 4
    replies = rank_pools[world].run(compare_sequences, system="aot_eager", mesh_shape=mesh_shape, sequences=sequences)
    failures = [
        f"rank {rank}:\n" + "\n".join(found[:10]) + f"\nin\n{_describe(steps)}"
        for steps, *by_rank in zip(sequences, *replies, strict=True)
        for rank, found in enumerate(by_rank)
        if found
    ]
    assert not failures, f"{len(failures)} failures, of which the first is:\n{failures[0]}"


def _drop(method: str, steps: tuple[Schedule, ...]) -> tuple[Schedule, ...]:
    """Drop the calls of one flag from a sequence."""

    def keep(flag: Flag) -> bool:
        return flag.method != method

    return tuple(
        tuple(Microbatch(tuple(filter(keep, mb.before)), tuple(filter(keep, mb.between))) for mb in schedule)
        for schedule in steps
    )


_MUTATED = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_reshard_after_backward",
    "set_gradient_divide_factor",
)


def compare_mutants(mesh_shape: tuple[int, ...], sequences: list[tuple[Schedule, ...]]) -> dict[str, int]:
    """Count for each flag the sequences that tell FSDP2 from an FSDP2 that ignores the flag. Runs on every rank."""
    found = dict.fromkeys(_MUTATED, 0)
    subject = Trainee("fsdp2", mesh_shape, models.MLP)
    for steps in sequences:
        expected = _observe(subject, steps)
        for method in _MUTATED:
            found[method] += bool(_compare(_observe(subject, _drop(method, steps)), expected))
    return found


@pytest.mark.night
def test_sequences_tell_an_ignored_flag(rank_pools: RankPools) -> None:
    """Several of the sequences that test the library fail for a system that ignores a flag."""
    found = rank_pools[4].run(compare_mutants, mesh_shape=(2, 2), sequences=_corpus(16)[:10])[0]
    assert min(found.values()) >= 2, found
