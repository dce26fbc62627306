"""Channels: connections of the library's own between the ranks of a Gloo group on the CPU.

Graphs communicate over channels rather than over the group itself, for two reasons.

**Both directions.** A connection between two ranks can carry data both ways at once. In Gloo's own collectives the two
directions take turns as soon as one rank is a little late, and the exchange takes twice the time. The cause is that a rank
announces a receive only after all data that it sends. To receive first does not help. A thread that sends holds the
connection's lock, and the I/O thread, which wants to read, spins for the lock. On one core, it spins until the scheduler takes
the core away. So there are two channels: one carries messages to higher ranks, the other one messages to lower ranks. Each
connection then carries data one way.

**Ranks that wait.** The only way to wake a rank that waits for a message is to close its connections
(:func:`close_channels`). Channels can be opened anew afterwards. A group cannot, as its user holds it.
"""

from __future__ import annotations

import contextlib
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.constants import default_pg_timeout

from ..fx.torch_internals.distributed import get_process_group_store, sequence_number
from ..fx.torch_internals.objects import backend_on, timeout_on

_CPU = torch.device("cpu")
# A tag that no message has.
_TAG_OF_NO_MESSAGE = 0x7FFFFFFF


class Channels:
    """The channels of a group.

    Args:
        group: the group.

    Attributes:
        up, down: the Gloo backends that carry messages to higher, and to lower ranks.
        begun: the number of collectives that this rank has begun over the channels.
    """

    up: Any
    down: Any

    def __init__(self, group: ProcessGroup):
        self.begun = 0
        self._rank, self._size = group.rank(), group.size()
        self._timeout = timeout_on(group, _CPU) or default_pg_timeout
        self._store = get_process_group_store(group)
        self.open()

    def open(self) -> None:
        """Connect the ranks of the group, which all have to call this."""
        # The store may hold addresses of earlier channels, also of a group of this name that was destroyed.
        number = self._store.add(f"fsdp_compile/channels/{self._rank}", 1)
        self.up, self.down = (
            dist.ProcessGroupGloo(
                dist.PrefixStore(f"fsdp_compile/channels/{number}/{direction}", self._store),
                self._rank,
                self._size,
                self._timeout,
            )
            for direction in ("up", "down")
        )

    def close(self) -> None:
        """Make all ranks fail that wait for a message of a channel, now or later."""
        for each in (self.up, self.down):
            _break(each, (self._rank + 1) % self._size)


# An entry is dropped with its group.
_channels: weakref.WeakKeyDictionary[ProcessGroup, Channels] = weakref.WeakKeyDictionary()


def open_channels(group: ProcessGroup) -> None:
    """Open the channels of a Gloo group. The first call for a group is collective, later calls do nothing."""
    if group.size() > 1 and group not in _channels:
        _channels[group] = Channels(group)


def channels_of(group: ProcessGroup) -> Channels | None:
    """Return the channels of a group; None: it has none."""
    return _channels.get(group)


def has_channels(group: ProcessGroup) -> bool:
    """Return whether the ranks of a group communicate over channels, or not at all."""
    return group.size() == 1 or channels_of(group) is not None


def collectives_begun(group: ProcessGroup) -> int:
    """Return the number of collectives that this rank has begun over a group and its channels.

    Equal on ranks that have begun the same ones, and exchanged no messages between two ranks. Gloo counts these, too.

    Raises:
        RuntimeError: the group's backend does not count.
    """
    own = channels_of(group)
    return sequence_number(group) + (0 if own is None else own.begun)


def close_channels(group: ProcessGroup) -> None:
    """Make all ranks fail that wait, now or later, for a message of a group's channels."""
    if (own := channels_of(group)) is not None:
        own.close()


def reopen_channels(group: ProcessGroup) -> None:
    """Open the channels of a group anew, if it has any. All ranks of the group have to call this."""
    if (own := channels_of(group)) is not None:
        own.open()


def break_connections(group: ProcessGroup) -> None:
    """Make all ranks fail that wait, now or later, for a message of a Gloo group on the CPU. The group is unusable afterwards.

    ``ProcessGroup.abort`` does not wake ranks that wait.
    """
    close_channels(group)
    _break(backend_on(group, _CPU), (group.rank() + 1) % group.size())


def _break(backend: Any, neighbour: int) -> None:
    """Close all connections of a Gloo backend, as a receive does that times out."""
    with contextlib.suppress(RuntimeError):
        backend.recv([torch.empty(1)], neighbour, _TAG_OF_NO_MESSAGE).wait(timedelta(milliseconds=1))
