"""Size guards: the conditions on dynamic sizes that a lowered graph relies on, checked at each call.

Lowering decides by the sizes at hand: that a size is 5, or that indices fit into 32 bits. Until the backend returns, Dynamo
makes guards of such decisions. A graph that is lowered later, such as backward or a variant for another plan, needs a check of
its own. For a call that fails the check, the graph is lowered again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .shape_env import as_function, as_python, deciding_at, facts, reopened, suppose, symbolic_size, values_of
from .sizes import symbolic_sizes_in


class InputSizes:
    """The inputs from which the values of a graph's symbols are read.

    Args:
        graph: the graph. An input tells a symbol if it is the number itself, or a tensor with the symbol as a size.
    """

    def __init__(self, graph: Graph):
        # For each symbol, the index of an input and the dimension of that tensor; None if the input is the number itself.
        self._places: dict[sympy.Symbol, tuple[int, int | None]] = {}
        values = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
        for index, value in enumerate(values):
            if isinstance(value, SymInt) and value.node.expr.is_Symbol:
                self._places.setdefault(value.node.expr, (index, None))
        for index, value in enumerate(values):
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    self._places.setdefault(size.node.expr, (index, dim))

    def __contains__(self, symbol: sympy.Symbol) -> bool:
        return symbol in self._places

    def about(self, conditions: Iterable[Any]) -> list[Any] | None:
        """Return the conditions on symbols that the inputs tell; None: one is on such a symbol and on another one."""
        told = [[symbol in self for symbol in condition.free_symbols] for condition in conditions]
        if any(any(each) and not all(each) for each in told):
            return None
        return [condition for condition, each in zip(conditions, told, strict=True) if any(each)]

    def of(self, args: Sequence[Any], symbols: Sequence[sympy.Symbol] | None = None) -> dict[sympy.Symbol, int]:
        """Read the values of symbols from the inputs of a call.

        Args:
            args: the inputs of the call.
            symbols: the symbols to read; None: all.
        """
        return {symbol: self._read(args, *self._places[symbol]) for symbol in (self._places if symbols is None else symbols)}

    @staticmethod
    def _read(args: Sequence[Any], index: int, dim: int | None) -> int:
        return int(args[index] if dim is None else args[index].shape[dim])


class SizeGuard:
    """A check of the sizes of a call.

    Args:
        conditions: the sympy conditions that have to hold.
        sizes: reads the values of their symbols from the inputs.

    Raises:
        RuntimeError: a condition has a symbol whose value no input tells.
    """

    def __init__(self, conditions: Sequence[Any], sizes: InputSizes):
        self._sizes = sizes
        self._symbols = sorted(set().union(*(condition.free_symbols for condition in conditions)), key=str)
        self._text = " and ".join(f"({as_python(condition)})" for condition in conditions)
        unknown = [symbol for symbol in self._symbols if symbol not in sizes]
        if unknown:
            raise RuntimeError(
                f"A graph was compiled for sizes with {self._text}, and its inputs do not tell {', '.join(map(str, unknown))}: "
                "no call could be checked. Compile with torch.compile(dynamic=False), or mark the size as static "
                "(torch._dynamo.mark_static)."
            )
        self._holds = as_function(self._symbols, self._text)

    def __call__(self, args: Sequence[Any]) -> bool:
        """Return whether the conditions hold for the inputs of a call."""
        return bool(self._holds(*self._sizes.of(args, self._symbols).values()))

    def __str__(self) -> str:
        return self._text


class Assumptions:
    """The conditions on sizes that are decided while a graph is lowered.

    Args:
        shape_env: the ShapeEnv that records the decisions; None: the graph has none.
        is_late: whether Dynamo has already built the guards of the frame, so that no guard of the frame checks the decisions.

    Attributes:
        is_late: as given.
    """

    def __init__(self, shape_env: ShapeEnv | None, *, is_late: bool):
        self._shape_env = shape_env
        self.is_late = is_late
        self._before = conditions_of(shape_env)

    def added(self) -> list[Any]:
        """Return the conditions that were added since this object was made, at the start of the lowering."""
        return self.added_to(self._before)

    def added_to(self, known: Collection[Any]) -> list[Any]:
        """Return the conditions that are not among ``known`` ones."""
        return [] if self._shape_env is None else [fact for fact in facts(self._shape_env) if fact not in known]

    def on_data(self) -> list[Any]:
        """Return the added conditions on sizes that depend on data."""
        return [fact for fact in self.added() if self._depends_on_data(fact)]

    def unchecked(self, sizes: InputSizes) -> list[Any]:
        """Return the added conditions that no guard of the frame checks.

        Conditions on sizes that depend on data and come into being in the graph are left out. The code that Inductor generates
        asserts them.

        Args:
            sizes: the inputs that tell the values of symbols.
        """
        inside = [fact for fact in self.on_data() if not all(symbol in sizes for symbol in fact.free_symbols)]
        return [fact for fact in (self.added() if self.is_late else self.on_data()) if fact not in inside]

    def admit(self, conditions: Sequence[Any]) -> bool:
        """Add conditions if :meth:`fulfil` says that they hold. Return False if one does not.

        Conditions on sizes that depend on data have no values yet, and are deferred to run time.
        """
        if not self.fulfil(conditions):
            return False
        for fact in conditions:
            suppose(self._shape_env, fact)  # type: ignore[arg-type]
        return True

    def fulfil(self, conditions: Sequence[Any]) -> bool:
        """Return whether all conditions that can be checked hold for the current values of symbols."""
        if self._shape_env is None or not conditions:
            return True
        values = values_of(self._shape_env)
        return all(self._depends_on_data(fact) or fact.xreplace(values) == sympy.true for fact in conditions)

    def size(self, expression: Any) -> SymInt:
        """Make the symbolic size with an expression, whose hint is its current value."""
        assert self._shape_env is not None
        return symbolic_size(self._shape_env, expression)

    def fix(self, sizes: Iterable[SymInt]) -> bool:
        """Fix the symbols of ``sizes`` to their current values. Return False if no symbol has one, so that nothing is fixed."""
        if self._shape_env is None:
            return False
        known = values_of(self._shape_env)
        symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols if symbol in known}
        for symbol in sorted(symbols, key=str):
            suppose(self._shape_env, sympy.Eq(symbol, known[symbol]))  # type: ignore[arg-type]
        return bool(symbols)

    def _depends_on_data(self, fact: Any) -> bool:
        return self._shape_env is not None and not fact.free_symbols <= values_of(self._shape_env).keys()


def conditions_of(shape_env: ShapeEnv | None) -> frozenset[Any]:
    """Return the conditions on sizes that compiled code may rely on."""
    return frozenset(() if shape_env is None else facts(shape_env))


@contextlib.contextmanager
def taking_guards(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Record decisions inside of the ``with`` block as guards, although Dynamo has already built those of the frame."""
    with contextlib.nullcontext() if shape_env is None else reopened(shape_env):
        yield


@contextlib.contextmanager
def deciding_by(values: Mapping[sympy.Symbol, int], gm: GraphModule | None, shape_env: ShapeEnv | None) -> Iterator[None]:
    """Decide by these ``values`` of symbols inside of the ``with`` block, in the graphs of ``gm`` and its submodules."""
    sizes = () if gm is None else symbolic_sizes_in(gm)
    with contextlib.nullcontext() if shape_env is None else deciding_at(shape_env, values, sizes):
        yield
