"""Calls of process groups while a model is sharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_compile.units.mesh
from fsdp_compile import fully_shard
from tests.common.distributed import RankPools


def test_communicators_are_made_before_the_first_graph(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL's communicators are made for the groups of the mesh, of smaller gathers, and of separate reductions."""
    connected: list[list[int]] = []

    class Backend:
        def __init__(self, group_name: str):
            self.ranks = dist.get_process_group_ranks(fsdp_compile.units.mesh.resolve_group(group_name))

        def eager_connect_single_device(self, device: torch.device) -> None:
            connected.append(self.ranks)

    def backend(group_name: str, device: torch.device) -> Any:
        return Backend(group_name)

    monkeypatch.setattr(fsdp_compile.units.mesh, "_backend", backend)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    fully_shard(nn.Linear(8, 8), mesh=mesh)
    assert connected == []

    monkeypatch.setattr(fsdp_compile.units.mesh, "backend_of", lambda group_name, device: "nccl")
    fully_shard(nn.Linear(8, 8), mesh=mesh)
    assert connected == [[0, 1, 2, 3], [0, 4]]
    connected.clear()
    model = fully_shard(nn.Linear(8, 8), mesh=mesh["shard"], reshard_after_forward=2)
    assert connected == [[0, 1, 2, 3], [0, 1]]
    connected.clear()
    model.set_separate_reduce_scatter_group()
    assert connected == [[0, 1, 2, 3]]


def test_groups_of_one_world_do_not_serve_in_another() -> None:
    """Names of groups are numbers that restart with each world, so another group can have the name of an old smaller gather."""

    def ranks_of_smaller_gathers() -> list[int]:
        model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4,)), reshard_after_forward=2)
        group_name = model._fsdp_unit.params[0].post_forward_group  # type: ignore[union-attr]
        return dist.get_process_group_ranks(fsdp_compile.units.mesh.resolve_group(group_name))

    for others in ([], [[0, 1, 2, 3], [0, 2], [1, 3]]):
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
        for ranks in others:
            dist.new_group(ranks)
        assert ranks_of_smaller_gathers() == [0, 1]
        dist.destroy_process_group()


def train_on(groups: int) -> None:
    """Train on a mesh made of process groups, and on one that made its own. Compare gradients. Every rank calls this."""
    shape, names = ((2,), ("shard",)) if groups == 1 else ((1, 2), ("replicate", "shard"))
    own = init_device_mesh("cpu", shape, mesh_dim_names=names)
    found: Any = own.get_group() if groups == 1 else own.get_all_groups()
    given = DeviceMesh.from_group(found, "cpu", mesh=None if groups == 1 else own.mesh, mesh_dim_names=names)
    gradients = []
    for mesh in (own, given):
        torch.manual_seed(0)
        model = fully_shard(nn.Linear(5, 3), mesh=mesh)
        torch.manual_seed(dist.get_rank())
        model(torch.randn(2, 5)).square().sum().backward()
        grad: Any = model.weight.grad
        gradients.append(grad.full_tensor())
    torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


@pytest.mark.parametrize("groups", [1, 2])
def test_a_mesh_of_the_users_process_groups(groups: int, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_on, groups=groups)
