"""A step whose sizes are expressions in the number of ranks, the number of replicas, the batch and the sequence.

The step is traced with batch and sequence as symbols, as torch.compile does for dynamic shapes. Then the passes run again over
copies of its graphs, with the number of ranks as a symbol (:mod:`passes.fx.symbolic_ranks`). So each size in a graph is an
expression, made by the same arithmetic as the sizes of a real run. This module repeats none of that arithmetic.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch import SymInt, Tensor
from torch.fx import Graph

from passes.collectives.functional import group_ranks
from passes.collectives.gloo import pretending_gloo
from passes.collectives.layout import padded_shard_numel
from passes.fx.sizes import sizes_at, symbolic_sizes
from passes.fx.symbolic_ranks import ranks_at, symbolic_ranks
from passes.fx.torch_internals.core import FakeTensor, pytree
from passes.fx.torch_internals.dynamo import maybe_mark_dynamic
from passes.ir.symbolic_shards import make_shards_symbolic
from passes.models.group_layout import GroupLayout
from passes.models.hardware import Hardware

from ..compiler.calls import Census, GraphCall, UnitFacts
from ..compiler.capture import Capture
from ..compiler.captured_graph import CapturedGraph
from .expressions import SYMBOLS
from .figures import GraphFigures
from .make_report import make_report
from .report import Report
from .rounds import Rounds

_ROLES = {"shard": "S", "reduce": "S", "replicate": "R"}


@dataclass(eq=False)
class SymbolicGraph(CapturedGraph):
    """A graph whose sizes are expressions.

    Attributes:
        names: the symbols of the graph, each with its name in :data:`SYMBOLS`.
        guards: the conditions on these symbols under which the trace is valid.
    """

    names: Mapping[sympy.Symbol, str]
    guards: Sequence[sympy.Basic]

    def at(self, values: Mapping[str, int]) -> contextlib.AbstractContextManager[None]:
        """Evaluate the graph's sizes to numbers, with symbols at ``values``, for the duration of the ``with`` block."""
        return sizes_at({symbol: values[name] for symbol, name in self.names.items()})

    def symbolically(self) -> contextlib.AbstractContextManager[None]:
        """Evaluate the graph's sizes to expressions in :data:`SYMBOLS`, for the duration of the ``with`` block."""
        return symbolic_sizes({symbol: SYMBOLS[name] for symbol, name in self.names.items()})


@dataclass(frozen=True)
class SymbolicInputs:
    """Inputs to trace with, and the sizes in them that become symbols.

    Attributes:
        inputs: the inputs to trace with.
        traced: the sizes that become symbols, by their names in :data:`SYMBOLS`, as they are in :attr:`inputs`.
        own: the same sizes, as they are in the inputs that the user gave.
    """

    inputs: Any
    traced: Mapping[str, int]
    own: Mapping[str, int]


def symbolic_inputs(inputs: Any) -> SymbolicInputs:
    """Make inputs to trace with, and find the sizes in them that become symbols.

    The tokens are the first tensor with two dimensions that holds no floating-point numbers. The batch is the first size of the
    tokens, or of the first tensor if there are no tokens. The sequence is the second size of the tokens. A first size that
    equals the batch, or a second size that equals the sequence, becomes the same symbol in other tensors.

    torch.compile makes no symbol of a size of one, and sizes that are equal could not be told apart. So the returned inputs
    have another batch if it is one or equals the sequence. A sequence of one does not become a symbol.

    Args:
        inputs: as for :func:`fsdp_compile.explain.explain`.
    """
    tensors = [value for value in pytree.tree_leaves(inputs) if isinstance(value, Tensor) and value.dim()]
    if not tensors:
        return SymbolicInputs(inputs, {}, {})
    tokens = next((value for value in tensors if value.dim() == 2 and not value.dtype.is_floating_point), None)
    batch = (tensors[0] if tokens is None else tokens).size(0)
    sequence = 0 if tokens is None else tokens.size(1)
    traced = batch if batch > 1 and batch != sequence else 2 if sequence != 2 else 3

    def resized(value: Tensor) -> Tensor:
        if value.dim() == 0 or value.size(0) != batch or batch == traced:
            return value
        return value.new_empty([traced, *value.shape[1:]], device="meta", requires_grad=value.requires_grad)

    own = {"B": batch} | ({"T": sequence} if sequence > 1 else {})
    return SymbolicInputs(pytree.tree_map_only(Tensor, resized, inputs), {**own, "B": traced}, own)


