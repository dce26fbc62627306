"""Gloo: kernels for two functional collectives, ``all_gather_into_tensor`` and ``all_to_all_single``, which is how it scatters.

Graphs keep torch's operators, ``_c10d_functional::...``. :func:`install` replaces the kernels behind them when a model is
sharded over Gloo, for the model's kind of device; gathers of NCCL should not go through Python. There are three reasons.

**Both directions.** A connection between two ranks can carry data both ways at once, but in Gloo's own collectives the two
directions take turns as soon as one rank is a little late, and the exchange takes twice the time: a rank says where it wants to
receive behind all that it sends. To receive first does not help: while a thread sends, it holds the connection's lock, and the
I/O thread, which wants to read, spins for it; on one core, until the scheduler takes the core away. So an exchange uses two
groups of the same ranks. Messages to higher ranks go over the group itself, messages to lower ranks over its opposite
(:func:`open_opposite`), and each connection carries data one way. Every message is sent from where the data lies.

**A name that is too long.** torch's all-gather, ``ALLGATHER_COALESCED``, can abort the process. The worker threads of a Gloo
process group write the name of each collective that they finish to one string, without a lock (torch 2.11 to 2.13,
``ProcessGroupGloo::runLoop``). A name of more than 15 characters lies on the heap, and two threads that replace it at the same
time both free it ("malloc(): unaligned tcache chunk detected"). So a group without an opposite gathers with ``ALLTOALL_BASE``.
Reduce-scatters and all-reduces run as ``ALLREDUCE``; both names are short enough.

**GPUs.** torch's all-gather gives Gloo, which reads with the CPU, the address of GPU memory. ``ALLTOALL_BASE`` goes by way of
the host.
"""

import contextlib
import weakref
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from ..fx.symbolic_ranks import supposed_size
from ..fx.torch_internals.core import RecordFunctionFast
from ..fx.torch_internals.distributed import register_work, resolve_process_group
from ..fx.torch_internals.patches import all_gather, all_to_all, install_kernel
from .local_groups import new_local_group

_c10d = torch.ops._c10d_functional
# Of messages; arbitrary, to be no number that a user would take.
_TAG = 0x46534450
_TAG_OF_NO_MESSAGE = 0x7FFFFFFF

#: The tags of messages, by the name of their group. Messages with unequal tags never meet. A tag that stands for what a rank
#: runs makes ranks that run something else wait, instead of reading each other's data.
message_tags: dict[str, int] = {}

# By the group that they are opposite to: they go with it.
_opposites: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


_pretending = [False]


@contextlib.contextmanager
def pretending_gloo() -> Iterator[None]:
    """Let groups of torch's ``fake`` backend pass for groups of Gloo on the CPU, so that graphs are those that it would get."""
    _pretending[0] = True
    try:
        yield
    finally:
        _pretending[0] = False


def backend_of(group_name: str, device: torch.device) -> str:
    """The name of the backend that serves a device in a process group."""
    if _pretending[0] and device.type == "cpu":
        return "gloo"
    if supposed_size(group_name) is not None:
        return "fake"
    process_group = _resolve(group_name)
    try:
        return process_group._get_backend(device).name()
    except RuntimeError:
        return dist.get_backend(process_group)


def copies_what_it_gathers(group_name: str, device: torch.device) -> bool:
    """Whether a gather holds a copy of each rank's shard, once for each rank, until it is waited for."""
    if backend_of(group_name, device) != "gloo":
        return False
    return device.type != "cpu" or not (_pretending[0] or _resolve(group_name) in _opposites)


def open_opposite(group_name: str) -> None:
    """Give a Gloo group another one over the same ranks, for messages to lower ranks.

    A collective call of its ranks, the first time.
    """
    group = _resolve(group_name)
    if group.size() > 1 and group not in _opposites and not _pretending[0]:
        # An earlier group may have had the name.
        message_tags.pop(group_name, None)
        ranks = dist.get_process_group_ranks(group)
        timeout = group._get_backend(torch.device("cpu")).options._timeout
        # Several groups may have the same ranks.
        _opposites[group] = new_local_group(ranks, f"fsdp_opposite of {group_name}", timeout=timeout, backend="gloo")


