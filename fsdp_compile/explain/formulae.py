"""Formulae: traffic, memory and time of a step as expressions, derived from its graphs.

Sizes are exact: for any numbers of ranks, replicas, sequences and tokens, they equal those of graphs that are traced there.

Times are sums. A kernel takes its flops over a rate, or its bytes over the rate of memory, whichever is longer at the report's
sizes. So a time is exact as long as the same rate binds each kernel, and too short elsewhere; ``Report.at`` chooses anew.
Likewise, the time of a step is the sum along its critical path at the report's sizes, and its memory is that of the peak there.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import sympy
from torch.fx import Node

from passes.ir.work import bucket
from passes.models.cost_model import Demand
from passes.models.group_layout import GroupLayout
from passes.models.hardware import Hardware
from passes.models.memory_model import Breakdown, Category

from ..compiler.calls import GraphCall
from ..compiler.optimizer_state import Optimizer
from .attribution import NO_UNIT, shares
from .expressions import MEANINGS, SYMBOLS, Formulae, UnitFormulae
from .figures import GraphFigures
from .graph_formulae import GraphFormulae, usual
from .memory import StepMemory
from .report import Report
from .symbolic import SymbolicStep, unit_at

_SHORT = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "float64": "fp64"}
_KINDS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "all"}


class _Machine:
    """Symbols for the rates and latencies of a machine, made at their first use."""

    def __init__(self, hardware: Hardware, values: Mapping[str, int]):
        self._hardware = hardware
        self._sizes = {SYMBOLS[name]: value for name, value in values.items()}
        self.meanings: dict[sympy.Symbol, str] = {SYMBOLS[name]: MEANINGS[name] for name in values}
        self.values: dict[sympy.Symbol, float] = dict(self._sizes)
        self._ways: dict[tuple[str, str], dict[str, int]] = {}

    def number(self, expression: Any) -> float:
        """Evaluate an expression in sizes at the report's sizes."""
        return float(expression.xreplace(self._sizes)) if isinstance(expression, sympy.Expr) else float(expression)

    def _symbol(self, name: str, meaning: str, value: float) -> sympy.Symbol:
        symbol = sympy.Symbol(name, positive=True)
        self.meanings[symbol], self.values[symbol] = meaning, value
        return symbol

    def memory_s(self, num_bytes: Any) -> Any:
        """Return the seconds to read or write ``num_bytes``."""
        return num_bytes / self._symbol("W", "bytes a second of memory", self._hardware.bytes_per_s)

    def compute_s(self, demand: Demand) -> Any:
        """Return the seconds of a kernel."""
        launch = demand.launches * self._symbol("K", "seconds to start a kernel or a collective", self._hardware.kernel_s)
        if demand.segments and self._hardware.segment_s:
            launch += self._symbol("P", "seconds of the host for a segment", self._hardware.segment_s)
        if demand.graphs and self._hardware.graph_s:
            launch += self._symbol("G", "seconds of the host for a graph", self._hardware.graph_s)
        flops, scores, operations = map(self.number, (demand.flops, demand.scores, demand.operations))
        computing = replace(demand, flops=flops, scores=scores, operations=operations).computing_s(self._hardware)
        if not computing or computing < self.number(demand.moved_bytes) / self._hardware.bytes_per_s:
            return launch + self.memory_s(demand.moved_bytes)
        return launch + (self._product_s(demand) if demand.dtype else self._operations_s(demand))

    def _product_s(self, demand: Demand) -> Any:
        dtype, part, hardware = demand.dtype, sympy.nsimplify(demand.computed_part), self._hardware
        short, rate = _SHORT.get(dtype, dtype), hardware.rate(dtype, attention=demand.is_attention)
        if not demand.is_attention:
            return demand.flops * part / self._symbol(f"F_{short}", f"flops a second of products in {dtype}", rate)
        found = demand.flops * part / self._symbol(f"A_{short}", f"flops a second of attention in {dtype}", rate)
        if hardware.score_s.get(dtype):
            each = self._symbol(f"E_{short}", f"seconds for each score of attention in {dtype}", hardware.score_s[dtype])
            found += demand.scores * part * each
        return found

    def _operations_s(self, demand: Demand) -> Any:
        each = self._symbol("O", "seconds for a pointwise operation on an element", self._hardware.operation_s)
        return demand.operations * each

    def communication_s(self, kind: str, traffic: Any, role: str, layout: GroupLayout) -> Any:
        """Return the seconds of a collective, by the algorithm that is fastest at the report's sizes."""
        sent = self.number(traffic)
        ways = self._hardware.algorithms(kind, layout) if layout.size > 1 else []
        if not ways:
            return sympy.Integer(0)
        way = min(ways, key=lambda way: way.startup_s + sent / way.bytes_per_s)
        number = self._ways.setdefault((kind, role), {}).setdefault(way.name, len(self._ways[kind, role]) + 1)
        name = f"{_KINDS[kind]},{role}" + (f",{number}" if number > 1 else "")
        what = f"{kind.replace('_', '-')}s over {role}" + (f" ({way.name})" if way.name else "")
        startup = self._symbol(f"L_{{{name}}}", f"seconds to start {what}", way.startup_s)
        return startup + traffic / self._symbol(f"N_{{{name}}}", f"bytes a second of {what}", way.bytes_per_s)

    def taken_s(self, kind: str, traffic: Any, layout: GroupLayout, in_flight: Any) -> Any:
        """Return the seconds that compute loses to a collective in flight."""
        link = self._hardware.link(kind, layout)
        taken = in_flight * sympy.nsimplify(link.taken_part) if layout.size > 1 else 0
        if layout.size > 1 and link.taken_s:
            taken += self._symbol("X", "seconds that compute loses to a collective", link.taken_s)
        if layout.size > 1 and link.taken_s_per_byte:
            taken += traffic * self._symbol("Y", "seconds that compute loses for each byte", link.taken_s_per_byte)
        return taken


