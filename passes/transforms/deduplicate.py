"""Deduplicate: keep one unshard for each shard, at the top of the Dynamo graph.

Before: an ``unshard`` wherever the model reads a parameter: twice for a parameter used twice or tied, also inside the bodies
        of activation checkpoints and inside ``no_grad`` or autocast regions.
After:  one ``unshard`` for each shard, before all compute. Its readers share the result, so autograd sums their gradients
        before the one reduction. At the top the grad mode is the caller's, so a first read under ``no_grad`` does not cut
        off a later one. (Bucketing and the schedule decide where the gather runs.)

Leaves alone everything but unshards, and calls of checkpoints whose bodies have unshards. An ``unshard`` in the body of any
other higher-order operator raises ``NotImplementedError``: its bucket would be unknown.
"""

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from ..fx.graph import mark_coding
from ..ir.ops import Unshard, unshard_extension, unshards


def _lift_out_of_checkpoints(graph: Graph, owner: GraphModule) -> None:
    """Move unshards from checkpoint bodies to the surrounding graph. A body then takes each full parameter as one input."""
    for call in [node for node in graph.nodes if node.target is torch.ops.higher_order.tag_activation_checkpoint]:
        body_node = call.args[0]
        body = owner.get_submodule(body_node.target)
        assert isinstance(body, GraphModule)
        _lift_out_of_checkpoints(body.graph, body)
        placeholders = body.graph.find_nodes(op="placeholder")
        operands = list(call.args[1:])
        fulls: dict[Any, Node] = {}
        for inner in unshards(body.graph.nodes):
            outside = dict(zip(placeholders, operands, strict=True))
            shard = outside[Unshard.of(inner).shard]
            if shard not in fulls:
                with graph.inserting_before(call):
                    outer = graph.node_copy(inner, outside.__getitem__)
                with body.graph.inserting_after(placeholders[-1]):
                    full = fulls[shard] = body.graph.placeholder(f"unsharded_{Unshard.of(inner).shard.name}")
                    full.meta = dict(inner.meta)
                placeholders.append(full)
                operands.append(outer)
            inner.replace_all_uses_with(fulls[shard])
            body.graph.erase_node(inner)
        for position in reversed(range(len(placeholders))):
            if not placeholders[position].users:
                body.graph.erase_node(placeholders.pop(position))
                operands.pop(position)
        call.args = (body_node, *operands)
        body.recompile()


def _refuse_nested(gm: GraphModule) -> None:
    for name, body in gm.named_modules():
        if body is not gm and isinstance(body, GraphModule) and (nested := unshards(body.graph.nodes)):
            raise NotImplementedError(
                f"Parameter {Unshard.of(nested[0]).name} is read inside the body {name} of a higher-order operator (such as "
                "torch.cond). Read it before, and pass it in as an operand."
            )


def deduplicate(gm: GraphModule) -> None:
    """Leave one ``unshard`` for each shard, at the top of a Dynamo graph. In place."""
    graph = gm.graph
    _lift_out_of_checkpoints(graph, gm)
    _refuse_nested(gm)
    placeholders = graph.find_nodes(op="placeholder")
    if not placeholders:
        return
    last = placeholders[-1]
    kept: dict[Node, Node] = {}
    for node in unshards(graph.nodes):
        if node.target is unshard_extension:
            mark_coding(node)
        first = kept.setdefault(Unshard.of(node).shard, node)
        if first is node:
            last.append(node)
            last = node
        else:
            node.replace_all_uses_with(first)
            graph.erase_node(node)
    gm.recompile()
