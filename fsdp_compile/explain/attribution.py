"""Attribution: the unit that each node of a graph works for.

A node that gathers, reduces or copies for a bucket is marked with the bucket, and belongs to the bucket's unit. A node of the
model belongs to a unit if it reads a gathered parameter of the unit, or makes the gradient of one. In forward, other nodes
belong to the unit before them. In backward, where the same work runs in reverse, they belong to the unit after them. A copy of
an activation to the host belongs to the unit that makes the activation, and the copy back to the unit that first reads it in
backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Graph, Node

from passes.collectives.host_copies import fetch, offload
from passes.fx.graph import is_view, memory_of
from passes.ir.work import MAKES_PARAMETERS, BucketName, Role, bucket, gradient_of, role

from ..compiler.calls import UnitFacts

#: The unit of nodes in graphs where nothing is sharded.
NO_UNIT = "(no unit)"
_LOCAL = (Role.START_REDUCE, Role.ACCUMULATE)


def unit_of_bucket(name: str, units: Collection[str]) -> str:
    """Return the unit that the bucket ``name`` belongs to. A second bucket of unit "blocks" is named "blocks.1"."""
    return name if name in units or name.rpartition(".")[0] not in units else name.rpartition(".")[0]


def shares(name: BucketName, units: Collection[str], shard_bytes: Mapping[str, int]) -> dict[str, float]:
    """Return each unit's share of a bucket, by name. Units divide a common bucket in proportion to their shards' bytes."""
    members = dict.fromkeys(unit_of_bucket(one, units) for one in name.unit_buckets)
    sizes = {unit: shard_bytes.get(unit, 0) or 1 for unit in members}
    return {unit: size / sum(sizes.values()) for unit, size in sizes.items()}


def units_of_nodes(graph: Graph, units: Collection[str], facts: Sequence[UnitFacts], *, is_backward: bool) -> dict[Node, str]:
    """Return the unit of each node, by the unit's name in the graph.

    Args:
        graph: a lowered graph.
        units: the names of its units.
        facts: the facts of the model's units, which identify parameters that are inputs because they are gathered already.
        is_backward: whether ``graph`` is a backward graph.
    """
    order = list(reversed(graph.nodes)) if is_backward else list(graph.nodes)
    parameters = {f"full_{name}".replace(".", "_"): unit.name for unit in facts for name in unit.parameters}
    anchors: dict[Node, str] = {}
    for node in graph.nodes:
        anchor = _anchor(node, units, parameters)
        if anchor is not None:
            anchors[node] = anchor
    current = next((anchors[node] for node in order if node in anchors), NO_UNIT)
    found = {}
    for node in order:
        done = bucket(node)
        if done is not None:
            found[node] = unit_of_bucket(done.unit_buckets[0], units)
            continue
        current = anchors.get(node, current)
        found[node] = current
    for node in graph.nodes:
        # Copies of activations are scheduled where compute hides them, so their neighbours say nothing about their unit.
        if node.target == offload:
            found[node] = found[memory_of(node.args[0])]
        elif node.target == fetch and node.users:
            found[node] = found[next(iter(node.users))]
    return found


def _anchor(node: Node, units: Collection[str], parameters: Mapping[str, str]) -> str | None:
    """Return the unit that a node of the model belongs to by its parameters or gradients; None: its neighbours decide."""
    if bucket(node) is not None or node.op != "call_function":
        return None
    stored = gradient_of(node)
    if stored is not None:
        return unit_of_bucket(stored.unit_buckets[0], units)
    for reader in _readers(node):
        done = bucket(reader)
        if done is not None and role(reader) in _LOCAL:
            return unit_of_bucket(done.unit_buckets[0], units)
    for source in node.all_input_nodes:
        made = _memory(source)
        done = bucket(made)
        if done is not None and role(made) in MAKES_PARAMETERS:
            return unit_of_bucket(done.unit_buckets[0], units)
        if made.op == "placeholder" and made.name in parameters:
            return parameters[made.name]
    return None


def _memory(node: Node) -> Node:
    while is_view(node) and bucket(node) is None:
        node = node.all_input_nodes[0]
    return node


def _readers(node: Node) -> list[Node]:
    return [reader for user in node.users for reader in (_readers(user) if is_view(user) and bucket(user) is None else [user])]
