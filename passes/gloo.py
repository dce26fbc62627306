"""Gloo: a functional all-gather that survives other collectives in flight. Importing this module installs it.

The worker threads of a Gloo process group record the name of each collective that they finish in one string, without a lock
(torch 2.11 to 2.13, ``ProcessGroupGloo::runLoop``). Names of more than 15 characters live on the heap, and when two threads
replace one at the same time, both free it: the process aborts ("malloc(): unaligned tcache chunk detected"). Functional
all-gathers run as ``ALLGATHER_COALESCED``, which is too long by four; reduce-scatters and all-reduces run as ``ALLREDUCE``.

On CPU, ``_c10d_functional::all_gather_into_tensor`` is therefore given a kernel that runs ``_ALLGATHER_BASE``. A kernel,
because graphs have to keep the operator: Inductor leaves its input alone until the wait, but not that of the out variant.
"""

import torch
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")


def _all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    gathered = shard.new_empty([shard.size(0) * group_size, *shard.shape[1:]])
    return torch.ops._c10d_functional.all_gather_into_tensor_out(shard, group_size, group_name, out=gathered)


_library.impl("all_gather_into_tensor", torch._disable_dynamo(_all_gather_into_tensor), "CPU")
