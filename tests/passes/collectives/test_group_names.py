"""Names of process groups that are equal on all ranks."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.collectives.functional import group_ranks
from passes.collectives.group_names import name_of, name_on_mesh, share_name


def names_of(rank: int) -> tuple[list[str], list[list[int]]]:
    """Return the names of all groups that a rank of eight is in, and their ranks."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=8)
    try:
        of_names = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
        data = of_names["dp", "tp"]._flatten("data")
        meshes = [
            *((init_device_mesh("cpu", (2, 4)), dim) for dim in (0, 1)),
            *((of_names["dp", "tp"], dim) for dim in (0, 1)),
            (data, 0),
            # Another mesh alike, the ranks in another order, and half of the ranks.
            (init_device_mesh("cpu", (2, 4)), 1),
            (DeviceMesh("cpu", [[0, 3, 5, 6], [1, 2, 4, 7]]), 1),
            (DeviceMesh("cpu", [[0, 1], [2, 3]] if rank < 4 else [[4, 5], [6, 7]]), 0),
            (init_device_mesh("cpu", (8,)), 0),
        ]
        names = [name_on_mesh(mesh, dim) for mesh, dim in meshes]
        return names, [list(group_ranks(name)) for name in names]
    finally:
        dist.destroy_process_group()


def test_names_are_equal_on_all_ranks() -> None:
    names, ranks = names_of(0)
    assert names[:6] == [
        "2_ranks_stride_4",
        "4_ranks_stride_1",
        "2_ranks_stride_4_2",
        "2_ranks_stride_1",
        "4_ranks_dc998727",
        "4_ranks_stride_1_2",
    ]
    assert ranks[:6] == [[0, 4], [0, 1, 2, 3], [0, 4], [0, 1], [0, 1, 4, 5], [0, 1, 2, 3]]
    for rank in range(1, 8):
        others, ranks = names_of(rank)
        # The halves of the ranks have meshes of their own.
        assert others[:7] + others[8:] == names[:7] + names[8:]
        assert all(rank in of_group for of_group in ranks)


def test_a_name_serves_once() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    try:
        group = dist.new_group([0, 1])
        assert name_of(group) == group.group_name
        assert share_name(group, "pair") == share_name(group, "pair") == name_of(group) == "pair"
        dist.destroy_process_group(group)
        del group
        again = dist.new_group([0, 2])
        assert share_name(again, "pair") == "pair_2"
        assert group_ranks("pair_2") == [0, 2]
        with pytest.raises((RuntimeError, ValueError)):
            group_ranks("pair")
    finally:
        dist.destroy_process_group()
