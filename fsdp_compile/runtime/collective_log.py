"""CollectiveLog: the sequence of programs that the ranks of a process group run.

A *program* is a lowered graph, or an operator that communicates outside of a graph. The n-th program over a group must be the
same on all ranks. Three mechanisms ensure that:

**Comparisons.** Ranks compare a graph when they lower it (:mod:`fsdp_compile.runtime.agreement`). They compare a program when
it is about to follow another program for the first time. Ranks with equal histories compare at the same points. A step that
repeats an earlier step compares nothing. An operator that follows an operator is not compared either, so a model that is not
compiled never compares.

**A watchdog.** A rank that waits in a comparison may wait for a rank that is blocked in a collective. So each process has a
thread that notices when the rank makes no progress. The thread posts the position of this rank. If the rank waits, it compares
the positions of other ranks (:mod:`fsdp_compile.runtime.board`). If two have parted, that is announced to all ranks of the
group, and of groups that share programs with it. Gloo's connections are closed, so that blocked ranks fail, too.

**Tags.** Over Gloo on the CPU, messages are tagged with a number computed from all programs that the rank has run. So ranks
with different histories never read each other's messages, even without a comparison: they wait until the watchdog finds them.

The parameters that a program runs for belong to the history: equal blocks share graphs, and a rank may have skipped one. So
does an exception that ends a program, a forward or a backward. A rank that catches it and goes on has parted from ranks that
did not meet it, also if it has run the same programs. Before it goes on, or saves its state, it waits until all ranks have met
it (:meth:`CollectiveLog.settle`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import logging
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from passes.collectives.functional import resolve_group
from passes.collectives.gloo import backend_of, break_connections, close_channels, has_channels, message_tags
from passes.collectives.gloo_channels import collectives_begun
from passes.fx.torch_internals.core import RecordFunctionFast, current_graph_task_id
from passes.fx.torch_internals.distributed import get_process_group_store
from passes.fx.torch_internals.objects import timeout_on
from passes.lowering.arrangement import Arrangement, CannotArrange
from passes.lowering.collective_sequence import Collective, by_unit, identities

from ..units.param_state import optimizer_steps
from .agreement import (
    WARN_AFTER_S,
    Agreement,
    Program,
    RankFailed,
    RanksDisagree,
    Rearrange,
    disagreement,
    failure_of,
    lost,
    ranks_text,
)
from .board import IN_TORCH, Position, Step, difference
from .bounded_store import ANSWERS_WITHIN_S, StoreSilent
from .pulse import SILENT_AFTER_S, Pulse, Watch, is_in_collective, place, place_of_error

#: Roles of process groups that parameters are sharded or replicated over. Each such group has a log of its own.
SHARDING_ROLES = ("shard", "replicate", "reduce")
#: How often the watchdog looks, in seconds.
_TICK_S = 0.25
#: Seconds after which a program counts as slow. We see only the launch of an accelerator's program, which ends long after.
_SLOW_S, _SLOW_ON_ACCELERATOR_S = 1.0, 5.0
_MAX_PAUSE_S = 5.0
#: Seconds after which a program does not wait for a rank that has left it by an exception.
_STUCK_S = 2.0
#: Seconds for which a failed program waits for another rank to announce the reason.
_REASON_WITHIN_S = 2.0
_REMEMBERED = 4096
# The entry for an exception: the rank lacks results that other ranks may have.
_EXCEPTION = Program("exception", (), (), is_graph=False)
_MASK = (1 << 64) - 1

logger = logging.getLogger(__name__)


class _LoggedProgram:
    """A program in a log.

    Attributes:
        program: the program; None: the beginning of the log.
        is_graph: whether the program is a graph.
        key: a number computed from the program, the same on all ranks.
        follows: the programs after which all ranks agreed to run this one.
    """

    __slots__ = ("follows", "is_graph", "key", "program")

    def __init__(self, program: Program | None):
        self.program = program
        self.is_graph = program is not None and program.is_graph
        self.key = int(program.digest[:16], 16) if program is not None else 0
        self.follows: set[_LoggedProgram] = set()

    def __str__(self) -> str:
        return str(self.program) if self.program is not None else "nothing yet"


class CollectiveLog:
    """The programs that this rank has run over one process group.

    Args:
        agreement: compares programs with the other ranks of the group.
        group_name: name of the process group.
        has_tags: whether messages over the group can carry tags.
        is_asynchronous: whether a program returns to Python before its collectives are done.
        begun: returns the collectives that this rank has begun, over each of some process groups; None: nobody counts.
    """

    def __init__(
        self,
        agreement: Agreement,
        group_name: str,
        *,
        has_tags: bool = False,
        is_asynchronous: bool = False,
        begun: Callable[[], tuple[int, ...]] | None = None,
    ):
        self.agreement = agreement
        self.failure = ""
        #: The identifier of the thread that runs a program; 0: no thread does.
        self.thread = 0
        #: Backwards over this group that have begun and not ended, by the identifiers of autograd's tasks.
        self.backwards: set[int] = set()
        #: The logs that share programs with this one, itself included.
        self.family: set[CollectiveLog] = {self}
        #: Names of this group, and of groups that have no log of their own because their ranks are in this group.
        self.group_names = {group_name}
        self.group_name = group_name
        self._has_tags = has_tags
        self._is_asynchronous = is_asynchronous
        self._slow_s = _SLOW_ON_ACCELERATOR_S if is_asynchronous else _SLOW_S
        self._programs: dict[str, _LoggedProgram] = {}
        self._begun = begun or (lambda: ())
        self._beginning = _LoggedProgram(None)
        self._watch: Watch | None = None
        self._begin()
        self._neighbours = _neighbours(agreement.ranks, agreement.rank)

    def _begin(self) -> None:
        self._step = Step(0, self._beginning, 0, begun=self._begun(), updates=optimizer_steps())
        self._steps: deque[Step] = deque([self._step], maxlen=_REMEMBERED)
        self._met: Step | None = None
        self._is_settled = True
        self._seen: Any = None
        self._seen_at = self._due_at = self._warns_at = self._answered_at = 0.0
        self._posted: Any = None

    def restart(self, agreed: set[str]) -> None:
        """Begin a new history after a failure, on all ranks.

        Args:
            agreed: the digests of the programs that all ranks have agreed on.
        """
        self.thread = 0
        self.backwards.clear()
        # Ranks may have agreed on different transitions.
        for known in self._programs.values():
            known.follows.clear()
        self.agreement.begin(agreed)
        self._begin()
        message_tags.pop(self.group_name, None)
        self.failure = ""

    def last_steps(self, count: int) -> list[Step]:
        return list(self._steps)[-count:]

    def includes(self, group_name: str) -> bool:
        """Return whether all ranks of a process group are ranks of this log's group."""
        return set(dist.get_process_group_ranks(resolve_group(group_name))) <= set(self.agreement.ranks)

    def has_ranks_of(self, group_name: str) -> bool:
        """Return whether a process group has the same ranks as this log's group."""
        return set(dist.get_process_group_ranks(resolve_group(group_name))) == set(self.agreement.ranks)

    def shards(self, roles: Mapping[str, str]) -> bool:
        """Return whether a model with these ``roles`` of groups shards or replicates parameters over this group's ranks."""
        return any(role in SHARDING_ROLES and self.has_ranks_of(name) for name, role in roles.items())

    def know(self, program: Program) -> _LoggedProgram:
        """Return the entry of ``program`` in this log, and make one at the first call."""
        return self._programs.setdefault(program.digest, _LoggedProgram(program))

    def agree(self, known: _LoggedProgram, *, may_rearrange: bool) -> None:
        """Wait until all ranks have lowered an equal graph, unless they have agreed on one before.

        Raises:
            RanksDisagree: the graphs differ, or this log failed earlier.
            Rearrange: the graphs can be equal, and ``may_rearrange``.
        """
        assert known.program is not None
        self.check()
        if self.agreement.agree(known.program, self._before(), may_rearrange=may_rearrange):
            known.follows.add(self._step.program)

    def may_run(self, known: _LoggedProgram) -> bool:
        """Return whether a program may run next without a comparison."""
        return self._step.program in known.follows and not self.failure

    def ask(self, known: _LoggedProgram) -> None:
        """Wait until all ranks are about to run this program, unless they agreed earlier to run it after the last one.

        Two operators in a row are not compared.

        Raises:
            RanksDisagree: some rank is about to run another program, or this log failed earlier.
        """
        assert known.program is not None
        self.check()
        if self._step.program in known.follows:
            return
        if known.is_graph or self._step.program.is_graph:
            self.agreement.compare(known.program, self._before())
        known.follows.add(self._step.program)

    def record_exception(self, error: str) -> None:
        """Record that an exception has ended a program, a forward or a backward.

        One exception can end several of them, so nothing is recorded between an exception and :meth:`settle`.

        Args:
            error: the exception, as text.
        """
        if self._is_settled:
            self._is_settled = False
            known = self.know(_EXCEPTION)
            known.follows.add(self._step.program)
            self.push(known, error=error)
            self._met = self._step

    def settle(self) -> None:
        """Wait until all ranks have met the exception that this rank has met. Does nothing if it has met none.

        Raises:
            RankFailed: some rank did not meet it.
            RanksDisagree: ranks have parted otherwise, or some rank is lost.
        """
        if self.backwards and current_graph_task_id() == -1:
            # They have begun and not ended, although none runs.
            self.backwards.clear()
            error = sys.exc_info()[1]
            self.record_exception("an exception that ended a backward" if error is None else _text(error))
        if self._is_settled or self._met is None:
            return
        self.check()
        met, store, waits_for = self._met, self.agreement.store.within(ANSWERS_WITHIN_S), set(self.agreement.ranks)
        waits_for.discard(self.agreement.rank)

        def have_met() -> bool:
            for rank in sorted(waits_for):
                post = self._post_of(rank)
                if post is not None and post.has_met(met):
                    waits_for.discard(rank)
                elif post is not None and (reason := self._parted(rank, post)):
                    self.fail(reason)
                    self.check()
            return not waits_for

        store.set(self._board(self.agreement.rank), self._position().pack())
        try:
            self.agreement.wait(have_met, lambda: sorted(waits_for), f"to meet the exception that it has met ({met.error})")
        except RanksDisagree:
            self.learn_of_failure()
            raise
        self._is_settled = True

    def check(self) -> None:
        """Raise if this log has failed."""
        if self.failure:
            raise failure_of(self.failure)

    def push(self, known: _LoggedProgram, runs_for: int = 0, param: str = "", error: str = "") -> None:
        """Record that this rank begins a program. Arguments as for :meth:`CheckedProgram.begin`."""
        number, mixed = self._step.number, self._step.mixed
        mixed = (mixed * 1000003 + known.key + runs_for) & _MASK
        self._step = Step(number + 1, known, mixed, param, self._begun(), optimizer_steps(), error)
        self._steps.append(self._step)
        if self._has_tags:
            message_tags[self.group_name] = mixed & 0x7FFFFFFF

    def reason_of(self, error: RuntimeError) -> str:
        """Return why a program failed if ranks disagree, else an empty string."""
        if not self.failure and ("gloo" in str(error) or "pair closure" in str(error)):
            # A rank announces the reason before it closes connections. But a connection also closes when a process ends.
            end = time.monotonic() + _REASON_WITHIN_S
            with contextlib.suppress(RuntimeError):
                while not self.learn_of_failure() and time.monotonic() < end:
                    time.sleep(0.02)
        return self.failure

    def _before(self) -> str:
        step = self._step
        title = step.error or (step.program.program.title if step.number else step.program)
        of = f" for {step.param}" if step.param else ""
        return f"{title}{of} (program {step.number} over this group, history {step.mixed:016x})"

    def _position(self, waits: str = "") -> Position:
        step, met = self._step, self._met
        # The state of the agreement after the position, as difference() assumes.
        asking = self.agreement.asking
        exception = None if met is None else (met.number, met.mixed, met.error)
        return Position(step.number, step.mixed, str(step), step.begun, asking, self._begun(), waits, place(), exception)

    # The thread of the watchdog calls the methods below.

    def look(self, now: float) -> None:
        """Post the position of this rank, if it has not changed for long. Then compare positions if this rank waits.

        Args:
            now: monotonic time in seconds.
        """
        step, asking, begun = self._step.number, self.agreement.asking, self._begun()
        if self.failure or (step, asking, begun) != self._seen:
            self._seen, self._seen_at, self._due_at = (step, asking, begun), now, now + self._slow_s
            self._warns_at = now + WARN_AFTER_S
            return
        if now < self._due_at:
            return
        self._due_at = now + min(max((now - self._seen_at) / 2, _TICK_S), _MAX_PAUSE_S)
        waits = self._waits()
        try:
            self._post(waits)
            if waits or asking is not None or self._is_asynchronous or not self._is_settled:
                self._compare(is_stuck=bool(self.thread) and now - self._seen_at > _STUCK_S)
            if waits and not self.failure:
                self._look_for_lost(now, waits)
            self._answered_at = now
        except StoreSilent as error:
            if waits and now - max(self._seen_at, self._answered_at) > SILENT_AFTER_S:
                self.fail(lost(str(error), self._text_of_wait(now, waits)))

    def _post(self, waits: str) -> None:
        if (*self._seen, waits) != self._posted:
            self.agreement.store.within(ANSWERS_WITHIN_S).set(self._board(self.agreement.rank), self._position(waits).pack())
            self._posted = (*self._seen, waits)

    def _compare(self, *, is_stuck: bool) -> None:
        """Fail if this rank and another one have parted, or if another one has failed."""
        life = self.agreement.prefix
        if self.learn_of_failure():
            return
        for rank in self._neighbours:
            post = self._post_of(rank)
            # This rank may have recovered meanwhile.
            if post is not None and (reason := self._parted(rank, post, is_stuck)) and life == self.agreement.prefix:
                return self.fail(reason)

    def _look_for_lost(self, now: float, waits: str) -> None:
        """Fail if a rank is lost that this one may wait for. Warn from time to time."""
        self._watch = self._watch or self.agreement.watch()
        if self._watch is None:
            return
        if found := self._watch.lost(self._neighbours):
            self.fail(lost(found, self._text_of_wait(now, waits)))
        elif now > self._warns_at:
            self._warns_at = now + 2 * (now - self._seen_at)
            logger.warning(f"{self._text_of_wait(now, waits)}{self._watch.places()}")

    def _text_of_wait(self, now: float, waits: str) -> str:
        where = f"a collective of torch, after {self._step}" if waits == IN_TORCH else self._step
        return f"Rank {self.agreement.rank} has been in {where} for {now - self._seen_at:.0f} s."

    def _waits(self) -> str:
        return "program" if self.thread else IN_TORCH if is_in_collective() else ""

    def _post_of(self, rank: int) -> Position | None:
        store, key = self.agreement.store.within(ANSWERS_WITHIN_S), self._board(rank)
        return Position.unpack(store.get(key)) if store.check([key]) else None

    def _parted(self, rank: int, post: Position, is_stuck: bool = False) -> str:
        """Return how this rank and another one, with this position, have parted; empty: they have not."""
        # A rank that waits in a collective of torch wakes only if the user's group becomes unusable.
        groups = {name for log in self.family for name in log.group_names}
        may_recover = self._has_tags and IN_TORCH not in (post.waits, self._waits()) and all(map(has_channels, groups))
        found = difference(tuple(self._steps), post, self.agreement.passed, is_stuck=is_stuck and may_recover)
        if found is None:
            return ""
        names = {"own": ranks_text([self.agreement.rank]), "other": ranks_text([rank])}
        sides = dict(sorted({names["own"]: found.own, names["other"]: found.other}.items()))
        return disagreement(self.agreement.label, sides, names.get(found.failed, ""), may_recover=may_recover)

    def learn_of_failure(self) -> bool:
        """Return whether a rank of the group announced a failure. If so, all logs that share programs fail, too."""
        life = self.agreement.prefix
        # This rank may have recovered meanwhile.
        if not self.failure and (reason := self.agreement.failure()) and life == self.agreement.prefix:
            self.fail(reason)
        return bool(self.failure)

    def fail(self, reason: str) -> None:
        """Make all logs that share programs with this one fail, on all ranks.

        The reason replaces an earlier one from which the ranks could have recovered.
        """
        for log in self.family:
            if not log.failure or (_may_recover(log.failure) and not _may_recover(reason)):
                log.agreement.announce_failure(reason)
                log.failure = reason
        logger.error(reason)
        close = close_channels if _may_recover(reason) else break_connections
        for name in {name for log in self.family for name in log.group_names}:
            close(name)

    def _board(self, rank: int) -> str:
        return f"{self.agreement.prefix}/board/{rank}"


