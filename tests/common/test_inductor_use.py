"""Inductor must not compile in a test without a mark that allows it: here, and on ranks."""

from __future__ import annotations

import pytest
import torch

from tests.common.distributed import RankFailure, RankPools


def compile_something() -> None:
    torch._dynamo.reset()
    torch.compile(lambda x: x + 1)(torch.ones(2))


def test_is_refused_here() -> None:
    with pytest.raises(Exception, match="mark it inductor"):
        compile_something()


def test_is_refused_on_ranks(rank_pools: RankPools) -> None:
    with pytest.raises(RankFailure, match="mark it inductor"):
        rank_pools[2].run(compile_something)


@pytest.mark.inductor
def test_is_allowed(rank_pools: RankPools) -> None:
    compile_something()
    rank_pools[2].run(compile_something)
