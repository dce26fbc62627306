"""Gloo: kernels for functional collectives.

Over Gloo, a reduce-scatter is an exchange (``all_to_all_single``) and a sum. Graphs keep torch's operators,
``_c10d_functional::...``. :func:`install` replaces their kernels when a model is sharded over Gloo. It does so only for the
model's kind of device, as gathers of NCCL should not go through Python. There are three reasons to replace them.

**Channels.** A group on the CPU has connections of the library's own (:mod:`passes.collectives.gloo_channels`). Messages of
gathers and exchanges are sent without a copy.

**A name that is too long.** torch's all-gather, ``ALLGATHER_COALESCED``, can abort the process. The worker threads of a Gloo
process group write the name of each finished collective to one string, without a lock (torch 2.11 to 2.13,
``ProcessGroupGloo::runLoop``). A name of more than 15 characters is on the heap. Two threads that replace such a name at the
same time both free it ("malloc(): unaligned tcache chunk detected"). So a group without channels gathers with
``ALLTOALL_BASE``. Reduce-scatters and all-reduces run as ``ALLREDUCE``; both names are short enough.

**GPUs.** Gloo reads with the CPU, but torch's all-gather passes it the address of GPU memory. ``ALLTOALL_BASE`` copies through
the host.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fx.symbolic_ranks import overridden_size
from ..fx.torch_internals.core import RecordFunctionFast
from ..fx.torch_internals.distributed import REDUCE_OP_TO_STR, register_work, resolve_process_group
from ..fx.torch_internals.objects import backend_on
from ..fx.torch_internals.patches import all_gather, all_reduce, all_reduce_in_place, all_to_all, install_kernel
from . import gloo_channels
from .gloo_channels import Channels, channels_of, open_channels

_c10d = torch.ops._c10d_functional
# The default tag of messages: an arbitrary number that users are unlikely to choose.
_TAG = 0x46534450
# The operations of functional collectives.
_OPERATIONS = {name: operation for operation, name in REDUCE_OP_TO_STR.items()}

#: The tag of messages of a group, by the group's name. A receive matches only a send with the same tag. The runtime sets a tag
#: that identifies the program a rank runs. So ranks that run different programs wait, instead of reading each other's data.
message_tags: dict[str, int] = {}

_pretending = [False]


@contextlib.contextmanager
def pretending_gloo() -> Iterator[None]:
    """Treat groups of torch's ``fake`` backend on the CPU as Gloo groups for the duration of the block.

    So graphs are the same as over Gloo.
    """
    _pretending[0] = True
    try:
        yield
    finally:
        _pretending[0] = False


def backend_of(group_name: str, device: torch.device) -> str:
    """Return the name of the backend that serves a device in a process group.

    A group with a supposed size (:mod:`passes.fx.symbolic_ranks`) has the backend "fake".
    """
    if _pretending[0] and device.type == "cpu":
        return "gloo"
    if overridden_size(group_name) is not None:
        return "fake"
    process_group = _resolve(group_name)
    try:
        return backend_on(process_group, device).name()
    except RuntimeError:
        return dist.get_backend(process_group)


def gather_copies_its_input(group_name: str, device: torch.device) -> bool:
    """Return whether a gather copies this rank's shard once for each rank, and holds the copies until its wait."""
    if backend_of(group_name, device) != "gloo":
        return False
    return device.type != "cpu" or not (_pretending[0] or channels_of(_resolve(group_name)) is not None)


def connect(group_name: str, device_type: str) -> None:
    """Replace kernels for a type of device, and open the channels of a group on the CPU.

    The first call for a group is collective: all of its ranks have to make it.
    """
    install(device_type)
    if device_type == "cpu" and not _pretending[0]:
        group = _resolve(group_name)
        if channels_of(group) is None:
            # A destroyed group may have had the same name.
            message_tags.pop(group_name, None)
        open_channels(group)


def break_connections(group_name: str) -> None:
    """Make all ranks fail that wait, now or later, for a message of a Gloo group on the CPU. The group is unusable afterwards.

    Groups of one rank or of other backends are left alone.
    """
    group = _resolve(group_name)
    if group.size() > 1 and backend_of(group_name, torch.device("cpu")) == "gloo" and not _pretending[0]:
        gloo_channels.break_connections(group)


def _resolve(group_name: str) -> ProcessGroup:
    return resolve_process_group(group_name)  # type: ignore[arg-type]


