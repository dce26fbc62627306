"""Refresh layouts: write down the strides that values have once Inductor's patterns have replaced operators before them.

Before: Inductor has replaced operators by others whose results have other strides: attention that is written out by a fused
        kernel, a product by a padded one and a slice of it, a sum with zeros by the other summand. It leaves the values of the
        operators that follow as they were traced, and gives the summand that of the sum, as it propagates all values once more
        when it lowers a whole graph. Here, forward, backward and their segments are lowered apart, and rely on the values in
        the graph.
After:  the values of operators that follow have the strides that they get. A view that these strides do not permit, an
        operator outside of torch's core, and the graph's outputs read a copy with the strides that they were traced with.

Leaves alone what follows no replaced operator. Runs once for each joint graph, for each layer that is traced alone, and for
each segment with padded products.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from ..fx.emit import emit
from ..fx.fake_values import evaluate
from ..fx.graph import is_view
from ..fx.sizes import layout, size_hint
from ..fx.torch_internals.core import FakeTensor, OpOverload, pytree


class TracedValues:
    """The values with which the operators of a graph were traced, and theirs.

    Args:
        graph: the graph, before Inductor's patterns.
    """

    def __init__(self, graph: Graph):
        self._own = {node: node.meta.get("val") for node in graph.nodes}
        fake = (value for value in self._own.values() if isinstance(value, FakeTensor))
        #: The mode of the graph's fake tensors.
        self.fake_mode: contextlib.AbstractContextManager[Any] = next(
            (value.fake_mode for value in fake), contextlib.nullcontext()
        )
        self._inputs = {node: [source.meta.get("val") for source in _sources(node)] for node in graph.nodes}

    def lacks(self, node: Node) -> bool:
        """Tell whether a pattern has inserted ``node`` and given it no value, as where memory that nobody writes is made."""
        has_value = isinstance(node.target, OpOverload) or node.target is operator.getitem
        return has_value and node not in self._own and "val" not in node.meta

    def restore(self, node: Node) -> None:
        """Give a node that was there before its value of then. A pattern gives it that of an operator that it stands for."""
        value = self._own.get(node)
        if value is not None and _differ(value, node.meta.get("val")):
            node.meta["val"] = value

    def inputs(self, node: Node, replaced: Mapping[Node, Any]) -> Sequence[Any]:
        """Return the values that ``node`` was traced with.

        Args:
            node: an operator, also one that a pattern has inserted.
            replaced: for values that were refreshed, the earlier ones.
        """
        sources = _sources(node)
        values = self._inputs.get(node, ())
        # A pattern may have changed the arguments of an operator that was there before.
        return values if len(values) == len(sources) else [replaced.get(source, source.meta.get("val")) for source in sources]


def refresh_layouts(graph: Graph, traced: TracedValues) -> None:
    """Give the nodes after replaced operators the strides that they have, or their inputs the strides of before. In place.

    Args:
        graph: the graph after Inductor's patterns, sorted.
        traced: its values before.
    """
    replaced: dict[Node, Any] = {}
    for node in list(graph.nodes):
        traced.restore(node)
        if traced.lacks(node):
            with traced.fake_mode:
                node.meta["val"] = evaluate(node)
        sources = _sources(node)
        changed = {
            source: value
            for source, value in zip(sources, traced.inputs(node, replaced), strict=True)
            if _differ(source.meta.get("val"), value)
        }
        if not changed:
            continue
        try:
            value = _evaluate_with_any_strides(node)
        except (NotImplementedError, RuntimeError, ValueError):
            for source, traced_value in changed.items():
                node.replace_input_with(source, _copy_like(graph, source, traced_value, node))
            continue
        if _differ(value, node.meta["val"]):
            replaced[node] = node.meta["val"]
            node.meta["val"] = value


def _sources(node: Node) -> list[Node]:
    """Return the nodes that ``node`` reads, in the order of its arguments, each as often as it is read."""
    sources: list[Node] = []
    map_arg((node.args, node.kwargs), sources.append)
    return sources


def _differ(first: Any, second: Any) -> bool:
    """Return whether two values have other sizes or strides."""
    return first is not second and _layouts(first) != _layouts(second)


def _layouts(value: Any) -> list[Any]:
    """Return sizes and strides of the tensors in ``value``, without adding a guard."""
    return [layout(leaf) for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.layout == torch.strided]


def _evaluate_with_any_strides(node: Node) -> Any:
    """Return the fake value of a view, or of an operator that is pointwise or in torch's core, which take any strides.

    Raises:
        NotImplementedError: it is another operator, whose kernel may assume strides, or it makes sizes that depend on data.
        RuntimeError, ValueError: the strides of an input do not permit the view.
    """
    tags = node.target.tags if isinstance(node.target, OpOverload) else []
    is_plain = is_view(node) or torch.Tag.core in tags or torch.Tag.pointwise in tags
    if not is_plain or "unbacked_bindings" in node.meta:
        raise NotImplementedError
    return evaluate(node)


def _in_order(value: Tensor, order: Sequence[int]) -> Tensor:
    """Copy a tensor densely, with ``order`` as its dimensions from the outermost to the innermost in memory."""
    if list(order) == sorted(order):
        return value.clone(memory_format=torch.contiguous_format)
    dense = value.permute(*order).clone(memory_format=torch.contiguous_format)
    return dense.permute(*(order.index(dim) for dim in range(len(order))))


def _copy_like(graph: Graph, source: Node, traced: Tensor, reader: Node) -> Node:
    """Insert before ``reader`` a dense copy of ``source``, with its dimensions in memory in the order of ``traced``."""
    order = sorted(range(traced.dim()), key=lambda dim: size_hint(traced.stride()[dim]), reverse=True)
    with graph.inserting_before(reader):
        return cast("Node", emit(graph, _in_order, source, order=order))
