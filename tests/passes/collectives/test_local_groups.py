"""Process groups that only their own ranks make."""

import torch
import torch.distributed as dist

from fsdp_compile.units.mesh import connect
from passes.collectives.local_groups import new_local_group
from tests.common.distributed import RankPools


def _sum_over(group: dist.ProcessGroup) -> float:
    value = torch.full((1,), float(2 ** dist.get_rank()))
    dist.all_reduce(value, group=group)
    return value.item()


def _groups_of_stages() -> None:
    """Make three groups in the stage of ranks 0 and 1, one in the other stage, and groups of all ranks; a job for ranks."""
    rank = dist.get_rank()
    stage, of_stage = ((0, 1), 3.0) if rank < 2 else ((2, 3), 12.0)
    for purpose in ("first", "second", "second")[: 3 if rank < 2 else 1]:
        group = new_local_group(stage, purpose)
        connect(group.group_name, torch.device("cpu"))
        assert _sum_over(group) == of_stage
    # With torch's numbering of groups, the stages would now wait for each other under different names.
    names = []
    for _ in range(2):
        group = new_local_group((0, 1, 2, 3), "all stages")
        names.append(group.group_name)
        connect(group.group_name, torch.device("cpu"))
        assert _sum_over(group) == 15.0
        dist.destroy_process_group(group)
    assert names[0] != names[1]


def test_ranks_with_unequal_numbers_of_groups_meet(rank_pools: RankPools) -> None:
    rank_pools[4].run(_groups_of_stages)
