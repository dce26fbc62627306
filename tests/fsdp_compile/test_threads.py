"""Models that are trained in threads of their own."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import fsdp_backend, fully_shard
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import shard_units


def make_model(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, mesh, fully_shard)
    return model


def train_in_threads() -> None:
    """Two models with groups of their own, the first steps of which, those that compile, run one after the other."""
    rank, steps = dist.get_rank(), 6
    batches = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    trained = [make_model(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")) for _ in range(2)]
    compiled = [torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) for model in trained]
    for forward in compiled:
        for _ in range(2):
            forward(batches[rank]).square().sum().backward()
    errors: list[BaseException] = []

    def train(forward: Any) -> None:
        try:
            for _ in range(steps - 2):
                forward(batches[rank]).square().sum().backward()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(forward,)) for forward in compiled]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    torch.manual_seed(0)
    alone = models.MLP()
    (alone(batches.flatten(0, 1)).square().sum() * steps / 2).backward()
    for model in trained:
        for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-4)


def test_models_with_groups_of_their_own(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_in_threads)


def share_a_group() -> None:
    """Deterministically at once: one thread is within a forward's gathers when the other one asks for its own."""
    from fsdp_compile.course import eager_run

    model = make_model(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
    group = model._fsdp_unit.mesh.shard_group
    run = eager_run("something", (1,), (group,))
    errors: list[BaseException] = []

    def forward() -> None:
        try:
            model(torch.randn(3, 8))
        except RuntimeError as error:
            errors.append(error)

    run.begin()
    with run:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    (error,) = errors
    with pytest.raises(RuntimeError, match="Two threads communicate over the process group shard at once"):
        raise error


def test_a_group_serves_one_thread_at_a_time(rank_pools: RankPools) -> None:
    rank_pools[2].run(share_a_group)
