"""Arrangement: give a graph the buckets and the order of collectives that another graph has.

Ranks may read the parameters of the same units in different orders: one rank has an image, and another none. Then their graphs
have the same units' collectives, in other buckets or in another order. One of the ranks can do as the other does:

1. its graph is bucketed as the other's, by the names of units and parameters (:func:`grouping_of`);
2. its nodes are sorted so that collectives come in the other's order (:func:`order_collectives`). All other nodes keep their
   order as far as the values permit that they read.

That works unless a collective needs a result of one that comes after it in the other graph, as where ranks call units in
different orders. Such a graph raises :class:`CannotArrange`.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from ..auto.grouping import Grouping, Item, gather_items, reduction_items
from ..fx.graph import memory_of
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of
from ..ir.plan import Plan
from ..transforms.bucket import Bucket, Buckets, Group, members_of
from .collective_sequence import Collective, by_unit, collectives_of


class CannotArrange(ValueError):
    """A graph cannot have the buckets, or the order of collectives, of another graph."""


# The operator, whether it gathers parameters, and the parts of the bucket's name.
_Key = tuple[str, bool, tuple[tuple[str, int | None], ...]]
# The parameters of a bucket: each by its unit's bucket, and by its name within the unit.
_Members = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Arrangement:
    """The buckets of a graph, and the order of its collectives.

    Attributes:
        collectives: the operator of each collective, whether it gathers parameters, and the parts of its bucket's name; the
            model's own have no parts.
        buckets: whether it is gathered, and its parameters, for each bucket in order. Numbers of pieces do not tell them:
            which small pieces share a collective depends on the order of a graph.
        by_unit: the collectives as :func:`~.collective_sequence.by_unit` lists them. Graphs in which they are equal may have
            the same arrangement.
    """

    collectives: tuple[_Key, ...]
    buckets: tuple[tuple[bool, _Members], ...]
    by_unit: tuple[str, ...]

    @staticmethod
    def of(sequence: Sequence[Collective]) -> Arrangement:
        """Return the arrangement of a graph with these collectives."""
        buckets = dict.fromkeys((one.gathers, one.members) for one in sequence if one.members)
        return Arrangement(tuple(map(_key, sequence)), tuple(buckets), tuple(map(str, by_unit(sequence))))

    def fields(self) -> tuple[Any, ...]:
        """Return the fields, as JSON can write them."""
        return self.collectives, self.buckets, self.by_unit

    @staticmethod
    def from_lists(lists: Any) -> Arrangement:
        """Make an arrangement of the lists that JSON reads for :meth:`fields`."""
        collectives, buckets, units = lists
        keys = (
            (operation, gathers, tuple((name, piece) for name, piece in parts)) for operation, gathers, parts in collectives
        )
        named = ((gathers, tuple((unit, name) for unit, name in members)) for gathers, members in buckets)
        return Arrangement(tuple(keys), tuple(named), tuple(units))

    def members(self, *, gathers: bool) -> list[_Members]:
        """Return the parameters of each bucket of gathers, or of reductions, in order."""
        return [members for is_gather, members in self.buckets if is_gather is gathers]


def _key(collective: Collective) -> _Key:
    return collective.operation, collective.gathers, () if collective.bucket is None else collective.bucket.parts


def grouping_of(arrangement: Arrangement, graph: Graph, buckets: Buckets, plan: Plan, default: Grouping) -> Grouping:
    """Group the parameters of a graph as an arrangement has them.

    Args:
        arrangement: the arrangement.
        graph: a graph after the preparing passes. Views of parameters must have sunk to their readers.
        buckets: the graph's buckets.
        plan: the plan of the graph.
        default: the grouping in which no units are merged. What does not communicate is grouped as there.

    Raises:
        CannotArrange: the graph has other parameters, or treats those unlike that would share a collective.
    """
    gathers = gather_items(graph, buckets.gathers, default.gathers, plan)
    reductions = reduction_items(graph, buckets.reductions, default.reductions, plan)
    return Grouping(
        _regrouped(buckets.gathers, gathers, arrangement.members(gathers=True)),
        _regrouped(buckets.reductions, reductions, arrangement.members(gathers=False)),
    )


def _regrouped(buckets: Sequence[Bucket], items: Sequence[Item], wanted: Sequence[_Members]) -> tuple[Group, ...]:
    item_of = {member: item for item in items for member in item.members}
    left: dict[tuple[str, str], deque[tuple[int, int]]] = {}
    # The tensors that one parameter sends have one name. Their order is the same on all ranks.
    for member, named in zip(item_of, *members_of(buckets, [tuple(item_of)]), strict=True):
        left.setdefault(named, deque()).append(member)
    found: list[Group] = []
    for members in wanted:
        group = tuple(left[one].popleft() for one in members if left.get(one))
        keys = {item_of[member].key for member in group}
        splits = None in keys and set(group) != set(item_of[group[0]].members)
        if len(group) < len(members) or len(keys) > 1 or splits:
            raise CannotArrange(f"the graph cannot have the bucket of {', '.join(map(' '.join, members))}")
        found.append(group)
    taken = set(itertools.chain.from_iterable(found))
    return (*found, *(item.members for item in items if taken.isdisjoint(item.members)))


def order_collectives(graph: Graph, arrangement: Arrangement) -> None:
    """Sort the nodes of a graph so that its collectives come in the order of an arrangement. In place.

    Raises:
        CannotArrange: the graph has other collectives, or a collective needs the result of one that is to follow it.
    """
    waiting: dict[Any, deque[Node]] = {}
    for node, collective in collectives_of(graph, {}):
        waiting.setdefault(_key(collective), deque()).append(node)
    if Counter(arrangement.collectives) != {key: len(nodes) for key, nodes in waiting.items()}:
        raise CannotArrange("the graph has other collectives")
    chain = [waiting[key].popleft() for key in arrangement.collectives]
    _sort(graph, [*itertools.pairwise(chain), *_writes(graph)])


def _writes(graph: Graph) -> list[tuple[Node, Node]]:
    """Return pairs of nodes that keep their order as one of the two writes memory which the other reads."""
    readers: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for source in node.all_input_nodes:
            readers.setdefault(memory_of(source), []).append(node)
    pairs = []
    for node in graph.nodes:
        schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
        for index, argument in enumerate(schema.arguments if schema is not None else ()):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(node.args[index], Node):
                others = [other for other in readers[memory_of(node.args[index])] if other is not node]  # type: ignore[arg-type]
                pairs += [(other, node) if other < node else (node, other) for other in others]
    return pairs


def _sort(graph: Graph, pairs: Sequence[tuple[Node, Node]]) -> None:
    """Sort nodes by the values that they read and by ``pairs`` of an earlier and a later node. Else they keep their order."""
    *nodes, output = graph.nodes
    place = {node: index for index, node in enumerate(nodes)}
    followers: dict[Node, list[Node]] = {node: [] for node in nodes}
    edges = [(source, node) for node in nodes for source in node.all_input_nodes]
    for earlier, later in (*edges, *((one, other) for one, other in pairs if other is not output)):
        followers[earlier].append(later)
    missing = Counter(later for laters in followers.values() for later in laters)
    ready = [place[node] for node in nodes if not missing[node]]
    found = []
    while ready:
        node = nodes[heapq.heappop(ready)]
        found.append(node)
        for later in followers[node]:
            missing[later] -= 1
            if not missing[later]:
                heapq.heappush(ready, place[later])
    if len(found) < len(nodes):
        raise CannotArrange("a collective needs the result of one that is to follow it")
    for node in found:
        output.prepend(node)
