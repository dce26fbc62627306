"""A report as text: a headline, tables, and a verdict in words."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from passes.auto.memory_budget import Choice
from passes.auto.step_policy import SAVE, StepPolicy

from .exposure import Exposure, milliseconds
from .parts import Suggestion, UnitReport
from .prediction import Prediction

# The number of groups of exposures that the verdict names, the longest first. The others are summed.
_NAMED = 3
_BYTES = (" B", " KiB", " MiB", " GiB")
_NUMBER = re.compile(r"\d+")
# Attributes with bytes of communication and copies, and the heads of their columns.
_SENT = {
    "gathered_bytes": "gathers",
    "scattered_bytes": "reduces",
    "all_reduced_bytes": "all-reduces",
    "to_device_bytes": "to device",
    "to_host_bytes": "to host",
}
_SUMMED = tuple(name for name in UnitReport.__dataclass_fields__ if name != "name")


def render(report: Prediction) -> str:
    """Format a report as text. Equal reports give equal texts."""
    parts = [headline(report), *map(str, tables(report)), verdict(report)]
    return "\n\n".join(part for part in parts if part) + "\n"


@dataclass(frozen=True)
class Table:
    """Rows of text. The first row is the head; the first column is aligned left, and the others right.

    Attributes:
        rows: rows of equal length.
        note: a sentence below the rows, or the empty string.
    """

    rows: Sequence[Sequence[str]]
    note: str = ""

    def __str__(self) -> str:
        return f"{columns(self.rows)}\n{self.note}" if self.note else columns(self.rows)


def tables(report: Prediction) -> list[Table]:
    """Make the tables of a report."""
    return [_unit_table(report), _call_table(report), _memory_table(report), *map(_budget_table, report.choices)]


def headline(report: Prediction) -> str:
    """Describe the step in a few lines."""
    ranks = " x ".join(f"{size} ({role})" for role, size in report.mesh.items()) or "one"
    lines = [f"A step on {report.hardware.name}, ranks: {ranks}. Everything is what one rank does.", ""]
    step = f"step {milliseconds(report.time_ns)}"
    parts = [step, f"exposed communication {milliseconds(report.exposed_ns)} ({report.exposed_share:.1%})"]
    if report.tokens_per_s is not None:
        parts.append(f"{report.tokens_per_s:,.0f} tokens/s ({report.tokens} a step)")
    lines.append(", ".join(parts))
    lines.append(_utilization(report))
    if report.optimizer != "none":
        lines.append(f"of the step, the optimizer ({report.optimizer}) takes {milliseconds(report.optimizer_ns)}")
    return "\n".join(lines)


def _utilization(report: Prediction) -> str:
    rates = ", ".join(f"{report.hardware.peak(dtype) / 1e12:g} TFLOP/s in {dtype}" for dtype in report.flops)
    if not rates:
        return "no matrix products"
    counted = sum(report.flops.values())
    again = f" ({counted / 1e12:.4g} with what is recomputed)" if counted > report.model_flops else ""
    return f"{report.model_flops / 1e12:.4g} TFLOP of the model{again}, MFU {report.mfu:.1%} of {rates}"


def fold(units: Sequence[UnitReport]) -> list[tuple[UnitReport, int]]:
    """Sum neighbouring units that hold and send the same, and whose names differ only in numbers.

    Returns:
        Each sum, with the number of its units.
    """
    groups: list[list[UnitReport]] = []
    for unit in units:
        if groups and _is_like(groups[-1][-1], unit):
            groups[-1].append(unit)
        else:
            groups.append([unit])
    return [(_sum(group), len(group)) for group in groups]


def _is_like(one: UnitReport, other: UnitReport) -> bool:
    names = _NUMBER.sub("#", one.name), _NUMBER.sub("#", other.name)
    compared = ("parameters", "shard_bytes", *_SENT)
    # A byte more or less comes from rounding.
    return names[0] == names[1] and all(abs(getattr(one, name) - getattr(other, name)) <= 1 for name in compared)


def _sum(group: Sequence[UnitReport]) -> UnitReport:
    if len(group) == 1:
        return group[0]
    sums = {name: sum(getattr(unit, name) for unit in group) for name in _SUMMED}
    return replace(group[0], name=f"{group[0].name} ... {group[-1].name} ({len(group)})", **sums)


def _unit_table(report: Prediction) -> Table:
    always = ("gathered_bytes", "scattered_bytes")
    shown = [name for name in _SENT if name in always or any(getattr(unit, name) for unit in report.units)]
    head = ["unit", "parameters", "shards", *(_SENT[name] for name in shown)]
    head += ["compute", "in flight", "exposed", "kernels", "collectives"]
    folded = fold(report.units)
    rows = [head]
    for unit in [*(unit for unit, _ in folded), report.total]:
        sent = [getattr(unit, name) for name in shown]
        times = map(milliseconds, [unit.compute_ns, unit.communication_ns, unit.exposed_ns])
        counts = [f"{unit.kernels}", f"{unit.collectives:g}"]
        rows.append([unit.name, _count(unit.parameters), *map(size, [unit.shard_bytes, *sent]), *times, *counts])
    note = "A line of several units is their sum. Bytes of communication are what is sent."
    return Table(rows, note if any(count > 1 for _, count in folded) else "")


def _call_table(report: Prediction) -> Table:
    rows = [["graph", "begins", "takes", "exposed", "TFLOP", "collectives", "peak memory"]]
    for index, call in enumerate(report.calls):
        times = [call.begins_ns, call.total_ns, call.exposed_ns]
        row = [f"{index} {call.stage}", *map(milliseconds, times), f"{call.flops / 1e12:.4g}", f"{call.collectives}"]
        rows.append([*row, size(call.peak_bytes)])
    return Table(rows)


def _memory_table(report: Prediction) -> Table:
    memory = report.memory
    rows = [["memory", "at the peak", "at most"]]
    rows += [[name, size(held), size(memory.most[name])] for name, held in memory.categories.items()]
    rows.append(["total", size(memory.peak_bytes), ""])
    bucket = memory.largest_bucket
    most = f" Of the buckets, {bucket[0]} holds most then: {size(bucket[1])}." if bucket else ""
    host = f" On the host are {size(memory.host_bytes)} at most." if memory.host_bytes else ""
    return Table(rows, f"The peak is {memory.when}.{most}{host}")


def _budget_table(choice: Choice) -> Table:
    """Make the table of trials that some memory budget would choose. Its note says what more bytes would save."""
    frontier = choice.frontier()
    offloads = any(trial.policy.offloaded for trial in frontier)
    head = [f"budget {size(choice.limit)}", "stay gathered", "recomputed", *(["wait on the host"] if offloads else [])]
    rows = [[*head, "memory", "forward and backward"]]
    for trial in frontier:
        policy = trial.policy
        units = len(policy.kept) + len(policy.resharded)
        in_nodes = f", {len(policy.in_nodes)} in each node" if policy.in_nodes else ""
        cells = [f"{len(policy.kept)} of {units} units{in_nodes}"]
        recomputed = [] if policy.activation_budget == SAVE else ["what is cheap"]
        recomputed += [_regions(policy.recomputed, policy)] if policy.recomputed else []
        cells.append(", ".join(recomputed) or "nothing")
        if offloads:
            some = f"{len(trial.waiting)} of {len(trial.waiting) + len(policy.on_device)} activations of "
            waiting = f"{some if policy.on_device else ''}{_regions(policy.offloaded, policy)}, {size(trial.host_bytes)}"
            cells.append(waiting if policy.offloaded else "nothing")
        mark = "chosen" if trial == choice.chosen else "" if trial.peak_bytes <= choice.limit else "too large"
        rows.append([mark, *cells, size(trial.peak_bytes), milliseconds(trial.time_ns)])
    others = len(choice.trials) - len(frontier)
    note = f"{others} others were tried, that take no less time with as many bytes or more."
    next_one = next((trial for trial in frontier if trial.peak_bytes > choice.limit), None)
    if next_one is not None:
        more, saved = size(next_one.peak_bytes - choice.limit), milliseconds(choice.chosen.time_ns - next_one.time_ns)
        note += f" With {more} more, the step would be {saved} faster."
    return Table(rows, note)


def _regions(numbers: Sequence[int], policy: StepPolicy) -> str:
    return f"{len(numbers)} of {policy.regions} regions"


def verdict(report: Prediction) -> str:
    """Say what is exposed and why, and what was tried, in lines. Items of a list begin with a dash."""
    lines = []
    if report.outside:
        lines += [
            f"Not counted: {len(report.outside)} gathers and reductions outside of graphs, the first {report.outside[0]!r}, "
            "and what computes there.",
            "",
        ]
    lines.append(_exposed_share(report))
    worst = sorted(_joined(report.exposures), key=lambda group: -_sum_ns(group))
    lines += [_sentence(group) for group in worst[:_NAMED]]
    if len(worst) > _NAMED:
        rest = sum(map(_sum_ns, worst[_NAMED:]))
        lines.append(f"- {milliseconds(rest)}: others")
    if report.suggestions:
        lines += ["", "Tried with the same models:"]
        lines += [_suggestion(one) for one in report.suggestions]
    return "\n".join(lines)


def _exposed_share(report: Prediction) -> str:
    if not report.exposed_ns:
        copies = any(unit.to_device_bytes or unit.to_host_bytes for unit in report.units)
        return f"Compute hides all communication{' and copies' if copies else ''}."
    return f"Of {milliseconds(report.time_ns)}, {milliseconds(report.exposed_ns)} are exposed:"


def _joined(exposures: Sequence[Exposure]) -> list[list[Exposure]]:
    """Group exposures of one kind, stage and cause whose units differ only in a number in their names.

    Exposures with nothing beside them are grouped by their exact unit.
    """
    groups: dict[tuple[str, ...], list[Exposure]] = {}
    for one in exposures:
        name = one.unit if one.cause == "nothing beside it" else _NUMBER.sub("#", one.unit)
        groups.setdefault((name, one.kind, one.stage, one.cause), []).append(one)
    return list(groups.values())


def _sum_ns(group: Sequence[Exposure]) -> int:
    return sum(one.exposed_ns for one in group)


def _sentence(group: Sequence[Exposure]) -> str:
    longest = max(group, key=lambda one: one.exposed_ns)
    line = f"- {milliseconds(_sum_ns(group))}: the {longest}"
    if len(group) > 1:
        line += f", and {len(group) - 1} like it"
    return f"{line}, because {longest.reason}"


def _suggestion(one: Suggestion) -> str:
    if not one.time_ns:
        return f"- {one.change}: {one.note}"
    faster = f"{milliseconds(one.saved_ns)} faster" if one.saved_ns >= 0 else f"{milliseconds(-one.saved_ns)} slower"
    if abs(one.saved_ns) < 1000:
        faster = "no faster"
    more = f"{size(one.added_bytes)} more" if one.added_bytes >= 0 else f"{size(-one.added_bytes)} less"
    line = f"- {one.change}: {milliseconds(one.time_ns)}, {faster}; memory {size(one.peak_bytes)}, {more}"
    return f"{line} ({one.note})" if one.note else line


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Align cells in columns, the first to the left and the others to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _count(number: int) -> str:
    return _scaled(number, 1000, ("", " k", " M", " G"))


def size(num_bytes: float) -> str:
    """Format a number of bytes, with a binary prefix."""
    return _scaled(num_bytes, 1024, _BYTES)


def scale_of(num_bytes: float) -> tuple[float, str]:
    """Return the binary unit to print ``num_bytes`` in: its bytes, and its name."""
    power = min(3, int(math.log2(max(num_bytes, 1)) // 10))
    return 1024.0**power, _BYTES[power]


def _scaled(number: float, base: int, units: Sequence[str]) -> str:
    for unit in units[:-1]:
        if abs(number) < base:
            return f"{number:.4g}{unit}"
        number /= base
    return f"{number:,.4g}{units[-1]}"
