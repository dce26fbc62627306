"""Watchdog: a thread that gives signs of life, and looks at the logs of all groups at intervals.

A rank that makes no progress posts its position. If it waits, it compares positions with other ranks, and looks whether they
live (:mod:`fsdp_compile.runtime.pulse`).
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .agreement import WARN_AFTER_S, lost
from .board import IN_TORCH
from .bounded_store import StoreSilent
from .collective_log import CollectiveLog
from .pulse import SILENT_AFTER_S, Pulse, Watch

#: Seconds between two rounds of the watchdog.
_TICK_S = 0.25
#: Seconds after which a program counts as slow. We see only the launch of an accelerator's program, which ends long after.
_SLOW_S, _SLOW_ON_ACCELERATOR_S = 1.0, 5.0
_MAX_PAUSE_S = 5.0
#: Seconds after which a program does not wait for a rank that has left it by an exception.
_STUCK_S = 2.0

logger = logging.getLogger(__name__)


class Lookout:
    """The state of the watchdog for one log.

    Args:
        log: the log.
    """

    def __init__(self, log: CollectiveLog):
        self._slow_s = _SLOW_ON_ACCELERATOR_S if log.is_asynchronous else _SLOW_S
        self._neighbours = neighbours(log.agreement.ranks, log.agreement.rank)
        self._watch: Watch | None = None
        self._seen: tuple[Any, ...] = ()
        self._posted: tuple[Any, ...] = ()
        self._seen_at = self._due_at = self._warns_at = self._answered_at = 0.0

    def look(self, log: CollectiveLog, now: float) -> None:
        """Post the position of this rank, if it has not changed for long. Then compare positions if this rank waits.

        Args:
            log: the log.
            now: monotonic time in seconds.

        Raises:
            RuntimeError: the rank has left the job of the log.
        """
        log.job.check()
        step, asking, begun = log.step.number, log.agreement.asking, log.begun()
        if (step, asking, begun) != self._seen or log.failure:
            self._seen, self._seen_at, self._due_at = (step, asking, begun), now, now + self._slow_s
            self._warns_at = now + WARN_AFTER_S
            return
        if now < self._due_at:
            return
        self._due_at = now + min(max((now - self._seen_at) / 2, _TICK_S), _MAX_PAUSE_S)
        waits = log.waits
        try:
            if (*self._seen, waits) != self._posted:
                log.post()
                self._posted = (*self._seen, waits)
            if waits or asking is not None or log.is_asynchronous or not log.is_settled:
                self._compare(log, is_stuck=bool(log.thread) and now - self._seen_at > _STUCK_S)
            if waits and not log.failure:
                self._look_for_lost(log, now, waits)
            self._answered_at = now
        except StoreSilent as error:
            if log.thread and now - max(self._seen_at, self._answered_at) > SILENT_AFTER_S:
                log.fail(lost(str(error), self._text_of_wait(log, now, waits)))

    def _compare(self, log: CollectiveLog, *, is_stuck: bool) -> None:
        """Fail if this rank and another one have parted, or if another one has failed."""
        life = log.agreement.prefix
        if log.learn_of_failure():
            return
        for rank in self._neighbours:
            post = log.position_of(rank)
            # This rank may have recovered meanwhile.
            if post is not None and (reason := log.parted(rank, post, is_stuck)) and life == log.agreement.prefix:
                return log.fail(reason)

    def _look_for_lost(self, log: CollectiveLog, now: float, waits: str) -> None:
        """Fail if a rank is lost that this one may wait for in a program. Warn from time to time."""
        self._watch = self._watch or log.agreement.watch()
        if self._watch is None:
            return
        found = self._watch.lost(self._neighbours)
        # Who is in torch's code may only write a checkpoint, when other ranks have ended.
        if found and waits != IN_TORCH:
            log.fail(lost(found, self._text_of_wait(log, now, waits)))
        elif now > self._warns_at:
            self._warns_at = now + 2 * (now - self._seen_at)
            logger.warning(f"{self._text_of_wait(log, now, waits)}{self._watch.places()}")

    def _text_of_wait(self, log: CollectiveLog, now: float, waits: str) -> str:
        where = f"a collective of torch, after {log.step}" if waits == IN_TORCH else log.step
        return f"Rank {log.agreement.rank} has been in {where} for {now - self._seen_at:.0f} s."


def neighbours(ranks: Sequence[int], rank: int) -> list[int]:
    """Return the ranks whose positions ``rank`` reads: those at distances of powers of two, which in a small group are all."""
    position, distances = ranks.index(rank), [1 << power for power in range(len(ranks).bit_length())]
    found = {ranks[(position + sign * distance) % len(ranks)] for distance in distances for sign in (1, -1)}
    return sorted(found - {rank})


class Watchdog:
    """The thread of a process."""

    def __init__(self) -> None:
        self._lookouts: weakref.WeakKeyDictionary[CollectiveLog, Lookout] = weakref.WeakKeyDictionary()
        self._pulses: weakref.WeakSet[Pulse] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.stop)

    def add(self, log: CollectiveLog) -> None:
        """Look at a log, as long as something refers to it."""
        with self._lock:
            self._lookouts[log] = Lookout(log)
        self._start()

    def add_pulse(self, pulse: Pulse) -> None:
        with self._lock:
            self._pulses.add(pulse)
        self._start()

    def _start(self) -> None:
        # A forked process inherits no threads.
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._run, name="fsdp_compile.watchdog", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End the thread, before the interpreter kills it inside a call of the store."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _TICK_S)

    def _run(self) -> None:
        while not self._stop.wait(_TICK_S):
            now = time.monotonic()
            with self._lock:
                pulses, lookouts = list(self._pulses), list(self._lookouts.items())
            for pulse in pulses:
                with self._dropping(pulse, self._pulses.discard):
                    pulse.beat(now)
            for log, lookout in lookouts:
                with self._dropping(log, self._lookouts.pop):
                    lookout.look(log, now)

    @contextlib.contextmanager
    def _dropping(self, owner: Any, drop: Callable[[Any], Any]) -> Iterator[None]:
        """Drop the owner if the store is gone, and with it the group, or soon the rank."""
        try:
            yield
        except StoreSilent:
            # Perhaps it answers later.
            pass
        except RuntimeError:
            with self._lock:
                drop(owner)


#: The watchdog of this process.
watchdog = Watchdog()