def break_connections(group_name: str) -> None:
    """Have every rank fail that waits for a message of a Gloo group on the CPU, or will. The group is of no more use.

    A receive that times out closes all connections of its group; ``ProcessGroup.abort`` leaves those who wait alone.
    """
    cpu = torch.device("cpu")
    group = _resolve(group_name)
    if group.size() == 1 or backend_of(group_name, cpu) != "gloo" or _pretending[0]:
        return
    for each in filter(None, (group, _opposites.get(group))):
        neighbour = (each.rank() + 1) % each.size()
        with contextlib.suppress(RuntimeError):
            backend: Any = each._get_backend(cpu)
            backend.recv([torch.empty(1)], neighbour, _TAG_OF_NO_MESSAGE).wait(timedelta(milliseconds=1))


def _resolve(group_name: str) -> ProcessGroup:
    return resolve_process_group(group_name)  # type: ignore[arg-type]


def _exchange(received: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup, whole: Tensor, tag: int = _TAG) -> None:
    """Begin to send each other rank a tensor and to receive one from it.

    Args:
        received: by the rank that sends it.
        sent: by the rank that receives it.
        group: a group that has an opposite.
        whole: waiting for this tensor waits for all of them.
        tag: equal for messages that belong together.
    """
    rank, ranks = group.rank(), group.size()
    cpu = torch.device("cpu")
    up: Any = group._get_backend(cpu)
    down: Any = _opposites[group]._get_backend(cpu)
    # Every rank begins with another neighbour. A message that is empty here is empty there.
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    for source in reversed(others):
        if received[source].numel():
            channel = up if source < rank else down
            register_work(whole, channel.recv([received[source]], source, tag))
    for target in others:
        if sent[target].numel():
            channel = up if target > rank else down
            register_work(whole, channel.send([sent[target]], target, tag))


def _all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    gathered = shard.new_empty([shard.size(0) * group_size, *shard.shape[1:]])
    group = _resolve(group_name)
    has_opposite = shard.device.type == "cpu" and group in _opposites
    if not has_opposite and backend_of(group_name, shard.device) != "gloo":
        return _c10d.all_gather_into_tensor_out(shard, group_size, group_name, out=gathered)
    rows, flat = gathered.view(group_size, -1), shard.reshape(-1)
    # The collective that the messages stand for, in profiles.
    with RecordFunctionFast("fsdp_compile::all_gather"):
        if has_opposite:
            _exchange(rows.unbind(), [flat] * group_size, group, gathered, message_tags.get(group_name, _TAG))
            rows[group.rank()].copy_(flat)
        else:
            work = group.alltoall_base(rows.view(-1), flat.repeat(group_size), [], [])
            register_work(gathered, work)
    return gathered


def _all_to_all_single(source: Tensor, output_split_sizes: list[int], input_split_sizes: list[int], group_name: str) -> Tensor:
    received = source.new_empty([sum(output_split_sizes), *source.shape[1:]])
    group = _resolve(group_name)
    with RecordFunctionFast("fsdp_compile::all_to_all"):
        if group in _opposites:
            pieces, sent = received.split(output_split_sizes), source.contiguous().split(input_split_sizes)
            _exchange(pieces, sent, group, received, message_tags.get(group_name, _TAG))
            pieces[group.rank()].copy_(sent[group.rank()])
        else:
            work = group.alltoall_base(received, source, output_split_sizes, input_split_sizes)
            register_work(received, work)
    return received


def install(device_type: str) -> None:
    """Have functional collectives on a kind of device run as this page says, until ``patches.uninstall()``.

    All-gathers of groups with another backend run as before.
    """
    if _pretending[0]:
        return
    install_kernel(all_gather, _all_gather_into_tensor, device_type)
    if device_type == "cpu":
        install_kernel(all_to_all, _all_to_all_single, device_type)
