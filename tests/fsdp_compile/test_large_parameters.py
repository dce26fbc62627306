"""Training where each matrix has collectives of its own (:mod:`passes.auto.large_parameters`)."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest

from tests.common.distributed import RankPools
from tests.common.microbatches import (
    SMALL,
    Microbatch,
    Run,
    Schedule,
    Trainee,
    all_reduce,
    differences,
    reference,
    reshard_after_backward,
    sgd,
    sync,
)

#: Every way to accumulate.
_ACCUMULATE: Schedule = (
    Microbatch((all_reduce(False),)),
    Microbatch((sync(False), reshard_after_backward(False))),
    Microbatch((sync(True),)),
    Microbatch((all_reduce(True), reshard_after_backward(True))),
)


def train_with_separate_matrices(mesh_shape: tuple[int, ...], lowering: str, schedule: Schedule) -> Run:
    """A job: every parameter of two dimensions or more counts as large."""
    trainee = Trainee(lowering, mesh_shape, SMALL.build)
    smallest = min(value.numel() * 4 for value in trainee.model.parameters() if value.dim() > 1)
    with patch("passes.auto.large_parameters.MIN_OWN_BUCKET_BYTES", smallest):
        return trainee.train(SMALL, [schedule] * 2, sgd)


@pytest.mark.parametrize(
    ("mesh_shape", "lowering", "schedule"),
    [
        pytest.param((2,), "inductor", (Microbatch(),), marks=pytest.mark.exhaustive),
        ((2, 2), "aot_eager", _ACCUMULATE),
    ],
)
def test_trains_like_one_process(mesh_shape: tuple[int, ...], lowering: str, schedule: Schedule, rank_pools: RankPools) -> None:
    world = math.prod(mesh_shape)
    runs = rank_pools[world].run(train_with_separate_matrices, mesh_shape=mesh_shape, lowering=lowering, schedule=schedule)
    found = differences(runs, reference(SMALL, world, [len(schedule)] * 2, sgd), 1e-5)
    assert not found, "\n".join(found)
    # More than the three of the units, or nothing was separated.
    assert runs[0].counts("all_gather", "forward")[0] > 3
    assert runs[0].counts("reduce_scatter", "backward")[0] > 3
