"""A step as Chrome trace events, the format that Perfetto and chrome://tracing read.

Each picture of the step is a process, and each of its tracks is a thread. A counter shows memory by category.

Source: "Trace Event Format": "complete" events ("X"), counters ("C") and metadata ("M"), with times in microseconds. Viewers
nest the events of a thread by their times, and cannot show overlap. Measured collectives may overlap in flight; they are spread
over several threads of the same name.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from .tracks import COMPUTE, MemorySample, Picture, Span, lanes

Event = dict[str, Any]


def write_trace(path: str | os.PathLike[str], pictures: Sequence[Picture]) -> None:
    """Write the events of pictures of a step to a file."""
    events = [event for process, picture in enumerate(pictures) for event in trace_events(picture, process)]
    Path(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def trace_events(picture: Picture, process: int = 0) -> Iterator[Event]:
    """Yield the events of a picture.

    Args:
        picture: the picture.
        process: the process number of the picture, which tells it from other pictures in the same file.
    """
    yield _named("process_name", process, 0, f"one rank, {picture.title}")
    thread = 0
    for name, spans in picture.tracks.items():
        for lane in [spans] if name == COMPUTE else lanes(spans):
            yield _named("thread_name", process, thread, name)
            yield from (_event(span, process, thread) for span in lane)
            thread += 1
    yield from (_counter(held, process) for held in picture.memory)


def _event(span: Span, process: int, thread: int) -> Event:
    args: dict[str, Any] = {"ns": [span.begin_ns, span.duration_ns]}
    args |= {} if span.sent_bytes is None else {"sent_bytes": span.sent_bytes}
    args |= {"note": span.note} if span.note else {}
    times = {"ts": span.begin_ns / 1e3, "dur": span.duration_ns / 1e3}
    return {"ph": "X", "pid": process, "tid": thread, "name": span.name, "cat": span.kind.value, **times, "args": args}


def _counter(held: MemorySample, process: int) -> Event:
    return {"ph": "C", "pid": process, "tid": 0, "name": "memory", "ts": held.at_ns / 1e3, "args": held.num_bytes}


def _named(kind: str, process: int, thread: int, name: str) -> Event:
    return {"ph": "M", "pid": process, "tid": thread, "name": kind, "args": {"name": name}}
