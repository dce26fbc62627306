"""Local process groups: groups that only their own ranks make. Other ranks may make other groups meanwhile, or none.

``new_group(use_local_synchronization=True)`` names a group by its ranks and by the number of groups that this rank has already.
The ranks meet in the store under this name. Pipeline stages or experts may have made unequal numbers of groups, and would wait
for each other in vain. So the name here contains only facts that all ranks of the group know: its purpose, its ranks, and the
number of earlier groups with both.
"""

import hashlib
import weakref
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from ..fx.torch_internals.patches import hash_ranks_to_str

# The number of groups made so far in each world, by purpose and ranks. A name is never used twice, not even after its group was
# destroyed, as the store may still hold addresses of the first group.
_made: weakref.WeakKeyDictionary[Any, Counter[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


def new_local_group(ranks: Sequence[int], purpose: str) -> ProcessGroup:
    """Make a process group, in a collective call of its own ranks.

    Calls with the same ranks and purpose need the same order on all of these ranks.

    Args:
        ranks: global ranks of the group, this rank among them.
        purpose: description of the group, equal on its ranks.
    """
    made = _made.setdefault(dist.group.WORLD, Counter())
    key = purpose, tuple(ranks)
    name = hashlib.sha1(f"{purpose} {key[1]} {made[key]}".encode(), usedforsecurity=False).hexdigest()
    made[key] += 1

    def make() -> ProcessGroup:
        return dist.new_group(list(ranks), use_local_synchronization=True, group_desc=purpose)

    if not hash_ranks_to_str.is_known():
        return make()
    with hash_ranks_to_str.replaced(lambda original: lambda ranks: name):
        return make()
