"""Small questions about FX graphs that several passes ask."""

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

#: Operations whose result is their input's memory, seen otherwise.
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

# Operations that move or cast a parameter without mixing it with other data: cheap to do again, wasteful to save.
_MOVES_AND_CASTS = VIEWS | {
    _aten.clone.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _prims.convert_element_type.default,
}


def is_view(node: Node) -> bool:
    """Whether a node's result is its input's memory, or an element of what its input gives."""
    return node.target is operator.getitem or node.target in VIEWS or node.target in _SPLITS or presence(node) == 0


def presence(node: Node) -> Any:
    """1 if a node does anything, and 0 if it pads by a number of rows that depends on how many ranks there are, and is none.

    Inside of :func:`passes.fx.sizes.symbolic_sizes` the expression that says which.
    """
    if node.target != _aten.constant_pad_nd.default or not isinstance(node.args[1], SymInt):
        return 1
    return smaller(1, size_value(node.args[1]))


def viewed(node: Node) -> Node | None:
    """The node that a node is a view of; None if it is no view."""
    return node.all_input_nodes[0] if is_view(node) else None


def memory_of(node: Node) -> Node:
    """The node in whose memory a value lies: itself, unless it is a view."""
    source = viewed(node)
    return node if source is None else memory_of(source)


def derived(graph: Graph, roots: list[Node]) -> dict[Node, None]:
    """``roots`` and the nodes made of them alone by moves and casts, or by decoding (:func:`mark_coding`), in graph order."""
    found = dict.fromkeys(roots)
    for node in graph.nodes:
        sources = [source in found for source in node.all_input_nodes]
        if (node.target in _MOVES_AND_CASTS and all(sources)) or (_CODING in node.meta.get("custom", ()) and any(sources)):
            found[node] = None
    return dict.fromkeys(sorted(found))


#: What tracing copies from a node to those that it traces of it is this key's entries in ``meta["custom"]``.
_CODING = "fsdp_coding"


def mark_coding(node: Node) -> None:
    """Mark a node of Dynamo's graph as one that encodes and decodes a parameter. What is traced of it has the mark, too."""
    node.meta["custom"] = {**node.meta.get("custom", {}), _CODING: True}


def replace_other_uses(node: Node, replacement: Node) -> None:
    """Let every user of ``node`` read ``replacement``, which is made of it, instead."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)


class _Name(str):
    """Prints without quotes."""

    def __repr__(self) -> str:
        return str(self)


def argument_text(value: Any, name_of: Callable[[Node], str]) -> str:
    """An argument of a node as Python prints it, with names in the place of nodes."""
    return repr(map_arg(value, lambda node: _Name(name_of(node))))


def copy_of(graph: Graph) -> Graph:
    """A copy of a graph that later changes to it do not reach."""
    copy = Graph()
    copy.output(copy.graph_copy(graph, {}))
    return copy


def placeholder_index(graph: Graph) -> dict[Node, int]:
    """The inputs of a graph, each with its place among them."""
    return {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}


def shard_input(shard: Node) -> Node | None:
    """The placeholder that a shard, perhaps cast already, comes from; None if something in the graph computes it."""
    while shard.target == _prims.convert_element_type.default:
        shard = shard.args[0]  # type: ignore[assignment]
    return shard if shard.op == "placeholder" else None


def is_collective(node: Node) -> bool:
    """Whether a node communicates, or waits for communication."""
    return isinstance(node.target, OpOverload) and node.target.namespace in _COLLECTIVES


def is_host_copy(node: Node) -> bool:
    """Whether a node begins a copy between host and device, or waits for one (:mod:`passes.collectives.host_copies`)."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "fsdp_host"


def is_fused_product(node: Node) -> bool:
    """Whether a node is a product that communicates (:mod:`passes.transforms.fuse_products`): nothing waits for it."""
    return isinstance(node.target, OpOverload) and node.target.namespace == "symm_mem"


def starts_collective(node: Node) -> bool:
    """Whether a node is a functional collective: of the model's own, too, but no wait for one, and no product."""
    is_wait = node.target == torch.ops._c10d_functional.wait_tensor.default
    return is_collective(node) and not is_wait and not is_fused_product(node)


def readers(node: Node) -> list[Node]:
    """Who reads a value, or an element of it where there are several."""
    found: list[Node] = []
    for user in node.users:
        found += readers(user) if user.target is operator.getitem else [user]
    return found


def group_of(collective: Node) -> str:
    """The name of the process group of a functional collective."""
    return next(argument for argument in reversed(collective.args) if isinstance(argument, str))


def with_sources(nodes: list[Node]) -> list[Node]:
    """``nodes`` and all they are computed from, in graph order, without placeholders."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)
