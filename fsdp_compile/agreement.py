"""Agreement: ranks compare what a graph communicates before it runs for the first time.

Ranks that issue different collectives hang, or mix up data. So at each lowering of a graph the ranks of its process groups put
its :func:`~passes.collective_sequence.collective_sequence` side by side, and where two differ, all of them raise.

That goes through the store of the process group rather than through a collective: a collective might meet one of those that
are the problem, and would have to fit between those in flight when backward lowers a graph. Every rank posts its sequence; the
first rank of the group compares them and posts a verdict.

What a group has agreed on, it knows: a graph with a sequence that is known already asks nobody. So a rank may compile alone
what communicates as before, for instance anew for an input of another size.
"""

from __future__ import annotations

import json
import time
import warnings
import zlib
from base64 import b85decode, b85encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from passes.collective_sequence import Collective, digest, identities
from passes.collectives import resolve_group

#: Seconds after which a rank that waits for others says for whom.
WARN_AFTER_S = 30.0

_AGREED = "agreed"
_DIGEST_LENGTH = len(digest([]))
_SHOWN_COLLECTIVES = 3
_WHAT_TO_LOOK_FOR = (
    "All ranks must compile the same graphs in the same order. Look for what differs between them: sizes of the model, flags "
    "such as set_requires_gradient_sync, inputs or a branch on the rank that lead to other graphs (TORCH_LOGS=recompiles says "
    "why a rank compiles), versions of the code."
)


class RanksDisagree(RuntimeError):
    """Ranks compiled graphs that cannot communicate with each other, or some compiled one and others none."""


@dataclass(frozen=True)
class GraphSequence:
    """What a graph communicates.

    Attributes:
        title: which graph it is.
        lines: its collectives, to be read.
        compared: what of them has to be equal on all ranks.
    """

    title: str
    lines: Sequence[str]
    compared: Sequence[str]

    @property
    def digest(self) -> str:
        return digest([self.title, *self.compared])

    def pack(self) -> str:
        """The digest, and the whole in few bytes."""
        text = json.dumps([self.title, self.lines, self.compared])
        return self.digest + b85encode(zlib.compress(text.encode())).decode()

    @staticmethod
    def unpack(packed: bytes) -> GraphSequence:
        return GraphSequence(*json.loads(zlib.decompress(b85decode(packed[_DIGEST_LENGTH:]))))

    def __str__(self) -> str:
        """The title and where the graph begins."""
        first = "; ".join(f"{number}: {line}" for number, line in enumerate(self.lines[:_SHOWN_COLLECTIVES], start=1))
        return f"{self.title} that begins with {first}" if first else f"{self.title} without collectives"


def agree(stage: str, sequence: Sequence[Collective], group_names: Mapping[str, str]) -> None:
    """Wait until all ranks that a graph concerns have one that communicates alike.

    Args:
        stage: "forward" or "backward".
        sequence: what it communicates.
        group_names: names of the process groups of the model's sharding to their roles. The ranks of these groups take part
            even if this graph does not communicate over them: it should not on any rank.

    Raises:
        RanksDisagree: the sequences differ, or some ranks did not come.
    """
    graph = GraphSequence(f"{stage} graph", [str(collective) for collective in sequence], identities(sequence))
    ballots = _ballots([*group_names, *(collective.group for collective in sequence)], group_names)
    for position, ballot in enumerate(ballots):
        try:
            ballot.agree(graph)
        except RanksDisagree as error:
            # With replicas, those who share no shard group with the rank at fault would wait for one who does.
            for following in ballots[position + 1 :]:
                following.fail(str(error))
            raise


_BALLOTS: WeakKeyDictionary[dist.ProcessGroup, Ballot] = WeakKeyDictionary()


def _ballots(groups: Sequence[str], group_names: Mapping[str, str]) -> list[Ballot]:
    """The ballots to hold, in the same order on all ranks; a group that lies within an earlier one needs none."""
    found: list[Ballot] = []
    for name in dict.fromkeys(groups):
        group = resolve_group(name)
        ranks = dist.get_process_group_ranks(group)
        if len(ranks) == 1 or any(set(ranks) <= set(ballot.ranks) for ballot in found):
            continue
        if group not in _BALLOTS:
            store = dist.distributed_c10d._get_process_group_store(group)
            # A fake group has no other ranks, and MPI no store.
            if "fake" in dist.get_backend(group) or store is None:
                continue
            label = group_names.get(name, f"of {_ranks(ranks)}")
            _BALLOTS[group] = Ballot(store, ranks, dist.get_rank(), label=label, timeout_s=_timeout_s(group))
        found.append(_BALLOTS[group])
    return found


def _timeout_s(group: dist.ProcessGroup) -> float:
    """How long the collectives of a group wait for a rank."""
    options = getattr(group._get_backend(group._device_types[0]), "options", None)
    timeout = getattr(options, "_timeout", default_pg_timeout)
    return timeout.total_seconds()


