"""Winners: the best points of a plan, traced and simulated at their own sizes with both schedules, and a plot of them."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from passes.fx.torch_internals.core import pytree

from ..dry_run import train
from ..explain import Report
from ..explain.predict import explain_microbatches
from .policies import TRACED_MICROBATCHES

if TYPE_CHECKING:
    from .search import Point, Search


@dataclass(frozen=True)
class Winner:
    """A point that was traced.

    Attributes:
        point: the point, with the faster schedule.
        report: the report on its step.
        other: the report on the step with the other schedule; None: the schedule "auto" does not fit.
    """

    point: Point
    report: Report
    other: Report | None


def check_winner(search: Search, point: Point) -> Winner:
    """Trace and simulate a point with both schedules.

    The faster schedule wins; "auto" counts only if it fits.
    """
    reports = {schedule: _report(search, point, schedule) for schedule in ("default", "auto")}
    fitting = {
        schedule: report
        for schedule, report in reports.items()
        if schedule == "default" or report.memory.peak_bytes <= search.memory_bytes
    }
    best = min(fitting, key=lambda schedule: fitting[schedule].time_ns)
    others = [report for schedule, report in fitting.items() if schedule != best]
    chosen = replace(point, policy=replace(point.policy, schedule=best))
    return Winner(chosen, fitting[best], others[0] if others else None)


def _report(search: Search, point: Point, schedule: str) -> Report:
    policy = point.policy
    return explain_microbatches(
        search.model,
        _with_batch(search.inputs, point.batch),
        (point.replicas, point.shards) if policy.has_replicas else (point.shards,),
        search.hardware,
        lambda number: train if number == 1 else functools.partial(policy.accumulate, number),
        point.microbatches,
        TRACED_MICROBATCHES,
        shard=policy.shard,
        options={"schedule": schedule},
        optimizer=search.optimizer,
    )


def _with_batch(inputs: Any, batch: int) -> Any:
    """Resize inputs to another batch: each tensor whose first size is that of the first tensor."""
    first = next(value.size(0) for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.dim())

    def resized(value: Tensor) -> Tensor:
        if value.dim() == 0 or value.size(0) != first:
            return value
        return torch.empty([batch, *value.shape[1:]], dtype=value.dtype, device="meta", requires_grad=value.requires_grad)

    return pytree.tree_map_only(Tensor, resized, inputs)


def plot_scaling(path: str | os.PathLike[str], search: Search, winners: Sequence[Winner]) -> None:
    """Plot :attr:`Search.tokens` per second over the number of GPUs, with a line of ideal scaling, and write it to ``path``.

    Raises:
        RuntimeError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise RuntimeError("--plot draws with matplotlib, which is not installed: pip install matplotlib.") from error
    gpus = [winner.point.gpus for winner in winners]
    rates = [search.tokens / (winner.report.time_ns / 1e9) for winner in winners]
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot(xscale="log", yscale="log", xlabel="GPUs", ylabel=f"{search.unit} a second, all GPUs")
    axes.plot(gpus, [rates[0] * number / gpus[0] for number in gpus], "--", color="grey", label="ideal")
    axes.plot(gpus, rates, "o-", label=f"best on {search.hardware.name}")
    for number, rate, winner in zip(gpus, rates, winners, strict=True):
        text = f"{winner.point.shards} x {winner.point.replicas}"
        axes.annotate(text, (number, rate), textcoords="offset points", xytext=(0, -14), ha="center")
    axes.set_xticks(gpus, [f"{number:,}" for number in gpus])
    axes.minorticks_off()
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path)
