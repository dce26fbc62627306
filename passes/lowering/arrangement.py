"""Arrangement: give a graph the buckets and the order of collectives that another graph has.

Ranks may read the parameters of the same units in different orders: one rank has an image, and another none. Then their graphs
have the same units' collectives, in other buckets or in another order. One of the ranks can do as the other does:

1. its graph is bucketed as the other's, by the names of units (:func:`grouping_of`);
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
from ..ir.work import BucketName
from ..transforms.bucket import Bucket, Buckets, Group, regroup
from .collective_sequence import Collective, by_unit, collectives_of


class CannotArrange(ValueError):
    """A graph cannot have the buckets, or the order of collectives, of another graph."""


# The operator, whether it gathers parameters, and the parts of the bucket's name.
_Key = tuple[str, bool, tuple[tuple[str, int | None], ...]]


@dataclass(frozen=True)
class Arrangement:
    """The buckets of a graph, and the order of its collectives.

    Attributes:
        collectives: the operator of each collective, whether it gathers parameters, and the parts of its bucket's name; the
            model's own have no parts.
        by_unit: the collectives as :func:`~.collective_sequence.by_unit` lists them. Graphs in which they are equal may have
            the same arrangement.
    """

    collectives: tuple[_Key, ...]
    by_unit: tuple[str, ...]

    @staticmethod
    def of(sequence: Sequence[Collective]) -> Arrangement:
        """Return the arrangement of a graph with these collectives."""
        return Arrangement(tuple(map(_key, sequence)), tuple(map(str, by_unit(sequence))))

    def fields(self) -> tuple[Any, ...]:
        """Return the fields, as JSON can write them."""
        return self.collectives, self.by_unit

    @staticmethod
    def from_lists(lists: Any) -> Arrangement:
        """Make an arrangement of the lists that JSON reads for :meth:`fields`."""
        collectives, units = lists
        keys = (
            (operation, gathers, tuple((name, piece) for name, piece in parts)) for operation, gathers, parts in collectives
        )
        return Arrangement(tuple(keys), tuple(units))

    def buckets(self, *, gathers: bool) -> list[BucketName]:
        """Return the names of the buckets of gathers, or of reductions, in order."""
        found = dict.fromkeys(parts for _, is_gather, parts in self.collectives if is_gather is gathers and parts)
        return list(map(BucketName, found))


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
        _regrouped(buckets.gathers, gathers, arrangement.buckets(gathers=True)),
        _regrouped(buckets.reductions, reductions, arrangement.buckets(gathers=False)),
    )


def _regrouped(buckets: Sequence[Bucket], items: Sequence[Item], wanted: Sequence[BucketName]) -> tuple[Group, ...]:
    named = regroup(buckets, [item.members for item in items])
    item_of = {bucket.name: item for bucket, item in zip(named, items, strict=True)}
    found = []
    for name in wanted:
        # A unit that is whole in the other graph may have been split and merged again.
        shares = [[own for own in item_of if own.parts[0] == part or (own.parts[0][0], None) == part] for part in name.parts]
        items = [item_of.pop(own) for share in shares for own in share]
        keys = {item.key for item in items}
        if not all(shares) or (len(items) > 1 and (len(keys) > 1 or None in keys)):
            raise CannotArrange(f"the graph cannot have the bucket {name}")
        found.append(tuple(itertools.chain.from_iterable(item.members for item in items)))
    return (*found, *(item.members for item in item_of.values()))


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