def _may_recover(reason: str) -> bool:
    failure = failure_of(reason)
    return isinstance(failure, RankFailed) and failure.may_recover


def _neighbours(ranks: Sequence[int], rank: int) -> list[int]:
    """Return the ranks whose positions ``rank`` reads: those at distances of powers of two, which in a small group are all."""
    position, distances = ranks.index(rank), [1 << power for power in range(len(ranks).bit_length())]
    found = {ranks[(position + sign * distance) % len(ranks)] for distance in distances for sign in (1, -1)}
    return sorted(found - {rank})


# Collective logs of process groups.

_logs: weakref.WeakKeyDictionary[dist.ProcessGroup, CollectiveLog] = weakref.WeakKeyDictionary()


def _find_logs(group_names: Iterable[str], roles: Mapping[str, str]) -> list[CollectiveLog]:
    """Return the logs of process groups, in the same order on all ranks: by role and name.

    A group whose ranks are all in an earlier group belongs to the log of that group. A group that parameters are sharded or
    replicated over has a log of its own, unless an earlier group has the same ranks.
    """
    found: list[CollectiveLog] = []
    for name in sorted(set(group_names), key=lambda name: (place_of_role(roles.get(name, "")), name)):
        group = resolve_group(name)
        ranks = dist.get_process_group_ranks(group)
        shards = roles.get(name) in SHARDING_ROLES
        around = next((log for log in found if (log.has_ranks_of if shards else log.includes)(name)), None)
        if around is not None:
            around.group_names.add(name)
        elif len(ranks) > 1 and (log := _log_of(group, name, roles.get(name, f"of {ranks_text(ranks)}"))):
            found.append(log)
    for log in found:
        log.family.update(found)
    return found


