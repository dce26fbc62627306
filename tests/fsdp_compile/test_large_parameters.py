"""Training if each matrix has collectives of its own (:mod:`passes.auto.large_parameters`)."""

from __future__ import annotations

import copy
import math
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import (
    SMALL,
    Microbatch,
    Run,
    Schedule,
    Task,
    Trainee,
    all_reduce,
    differences,
    reference,
    reshard_after_backward,
    sgd,
    sync,
)
from tests.common.parity import Batch, assert_same_gradients, regression_batch, squared_error
from tests.fsdp_compile.test_model_parallel import shard_beside, uneven_parallel

pytestmark = pytest.mark.units_apart

_exchange = torch.ops._c10d_functional.all_to_all_single.default

#: Every way to accumulate.
_ACCUMULATE: Schedule = (
    Microbatch((all_reduce(False),)),
    Microbatch((sync(False), reshard_after_backward(False))),
    Microbatch((sync(True),)),
    Microbatch((all_reduce(True), reshard_after_backward(True))),
)


def train_with_separate_matrices(mesh_shape: tuple[int, ...], lowering: str, schedule: Schedule) -> Run:
    """Train with every parameter of two or more dimensions counted as large. Runs on every rank."""
    trainee = Trainee(lowering, mesh_shape, SMALL.build)
    smallest = min(value.numel() * 4 for value in trainee.model.parameters() if value.dim() > 1)
    with patch("passes.auto.large_parameters.MIN_OWN_BUCKET_BYTES", smallest):
        return trainee.train(SMALL, [schedule] * 2, sgd)


def train_by_units() -> None:
    """Train the same model with one collective for each unit. Runs on every rank."""
    Trainee("aot_eager", (2,), SMALL.build).train(SMALL, [(Microbatch(),)], sgd)


@pytest.mark.parametrize(
    ("mesh_shape", "lowering", "schedule"),
    [((2,), "inductor", (Microbatch(),)), pytest.param((2, 2), "aot_eager", _ACCUMULATE, marks=pytest.mark.night)],
)
def test_trains_like_one_process(mesh_shape: tuple[int, ...], lowering: str, schedule: Schedule, rank_pools: RankPools) -> None:
    world = math.prod(mesh_shape)
    runs = rank_pools[world].run(train_with_separate_matrices, mesh_shape=mesh_shape, lowering=lowering, schedule=schedule)
    found = differences(runs, reference(SMALL, world, [len(schedule)] * 2, sgd), 1e-5)
    assert not found, "\n".join(found)
    # More than one for each of three units; otherwise no matrix has a collective of its own.
    assert runs[0].counts("all_gather", "forward")[0] > 3
    assert runs[0].counts("reduce_scatter", "backward")[0] > 3


class Convolutions(nn.Module):
    """Convolutions with biases: one operator computes the gradients of a weight and of a bias, as elements of a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(4, 6, 3), nn.Conv1d(6, 8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x))).square().sum()


def train_convolutions(options: dict[str, Any]) -> int:
    """Train with collectives of their own for weights, check gradients, and count the reductions. Runs on every rank."""
    torch.manual_seed(0)
    model = Convolutions().double()
    whole = copy.deepcopy(model)
    fully_shard(model, mesh=device_mesh((2,)))
    compiled = torch.compile(model, backend=fsdp_backend, options=options)
    batches = [torch.randn(3, 4, 9, dtype=torch.float64) for _ in range(2)]
    with patch("passes.auto.large_parameters.MIN_OWN_BUCKET_BYTES", 4 * 6 * 3 * 8), capture() as captured:
        compiled(batches[dist.get_rank()]).backward()
    sum(whole(batch) for batch in batches).div(2).backward()
    assert_same_gradients(model, whole)
    return sum(node.target == _exchange for node in captured.backward[0].graph_module.graph.nodes)


@pytest.mark.inductor
@pytest.mark.parametrize(("options", "reductions"), [({}, 3), ({"schedule": "auto"}, 1)], ids=["default", "auto"])
def test_one_operator_computes_gradients_of_two_collectives(
    options: dict[str, Any], reductions: int, rank_pools: RankPools
) -> None:
    assert rank_pools[2].run(train_convolutions, options=options) == [reductions] * 2


def test_no_job_takes_the_buckets_of_an_earlier_one(rank_pools: RankPools) -> None:
    # An equal model with equal options, so that its arrangement would do.
    rank_pools[2].run(train_by_units)
    runs = rank_pools[2].run(train_with_separate_matrices, mesh_shape=(2,), lowering="aot_eager", schedule=(Microbatch(),))
    assert runs[0].counts("all_gather", "forward")[0] > 3


def _batch_of_pair(index: int, rank: int, world: int) -> Batch:
    return regression_batch(index, rank // 2, world // 2, dim=5, out=3)


_UNEVEN = Task(partial(models.MLP, dim=5, hidden=7, out=3, layers=2), _batch_of_pair, squared_error)


def train_pieces_around_a_threshold(lowering: str, threshold: str, num_bytes: int) -> Run:
    """Train with tensor parallelism that gives one rank pieces of four rows or columns, the other three. Runs on every rank."""
    trainee = Trainee(lowering, (2, 2), _UNEVEN.build, partial(shard_beside, parallelize=uneven_parallel))
    with patch(threshold, num_bytes):
        return trainee.train(_UNEVEN, [_ACCUMULATE] * 2, sgd)


def check_pieces_around_a_threshold(rank_pools: RankPools, lowering: str, threshold: str, num_bytes: int) -> None:
    """Check training with a threshold that only the larger pieces reach, so that their ranks have more gathers."""
    job = {"lowering": lowering, "threshold": threshold, "num_bytes": num_bytes}
    runs = rank_pools[4].run(train_pieces_around_a_threshold, **job)
    found = differences(runs, reference(_UNEVEN, 4, [len(_ACCUMULATE)] * 2, sgd), 1e-5)
    assert not found, "\n".join(found)
    gathers = [run.counts("all_gather", "forward")[0] for run in runs]
    assert gathers[0] == gathers[2] > gathers[1] == gathers[3]


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.night)])
def test_tensor_parallel_ranks_may_separate_others(lowering: str, rank_pools: RankPools) -> None:
    check_pieces_around_a_threshold(rank_pools, lowering, "passes.auto.large_parameters.MIN_OWN_BUCKET_BYTES", 4 * 5 * 4)
