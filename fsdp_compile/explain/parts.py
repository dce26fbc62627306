"""The parts of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..compiler.calls import GraphCall
from .figures import GraphFigures
from .memory import StepMemory


@dataclass(frozen=True)
class UnitReport:
    """The costs of a unit in a step, on each rank. Times are in nanoseconds.

    Attributes:
        name: its qualified name; "root" for the root; "(no unit)" for graphs in which nothing is sharded.
        parameters: the elements of its parameters, unsharded.
        shard_bytes: this rank's storage for its shards, padding included.
        gathered_bytes, scattered_bytes, all_reduced_bytes: the bytes that the rank sends to gather parameters, to
            reduce-scatter gradients, and to all-reduce them over replicas.
        to_device_bytes, to_host_bytes: the bytes that are copied from the host to the device, and back.
        compute_ns: the time of its kernels, its copies into and out of buckets, and the starts of its collectives.
        communication_ns: how long its collectives and copies between device and host are in flight.
        exposed_ns: how long compute waits for these collectives and copies.
        kernels: launches of kernels.
        collectives: launches of collectives. Units that share a collective count a part of it each.
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
    """One call of a graph. Times are in nanoseconds.

    Attributes:
        stage: "forward" or "backward".
        begins_ns: when it begins, from the beginning of the step.
        total_ns: how long it takes.
        exposed_ns: how long compute waits for collectives, and for copies between device and host.
        flops: the flops of its products.
        collectives: how many collectives it starts.
        peak_bytes: the most bytes that live while it runs, inside and outside of the graph.
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
    """The moment of a step with the most live bytes, on each rank.

    Attributes:
        peak_bytes: all live bytes at that moment.
        when: the stage, and the unit that the graph works for at that moment, in words.
        categories: the bytes by category: "shards", "optimizer state", "buffers and the like", and those of
            :class:`passes.models.memory_model.Category`.
        largest_bucket: the bucket of parameters or gradients with the most bytes at that moment, and its bytes; None: no bucket
            has any.
        most: for each category, its most bytes at any moment.
        host_bytes: the most bytes on the host, which the other numbers do not count: activations that wait there, and shards,
            gradients and optimizer state of units with a ``CPUOffloadPolicy``.
    """

    peak_bytes: int
    when: str
    categories: Mapping[str, int]
    largest_bucket: tuple[str, int] | None
    most: Mapping[str, int]
    host_bytes: int = 0


@dataclass(frozen=True)
class Suggestion:
    """A change to a step, evaluated by the models that made its report.

    Attributes:
        change: the change, as one would write it.
        time_ns: the time of the step with the change, in nanoseconds; 0 if it could not be evaluated.
        peak_bytes: the memory of the step with the change.
        saved_ns, added_bytes: the differences to the step of the report.
        note: why the change could not be evaluated, or a condition under which the numbers hold; otherwise empty.
    """

    change: str
    time_ns: int
    peak_bytes: int
    saved_ns: int
    added_bytes: int
    note: str = ""


@dataclass(frozen=True, eq=False)
class Source:
    """The inputs that a report was made from.

    Attributes:
        calls: the calls of graphs, in order.
        figures: the figures of each call's graph.
        memory: the live bytes of the step.
    """

    calls: Sequence[GraphCall]
    figures: Sequence[GraphFigures]
    memory: StepMemory