def place_of_role(role: str) -> int:
    """Return where the logs of a role come in the order that all ranks have."""
    return SHARDING_ROLES.index(role) if role in SHARDING_ROLES else len(SHARDING_ROLES)


def backward_begins(task: int, group_name: str) -> None:
    """Note that a backward begins, which is to reduce gradients over a process group.

    Args:
        task: the identifier of autograd's task.
        group_name: name of the group.
    """
    if (log := _logs.get(resolve_group(group_name))) is not None:
        log.backwards.add(task)


def backward_ends(task: int, group_names: Iterable[str]) -> None:
    """Note that a backward has ended without an exception. Arguments as for :func:`backward_begins`."""
    for name in group_names:
        if (log := _logs.get(resolve_group(name))) is not None:
            log.backwards.discard(task)


def record_exception(error: BaseException, group_names: Iterable[str]) -> None:
    """Record that an exception has ended a program, a forward or a backward over process groups."""
    _record(error, logs_of(group_names))


def _record(error: BaseException, logs: Iterable[CollectiveLog]) -> None:
    for log in logs:
        if not log.failure:
            log.record_exception(_text(error))


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]} ({place_of_error(error)})"


def settle(group_names: Iterable[str]) -> None:
    """Wait until all ranks of process groups have met an exception that this rank has met. See :meth:`CollectiveLog.settle`."""
    for log in logs_of(group_names):
        log.settle()