class Ballot:
    """The ranks of one process group, and what they have agreed on.

    Args:
        store: the store of the group.
        ranks: the global ranks of its members, in the order of the group.
        rank: the global rank of this one.
        label: what the group is in the mesh.
        timeout_s: after how long to give up on ranks that do not come.
        warn_after_s: after how long to warn.
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
        self._store = store
        self._rank = rank
        self._label = label
        self._timeout_s = timeout_s
        self._warn_after_s = WARN_AFTER_S if warn_after_s is None else warn_after_s
        self._agreed: set[str] = set()
        self._number = 0
        # A process group that was destroyed and made anew may find the keys of the old one in the store.
        self._life = store.add(f"fsdp_compile/agreement/lives/{rank}", 1)

    def agree(self, graph: GraphSequence) -> None:
        """Wait until all ranks have a graph with this sequence; at once if they had one before.

        Raises:
            RanksDisagree: the sequences differ, or some ranks did not come.
        """
        if graph.digest in self._agreed:
            return
        self._number += 1
        self._store.set(self._post(self._rank), graph.pack())
        if self._rank == self.ranks[0]:
            self._judge(graph)
        else:
            self._wait(lambda: self._store.check([self._verdict()]), graph)
        verdict = self._store.get(self._verdict()).decode()
        if verdict != _AGREED:
            raise RanksDisagree(verdict)
        self._agreed.add(graph.digest)
        self._store.delete_key(self._post(self._rank))

    def fail(self, reason: str) -> None:
        """Have the others raise, who are about to agree on a graph or will be."""
        self._number += 1
        self._store.set(self._verdict(), reason)

    def _judge(self, graph: GraphSequence) -> None:
        """Post the verdict, as the first of the ranks."""
        posts = [self._post(rank) for rank in self.ranks]
        try:
            self._wait(lambda: self._store.check(posts) or self._store.check([self._verdict()]), graph)
        except RanksDisagree as error:
            self._store.set(self._verdict(), str(error))
            raise
        if self._store.check([self._verdict()]):
            return
        # All ranks are here, so all have read the last verdict.
        self._store.delete_key(self._verdict(self._number - 1))
        self._store.set(self._verdict(), self._compare(self._store.multi_get(posts)))

    def _compare(self, packed: Sequence[bytes]) -> str:
        """The verdict on what the ranks posted."""
        posts = {post[:_DIGEST_LENGTH]: post for post in packed}
        if len(posts) == 1:
            return _AGREED
        graphs = []
        for key, post in posts.items():
            ranks = [rank for rank, other in zip(self.ranks, packed, strict=True) if other.startswith(key)]
            graphs.append((_ranks(ranks), GraphSequence.unpack(post)))
        return f"{_first_difference(self._label, graphs)}\n{_WHAT_TO_LOOK_FOR}"

    def _wait(self, is_over: Callable[[], bool], graph: GraphSequence) -> None:
        # By asking now and then: a store that waits keeps its connection, which others may need, to itself.
        start = time.monotonic()
        warned = False
        while not is_over():
            waited = time.monotonic() - start
            if waited > self._timeout_s:
                raise RanksDisagree(
                    f"{self._missing(graph)} They did not come within {self._timeout_s:g} s, the timeout of the process group. "
                    f"They run, or wait for, something else. {_WHAT_TO_LOOK_FOR}"
                )
            if waited > self._warn_after_s and not warned:
                warned = True
                warnings.warn(
                    f"{self._missing(graph)} Waiting since {waited:.1f} s, until {self._timeout_s:g} s. Ranks that are slow to "
                    "compile come yet; one that runs another graph does not.",
                    RuntimeWarning,
                    stacklevel=2,
                )
            time.sleep(min(max(waited / 10, 0.001), 0.2))

    def _missing(self, graph: GraphSequence) -> str:
        missing = [rank for rank in self.ranks if not self._store.check([self._post(rank)])]
        return (
            # Nobody missing: the first rank has all it needs, but says nothing.
            f"Rank {self._rank} waits for {_ranks(missing or self.ranks[:1])} (process group {self._label}) to compile "
            f"what it has compiled: a {graph}."
        )

    def _post(self, rank: int) -> str:
        return f"{self._prefix(self._number)}/{rank}"

    def _verdict(self, number: int | None = None) -> str:
        return f"{self._prefix(self._number if number is None else number)}/verdict"

    def _prefix(self, number: int) -> str:
        return f"fsdp_compile/agreement/{self._life}/{number}"


def _first_difference(label: str, graphs: Sequence[tuple[str, GraphSequence]]) -> str:
    """Where graphs that are not equal begin to differ, and who has what."""
    shown = [[graph.title, *graph.lines] for _, graph in graphs]
    compared = [[graph.title, *graph.compared] for _, graph in graphs]
    # Names may differ where nothing is wrong (see passes.collective_sequence).
    position = min(_differences(shown), key=lambda position: (position not in _differences(compared), position))
    where = f"at collective {position}" if position else "which graph they compile"
    lines = [
        f"The ranks of process group {label} compiled graphs that do not communicate alike: running them would hang, or mix up "
        f"data. The first difference is {where}:"
    ]
    for (ranks, graph), own in zip(graphs, shown, strict=True):
        what = own[position] if position < len(own) else "none"
        lines.append(f"  {ranks}: {what} (in a {graph.title}; collectives: {len(graph.lines)})")
    return "\n".join(lines)


def _differences(sequences: Sequence[Sequence[str]]) -> list[int]:
    """The positions at which not all sequences have the same."""
    return [position for position, lines in enumerate(zip_longest(*sequences)) if len(set(lines)) > 1]


def _ranks(ranks: Sequence[int]) -> str:
    """Ranks to be read: "rank 3", or "ranks 0-6, 9"."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    listed = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed}"