def make_formulae(step: SymbolicStep, values: Mapping[str, int], report: Report, optimizer: str | float | None) -> Formulae:
    """Make the formulae of a step.

    Args:
        step: a step that was traced with symbols.
        values: the sizes that decide what binds each kernel, and what compute waits for.
        report: the report on the step at ``values``.
        optimizer: as for :func:`fsdp_compile.explain.explain`.
    """
    return _FormulaeBuilder(step, values, report, Optimizer.of(optimizer)).make()


class StepDerivation:
    """The formulae of a symbolic step, and reports on it at other sizes.

    Args:
        step: the symbolic step.
        hardware, optimizer: as for :func:`fsdp_compile.explain.explain`.
        tokens: tokens of a rank in the step, at ``values``.
        values: the sizes, by the names of their symbols.
    """

    def __init__(
        self,
        step: SymbolicStep,
        hardware: Hardware,
        optimizer: str | float | None,
        tokens: int | None,
        values: Mapping[str, int],
    ):
        self._step, self._hardware, self._optimizer, self._tokens = step, hardware, optimizer, tokens
        self._values = values

    def at(self, values: Mapping[str, int]) -> Report:
        """See :meth:`~fsdp_compile.explain.report.Report.at`."""
        own = self._values
        for name, value in values.items():
            if name not in own:
                known = ", ".join(f"{each} ({MEANINGS[each]})" for each in own)
                raise ValueError(f"{name}={value!r}: the step depends on {known}, and on no {name}.")
            least = 2 if name in ("S", "R") else 1
            if not isinstance(value, int) or value < least:
                raise ValueError(f"{name}={value!r} must be a whole number, at least {least}: {MEANINGS[name]}.")
        wanted = {**own, **values}
        tokens = self._tokens
        for name in {"B", "T", "M"} & set(own):
            tokens = None if tokens is None else tokens * wanted[name] // own[name]
        there = StepDerivation(self._step, self._hardware, self._optimizer, tokens, wanted)
        return replace(self._step.at(tokens, wanted), _derive=lambda: there)

    @cached_property
    def formulae(self) -> Formulae:
        """See :attr:`~fsdp_compile.explain.report.Report.formulae`."""
        return make_formulae(self._step, self._values, self.at({}), self._optimizer)


