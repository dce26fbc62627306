"""Checked programs: graphs and operators that ranks compare before they run them."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from passes.fx.torch_internals.core import RecordFunctionFast
from passes.lowering.arrangement import Arrangement, CannotArrange
from passes.lowering.collective_sequence import Collective, by_unit, identities

from .agreement import Program, RanksDisagree, Rearrange, failure_of
from .collective_log import SHARDING_ROLES, CollectiveLog, LoggedProgram
from .group_logs import find_logs, record_in
from .job import Job
from .report import write_report


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
        # Groups are new in another job.
        self._job = Job()
        logs = find_logs(self.group_names, self._roles)
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
        if self._job.is_over():
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
            record_in(error, [log for log, _ in self._over])

    def _explain(self, error: RuntimeError) -> None:
        for log, _ in self._over:
            if reason := log.reason_of(error):
                raise failure_of(reason) from error
        write_report(f"{type(error).__name__}: {error}", (log for log, _ in self._over))


def _together(over: Sequence[tuple[CollectiveLog, LoggedProgram]], agree: Any, roles: Mapping[str, str]) -> None:
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
            write_report(str(error), (each for each, _ in over))
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
    logs = find_logs([*group_names, *(collective.group for collective in sequence)], group_names)
    arrangement = Arrangement.of(sequence)
    options, does = kind
    agreed_on = _arrangements.setdefault((*sorted(group_names), arrangement.by_unit, options), _Arrangements())

    def have_agreed(sequence: Sequence[Collective]) -> bool:
        over = _programs(stage, sequence, group_names)
        return all(log.agreement.has_agreed(over(log)) for log in logs)

    known = agreed_on.known(does)
    # One for graphs that do the same comes first, even if ranks have agreed on this graph's own for graphs that do something
    # else: the own arrangement of another rank may be new, so that it takes the former.
    if known and (does in agreed_on.by_kind or not have_agreed(sequence)):
        for other in known:
            with contextlib.suppress(CannotArrange):
                candidate = graph if other == arrangement else rearranged(other)
                if have_agreed(found := sequence_of(candidate)):
                    agreed_on.differ |= other != arrangement
                    graph, sequence, arrangement = candidate, found, other
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


def eager_run(
    label: str, shape: tuple[int, ...], group_names: tuple[str, ...], params: tuple[str, ...] = (), *, is_step: bool = False
) -> CheckedProgram:
    """Tell :data:`eager_observers` of an operator that communicates outside of a graph, and return the run of the operator.

    Args:
        label: the operator, and the parameter or unit that it works on.
        shape: sizes that must be equal on all ranks, such as the parameter's.
        group_names: names of the shard group, of the replicate group (empty if it is not used), and of others.
        params: the names of the parameters, if the label does not tell them.
        is_step: whether it is a step of an optimizer.
    """
    for observe in eager_observers:
        observe(label)
    return _eager_run(label, shape, group_names, params, is_step)


@functools.lru_cache(maxsize=1 << 16)
def _eager_run(
    label: str, shape: tuple[int, ...], group_names: tuple[str, ...], params: tuple[str, ...], is_step: bool
) -> CheckedProgram:
    names = f" ({', '.join(params)})" if params else ""
    program = Program(f"{label}{names} outside of a compiled graph", (), (str(shape),), is_graph=False, is_step=is_step)
    roles = {name: role for name, role in zip(group_names, ("shard", "replicate"), strict=False) if name}
    return CheckedProgram(lambda _log: program, list(filter(None, group_names)), roles, f"FSDP::{label}")
