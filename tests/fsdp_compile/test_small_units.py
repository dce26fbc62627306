"""Training if small units share collectives (:mod:`passes.auto.small_units`), as they do by default."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import nn

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from passes.auto import small_units
from tests.common import models
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
from tests.fsdp_compile.test_large_parameters import check_pieces_around_a_threshold

#: Every way to accumulate, for all units and for one unit alone.
_ACCUMULATE: Schedule = (
    Microbatch((all_reduce(False),)),
    Microbatch((sync(False, "blocks.0"), reshard_after_backward(False))),
    Microbatch((sync(False),)),
    Microbatch((all_reduce(True), sync(True), reshard_after_backward(True))),
)


def train(mesh_shape: tuple[int, ...], system: str, schedule: Schedule) -> Run:
    """Train by a schedule. Runs on every rank."""
    return Trainee(system, mesh_shape, SMALL.build).train(SMALL, [schedule] * 2, sgd)


@pytest.mark.parametrize(
    ("mesh_shape", "system", "schedule"),
    [
        ((2,), "aot_eager", (Microbatch(),)),
        ((2, 2), "aot_eager", _ACCUMULATE),
        ((2,), "inductor", _ACCUMULATE),
        pytest.param((2, 2), "inductor", _ACCUMULATE, marks=pytest.mark.night),
    ],
)
def test_trains_like_one_process(mesh_shape: tuple[int, ...], system: str, schedule: Schedule, rank_pools: RankPools) -> None:
    world = math.prod(mesh_shape)
    runs = rank_pools[world].run(train, mesh_shape=mesh_shape, system=system, schedule=schedule)
    found = differences(runs, reference(SMALL, world, [len(schedule)] * 2, sgd), 1e-5)
    assert not found, "\n".join(found)
    # All units share one collective each time.
    assert runs[0].counts("all_gather", "forward")[0] == 1
    assert runs[0].counts("reduce_scatter", "backward")[-1] == 1
    assert runs[0].counts("all_reduce", "backward")[-1] == len(mesh_shape) - 1
    assert small_units.MIN_BUCKET_BYTES > 0


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.night)])
def test_tensor_parallel_ranks_may_merge_others(lowering: str, rank_pools: RankPools) -> None:
    check_pieces_around_a_threshold(rank_pools, lowering, "passes.auto.small_units.MIN_BUCKET_BYTES", 4 * 45)


def _segments(min_bucket_bytes: int) -> list[int]:
    """Count the different segments in forward and in backward of nine equal layers."""
    torch._dynamo.reset()
    model = models.MLP(layers=9)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    options = {"min_bucket_bytes": min_bucket_bytes}
    compiled: nn.Module = torch.compile(model, backend=fsdp_backend, options=options)  # type: ignore[assignment]
    with capture() as captured:
        compiled(torch.ones(3, 8)).sum().backward()
    return [len(set(re.findall(r"segment_\d+", graph.code))) for graph in (*captured.forward, *captured.backward)]


@pytest.mark.night
@pytest.mark.inductor
def test_equal_units_share_kernels_as_if_they_were_apart(fake_ranks: None) -> None:
    together, apart = _segments(1 << 20), _segments(0)
    # One more segment may copy all units into a buffer.
    assert all(number <= least + 1 for number, least in zip(together, apart, strict=True)), (together, apart)
    assert max(apart) < 10
