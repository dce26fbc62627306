"""Small functions about FX graphs that several passes share."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, Node, map_arg

from .sizes import size_value, smaller
from .torch_internals.core import OpOverload

_aten = torch.ops.aten
_prims = torch.ops.prims

#: Operators whose result is a view of their input.
VIEWS = {
    _aten.alias.default,
    _aten.detach.default,
    _aten.expand.default,
    _aten.permute.default,
    _aten.select.int,
    _aten.slice.Tensor,
    _aten.squeeze.dim,
    _aten.squeeze.dims,
    _aten.t.default,
    _aten.transpose.int,
    _aten.unsqueeze.default,
    _aten.view.default,
    _aten._unsafe_view.default,
}

_SPLITS = {_aten.split.Tensor, _aten.split_with_sizes.default}

_COLLECTIVES = ("_c10d_functional", "c10d_functional", "_dtensor", "symm_mem")

# Operators that move or cast a parameter without mixing it with other data: cheap to recompute, wasteful to save.
_MOVES_AND_CASTS = VIEWS | {
    _aten.clone.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _prims.convert_element_type.default,
}


def is_view(node: Node) -> bool:
    """Return whether a node's result is a view of its input, or an element of a tuple that its input returns."""
    return node.target is operator.getitem or node.target in VIEWS or node.target in _SPLITS or presence(node) == 0


def presence(node: Node) -> Any:
    """Return 1 if a node does anything, and 0 if it pads by no rows.

    Padding by no rows occurs where the number of rows depends on the number of ranks (:mod:`passes.fx.symbolic_ranks`). Inside
    of :func:`passes.fx.sizes.symbolic_sizes`, the result for such a node is an expression that is 0 or 1.
    """
    if node.target != _aten.constant_pad_nd.default or not isinstance(node.args[1], SymInt):
        return 1
    return smaller(1, size_value(node.args[1]))


def viewed(node: Node) -> Node | None:
    """Return the node that a node is a view of; None if it is no view."""
    return node.all_input_nodes[0] if is_view(node) else None


def memory_of(node: Node) -> Node:
    """Return the node that makes the memory of a value: ``node`` itself, unless it is a view."""
    source = viewed(node)
    return node if source is None else memory_of(source)


def derived(graph: Graph, roots: list[Node]) -> dict[Node, None]:
    """Find ``roots`` and all nodes computed from them by moves and casts, or by decoding (:func:`mark_coding`), in graph order.

    A move or cast that also reads other nodes is left out.
    """
    found = dict.fromkeys(roots)
    for node in graph.nodes:
        sources = [source in found for source in node.all_input_nodes]
        if (node.target in _MOVES_AND_CASTS and all(sources)) or (_CODING in node.meta.get("custom", ()) and any(sources)):
            found[node] = None
    return dict.fromkeys(sorted(found))


#: An entry of ``meta["custom"]``, as tracing copies this dict from a node to the nodes that it traces from it.
_CODING = "fsdp_coding"


def mark_coding(node: Node) -> None:
    """Mark a node of Dynamo's graph that encodes and decodes a parameter. Nodes that are traced from it get the mark, too."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _CODING: True}


def replace_other_uses(node: Node, replacement: Node) -> None:
    """Replace ``node`` by ``replacement`` in all its users but ``replacement`` itself, which is computed from it."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)


class _Name(str):
    """A string that prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def argument_text(value: Any, name_of: Callable[[Node], str]) -> str:
    """Print an argument of a node as Python does, with names in the place of nodes."""
    return repr(map_arg(value, lambda node: _Name(name_of(node))))


def copy_of(graph: Graph) -> Graph:
    """Copy a graph, so that later changes to it do not change the copy."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def placeholder_index(graph: Graph) -> dict[Node, int]:
    """Return the index of each input of a graph among all inputs."""
    return {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}


def inputs_first(graph: Graph) -> None:
    """Move the inputs of a graph ahead of all other nodes. In place."""
    first = next(node for node in graph.nodes)
    if first.op != "placeholder":
        for node in graph.find_nodes(op="placeholder"):
            first.prepend(node)


def shard_input(shard: Node) -> Node | None:
    """Return the placeholder of a shard, which may be cast already; None if the graph computes the shard otherwise."""
    while shard.target == _prims.convert_element_type.default:
        shard = shard.args[0]  # type: ignore[assignment]
    return shard if shard.op == "placeholder" else None


def is_collective(node: Node) -> bool:
    """Return whether a node communicates, or waits for communication."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


def is_host_copy(node: Node) -> bool:
    """Return whether a node starts a copy between host and device or waits for one (:mod:`passes.collectives.host_copies`)."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "fsdp_host"


def is_fused_product(node: Node) -> bool:
    """Return whether a node is a product that also communicates, without a wait (:mod:`passes.transforms.fuse_products`)."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "symm_mem"


def starts_collective(node: Node) -> bool:
    """Return whether a node starts a functional collective, also one of the model's own. Waits and fused products do not."""
    is_wait = node.target == torch.ops._c10d_functional.wait_tensor.default
    return is_collective(node) and not is_wait and not is_fused_product(node)


def last_element(node: Node) -> Node:
    """Return the last of the elements (``getitem``) that follow a node or its own element in the graph; without any, the node.

    What is put into the graph goes after it: Inductor cannot unpack a tuple that another segment made.
    """
    while node.next.target is operator.getitem:
        node = node.next
    return node


def readers(node: Node) -> list[Node]:
    """Find the nodes that read a value; of a tuple, the nodes that read its elements."""
    found: list[Node] = []
    for user in node.users:
        found += readers(user) if user.target is operator.getitem else [user]
    return found


def group_of(collective: Node) -> str:
    """Return the name of the process group of a functional collective."""
    return next(argument for argument in reversed(collective.args) if isinstance(argument, str))


def with_sources(nodes: list[Node]) -> list[Node]:
    """Find ``nodes`` and all nodes that they are computed from, in graph order, without placeholders."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)
