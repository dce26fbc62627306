"""Tracks: a step as spans of time, and its memory, for modules that write or draw the step.

The track of compute has graphs; in each graph, the work for one unit after the other; and in that work, kernels and waits. Each
process group has a track of its own, with its collectives. So has each direction between device and host, with its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from torch.fx import Node

from passes.models.cost_model import transfer_kind

from ..compiler.calls import GraphCall
from .exposure import WORDS, unit_of_transfer
from .figures import GraphFigures
from .parts import Source
from .prediction import Prediction

#: The name of the track of compute.
COMPUTE = "compute"


class Kind(Enum):
    """The kind of a span.

    Attributes:
        GRAPH: the call of a graph.
        UNIT: compute for one unit, waits included.
        KERNEL: a kernel, a copy, or the start of a collective.
        WAIT: compute waits for a collective, or for a copy between device and host.
        COLLECTIVE: a collective, or a copy between device and host, is in flight.
        OPTIMIZER: the optimizer's step.
    """

    GRAPH = "graph"
    UNIT = "unit"
    KERNEL = "kernel"
    WAIT = "wait"
    COLLECTIVE = "collective"
    OPTIMIZER = "optimizer"


@dataclass(frozen=True)
class Span:
    """A span of time, in nanoseconds from the beginning of the step.

    Attributes:
        name: the name to show.
        sort: for a transfer, or a wait for one, its kind, as in :attr:`~fsdp_compile.explain.exposure.Exposure.kind`; for a
            graph, its stage; otherwise empty.
        sent_bytes: the bytes that the rank sends or copies; None: not known, or no transfer.
        note: more about it, in words.
    """

    name: str
    kind: Kind
    begin_ns: int
    duration_ns: int
    sort: str = ""
    sent_bytes: int | None = None
    note: str = ""

    @property
    def end_ns(self) -> int:
        return self.begin_ns + self.duration_ns


@dataclass(frozen=True)
class MemorySample:
    """The bytes by category that live from a moment on."""

    at_ns: int
    num_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Picture:
    """A predicted or measured step, to write or draw.

    Attributes:
        title: whether the step is predicted or measured, in words.
        total_ns: how long the step takes.
        tracks: spans by the name of their track. First comes :data:`COMPUTE`, whose spans nest; each follows the span that
            contains it. Then comes one track for each process group, and for each direction between device and host. Their
            spans follow each other, except that measured ones may overlap.
        memory: live bytes, in the order of time; empty: not known.
    """

    title: str
    total_ns: int
    tracks: Mapping[str, Sequence[Span]]
    memory: Sequence[MemorySample] = ()

    def compute(self, *kinds: Kind) -> list[Span]:
        """Return the spans of some kinds on the track of compute."""
        return [span for span in self.tracks[COMPUTE] if span.kind in kinds]

    @property
    def groups(self) -> dict[str, Sequence[Span]]:
        """The tracks of process groups, and of directions between device and host."""
        return {name: spans for name, spans in self.tracks.items() if name != COMPUTE}


#: The names of the tracks of copies between device and host, by their links in the timeline.
_COPIES = {"to_device": "host to device", "to_host": "device to host"}


def group_track(name: str, call: GraphCall) -> str:
    """Return the name of the track of a process group, or of a direction between device and host."""
    if name in _COPIES:
        return _COPIES[name]
    return f"group {call.graph.group_names.get(name, name)}"


def name_of_transfer(transfer: Node, call: GraphCall, figures: GraphFigures) -> str:
    """Return the name of a collective or a copy, such as "gather of blocks.0"."""
    return f"{WORDS[transfer_kind(transfer)]} of {unit_of_transfer(transfer, call, figures)}"


def unit_of(node: Node, call: GraphCall, figures: GraphFigures) -> str:
    """Return the qualified name of the unit that a node works for."""
    return call.units.get(figures.unit_of[node], figures.unit_of[node])


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Distribute spans over as few lanes as possible, so that the spans of a lane do not overlap."""
    found: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.begin_ns):
        free = next((lane for lane in found if not lane or lane[-1].end_ns <= span.begin_ns), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


def legible(spans: Sequence[Span], fits: Callable[[str, int], bool], visible_ns: float) -> list[tuple[str, int, int]]:
    """Label consecutive spans, if there is room for their names or for the last parts of these.

    Args:
        spans: the spans.
        fits: returns whether a text has room in a number of nanoseconds.
        visible_ns: shorter spans get no label, so that equal neighbours on both sides share one.

    Returns:
        Each label, with the begin and the end of the time that it is for, in nanoseconds.
    """
    joined: list[tuple[str, int, int]] = []
    for span in spans:
        if span.duration_ns >= visible_ns:
            if joined and joined[-1][0] == span.name:
                joined[-1] = (span.name, joined[-1][1], span.end_ns)
            else:
                joined.append((span.name, span.begin_ns, span.end_ns))
    found = []
    for name, begin, end in joined:
        text = next((text for text in (name, name.rpartition(".")[2]) if fits(text, end - begin)), None)
        found += [] if text is None else [(text, begin, end)]
    return found


def predicted(report: Prediction, source: Source) -> Picture:
    """Make the picture of the step that a report predicts."""
    tracks: dict[str, list[Span]] = {COMPUTE: []}
    memory: list[MemorySample] = []
    # Exposures are listed in the order of waits.
    reasons = iter([exposure.reason for exposure in report.exposures])
    for index, (call, figures, of_call) in enumerate(zip(source.calls, source.figures, report.calls, strict=True)):
        begin = of_call.begins_ns
        tracks[COMPUTE].append(Span(f"{of_call.stage} {index}", Kind.GRAPH, begin, of_call.total_ns, of_call.stage))
        tracks[COMPUTE] += in_units(_pieces(call, figures, begin, reasons))
        for collective in figures.costs.transfer:
            begins = figures.timeline.begins[collective]
            duration, sent = figures.timeline.ends[collective] - begins, round(figures.sent[collective])
            name, kind = name_of_transfer(collective, call, figures), transfer_kind(collective)
            track = tracks.setdefault(group_track(figures.costs.link[collective], call), [])
            track.append(Span(name, Kind.COLLECTIVE, begin + begins, duration, kind, sent))
        memory += _memory(source, index, begin)
    if report.optimizer_ns:
        tracks[COMPUTE].append(Span("optimizer", Kind.OPTIMIZER, report.time_ns - report.optimizer_ns, report.optimizer_ns))
    return Picture(f"predicted for {report.hardware.name}", report.time_ns, tracks, memory)


def in_units(pieces: Iterator[tuple[str, Span]]) -> Iterator[Span]:
    """Group consecutive spans by unit: yield a span for the unit, then the spans in it.

    Args:
        pieces: consecutive spans of compute, each with the unit that it works for.
    """
    unit, stretch = "", list[Span]()
    for of, span in pieces:
        if stretch and of != unit:
            yield from _stretch(unit, stretch)
            stretch = []
        unit = of
        stretch.append(span)
    if stretch:
        yield from _stretch(unit, stretch)


def _stretch(unit: str, spans: Sequence[Span]) -> Iterator[Span]:
    begin = spans[0].begin_ns
    yield Span(unit, Kind.UNIT, begin, spans[-1].end_ns - begin)
    yield from spans


def _pieces(call: GraphCall, figures: GraphFigures, begin: int, reasons: Iterator[str]) -> Iterator[tuple[str, Span]]:
    for node in figures.order:
        arrives, unit = begin + figures.timeline.arrives[node], unit_of(node, call, figures)
        if node in figures.timeline.waits:
            waited, collective = figures.timeline.waits[node]
            name, kind = f"wait for {name_of_transfer(collective, call, figures)}", transfer_kind(collective)
            yield unit, Span(name, Kind.WAIT, arrives, waited, kind, note=next(reasons))
            arrives += waited
        if figures.costs.compute[node]:
            name = f"start {name_of_transfer(node, call, figures)}" if node in figures.costs.transfer else node.name
            yield unit, Span(name, Kind.KERNEL, arrives, figures.costs.compute[node])


def _memory(source: Source, index: int, begin: int) -> Iterator[MemorySample]:
    figures, around = source.figures[index], source.memory.around[index]
    rows = {category.value: row for category, row in figures.memory.timeline.items()}
    shown: Sequence[int] = ()
    for position, node in enumerate(figures.order):
        inside = [row[position] for row in rows.values()]
        if inside != shown:
            shown = inside
            held = {**around, **{name: around[name] + row[position] for name, row in rows.items()}}
            yield MemorySample(begin + figures.timeline.arrives[node], held)
