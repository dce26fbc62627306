"""The structure of a written timeline: viewers can read it, and its durations are those of the report."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fsdp_compile.explain import Report
from tests.fsdp_compile.explain.test_explain import report_of

pytestmark = pytest.mark.units_apart

Span = tuple[int, int, str]


def trace_of(report: Report, folder: Path) -> list[dict[str, Any]]:
    report.timeline(folder / "trace.json")
    return json.loads((folder / "trace.json").read_text())["traceEvents"]


def spans(events: list[dict[str, Any]]) -> dict[str, list[Span]]:
    """Return begin (ns), end (ns) and name of the events of each track, in the order of the file."""
    names = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found: dict[str, list[Span]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            begin, duration = event["args"]["ns"]
            assert (event["ts"], event["dur"]) == (begin / 1e3, duration / 1e3)
            found[names[event["tid"]]].append((begin, begin + duration, event["name"]))
    return found


def leaves(track: list[Span]) -> list[Span]:
    """Return the innermost events of a track. Assert that its events nest."""
    found: list[Span] = []
    open_spans: list[Span] = []
    parents: set[Span] = set()
    for span in sorted(track, key=lambda span: (span[0], -span[1])):
        while open_spans and open_spans[-1][1] <= span[0] and span[0] < span[1]:
            open_spans.pop()
        if open_spans:
            assert open_spans[-1][0] <= span[0] and span[1] <= open_spans[-1][1], (open_spans[-1], span)
            parents.add(open_spans[-1])
        open_spans.append(span)
        found.append(span)
    return [span for span in found if span not in parents]


@pytest.mark.parametrize("case", ["h100", "cpu", "hsdp", "microbatches"])
def test_events_nest_and_add_up(case: str, tmp_path: Path) -> None:
    report = report_of(case)
    tracks = spans(trace_of(report, tmp_path))
    compute = leaves(tracks["compute"])
    waits = [span for span in compute if span[2].startswith("wait for ")]
    optimizer = [span for span in compute if span[2] == "optimizer"]
    assert sum(end - begin for begin, end, _ in waits) == report.exposed_ns
    assert sum(end - begin for begin, end, _ in optimizer) == report.optimizer_ns
    assert sum(end - begin for begin, end, _ in compute) == report.time_ns
    assert max(end for _, end, _ in tracks["compute"]) == report.time_ns


@pytest.mark.parametrize("case", ["h100", "hsdp"])
def test_each_group_carries_one_collective_after_the_other(case: str, tmp_path: Path) -> None:
    report = report_of(case)
    tracks = spans(trace_of(report, tmp_path))
    assert set(tracks) == {"compute", *(f"group {role}" for role in report.mesh)}
    links = [sorted(track) for name, track in tracks.items() if name != "compute"]
    for track in links:
        assert all(one[1] <= following[0] for one, following in itertools.pairwise(track))
    assert sum(end - begin for track in links for begin, end, _ in track) == report.total.communication_ns
    assert sum(map(len, links)) == report.total.collectives


def test_memory_counter_reaches_the_peak(tmp_path: Path) -> None:
    report = report_of("microbatches")
    counters = [event for event in trace_of(report, tmp_path) if event["ph"] == "C"]
    assert max(sum(event["args"].values()) for event in counters) == report.memory.peak_bytes
    assert all(set(event["args"]) == set(report.memory.categories) for event in counters)
