"""Threads: two that communicate over one process group at once would mix up data."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import fully_shard
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import shard_units


def make_model(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, mesh, fully_shard)
    return model


def share_a_group() -> None:
    """Run a forward in a second thread while the first holds the group, so that both communicate at once deterministically."""
    from fsdp_compile.runtime.collective_log import eager_run

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
