"""Suggestions: changes to a step, evaluated by the models that made its report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from passes.auto.placement import Placement
from passes.fx.graph import copy_of, starts_collective
from passes.fx.sizes import num_bytes
from passes.ir.work import MAKES_PARAMETERS, Role, role
from passes.models.timeline import simulate

from .parts import Suggestion
from .report import Report

_GATHERS = (Role.COPY_TO_DEVICE, Role.GATHER_NODE, Role.START_GATHER, *MAKES_PARAMETERS)


def suggestion(change: str, report: Report, run: Callable[[], Report]) -> Suggestion:
    """Evaluate a change by the report that ``run`` makes of the step with it."""
    try:
        changed = run()
    except (ValueError, RuntimeError) as error:
        return Suggestion(change, 0, 0, 0, 0, f"not possible here: {error}")
    peak = changed.memory.peak_bytes
    return Suggestion(change, changed.time_ns, peak, report.time_ns - changed.time_ns, peak - report.memory.peak_bytes)


def with_suggestions(report: Report) -> Report:
    """Return ``report`` with suggestions that are evaluated from its graphs alone, without a new trace."""
    return replace(report, suggestions=[_placed(report), _without_second_gathers(report)])


def _placed(report: Report) -> Suggestion:
    """Evaluate communication at the automatic schedule's issue points and waits, in the report's buckets."""
    source = report._source
    assert source is not None
    if any(role(node) is Role.COPY_TO_DEVICE for figures in source.figures for node in figures.costs.transfer):
        note = "not possible here: it does not know of copies of shards (CPUOffloadPolicy)"
        return Suggestion("options={'schedule': 'auto'}", 0, 0, 0, 0, note)
    saved = added = 0
    placed: dict[int, tuple[int, int]] = {}
    for call, figures in zip(source.calls, source.figures, strict=True):
        graph = call.graph.graph_module.graph
        if id(graph) not in placed:
            placement = Placement(copy_of(graph), report.hardware)
            before = placement.live_bytes().peak
            result = placement.place(None)
            placed[id(graph)] = figures.timeline.total - result.total_ns, result.peak_bytes - before
        saved += placed[id(graph)][0]
        added = max(added, placed[id(graph)][1])
    change, note = "options={'schedule': 'auto'}", "with the buckets that there are"
    return Suggestion(change, report.time_ns - saved, report.memory.peak_bytes + added, saved, added, note)


def _without_second_gathers(report: Report) -> Suggestion:
    """Evaluate backward without the gathers that it would not need if forward had kept the parameters."""
    source = report._source
    assert source is not None
    saved = 0
    gathered: dict[object, int] = {}
    for call, figures in zip(source.calls, source.figures, strict=True):
        # Besides gathers, these copy parameters out of gathered buffers, which backward would not need either.
        gathers = {node for node in figures.order if role(node) in _GATHERS}
        if not call.is_backward:
            whole = sum(num_bytes(node.meta["val"]) for node in gathers if starts_collective(node))
            gathered[call.compilation] = max(whole, gathered.get(call.compilation, 0))
            continue
        compute = {node: 0 if node in gathers else cost for node, cost in figures.costs.compute.items()}
        transfer = {node: cost for node, cost in figures.costs.transfer.items() if node not in gathers}
        costs = replace(figures.costs, compute=compute, transfer=transfer)
        saved += figures.timeline.total - simulate(figures.order, costs).total
    # An upper bound: all parameters that forward gathers stay until backward.
    added = sum(gathered.values())
    time_ns, peak = report.time_ns - saved, report.memory.peak_bytes + added
    return Suggestion("reshard_after_forward=False", time_ns, peak, saved, added, "memory at most")
