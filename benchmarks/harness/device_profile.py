"""Profiles what a GPU does while a function runs: its own time, kernels, copies, and launches of the host.

From the trace of ``torch.profiler``, whose device events are CUPTI's. A trace lists them under these categories: "kernel",
"gpu_memcpy", "gpu_memset". An event's correlation id is that of the host's call that caused it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity


@dataclass(frozen=True)
class Activity:
    """Of one run of a function, the mean over several.

    Attributes:
        kernel_ms: milliseconds in which at least one kernel or memset ran, on any stream: kernels side by side count once.
        copy_ms: milliseconds in which at least one copy ran.
        kernels: kernels and memsets that ran on the device.
        copies: copies by the copy engine or within the device.
        launches: calls of the host that caused all of these; one for a whole graph.
    """

    kernel_ms: float
    copy_ms: float
    kernels: float
    copies: float
    launches: float


def profile(function: Callable[[], object], runs: int, device: torch.device) -> Activity:
    """Run a function several times under the profiler.

    The profiler slows the host down, and therefore all that waits for it: take times of the host from runs without it.
    """
    # On CPU there is nothing to find; what reads the trace is the same.
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    # CUPTI starts with the first one.
    with torch.profiler.profile(activities=[activity]):
        function()
        _synchronize(device)
    with torch.profiler.profile(activities=[activity]) as profiler:
        for _ in range(runs):
            function()
        _synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        # Names of kernels may hold what is no UTF-8.
        trace = json.loads(path.read_text(errors="replace"))
    return read_trace(trace["traceEvents"], runs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_trace(events: Iterable[Mapping[str, Any]], runs: int) -> Activity:
    """The activity that the events of a trace add up to, a run.

    Args:
        events: in the format of Chrome's trace viewer; times in microseconds.
        runs: how often the function ran.
    """
    by_category: dict[str, list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("ph") == "X":
            by_category.setdefault(event.get("cat", ""), []).append(event)
    kernels = by_category.get("kernel", []) + by_category.get("gpu_memset", [])
    copies = by_category.get("gpu_memcpy", [])
    return Activity(
        kernel_ms=_union(kernels) / 1000 / runs,
        copy_ms=_union(copies) / 1000 / runs,
        kernels=len(kernels) / runs,
        copies=len(copies) / runs,
        launches=len({event["args"]["correlation"] for event in kernels + copies}) / runs,
    )


def _union(events: Iterable[Mapping[str, Any]]) -> float:
    """How long at least one of them was going on, in microseconds."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
