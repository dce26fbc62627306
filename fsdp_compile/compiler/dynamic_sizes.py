"""Dynamic sizes under a memory budget: the largest sizes for which a graph still fits.

A size with a known maximum (``torch._dynamo.mark_dynamic(tensor, dim, max=...)``) counts as its maximum. Any other size counts
as in the traced call. A search finds how much larger sizes without a maximum may be. The result becomes a guard of the graph,
so that Dynamo traces a larger call anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from torch import SymInt

from passes.fx.sizes import size_hint, sizes_at, symbolic_sizes_of, unknown_size

#: A range that ends here or above has no maximum. Versions of torch represent that in different ways.
_NO_MAXIMUM = 1 << 48
#: The search stops at this factor: no real size grows by more.
_MOST_GROWTH = 1 << 10
#: The search ends when the factor is known to within this part of it.
_PRECISION = 0.01


@dataclass
class DynamicSizes:
    """The symbols in the sizes of a graph, with the numbers that they count as.

    Attributes:
        values: the number that each symbol counts as.
    """

    values: dict[sympy.Symbol, int]
    _open: dict[sympy.Symbol, SymInt]

    @staticmethod
    def of(fake_values: Iterable[Any]) -> DynamicSizes:
        """Collect the symbols in the sizes of fake values."""
        values: dict[sympy.Symbol, int] = {}
        open_sizes: dict[sympy.Symbol, SymInt] = {}
        for symbol, size in _symbols(fake_values).items():
            if size.node.hint is None:
                # The size depends on data, so no guard can check it before a call.
                values[symbol] = unknown_size()
                continue
            most = size.node.shape_env.var_to_range[symbol].upper
            if isinstance(most, sympy.Integer) and most < _NO_MAXIMUM:
                values[symbol] = int(most)
            else:
                values[symbol] = size_hint(size)
                open_sizes[symbol] = size
        return DynamicSizes(values, open_sizes)

    @property
    def are_open(self) -> bool:
        """True if a size has no maximum."""
        return bool(self._open)

    def counted(self) -> contextlib.AbstractContextManager[Any]:
        """Evaluate sizes with :attr:`values` inside of the ``with`` block."""
        return sizes_at(self.values)

    def admit_larger(self, fits: Callable[[], bool]) -> None:
        """Enlarge sizes without a maximum by one common factor, as far as the step fits, and add guards for the result.

        Args:
            fits: returns whether the step fits at the present sizes; called inside of :meth:`counted`. Smaller sizes fit if
                larger ones do.
        """
        if not self.are_open:
            return
        traced = dict(self.values)

        def fit_at(growth: float) -> bool:
            self.values = traced | {symbol: int(traced[symbol] * growth) for symbol in self._open}
            with self.counted():
                return fits()

        low, high = 1.0, 2.0
        while high < _MOST_GROWTH and fit_at(high):
            low, high = high, 2 * high
        while high - low > _PRECISION * low:
            middle = (low + high) / 2
            low, high = (middle, high) if fit_at(middle) else (low, middle)
        self.values = traced | {symbol: int(traced[symbol] * low) for symbol in self._open}
        for symbol, size in self._open.items():
            # The comparison adds the guard.
            assert size <= self.values[symbol]


def _symbols(fake_values: Iterable[Any]) -> dict[sympy.Symbol, SymInt]:
    """Find the symbols that sizes of fake values are computed from, each as a SymInt."""
    found: dict[sympy.Symbol, SymInt] = {}
    for size in symbolic_sizes_of(fake_values):
        for symbol in sorted(size.node.expr.free_symbols - found.keys(), key=str):
            # The symbol may occur only in expressions, so that no SymInt for it exists.
            found[symbol] = size.node.shape_env.create_symintnode(symbol, hint=None)
    return found