def logs_of(group_names: Iterable[str]) -> list[CollectiveLog]:
    """Return the logs of process groups, of those that have one."""
    return list(filter(None, (_logs.get(resolve_group(name)) for name in group_names)))


def _log_of(group: dist.ProcessGroup, name: str, label: str) -> CollectiveLog | None:
    if group not in _logs:
        store = get_process_group_store(group)
        # A fake group has no other ranks, MPI has no store.
        if "fake" in dist.get_backend(group) or store is None:
            return None
        ranks = dist.get_process_group_ranks(group)
        agreement = Agreement(store, ranks, dist.get_rank(), label=label, timeout_s=_timeout_s(group), pulse=_pulse_of_job())
        has_tags = backend_of(name, torch.device("cpu")) == "gloo"
        is_asynchronous = torch.accelerator.is_available() and dist.get_backend(group) != "gloo"
        _logs[group] = log = CollectiveLog(
            agreement, name, has_tags=has_tags, is_asynchronous=is_asynchronous, begun=_counter([group, dist.group.WORLD])
        )
        message_tags.pop(name, None)
        _watchdog.add(log)
    return _logs[group]


def _counter(groups: Iterable[dist.ProcessGroup | None]) -> Callable[[], tuple[int, ...]]:
    """Return a function that returns the number of collectives that this rank has begun over each group since now."""
    # The logs would keep their groups alive.
    counted = []
    for group in dict.fromkeys(groups):
        # Not every backend counts.
        with contextlib.suppress(RuntimeError):
            if group is not None:
                counted.append((weakref.ref(group), collectives_begun(group)))

    def begun() -> tuple[int, ...]:
        living = [(group(), first) for group, first in counted]
        return tuple(collectives_begun(group) - first for group, first in living if group is not None)

    return begun


