"""Reports on the calls of a capture."""

from __future__ import annotations

import itertools
import os
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path

from passes.collectives.functional import group_size
from passes.models.cost_model import node_flops
from passes.models.hardware import Hardware, known_hardware

from ..compiler.calls import Census, GraphCall, UnitFacts
from ..compiler.capture import Capture
from ..compiler.optimizer_state import Optimizer
from .exposure import exposures
from .figures import GraphFigures
from .memory import CATEGORIES, StepMemory
from .parts import CallReport, MemoryReport, Source, UnitReport
from .report import Report

_GPUS = ("a100", "h100", "h200", "b200")
_SENT = {
    "all_gather": "gathered_bytes",
    "reduce_scatter": "scattered_bytes",
    "all_reduce": "all_reduced_bytes",
    "to_device": "to_device_bytes",
    "to_host": "to_host_bytes",
}
_EACH = ("compute_ns", "communication_ns", "exposed_ns", *_SENT.values())


def hardware_of(given: Hardware | str | os.PathLike[str]) -> Hardware:
    """Return the machine that a user's argument means.

    Args:
        given: a ``Hardware``, "cpu", the name of a GPU of the table, or the path of a file that a calibration wrote.

    Raises:
        ValueError: ``given`` is none of these.
    """
    if isinstance(given, Hardware):
        return given
    name = str(given).lower()
    if name == "cpu":
        return known_hardware("cpu", "cpu")
    if name in _GPUS:
        return known_hardware("cuda", name.upper())
    if Path(given).exists():
        return Hardware.load(given)
    raise ValueError(
        f"hardware={str(given)!r} is not known: give {', '.join(map(repr, (*_GPUS, 'cpu')))}, the path of a file that "
        "python -m fsdp_compile.calibrate wrote (there is none of that name), or a passes.models.hardware.Hardware."
    )


def make_report(
    captured: Capture,
    hardware: Hardware | str | os.PathLike[str],
    *,
    tokens: int | None = None,
    optimizer: str | float | None = "adamw",
    figures_of: Callable[[GraphCall, Sequence[UnitFacts], Hardware], GraphFigures] = GraphFigures.of,
) -> Report:
    """Make a report on a captured step; see :func:`.predict.explain_captured`.

    Args:
        captured: the step.
        hardware, tokens, optimizer: as for :func:`fsdp_compile.explain.explain`.
        figures_of: computes the figures of the graph of a call.

    Raises:
        ValueError: a graph ran that was compiled before the capture, or none ran; the hardware is not known, or lacks a rate
            that the step needs; the optimizer is not known.
    """
    machine, keeper = hardware_of(hardware), Optimizer.of(optimizer)
    _check_calls(captured)
    calls, census = captured.calls, captured.census
    made: dict[Hashable, GraphFigures] = {}
    for call in calls:
        if call.key not in made:
            _check_rates(call, machine)
            made[call.key] = figures_of(call, census.units, machine)
    figures = [made[call.key] for call in calls]
    on_host, on_device = ([unit for unit in census.units if unit.is_copied == there] for there in (True, False))
    kept = sum(unit.shard_bytes + unit.trainable_bytes for unit in on_host) + keeper.state_bytes(on_host)
    memory = StepMemory(calls, figures, census, keeper.state_bytes(on_device), kept)
    optimizer_ns = keeper.time_ns(census.units, machine)
    time_ns = sum(of_call.timeline.total for of_call in figures) + optimizer_ns
    flops, model_flops, ideal_s = _flops(calls, figures, machine)
    return Report(
        hardware=machine,
        mesh=_mesh(calls),
        units=_units(calls, figures, census),
        calls=_calls(calls, figures, memory),
        exposures=[one for index, call in enumerate(calls) for one in exposures(figures[index], call, index)],
        memory=_memory(calls, figures, memory),
        optimizer=keeper.name,
        optimizer_ns=optimizer_ns,
        time_ns=time_ns,
        tokens=tokens,
        flops=flops,
        model_flops=model_flops,
        mfu=ideal_s * 1e9 / time_ns if time_ns else 0.0,
        choices=tuple(captured.choices),
        outside=tuple(captured.outside),
        _source=Source(calls, figures, memory),
    )


def _check_calls(captured: Capture) -> None:
    if captured.unknown_calls:
        raise ValueError(
            f"{captured.unknown_calls} graphs ran in this capture that were compiled ahead of it: what they do is not known. "
            "Capture the first step, or call torch._dynamo.reset() ahead of the capture, so that they are compiled anew."
        )
    if not captured.calls:
        raise ValueError(
            "No graph of fsdp_backend ran in this capture. Compile with torch.compile(model, backend=fsdp_backend), and run a "
            "step inside of the with block."
        )


