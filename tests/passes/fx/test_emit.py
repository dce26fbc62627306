"""Operators that :func:`emit` writes, and replayed traces, whose nodes share memory as newly traced ones would."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from passes.fx.emit import emit, replaying_traces
from passes.fx.torch_internals.core import FakeTensorMode
from passes.fx.torch_internals.dynamo import ConstantSource


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


def several(first: Tensor, others: list[Tensor], *, factor: float) -> tuple[Tensor, list[Tensor]]:
    torch.sin(first)  # nobody reads it
    left, right = torch.split(first, [2, 6])
    scaled = torch._foreach_mul([right, *others], factor)
    return left.to(torch.float64).detach().clone(), [scaled[0].float(), scaled[1] + first.new_ones(3), first]


@pytest.mark.parametrize("replayed", [False, True])
def test_the_graph_computes_what_the_function_does(replayed: bool) -> None:
    """Write several outputs and lists, casts in the form that Inductor expects, and no operator whose result nobody reads."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        given = [torch.randn(8, dtype=torch.bfloat16), torch.randn(3, dtype=torch.bfloat16)]
    graph = Graph()
    with FakeTensorMode() as mode:
        inputs = placeholders(graph, [mode.from_tensor(tensor) for tensor in given])
    with replaying_traces():
        for _ in range(1 + replayed):
            results = emit(graph, several, inputs[0], inputs[1:], factor=2.0)
    graph.output(results)
    names = [str(node.target) for node in graph.nodes if node.op == "call_function"]
    assert not {"aten.sin.default", "aten.detach.default", "aten._to_copy.default"} & set(names)
    assert names.count("prims.convert_element_type.default") == 2 * (1 + replayed)
    (first, others), (expected, expected_others) = GraphModule({}, graph)(*given), several(given[0], given[1:], factor=2.0)
    torch.testing.assert_close([first, *others], [expected, *expected_others], rtol=0, atol=0)
    for node, value in zip([results[0], *results[1]], [expected, *expected_others], strict=True):
        assert (node.meta["val"].shape, node.meta["val"].dtype) == (value.shape, value.dtype)


def test_tensors_from_elsewhere_are_refused() -> None:
    graph = Graph()
    with FakeTensorMode():
        value, other = placeholders(graph, [torch.empty(4), torch.empty(4)])
    with pytest.raises(AssertionError, match="no tensors but its arguments"):
        emit(graph, lambda tensor: tensor + other.meta["val"], value)


def test_sizes_that_change_are_no_arguments() -> None:
    """Refuse a size that only a run knows: the graph would hold the symbol of the trace in its place."""
    graph = Graph()
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext([DimDynamic.DYNAMIC, DimDynamic.STATIC])
    symbolic = mode.from_tensor(torch.empty(4, 3), symbolic_context=context, source=ConstantSource("tensor"))
    assert isinstance(symbolic.size(0), torch.SymInt)
    (value,) = placeholders(graph, [symbolic])
    with pytest.raises(AssertionError, match="no size that changes"):
        emit(graph, lambda tensor: tensor.view(-1, tensor.size(0)), value)
    assert isinstance(emit(graph, torch.sin, value), Node)
