"""Gloo: kernels for two functional collectives, ``all_gather_into_tensor`` and ``all_to_all_single``.

Over Gloo, a reduce-scatter is an exchange (``all_to_all_single``) and a sum. Graphs keep torch's operators,
``_c10d_functional::...``. :func:`install` replaces their kernels when a model is sharded over Gloo. It does so only for the
model's kind of device, as gathers of NCCL should not go through Python. There are three reasons to replace them.

**Both directions.** A connection between two ranks can carry data both ways at once. In Gloo's own collectives the two
directions take turns as soon as one rank is a little late, and the exchange takes twice the time. The cause is that a rank
announces a receive only after all data that it sends. To receive first does not help. A thread that sends holds the
connection's lock, and the I/O thread, which wants to read, spins for the lock. On one core, it spins until the scheduler takes
the core away.

So an exchange uses two groups of the same ranks. Messages to higher ranks go over the group itself, messages to lower ranks
over its opposite (:func:`open_opposite`). Each connection then carries data one way. Messages are sent without a copy.

**A name that is too long.** torch's all-gather, ``ALLGATHER_COALESCED``, can abort the process. The worker threads of a Gloo
process group write the name of each finished collective to one string, without a lock (torch 2.11 to 2.13,
``ProcessGroupGloo::runLoop``). A name of more than 15 characters is on the heap. Two threads that replace such a name at the
same time both free it ("malloc(): unaligned tcache chunk detected"). So a group without an opposite gathers with
``ALLTOALL_BASE``. Reduce-scatters and all-reduces run as ``ALLREDUCE``; both names are short enough.

**GPUs.** Gloo reads with the CPU, but torch's all-gather passes it the address of GPU memory. ``ALLTOALL_BASE`` copies through
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

from ..fx.symbolic_ranks import overridden_size
from ..fx.torch_internals.core import RecordFunctionFast
from ..fx.torch_internals.distributed import register_work, resolve_process_group, sequence_number
from ..fx.torch_internals.objects import backend_on, timeout_on
from ..fx.torch_internals.patches import all_gather, all_to_all, install_kernel
from .local_groups import new_local_group

_c10d = torch.ops._c10d_functional
# The default tag of messages: an arbitrary number that users are unlikely to choose.
_TAG = 0x46534450
_TAG_OF_NO_MESSAGE = 0x7FFFFFFF

#: The tag of messages of a group, by the group's name. A receive matches only a send with the same tag. The runtime sets a tag
#: that identifies the program a rank runs. So ranks that run different programs wait, instead of reading each other's data.
message_tags: dict[str, int] = {}

# The opposite of each group. An entry is dropped with its group.
_opposites: weakref.WeakKeyDictionary[ProcessGroup, ProcessGroup] = weakref.WeakKeyDictionary()


# The messages that this rank has begun to exchange over each group, less one for each exchange.
_messages: weakref.WeakKeyDictionary[ProcessGroup, int] = weakref.WeakKeyDictionary()


def collectives_begun(group: ProcessGroup) -> int:
    """Return the number of collectives that this rank has begun over a group.

    Equal on ranks that have begun the same ones, and exchanged no messages between two ranks. Gloo counts these, too.
    """
    return sequence_number(group) - _messages.get(group, 0)


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
    return device.type != "cpu" or not (_pretending[0] or _resolve(group_name) in _opposites)


def open_opposite(group_name: str) -> None:
    """Make the opposite of a Gloo group: a second group of the same ranks, for messages to lower ranks.

    The first call for a group is collective: all of its ranks have to make it. Later calls do nothing.
    """
    group = _resolve(group_name)
    if group.size() > 1 and group not in _opposites and not _pretending[0]:
        # A destroyed group may have had the same name.
        message_tags.pop(group_name, None)
        ranks = dist.get_process_group_ranks(group)
        timeout = timeout_on(group, torch.device("cpu"))
        # Several groups may have the same ranks, so the purpose contains the group's name.
        _opposites[group] = new_local_group(ranks, f"fsdp_opposite of {group_name}", timeout=timeout, backend="gloo")


def break_connections(group_name: str) -> None:
    """Make all ranks fail that wait, now or later, for a message of a Gloo group on the CPU. The group is unusable afterwards.

    A receive that times out closes all connections of its group. ``ProcessGroup.abort`` does not wake ranks that wait. Groups
    of one rank or of other backends are left alone.
    """
    cpu = torch.device("cpu")
    group = _resolve(group_name)
    if group.size() == 1 or backend_of(group_name, cpu) != "gloo" or _pretending[0]:
        return
    for each in filter(None, (group, _opposites.get(group))):
        neighbour = (each.rank() + 1) % each.size()
        with contextlib.suppress(RuntimeError):
            backend: Any = backend_on(each, cpu)
            backend.recv([torch.empty(1)], neighbour, _TAG_OF_NO_MESSAGE).wait(timedelta(milliseconds=1))


def _resolve(group_name: str) -> ProcessGroup:
    return resolve_process_group(group_name)  # type: ignore[arg-type]


def _exchange(received: Sequence[Tensor], sent: Sequence[Tensor], group: ProcessGroup, whole: Tensor, tag: int = _TAG) -> None:
    """Begin to exchange tensors: send one to each other rank, and receive one from each.

    Args:
        received: the tensor to receive into, for each rank that sends.
        sent: the tensor to send, for each rank that receives.
        group: a group that has an opposite.
        whole: the tensor whose wait waits for all messages.
        tag: equal for messages that belong together.
    """
    rank, ranks = group.rank(), group.size()
    cpu = torch.device("cpu")
    up: Any = backend_on(group, cpu)
    down: Any = backend_on(_opposites[group], cpu)
    # Each rank begins with a different neighbour. A message that is empty on one side is empty on the other: both skip it.
    others = [(rank + distance) % ranks for distance in range(1, ranks)]
    messages = 0
    for source in reversed(others):
        if received[source].numel():
            channel = up if source < rank else down
            register_work(whole, channel.recv([received[source]], source, tag))
            messages += channel is up
    for target in others:
        if sent[target].numel():
            channel = up if target > rank else down
            register_work(whole, channel.send([sent[target]], target, tag))
            messages += channel is up
    _messages[group] = _messages.get(group, 0) + messages - 1


def _in_reals(tensor: Tensor) -> Tensor:
    # Gloo exchanges no complex numbers.
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _all_gather_into_tensor(shard: Tensor, group_size: int, group_name: str) -> Tensor:
    gathered = shard.new_empty([shard.size(0) * group_size, *shard.shape[1:]])
    group = _resolve(group_name)
    has_opposite = shard.device.type == "cpu" and group in _opposites
    if not has_opposite and backend_of(group_name, shard.device) != "gloo":
        return _c10d.all_gather_into_tensor_out(shard, group_size, group_name, out=gathered)
    rows, flat = gathered.view(group_size, -1), shard.reshape(-1)
    # Profiles show messages; the range names their collective.
    with RecordFunctionFast("fsdp_compile::all_gather"):
        if has_opposite:
            _exchange(rows.unbind(), [flat] * group_size, group, gathered, message_tags.get(group_name, _TAG))
            rows[group.rank()].copy_(flat)
        elif group_size == 1:
            rows.copy_(flat)
        else:
            work = group.alltoall_base(_in_reals(rows.view(-1)), _in_reals(flat.repeat(group_size)), [], [])
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
        elif group.size() == 1:
            received.copy_(source)
        else:
            work = group.alltoall_base(_in_reals(received), _in_reals(source), output_split_sizes, input_split_sizes)
            register_work(received, work)
    return received


def install(device_type: str) -> None:
    """Replace the kernels of functional collectives on a type of device, until ``patches.uninstall()``.

    The module's docstring has the reasons. All-gathers of groups with another backend run as before.
    """
    if _pretending[0]:
        return
    install_kernel(all_gather, _all_gather_into_tensor, device_type)
    if device_type == "cpu":
        install_kernel(all_to_all, _all_to_all_single, device_type)
