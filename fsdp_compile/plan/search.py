"""Search: find the fastest points for a number of GPUs, by the formulae of each policy.

The search tries all splits into shards and replicas and all microbatches, with a few policies first. Then it changes one
setting of the best policy at a time, until no change is better. A policy is traced when it is first needed, together with those
that differ only in the way to accumulate. Splits, batches and microbatches are symbols in the formulae.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from passes.models.hardware import Hardware

from ..explain.depth import Cuts, NotPeriodicError
from ..explain.predict import symbolic_steps
from ..explain.symbolic import symbolic_inputs
from .estimate import Estimate, GraphTables, StepTable
from .policies import ACCUMULATIONS, Policy


@dataclass(frozen=True)
class Point:
    """A way to train on a number of GPUs.

    Attributes:
        policy: the policy.
        shards, replicas: the sizes of the mesh.
        batch: sequences of a rank in one microbatch.
        microbatches: microbatches of a rank in one step.
        estimate: the cost of the step, by the formulae.
    """

    policy: Policy
    shards: int
    replicas: int
    batch: int
    microbatches: int
    estimate: Estimate

    @property
    def gpus(self) -> int:
        """The number of ranks."""
        return self.shards * self.replicas

    def sequences_per_s(self) -> float:
        """Return the sequences that a rank processes in a second."""
        return self.batch * self.microbatches / self.estimate.time_s


@dataclass
class Search:
    """A search for the fastest points.

    Args:
        model, inputs: as for :func:`fsdp_compile.explain.explain`.
        hardware: the machine.
        global_batch: the sequences of a step, over all ranks.
        memory_bytes: the most bytes that a rank may hold.
        base: the policy whose variants are tried.
        optimizer: as for :func:`fsdp_compile.explain.explain`.
        tell: called with a message before each trace.

    Attributes:
        points: the number of points evaluated.
        evaluating_s, tracing_s: seconds that evaluating points took, and that tracing policies took.
        refused: reasons why points or policies were not evaluated, each once, as keys.
    """

    model: nn.Module
    inputs: Any
    hardware: Hardware
    global_batch: int
    memory_bytes: float
    base: Policy
    optimizer: str | float | None = "adamw"
    tell: Callable[[str], None] = lambda _: None
    points: int = 0
    evaluating_s: float = 0.0
    tracing_s: float = 0.0
    refused: dict[str, None] = field(default_factory=dict)
    _tables: dict[Policy, StepTable | None] = field(default_factory=dict)
    _cuts_layers: bool = True

    @property
    def tokens(self) -> int:
        """The tokens of a step over all ranks; the sequences, if inputs do not tell the length of a sequence."""
        return self.global_batch * symbolic_inputs(self.inputs).own.get("T", 1)

    @property
    def unit(self) -> str:
        """The unit of :attr:`tokens`: "tokens" or "sequences"."""
        return "tokens" if "T" in symbolic_inputs(self.inputs).own else "sequences"

    def best(self, gpus: int, count: int = 3) -> list[Point]:
        """Return the fastest points that fit, the best first.

        Args:
            gpus: the number of ranks.
            count: the most points to return.
        """
        found: dict[tuple[Any, ...], Point] = {}
        tried: set[Policy] = set()
        first = [policy for policy in self._first() if self._is_possible(policy, gpus)]
        # Checkpoints make a step slower, and are of use only if something does not fit without them.
        wanted = [policy for policy in first if not policy.checkpoints]
        while wanted:
            for policy in wanted:
                tried.add(policy)
                found.update({(policy, point.shards, point.batch): point for point in self._points(policy, gpus)})
            ranked = _ranked(self._fitting(found))
            near = list(self._neighbours(ranked[0].policy)) if ranked else first
            has_room = bool(ranked) and len(ranked) == len(found)
            wanted = [
                policy
                for policy in near
                if policy not in tried and self._is_possible(policy, gpus) and not (policy.checkpoints and has_room)
            ]
        return _ranked(self._fitting(found))[:count]

    def least_memory(self, gpus: int) -> Point | None:
        """Return the point with the lowest peak of memory, whether it fits or not; None: there is no point."""
        points = [point for policy in self._first() if self._is_possible(policy, gpus) for point in self._points(policy, gpus)]
        return min(points, key=lambda point: point.estimate.peak_bytes, default=None)

    def _fitting(self, found: Mapping[tuple[Any, ...], Point]) -> Iterator[Point]:
        return (point for point in found.values() if point.estimate.peak_bytes <= self.memory_bytes)

    def _first(self) -> Iterator[Policy]:
        for has_replicas in (False, True):
            for checkpoints in (False, True):
                for accumulation in ("none", "last"):
                    yield replace(self.base, has_replicas=has_replicas, checkpoints=checkpoints, accumulation=accumulation)

    def _neighbours(self, policy: Policy) -> Iterator[Policy]:
        for reshard in (True, False, self.hardware.ranks_per_node):
            yield replace(policy, reshard_after_forward=reshard)
        if policy.accumulation != "none":
            for accumulation in ACCUMULATIONS[1:]:
                yield replace(policy, accumulation=accumulation)
        yield replace(policy, checkpoints=not policy.checkpoints)

    def _is_possible(self, policy: Policy, gpus: int) -> bool:
        return any(True for _ in self._sizes(policy, gpus))

    def _sizes(self, policy: Policy, gpus: int) -> Iterator[dict[str, int]]:
        """Yield the sizes of all points of a policy."""
        if self.global_batch % gpus:
            self.refused[f"{gpus} GPUs do not divide a global batch of {self.global_batch}"] = None
            return
        each = self.global_batch // gpus
        node = policy.reshard_after_forward
        for shards in range(2, gpus + 1):
            if gpus % shards or (shards == gpus) == policy.has_replicas:
                continue
            if not isinstance(node, bool) and (shards % node or shards == node):
                continue
            for batch in range(1, each + 1):
                if each % batch == 0 and (batch == each) == (policy.accumulation == "none"):
                    yield {"S": shards, "R": gpus // shards, "B": batch, "M": each // batch}

    def _points(self, policy: Policy, gpus: int) -> Iterator[Point]:
        table = self._table(policy)
        for sizes in self._sizes(policy, gpus) if table is not None else ():
            assert table is not None
            asked = {name: size for name, size in sizes.items() if name in table.own}
            if any(size != 1 for name, size in sizes.items() if name not in table.own and name != "B"):
                continue
            if "B" not in table.own and sizes["B"] != table.batch:
                self.refused[f"the model takes batches of {table.batch} alone"] = None
                continue
            begin = time.perf_counter()
            try:
                estimate = table.at(asked)
            except ValueError as error:
                self.refused[str(error)] = None
                continue
            self.points += 1
            self.evaluating_s += time.perf_counter() - begin
            yield Point(policy, sizes["S"], sizes["R"], sizes["B"], sizes["M"], estimate)

    def _table(self, policy: Policy) -> StepTable | None:
        if policy not in self._tables:
            begin = time.perf_counter()
            # One trace serves all ways to accumulate: their graphs differ little, and the search asks for most of them.
            members = [replace(policy, accumulation=accumulation) for accumulation in ACCUMULATIONS]
            try:
                self._tables.update(zip(members, self._traced(members), strict=True))
            except ValueError as error:
                self.refused[f"{policy}: {error}"] = None
                self._tables.update(dict.fromkeys(members))
            self.tracing_s += time.perf_counter() - begin
        return self._tables[policy]

    def _traced(self, policies: Sequence[Policy]) -> list[StepTable]:
        """Trace policies that differ in the way to accumulate."""
        first = policies[0]
        self.tell(f"tracing: {'replicas, ' if first.has_replicas else ''}{first}")
        # More ranks than a node has, so that parameters can be resharded to one node.
        shards = 2 * self.hardware.ranks_per_node
        cuts = Cuts() if self._cuts_layers else None
        steps = symbolic_steps(
            self.model,
            self.inputs,
            (2, shards) if first.has_replicas else (shards,),
            self.hardware,
            [policy.step for policy in policies],
            shard=first.shard,
            options={"schedule": first.schedule},
            optimizer=self.optimizer,
            cuts=cuts,
        )
        graphs = GraphTables(cuts)
        try:
            return [StepTable(step, self.hardware, self.optimizer, graphs) for step in steps]
        except NotPeriodicError:
            self.tell("equal layers share buckets or differ in their place: all of them are traced")
            self._cuts_layers = False
            return self._traced(policies)


def _ranked(points: Iterator[Point]) -> list[Point]:
    return sorted(points, key=lambda point: (-point.sequences_per_s(), point.estimate.peak_bytes, point.shards))
