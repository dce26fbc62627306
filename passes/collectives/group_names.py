"""Names of process groups that are equal on all ranks, so that ranks have equal graphs.

Operators in a graph hold the name of a group. torch names the groups of a mesh dimension, of which each rank is in one, by
numbers or by their ranks, so that two ranks have different names for what does the same. A *shared name* is another name of a
group. It contains only facts that all ranks of the mesh know.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from ..fx.torch_internals.distributed import register_process_group
from ..fx.torch_internals.objects import all_ranks_of

# The shared names by group, and those that were given in each world, also to groups that exist no more.
_names: weakref.WeakKeyDictionary[ProcessGroup, str] = weakref.WeakKeyDictionary()
_given: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()


def name_on_mesh(mesh: DeviceMesh, dim: int) -> str:
    """Return the shared name of this rank's group of a mesh dimension.

    It tells the number of ranks, and their distance among the ranks of the whole mesh. The group with all ranks of the mesh
    keeps its own name.
    """
    group, everyone = mesh.get_group(dim), all_ranks_of(mesh)
    ranks = dist.get_process_group_ranks(group)
    if len(ranks) == len(everyone):
        return str(group.group_name)
    return share_name(group, f"{len(ranks)}_ranks_{_distances(ranks, everyone)}")


def share_name(group: ProcessGroup, name: str) -> str:
    """Return the shared name of a group, which gets one at the first call.

    Calls with the same ``name`` for several groups need the same order on all of their ranks.

    Args:
        group: the group.
        name: tells groups of one rank apart, and is equal on all ranks.
    """
    if group not in _names:
        given = _given.setdefault(dist.group.WORLD, set())
        numbered = (f"{name}_{number}" for number in itertools.count(2))
        found = next(each for each in itertools.chain([name], numbered) if each not in given)
        register_process_group(found, group)  # type: ignore[arg-type]
        given.add(found)
        _names[group] = found
    return _names[group]


def name_of(group: ProcessGroup) -> str:
    """Return the shared name of a group; the name that torch gave it, if it has none."""
    return _names.get(group) or str(group.group_name)


def _distances(ranks: Sequence[int], everyone: Sequence[int]) -> str:
    """Return a text that is equal for all groups into which a mesh dimension divides the ranks of a mesh."""
    places = [everyone.index(rank) for rank in ranks]
    distances = [place - places[0] for place in places]
    stride = distances[1] if len(distances) > 1 else 1
    if distances == [index * stride for index in range(len(places))] and [*everyone] == [*range(len(everyone))]:
        return f"stride_{stride}"
    return hashlib.sha1(f"{distances} {everyone}".encode(), usedforsecurity=False).hexdigest()[:8]
