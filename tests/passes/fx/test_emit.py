"""Traces that are replayed for equal tensors: replayed nodes share memory as newly traced ones would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, Node

from passes.fx.emit import emit, replaying_traces
from passes.fx.torch_internals.core import FakeTensorMode


def halves(first: Tensor, second: Tensor) -> list[Tensor]:
    return [first.view(2, -1).select(0, 1), second.view(-1)]


def placeholders(graph: Graph, values: list[Tensor]) -> list[Node]:
    nodes = [graph.placeholder(f"value_{len(graph.nodes)}") for _ in values]
    for node, value in zip(nodes, values, strict=True):
        node.meta["val"] = value
    return nodes


def storage(node: Node) -> tuple[int, int]:
    value = node.meta["val"]
    return value.untyped_storage()._cdata, value.storage_offset()


@pytest.mark.parametrize("begins", [[(0, 0), (0, 8)], [(0, 0), (1, 0)], [(0, 16), (1, 8)], [(0, 8), (0, 0)], [(0, 0), (0, 16)]])
def test_inputs_in_one_storage_or_several(begins: list[tuple[int, int]]) -> None:
    """The trace for neighbours in one storage is replayed for tensors of equal shapes and strides, at any place."""
    graph = Graph()
    with FakeTensorMode(), replaying_traces():
        for places in ([(0, 0), (0, 8)], begins):
            storages = [torch.empty(32), torch.empty(32)]
            inputs = placeholders(graph, [storages[index].narrow(0, begin, 8) for index, begin in places])
            written = emit(graph, halves, *inputs)
            for source, node, moved in zip(inputs, written, (4, 0), strict=True):
                cdata, offset = storage(source)
                assert storage(node) == (cdata, offset + moved)
