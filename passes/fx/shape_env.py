"""The ShapeEnv of a compilation, reopened for a lowering after Dynamo has built the guards of the frame.

A ``ShapeEnv`` collects the decisions of tracing and lowering about symbolic sizes. When the backend returns, Dynamo makes
guards of the frame from them and freezes the ShapeEnv. Code uses later decisions, but no guard checks them.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import sympy
from torch import SymInt
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP, ShapeEnv

from .torch_internals.core import PythonPrinter
from .torch_internals.objects import replace_hint

# The attribute with the values of symbols in the traced call; older versions of torch call it ``var_to_val``.
_VALUES = ("backed_var_to_val", "var_to_val")


def facts(shape_env: ShapeEnv) -> list[Any]:
    """List the conditions on sizes that compiled code relies on: guards, then deferred ones on sizes that depend on data."""
    deferred = [condition.expr for found in shape_env.deferred_runtime_asserts.values() for condition in found]
    return [*(guard.expr for guard in shape_env.guards), *deferred]


def suppose(shape_env: ShapeEnv, fact: Any) -> None:
    """Add a condition that holds: as a guard, or deferred to run time if it depends on data."""
    shape_env.guard_or_defer_runtime_assert(fact, "a condition of code that is reused")


def values_of(shape_env: ShapeEnv) -> dict[sympy.Symbol, sympy.Integer]:
    """Return the values of symbols by which decisions are made. Changes to the dict change the ShapeEnv."""
    found: dict[sympy.Symbol, sympy.Integer] = next(getattr(shape_env, name) for name in _VALUES if hasattr(shape_env, name))
    return found


def symbolic_size(shape_env: ShapeEnv, expression: Any) -> SymInt:
    """Make the symbolic size with an expression, whose hint is its current value."""
    return shape_env.create_symintnode(expression, hint=int(expression.xreplace(values_of(shape_env))))  # type: ignore[return-value]


def rehint(shape_env: ShapeEnv, sizes: Iterable[SymInt]) -> None:
    """Give sizes that have hints those of the ShapeEnv's own values of symbols."""
    known = values_of(shape_env)
    for size in sizes:
        if size.node.hint is not None:
            replace_hint(size.node, int(size.node.expr.xreplace(known)))


@contextlib.contextmanager
def reopened(shape_env: ShapeEnv) -> Iterator[None]:
    """Take guards inside of the ``with`` block as before the frame's guards were built. Forget them afterwards."""
    before = dict(vars(shape_env))
    for name, value in before.items():
        if isinstance(value, (dict, list, set)) or name == "unbacked_inputs":
            setattr(shape_env, name, copy.copy(value))
    deferred = shape_env.deferred_runtime_asserts
    shape_env.deferred_runtime_asserts = {symbol: list(conditions) for symbol, conditions in deferred.items()}
    shape_env.frozen = shape_env.runtime_asserts_frozen = False
    _forget_answers()
    try:
        yield
    finally:
        versions = {name: getattr(shape_env, name) for name in before if name.endswith("version_counter")}
        vars(shape_env).update(before)
        # Sizes cache their simplified expressions by these numbers, so a new number invalidates the cache.
        vars(shape_env).update({name: number + 1 for name, number in versions.items()})
        _forget_answers()


@contextlib.contextmanager
def deciding_at(shape_env: ShapeEnv, values: Mapping[sympy.Symbol, int], sizes: Iterable[SymInt]) -> Iterator[None]:
    """Decide by ``values`` of symbols instead of those in the traced call. To be used inside of :func:`reopened`.

    Args:
        shape_env: the ShapeEnv.
        values: the values by symbol; other symbols keep theirs.
        sizes: the sizes in the graph that is compiled, whose hints are changed, too.
    """
    known = values_of(shape_env)
    changed = {symbol: sympy.Integer(value) for symbol, value in values.items() if known.get(symbol, value) != value}
    known.update(changed)
    nodes: dict[int, Any] = {}
    for size in sizes if changed else ():
        if size.node.hint is not None and not size.node.expr.free_symbols.isdisjoint(changed):
            nodes[id(size.node)] = size.node
    before = {key: replace_hint(node, int(node.expr.xreplace(known))) for key, node in nodes.items()}
    try:
        yield
    finally:
        for key, node in nodes.items():
            replace_hint(node, before[key])


def as_python(fact: Any) -> str:
    """Print a condition as a Python expression with the names of its symbols."""
    return str(PythonPrinter().doprint(fact))


def as_function(symbols: Iterable[sympy.Symbol], text: str) -> Callable[..., Any]:
    """Make a function from a Python expression. Its parameters are ``symbols``, in this order."""
    function: Callable[..., Any] = eval(f"lambda {', '.join(map(str, symbols))}: {text}", dict(SYMPY_INTERP))
    return function


def _forget_answers() -> None:
    """Clear the caches of ShapeEnv's answers, as an answer from a cache adds no guard."""
    for function in vars(ShapeEnv).values():
        clear = getattr(function, "cache_clear", None)
        if clear is not None:
            clear()
