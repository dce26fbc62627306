"""Agreement: ranks compare what they are about to run, where they have not done so before.

Ranks that issue different collectives hang, or mix up data. So the ranks of a process group put their programs side by side: a
graph's :func:`~passes.lowering.collective_sequence.collective_sequence`, or the name of an operator that runs outside of a
graph. Where two differ, all of them raise. :mod:`fsdp_compile.runtime.course` says when that is.

It goes through the store of the process group rather than through a collective: a collective might meet one of those that
are the problem, and would have to fit between those in flight when backward lowers a graph. Every rank posts its program; the
first rank of the group compares them and posts a verdict.

What a group has agreed on, it knows: a graph with a sequence that is known already asks nobody. So a rank may compile alone
what communicates as before, for instance anew for an input of another size.
"""

from __future__ import annotations

import functools
import json
import time
import warnings
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import torch.distributed as dist

from passes.lowering.collective_sequence import digest

#: Seconds after which a rank that waits for others says for whom.
WARN_AFTER_S = 30.0

_AGREED = "agreed"
_DIGEST_LENGTH = len(digest([]))
_SHOWN_COLLECTIVES = 3
# A rank that is not there by then may have something else to do.
_LATE_S = 0.3
WHAT_TO_LOOK_FOR = (
    "All ranks must run the same graphs, and the same operators outside of graphs, in the same order. Look for what differs "
    "between them: sizes of the model; flags such as set_requires_gradient_sync; inputs, or a branch on the rank, that lead to "
    "other graphs (TORCH_LOGS=recompiles,graph_breaks says why a rank compiles, and why it runs a part uncompiled); a rank "
    "that exceeded torch._dynamo.config.recompile_limit and has run uncompiled since; torch.compiler.set_stance; versions of "
    "the code."
)


class RanksDisagree(RuntimeError):
    """Ranks run, or are about to run, what cannot communicate with each other."""


@dataclass(frozen=True)
class Program:
    """Something that communicates: a graph, or an operator outside of one.

    Attributes:
        title: which it is.
        lines: its collectives, to be read; none of an operator.
        compared: what of them has to be equal on all ranks.
        is_graph: whether it is a graph.
    """

    title: str
    lines: Sequence[str]
    compared: Sequence[str]
    is_graph: bool = True

    @functools.cached_property
    def digest(self) -> str:
        return digest([self.title, *self.compared])

    def __str__(self) -> str:
        """The title and where a graph begins."""
        if not self.is_graph:
            return self.title
        first = "; ".join(f"{number}: {line}" for number, line in enumerate(self.lines[:_SHOWN_COLLECTIVES], start=1))
        return f"{self.title} that begins with {first}" if first else f"{self.title} without collectives"


@dataclass(frozen=True)
class _Post:
    """A program that a rank is about to run, and its account of what it has run before."""

    program: Program
    before: str

    def pack(self) -> str:
        """A digest, and the whole in few bytes."""
        program = self.program
        text = json.dumps([program.title, program.lines, program.compared, program.is_graph, self.before])
        return digest([program.digest, self.before]) + b85encode(zlib.compress(text.encode())).decode()

    @staticmethod
    def unpack(packed: bytes) -> _Post:
        *program, before = json.loads(zlib.decompress(b85decode(packed[_DIGEST_LENGTH:])))
        return _Post(Program(*program), before)


