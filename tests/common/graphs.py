"""Descriptions of graphs, for comparing them."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.fx import Graph, Node, map_arg

from passes.fx.sizes import layout


def operations(graph: Graph) -> list[Any]:
    """Describe each node of a graph without its name. Values that share memory share a number."""
    numbers: dict[Node, int] = {}
    memory: dict[int, int] = {}
    described = []
    for node in graph.nodes:
        numbers[node] = len(numbers)
        value = node.meta.get("val")
        tensors = [item for item in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(item, Tensor)]
        layouts = [
            (*layout(item), item.dtype, memory.setdefault(item.untyped_storage()._cdata, len(memory))) for item in tensors
        ]
        arguments = map_arg((node.args, node.kwargs), lambda source: f"%{numbers[source]}")
        described.append((node.op, str(node.target) if node.op == "call_function" else "", str(arguments), layouts))
    return described


def kinds(graph: Graph) -> list[Any]:
    """Describe each node of a graph by its target and results, without its inputs."""
    return [
        (target, [(shape, stride, dtype) for shape, stride, dtype, _ in layouts]) for _, target, _, layouts in operations(graph)
    ]