def _check_rates(call: GraphCall, hardware: Hardware) -> None:
    products = filter(None, map(node_flops, call.graph.graph_module.graph.nodes))
    for dtype in dict.fromkeys(dtype for dtype, _ in products):
        if dtype not in hardware.flops_per_s:
            raise ValueError(
                f"The step has matrix products in {dtype}, for which hardware {hardware.name!r} has no rate, only for "
                f"{', '.join(hardware.flops_per_s)}. Measure it with python -m fsdp_compile.calibrate, or give a Hardware with "
                f"flops_per_s[{dtype!r}]."
            )


def _mesh(calls: Sequence[GraphCall]) -> dict[str, int]:
    names = {role: name for call in calls for name, role in call.graph.group_names.items()}
    if "node" in names:
        # The group that shards has the ranks of all nodes.
        del names["shard"]
    return {role: group_size(names[role]) for role in sorted(names, reverse=True)}


def _flops(
    calls: Sequence[GraphCall], figures: Sequence[GraphFigures], hardware: Hardware
) -> tuple[dict[str, int], int, float]:
    """Return all flops by dtype, the flops of the model alone, and the seconds of these at the hardware's peak rates."""
    by_stage: dict[bool, Counter[str]] = {True: Counter(), False: Counter()}
    for call, of_call in zip(calls, figures, strict=True):
        by_stage[call.is_backward].update(of_call.flops)
    counted = by_stage[True] + by_stage[False]
    trains = any(call.is_backward for call in calls)
    wanted = {dtype: min(flops, 3 * by_stage[False][dtype]) if trains else flops for dtype, flops in counted.items()}
    seconds = sum(flops / hardware.peak(dtype) for dtype, flops in wanted.items())
    return dict(counted), sum(wanted.values()), seconds


def _units(calls: Sequence[GraphCall], figures: Sequence[GraphFigures], census: Census) -> list[UnitReport]:
    sums: dict[str, defaultdict[str, float]] = {unit.name: defaultdict(float) for unit in census.units}
    for call, of_call in zip(calls, figures, strict=True):
        for name, unit in of_call.units.items():
            row = sums.setdefault(call.units.get(name, name), defaultdict(float))
            for kind, sent in unit.sent.items():
                row[_SENT[kind]] += sent
            row["compute_ns"] += unit.compute
            row["communication_ns"] += unit.transfer
            row["exposed_ns"] += unit.exposed
            row["kernels"] += unit.kernels
            row["collectives"] += unit.collectives
    facts = {unit.name: unit for unit in census.units}
    rounded = {key: _rounded([sums[name][key] for name in sums]) for key in _EACH}
    return [
        UnitReport(
            name,
            sum(facts[name].parameters.values()) if name in facts else 0,
            facts[name].shard_bytes if name in facts else 0,
            **{key: rounded[key][index] for key in _EACH},
            kernels=int(sums[name]["kernels"]),
            collectives=sums[name]["collectives"],
        )
        for index, name in enumerate(sums)
    ]


def _rounded(parts: Sequence[float]) -> list[int]:
    """Round ``parts`` to whole numbers that add up to the rounded sum of ``parts``."""
    sums = [0, *(round(total) for total in itertools.accumulate(parts))]
    return [after - before for before, after in itertools.pairwise(sums)]


def _calls(calls: Sequence[GraphCall], figures: Sequence[GraphFigures], memory: StepMemory) -> list[CallReport]:
    begins = itertools.accumulate((of_call.timeline.total for of_call in figures), initial=0)
    return [
        CallReport(
            stage="backward" if call.is_backward else "forward",
            begins_ns=begin,
            total_ns=of_call.timeline.total,
            exposed_ns=of_call.timeline.exposed,
            flops=sum(of_call.flops.values()),
            collectives=of_call.costs.collectives,
            peak_bytes=max(memory.totals(index)),
        )
        for index, (call, of_call, begin) in enumerate(zip(calls, figures, begins, strict=False))
    ]


def _memory(calls: Sequence[GraphCall], figures: Sequence[GraphFigures], memory: StepMemory) -> MemoryReport:
    index, position = memory.peak()
    moment, call = memory.moment(index, position), calls[index]
    unit = figures[index].unit_of[figures[index].order[position]]
    stage = "backward" if call.is_backward else "forward"
    largest = max(moment.buckets.items(), key=lambda held: held[1], default=None)
    return MemoryReport(
        peak_bytes=sum(moment.held.values()),
        when=f"in {stage}, at {call.units.get(unit, unit)}",
        categories=moment.held,
        largest_bucket=largest,
        most=_most(memory, figures),
        host_bytes=max(memory.on_host),
    )


def _most(memory: StepMemory, figures: Sequence[GraphFigures]) -> Mapping[str, int]:
    most: Counter[str] = Counter()
    for around, of_call in zip(memory.around, figures, strict=True):
        inside = {category.value: max(row) for category, row in of_call.memory.timeline.items()}
        for name in CATEGORIES:
            most[name] = max(most[name], around[name] + inside.get(name, 0))
    return {name: most[name] for name in CATEGORIES}
