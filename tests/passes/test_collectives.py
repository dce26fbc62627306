import itertools

import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from passes.collectives import Averaging, supports_averaging
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
