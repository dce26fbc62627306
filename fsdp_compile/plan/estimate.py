"""Estimates of a step at many sizes: tables of its formulae, which take milliseconds for each size instead of a trace.

Graphs have few different expressions, as equal layers share theirs. So each expression is stored once. A table of each graph
counts how often an expression occurs: in the compute between two collectives, and in the memory at each moment. An estimate
calls one compiled function for all expressions, multiplies the values by these counts, and simulates the collectives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import Tensor

from passes.models.cost_model import DEMANDED, Demand
from passes.models.group_layout import GroupLayout
from passes.models.hardware import Hardware
from passes.models.in_flight import InFlight
from passes.models.memory_model import Breakdown, Category

from ..compiler.calls import Census, GraphCall
from ..compiler.optimizer_state import Optimizer
from ..explain.depth import Cuts, GraphWork
from ..explain.expressions import SYMBOLS
from ..explain.graph_formulae import GraphFormulae
from ..explain.memory import StepMemory
from ..explain.symbolic import SymbolicStep, unit_at

_SIZES = ("S", "R", "B", "T")


@dataclass(frozen=True)
class Estimate:
    """The cost of a step at one point.

    Attributes:
        time_s: the time of the step.
        exposed_s: the time that compute waits for communication, by the wire that carries it: "network" or "node".
        products_s: the time of kernels that are bound by their flops.
        peak_bytes: the most bytes that live at once.
    """

    time_s: float
    exposed_s: Mapping[str, float]
    products_s: float
    peak_bytes: int

    @property
    def exposed_share(self) -> float:
        """The part of the step's time that compute waits for communication."""
        return sum(self.exposed_s.values()) / self.time_s

    @property
    def bound(self) -> str:
        """The bottleneck: "compute", "memory", "network" or "node" (links inside of a node), by its part of the time."""
        exposed = sum(self.exposed_s.values())
        parts = {**self.exposed_s, "compute": self.products_s, "memory": self.time_s - exposed - self.products_s}
        return max(parts, key=lambda name: parts[name])


class _Expressions:
    """Distinct expressions, and one function for all of them."""

    def __init__(self) -> None:
        self._index: dict[Any, int] = {}

    def add(self, expression: Any) -> int:
        """Add an expression, and return its number. Equal expressions have one number."""
        return self._index.setdefault(sympy.sympify(expression), len(self._index))

    def compiled(self) -> Callable[[Mapping[str, int]], Sequence[float]]:
        """Make a function of sizes that returns the values of all expressions, in the order of their numbers."""
        function = sympy.lambdify([SYMBOLS[name] for name in _SIZES], list(self._index), modules="math", cse=True)
        return lambda sizes: function(*(sizes.get(name, 1) for name in _SIZES))


@dataclass(frozen=True)
class _Collective:
    kind: str
    group: str
    traffic: int
    launch: int


class _GraphTable:
    """A graph as a sequence of compute, starts and waits, and as counts of the storages that live at each moment."""

    def __init__(self, work: GraphWork, expressions: _Expressions):
        self.demands: dict[Demand, int] = {}
        self.program: list[tuple[str, Any]] = []
        stretch: dict[int, int] = {}
        collectives: dict[int, _Collective] = {}
        for position, one in enumerate(work.order):
            for source in one.awaits:
                self.program += [("compute", stretch), ("wait", collectives[source])]
                stretch = {}
            if one.sent is not None:
                traffic = expressions.add(one.sent.traffic)
                collectives[position] = _Collective(one.sent.kind, one.sent.group, traffic, len(collectives))
                self.program += [("compute", stretch), ("start", collectives[position])]
                stretch = {}
            if one.demand != Demand():
                number = self.demands.setdefault(one.demand, len(self.demands))
                stretch[number] = stretch.get(number, 0) + 1
        self.program.append(("compute", stretch))
        self.asked: list[tuple[Demand, dict[str, int]]] = [
            (demand, {name: expressions.add(getattr(demand, name)) for name in DEMANDED}) for demand in self.demands
        ]
        self._add_memory(work, expressions)

    def _add_memory(self, work: GraphWork, expressions: _Expressions) -> None:
        numbers = [expressions.add(storage.num_bytes) for storage in work.storages]
        self.columns = sorted(set(numbers))
        place = {number: index for index, number in enumerate(self.columns)}
        changes = torch.zeros(len(work.order) + 1, len(self.columns), dtype=torch.float64)
        self.given_out: dict[Category, dict[int, int]] = {category: {} for category in Category}
        self.taken: dict[Category, dict[int, int]] = {category: {} for category in Category}
        for storage, number in zip(work.storages, numbers, strict=True):
            changes[storage.first, place[number]] += 1
            changes[storage.last + 1, place[number]] -= 1
            for counts, is_in in ((self.given_out, storage.is_given_out), (self.taken, storage.is_taken)):
                if is_in:
                    counts[storage.category][number] = counts[storage.category].get(number, 0) + 1
        self.live = torch.unique(changes.cumsum(0), dim=0)

    def peak_bytes(self, values: Tensor) -> float:
        """Return the most bytes that live at once inside of the graph, from the values of all expressions."""
        return float((self.live @ values[self.columns]).max())


