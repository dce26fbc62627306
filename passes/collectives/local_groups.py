"""Process groups that only their own ranks make: those of other groups make others at the same time, or take no part.

``new_group(use_local_synchronization=True)`` names a group by its ranks and by how many groups this rank has already. Under
that name its ranks meet. Stages of a pipeline, or experts, may have made unequal numbers of groups, and would wait for each
other in vain. So the name here is of what all ranks of the group know.
"""

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..fx.torch_internals.patches import hash_ranks_to_str

# Groups made so far, by purpose and ranks, of each world: a name does not serve twice, not even after its group was destroyed,
# since the store may still hold addresses of the first one.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


def new_local_group(
    ranks: Sequence[int], purpose: str, *, timeout: timedelta | None = None, backend: str | None = None
) -> ProcessGroup:
    """Make a group, a collective call of its ranks alone.

    Args:
        ranks: in the world, of which this one is one.
        purpose: what the group is for, equal on its ranks, and so is the order of calls that share ranks and purpose.
        timeout: of its collectives; None for torch's default.
        backend: None for that of the world.
    """
    made = _made.setdefault(dist.group.WORLD, Counter())
    key = purpose, tuple(ranks)
    name = hashlib.sha1(f"{purpose} {key[1]} {made[key]}".encode(), usedforsecurity=False).hexdigest()
    made[key] += 1

    def make() -> ProcessGroup:
        return dist.new_group(list(ranks), timeout, backend, use_local_synchronization=True, group_desc=purpose)

    if not hash_ranks_to_str.is_known():
        return make()
    with hash_ranks_to_str.replaced(lambda original: lambda ranks: name):
        return make()
