"""Profile of a GPU while a function runs: device time, kernels, copies, and launches by the host.

It is read from a trace of ``torch.profiler``, whose device events are CUPTI's. Their categories in the trace are "kernel",
"gpu_memcpy" and "gpu_memset". An event has the correlation id of the host's call that caused it.
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
    """Activity of a device in one run of a function: the mean over several runs.

    Attributes:
        kernel_ms: milliseconds in which at least one kernel or memset ran, on any stream: kernels side by side count once.
        copy_ms: milliseconds in which at least one copy ran.
        kernels: kernels and memsets that ran on the device.
        copies: copies by the copy engine or within the device.
        launches: calls of the host that caused the kernels and copies; one for a whole graph.
    """

    kernel_ms: float
    copy_ms: float
    kernels: float
    copies: float
    launches: float


def profile(function: Callable[[], object], runs: int, device: torch.device) -> Activity:
    """Run a function several times under the profiler. Return the mean activity of a run.

    The profiler slows the host down, and with it everything that waits for the host. Time the host in runs without profiler.
    """
    # A trace of the CPU has no device events, but is read in the same way.
    activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
    # CUPTI starts with the first profile, which is not used.
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
        # Names of kernels may hold bytes that are not UTF-8.
        trace = json.loads(path.read_text(errors="replace"))
    return read_trace(trace["traceEvents"], runs)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def read_trace(events: Iterable[Mapping[str, Any]], runs: int) -> Activity:
    """Add up the events of a trace. Return the mean activity of a run.

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
    """Return the microseconds in which at least one of ``events`` was running."""
    total, until = 0.0, float("-inf")
    for begin, end in sorted((event["ts"], event["ts"] + event["dur"]) for event in events):
        total += max(0.0, end - max(begin, until))
        until = max(until, end)
    return total