class _FormulaeBuilder:
    """A maker of the formulae of one step."""

    def __init__(self, step: SymbolicStep, values: Mapping[str, int], report: Report, optimizer: Optimizer):
        assert report._source is not None
        self._step, self._optimizer = step, optimizer
        self._machine = _Machine(report.hardware, values)
        self._calls, self._figures, self._memory = report._source.calls, report._source.figures, report._source.memory
        self._facts = step.facts
        self._units = [unit_at(unit, SYMBOLS["S"]) for unit in self._facts]  # type: ignore[arg-type]
        made: dict[Hashable, GraphFormulae] = {}
        with step.groups_at(values):
            for call in self._calls:
                if call.key not in made:
                    made[call.key] = GraphFormulae.of(call, self._facts, step.group_symbols())
        self._layouts, self._times = step.layouts_at(values), step.times_at(values)
        self._formulae = [made[call.key] for call in self._calls]

    def make(self) -> Formulae:
        units = self._by_unit()
        step_s = sympy.Add(*(times * self._path_s(index) for index, times in enumerate(self._times)))
        state = self._state_bytes()
        trainable = sum(unit.trainable_bytes for unit in self._units)
        if self._optimizer.name != "none":
            step_s += self._machine.memory_s(3 * trainable + 2 * state)
        return Formulae(units, self._at_peak(state), step_s, self._machine.meanings, self._machine.values)

    def _state_bytes(self) -> Any:
        elements, num_bytes = (sum(getattr(unit, name) for unit in self._units) for name in ("trainable", "trainable_bytes"))
        return sympy.nsimplify(self._optimizer.bytes_per_element) * elements + self._optimizer.copies * num_bytes

    def _by_unit(self) -> list[UnitFormulae]:
        sums: dict[str, defaultdict[str, Any]] = {unit.name: defaultdict(int) for unit in self._units}
        for call, formulae, times in zip(self._calls, self._formulae, self._times, strict=True):
            for unit, name, value in itertools.chain(self._computed(formulae), self._communicated(call, formulae)):
                sums.setdefault(call.units.get(unit, unit), defaultdict(int))[name] += times * value
        held = {unit.name: unit.shard_bytes for unit in self._units}
        return [
            UnitFormulae(
                name, shard_bytes=sympy.sympify(held.get(name, 0)), **{key: sympy.sympify(value) for key, value in row.items()}
            )
            for name, row in sums.items()
        ]

    def _computed(self, formulae: GraphFormulae) -> Iterator[tuple[str, str, Any]]:
        """Yield the terms of a graph's compute: the unit, the attribute of its formulae, and a part of the sum."""
        for unit, demands in _grouped(formulae).items():
            yield unit, "flops", sympy.Add(*(count * one.flops for one, count in demands.items()))
            yield unit, "compute_s", self._sum_s(demands)
        for collective in formulae.traffic:
            yield formulae.unit_of[collective], "compute_s", self._taken_s(formulae, collective)

    def _communicated(self, call: GraphCall, formulae: GraphFormulae) -> Iterator[tuple[str, str, Any]]:
        """Yield the terms of a graph's communication: the unit, the attribute of its formulae, and a part of the sum."""
        shard_bytes = {unit.name: unit.shard_bytes for unit in self._facts}
        for collective, traffic in formulae.traffic.items():
            done = bucket(collective)
            own = {formulae.unit_of.get(collective, NO_UNIT): 1.0}
            for unit, share in (own if done is None else shares(done, call.units, shard_bytes)).items():
                part = sympy.nsimplify(share)
                yield unit, _BYTES[formulae.kinds[collective]], part * traffic
                yield unit, "communication_s", part * self._communication_s(formulae, collective)

    def _sum_s(self, demands: Mapping[Demand, int]) -> Any:
        return sympy.Add(*(count * self._machine.compute_s(demand) for demand, count in demands.items()))

    def _communication_s(self, formulae: GraphFormulae, collective: Node) -> Any:
        group = formulae.groups[collective]
        role = self._step.role(group)
        return self._machine.communication_s(
            formulae.kinds[collective], formulae.traffic[collective], role, self._layouts[group]
        )

    def _taken_s(self, formulae: GraphFormulae, collective: Node) -> Any:
        layout = self._layouts[formulae.groups[collective]]
        in_flight = self._communication_s(formulae, collective)
        return self._machine.taken_s(formulae.kinds[collective], formulae.traffic[collective], layout, in_flight)

    def _path_s(self, index: int) -> Any:
        """Return the seconds of a call along its critical path."""
        formulae, figures = self._formulae[index], self._figures[index]
        nodes, collectives, rest_ns = critical_path(figures)
        seconds = self._sum_s(Counter(formulae.demands[node] for node in nodes))
        seconds += sympy.Add(*(self._taken_s(formulae, node) for node in nodes if node in formulae.traffic))
        seconds += sympy.Add(*(self._communication_s(formulae, collective) for collective in collectives))
        return seconds + (sympy.Float(rest_ns / 1e9) if rest_ns else 0)

    def _at_peak(self, state: Any) -> dict[str, sympy.Expr]:
        index, position = self._memory.peak()
        figures = [replace_memory(figures, formulae) for figures, formulae in zip(self._figures, self._formulae, strict=True)]
        calls = [replace(call, gradient_bytes=call.gradients.num_bytes(SYMBOLS["S"])) for call in self._calls]  # type: ignore[arg-type]
        memory = StepMemory(calls, figures, self._step.census_of(self._units), state)
        held: dict[str, Any] = dict(memory.around[index])
        for storage in self._formulae[index].storages:
            if storage.first <= position <= storage.last:
                held[storage.category.value] = held.get(storage.category.value, 0) + storage.num_bytes
        return {name: usual(sympy.sympify(value)) for name, value in held.items() if value != 0}


