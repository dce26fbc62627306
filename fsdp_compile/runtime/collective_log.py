"""CollectiveLog: the sequence of programs that the ranks of a process group run.

A *program* is a lowered graph, or an operator that communicates outside of a graph. The n-th program over a group must be the
same on all ranks. Three mechanisms ensure that:

**Comparisons.** Ranks compare a graph when they lower it (:mod:`fsdp_compile.runtime.agreement`). They compare a program when
it is about to follow another program for the first time. Ranks with equal histories compare at the same points. A step that
repeats an earlier step compares nothing. An operator that follows an operator is not compared either, so a model that is not
compiled never compares.

**A watchdog.** A rank that waits in a comparison may wait for a rank that is blocked in a collective. So each process has a
thread that notices when the rank makes no progress (:mod:`fsdp_compile.runtime.watchdog`). The thread posts the position of
this rank. If the rank waits, it compares the positions of other ranks (:mod:`fsdp_compile.runtime.board`). If two have parted,
that is announced to all ranks of the group, and of groups that share programs with it. Gloo's connections are closed, so that
blocked ranks fail, too.

**Tags.** Over Gloo on the CPU, messages are tagged with a number computed from all programs that the rank has run. So ranks
with different histories never read each other's messages, even without a comparison: they wait until the watchdog finds them.

The parameters that a program runs for belong to the history: equal blocks share graphs, and a rank may have skipped one. So
does an exception that ends a program, a forward or a backward. A rank that catches it and goes on has parted from ranks that
did not meet it, also if it has run the same programs. Before it goes on, or saves its state, it waits until all ranks have met
it (:meth:`CollectiveLog.settle`).
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from passes.collectives.functional import resolve_group
from passes.collectives.gloo import break_connections, message_tags
from passes.collectives.gloo_channels import close_channels, has_channels
from passes.fx.torch_internals.core import current_graph_task_id

from ..units.param_state import optimizer_steps
from .agreement import (
    Agreement,
    Program,
    RanksDisagree,
    disagreement,
    failure_of,
    may_recover,
    ranks_text,
)
from .board import IN_PROGRAM, IN_TORCH, Position, Step, difference
from .bounded_store import ANSWERS_WITHIN_S
from .job import Job
from .pulse import is_in_collective, place, place_of_error
from .report import write_report

#: Roles of process groups that parameters are sharded or replicated over. Each such group has a log of its own.
SHARDING_ROLES = ("shard", "replicate", "reduce")
#: Seconds for which a failed program waits for another rank to announce the reason.
_REASON_WITHIN_S = 2.0
_REMEMBERED, _REPORTED = 4096, 200
# The entry for an exception: the rank lacks results that other ranks may have.
_EXCEPTION = Program("exception", (), (), is_graph=False)
_MASK = (1 << 64) - 1

logger = logging.getLogger(__name__)


class LoggedProgram:
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
        self.follows: set[LoggedProgram] = set()

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
        self.is_asynchronous = is_asynchronous
        self._programs: dict[str, LoggedProgram] = {}
        self.begun = begun or (lambda: ())
        self._beginning = LoggedProgram(None)
        #: The job of the group.
        self.job = Job()
        self._begin()

    def _begin(self) -> None:
        self.step = Step(0, self._beginning, 0, begun=self.begun(), updates=optimizer_steps(), time=time.time())
        self._steps: deque[Step] = deque([self.step], maxlen=_REMEMBERED)
        self._met: Step | None = None
        self.is_settled = True

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

    def history(self) -> dict[str, Any]:
        """Return what this rank has run last, as a report has it."""
        program = self.step.program.program
        return {
            "group": self.agreement.label,
            "ranks": list(self.agreement.ranks),
            "steps": [
                {"number": step.number, "what": str(step), "history": step.mixed, "time": step.time}
                for step in self.last_steps(_REPORTED)
            ],
            "collectives": [] if program is None else list(program.lines),
            "asking": self.agreement.asking,
            "waits": self.waits,
        }

    def includes(self, group_name: str) -> bool:
        """Return whether all ranks of a process group are ranks of this log's group."""
        return set(dist.get_process_group_ranks(resolve_group(group_name))) <= set(self.agreement.ranks)

    def has_ranks_of(self, group_name: str) -> bool:
        """Return whether a process group has the same ranks as this log's group."""
        return set(dist.get_process_group_ranks(resolve_group(group_name))) == set(self.agreement.ranks)

    def shards(self, roles: Mapping[str, str]) -> bool:
        """Return whether a model with these ``roles`` of groups shards or replicates parameters over this group's ranks."""
        return any(role in SHARDING_ROLES and self.has_ranks_of(name) for name, role in roles.items())

    def know(self, program: Program) -> LoggedProgram:
        """Return the entry of ``program`` in this log, and make one at the first call."""
        return self._programs.setdefault(program.digest, LoggedProgram(program))

    def agree(self, known: LoggedProgram, *, may_rearrange: bool) -> None:
        """Wait until all ranks have lowered an equal graph, unless they have agreed on one before.

        Raises:
            RanksDisagree: the graphs differ, or this log failed earlier.
            Rearrange: the graphs can be equal, and ``may_rearrange``.
        """
        assert known.program is not None
        self.check()
        if self.agreement.agree(known.program, self._before(), may_rearrange=may_rearrange):
            known.follows.add(self.step.program)

    def may_run(self, known: LoggedProgram) -> bool:
        """Return whether a program may run next without a comparison."""
        return self.step.program in known.follows and not self.failure

    def ask(self, known: LoggedProgram) -> None:
        """Wait until all ranks are about to run this program, unless they agreed earlier to run it after the last one.

        Two operators in a row are not compared, unless the second is a step of an optimizer.

        Raises:
            RanksDisagree: some rank is about to run another program, or this log failed earlier.
        """
        assert known.program is not None
        self.check()
        if self.step.program in known.follows:
            return
        if known.is_graph or known.program.is_step or self.step.program.is_graph:
            self.agreement.compare(known.program, self._before())
        known.follows.add(self.step.program)

    def record_exception(self, error: str) -> None:
        """Record that an exception has ended a program, a forward or a backward.

        One exception can end several of them, so nothing is recorded between an exception and :meth:`settle`.

        Args:
            error: the exception, as text.
        """
        if self.is_settled:
            self.is_settled = False
            known = self.know(_EXCEPTION)
            known.follows.add(self.step.program)
            self.push(known, error=error)
            self._met = self.step

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
            self.record_exception("an exception that ended a backward" if error is None else text_of(error))
        met, waits_for = self._met, set(self.agreement.ranks)
        if self.is_settled or met is None:
            return
        self.check()
        waits_for.discard(self.agreement.rank)

        def have_met() -> bool:
            for rank in sorted(waits_for):
                post = self.position_of(rank)
                if post is not None and post.has_met(met):
                    waits_for.discard(rank)
                elif post is not None and (reason := self.parted(rank, post)):
                    self.fail(reason)
                    self.check()
            return not waits_for

        self.post()
        try:
            self.agreement.wait(have_met, lambda: sorted(waits_for), f"to meet the exception that it has met ({met.error})")
        except RanksDisagree:
            self.learn_of_failure()
            raise
        self.is_settled = True

    def check(self) -> None:
        """Raise if this log has failed."""
        if self.failure:
            raise failure_of(self.failure)

    def push(self, known: LoggedProgram, runs_for: int = 0, param: str = "", error: str = "") -> None:
        """Record that this rank begins a program. Arguments as for :meth:`CheckedProgram.begin`."""
        number, mixed = self.step.number, self.step.mixed
        mixed = (mixed * 1000003 + known.key + runs_for) & _MASK
        self.step = Step(number + 1, known, mixed, param, self.begun(), optimizer_steps(), time.time(), error)
        self._steps.append(self.step)
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
        step = self.step
        title = step.error or (step.program.program.title if step.number else step.program)
        of = f" for {step.param}" if step.param else ""
        return f"{title}{of} (program {step.number} over this group, history {step.mixed:016x})"

    @property
    def waits(self) -> str:
        """The way in which this rank waits, as ``Position.waits`` has it."""
        return IN_PROGRAM if self.thread else IN_TORCH if is_in_collective() else ""

    def post(self) -> None:
        """Post the position of this rank."""
        step, met = self.step, self._met
        # The state of the agreement after the position, as difference() assumes.
        asking = self.agreement.asking
        exception = None if met is None else (met.number, met.mixed, met.error)
        position = Position(
            step.number, step.mixed, str(step), step.begun, asking, self.begun(), self.waits, place(), exception
        )
        self.agreement.store.within(ANSWERS_WITHIN_S).set(self._board(self.agreement.rank), position.pack())

    def position_of(self, rank: int) -> Position | None:
        """Return the position that a rank has posted; None: it has posted none."""
        store, key = self.agreement.store.within(ANSWERS_WITHIN_S), self._board(rank)
        return Position.unpack(store.get(key)) if store.check([key]) else None

    def parted(self, rank: int, post: Position, is_stuck: bool = False) -> str:
        """Return how this rank and another one, with this position, have parted; empty: they have not."""
        is_stuck = is_stuck and self._can_go_on(post)
        found = difference(tuple(self._steps), post, self.agreement.passed, is_stuck=is_stuck)
        if found is None:
            return ""
        names = {"own": ranks_text([self.agreement.rank]), "other": ranks_text([rank])}
        sides = dict(sorted({names["own"]: found.own, names["other"]: found.other}.items()))
        can_go_on = bool(found.failed) and self._can_go_on(post)
        return disagreement(self.agreement.label, sides, names.get(found.failed, ""), can_go_on=can_go_on)

    def _can_go_on(self, post: Position) -> bool:
        """Return whether this rank, and one with this position, can go on after an exception that one of them met."""
        # A rank that waits in a collective of torch wakes only if the user's group becomes unusable.
        if not self._has_tags or IN_TORCH in (post.waits, self.waits):
            return False
        return all(has_channels(resolve_group(name)) for name in self.family_groups())

    def family_groups(self) -> list[str]:
        """Return the names of the groups of all logs that share programs with this one, in an order that all ranks have."""
        return sorted({name for log in self.family for name in log.group_names})

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
            if not log.failure or (may_recover(log.failure) and not may_recover(reason)):
                log.agreement.announce_failure(reason)
                log.failure = reason
        logger.error(reason)
        write_report(reason, self.family)
        for name in self.family_groups():
            if may_recover(reason):
                close_channels(resolve_group(name))
            else:
                break_connections(name)

    def _board(self, rank: int) -> str:
        return f"{self.agreement.prefix}/board/{rank}"


def text_of(error: BaseException) -> str:
    """Return an exception as text, and where it was raised."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]} ({place_of_error(error)})"