def _pulse_of_job() -> Pulse | None:
    """Return the signs of life of the job's ranks, and begin to give them; None: ranks have no store."""
    world = dist.group.WORLD
    if world is None or (store := get_process_group_store(world)) is None:
        return None
    if world not in _pulses:
        _pulses[world] = pulse = Pulse(store, dist.get_rank())
        # At once: a rank may end before the watchdog's first round.
        pulse.beat(time.monotonic())
        _watchdog.add_pulse(pulse)
    return _pulses[world]


_pulses: weakref.WeakKeyDictionary[dist.ProcessGroup, Pulse] = weakref.WeakKeyDictionary()


def _timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a group's collectives in seconds."""
    return (timeout_on(group) or default_pg_timeout).total_seconds()


_Owner = TypeVar("_Owner")


class _Watchdog:
    """The watchdog: a thread that gives signs of life, and looks at all logs, at intervals."""

    def __init__(self) -> None:
        self._logs: weakref.WeakSet[CollectiveLog] = weakref.WeakSet()
        self._pulses: weakref.WeakSet[Pulse] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self.stop)

    def add(self, log: CollectiveLog) -> None:
        with self._lock:
            self._logs.add(log)
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
            self._for_each(self._pulses, Pulse.beat)
            self._for_each(self._logs, CollectiveLog.look)

    def _for_each(self, owners: weakref.WeakSet[_Owner], do: Callable[[_Owner, float], None]) -> None:
        with self._lock:
            found = list(owners)
        for owner in found:
            try:
                do(owner, time.monotonic())
            except StoreSilent:
                # Perhaps it answers later.
                continue
            except RuntimeError:
                # The store is gone, and with it the group, or soon the rank.
                with self._lock:
                    owners.discard(owner)


