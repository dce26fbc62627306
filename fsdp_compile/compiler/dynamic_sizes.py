"""Sizes that differ from call to call, for what is decided once for all calls of a graph: up to which sizes it holds.

A size whose maximum is known (``torch._dynamo.mark_dynamic(tensor, dim, max=...)``) counts as that. Any other counts as in the
call that was traced; how much larger it may be is searched for, and written into the graph's guards, so that Dynamo traces a
larger call anew.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import sympy
from torch import SymInt

from passes.fx.sizes import size_hint, sizes_at, symbolic_sizes_of, unknown_size

#: Ranges end there that have no end; torch has had several names for that.
_NO_MAXIMUM = 1 << 48
#: Nobody's sizes grow by more.
_MOST_GROWTH = 1 << 10
#: How close to the largest sizes that fit the search ends.
_PRECISION = 0.01


@dataclass
class DynamicSizes:
    """The sizes of a graph that are symbols.

    Attributes:
        values: what they count as.
    """

    values: dict[sympy.Symbol, int]
    _open: dict[sympy.Symbol, SymInt]

    @staticmethod
    def of(fake_values: Iterable[Any]) -> DynamicSizes:
        """The sizes in fake values."""
        values: dict[sympy.Symbol, int] = {}
        open_sizes: dict[sympy.Symbol, SymInt] = {}
        for symbol, size in _symbols(fake_values).items():
            if size.node.hint is None:
                # It depends on data: nothing can be asked ahead of a call.
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
        """Whether some have no maximum."""
        return bool(self._open)

    def counted(self) -> contextlib.AbstractContextManager[Any]:
        """Have sizes be what they count as, inside of the ``with`` block."""
        return sizes_at(self.values)

    def admit_larger(self, fits: Callable[[], bool]) -> None:
        """Let sizes without a maximum be as much larger, all by one factor, as still fits, and guard that they are not more.

        Args:
            fits: whether the sizes of :meth:`counted`, inside of which it is called, do. What is larger fits less.
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
            # Asking is what adds the guard.
            assert size <= self.values[symbol]


def _symbols(fake_values: Iterable[Any]) -> dict[sympy.Symbol, SymInt]:
    """The symbols that the sizes of fake values are computed of, as sizes."""
    found: dict[sympy.Symbol, SymInt] = {}
    for size in symbolic_sizes_of(fake_values):
        for symbol in sorted(size.node.expr.free_symbols - found.keys(), key=str):
            # It need not be the size of anything itself.
            found[symbol] = size.node.shape_env.create_symintnode(symbol, hint=None)
    return found
