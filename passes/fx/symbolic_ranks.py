"""Symbolic ranks: run passes with the sizes of process groups as symbols, and analyse groups that do not exist.

Passes depend on the number of ranks only through sizes, such as the length of a shard. Inside of :func:`symbolic_ranks` these
sizes are ``SymInt`` s, so sizes in graphs become expressions in the number of ranks. The arithmetic is the same as with
numbers; ``fsdp_compile/explain`` makes formulae of the expressions. Such graphs are analysed and never run.
:func:`ranks_at` and :func:`sizes_of_groups` set the ranks or sizes of groups during an analysis.

torch's functional collectives take the number of ranks as a plain number, and padding needs a plain number of rows. Inside of
:func:`symbolic_ranks`, operators that take symbols replace both. :func:`passes.fx.emit.emit` writes torch's own into graphs.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.overrides import TorchFunctionMode

from .torch_internals.dynamo import ConstantSource

_c10d = torch.ops._c10d_functional
_library = torch.library.Library("fsdp_compile_symbolic", "DEF")
_library.define("all_gather(Tensor shard, SymInt ranks, str group) -> Tensor")
_library.define("reduce_scatter(Tensor full, str op, SymInt ranks, str group) -> Tensor")
_library.define("exchange(Tensor full, str group) -> Tensor")
_library.define("pad(Tensor full, SymInt rows) -> Tensor")
_symbolic = torch.ops.fsdp_compile_symbolic

#: For each symbolic operator, torch's operator that it replaces.
MEANT: Mapping[Any, Any] = {
    _symbolic.all_gather.default: _c10d.all_gather_into_tensor.default,
    _symbolic.reduce_scatter.default: _c10d.reduce_scatter_tensor.default,
    _symbolic.exchange.default: _c10d.all_to_all_single.default,
    _symbolic.pad.default: torch.ops.aten.constant_pad_nd.default,
}

_sizes: ContextVar[Mapping[str, SymInt] | None] = ContextVar("_sizes", default=None)
_NO_RANKS: Mapping[str, range] = MappingProxyType({})
_ranks: ContextVar[Mapping[str, range]] = ContextVar("_ranks", default=_NO_RANKS)


@torch.library.register_fake("fsdp_compile_symbolic::all_gather", lib=_library)
def _(shard: Tensor, ranks: int, group: str) -> Tensor:
    return shard.new_empty([shard.size(0) * ranks, *shard.shape[1:]])


@torch.library.register_fake("fsdp_compile_symbolic::reduce_scatter", lib=_library)
def _(full: Tensor, op: str, ranks: int, group: str) -> Tensor:
    return full.new_empty([full.size(0) // ranks, *full.shape[1:]])


@torch.library.register_fake("fsdp_compile_symbolic::exchange", lib=_library)
def _(full: Tensor, group: str) -> Tensor:
    return torch.empty_like(full)


@torch.library.register_fake("fsdp_compile_symbolic::pad", lib=_library)
def _(full: Tensor, rows: int) -> Tensor:
    return full.new_empty([full.size(0) + rows, *full.shape[1:]])


class _SymbolicOperators(TorchFunctionMode):
    """A mode that calls a symbolic operator in the place of torch's if the number of ranks or rows is a symbol."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _c10d.all_gather_into_tensor and isinstance(args[1], SymInt):
            func = _symbolic.all_gather
        elif func is _c10d.reduce_scatter_tensor and isinstance(args[2], SymInt):
            func = _symbolic.reduce_scatter
        elif func is _c10d.all_to_all_single and isinstance(overridden_size(args[3]), SymInt):
            func, args = _symbolic.exchange, (args[0], args[3])
        elif func is torch.constant_pad_nd and isinstance(args[1][-1], SymInt):
            func, args = _symbolic.pad, (args[0], args[1][-1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def symbolic_ranks(shape_env: ShapeEnv, groups: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, SymInt]]:
    """Replace the sizes of process groups by symbols inside of the ``with`` block.

    Args:
        shape_env: the ShapeEnv of the graphs that passes will run over.
        groups: for each name of a group, the name of its symbol and its number of ranks. The number is the symbol's hint, by
            which decisions about sizes are made. Groups with the same name of a symbol share the symbol.

    Yields:
        The sizes, by the names of the symbols.
    """
    symbols: dict[str, SymInt] = {}
    sizes: dict[str, SymInt] = {}
    for group, (name, size) in groups.items():
        if name not in symbols:
            symbols[name] = _symbol(shape_env, name, size)
        sizes[group] = symbols[name]
    token = _sizes.set(sizes)
    try:
        # A guard that a size equals a number would replace the symbol by the number from then on.
        with shape_env.suppress_guards(), _SymbolicOperators(), warnings.catch_warnings():
            # torch warns of symbols among the arguments of nodes, which matter only in graphs that run.
            warnings.filterwarnings("ignore", "Raw SymInt value")
            yield symbols
    finally:
        _sizes.reset(token)


@contextlib.contextmanager
def ranks_at(groups: Mapping[str, range]) -> Iterator[None]:
    """Give process groups, which need not exist, the ranks in ``groups`` inside of the ``with`` block."""
    token = _ranks.set(groups)
    try:
        yield
    finally:
        _ranks.reset(token)


@contextlib.contextmanager
def sizes_of_groups(groups: Mapping[str, Any]) -> Iterator[None]:
    """Give process groups, which need not exist, the sizes in ``groups``, sympy expressions, inside of the ``with`` block."""
    token = _sizes.set(groups)
    try:
        yield
    finally:
        _sizes.reset(token)


def overridden_size(group: str) -> int | None:
    """Return the size of a group that :func:`symbolic_ranks`, :func:`sizes_of_groups` or :func:`ranks_at` sets, else None."""
    sizes = _sizes.get()
    if sizes and group in sizes:
        return sizes[group]  # type: ignore[return-value]
    ranks = overridden_ranks(group)
    return None if ranks is None else len(ranks)


def overridden_ranks(group: str) -> range | None:
    """Return the ranks of a group that :func:`ranks_at` sets, else None."""
    return _ranks.get().get(group)


def are_symbolic() -> bool:
    """Return whether sizes of groups are symbols: inside of :func:`symbolic_ranks`."""
    return bool(_sizes.get())


def _symbol(shape_env: ShapeEnv, name: str, size: int) -> SymInt:
    source = ConstantSource(f"ranks_{name}")
    # Not DUCK, which gives equal hints the same symbol.
    symbol = shape_env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    created = shape_env.create_symintnode(symbol, hint=size, source=source)
    assert isinstance(created, SymInt)
    return created
