"""Tracks: a step as stretches of time, and its memory, for whatever writes or draws it.

One track computes: graphs, in them what they do for one unit after the other, in that kernels and waits. Each process group has
a track of its own, with its collectives; so has each direction between device and host, with its copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from torch.fx import Node

from passes.models.cost_model import transfer_kind

from ..compiler.calls import GraphCall
from .exposure import WORDS, unit_of_transfer
from .figures import GraphFigures
from .parts import Source

if TYPE_CHECKING:
    from .report import Report

#: The name of the track that computes.
COMPUTE = "compute"


class Kind(Enum):
    """What a stretch of time is.

    Attributes:
        GRAPH: the call of a graph.
        UNIT: what computes for one unit, waits included.
        KERNEL: a kernel, a copy, or the start of a collective.
        WAIT: compute waits for a collective.
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
    """A stretch of time, in nanoseconds from the beginning of the step.

    Attributes:
        name: what to call it.
        sort: for a collective or a copy, its kind, as :attr:`~fsdp_compile.explain.exposure.Exposure.kind` has it; for a
            graph, its stage; else empty.
        sent_bytes: what the rank sends for a collective; None: not known, or nothing of the kind.
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
class Held:
    """The bytes that live from a moment on, by category."""

    at_ns: int
    num_bytes: Mapping[str, int]


@dataclass(frozen=True)
class Picture:
    """A step.

    Attributes:
        title: what it is a picture of.
        total_ns: how long it takes.
        tracks: by name; :data:`COMPUTE` first, whose spans nest and come after those that they are in; then one for each
            process group, and for each direction between device and host, whose spans follow each other, or overlap if they
            were measured.
        memory: in the order of time; empty: not known.
    """

    title: str
    total_ns: int
    tracks: Mapping[str, Sequence[Span]]
    memory: Sequence[Held] = ()

    def compute(self, *kinds: Kind) -> list[Span]:
        """The spans of some kinds on the track that computes."""
        return [span for span in self.tracks[COMPUTE] if span.kind in kinds]

    @property
    def groups(self) -> dict[str, Sequence[Span]]:
        """The tracks of process groups."""
        return {name: spans for name, spans in self.tracks.items() if name != COMPUTE}


#: The names of the tracks of the two directions between device and host, by what the timeline calls these.
_COPIES = {"to_device": "host to device", "to_host": "device to host"}


def group_track(name: str, call: GraphCall) -> str:
    """The name of the track of a process group, or of a direction between device and host."""
    if name in _COPIES:
        return _COPIES[name]
    return f"group {call.graph.group_names.get(name, name)}"


def name_of_transfer(transfer: Node, call: GraphCall, figures: GraphFigures) -> str:
    """What a collective or a copy is called: "gather of blocks.0"."""
    return f"{WORDS[transfer_kind(transfer)]} of {unit_of_transfer(transfer, call, figures)}"


def unit_of(node: Node, call: GraphCall, figures: GraphFigures) -> str:
    """The unit that a node works for, by its own name."""
    return call.units.get(figures.unit_of[node], figures.unit_of[node])


def lanes(spans: Sequence[Span]) -> list[list[Span]]:
    """Spans in as few rows as it takes that none overlap in a row."""
    found: list[list[Span]] = [[]]
    for span in sorted(spans, key=lambda span: span.begin_ns):
        free = next((lane for lane in found if not lane or lane[-1].end_ns <= span.begin_ns), None)
        if free is None:
            found.append([span])
        else:
            free.append(span)
    return found


def legible(spans: Sequence[Span], fits: Callable[[str, int], bool], visible_ns: float) -> list[tuple[str, int, int]]:
    """Labels for stretches one after the other: each with the begin and the end of what it is for, in nanoseconds.

    Args:
        spans: the stretches.
        fits: whether a text has room in so many nanoseconds.
        visible_ns: what is shorter is passed over, so that those on both sides of it can have one label.
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


def predicted(report: Report, source: Source) -> Picture:
    """The step of a report."""
    tracks: dict[str, list[Span]] = {COMPUTE: []}
    memory: list[Held] = []
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
    """Stretches for one unit, each followed by what happens in it.

    Args:
        pieces: what the computing side does, one after the other, with the unit that it is for.
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


def _memory(source: Source, index: int, begin: int) -> Iterator[Held]:
    figures, around = source.figures[index], source.memory.around[index]
    rows = {category.value: row for category, row in figures.memory.timeline.items()}
    shown: Sequence[int] = ()
    for position, node in enumerate(figures.order):
        inside = [row[position] for row in rows.values()]
        if inside != shown:
            shown = inside
            held = {**around, **{name: around[name] + row[position] for name, row in rows.items()}}
            yield Held(begin + figures.timeline.arrives[node], held)
