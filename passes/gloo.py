"""Gloo: a functional all-gather that survives other collectives in flight. Importing this module installs it for the CPU.

The worker threads of a Gloo process group record the name of each collective that they finish in one string, without a lock
(torch 2.11 to 2.13, ``ProcessGroupGloo::runLoop``). Names of more than 15 characters live on the heap, and when two threads
replace one at the same time, both free it: the process aborts ("malloc(): unaligned tcache chunk detected"). Functional
all-gathers run as ``ALLGATHER_COALESCED``, which is too long by four; reduce-scatters and all-reduces run as ``ALLREDUCE``.

On CPU, ``_c10d_functional::all_gather_into_tensor`` is therefore given a kernel that runs an ``ALLTOALL_BASE`` in a Gloo group,
with a copy of the shard for each other rank. That also costs less: Gloo's all-gather receives into a buffer of its own, and
copies all of it from there. A kernel, because graphs keep the operator that says what they mean.

On CUDA, torch's own gives Gloo, which reads with the CPU, the address of GPU memory; an ``ALLTOALL_BASE`` goes by way of the
host. There the kernel is installed only once somebody shards over Gloo: NCCL's gathers are to go without Python.
"""

import functools

import torch
import torch.distributed as dist
from torch import Tensor

_library = torch.library.Library("_c10d_functional", "IMPL")
_c10d = torch.ops._c10d_functional


def backend_of(group_name: str, device: torch.device) -> str:
    """The name of the backend that serves a device in a process group."""
    process_group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    try:
        return process_group._get_backend(device).name()
    except RuntimeError:
        return dist.get_backend(process_group)


def _all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    gathered = shard.new_empty([shard.size(0) * group_size, *shard.shape[1:]])
    if backend_of(group_name, shard.device) != "gloo":
        return _c10d.all_gather_into_tensor_out(shard, group_size, group_name, out=gathered)
    process_group = dist.distributed_c10d._resolve_process_group(group_name)  # type: ignore[arg-type]
    rows, flat = gathered.view(group_size, -1), shard.reshape(-1)
    received, sent = rows.view(-1), flat
    splits = [flat.numel()] * group_size
    if group_size == 2:
        # The shard itself goes to the only other rank, and the exchange has nothing to copy.
        rank = process_group.rank()
        rows[rank].copy_(flat)
        received, splits[rank] = rows[1 - rank], 0
    else:
        sent = flat.repeat(group_size)
    # What the exchange stands for, for readers of a profile.
    with torch._C._profiler._RecordFunctionFast("fsdp_compile::all_gather"):
        torch._C._distributed_c10d._register_work(gathered, process_group.alltoall_base(received, sent, splits, splits))
    return gathered


@functools.cache
def install_all_gather(device_type: str) -> None:
    """Give the all-gather of a kind of device the kernel that works with Gloo, for the rest of this process."""
    _library.impl("all_gather_into_tensor", torch._disable_dynamo(_all_gather_into_tensor), device_type.upper())


install_all_gather("cpu")
