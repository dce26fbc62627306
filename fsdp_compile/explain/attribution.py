"""Attribution: which unit a node of a graph works for.

What gathers, reduces or copies for a bucket says so itself. Of the model's own nodes, those that read a gathered parameter, and
those whose result is the gradient of one, are of the parameter's unit. What stands between them belongs with what it follows in
forward, and with what it precedes in backward, where the same work runs the other way round. A copy of an activation is of the
unit that makes it, and of the one that reads it first in backward.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Graph, Node

from passes.collectives.host_copies import fetch, offload
from passes.fx.graph import is_view, memory_of
from passes.ir.work import MAKES_PARAMETERS, BucketName, Role, bucket, role

from ..compiler.calls import UnitFacts

#: What belongs to no unit: graphs in which nothing is sharded.
NO_UNIT = "(no unit)"
_LOCAL = (Role.START_REDUCE, Role.ACCUMULATE)


def unit_of_bucket(name: str, units: Collection[str]) -> str:
    """The unit of a graph that one of its buckets belongs to: a second one of "blocks" is called "blocks.1"."""
    return name if name in units or name.rpartition(".")[0] not in units else name.rpartition(".")[0]


def shares(name: BucketName, units: Collection[str], shard_bytes: Mapping[str, int]) -> dict[str, float]:
    """The part that each unit has of a bucket. Those that several units share are divided by what their shards hold."""
    members = dict.fromkeys(unit_of_bucket(one, units) for one in name.unit_buckets)
    sizes = {unit: shard_bytes.get(unit, 0) or 1 for unit in members}
    return {unit: size / sum(sizes.values()) for unit, size in sizes.items()}


def units_of_nodes(graph: Graph, units: Collection[str], facts: Sequence[UnitFacts], *, is_backward: bool) -> dict[Node, str]:
    """The unit of each node, by its name in the graph.

    Args:
        graph: a lowered graph.
        units: its units.
        facts: of the units of the model, which parameters that come in gathered are found by.
        is_backward: which of the two it is.
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
        # Copies of activations stand where they are hidden.
        if node.target == offload:
            found[node] = found[memory_of(node.args[0])]
        elif node.target == fetch and node.users:
            found[node] = found[next(iter(node.users))]
    return found


def _anchor(node: Node, units: Collection[str], parameters: Mapping[str, str]) -> str | None:
    """The unit that a node of the model must be of."""
    if bucket(node) is not None or node.op != "call_function":
        return None
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
