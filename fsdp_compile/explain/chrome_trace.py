"""A step as Chrome trace events: the format that Perfetto and chrome://tracing read.

One track computes: graphs, in them what they do for one unit after the other, in that kernels and waits. Each process group has
a track of its own, with its collectives. A counter shows memory by category.

Source: "Trace Event Format", the "complete" events ("X"), counters ("C") and metadata ("M"); times in microseconds.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.fx import Node

from passes.fx.graph import group_of
from passes.models.cost_model import collective_kind

from ..compiler.calls import GraphCall
from .exposure import WORDS, unit_of_collective
from .figures import GraphFigures
from .parts import Source

if TYPE_CHECKING:
    from .report import Report

_COMPUTE = 0
Event = dict[str, Any]


def write_trace(path: str | os.PathLike[str], report: Report, source: Source) -> None:
    """Write the events of a step to a file."""
    events = list(trace_events(report, source))
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace_events(report: Report, source: Source) -> Iterator[Event]:
    """The events of a step."""
    tracks: dict[str, int] = {}
    yield _named("process_name", 0, f"one rank, {report.hardware.name}")
    yield _named("thread_name", _COMPUTE, "compute")
    for index, (call, figures, of_call) in enumerate(zip(source.calls, source.figures, report.calls, strict=True)):
        begin = of_call.begins_ns
        yield _event(f"{of_call.stage} {index}", _COMPUTE, begin, of_call.total_ns, exposed_ns=of_call.exposed_ns)
        yield from _compute(call, figures, begin)
        for collective in figures.costs.transfer:
            role = call.graph.group_names.get(group_of(collective), group_of(collective))
            if role not in tracks:
                tracks[role] = 1 + len(tracks)
                yield _named("thread_name", tracks[role], f"group {role}")
            yield _collective(collective, call, figures, begin, tracks[role])
        yield from _memory(source, index, begin)
    if report.optimizer_ns:
        yield _event("optimizer", _COMPUTE, report.time_ns - report.optimizer_ns, report.optimizer_ns)


def _compute(call: GraphCall, figures: GraphFigures, begin: int) -> Iterator[Event]:
    """Stretches for one unit, each followed by what happens in it."""
    pieces = list(_pieces(call, figures, begin))
    start = 0
    for index in range(1, len(pieces) + 1):
        if index == len(pieces) or pieces[index][0] != pieces[start][0]:
            first, last = pieces[start][1], pieces[index - 1][1]
            since, until = first["args"]["ns"][0], sum(last["args"]["ns"])
            yield _event(pieces[start][0], _COMPUTE, since, until - since)
            yield from (event for _, event in pieces[start:index])
            start = index


def _pieces(call: GraphCall, figures: GraphFigures, begin: int) -> Iterator[tuple[str, Event]]:
    """What the computing side does, with the unit that it is for."""
    for node in figures.order:
        arrives = begin + figures.timeline.arrives[node]
        unit = call.units.get(figures.unit_of[node], figures.unit_of[node])
        if node in figures.timeline.waits:
            waited, collective = figures.timeline.waits[node]
            yield unit, _event(f"wait for {_name(collective, call)}", _COMPUTE, arrives, waited)
            arrives += waited
        if figures.costs.compute[node]:
            name = f"start {_name(node, call)}" if node in figures.costs.transfer else node.name
            yield unit, _event(name, _COMPUTE, arrives, figures.costs.compute[node])


def _name(collective: Node, call: GraphCall) -> str:
    return f"{WORDS[collective_kind(collective)]} of {unit_of_collective(collective, call.units)}"


def _collective(node: Node, call: GraphCall, figures: GraphFigures, begin: int, track: int) -> Event:
    begins, ends = figures.timeline.begins[node], figures.timeline.ends[node]
    return _event(_name(node, call), track, begin + begins, ends - begins, sent_bytes=round(figures.sent[node]))


def _memory(source: Source, index: int, begin: int) -> Iterator[Event]:
    figures, around = source.figures[index], source.memory.around[index]
    rows = {category.value: row for category, row in figures.memory.timeline.items()}
    shown: Sequence[int] = ()
    for position, node in enumerate(figures.order):
        inside = [row[position] for row in rows.values()]
        if inside != shown:
            shown = inside
            held = {**around, **{name: around[name] + row[position] for name, row in rows.items()}}
            yield _counter(begin + figures.timeline.arrives[node], held)


def _event(name: str, track: int, begin_ns: int, duration_ns: int, **args: Any) -> Event:
    args["ns"] = [begin_ns, duration_ns]
    return {"ph": "X", "pid": 0, "tid": track, "name": name, "ts": begin_ns / 1e3, "dur": duration_ns / 1e3, "args": args}


def _counter(at_ns: int, held: dict[str, int]) -> Event:
    return {"ph": "C", "pid": 0, "tid": _COMPUTE, "name": "memory", "ts": at_ns / 1e3, "args": held}


def _named(what: str, track: int, name: str) -> Event:
    return {"ph": "M", "pid": 0, "tid": track, "name": what, "args": {"name": name}}
