"""Save before writes: save copies of inputs that the graph overwrites.

Before: the graph overwrites an input (``copy_``), such as a buffer that forward updates, and also returns the input, or a view
        of it, to save the value of before. By then, the memory holds the new value.
After:  the graph returns a copy that is made at its beginning.

Leaves alone inputs that are overwritten and not returned. torch's partitioner (seen with 2.13) saves inputs without regard to
writes: plain torch.compile gives wrong gradients for ``torch.nn.utils.spectral_norm``, for example.
"""

from typing import cast

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..fx.emit import emit
from ..fx.fake_values import evaluate
from ..fx.graph import memory_of, viewed


def save_before_writes(graph: Graph) -> None:
    """Return copies in the place of inputs that the graph overwrites. In place."""
    writes = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    written = {node for node in map(memory_of, (write.args[0] for write in writes)) if node.op == "placeholder"}
    output = graph.output_node()
    copies: dict[Node, Node] = {}
    for node in output.all_input_nodes:
        if memory_of(node) in written:
            output.replace_input_with(node, _on_copy(graph, node, copies))
            while not node.users and (source := viewed(node)) is not None:
                graph.erase_node(node)
                node = source


def _on_copy(graph: Graph, node: Node, copies: dict[Node, Node]) -> Node:
    """Return ``node``, an input or a view of one, computed from a copy of the input."""
    if node in copies:
        return copies[node]
    source = viewed(node)
    if source is None:
        value = node.meta["val"]
        copy = torch.clone if value.clone().stride() == value.stride() else _copy_with_gaps
        first = next(each for each in graph.nodes if each.op != "placeholder")
        with graph.inserting_before(first):
            copies[node] = cast("Node", emit(graph, copy, node))
        return copies[node]
    on_copy = _on_copy(graph, source, copies)
    # Where the other operands are known, such as sizes.
    with graph.inserting_after(node):
        view = graph.node_copy(node, lambda operand: on_copy if operand is source else operand)
    view.meta["val"] = evaluate(view)
    copies[node] = view
    return view


def _copy_with_gaps(value: Tensor) -> Tensor:
    """Copy a tensor, such as a slice, in its own strides, which backward was traced with."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    memory = torch.as_strided_scatter(value.new_zeros(extent), value, value.shape, value.stride())
    return memory.as_strided(value.shape, value.stride())