def marking(step: Callable[..., Any], sizes: Mapping[str, int]) -> Callable[..., Any]:
    """Wrap ``step`` so that torch.compile traces the given sizes of its inputs as symbols."""

    def marked(compiled: Any, *args: Any, **kwargs: Any) -> None:
        for value in pytree.tree_leaves((args, kwargs)):
            for dim, name in enumerate(("B", "T")):
                if isinstance(value, Tensor) and value.dim() > dim and value.size(dim) == sizes.get(name):
                    maybe_mark_dynamic(value, dim)
        step(compiled, *args, **kwargs)

    return marked


class SymbolicStep:
    """A captured step with sizes that are expressions. Its process groups have to exist only while this object is made.

    Args:
        captured: a step that was traced with :func:`marking`.
        sizes: the sizes that are symbols.
        hardware, optimizer: as for :func:`fsdp_compile.explain.explain`.
        made: the symbolic graphs of other steps of the trace, by the captured graph, to which those of this step are added.

    Attributes:
        calls: the calls of graphs, in order.
        facts: the facts of the units.
        batch: the batch of the given inputs, also if nothing depends on it.
        values: the value of each symbol, by name, in the step that was given. Sizes of inputs that nothing depends on are left
            out.

    Raises:
        ValueError: units are sharded over groups of different sizes, or a size depends on something other than the symbols.
    """

    def __init__(
        self,
        captured: Capture,
        sizes: SymbolicInputs,
        hardware: Hardware,
        optimizer: str | float | None,
        made: dict[CapturedGraph, SymbolicGraph],
    ):
        self._captured, self._hardware, self._optimizer = captured, hardware, optimizer
        self.facts, self.batch = captured.census.units, sizes.own.get("B", 0)
        by_name = {unit.name: unit for unit in captured.census.units}
        self._roles = {name: role for call in captured.calls for name, role in call.graph.group_names.items()}
        self._groups = _groups(self._roles)
        ranks = {_ROLES[role]: size for role, (size, _) in self._groups.items() if role in _ROLES}
        self.values: dict[str, int] = {**ranks, **sizes.traced}
        for call in captured.calls:
            if call.graph not in made:
                made[call.graph] = self._symbolic(call, by_name)
        self._graphs = list(dict.fromkeys(made[call.graph] for call in captured.calls))
        self.calls = [replace(call, graph=made[call.graph]) for call in captured.calls]
        found = {name for graph in self._graphs for name in graph.names.values()}
        self.values = {name: value for name, value in {**ranks, **sizes.own}.items() if name in found or name in ranks}
        self._middle = Rounds.find(self.calls)
        if self._middle is not None:
            self.values["M"] = _microbatches(self.calls)

    def _symbolic(self, call: GraphCall, facts: Mapping[str, UnitFacts]) -> SymbolicGraph:
        graph, layouts = call.graph, {}
        for name, unit in call.units.items():
            layouts["" if name == "root" else name] = [piece for piece, _ in facts[unit].layout]
        env = _shape_env(graph.graph_module.graph)
        guards = [guard.expr for guard in env.guards]
        named = {name: _ROLES[role] for name, role in graph.group_names.items() if role in _ROLES}
        groups = {name: (symbol, size) for name, symbol in named.items() if (size := self.values[symbol]) > 1}
        with symbolic_ranks(env, groups) as symbols:
            gm = graph.schedule_again(lambda copied: make_shards_symbolic(copied, layouts))
        names = {symbol.node.expr: name for name, symbol in symbols.items()}
        for symbol, value in _symbols(gm.graph).items():
            if symbol not in names:
                names[symbol] = self._name_of(symbol, value)
        known = [guard for guard in guards if guard.free_symbols and guard.free_symbols <= set(names)]
        return SymbolicGraph(gm, None, graph.group_names, graph.schedule_again, names, known)

    def _name_of(self, symbol: sympy.Symbol, value: int | None) -> str:
        for name in ("B", "T"):
            if value is not None and self.values.get(name) == value:
                return name
        raise ValueError(
            f"A size of the step ({symbol}, {value} when it was traced) depends on something other than the first two sizes of "
            "its inputs, so that there are no formulae for it."
        )

    def at(self, tokens: int | None, values: Mapping[str, int]) -> Report:
        """Make the report on the step at other sizes.

        Args:
            tokens: tokens of a rank in the step, at ``values``.
            values: the value of each symbol, by name.
        """
        self.check(values)
        census = self.census_of([unit_at(unit, values["S"]) for unit in self.facts])
        calls = [replace(call, gradient_bytes=call.gradients.num_bytes(values["S"])) for call in self.calls_at(values)]
        step = Capture(calls=calls, outside=self._captured.outside, census=census)

        def figures_of(call: GraphCall, facts: Sequence[UnitFacts], hardware: Hardware) -> GraphFigures:
            assert isinstance(call.graph, SymbolicGraph)
            with call.graph.at(values):
                return GraphFigures.of(call, facts, hardware)

        with self.groups_at(values):
            return make_report(step, self._hardware, tokens=tokens, optimizer=self._optimizer, figures_of=figures_of)

    def census_of(self, units: Sequence[UnitFacts]) -> Census:
        """Make the census of the step with other facts of its units."""
        census = Census()
        census.units, census.other_bytes = list(units), self._captured.census.other_bytes
        return census

    def role(self, group: str) -> str:
        """Return the name of the symbol for a process group's size, or the group's role in the mesh if it has none."""
        role = self._roles[group]
        return _ROLES.get(role, role)

    def group_symbols(self) -> dict[str, Any]:
        """Return the size of each process group, by the group's name: a symbol, or a number."""
        return {name: SYMBOLS.get(self.role(name), self._groups[role][0]) for name, role in self._roles.items()}

    def times_at(self, values: Mapping[str, int]) -> list[Any]:
        """Return how often each of :meth:`calls_at` runs, as numbers or expressions in the number of microbatches."""
        number = len(self.calls_at(values))
        if self._middle is None:
            return [1] * number
        first, length = self._middle.first, self._middle.length
        rounds = self._middle.number + values["M"] - self.values["M"]
        # All rounds are equal, so the calls of the first round stand for those of all rounds.
        wanted = SYMBOLS["M"] - (self.values["M"] - self._middle.number)
        return [
            wanted
            if first <= index < first + min(length, length * rounds)
            else 0
            if first <= index < first + length * rounds
            else 1
            for index in range(number)
        ]

    def calls_at(self, values: Mapping[str, int]) -> list[GraphCall]:
        """Return the calls of the step with the number of microbatches in ``values``.

        Raises:
            ValueError: the number is less than that of the traced microbatches outside of the repeated rounds.
        """
        if self._middle is None:
            return self.calls
        more = values["M"] - self.values["M"]
        if self._middle.number + more < 0:
            raise ValueError(
                f"M={values['M']} is too few: the step was traced with {self.values['M']} microbatches, of which "
                f"{self._middle.number} do the same. Give at least {self.values['M'] - self._middle.number}."
            )
        return self._middle.with_more(self.calls, more)

    @contextlib.contextmanager
    def groups_at(self, values: Mapping[str, int]) -> Iterator[None]:
        """Give the step's process groups the numbers of ranks in ``values``, for the duration of the ``with`` block."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(ranks_at(self._ranks_at(values)))
            if self._hardware.name == "cpu":
                stack.enter_context(pretending_gloo())
            yield

    def layouts_at(self, values: Mapping[str, int]) -> dict[str, GroupLayout]:
        """Return the layouts of the process groups with the numbers of ranks in ``values``, by the groups' names."""
        return {name: GroupLayout.of(ranks) for name, ranks in self._ranks_at(values).items()}

    def _ranks_at(self, values: Mapping[str, int]) -> dict[str, range]:
        strides = {"S": 1, "R": values["S"]}
        ranks = {
            role: range(0, values[_ROLES[role]] * strides[_ROLES[role]], strides[_ROLES[role]]) if role in _ROLES else given
            for role, (_, given) in self._groups.items()
        }
        return {name: ranks[role] for name, role in self._roles.items()}

    def check(self, values: Mapping[str, int]) -> None:
        """Check that the step is the same at other values.

        Raises:
            ValueError: a parameter is cut along a dimension other than the first, which S does not divide; or a guard of the
                trace fails.
        """
        for unit in self.facts:
            for piece, _ in unit.layout:
                if piece.dim > 0 and piece.shape[piece.dim] % values["S"]:
                    raise ValueError(
                        f"{unit.name} has a parameter of shape {piece.shape} that is cut along dimension {piece.dim}, which "
                        f"{values['S']} ranks do not divide."
                    )
        for graph in self._graphs:
            numbers = {symbol: sympy.Integer(values[name]) for symbol, name in graph.names.items()}
            for guard in graph.guards:
                if guard.xreplace(numbers) == sympy.false:
                    given = ", ".join(f"{name}={values[name]}" for name in ("B", "T") if name in values)
                    raise ValueError(
                        f"At {given} the model does something else than it did when it was traced ({guard}): explain it with "
                        "such inputs."
                    )


