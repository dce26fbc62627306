"""Size guards: what a lowered graph relies on of sizes that change from call to call, as a check of each call.

Lowering decides by the sizes at hand: that a size is 5, or that indices fit into 32 bits. Dynamo checks what is decided until
the backend returns. A graph that is lowered later, backward or for another plan, needs a check of its own, and is lowered again
for a call that fails it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import sympy
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from .shape_env import as_function, as_python, deciding_at, facts, reopened, suppose, values_of
from .sizes import symbolic_sizes_of


class InputSizes:
    """Where the inputs of a graph tell the values of its symbols.

    Args:
        graph: its inputs hold each symbol as a number of its own, or as a size of a tensor.
    """

    def __init__(self, graph: Graph):
        # By symbol: the place of an input, and a dimension of it; None: the input is the number.
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

    def of(self, args: Sequence[Any], symbols: Sequence[sympy.Symbol] | None = None) -> dict[sympy.Symbol, int]:
        """The values of symbols in a call.

        Args:
            args: the inputs.
            symbols: of which; None: all.
        """
        return {symbol: self._read(args, *self._places[symbol]) for symbol in (self._places if symbols is None else symbols)}

    @staticmethod
    def _read(args: Sequence[Any], index: int, dim: int | None) -> int:
        return int(args[index] if dim is None else args[index].shape[dim])


class SizeGuard:
    """A check of the sizes of a call.

    Args:
        conditions: what has to hold.
        sizes: tells the values of the symbols.

    Raises:
        RuntimeError: of a symbol the inputs do not tell the value.
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
        """Whether the conditions hold for the inputs of a call."""
        return bool(self._holds(*self._sizes.of(args, self._symbols).values()))

    def __str__(self) -> str:
        return self._text


class Assumptions:
    """What is decided about sizes while a graph is lowered.

    Args:
        shape_env: the ShapeEnv that it is decided in; None: the graph has none.
        is_late: whether Dynamo has built the guards of the frame, so that nothing else checks it.

    Attributes:
        is_late: as given.
    """

    def __init__(self, shape_env: ShapeEnv | None, *, is_late: bool):
        self._shape_env = shape_env
        self.is_late = is_late
        self._before = frozenset(() if shape_env is None else facts(shape_env))

    def added(self) -> list[Any]:
        """The conditions that were decided on since the lowering began."""
        return [] if self._shape_env is None else [fact for fact in facts(self._shape_env) if fact not in self._before]

    def on_data(self) -> list[Any]:
        """Of these, the ones on sizes that depend on data."""
        return [fact for fact in self.added() if self._depends_on_data(fact)]

    def unchecked(self, sizes: InputSizes) -> list[Any]:
        """Of these, the ones that no guard of the frame checks.

        Without those on sizes that come into being in the graph: the code that Inductor generates asserts them there.
        """
        inside = [fact for fact in self.on_data() if not all(symbol in sizes for symbol in fact.free_symbols)]
        return [fact for fact in (self.added() if self.is_late else self.on_data()) if fact not in inside]

    def admit(self, conditions: Sequence[Any]) -> bool:
        """Rely on conditions, if they hold for the sizes that are decided by. False: they do not."""
        if self._shape_env is None or not conditions:
            return True
        values = values_of(self._shape_env)
        if not all(self._depends_on_data(fact) or fact.xreplace(values) == sympy.true for fact in conditions):
            return False
        for fact in conditions:
            suppose(self._shape_env, fact)
        return True

    def fix(self, sizes: Iterable[SymInt]) -> bool:
        """Rely on sizes being what they count as where it is decided by them. False: none of them can be another one."""
        if self._shape_env is None:
            return False
        known = values_of(self._shape_env)
        symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols if symbol in known}
        for symbol in sorted(symbols, key=str):
            suppose(self._shape_env, sympy.Eq(symbol, known[symbol]))  # type: ignore[arg-type]
        return bool(symbols)

    def _depends_on_data(self, fact: Any) -> bool:
        return self._shape_env is not None and not fact.free_symbols <= values_of(self._shape_env).keys()


@contextlib.contextmanager
def taking_guards(shape_env: ShapeEnv | None) -> Iterator[None]:
    """Note what is decided inside of the ``with`` block as guards, although the frame's have been built."""
    with contextlib.nullcontext() if shape_env is None else reopened(shape_env):
        yield


@contextlib.contextmanager
def deciding_by(values: Mapping[sympy.Symbol, int], gm: GraphModule, shape_env: ShapeEnv | None) -> Iterator[None]:
    """Decide inside of the ``with`` block by these values of symbols, in a graph and in those inside of it."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    sizes = symbolic_sizes_of(node.meta.get("val") for graph in graphs for node in graph.nodes)
    with contextlib.nullcontext() if shape_env is None else deciding_at(shape_env, values, sizes):
        yield
