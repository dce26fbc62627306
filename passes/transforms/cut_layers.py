"""Cut layers: leave the first few of many equal layers, so that a shallow graph tells of a deep one.

Before: a Dynamo graph with a chain of equal layers, in which each layer reads the output of the one before.
After:  the first layers of the chain. What read the output of the last layer reads that of the last one left.

The graph computes something else, so it is analysed and never run. A cut says which layers are missing, and
fsdp_compile/explain/depth.py repeats the work of a layer in the middle for them.

Leaves alone layers that are not in a chain, or whose outputs others read, too, and chains that the caller refuses.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch.fx import GraphModule, Node

from ..ir.equal_layers import Layer, equal_layers


@dataclass(frozen=True)
class Cut:
    """A chain of equal layers after the cut.

    Attributes:
        kept, removed: for each layer, in the order of the chain, the graph inputs that only this layer reads.
    """

    kept: Sequence[Sequence[Node]]
    removed: Sequence[Sequence[Node]]


def cut_layers(gm: GraphModule, keep: int, can_cut: Callable[[Sequence[Sequence[Node]]], bool]) -> list[Cut]:
    """Cut each chain of more than ``keep`` equal layers. In place.

    Args:
        gm: a Dynamo graph.
        keep: the number of layers to leave.
        can_cut: called with the graph inputs that each layer alone reads. If it returns False, the chain stays as it is.
    """
    found = equal_layers(gm.graph, keep + 1, Layer.is_replaceable)
    cuts = [_cut(layers, keep) for layers in found if _is_chain(layers) and can_cut([*map(_own_inputs, layers)])]
    if cuts:
        # Bodies of higher-order operators, such as checkpoints.
        gm.delete_all_unused_submodules()
        gm.recompile()
    return cuts


def _is_chain(layers: Sequence[Layer]) -> bool:
    """Return whether each layer reads outputs of the layer before, which nobody else reads, and otherwise inputs of its own or
    what all layers read."""
    links = [_link(before, after) for before, after in itertools.pairwise(layers)]
    return None not in links and all(link == links[0] for link in links)


def _link(before: Layer, after: Layer) -> list[int | None] | None:
    """Return the output of ``before`` that each input of ``after`` is, by number, or None for another input.

    Returns None for the whole if the layers are not linked, or by more than outputs of the first.
    """
    outputs, own = before.outputs, {*_own_inputs(before), *_own_inputs(after)}
    if any(before.is_outside(user) and after.is_outside(user) for node in outputs for user in node.users):
        return None
    link = [outputs.index(source) if source in outputs else None for source in after.inputs]
    others = [
        source is previous or {source, previous} <= own
        for source, previous, place in zip(after.inputs, before.inputs, link, strict=True)
        if place is None
    ]
    return link if len(others) < len(link) and all(others) else None


def _own_inputs(layer: Layer) -> list[Node]:
    """Return the inputs of the graph that only this layer reads."""
    inputs = [node for node in layer.inputs if node.op == "placeholder" and node.users]
    return [node for node in inputs if not any(map(layer.is_outside, node.users))]


def _cut(layers: Sequence[Layer], keep: int) -> Cut:
    """Cut a chain. Its last layers go, as all are equal."""
    own = [_own_inputs(layer) for layer in layers]
    for kept, removed in zip(layers[keep - 1].outputs, layers[-1].outputs, strict=True):
        removed.replace_all_uses_with(kept, delete_user_cb=layers[-1].is_outside)
    for layer in reversed(layers[keep:]):
        for node in reversed(layer.nodes):
            node.graph.erase_node(node)
    return Cut(own[:keep], own[keep:])
