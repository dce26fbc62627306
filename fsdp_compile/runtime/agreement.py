"""Agreement: the ranks of a process group compare their programs before they run them.

Ranks that issue different collectives hang, or mix up data. A *program* is a graph, compared by its
:func:`~passes.lowering.collective_sequence.collective_sequence`, or an operator that runs outside of a graph, compared by its
name. If two ranks have different programs, all ranks raise. :mod:`fsdp_compile.runtime.collective_log` decides when to compare.

The comparison uses the store of the process group. A collective would hang on the very differences that it is to find, and
backward lowers graphs while other collectives are in flight. Every rank posts its program. The first rank of the group compares
the programs and posts a verdict.

Ranks remember the programs that they agreed on and do not compare them again. So a rank may recompile alone, for an input of
another size say, as long as the new graph communicates like an earlier one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import warnings
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch
import torch.distributed as dist

from passes.lowering.arrangement import Arrangement
from passes.lowering.collective_sequence import digest

from .bounded_store import ANSWERS_WITHIN_S, BoundedStore, StoreSilent
from .pulse import Pulse, Watch

#: Seconds after which a rank that waits for others warns.
WARN_AFTER_S = 30.0

_AGREED = "agreed"
_REARRANGE = "rearrange"
_DIGEST_LENGTH = len(digest([]))
_SHOWN_COLLECTIVES = 3
# Seconds after which a rank that waits looks for failures of other ranks; and whether they live, and how often.
_LATE_S, _LOOKS_S = 0.3, 2.0
WHAT_TO_LOOK_FOR = (
    "All ranks must run the same graphs, and the same operators outside of graphs, in the same order. Possible causes: the "
    "model has different sizes on some rank; a flag such as set_requires_gradient_sync is set, or a parameter frozen, on some "
    "ranks only; inputs, or a branch on the rank, lead to different graphs (TORCH_LOGS=recompiles,graph_breaks shows why a "
    "rank compiles or runs uncompiled); a rank has no rows, or no use for some parameters (which is what "
    "set_reduce_scatter_unused_params(True) is for); a rank exceeded torch._dynamo.config.recompile_limit and runs uncompiled "
    "since then; torch.compiler.set_stance was called on some ranks only; ranks run different versions of the code."
)


class RanksDisagree(RuntimeError):
    """Ranks run, or are about to run, different collectives."""


class RankFailed(RanksDisagree):
    """A rank met an exception that other ranks did not meet, or is lost.

    It is a ``torch.OutOfMemoryError``, too, if the exception is one.
    """

    @property
    def may_recover(self) -> bool:
        """True if ``reset_iter_state()`` on all ranks lets them go on with the next step."""
        return may_recover(str(self))


class _OutOfMemory(RankFailed, torch.OutOfMemoryError):
    pass


_OutOfMemory.__name__ = _OutOfMemory.__qualname__ = RankFailed.__name__

# A failure travels as text. These parts of it tell what kind it is.
_FAILED = "A rank has failed. "
_IS_OUT_OF_MEMORY = f": {torch.OutOfMemoryError.__name__}: "
_MAY_RECOVER = "To go on with the next step, call reset_iter_state() on all ranks. Gradients are dropped."
_HAS_PARTED = "The ranks have parted: end them, and go on from a checkpoint that was saved before."


def failure_of(reason: str) -> RanksDisagree:
    """Return the exception for a failure that a rank announced."""
    if not reason.startswith(_FAILED):
        return RanksDisagree(reason)
    return _OutOfMemory(reason) if _IS_OUT_OF_MEMORY in reason else RankFailed(reason)


def may_recover(reason: str) -> bool:
    """Return whether ranks can go on after a failure that a rank announced."""
    return reason.startswith(_FAILED) and reason.endswith(_MAY_RECOVER)


def given_up(reason: str, obstacle: str) -> str:
    """Return the reason of a failure after which ranks could have gone on, but for an obstacle."""
    return f"{reason.removesuffix(_MAY_RECOVER)}The ranks cannot go on: {obstacle}"


class Rearrange(Exception):
    """Ranks have lowered graphs with the same collectives, in other buckets or another order.

    Attributes:
        arrangement: the arrangement of the first rank's graph, for all ranks.
    """

    def __init__(self, arrangement: Arrangement):
        super().__init__()
        self.arrangement = arrangement


@dataclass(frozen=True)
class Program:
    """A graph, or an operator outside of graphs, that communicates.

    Attributes:
        title: the kind of graph, or the operator.
        lines: a graph's collectives, for messages; empty for an operator.
        compared: the parts of the collectives that must be equal on all ranks.
        is_graph: whether the program is a graph.
        arrangement: the graph's buckets, and the order of its collectives; None for an operator.
        is_step: whether it is a step of an optimizer. Ranks compare it as they compare graphs, even after another operator.
    """

    title: str
    lines: Sequence[str]
    compared: Sequence[str]
    is_graph: bool = True
    arrangement: Arrangement | None = None
    is_step: bool = False

    @functools.cached_property
    def digest(self) -> str:
        return digest([self.title, *self.compared])

    def __str__(self) -> str:
        """Return the title, and the first collectives of a graph."""
        if not self.is_graph:
            return self.title
        first = "; ".join(f"{number}: {line}" for number, line in enumerate(self.lines[:_SHOWN_COLLECTIVES], start=1))
        return f"{self.title} that begins with {first}" if first else f"{self.title} without collectives"


@dataclass(frozen=True)
class _Post:
    """A program that a rank is about to run.

    Attributes:
        program: the program.
        before: a description of the rank's history.
        may_rearrange: whether the rank can give the program another arrangement.
    """

    program: Program
    before: str
    may_rearrange: bool = False

    def pack(self) -> str:
        """Return the post as text: a digest, then the compressed contents."""
        program = self.program
        found = program.arrangement if self.may_rearrange else None
        arrangement = None if found is None else found.fields()
        text = json.dumps([program.title, program.lines, program.compared, program.is_graph, arrangement, self.before])
        return digest([program.digest, self.before, str(self.may_rearrange)]) + b85encode(zlib.compress(text.encode())).decode()

    @staticmethod
    def unpack(packed: bytes) -> _Post:
        title, lines, compared, is_graph, lists, before = json.loads(zlib.decompress(b85decode(packed[_DIGEST_LENGTH:])))
        arrangement = None if lists is None else Arrangement.from_lists(lists)
        return _Post(Program(title, lines, compared, is_graph, arrangement), before, arrangement is not None)


class Agreement:
    """The ranks of one process group, and the programs that they have agreed on.

    Args:
        store: the store of the group.
        ranks: the global ranks of its members, in the order of the group.
        rank: the global rank of this process.
        label: the role of the group in the mesh.
        timeout_s: seconds after which a comparison without all ranks fails.
        warn_after_s: seconds after which a comparison without all ranks warns; None: :data:`WARN_AFTER_S`.
        pulse: the signs of life of all ranks; None: they give none.

    Attributes:
        asking: the number of the comparison in which this rank waits, and this rank's program; None: this rank does not wait.
        passed: the number of the last comparison that did not fail.
        agreed: the digests of the programs that the ranks have agreed on.
    """

    passed: int
    agreed: set[str]

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        *,
        label: str,
        timeout_s: float,
        warn_after_s: float | None = None,
        pulse: Pulse | None = None,
    ):
        self.ranks = ranks
        self.store = BoundedStore(store, timeout_s)
        self.rank = rank
        self.label = label
        self.asking: tuple[int, str] | None = None
        self._timeout_s = timeout_s
        self._warn_after_s = WARN_AFTER_S if warn_after_s is None else warn_after_s
        self._pulse = pulse
        self.begin(set())

    def begin(self, agreed: set[str]) -> None:
        """Begin anew, as after a failure. All ranks do so.

        Args:
            agreed: the digests of the programs that all ranks have agreed on before.
        """
        self.agreed = agreed
        self._number = self.passed = 0
        # A process group that was destroyed and created again may find the keys of the old one in the store.
        self._life = self.store.add(f"fsdp_compile/agreement/lives/{self.rank}", 1)

    @property
    def prefix(self) -> str:
        """The prefix of all keys that the ranks use in the store of the group."""
        return f"fsdp_compile/agreement/{self._life}"

    def has_agreed(self, program: Program) -> bool:
        """Return whether the ranks have agreed on an equal program before."""
        return program.digest in self.agreed

    def agree(self, program: Program, before: str = "", *, may_rearrange: bool = False) -> bool:
        """Compare a program with the programs of other ranks, unless the ranks have agreed on an equal one before.

        Args:
            program: the program.
            before: a description of this rank's history.
            may_rearrange: whether this rank can give the program another arrangement.

        Returns:
            Whether the ranks had to compare.

        Raises:
            RanksDisagree: programs or histories differ, or some ranks did not post theirs in time.
            Rearrange: programs have the same collectives, in other buckets or another order.
        """
        if self.has_agreed(program):
            return False
        self.compare(program, before, may_rearrange=may_rearrange)
        return True

    def compare(self, program: Program, before: str = "", *, may_rearrange: bool = False) -> None:
        """Wait until all ranks have posted an equal program with an equal history. The arguments are those of :meth:`agree`.

        Raises:
            RanksDisagree: programs or histories differ, or some ranks did not post theirs in time.
        """
        self._number += 1
        self.asking = (self._number, str(program))
        try:
            self._hold(_Post(program, before, may_rearrange))
        finally:
            self.asking = None

    def _hold(self, post: _Post) -> None:
        self.store.set(self._post(self.rank), post.pack())
        if self.rank == self.ranks[0]:
            self._judge(post.program)
        else:
            self._wait([[self._verdict()]], post.program)
        verdict = self.store.get(self._verdict()).decode()
        is_rearranged = verdict.startswith(_REARRANGE)
        if verdict != _AGREED and not is_rearranged:
            raise failure_of(verdict)
        # Set before this rank runs the program, as board.difference() assumes.
        self.passed = self._number
        self.store.delete_key(self._post(self.rank))
        if is_rearranged:
            raise Rearrange(Arrangement.from_lists(json.loads(verdict.removeprefix(_REARRANGE))))
        self.agreed.add(post.program.digest)

    def fail(self, reason: str) -> None:
        """Make the next comparison of the other ranks raise, even if they wait in it already."""
        self._number += 1
        with contextlib.suppress(StoreSilent):
            self.store.within(ANSWERS_WITHIN_S).set(self._verdict(), reason)

    def failure(self) -> str:
        """Return the failure that a rank of this group announced, or an empty string.

        Raises:
            StoreSilent: the store does not answer.
        """
        key, store = f"{self.prefix}/failed", self.store.within(ANSWERS_WITHIN_S)
        return store.get(key).decode() if store.check([key]) else ""

    def announce_failure(self, reason: str) -> None:
        """Tell all ranks of the group why they cannot go on. The first announcement stands.

        If the store does not answer, they learn it from connections that close.
        """
        with contextlib.suppress(StoreSilent):
            self.store.within(ANSWERS_WITHIN_S).compare_set(f"{self.prefix}/failed", "", reason)

    def _judge(self, program: Program) -> None:
        """Wait for all posts, and post the verdict. Only the first rank of the group does so."""
        posts = [self._post(rank) for rank in self.ranks]
        try:
            self._wait([posts, [self._verdict()]], program)
        except RanksDisagree as error:
            self.store.set(self._verdict(), str(error))
            raise
        if self.store.check([self._verdict()]):
            return
        # All ranks have posted, so all have read the previous verdict.
        self.store.delete_key(self._verdict(self._number - 1))
        self.store.set(self._verdict(), self._compare(self.store.multi_get(posts)))

    def _compare(self, packed: Sequence[bytes]) -> str:
        """Return the verdict on the posts of all ranks: ``_AGREED``, or the error message."""
        posts = {post[:_DIGEST_LENGTH]: post for post in packed}
        if len(posts) == 1:
            return _AGREED
        sides = []
        for key, post in posts.items():
            ranks = [rank for rank, other in zip(self.ranks, packed, strict=True) if other.startswith(key)]
            sides.append((ranks_text(ranks), _Post.unpack(post)))
        if len({post.program.digest for _, post in sides}) == 1:
            return disagreement(self.label, {ranks: post.before for ranks, post in sides})
        first = sides[0][1].program.arrangement
        alike = {(post.program.title, post.before, getattr(post.program.arrangement, "by_unit", None)) for _, post in sides}
        if len(alike) == 1 and first is not None:
            return _REARRANGE + json.dumps(first.fields())
        programs = [(ranks, post.program) for ranks, post in sides]
        return f"{_first_difference(self.label, programs)}\n{WHAT_TO_LOOK_FOR}"

    def _wait(self, wanted: Sequence[Sequence[str]], program: Program) -> None:
        """Wait until the store has all keys of one of the lists in ``wanted``."""
        store = self.store.within(ANSWERS_WITHIN_S)
        purpose = f"to reach the same point. Rank {self.rank} is about to run {'a ' * program.is_graph}{program}"
        self.wait(lambda: any(store.check(keys) for keys in wanted), self._awaited, purpose)

    def wait(
        self, is_over: Callable[[], bool], awaited: Callable[[], Sequence[int]], purpose: str, *, heeds_failures: bool = True
    ) -> None:
        """Wait for other ranks.

        Args:
            is_over: returns whether the wait is over.
            awaited: returns the ranks that this rank waits for, some of which may be lost.
            purpose: what they have to do, for messages.
            heeds_failures: whether a failure that a rank has announced ends the wait.

        Raises:
            RankFailed: a rank is lost, or announced an exception.
            RanksDisagree: a rank announced another failure; or the wait took as long as the timeout.
            StoreSilent: the store does not answer.
        """
        # Poll: a blocking wait would occupy a connection to the store that other threads may need.
        start = time.monotonic()
        warned = False
        watch, looks_at = self.watch(), _LOOKS_S / 2
        while True:
            waited = time.monotonic() - start
            # A rank that is stopped for a while goes on, and with it the store that it serves.
            with contextlib.suppress(StoreSilent):
                if is_over():
                    return
                if heeds_failures and waited > _LATE_S and (failure := self.failure()):
                    raise failure_of(failure)
                if watch is not None and waited > looks_at:
                    looks_at = waited + _LOOKS_S
                    if found := watch.lost(awaited()):
                        raise failure_of(lost(found, self._waits(awaited, purpose)))
            if waited > self._timeout_s:
                raise RanksDisagree(
                    f"{self._waits(awaited, purpose)} That did not happen within {self._timeout_s:g} s, the timeout of the "
                    f"process group: the other ranks run something else, or wait for it. {WHAT_TO_LOOK_FOR}"
                )
            if waited > self._warn_after_s and not warned:
                warned = True
                places = "" if watch is None else watch.places()
                warnings.warn(
                    f"{self._waits(awaited, purpose)} It has waited for {waited:.1f} s, and fails after {self._timeout_s:g} s. "
                    "This is harmless if the other ranks are only slow, because they compile for instance, and a deadlock if "
                    f"they wait for something else.{places}",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(min(max(waited / 10, 0.001), 0.2))

    def watch(self) -> Watch | None:
        """Begin to look for lost ranks; None: ranks give no signs of life."""
        return None if self._pulse is None else self._pulse.watch()

    def _without_post(self) -> list[int]:
        store = self.store.within(ANSWERS_WITHIN_S)
        return [rank for rank in self.ranks if not store.check([self._post(rank)])]

    def _awaited(self) -> Sequence[int]:
        """Return the ranks that this one waits for: those without a post, and then the first one, which posts the verdict."""
        return self._without_post() or self.ranks[:1]

    def _waits(self, awaited: Callable[[], Sequence[int]], purpose: str) -> str:
        try:
            ranks = awaited()
        except StoreSilent as error:
            return f"{error} Rank {self.rank} waits for others {purpose}."
        return f"Rank {self.rank} waits for {ranks_text(ranks)} (process group {self.label}) {purpose}."

    def _post(self, rank: int) -> str:
        return f"{self._prefix(self._number)}/{rank}"

    def _verdict(self, number: int | None = None) -> str:
        return f"{self._prefix(self._number if number is None else number)}/verdict"

    def _prefix(self, number: int) -> str:
        return f"{self.prefix}/{number}"


def lost(found: str, waits: str) -> str:
    """Return the error message for a rank that waits for a lost one.

    Args:
        found: which rank is lost, and why.
        waits: what the other rank waits for.
    """
    return f"{_FAILED}{found} {waits}"


def disagreement(label: str, sides: Mapping[str, str], failed: str = "", *, can_go_on: bool = False) -> str:
    """Return the error message for ranks that run different programs.

    Args:
        label: the role of their process group in the mesh.
        sides: the program of each set of ranks, both as text.
        failed: the set of ranks that met an exception that the others did not meet; empty: all run programs.
        can_go_on: whether they can go on after that.
    """
    lines = [f"  {ranks}: {what}" for ranks, what in sides.items()]
    if not failed:
        first = f"The ranks of process group {label} run different programs, and would hang or mix up data:"
        return "\n".join([first, *lines, WHAT_TO_LOOK_FOR])
    first = f"{_FAILED}{failed.capitalize()} met an exception that other ranks of process group {label} did not meet:"
    return "\n".join([first, *lines, _MAY_RECOVER if can_go_on else _HAS_PARTED])


def _first_difference(label: str, programs: Sequence[tuple[str, Program]]) -> str:
    """Return the error message for the first collective at which programs differ, with the collective of each rank."""
    shown = [[program.title, *program.lines] for _, program in programs]
    compared = [[program.title, *program.compared] for _, program in programs]
    # Compared parts come first: shown names may differ where nothing is wrong (see passes.lowering.collective_sequence).
    wrong = _differences(compared)
    position = min(wrong or _differences(shown))
    if position not in _differences(shown):
        # The collectives differ in the parameters that share them, which shown lines do not list.
        shown = compared
    difference = f"The first difference is at collective {position}" if position else "They are programs of different kinds"
    lines = [
        f"The ranks of process group {label} are about to run different programs, and would hang or mix up data. {difference}:"
    ]
    for (ranks, program), own in zip(programs, shown, strict=True):
        what = (own[position] if position < len(own) else "none") if position else str(program)
        of = f" (in a {program.title}; collectives: {len(program.lines)})" if program.is_graph else ""
        lines.append(f"  {ranks}: {what}{of}")
    return "\n".join(lines)


def _differences(sequences: Sequence[Sequence[str]]) -> list[int]:
    """Return the positions at which sequences differ."""
    return [position for position, lines in enumerate(zip_longest(*sequences)) if len(set(lines)) > 1]


def ranks_text(ranks: Sequence[int]) -> str:
    """Format ranks as text: "rank 3", or "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
