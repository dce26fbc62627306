"""Pulse: signs of life, by which a rank that waits tells ranks that have ended or stopped from ranks that are slow.

The watchdog of each rank writes one to the store of the job each second, until the rank leaves the job: who the rank is, a
number that grows, and where its main thread is. Only ranks that wait read them. A rank is lost

- if its process has ended: on this host at once;
- if its number has not grown for :data:`SILENT_AFTER_S`: it was stopped, or its host has failed.

A rank without a sign may not have started yet.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import NamedTuple

import torch
import torch.distributed as dist

import passes
from passes.fx.torch_internals.objects import running_frames

from .bounded_store import ANSWERS_WITHIN_S, BoundedStore
from .job import Job

#: Seconds without a sign of life after which a rank counts as lost.
SILENT_AFTER_S = float(os.environ.get("FSDP_COMPILE_SILENT_AFTER_S", "30"))
#: Seconds between two signs of a rank.
_EVERY_S = 1.0
# Seconds within which the store answers a rank that joins.
_JOINS_WITHIN_S = 60.0
# Where nobody looks for the place of a rank: here, in torch and what it generates, and in Python's own library.
_NOT_OF_THE_USER = (
    *(str(Path(found).parent) for found in (torch.__file__, passes.__file__, Path(__file__).parent, os.__file__)),
    "<eval_with_key>",
    "<frozen",
)
_DISTRIBUTED = str(Path(dist.__file__).parent)
_BETWEEN_TWO = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}


class Sign(NamedTuple):
    """A sign of life.

    Attributes:
        host: the name of the host.
        machine: tells machines, and containers with process numbers of their own, apart.
        process: the number of the process.
        number: grows with each sign.
        place: the line that the main thread runs, in the code of the user.
    """

    host: str
    machine: str
    process: int
    number: int
    place: str


class Pulse:
    """The signs of life of the ranks of a job.

    Args:
        store: the store of the job.
        rank: the rank of this process.
    """

    def __init__(self, store: dist.Store, rank: int):
        self._store = BoundedStore(store, ANSWERS_WITHIN_S)
        self._job = Job()
        self._rank = rank
        # A job that was joined again may find signs of the old one.
        self._life = self._store.within(_JOINS_WITHIN_S).add(f"fsdp_compile/pulse/lives/{rank}", 1)
        self._numbers = itertools.count()
        self._due_at = 0.0
        self._machine = _machine()

    def beat(self, now: float) -> None:
        """Write a sign, if one is due. The thread of the watchdog calls this.

        Args:
            now: monotonic time in seconds.

        Raises:
            RuntimeError: the rank has left the job, with ``destroy_process_group()``. The store may be gone.
        """
        self._job.check()
        if now >= self._due_at:
            self._due_at = now + _EVERY_S
            sign = Sign(socket.gethostname(), self._machine, os.getpid(), next(self._numbers), place())
            self._store.set(self._key(self._rank), json.dumps(sign))

    def sign(self, rank: int) -> Sign | None:
        """Return the last sign of a rank; None: it has written none."""
        key = self._key(rank)
        return Sign(*json.loads(self._store.get(key))) if self._store.check([key]) else None

    def watch(self) -> Watch:
        """Begin to look at other ranks."""
        return Watch(self, self._machine)

    def _key(self, rank: int) -> str:
        return f"fsdp_compile/pulse/{self._life}/{rank}"


class Watch:
    """The last sign of life of each rank that a waiting rank has looked at, and the time at which the sign changed.

    Args:
        pulse: the signs of life.
        machine: this machine.
    """

    def __init__(self, pulse: Pulse, machine: str):
        self._pulse = pulse
        self._machine = machine
        self._seen: dict[int, tuple[Sign, float]] = {}

    def lost(self, ranks: Iterable[int]) -> str:
        """Return a text that names a lost rank and the reason; empty: no rank is known to be lost.

        Raises:
            StoreSilent: the store does not answer.
        """
        for rank in ranks:
            sign = self._pulse.sign(rank)
            if sign is None:
                continue
            now = time.monotonic()
            before, since = self._seen.get(rank, (None, now))
            if before is None or before.number != sign.number:
                since = now
            self._seen[rank] = sign, since
            if sign.machine == self._machine and not _exists(sign.process):
                return f"Rank {rank} ({sign.host}, process {sign.process}) has ended. It was last at {sign.place}."
            if now - since > SILENT_AFTER_S:
                return (
                    f"Rank {rank} ({sign.host}, process {sign.process}) has given no sign of life for {now - since:.0f} s. It "
                    f"was last at {sign.place}."
                )
        return ""

    def places(self) -> str:
        """Say where the ranks were that :meth:`lost` has looked at."""
        found = [f"rank {rank} is at {sign.place}" for rank, (sign, _) in sorted(self._seen.items())]
        return f" Where they are: {'; '.join(found)}." if found else ""


def _machine() -> str:
    """Return a text that differs between machines, and between containers with process numbers of their own."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _exists(process: int) -> bool:
    """Return whether a process of this machine runs. One that nobody has waited for yet does not; True if nothing tells."""
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return not Path("/proc/self/stat").exists()
    except OSError:
        return True
    return state not in "ZX"


def place() -> str:
    """Return the line of the user's code that the main thread runs."""
    return _text(_stack(running_frames().get(threading.main_thread().ident or 0)))


def place_of_error(error: BaseException) -> str:
    """Return the line of the user's code from which an exception came."""
    return _text([frame for frame, _ in walk_tb(error.__traceback__)][::-1])


def is_in_collective() -> bool:
    """Return whether the main thread is in a collective of torch, and no other thread communicates.

    An exchange between two ranks, such as ``send``, is no collective.
    """
    main = threading.main_thread().ident
    stacks = {thread: _stack(frame) for thread, frame in running_frames().items()}
    own = itertools.takewhile(_is_not_of_the_user, stacks.pop(main or 0, []))
    names = {frame.f_code.co_name for frame in own if frame.f_code.co_filename.startswith(_DISTRIBUTED)}
    others = itertools.chain.from_iterable(stacks.values())
    return (
        bool(names)
        and not names & _BETWEEN_TWO
        and not any(frame.f_code.co_filename.startswith(_DISTRIBUTED) for frame in others)
    )


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and those around it, the innermost first."""
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return found


def _is_not_of_the_user(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_NOT_OF_THE_USER)


def _text(stack: Sequence[FrameType]) -> str:
    frame = next(itertools.dropwhile(_is_not_of_the_user, stack), next(iter(stack), None))
    if frame is None:
        return "no line of Python"
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}, in {frame.f_code.co_name}"
