import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from passes.collectives import (
    Averaging,
    finish_gather,
    finish_reduce,
    start_gather,
    start_reduce_scatter,
    supports_averaging,
)
from tests.common.distributed import RankPools, device_mesh
from tests.passes.tracing import PassTestCase


class _Group:
    """What torch's function asks of a process group."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size


class TestAveraging(PassTestCase):
    def test_equals_torch_where_the_backend_averages(self) -> None:
        dtypes = (torch.float32, torch.bfloat16, torch.float16)
        for shards, replicas, dtype in itertools.product((1, 2, 3, 6, 8), (1, 2, 3), dtypes):
            before, after, op, _ = _get_gradient_divide_factors(
                _Group(shards), _Group(replicas) if replicas > 1 else None, dtype, "cuda"
            )
            ours = Averaging.over(shards * replicas, dtype, native=True)
            assert (ours.op == "avg") == (op == dist.ReduceOp.AVG)
            # torch says None where it does not divide, and divides by 1 where it need not.
            assert (ours.before or 1) == (before or 1), (shards, replicas, dtype)
            assert (ours.after or 1) == (after or 1), (shards, replicas, dtype)

    def test_equals_torch_where_the_backend_only_sums(self) -> None:
        for ranks, dtype in itertools.product((1, 2, 6, 8), (torch.float32, torch.bfloat16, torch.float16)):
            before, after, op, _ = _get_gradient_divide_factors(
                _Group(ranks), None, dtype, "cpu", force_sum_reduction_for_comms=True
            )
            ours = Averaging.over(ranks, dtype, native=False)
            assert (ours.op, op) == ("sum", dist.ReduceOp.SUM)
            assert ((ours.before or 1), (ours.after or 1)) == ((before or 1), (after or 1))

    def test_half_precision_keeps_the_range(self) -> None:
        assert Averaging.over(8, torch.float16, native=True) == Averaging("sum", 4.0, 2.0)
        assert Averaging.over(6, torch.float16, native=True) == Averaging("sum", 4.0, 1.5)

    def test_backends(self) -> None:
        assert not supports_averaging(self.shard, torch.device("cpu"))
        assert supports_averaging(self.shard, torch.device("cuda"))


def _keep_many_in_flight(rounds: int) -> None:
    """Executed by every rank."""
    group = device_mesh((2,)).get_group().group_name
    averaging = Averaging("sum")
    for _ in range(rounds):
        gathers = [start_gather([torch.ones(4)], group) for _ in range(8)]
        reductions = [start_reduce_scatter([torch.ones(8)], [0], group, averaging) for _ in range(2)]
        for gather in gathers:
            (full,) = finish_gather(gather, [(8,)], [0], group)
            assert full.sum() == 8
        for reduction in reductions:
            (shard,) = finish_reduce(reduction, [(8,)], [0], group, averaging)
            assert shard.sum() == 8


def test_gloo_survives_collectives_in_flight(rank_pools: RankPools) -> None:
    # With torch's own kernel of the functional all-gather, a rank aborts within some thousand rounds (see passes.gloo).
    rank_pools[2].run(_keep_many_in_flight, rounds=2000)