_watchdog = _Watchdog()


# Runs of programs.


class CheckedProgram:
    """A program, with the logs of the process groups that it communicates over.

    Call :meth:`begin`, then use the run as a context manager around the communication.

    Args:
        program_over: returns the program as the ranks of a log compare it.
        group_names: names of the process groups.
        roles: the role of each group in the mesh, by name.
        label: the name of the communication in profiles; empty: only the collectives have names.
    """

    def __init__(
        self,
        program_over: Callable[[CollectiveLog], Program],
        group_names: Sequence[str],
        roles: Mapping[str, str],
        label: str = "",
    ):
        self._program_over = program_over
        self._label = label
        self._range: Any = None
        self.group_names = group_names
        self._roles = roles
        self._bind()

    def _bind(self) -> None:
        # Groups are new if the default process group was destroyed and created again.
        self._world = weakref.ref(dist.group.WORLD) if dist.group.WORLD is not None else lambda: None
        logs = _find_logs(self.group_names, self._roles)
        self._over = [(log, log.know(self._program_over(log))) for log in logs]
        # Ranks of another parallelism, such as experts, may rightly run a graph for parameters of other names.
        self._sharding = {log for log in logs if log.shards(self._roles)}

    def begin(self, runs_for: int = 0, param: str = "") -> None:
        """Wait until all ranks are about to run this program, unless they agreed earlier to run it after the last one.

        Args:
            runs_for: a number made of the parameters that a graph runs for, equal on all ranks; 0: the program names them.
            param: the name of one of these parameters, for messages.

        Raises:
            RanksDisagree: some rank is about to run another program.
            RuntimeError: another thread runs a program over the same group.
        """
        if self._world() is not dist.group.WORLD:
            self._bind()
        for log, _ in self._over:
            if log.thread not in (0, threading.get_ident()):
                raise RuntimeError(
                    f"Two threads communicate over the process group {log.agreement.label} at once, so their order may differ "
                    "between ranks. Train the models one after the other, in one thread."
                )
            log.settle()
        for log, known in self._over:
            if not log.may_run(known):
                _together(self._over, CollectiveLog.ask, self._roles)
                break
        for log, known in self._over:
            log.push(known, runs_for if log in self._sharding else 0, param)

    def __enter__(self) -> None:
        thread = threading.get_ident()
        for log, _ in self._over:
            log.thread = thread
        if self._label:
            self._range = RecordFunctionFast(self._label)
            self._range.__enter__()

    def __exit__(self, _kind: Any, error: BaseException | None, _traceback: Any) -> None:
        if self._label:
            self._range.__exit__(None, None, None)
        for log, _ in self._over:
            log.thread = 0
        if isinstance(error, RuntimeError):
            self._explain(error)
        if error is not None:
            _record(error, [log for log, _ in self._over])

    def _explain(self, error: RuntimeError) -> None:
        for log, _ in self._over:
            if reason := log.reason_of(error):
                raise failure_of(reason) from error


