"""Measured steps: a profile of ``torch.profiler``, read against the graphs of a report.

A profile has a range for each call of a graph. In the range, functional collectives and their waits are operators. They have to
be those of the report's graphs, in the same order; otherwise the profile is one of another step. The time between two of these
operators is named after the unit for which the graph computes most there.

On the CPU, the thread that calls the graphs computes, and waits while it runs a wait. A collective is in flight until the end
of the last process group operation that it started.

On a GPU, times are those of the device: from the first to the last operation that a graph launched. The kernels of a collective
are those that its operator launched. Compute waits while one of these kernels runs, and no other kernel of the graph.
"""

from __future__ import annotations

import gzip
import itertools
import json
import os
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.fx import Node

from passes.fx.graph import group_of, is_collective, is_fused_product, starts_collective
from passes.fx.torch_internals.objects import operator_name
from passes.models.cost_model import COPIES, collective_kind

from ..compiler.calls import GraphCall
from ..runtime.planned_graph import RANGES
from .attribution import NO_UNIT
from .exposure import milliseconds
from .figures import GraphFigures
from .parts import Source
from .prediction import Prediction
from .render import Table
from .tracks import COMPUTE, Kind, Picture, Span, group_track, in_units, name_of_transfer, unit_of

# The prefix of the namespaces of functional collectives.
_OPERATORS = "_c10d_functional"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_STAGES = {name: "backward" if is_backward else "forward" for is_backward, name in RANGES.items()}
# Prefixes of process group operations in profiles on the CPU: Gloo and MPI.
_IN_FLIGHT = ("gloo:", "mpi:")


@dataclass(frozen=True)
class Event:
    """An event of a profile that took time, in nanoseconds by the profile's clock."""

    name: str
    category: str
    begin_ns: int
    end_ns: int
    correlation: int | None = None

    def __contains__(self, other: Event) -> bool:
        return self.begin_ns <= other.begin_ns < self.end_ns


@dataclass(frozen=True)
class MeasuredCall:
    """The measured times of a call of a graph, in nanoseconds.

    Attributes:
        stage: "forward" or "backward".
        begins_ns: when it began, from the beginning of the first call.
        total_ns: how long it took.
        exposed_ns: how long compute waited for collectives.
        in_flight_ns: how long a process group had collectives in flight, including those that waited for other ranks; summed
            over the groups.
    """

    stage: str
    begins_ns: int
    total_ns: int
    exposed_ns: int
    in_flight_ns: int


@dataclass(frozen=True)
class Measured:
    """A measured step, beside the step that a report predicts. ``print`` it.

    Attributes:
        report: the prediction.
        steps: how many steps the profile has. The other attributes are of one step, whose time is the median.
        calls: the calls of graphs, in order.
        optimizer_ns: the time of optimizers, by the ranges that ``torch.optim.Optimizer`` s leave in profiles.
        time_ns: from the beginning of the first call to the end of the last one, or of the optimizer if that is later.
        picture: the measured step as tracks.
    """

    report: Prediction
    steps: int
    calls: Sequence[MeasuredCall]
    optimizer_ns: int
    time_ns: int
    picture: Picture

    @property
    def exposed_ns(self) -> int:
        """The time that compute waited for communication, in nanoseconds."""
        return sum(call.exposed_ns for call in self.calls)

    @property
    def outside_ns(self) -> int:
        """The time of the step outside of graphs and optimizer, in nanoseconds."""
        return max(0, self.time_ns - self.optimizer_ns - sum(call.total_ns for call in self.calls))

    @property
    def table(self) -> Table:
        """The predicted and measured times, of each graph and of the step."""
        told = self.report
        head = ["", "predicted", "measured", "longer by", "exposed", "measured", "in flight", "measured"]
        rows = [head]
        flights = [sum(figures.costs.transfer.values()) for figures in told._source.figures] if told._source else []
        for index, (call, ran, flight) in enumerate(zip(told.calls, self.calls, flights, strict=True)):
            times = _beside(call.total_ns, ran.total_ns)
            pairs = [call.exposed_ns, ran.exposed_ns, flight, ran.in_flight_ns]
            rows.append([f"{index} {call.stage}", *times, *map(milliseconds, pairs)])
        rows.append(["optimizer", *_beside(told.optimizer_ns, self.optimizer_ns), *[""] * 4])
        rows.append(["between them", "", milliseconds(self.outside_ns), *[""] * 5])
        pairs = [told.exposed_ns, self.exposed_ns, sum(flights), sum(call.in_flight_ns for call in self.calls)]
        rows.append(["step", *_beside(told.time_ns, self.time_ns), *map(milliseconds, pairs)])
        steps = f"the step of median time of {self.steps}" if self.steps > 1 else "one step"
        return Table(
            rows, f"Predicted for {told.hardware.name}; measured: {steps}, on this rank, with what profiling it costs."
        )

    def __str__(self) -> str:
        return f"{self.table}\n"


