"""Sizes of fake values as numbers or expressions, also with dynamic shapes.

A symbolic size counts as its hint, the value that it had when the graph was traced. A size that depends on data has no hint,
and counts as an assumed number (:func:`assume_unknown_size`). Reading a size adds no guard.

Inside of :func:`symbolic_sizes` a symbolic size counts as its expression, so that results are formulae. Inside of
:func:`sizes_at` it counts as its value for other values of its symbols.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule

#: The default number that a size that depends on data counts as. Inductor assumes the same.
UNKNOWN_SIZE = 8192

_unknown_size: ContextVar[int] = ContextVar("_unknown_size", default=UNKNOWN_SIZE)
# sympy compares the arguments symbolically, which takes a millisecond. Equal layers ask for the same.
_min, _max = functools.lru_cache(maxsize=4096)(sympy.Min), functools.lru_cache(maxsize=4096)(sympy.Max)
_evaluate: ContextVar[Callable[[SymInt], Any] | None] = ContextVar("_evaluate", default=None)


@contextlib.contextmanager
def _evaluating(evaluate: Callable[[SymInt], Any]) -> Iterator[None]:
    token = _evaluate.set(evaluate)
    try:
        yield
    finally:
        _evaluate.reset(token)


def symbolic_sizes(names: Mapping[sympy.Symbol, sympy.Symbol]) -> contextlib.AbstractContextManager[None]:
    """Count symbolic sizes as sympy expressions inside of the ``with`` block.

    Args:
        names: for each symbol of the graph, the symbol to write in expressions.
    """
    replaced = functools.cache(lambda expression: expression.xreplace(names))

    def evaluate(size: SymInt) -> Any:
        value = replaced(size.node.expr)
        return int(value) if value.is_number else value

    return _evaluating(evaluate)


def sizes_at(values: Mapping[sympy.Symbol, int]) -> contextlib.AbstractContextManager[None]:
    """Count sizes with other values of their symbols inside of the ``with`` block.

    Symbols without a value count as outside of the block. The partitioner makes such symbols for the states of random number
    generators.
    """
    numbers = {symbol: sympy.Integer(value) for symbol, value in values.items()}
    replaced = functools.cache(lambda expression: expression.xreplace(numbers))

    def evaluate(size: SymInt) -> int:
        value = replaced(size.node.expr)
        return int(value) if value.is_number else size_hint(size.node.shape_env.create_symintnode(value, hint=None))

    return _evaluating(evaluate)


@contextlib.contextmanager
def assume_unknown_size(size: int) -> Iterator[None]:
    """Count each size that depends on data as ``size`` inside of the ``with`` block."""
    token = _unknown_size.set(size)
    try:
        yield
    finally:
        _unknown_size.reset(token)


def unknown_size() -> int:
    """Return the number that a size that depends on data counts as."""
    return _unknown_size.get()


def size_hint(size: int | SymInt) -> int:
    """Return a size as a number: its hint, or an assumed number if it depends on data."""
    if not isinstance(size, SymInt):
        return int(size)
    if size.node.hint is not None:
        return int(size.node.hint)
    # A sum of several such sizes counts several times as much as one.
    value = size.node.expr.xreplace(dict.fromkeys(size.node.expr.free_symbols, sympy.Integer(unknown_size())))
    return int(value) if value.is_number else unknown_size()


def known_of_unbacked(values: Iterable[Any]) -> str:
    """Describe sizes that depend on data: their ranges, and the conditions that the trace deferred to run time.

    Args:
        values: fake values, in any order.

    Returns:
        A line for each symbol of sizes without a hint; the empty string if there are none.
    """
    lines = set()
    for size in symbolic_sizes_of(values):
        if size.node.hint is not None:
            continue
        shape_env = size.node.shape_env
        for symbol in size.node.expr.free_symbols:
            conditions = [str(condition.expr) for condition in shape_env.deferred_runtime_asserts.get(symbol, ())]
            lines.add(f"{symbol}: {shape_env.var_to_range.get(symbol)}, {conditions}")
    return "\n".join(sorted(lines))


def symbolic_sizes_of(values: Iterable[Any]) -> Iterator[SymInt]:
    """Yield each symbolic size in the shapes, strides and storage offsets of fake values."""
    return (size for value in values for size in _sizes(value) if isinstance(size, SymInt))


def symbolic_sizes_in(gm: GraphModule) -> Iterator[SymInt]:
    """Yield each symbolic size in the fake values of a module's graph and of the graphs of its submodules."""
    graphs = [module.graph for module in gm.modules() if isinstance(module, GraphModule)]
    return symbolic_sizes_of(node.meta.get("val") for graph in graphs for node in graph.nodes)


def expression(size: int | SymInt) -> Any:
    """Return a symbolic size as its expression, and a number as it is. Compare expressions where a guard is not wanted."""
    return size.node.expr if isinstance(size, SymInt) else size


def layout(value: Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Return the shape and the strides of a fake tensor as numbers and expressions."""
    return tuple(map(expression, value.shape)), tuple(map(expression, value.stride()))


def _sizes(value: Any) -> Iterator[int | SymInt]:
    if isinstance(value, Tensor):
        yield from (*value.shape, *value.stride(), value.storage_offset())
    elif isinstance(value, SymInt):
        yield value
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _sizes(inner)


def size_value(size: int | SymInt) -> Any:
    """Return a size as a number, or inside of :func:`symbolic_sizes` as an expression."""
    evaluate = _evaluate.get()
    return evaluate(size) if isinstance(size, SymInt) and evaluate is not None else size_hint(size)


def shape_value(value: Tensor) -> tuple[Any, ...]:
    """Return the shape of a fake tensor in numbers, or inside of :func:`symbolic_sizes` in expressions."""
    return tuple(map(size_value, value.shape))


def num_bytes(value: Any) -> Any:
    """Count the bytes of a fake tensor, or of all tensors in a tuple or list; other values have 0."""
    if isinstance(value, Tensor):
        numel = 1
        for size in value.shape:
            numel *= size_value(size)
        return numel * value.dtype.itemsize
    if isinstance(value, Sequence) and not isinstance(value, (str, torch.Size)):
        return sum(map(num_bytes, value))
    return 0


def smaller(first: Any, second: Any) -> Any:
    """Return the smaller of two numbers or expressions."""
    if isinstance(first, sympy.Expr) or isinstance(second, sympy.Expr):
        return _min(first, second)
    return min(first, second)


def larger(first: Any, second: Any) -> Any:
    """Return the larger of two numbers or expressions."""
    if isinstance(first, sympy.Expr) or isinstance(second, sympy.Expr):
        return _max(first, second)
    return max(first, second)
