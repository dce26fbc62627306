import pytest
import torch

from passes.collectives import gloo
from passes.collectives.divide_factors import Averaging
from passes.collectives.functional import (
    finish_reduce_scatter,
    finish_reduction,
    resolve_averaging,
    start_reduce_scatter,
    supports_averaging,
)
from passes.collectives.gather import finish_gather, start_gather
from tests.common.distributed import RankPools, device_mesh
from tests.passes.tracing import PassTestCase


class TestBackends(PassTestCase):
    def test_only_nccl_averages(self) -> None:
        assert not supports_averaging(self.shard, torch.device("cpu"))
        # The fake backend stands for the usual backend of the device.
        assert supports_averaging(self.shard, torch.device("cuda"))

    def test_averaging_follows_the_backend(self) -> None:
        groups = (self.shard, self.replicate, torch.float32)
        assert resolve_averaging(*groups, torch.device("cpu")) == (Averaging(divides_result=True), (16.0,))
        assert resolve_averaging(*groups, torch.device("cuda")) == (Averaging("avg", "avg"), ())
        assert resolve_averaging(*groups, torch.device("cuda"), force_sum=True) == (Averaging(divides_result=True), (16.0,))


class TestDivision:
    def test_half_precision_is_rounded_once(self) -> None:
        values = torch.arange(1, 2048, dtype=torch.float16)
        factor = torch.tensor(3.3)
        divided = finish_reduction(values, [factor], grad_dtype=torch.float16)
        assert torch.equal(divided, (values.float() / factor).half())
        # The factor rounded to float16 (3.30078) is off already.
        assert not torch.equal(divided, (values.float() / factor.half().float()).half())

    def test_factor_beyond_the_range_of_half_precision(self) -> None:
        values = torch.tensor([60000.0, 35000.0], dtype=torch.float16)
        divided = finish_reduction(values, [torch.tensor(70000.0)], grad_dtype=torch.float16)
        assert torch.equal(divided, (values.float() / 70000).half())
        assert divided[1] == 0.5

    def test_decompression_keeps_what_the_reduction_has(self) -> None:
        reduced = finish_reduction(torch.ones(2, dtype=torch.bfloat16), [torch.tensor(3.0)], grad_dtype=torch.float32)
        # It is divided in the dtype of the reduction, as in torch, and then cast.
        assert torch.equal(reduced, torch.full((2,), 1 / 3, dtype=torch.bfloat16).float())


def _keep_many_in_flight(rounds: int) -> None:
    """Start eight gathers and two reductions before waiting for any, in each round; a job for ranks."""
    gloo.install("cpu")
    group = device_mesh((2,)).get_group().group_name
    for _ in range(rounds):
        gathers = [start_gather([torch.ones(4)], group) for _ in range(8)]
        reductions = [start_reduce_scatter([torch.ones(8)], dims=[0], group=group, op="sum") for _ in range(2)]
        for gather in gathers:
            (full,) = finish_gather(gather, [(8,)], [0], group)
            assert full.sum() == 8
        for reduction in reductions:
            assert finish_reduce_scatter(reduction, group=group).sum() == 8


@pytest.mark.night
def test_gloo_survives_collectives_in_flight(rank_pools: RankPools) -> None:
    # With torch's own kernel of the all-gather, a rank aborts within some thousand rounds (see passes.collectives.gloo).
    rank_pools[2].run(_keep_many_in_flight, rounds=2000)