_BYTES = {"all_gather": "gathered_bytes", "reduce_scatter": "scattered_bytes", "all_reduce": "all_reduced_bytes"}


def replace_memory(figures: GraphFigures, formulae: GraphFormulae) -> GraphFigures:
    """Return ``figures`` with expressions for the bytes that the graph gives out and takes."""
    given_out: dict[Category, Any] = dict.fromkeys(Category, 0)
    taken: dict[Category, Any] = dict.fromkeys(Category, 0)
    for storage in formulae.storages:
        given_out[storage.category] += storage.num_bytes * int(storage.is_given_out)
        taken[storage.category] += storage.num_bytes * int(storage.is_taken)
    return replace(figures, memory=Breakdown({}, {}, given_out, taken))


def _grouped(formulae: GraphFormulae) -> dict[str, Counter[Demand]]:
    """Count equal demands of a graph, by unit."""
    found: defaultdict[str, Counter[Demand]] = defaultdict(Counter)
    for node, demand in formulae.demands.items():
        if demand != Demand():
            found[formulae.unit_of[node]][demand] += 1
    return found


def critical_path(figures: GraphFigures) -> tuple[list[Node], list[Node], int]:
    """Find the nodes and collectives whose times add up to a graph's time.

    Returns:
        Nodes that compute; collectives; and the nanoseconds that these collectives lose by sharing wires with others.
    """
    timeline, costs = figures.timeline, figures.costs
    position = {node: index for index, node in enumerate(figures.order)}
    ended = {(costs.link[node], timeline.ends[node]): node for node in costs.transfer}
    nodes: list[Node] = []
    collectives: list[Node] = []
    shared = 0
    index = len(figures.order) - 1
    while index >= 0:
        node = figures.order[index]
        nodes.append(node)
        index -= 1
        if node not in timeline.waits:
            continue
        collective: Node | None = timeline.waits[node][1]
        while collective is not None:
            collectives.append(collective)
            shared += timeline.ends[collective] - timeline.begins[collective] - costs.transfer[collective]
            first = collective
            collective = ended.get((costs.link[first], timeline.begins[first]))
            if timeline.begins[first] <= timeline.arrives[first]:
                collective = None
        index = position[first] - 1
    return nodes, collectives, shared
