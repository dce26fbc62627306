"""Symbolic ranks: run passes with the sizes of process groups as symbols, and ask about groups that are not there.

What passes write depends on how many ranks there are through numbers alone: how long a shard is, how many of them a gather
joins. Inside of :func:`symbolic_ranks` these are ``SymInt`` s. The sizes of what passes then write are expressions in the
number of ranks, by the same arithmetic as for real: formulae are made of them (``fsdp_compile/explain``). Such graphs are
there to be asked about; they do not run. :func:`ranks_at` says which ranks groups have meanwhile.

The functional collectives take the number of ranks as a plain number, and padding is one. In here they are operators that take
symbols; :func:`passes.fx.emit.emit` puts torch's own back into graphs.
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

from .torch_internals.core import pytree
from .torch_internals.dynamo import ConstantSource

_c10d = torch.ops._c10d_functional
_library = torch.library.Library("fsdp_compile_symbolic", "DEF")
_library.define("all_gather(Tensor shard, SymInt ranks, str group) -> Tensor")
_library.define("reduce_scatter(Tensor full, str op, SymInt ranks, str group) -> Tensor")
_library.define("exchange(Tensor full, str group) -> Tensor")
_library.define("pad(Tensor full, SymInt rows) -> Tensor")
_symbolic = torch.ops.fsdp_compile_symbolic

#: torch's operators by those that stand for them in here.
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
    """Calls the operators that take symbols."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _c10d.all_gather_into_tensor and isinstance(args[1], SymInt):
            func = _symbolic.all_gather
        elif func is _c10d.reduce_scatter_tensor and isinstance(args[2], SymInt):
            func = _symbolic.reduce_scatter
        elif func is _c10d.all_to_all_single and isinstance(supposed_size(args[3]), SymInt):
            func, args = _symbolic.exchange, (args[0], args[3])
        elif func is torch.constant_pad_nd and isinstance(args[1][-1], SymInt):
            func, args = _symbolic.pad, (args[0], args[1][-1])
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def symbolic_ranks(shape_env: ShapeEnv, groups: Mapping[str, tuple[str, int]]) -> Iterator[dict[str, SymInt]]:
    """Have the sizes of process groups be symbols inside of the ``with`` block.

    Args:
        shape_env: of the graphs that passes are to run over.
        groups: for each name of a group, what to call its symbol, and the number of ranks that it has: what is decided by
            sizes is decided by these.

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
        # A guard that compares a size with a number would take the symbol for that number from then on.
        with shape_env.suppress_guards(), _SymbolicOperators(), warnings.catch_warnings():
            # Graphs that run may not have symbols for arguments.
            warnings.filterwarnings("ignore", "Raw SymInt value")
            yield symbols
    finally:
        _sizes.reset(token)


@contextlib.contextmanager
def ranks_at(groups: Mapping[str, range]) -> Iterator[None]:
    """Have process groups of these names, which need not exist, be of these ranks inside of the ``with`` block."""
    token = _ranks.set(groups)
    try:
        yield
    finally:
        _ranks.reset(token)


@contextlib.contextmanager
def sizes_of_groups(groups: Mapping[str, Any]) -> Iterator[None]:
    """Have the sizes of process groups, which need not exist, be expressions of sympy inside of the ``with`` block."""
    token = _sizes.set(groups)
    try:
        yield
    finally:
        _sizes.reset(token)


def supposed_size(group: str) -> int | None:
    """The size of a group by :func:`symbolic_ranks`, :func:`sizes_of_groups` or :func:`ranks_at`; None: none of them says."""
    sizes = _sizes.get()
    if sizes and group in sizes:
        return sizes[group]  # type: ignore[return-value]
    ranks = supposed_ranks(group)
    return None if ranks is None else len(ranks)


def supposed_ranks(group: str) -> range | None:
    """The ranks of a group by :func:`ranks_at`; None: it does not say."""
    return _ranks.get().get(group)


def symbolic_numbers(constants: Any = None) -> list[SymInt]:
    """What a trace has to be given as inputs: the sizes of groups, and symbolic numbers among constants.

    Nothing outside of :func:`symbolic_ranks`.
    """
    sizes = _sizes.get()
    if not sizes:
        return []
    numbers = [*sizes.values(), *(leaf for leaf in pytree.tree_leaves(constants) if isinstance(leaf, SymInt))]
    return list({id(number): number for number in numbers}.values())


def _symbol(shape_env: ShapeEnv, name: str, size: int) -> SymInt:
    source = ConstantSource(f"ranks_{name}")
    # Not DUCK, which takes equal numbers for the same symbol.
    symbol = shape_env.create_symbol(size, source, dynamic_dim=DimDynamic.DYNAMIC, constraint_dim=None)
    created = shape_env.create_symintnode(symbol, hint=size, source=source)
    assert isinstance(created, SymInt)
    return created