def _together(over: Sequence[tuple[CollectiveLog, _LoggedProgram]], agree: Any, roles: Mapping[str, str]) -> None:
    for position, (log, known) in enumerate(over):
        try:
            agree(log, known)
        except RanksDisagree as error:
            # Tell the other groups. With replicas, ranks that share no shard group with the rank at fault would wait for ranks
            # that do. Ranks of another parallelism may not compare this graph, and would wait within it.
            for other, (following, _) in enumerate(over):
                if not following.shards(roles):
                    following.agreement.announce_failure(str(error))
                elif other > position:
                    following.agreement.fail(str(error))
            log.learn_of_failure()
            raise


@dataclass
class _Arrangements:
    """The arrangements that ranks have agreed on for graphs with the same options and collectives of the same units.

    Attributes:
        by_kind: the arrangements in the order in which ranks agreed on them, by what the graph does with its buckets.
        differ: whether some rank's graph had an arrangement that was not its own.
    """

    by_kind: dict[int, dict[Arrangement, None]] = field(default_factory=dict)
    differ: bool = False

    def known(self, kind: int) -> list[Arrangement]:
        """Return the arrangements that a rank tries for a graph whose own is new.

        Those for graphs that do something else count only if ranks differ. Then the own arrangement of some rank may be known,
        so that it asks nobody.
        """
        kinds = [kind, *(self.by_kind if self.differ else ())]
        return list(dict.fromkeys(itertools.chain.from_iterable(self.by_kind.get(one, ()) for one in kinds)))


# Arrangements of all models. Ranks do not compare an arrangement again that they have agreed on for an earlier model.
_arrangements: dict[Any, _Arrangements] = {}
# A rank may get the arrangement of another once for each group that it shards or replicates over.
_MOST_REARRANGED = 3

_Graph = TypeVar("_Graph")


