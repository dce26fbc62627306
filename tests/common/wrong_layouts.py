"""Fails tests in which values of a graph have other sizes or strides than the graph says.

Forward, backward and their segments are compiled apart, each for what the graph says of the values that it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import sympy
import torch
from torch import SymInt, Tensor
from torch.fx import GraphModule, Interpreter, Node

from fsdp_compile.compiler.aot_eager_lowering import AotEagerLowering
from fsdp_compile.compiler.lowering import Lowered
from fsdp_compile.runtime.planned_graph import boxed

aten = torch.ops.aten


def refuse_wrong_layouts() -> None:
    """Make the graphs of the lowering ``aot_eager`` check each value that they take or compute, in this process."""
    lower = AotEagerLowering.lower

    def checked(self: AotEagerLowering, gm: GraphModule, **kwargs: Any) -> Lowered:
        lower(self, gm, **kwargs)
        return Lowered(boxed(lambda args: _Checked(gm).boxed_run(args)))

    AotEagerLowering.lower = checked  # type: ignore[method-assign]


class _Checked(Interpreter):
    def __init__(self, gm: GraphModule):
        super().__init__(gm)
        self._sizes: dict[sympy.Symbol, int] = {}

    def boxed_run(self, args_list: list[Any]) -> Any:
        for node, found in zip(self.graph.find_nodes(op="placeholder"), args_list, strict=True):
            self._bind(node.meta.get("val"), found)
            self._check(node, found)
        return super().boxed_run(args_list)

    def run_node(self, n: Node) -> Any:
        found = super().run_node(n)
        if n.target is aten.constant_pad_nd.default and n.meta["val"].is_contiguous():
            # A symbol of the padding may be zero. torch's kernel then keeps the strides of its input, its fake kernel cannot.
            found = found.contiguous()
        self._check(n, found)
        return found

    def _bind(self, traced: Any, found: Any) -> None:
        pairs = zip(traced.shape, found.shape, strict=True) if isinstance(traced, Tensor) else [(traced, found)]
        for size, number in pairs:
            if isinstance(size, SymInt) and size.node.expr.is_symbol:
                self._sizes[size.node.expr] = int(number)

    def _check(self, node: Node, found: Any) -> None:
        traced = node.meta.get("val")
        if not isinstance(found, Tensor) or not isinstance(traced, Tensor) or not found.numel():
            return
        if found.layout != torch.strided:
            return
        wanted = _layout(traced, self._sizes)
        if wanted is not None and wanted != (is_ := _layout(found, {})):
            raise AssertionError(f"{node.format_node()} has sizes and strides {is_}, and the graph says {wanted}.")


def _layout(value: Tensor, sizes: Mapping[sympy.Symbol, int]) -> list[tuple[int, int]] | None:
    """Return size and stride of each dimension, without strides that do not count; None if a size depends on data."""
    pairs = []
    for pair in zip(value.shape, value.stride(), strict=True):
        numbers = [one.node.expr.xreplace(sizes) if isinstance(one, SymInt) else one for one in pair]
        if any(isinstance(one, sympy.Expr) and not one.is_number for one in numbers):
            return None
        size, stride = map(int, numbers)
        pairs.append((size, stride if size > 1 else 0))
    return pairs
