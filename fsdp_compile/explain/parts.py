"""The parts of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..compiler.calls import GraphCall
from .figures import GraphFigures
from .memory import StepMemory


@dataclass(frozen=True)
class UnitReport:
    """What a step does for a unit, on each rank. Times in nanoseconds.

    Attributes:
        name: its qualified name; "root" for the root; "(no unit)" for graphs in which nothing is sharded.
        parameters: elements of its parameters, unsharded.
        shard_bytes: this rank's storage for their shards, padding included.
        gathered_bytes, scattered_bytes, all_reduced_bytes: what the rank sends to gather parameters, to reduce-scatter
            gradients, and to all-reduce them over replicas.
        to_device_bytes, to_host_bytes: what is copied between the device and its host.
        compute_ns: of its kernels, its copies in and out, and the starts of its collectives.
        communication_ns: how long its collectives and copies are in flight.
        exposed_ns: how long compute waits for them.
        kernels: launches of kernels.
        collectives: launches of collectives. A collective that several units share counts in parts.
    """

    name: str
    parameters: int = 0
    shard_bytes: int = 0
    gathered_bytes: int = 0
    scattered_bytes: int = 0
    all_reduced_bytes: int = 0
    to_device_bytes: int = 0
    to_host_bytes: int = 0
    compute_ns: int = 0
    communication_ns: int = 0
    exposed_ns: int = 0
    kernels: int = 0
    collectives: float = 0


@dataclass(frozen=True)
class CallReport:
    """One call of a graph.

    Attributes:
        stage: "forward" or "backward".
        begins_ns: when it begins, from the beginning of the step.
        total_ns: how long it takes.
        exposed_ns: how much of that is waiting.
        flops: of its products.
        collectives: how many it starts.
        peak_bytes: the most that lives while it runs, what is outside of the graph included.
    """

    stage: str
    begins_ns: int
    total_ns: int
    exposed_ns: int
    flops: int
    collectives: int
    peak_bytes: int


@dataclass(frozen=True)
class MemoryReport:
    """The moment of a step at which most lives, on each rank.

    Attributes:
        peak_bytes: all that lives then.
        when: the call, and the unit that it works for, in words.
        categories: the bytes by category: "shards", "optimizer state", "buffers and the like", and those of
            :class:`passes.models.memory_model.Category`.
        largest_bucket: the bucket of parameters or gradients that holds most then, and its bytes; None: none holds anything.
        most: for each category, the most that it has at any time.
        host_bytes: besides, the most bytes on the host: activations that wait there, and of units with a
            ``CPUOffloadPolicy`` shards, gradients and the optimizer's state.
    """

    peak_bytes: int
    when: str
    categories: Mapping[str, int]
    largest_bucket: tuple[str, int] | None
    most: Mapping[str, int]
    host_bytes: int = 0


@dataclass(frozen=True)
class Suggestion:
    """A change that the same models have evaluated.

    Attributes:
        what: the change, as one would write it.
        time_ns: the step with it; 0 if it could not be evaluated.
        peak_bytes: its memory with it.
        saved_ns, added_bytes: the differences to the step of the report.
        note: why it could not be evaluated, or under which condition this holds; empty: neither.
    """

    what: str
    time_ns: int
    peak_bytes: int
    saved_ns: int
    added_bytes: int
    note: str = ""


@dataclass(frozen=True, eq=False)
class Source:
    """What a report was made of.

    Attributes:
        calls: the calls of graphs.
        figures: of their graphs, one for each.
        memory: what lives.
    """

    calls: Sequence[GraphCall]
    figures: Sequence[GraphFigures]
    memory: StepMemory
