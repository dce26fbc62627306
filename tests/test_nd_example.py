"""``examples/train_nd.py``: each split of the ranks gives the losses of FSDP2's plain sharding, from one graph on each rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from harness.fresh_module import fresh_module

from tests.common.distributed import RankPools
from tests.common.microbatches import graphs_captured

pytestmark = pytest.mark.example

_EXAMPLE = Path(__file__).parent.parent / "examples/train_nd.py"


def losses_of(flags: str) -> tuple[list[float], int]:
    """Return the losses of this rank and the number of graphs that Dynamo captured for them; a job for ranks."""
    example = fresh_module(_EXAMPLE)
    before = graphs_captured()
    # The example sets the option for its whole process, so restore it.
    scalars = torch._dynamo.config.patch(capture_scalar_outputs=False)
    with scalars, patch.dict(os.environ, {"WORLD_SIZE": str(dist.get_world_size())}):
        losses = example.train(example.parse_args(flags.split()))
    return losses, graphs_captured() - before


@pytest.fixture(scope="module")
def expected(rank_pools: RankPools) -> Callable[[int], list[float]]:
    """The losses of uncompiled FSDP2, as a function of the number of ranks that it shards over."""
    flags = "--system fsdp2 --no-compile"
    return functools.cache(lambda world: rank_pools[world].run(losses_of, flags=flags)[0][0])


_SPLITS = (
    "--dp 4",
    "--dp 2 --tp 2",
    "--dp 2 --cp 2",
    "--dp 2 --pp 2",
    "--dp 4 --ep 2",
    "--dp 2 --tp 2 --ep 2",
    "--cp 2 --pp 2",
)
_THROUGH_INDUCTOR = ("--dp 2 --tp 2 --ep 2", "--cp 2 --pp 2")  # each kind of parallelism once
_IN_CI = (("--cp 2 --pp 2", "aot_eager"), ("--dp 2 --tp 2 --ep 2", "aot_eager"))
_SPLITS_OF_8 = ("--dp 2 --tp 2 --pp 2", "--dp 4 --ep 4 --tp 2", "--dp 2 --cp 2 --ep 2 --pp 2")


def _cases() -> list[object]:
    # Gradients of splits are compared in test_nd.py, and pipelines in test_composition.py.
    return [
        pytest.param(world, split, lowering, marks=[] if (split, lowering) in _IN_CI else [pytest.mark.night])
        for world, splits in ((4, _SPLITS), (8, _SPLITS_OF_8))
        for split in splits
        for lowering in ("aot_eager", "inductor")
        if lowering == "aot_eager" or split in _THROUGH_INDUCTOR
    ]


@pytest.mark.parametrize(("world", "split", "lowering"), _cases())
def test_losses(world: int, split: str, lowering: str, rank_pools: RankPools, expected: Callable[[int], list[float]]) -> None:
    for losses, graphs in rank_pools[world].run(losses_of, flags=f"{split} --lowering {lowering}"):
        assert losses == pytest.approx(expected(world), abs=2e-6)
        assert losses[-1] < 0.7 * losses[0]
        assert graphs == 1