class Ballot:
    """The ranks of one process group, and what they have agreed on.

    Args:
        store: the store of the group.
        ranks: the global ranks of its members, in the order of the group.
        rank: the global rank of this one.
        label: what the group is in the mesh.
        timeout_s: after how long to give up on ranks that do not come.
        warn_after_s: after how long to warn.

    Attributes:
        asking: while this rank waits for the others: the number of the comparison, and what it is about to run.
        passed: the number of the last comparison that ended well.
    """

    def __init__(
        self,
        store: dist.Store,
        ranks: Sequence[int],
        rank: int,
        *,
        label: str,
        timeout_s: float,
        warn_after_s: float | None = None,
    ):
        self.ranks = ranks
        self.store = store
        self.rank = rank
        self.label = label
        self.asking: tuple[int, str] | None = None
        self.passed = 0
        self._timeout_s = timeout_s
        self._warn_after_s = WARN_AFTER_S if warn_after_s is None else warn_after_s
        self._agreed: set[str] = set()
        self._number = 0
        # A process group that was destroyed and made anew may find the keys of the old one in the store.
        self._life = store.add(f"fsdp_compile/agreement/lives/{rank}", 1)

    @property
    def prefix(self) -> str:
        """The beginning of all keys that the ranks use in the store of the group."""
        return f"fsdp_compile/agreement/{self._life}"

    def agree(self, program: Program, before: str = "") -> bool:
        """Wait until all ranks have a program like this one; at once if they had one before.

        Returns:
            Whether they had to compare.

        Raises:
            RanksDisagree: the programs differ, or some ranks did not come.
        """
        if program.digest in self._agreed:
            return False
        self.compare(program, before)
        return True

    def compare(self, program: Program, before: str = "") -> None:
        """Wait until all ranks have a program like this one, and the same to say of what they ran before.

        Raises:
            RanksDisagree: they differ, or some ranks did not come.
        """
        self._number += 1
        self.asking = (self._number, str(program))
        try:
            self._hold(_Post(program, before))
        finally:
            self.asking = None

    def _hold(self, post: _Post) -> None:
        self.store.set(self._post(self.rank), post.pack())
        if self.rank == self.ranks[0]:
            self._judge(post.program)
        else:
            self._wait(lambda: self.store.check([self._verdict()]), post.program)
        verdict = self.store.get(self._verdict()).decode()
        if verdict != _AGREED:
            raise RanksDisagree(verdict)
        # Ahead of anything that this rank runs then: see Course.
        self.passed = self._number
        self._agreed.add(post.program.digest)
        self.store.delete_key(self._post(self.rank))

    def fail(self, reason: str) -> None:
        """Have the others raise, who are about to agree on a program or will be."""
        self._number += 1
        self.store.set(self._verdict(), reason)

    def failure(self) -> str:
        """Why the ranks of this group cannot go on, if one of them found that out; else the empty string."""
        key = f"{self.prefix}/failed"
        return self.store.get(key).decode() if self.store.check([key]) else ""

    def announce_failure(self, reason: str) -> None:
        """Let all ranks know why they cannot go on. What was announced first stands."""
        self.store.compare_set(f"{self.prefix}/failed", "", reason)

    def _judge(self, program: Program) -> None:
        """Post the verdict, as the first of the ranks."""
        posts = [self._post(rank) for rank in self.ranks]
        try:
            self._wait(lambda: self.store.check(posts) or self.store.check([self._verdict()]), program)
        except RanksDisagree as error:
            self.store.set(self._verdict(), str(error))
            raise
        if self.store.check([self._verdict()]):
            return
        # All ranks are here, so all have read the last verdict.
        self.store.delete_key(self._verdict(self._number - 1))
        self.store.set(self._verdict(), self._compare(self.store.multi_get(posts)))

    def _compare(self, packed: Sequence[bytes]) -> str:
        """The verdict on what the ranks posted."""
        posts = {post[:_DIGEST_LENGTH]: post for post in packed}
        if len(posts) == 1:
            return _AGREED
        sides = []
        for key, post in posts.items():
            ranks = [rank for rank, other in zip(self.ranks, packed, strict=True) if other.startswith(key)]
            sides.append((ranks_text(ranks), _Post.unpack(post)))
        if len({post.program.digest for _, post in sides}) == 1:
            return disagreement(self.label, {ranks: post.before for ranks, post in sides})
        programs = [(ranks, post.program) for ranks, post in sides]
        return f"{_first_difference(self.label, programs)}\n{WHAT_TO_LOOK_FOR}"

    def _wait(self, is_over: Callable[[], bool], program: Program) -> None:
        # By asking now and then: a store that waits keeps its connection, which others may need, to itself.
        start = time.monotonic()
        warned = False
        while not is_over():
            waited = time.monotonic() - start
            if waited > _LATE_S and (failure := self.failure()):
                raise RanksDisagree(failure)
            if waited > self._timeout_s:
                raise RanksDisagree(
                    f"{self._missing(program)} They did not come within {self._timeout_s:g} s, the timeout of the process "
                    f"group: they are running something else, or waiting for it. {WHAT_TO_LOOK_FOR}"
                )
            if waited > self._warn_after_s and not warned:
                warned = True
                warnings.warn(
                    f"{self._missing(program)} It has waited for {waited:.1f} s, and gives up after {self._timeout_s:g} s. "
                    "A rank that is only slow (it compiles, for instance) will come; one that waits for something else, never.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(min(max(waited / 10, 0.001), 0.2))

    def _missing(self, program: Program) -> str:
        missing = [rank for rank in self.ranks if not self.store.check([self._post(rank)])]
        return (
            # Nobody missing: the first rank has all it needs, but says nothing.
            f"Rank {self.rank} waits for {ranks_text(missing or self.ranks[:1])} (process group {self.label}) to get as far as "
            f"it has. It is about to run {'a ' * program.is_graph}{program}."
        )

    def _post(self, rank: int) -> str:
        return f"{self._prefix(self._number)}/{rank}"

    def _verdict(self, number: int | None = None) -> str:
        return f"{self._prefix(self._number if number is None else number)}/verdict"

    def _prefix(self, number: int) -> str:
        return f"{self.prefix}/{number}"


def disagreement(label: str, sides: Mapping[str, str]) -> str:
    """The message about ranks that do not run the same.

    Args:
        label: what their process group is in the mesh.
        sides: who runs what.
    """
    lines = [
        f"The ranks of process group {label} run programs that do not match: they would hang, or mix up data.",
        *(f"  {ranks}: {what}" for ranks, what in sides.items()),
    ]
    return "\n".join([*lines, WHAT_TO_LOOK_FOR])


def _first_difference(label: str, programs: Sequence[tuple[str, Program]]) -> str:
    """Where programs that are not equal begin to differ, and who has what."""
    shown = [[program.title, *program.lines] for _, program in programs]
    compared = [[program.title, *program.compared] for _, program in programs]
    # Names may differ where nothing is wrong (see passes.lowering.collective_sequence).
    position = min(_differences(shown), key=lambda position: (position not in _differences(compared), position))
    difference = f"The first difference is at collective {position}" if position else "They differ in which programs they are"
    lines = [
        f"The ranks of process group {label} are about to run programs that do not match: they would hang, or mix up data. "
        f"{difference}:"
    ]
    for (ranks, program), own in zip(programs, shown, strict=True):
        what = (own[position] if position < len(own) else "none") if position else str(program)
        of = f" (in a {program.title}; collectives: {len(program.lines)})" if program.is_graph else ""
        lines.append(f"  {ranks}: {what}{of}")
    return "\n".join(lines)


def _differences(sequences: Sequence[Sequence[str]]) -> list[int]:
    """The positions at which not all sequences have the same."""
    return [position for position, lines in enumerate(zip_longest(*sequences)) if len(set(lines)) > 1]


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks to be read: "rank 3", or "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