def unit_at(unit: UnitFacts, ranks: int) -> UnitFacts:
    """Return the facts of a unit that is sharded over ``ranks`` ranks. If that is an expression, the facts are expressions."""
    sizes = [
        (padded_shard_numel(piece.shape, piece.dim, ranks), piece.dtype.itemsize, stepped) for piece, stepped in unit.layout
    ]
    stored = sum(piece.stored_numel(ranks) * piece.dtype.itemsize for piece, _ in unit.layout)
    return replace(
        unit,
        shard_bytes=stored,
        trainable=sum(numel for numel, _, stepped in sizes if stepped),
        trainable_bytes=sum(numel * itemsize for numel, itemsize, stepped in sizes if stepped),
    )


def check_is_same(report: Report, step: SymbolicStep) -> None:
    """Check that a step is the one of a report.

    Raises:
        RuntimeError: its units have other parameters.
    """
    now = [(unit.name, sum(unit.parameters.values())) for unit in step.facts if unit.parameters]
    before = [(unit.name, unit.parameters) for unit in report.units if unit.parameters]
    if now != before:
        raise RuntimeError(
            "The model, or what shard= does to it, has changed since it was explained: explain it anew and ask the new report."
        )


def _groups(roles: Mapping[str, str]) -> dict[str, tuple[int, range]]:
    """Return the size and the ranks of the groups of each role. The first group of a role stands for all of them."""
    if "node" in roles.values():
        raise ValueError("Parameters have the placement 'hybrid', whose two groups there are no formulae for.")
    groups: dict[str, tuple[int, range]] = {}
    for name, role in roles.items():
        ranks = list(group_ranks(name))
        stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
        found = len(ranks), range(ranks[0], ranks[-1] + 1, stride)
        if groups.setdefault(role, found)[0] != found[0]:
            raise ValueError(
                f"Parameters are sharded over groups of different sizes ({groups[role][0]} and {found[0]} ranks, for "
                f"{role!r}): there are formulae for one size only."
            )
    return groups


def _shape_env(graph: Graph) -> Any:
    values = (node.meta.get("val") for node in graph.nodes)
    return next(value.fake_mode.shape_env for value in values if isinstance(value, FakeTensor))


def _symbols(graph: Graph) -> dict[sympy.Symbol, int | None]:
    """Return the symbols in the sizes of a graph, each with its value in the trace, or None if that is not known."""
    found: dict[sympy.Symbol, int | None] = {}
    for node in graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            for size in value.shape if isinstance(value, Tensor) else (value,):
                if isinstance(size, SymInt):
                    found.update((symbol, found.get(symbol)) for symbol in size.node.expr.free_symbols)
                    if size.node.expr.is_Symbol:
                        found[size.node.expr] = size.node.hint
    return found


def _microbatches(calls: Sequence[GraphCall]) -> int:
    first = next(call.compilation for call in calls if not call.is_backward)
    return sum(call.compilation is first for call in calls if not call.is_backward)
