"""Save early: compute the values that forward saves for backward where their inputs are last read.

Before: the forward graph ends with values that nobody but backward reads, such as ``rsqrt / n`` of each layer norm. The
        partitioner takes them from the backward part of the joint graph, and keeps their order.
After:  such a value is computed behind the last other reader of its input. So a layer computes its own values, in its own
        kernels, and equal layers have equal segments.

Leaves alone values of several tensors, values that are larger than their input, and values of inputs that are saved themselves:
these would need memory for longer.
"""

import torch
from torch.fx import Graph, Node

from ..fx.graph import memory_of
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of


def save_early(graph: Graph) -> None:
    """Move values that a forward graph only returns behind the last other reader of their input. In place."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    output = graph.output_node()
    last_moved: dict[Node, Node] = {}
    for node in output.all_input_nodes:
        if list(node.users) != [output] or not _takes_no_memory(node):
            continue
        source = node.all_input_nodes[0]
        # A value that was moved stands right behind such a reader.
        reader = max((source, *(user for user in source.users if user is not node)), key=place.__getitem__)
        if place[reader] + 1 < place[node]:
            last_moved.get(reader, reader).append(node)
            last_moved[reader] = node
            place[node] = place[reader]


def _takes_no_memory(node: Node) -> bool:
    """Return whether a node takes the place of its only input in memory, which nobody else keeps."""
    if not isinstance(node.target, OpOverload) or torch.Tag.pointwise not in node.target.tags:
        return False
    if schema_of(node.target).is_mutable or torch.Tag.nondeterministic_seeded in node.target.tags:
        return False
    if len(node.all_input_nodes) != 1:
        return False
    (source,) = node.all_input_nodes
    is_kept = source.op == "placeholder" or memory_of(source) is not source or any(user.op == "output" for user in source.users)
    return not is_kept and node.meta["val"].dtype.itemsize <= source.meta["val"].dtype.itemsize