def agree_on_graph(
    stage: str,
    graph: _Graph,
    sequence_of: Callable[[_Graph], Sequence[Collective]],
    rearranged: Callable[[Arrangement], _Graph],
    group_names: Mapping[str, str],
    kind: tuple[int, int],
) -> tuple[_Graph, CheckedProgram]:
    """Wait until all ranks of a graph's process groups have scheduled a graph with the same collectives.

    If ranks have graphs with the same collectives, in other buckets or another order, all arrange theirs as the first rank. A
    rank that schedules a graph alone arranges it as one that the ranks have agreed on.

    Args:
        stage: "forward" or "backward".
        graph: the scheduled graph.
        sequence_of: returns the collectives of a scheduled graph.
        rearranged: returns the graph, scheduled with another arrangement; raises :class:`CannotArrange`.
        group_names: the role of each process group of the model's sharding, by name. The ranks of these groups take part even
            if the graph does not communicate over the group, as then no rank may.
        kind: a number for what decides about arrangements besides the graph, as the user's options: if it differs, no graph
            takes the arrangement of another. And a number for what the graph does with its buckets.

    Returns:
        The scheduled graph to use, and the graph as a program to run.

    Raises:
        RanksDisagree: the sequences differ, or some ranks did not post theirs in time.
    """
    sequence = sequence_of(graph)
    logs = _find_logs([*group_names, *(collective.group for collective in sequence)], group_names)
    arrangement = Arrangement.of(sequence)
    options, does = kind
    agreed_on = _arrangements.setdefault((*sorted(group_names), arrangement.by_unit, options), _Arrangements())

    def have_agreed(sequence: Sequence[Collective]) -> bool:
        over = _programs(stage, sequence, group_names)
        return all(log.agreement.has_agreed(over(log)) for log in logs)

    known = agreed_on.known(does)
    if known and not have_agreed(sequence):
        for other in known:
            with contextlib.suppress(CannotArrange):
                candidate = rearranged(other)
                if have_agreed(found := sequence_of(candidate)):
                    graph, sequence, arrangement = candidate, found, other
                    agreed_on.differ = True
                    break
    for attempt in range(_MOST_REARRANGED + 1):
        over = _programs(stage, sequence, group_names)
        agree = functools.partial(CollectiveLog.agree, may_rearrange=attempt < _MOST_REARRANGED)
        try:
            _together([(log, log.know(over(log))) for log in logs], agree, group_names)
        except Rearrange as error:
            agreed_on.differ = True
            if error.arrangement != arrangement:
                with contextlib.suppress(CannotArrange):
                    graph, arrangement = rearranged(error.arrangement), error.arrangement
                    sequence = sequence_of(graph)
            continue
        break
    if logs:
        agreed_on.by_kind.setdefault(does, {})[arrangement] = None
    used = {collective.group for collective in sequence}
    return graph, CheckedProgram(over, [log.group_name for log in logs if log.group_names & used], group_names)


def _programs(stage: str, sequence: Sequence[Collective], group_names: Mapping[str, str]) -> Callable[[CollectiveLog], Program]:
    """Return a function that makes a graph's program as the ranks of a log compare it."""
    used = {collective.group for collective in sequence}
    arrangement = Arrangement.of(sequence)

    def over(log: CollectiveLog) -> Program:
        # Tensor-parallel ranks, and experts, may hold pieces of unequal size, which then are in other buckets. So only ranks
        # that shard together compare everything. Other ranks compare which units communicate, and the model's own collectives.
        if not log.shards(group_names):
            compared, groups = by_unit(sequence), {name for name in used if log.includes(name)}
        else:
            sharding = [name for name, role in group_names.items() if role in SHARDING_ROLES]
            within = {name for name in sharding if log.includes(name) and not log.has_ranks_of(name)}
            compared, groups = [collective for collective in sequence if collective.group not in within], used
        lines = [str(collective) for collective in compared]
        return Program(f"{stage} graph", lines, identities(compared, groups), arrangement=arrangement)

    return over


#: Functions that are called with each operator that communicates outside of a graph, as text, before it runs.
eager_observers: list[Callable[[str], None]] = []


def eager_run(label: str, shape: tuple[int, ...], group_names: tuple[str, ...], params: tuple[str, ...] = ()) -> CheckedProgram:
    """Tell :data:`eager_observers` of an operator that communicates outside of a graph, and return the run of the operator.

    Args:
        label: the operator, and the parameter or unit that it works on.
        shape: sizes that must be equal on all ranks, such as the parameter's.
        group_names: names of the shard group, of the replicate group (empty if it is not used), and of others.
        params: the names of the parameters, if the label does not tell them.
    """
    for observe in eager_observers:
        observe(label)
    return _eager_run(label, shape, group_names, params)


@functools.lru_cache(maxsize=1 << 16)
def _eager_run(label: str, shape: tuple[int, ...], group_names: tuple[str, ...], params: tuple[str, ...]) -> CheckedProgram:
    names = f" ({', '.join(params)})" if params else ""
    program = Program(f"{label}{names} outside of a compiled graph", (), (str(shape),), is_graph=False)
    roles = {name: role for name, role in zip(group_names, ("shard", "replicate"), strict=False) if name}
    return CheckedProgram(lambda _log: program, list(filter(None, group_names)), roles, f"FSDP::{label}")