def _beside(told: int, ran: int) -> list[str]:
    """Format a predicted and a measured time, and by how much the measured one is longer."""
    return [milliseconds(told), milliseconds(ran), f"{ran / told - 1:+.0%}" if told else ""]


def read_profile(profile: Any, report: Prediction, source: Source) -> Measured:
    """Read a profile; see :meth:`~fsdp_compile.explain.Report.beside`."""
    if any(node.target in COPIES for figures in source.figures for node in figures.costs.transfer):
        raise NotImplementedError(
            "The step copies between device and host, and copies are not read from profiles. Look at the trace beside what "
            "report.timeline() writes."
        )
    events = sorted(read_events(profile), key=lambda event: (event.begin_ns, -event.end_ns))
    steps = [_Step(events, ranges, report, source) for ranges in _steps(events, report)]
    chosen = sorted(steps, key=lambda step: step.time_ns)[(len(steps) - 1) // 2]
    return chosen.measured(len(steps))


def read_events(profile: Any) -> Iterator[Event]:
    """Yield the events of a profile that took time.

    Args:
        profile: a profiler of torch that has stopped, or the path of a trace that a profiler exported.
    """
    for event in _trace(profile)["traceEvents"]:
        if event.get("ph") == "X" and "dur" in event:
            begin, args = round(event["ts"] * 1e3), event.get("args", {})
            end = begin + round(event["dur"] * 1e3)
            yield Event(event["name"], event.get("cat", ""), begin, end, args.get("correlation"))


def _trace(profile: Any) -> dict[str, Any]:
    if isinstance(profile, (str, os.PathLike)):
        path = Path(profile)
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        try:
            # Names of kernels may contain bytes that are not UTF-8.
            trace = json.loads(data.decode(errors="replace"))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is no trace that torch.profiler exported: {error}") from error
        if not isinstance(trace, dict) or "traceEvents" not in trace:
            raise ValueError(f"{path} is no trace that torch.profiler exported: it has no 'traceEvents'.")
        return trace
    if not hasattr(profile, "export_chrome_trace"):
        raise TypeError(f"A profile is a torch.profiler.profile, or the path of a trace that it exported, not {type(profile)}.")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        try:
            profile.export_chrome_trace(str(path))
        except (RuntimeError, AssertionError) as error:
            raise ValueError(
                f"The profiler gives no trace ({error}). It has to have stopped, and exports its trace once: if you did that, "
                "give the path of the file."
            ) from error
        return _trace(path)


def _steps(events: Sequence[Event], report: Prediction) -> list[Sequence[Event]]:
    """Split the ranges of calls of graphs into steps."""
    ranges = [event for event in events if event.name in _STAGES and event.category != "gpu_user_annotation"]
    wanted, found = [call.stage for call in report.calls], [_STAGES[event.name] for event in ranges]
    if not found:
        raise ValueError(
            "The profile has no graph in it. Run whole steps of the compiled model inside of the profiler, with "
            "ProfilerActivity.CPU among its activities. Recordings of options={'cudagraphs': True} cannot be read."
        )
    if len(found) % len(wanted) or found != wanted * (len(found) // len(wanted)):
        raise ValueError(
            f"The profile has not the steps of the report, whose graphs are {', '.join(wanted)}, but {', '.join(found)}. "
            "Profile whole steps, with the calls that the report's step has."
        )
    return [ranges[start : start + len(wanted)] for start in range(0, len(ranges), len(wanted))]


class _Step:
    """One step of a profile.

    Attributes:
        time_ns: how long it took.
    """

    def __init__(self, events: Sequence[Event], ranges: Sequence[Event], report: Prediction, source: Source) -> None:
        self._report, self._source, self._ranges = report, source, ranges
        launches = {event.correlation: event for event in events if event.category in _LAUNCHES}
        on_device = [
            (launches[event.correlation], event)
            for event in events
            if event.category in _ON_DEVICE and event.correlation in launches
        ]
        if not on_device and any(map(_is_on_gpu, source.calls)):
            raise ValueError(
                "The graphs of the report compute on a GPU, of which the profile has no kernel. Profile with "
                "ProfilerActivity.CUDA, too, and with torch.cuda.synchronize() ahead of its end."
            )
        readers: list[_OnDevice | _OnHost] = []
        for index, (each, call) in enumerate(zip(ranges, source.calls, strict=True)):
            inside = [event for event in events if event in each]
            operators = _match(_outermost(inside), call, index)
            launched = [(launch, event) for launch, event in on_device if launch in each]
            # Kernels of a graph may begin while the previous graph ends.
            clock = readers[-1].end if readers else 0
            readers.append(_OnDevice(operators, launched, clock) if on_device else _OnHost(each, operators, inside))
        self._readers = readers
        self._begin = readers[0].begin
        self._optimizers = self._optimizer(events, on_device)
        last = max([reader.end for reader in readers] + [end for _, end in self._optimizers])
        self.time_ns = last - self._begin

    def _optimizer(self, events: Sequence[Event], on_device: Sequence[tuple[Event, Event]]) -> list[tuple[int, int]]:
        """Return the begin and end of each optimizer that ran after the last graph, and before the next step."""
        last = self._ranges[-1]
        following = next((event.begin_ns for event in events if event.name in _STAGES and event.begin_ns > last.begin_ns), None)
        ran = [
            event
            for event in events
            if event.name.startswith("Optimizer.step#")
            and event.category != "gpu_user_annotation"
            and event.begin_ns >= last.end_ns
            and (following is None or event.begin_ns < following)
        ]
        if not on_device:
            return [(event.begin_ns, event.end_ns) for event in ran]
        found = []
        for event in ran:
            mine = [kernel for launch, kernel in on_device if launch in event]
            if mine:
                found.append((min(kernel.begin_ns for kernel in mine), max(kernel.end_ns for kernel in mine)))
        return found

    def measured(self, steps: int) -> Measured:
        tracks: dict[str, list[Span]] = {COMPUTE: []}
        calls = []
        sources = zip(self._readers, self._source.calls, self._source.figures, self._report.calls, strict=True)
        for index, (reader, call, figures, told) in enumerate(sources):
            begin, total = reader.begin - self._begin, reader.end - reader.begin
            transfers = reader.transfers()
            pieces = [(unit, self._moved(span)) for unit, span in reader.pieces(call, figures)]
            exposed = sum(span.duration_ns for _, span in pieces if span.kind is Kind.WAIT)
            flight = _in_flight_ns(transfers)
            calls.append(MeasuredCall(told.stage, begin, total, exposed, flight))
            tracks[COMPUTE].append(Span(f"{told.stage} {index}", Kind.GRAPH, begin, total, told.stage))
            tracks[COMPUTE] += in_units(iter(pieces))
            for collective, since, end in transfers:
                name, kind = name_of_transfer(collective, call, figures), collective_kind(collective)
                sent = round(figures.sent[collective])
                span = Span(name, Kind.COLLECTIVE, since - self._begin, end - since, kind, sent)
                tracks.setdefault(group_track(group_of(collective), call), []).append(span)
        for since, end in self._optimizers:
            tracks[COMPUTE].append(Span("optimizer", Kind.OPTIMIZER, since - self._begin, end - since))
        optimizer = sum(end - since for since, end in self._optimizers)
        picture = Picture("measured", self.time_ns, tracks)
        return Measured(self._report, steps, calls, optimizer, self.time_ns, picture)

    def _moved(self, span: Span) -> Span:
        return Span(span.name, span.kind, span.begin_ns - self._begin, span.duration_ns, span.sort)


def _is_on_gpu(call: GraphCall) -> bool:
    values = (node.meta.get("val") for node in call.graph.graph_module.graph.nodes)
    return any(isinstance(value, Tensor) and value.device.type == "cuda" for value in values)


def _in_flight_ns(transfers: Sequence[tuple[Node, int, int]]) -> int:
    """Return how long each group had a collective in flight, summed over the groups."""
    total, until = 0, dict[str, int]()
    for node, begin, end in sorted(transfers, key=lambda transfer: transfer[1]):
        over = until.get(group_of(node), begin)
        total += max(0, end - max(begin, over))
        until[group_of(node)] = max(over, end)
    return total


def _outermost(inside: Sequence[Event]) -> list[Event]:
    """Return the operators of collectives, without the operators that they call."""
    found: list[Event] = []
    for event in inside:
        if event.name.startswith(_OPERATORS) and not (found and event in found[-1]):
            found.append(event)
    return found


def _match(events: Sequence[Event], call: GraphCall, index: int) -> list[tuple[Node, Event]]:
    """Pair the collectives and waits of a graph with the operators that ran. Raise ``ValueError`` if they differ."""
    nodes = [node for node in call.graph.graph_module.graph.nodes if is_collective(node) and not is_fused_product(node)]
    wanted = [_operator(node) for node in nodes]
    found = [event.name.partition("::")[2].rstrip("_") for event in events]
    if wanted != found:
        position = next(
            (place for place, (one, other) in enumerate(zip(wanted, found, strict=False)) if one != other),
            min(len(wanted), len(found)),
        )
        told, ran = (names[position] if position < len(names) else "nothing" for names in (wanted, found))
        raise ValueError(
            f"The profile is one of another step: in call {index}, the report's graph has {len(wanted)} collectives and waits, "
            f"the profile {len(found)}; the first that differs, number {position}, is {told} in the report, and {ran} in the "
            "profile. Compare the report of explain_captured with a later step of the same model, with the same flags."
        )
    return list(zip(nodes, events, strict=True))


def _operator(node: Node) -> str:
    return operator_name(node.target).rstrip("_")


def _unit_of_stretch(nodes: Sequence[Node], call: GraphCall, figures: GraphFigures, otherwise: str) -> str:
    """Return the unit for which ``nodes`` compute most; ``otherwise`` if they compute nothing."""
    costs: dict[str, int] = {}
    for node in nodes:
        unit = unit_of(node, call, figures)
        costs[unit] = costs.get(unit, 0) + figures.costs.compute[node]
    return max(costs, key=costs.__getitem__) if any(costs.values()) else otherwise


class _Stretches:
    """The parts of a graph between its collectives and waits, each with its unit.

    Attributes:
        units: the unit of each part: before the first operator, between the first and the second, and so on.
    """

    def __init__(self, operators: Sequence[Node], call: GraphCall, figures: GraphFigures) -> None:
        order = list(figures.order)
        places = [-1, *map({node: place for place, node in enumerate(order)}.__getitem__, operators), len(order)]
        self.units: list[str] = []
        previous = next((unit_of(node, call, figures) for node in order if figures.costs.compute[node]), NO_UNIT)
        for before, after in itertools.pairwise(places):
            previous = _unit_of_stretch(order[before + 1 : after], call, figures, previous)
            self.units.append(previous)


class _OnHost:
    """A call that computed on the CPU."""

    def __init__(self, call: Event, operators: Sequence[tuple[Node, Event]], inside: Sequence[Event]) -> None:
        self.begin, self.end = call.begin_ns, call.end_ns
        self._operators = operators
        self._inside = inside

    def transfers(self) -> list[tuple[Node, int, int]]:
        """Return each collective, with the begin and the end of its time in flight."""
        ran = [event for event in self._inside if event.name.startswith(_IN_FLIGHT)]
        waits = {_awaited(node): event for node, event in self._operators if not starts_collective(node)}
        found = []
        for node, event in self._operators:
            if starts_collective(node):
                mine = [one for one in ran if one in event]
                # A collective without an event of its process group counts as over at its wait.
                over = [one.end_ns for one in mine] or [waits[node].end_ns if node in waits else event.end_ns]
                found.append((node, min([one.begin_ns for one in mine], default=event.begin_ns), max(over)))
        return found

    def pieces(self, call: GraphCall, figures: GraphFigures) -> Iterator[tuple[str, Span]]:
        """Yield spans of the computing thread, each with the unit that it works for."""
        units = _Stretches([node for node, _ in self._operators], call, figures).units
        clock = self.begin
        for (node, event), before in zip(self._operators, units, strict=False):
            if event.begin_ns > clock:
                yield before, Span("compute", Kind.KERNEL, clock, event.begin_ns - clock)
            unit, duration = unit_of(node, call, figures), event.end_ns - event.begin_ns
            if starts_collective(node):
                yield unit, Span(f"start {name_of_transfer(node, call, figures)}", Kind.KERNEL, event.begin_ns, duration)
            else:
                awaited = _awaited(node)
                name, kind = f"wait for {name_of_transfer(awaited, call, figures)}", collective_kind(awaited)
                yield unit, Span(name, Kind.WAIT, event.begin_ns, duration, kind)
            clock = event.end_ns
        if self.end > clock:
            yield units[-1], Span("compute", Kind.KERNEL, clock, self.end - clock)


class _OnDevice:
    """A call that computed on a GPU.

    Args:
        operators: the collectives and waits of its graph, each with the event in which the host ran it.
        launched: what it launched: pairs of the host's launch and the event on the device.
        not_before: the end of the call before it, in nanoseconds.
    """

    def __init__(
        self, operators: Sequence[tuple[Node, Event]], launched: Sequence[tuple[Event, Event]], not_before: int
    ) -> None:
        if not launched:
            raise ValueError("A graph in the profile launched nothing on the GPU, though the profile has kernels of others.")
        self.begin = max(not_before, min(event.begin_ns for _, event in launched))
        self.end = max(self.begin, *(event.end_ns for _, event in launched))
        self._operators = operators
        starts = [(node, event) for node, event in operators if starts_collective(node)]
        self._communicates: dict[Node, list[Event]] = {}
        self._computes: list[tuple[Event, Event]] = []
        for launch, event in launched:
            owner = next((node for node, operator in starts if launch in operator), None)
            if owner is not None and event.category == "kernel" and "nccl" in event.name.lower():
                self._communicates.setdefault(owner, []).append(event)
            else:
                self._computes.append((launch, event))
        unseen = [node for node, _ in starts if node not in self._communicates]
        if unseen:
            raise ValueError(
                f"{len(unseen)} of {len(starts)} collectives of a graph launched no NCCL kernel, the first {unseen[0].name}, "
                "so the profile does not say when they were in flight. Profile one of several ranks that communicate by NCCL."
            )

    def transfers(self) -> list[tuple[Node, int, int]]:
        """Return each collective, with the begin and the end of its time in flight."""
        return [
            (node, min(event.begin_ns for event in events), max(event.end_ns for event in events))
            for node, events in self._communicates.items()
        ]

    def pieces(self, call: GraphCall, figures: GraphFigures) -> Iterator[tuple[str, Span]]:
        """Yield spans of compute and waits, each with the unit that it works for. Other idle time gives no span."""
        units = _Stretches([node for node, _ in self._operators], call, figures).units
        begins = [event.begin_ns for _, event in self._operators]
        clock, unit = self.begin, units[0]
        for launch, event in sorted(self._computes, key=lambda pair: pair[1].begin_ns):
            unit = units[bisect_right(begins, launch.begin_ns)]
            yield from ((unit, span) for span in self._waits(clock, event.begin_ns, call, figures))
            since = max(clock, event.begin_ns)
            if event.end_ns > since:
                yield unit, Span(event.name, Kind.KERNEL, since, event.end_ns - since)
            clock = max(clock, event.end_ns)
        yield from ((unit, span) for span in self._waits(clock, self.end, call, figures))

    def _waits(self, since: int, until: int, call: GraphCall, figures: GraphFigures) -> Iterator[Span]:
        """Yield the parts of a gap in which collectives run. Of several at once, the one that began first is waited for."""
        clock = since
        for node, begin, end in sorted(self.transfers(), key=lambda transfer: transfer[1]):
            begin, end = max(begin, clock), min(end, until)
            if end > begin:
                name, kind = f"wait for {name_of_transfer(node, call, figures)}", collective_kind(node)
                yield Span(name, Kind.WAIT, begin, end - begin, kind)
                clock = end


def _awaited(wait: Node) -> Node:
    source = wait.all_input_nodes[0]
    return source if starts_collective(source) else source.all_input_nodes[0]
