"""Recompute regions: tell the partitioner that backward computes regions of forward again.

A region is the part of forward between two places where forward turns from one unit's parameters to another's. If layers are
units, a region is a layer. It ends where the fewest bytes cross to the next region; of several such places, at the last.

Before: a joint graph without tags on its nodes.
After:  the nodes of the chosen regions are ``MUST_RECOMPUTE``; those whose memory later regions read are ``MUST_SAVE``, as
        for a layer with a checkpoint. Backward keeps the inputs of a region, and computes the rest when it needs it.

Leaves alone regions in which a node has a tag already (activation checkpointing). In any region, random numbers, the model's
own collectives, higher-order operators and in-place operators get no tag: the partitioner decides about them as usual.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..fx.graph import derived, is_collective, is_view
from ..fx.sizes import num_bytes
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of
from ..ir.ops import Unshard, is_unshard, unshards

# Below the id of resharded parameters and above those of activation checkpointing: torch sees no checkpoint boundary.
_GRAPH_ID = (1 << 40) - 1


def units_of_parameters(graph: Graph) -> dict[Node, str]:
    """Map gathered parameters, and the nodes made of them alone, to their units."""
    unit_of: dict[Node, str] = {}
    for made in derived(graph, unshards(graph.nodes)):
        sources = (unit_of[source] for source in made.all_input_nodes if source in unit_of)
        unit_of[made] = Unshard.of(made).unit if is_unshard(made) else next(sources)
    return unit_of


def forward_regions(graph: Graph, num_forward_outputs: int) -> list[list[Node]]:
    """Cut the forward of a joint graph into regions, each a list of nodes.

    Args:
        graph: the graph.
        num_forward_outputs: the number of forward's outputs, which are the graph's first ones.
    """
    unit_of = units_of_parameters(graph)
    outputs: Any = graph.output_node().args[0]
    computed = _ancestors(outputs[:num_forward_outputs])
    forward = [node for node in graph.nodes if node in computed and node.op == "call_function" and node not in unit_of]
    readers = [
        (unit_of[source], place) for place, node in enumerate(forward) for source in node.all_input_nodes if source in unit_of
    ]
    turns = [list(places) for _, places in itertools.groupby(readers, key=operator.itemgetter(0))]
    crossing = _crossing_bytes(forward)
    ends = [
        min(range(after[0][1], before[-1][1], -1), key=crossing.__getitem__, default=after[0][1])
        for before, after in itertools.pairwise(turns)
    ]
    places = dict.fromkeys([0, *ends, len(forward)])
    return [forward[begin:end] for begin, end in itertools.pairwise(places)]


def is_open(region: Sequence[Node]) -> bool:
    """Return whether no node of a region has a tag, so that the region can be recomputed as a whole."""
    return not any("recompute" in node.meta for node in region)


def recompute_regions(regions: Sequence[Sequence[Node]], numbers: Collection[int]) -> None:
    """Tag regions of a joint graph for the partitioner, before :mod:`~passes.transforms.reshard_after_forward`. In place.

    Args:
        regions: all regions, from :func:`forward_regions`.
        numbers: the indices of the regions to recompute.
    """
    region_of = {node: number for number, region in enumerate(regions) for node in region}
    for number in sorted(numbers):
        region = regions[number]
        if not is_open(region):
            continue
        read_later = [node for node in region if any(region_of.get(user, number) > number for user in node.users)]
        kept = set(map(_memory, read_later))
        for node in region:
            if _may_run_again(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if node in kept else CheckpointPolicy.MUST_RECOMPUTE
                node.meta["ac_graph_id"] = _GRAPH_ID


def _ancestors(nodes: Iterable[Any]) -> set[Node]:
    """Return ``nodes`` and all nodes that they are computed from."""
    found: set[Node] = set()
    waiting = [node for node in nodes if isinstance(node, Node)]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found


def _crossing_bytes(nodes: Sequence[Node]) -> list[int]:
    """Count, for each place between nodes, the bytes that are made before it and read after it."""
    place_of = {node: place for place, node in enumerate(nodes)}
    last: dict[Node, int] = {}
    for place, node in enumerate(nodes):
        for source in node.all_input_nodes:
            if source in place_of:
                last[_memory(source)] = place
    changes = [0] * (len(nodes) + 1)
    for node, read in last.items():
        if node in place_of:
            size = int(num_bytes(node.meta.get("val")))
            changes[place_of[node] + 1] += size
            changes[read + 1] -= size
    return list(itertools.accumulate(changes))


def _memory(node: Node) -> Node:
    """Return the node in whose memory a value lies. An element of a tuple (``getitem``) has memory of its own."""
    while is_view(node) and node.target is not operator.getitem:
        node = node.all_input_nodes[0]
    return node


def _may_run_again(node: Node) -> bool:
    """Return whether running a node again in backward gives the same result and has no other effect."""
    if node.target is operator.getitem:
        return _may_run_again(node.all_input_nodes[0])
    if not isinstance(node.target, OpOverload) or is_collective(node) or schema_of(node.target).is_mutable:
        return False
    return torch.Tag.nondeterministic_seeded not in node.target.tags
