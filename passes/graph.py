"""Small questions about FX graphs that several passes ask."""

import torch
from torch.fx import Graph, Node

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

# Operations that move or cast a parameter without mixing it with other data: cheap to do again, wasteful to save.
_MOVES_AND_CASTS = VIEWS | {
    _aten.clone.default,
    _aten.reshape.default,
    _aten._to_copy.default,
    _prims.convert_element_type.default,
}


def derived(graph: Graph, roots: list[Node]) -> dict[Node, None]:
    """``roots`` and the nodes made of them alone by moves and casts, in graph order."""
    found = dict.fromkeys(roots)
    for node in graph.nodes:
        if node.target in _MOVES_AND_CASTS and all(source in found for source in node.all_input_nodes):
            found[node] = None
    return dict.fromkeys(sorted(found))


def replace_other_uses(node: Node, replacement: Node) -> None:
    """Let every user of ``node`` read ``replacement``, which is made of it, instead."""
    node.replace_all_uses_with(replacement, delete_user_cb=lambda user: user is not replacement)


def shard_input(shard: Node) -> Node | None:
    """The placeholder that a shard, perhaps cast already, comes from; None if something in the graph computes it."""
    while shard.target == _prims.convert_element_type.default:
        shard = shard.args[0]  # type: ignore[assignment]
    return shard if shard.op == "placeholder" else None


def role(node: Node) -> str:
    """What a node does for a bucket (see :mod:`passes.bucket`), or the empty string."""
    return node.meta.get("fsdp", "").partition(":")[0]


def bucket(node: Node) -> str:
    """The bucket that a node works for, or the empty string."""
    return node.meta.get("fsdp", "").partition(":")[2]