def _exchange(
    received: Sequence[Tensor], sent: Sequence[Tensor], channels: Channels, whole: Tensor, rank: int, tag: int
) -> None:
    """Begin to exchange tensors: send one to each other rank, and receive one from each.

    Args:
        received: the tensor to receive into, for each rank that sends.
        sent: the tensor to send, for each rank that receives.
        channels: the channels of the group.
        whole: the tensor whose wait waits for all messages.
        rank: the rank of this process in the group.
        tag: equal for messages that belong together.
    """
    ranks = len(sent)
    channels.begun += 1
    # Each rank begins with a different neighbour. A message that is empty on one side is empty on the other: both skip it.
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    for source in reversed(others):
        if received[source].numel():
            channel = channels.up if source < rank else channels.down
            register_work(whole, channel.recv([received[source]], source, tag))
    for target in others:
        if sent[target].numel():
            channel = channels.up if target > rank else channels.down
            register_work(whole, channel.send([sent[target]], target, tag))


def _in_reals(tensor: Tensor) -> Tensor:
    # Gloo exchanges no complex numbers.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _channels(group: ProcessGroup, tensor: Tensor) -> Channels | None:
    return channels_of(group) if tensor.device.type == "cpu" else None


def _all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    gathered = shard.new_empty([shard.size(0) * group_size, *shard.shape[1:]])
    group = _resolve(group_name)
    channels = _channels(group, shard)
    if channels is None and backend_of(group_name, shard.device) != "gloo":
        return _c10d.all_gather_into_tensor_out(shard, group_size, group_name, out=gathered)
    rows, flat = gathered.view(group_size, -1), shard.reshape(-1)
    # Profiles show messages; the range names their collective.
    with RecordFunctionFast("fsdp_compile::all_gather"):
        if channels is not None:
            rank = group.rank()
            _exchange(rows.unbind(), [flat] * group_size, channels, gathered, rank, message_tags.get(group_name, _TAG))
            rows[rank].copy_(flat)
        elif group_size == 1:
            rows.copy_(flat)
        else:
            work = group.alltoall_base(_in_reals(rows.view(-1)), _in_reals(flat.repeat(group_size)), [], [])
            register_work(gathered, work)
    return gathered


def _all_to_all_single(source: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str) -> Tensor:
    received = source.new_empty([sum(output_split_sizes), *source.shape[1:]])
    group = _resolve(group_name)
    channels = _channels(group, source)
    with RecordFunctionFast("fsdp_compile::all_to_all"):
        if channels is not None:
            rank = group.rank()
            pieces, sent = received.split(output_split_sizes), source.contiguous().split(input_split_sizes)
            _exchange(pieces, sent, channels, received, rank, message_tags.get(group_name, _TAG))
            pieces[rank].copy_(sent[rank])
        elif group.size() == 1:
            received.copy_(source)
        else:
            work = group.alltoall_base(_in_reals(received), _in_reals(source), output_split_sizes, input_split_sizes)
            register_work(received, work)
    return received


def _all_reduce(source: Tensor, op: str, group_name: str) -> Tensor:
    return _all_reduce_in_place(source.clone(memory_format=torch.contiguous_format), op, group_name)


def _all_reduce_in_place(tensor: Tensor, op: str, group_name: str) -> Tensor:
    group: Any = _resolve(group_name)
    channels = _channels(group, tensor)
    options = dist.AllreduceOptions()
    options.reduceOp = _OPERATIONS[op.lower()]  # type: ignore[assignment]
    reduced = [_in_reals(tensor) if op.lower() == "sum" else tensor]
    if channels is None:
        register_work(tensor, group.allreduce(reduced, options))
        return tensor
    with RecordFunctionFast("fsdp_compile::all_reduce"):
        channels.begun += 1
        register_work(tensor, channels.up.allreduce(reduced, options))
    return tensor


def install(device_type: str) -> None:
    """Replace the kernels of functional collectives on a type of device, until ``patches.uninstall()``.

    The module's docstring has the reasons. All-gathers of groups with another backend run as before.
    """
    if _pretending[0]:
        return
    install_kernel(all_gather, _all_gather_into_tensor, device_type)
    if device_type == "cpu":
        install_kernel(all_to_all, _all_to_all_single, device_type)
        install_kernel(all_reduce, _all_reduce, device_type)
        install_kernel(all_reduce_in_place, _all_reduce_in_place, device_type)
