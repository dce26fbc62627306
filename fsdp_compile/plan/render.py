"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..explain.exposure import milliseconds
from ..explain.render import columns, size

if TYPE_CHECKING:
    from .search import Point, Search
    from .winners import Winner


def plan_table(search: Search, gpus: int, points: Sequence[Point], winner: Winner, layers: str) -> str:
    """Format the best points for a number of GPUs: a table, the traced winner, and the winner's code."""
    rows = [["shards x replicas", "microbatches", f"{search.unit}/s each", "step", "exposed", "memory", "bound by", "policy"]]
    for point in points:
        estimate = point.estimate
        rows.append(
            [
                f"{point.shards:,} x {point.replicas:,}",
                f"{point.microbatches} of {point.batch}",
                f"{search.tokens / gpus / estimate.time_s:,.0f}",
                milliseconds(estimate.time_s * 1e9),
                f"{100 * estimate.exposed_share:.1f}%",
                size(estimate.peak_bytes),
                estimate.bound,
                str(point.policy),
            ]
        )
    report, best = winner.report, winner.point
    traced = (
        f"Traced: {milliseconds(report.time_ns)}, {100 * report.exposed_share:.1f}% exposed, {size(report.memory.peak_bytes)}, "
        f"MFU {100 * report.mfu:.1f}%"
    )
    if winner.other is not None:
        other = "default" if best.policy.schedule == "auto" else "auto"
        traced += f", with schedule={best.policy.schedule!r}; with {other!r} {milliseconds(winner.other.time_ns)}"
    lines = best.policy.lines(best.shards, best.replicas, best.microbatches, layers)
    return "\n".join([f"{gpus:,} GPUs", columns(rows), traced, *(f"    {line}" for line in lines), ""])
