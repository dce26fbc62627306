"""Detection of stuck jobs: a slow machine must not fail a test; ranks that wait for each other must."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.common.distributed import RankFailure, RankPool

pytestmark = pytest.mark.ranks


def compute(seconds: float) -> int:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return dist.get_rank()


def wait_for_a_rank_that_does_not_come() -> None:
    if dist.get_rank() == 0:
        dist.barrier()


def make_groups() -> None:
    for _ in range(20):
        dist.new_group()


@pytest.fixture
def ranks() -> Iterator[RankPool]:
    pool = RankPool(2, stall_s=2.5)
    yield pool
    pool.close()


@pytest.mark.night
def test_ranks_that_compute_may_take_their_time(ranks: RankPool) -> None:
    assert ranks.run(compute, seconds=4) == [0, 1]


@pytest.mark.night
def test_ranks_that_wait_are_stuck(ranks: RankPool) -> None:
    ranks.run(make_groups)  # starts the ranks; threads of process groups must not count as work
    start = time.monotonic()
    with pytest.raises(RankFailure, match=r"(?s)rank 0 did not finish; .*barrier.*rank 1 finished"):
        ranks.run(wait_for_a_rank_that_does_not_come)
    assert time.monotonic() - start < 60