class GraphTables:
    """The tables of graphs, which steps of one trace share.

    Args:
        cuts: the layers that graphs leave out. The tables have them.
    """

    def __init__(self, cuts: Cuts | None = None) -> None:
        self._cuts = cuts or Cuts()
        self._expressions = _Expressions()
        self._tables: dict[Hashable, _GraphTable] = {}

    def add(self, step: SymbolicStep) -> dict[Hashable, _GraphTable]:
        """Add the graphs of a step, and return the tables of its calls, by the calls' keys.

        Raises:
            NotPeriodicError: the layers that a graph has do not tell the work of those left out.
        """
        with step.groups_at(step.values):
            for call in step.calls:
                if call.key not in self._tables:
                    formulae = GraphFormulae.of(call, step.facts, step.group_symbols())
                    work = self._cuts.whole(GraphWork.of(formulae), call.units)
                    self._tables[call.key] = _GraphTable(work, self._expressions)
        return {call.key: self._tables[call.key] for call in step.calls}

    @functools.cached_property
    def evaluate(self) -> Callable[[Mapping[str, int]], Sequence[float]]:
        """A function of sizes that returns the values of all expressions. All graphs have to be added before."""
        return self._expressions.compiled()


class StepTable:
    """A step as tables, which estimate it at other sizes.

    Args:
        step: the step, traced with symbols.
        hardware, optimizer: as for :func:`fsdp_compile.explain.explain`.
        graphs: the tables of other steps of the same trace, to which those of this step are added.

    Attributes:
        own: the sizes that the step depends on, by name, as they are in the step that was given.
        batch: the batch of the inputs that were given.
    """

    def __init__(self, step: SymbolicStep, hardware: Hardware, optimizer: str | float | None, graphs: GraphTables):
        self._step, self._hardware, self._optimizer = step, hardware, Optimizer.of(optimizer)
        self.own, self.batch = step.values, step.batch
        self._graphs, self._tables = graphs, graphs.add(step)

    def at(self, sizes: Mapping[str, int]) -> Estimate:
        """Estimate the step at other sizes.

        Args:
            sizes: sizes by name. Sizes that are left out are those of :attr:`own`.

        Raises:
            ValueError: the model does something else at these sizes; see :meth:`SymbolicStep.check`.
        """
        sizes = {**self._step.values, **sizes}
        self._step.check(sizes)
        values = torch.tensor(self._graphs.evaluate(sizes), dtype=torch.float64)
        layouts = self._step.layouts_at(sizes)
        done = {key: self._run(table, values, layouts) for key, table in self._tables.items()}
        calls = self._step.calls_at(sizes)
        census = self._step.census_of([unit_at(unit, sizes["S"]) for unit in self._step.facts])
        exposed: dict[str, float] = {}
        for call in calls:
            for wire, waited in done[call.key][1].items():
                exposed[wire] = exposed.get(wire, 0.0) + waited / 1e9
        time_ns = sum(done[call.key][0] for call in calls) + self._optimizer.time_ns(census.units, self._hardware)
        products = sum(done[call.key][2] for call in calls)
        return Estimate(time_ns / 1e9, exposed, products / 1e9, self._peak(calls, census, values, sizes))

    def _run(
        self, table: _GraphTable, values: Tensor, layouts: Mapping[str, GroupLayout]
    ) -> tuple[float, dict[str, float], float]:
        """Return nanoseconds of a graph, of its waits by wire, and of its kernels that are bound by their flops."""
        numbers = values.tolist()
        hardware = self._hardware
        times: list[int] = []
        are_products: list[bool] = []
        for demand, sizes in table.asked:
            asked: Any = replace(demand, **{name: numbers[number] for name, number in sizes.items()})
            times.append(asked.ns(hardware))
            are_products.append(asked.is_bound_by_flops(hardware))
        clock, products = 0, 0
        exposed: dict[str, float] = {}
        in_flight: InFlight[_Collective] = InFlight()
        for what, given in table.program:
            if what == "compute":
                clock += sum(count * times[number] for number, count in given.items())
                products += sum(count * times[number] for number, count in given.items() if are_products[number])
                continue
            wire = hardware.wire(layouts[given.group])
            if what == "start":
                traffic = numbers[given.traffic]
                duration = round(hardware.transfer_s(given.kind, traffic, layouts[given.group]) * 1e9)
                in_flight.start(given, clock, duration, given.group, wire)
                clock += round(hardware.taken_s(given.kind, traffic, layouts[given.group]) * 1e9)
            else:
                over = in_flight.end(given)
                exposed[wire] = exposed.get(wire, 0.0) + max(0, over - clock)
                clock = max(clock, over)
        return clock, exposed, products

    def _peak(self, calls: Sequence[GraphCall], census: Census, values: Tensor, sizes: Mapping[str, int]) -> int:
        numbers = values.tolist()

        def held(counts: Mapping[Category, Mapping[int, int]]) -> dict[Category, int]:
            return {
                category: round(sum(count * numbers[number] for number, count in of.items())) for category, of in counts.items()
            }

        inside = {key: table.peak_bytes(values) for key, table in self._tables.items()}
        figures: Any = {
            key: _Figures(Breakdown({}, {}, held(table.given_out), held(table.taken))) for key, table in self._tables.items()
        }
        placed = [replace(call, gradient_bytes=call.gradients.num_bytes(sizes["S"])) for call in calls]
        memory = StepMemory(placed, [figures[call.key] for call in calls], census, self._optimizer.state_bytes(census.units))
        return round(max(sum(around.values()) + inside[call.key] for around, call in zip(memory.around, calls, strict=True)))


@dataclass(frozen=True)
class _Figures:
    memory: Breakdown
