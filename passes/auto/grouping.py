"""Grouping: which parameters could share a collective, instead of those of one unit.

Each collective costs a latency, and time for its size. Merging small buckets saves latencies. The pieces of a split bucket
start sooner, hide better and hold less memory. So each grouping has a target size for its buckets: a multiple of the size whose
transfer takes as long as the latency.

- Smaller buckets merge with their neighbours, in the order in which the graph needs them, until they reach the target size.
- Larger buckets split between parameters, in memory order, into pieces of at least the target size.

Buckets merge only if the graph treats them alike. Gathers need the same group and dtype, and all or none are kept. Reductions
need the same plan and equal divide factors. Buckets of units with a communication hook stay as they are, as the hook is called
with them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..ir.ops import ReduceGrad, Unshard
from ..ir.plan import Plan, PlannedReduction
from ..models.cost_model import layout_of
from ..models.hardware import Hardware
from ..transforms.bucket import Bucket, Buckets, Group, gather_key, regroup, sink_derived

# Target sizes, as multiples of the size at which latency is half of the time. With them, latency is 1/65, 1/17, 1/5 and 1/2 of
# the time.
_MULTIPLES = (64, 16, 4, 1)


@dataclass(frozen=True)
class Grouping:
    """The parameters that share each gather and each reduction."""

    gathers: tuple[Group, ...]
    reductions: tuple[Group, ...]


@dataclass(frozen=True)
class Item:
    """Parameters that share a collective by default.

    Attributes:
        members: the parameters.
        key: equal for items that may merge; None: the item stays as it is.
        place: the position in the graph of the first reader of its parameters, or of the last of its gradients.
        sizes: the unsharded bytes of each parameter.
        spec: the operator of its first parameter.
    """

    members: Group
    key: Hashable
    place: int
    sizes: tuple[int, ...]
    spec: Unshard | ReduceGrad


def groupings(
    graph: Graph, buckets: Buckets, plan: Plan, default: Grouping, hardware: Hardware, *, smallest: bool
) -> list[Grouping]:
    """List the groupings to choose from, without duplicates.

    Args:
        graph: a graph after the preparing passes. Views of parameters sink to their readers in it.
        buckets: the graph's buckets.
        plan: the plan of the graph.
        default: the first grouping, from whose groups the others are made.
        hardware: the machine that the graph runs on.
        smallest: whether to add the grouping with every parameter by itself, which needs the least memory.
    """
    sink_derived(graph)
    gathers = gather_items(graph, buckets.gathers, default.gathers, plan)
    reductions = reduction_items(graph, buckets.reductions, default.reductions, plan)
    found = [default]
    for multiple in (*_MULTIPLES, *((0,) if smallest else ())):
        by_size = (_group_by_size(items, lambda item: multiple * _knee(item.spec, hardware)) for items in (gathers, reductions))  # noqa: B023
        found.append(Grouping(*by_size))
    return list(dict.fromkeys(found))


def gather_items(graph: Graph, buckets: Sequence[Bucket], groups: Sequence[Group], plan: Plan) -> list[Item]:
    """Make an item for each group of a graph's gathers. Views of parameters must have sunk to their readers."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for group, bucket in zip(groups, regroup(buckets, groups), strict=True):
        specs = [Unshard.of(node) for node in bucket.nodes]
        first = min(place[reader] for node in bucket.nodes for reader in node.users)
        key = (plan.gathers[group[0][0]], gather_key(specs[0]))
        items.append(Item(group, key, first, tuple(_size(spec, spec.shard) for spec in specs), specs[0]))
    return items


def reduction_items(graph: Graph, buckets: Sequence[Bucket], groups: Sequence[Group], plan: Plan) -> list[Item]:
    """Make an item for each group of a graph's reductions."""
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for group, bucket in zip(groups, regroup(buckets, groups), strict=True):
        specs = [ReduceGrad.of(node) for node in bucket.nodes]
        last = max(place[spec.grad] for spec in specs)
        key = _reduction_key(specs[0], plan.reductions[group[0][0]])
        items.append(Item(group, key, last, tuple(_size(spec, spec.grad) for spec in specs), specs[0]))
    return items


def _size(spec: Unshard | ReduceGrad, like: Node) -> int:
    """Count the bytes of an unsharded parameter or gradient without padding, which are the same for any number of ranks."""
    return math.prod(spec.shape) * like.meta["val"].dtype.itemsize


def _reduction_key(spec: ReduceGrad, planned: PlannedReduction) -> Hashable:
    if not planned.reduction.may_regroup or planned.factor_class is None:
        return None
    dtypes = spec.grad.meta["val"].dtype, spec.grad_dtype
    return planned.reduction, planned.factor_class, dtypes, spec.group, spec.replicate_group, spec.node_group


def _knee(spec: Unshard | ReduceGrad, hardware: Hardware) -> float:
    """Return the unsharded bytes whose transfer takes as long as the start of a collective.

    A reduction over replicas also all-reduces shards. Its result is the larger of the sizes for the reduce-scatter and for the
    all-reduce.
    """
    if isinstance(spec, Unshard):
        return hardware.knee_bytes("all_gather", layout_of(spec.group))
    knee = hardware.knee_bytes("reduce_scatter", layout_of(spec.group))
    if not spec.replicate_group:
        return knee
    return max(knee, group_size(spec.group) * hardware.knee_bytes("all_reduce", layout_of(spec.replicate_group)))


def _group_by_size(items: Sequence[Item], target_of: Callable[[Item], float]) -> tuple[Group, ...]:
    groups: list[Group] = []
    small = []
    for item in items:
        size, target = sum(item.sizes), target_of(item)
        if item.key is None:
            groups.append(item.members)
        elif size >= 2 * target:
            groups += _pieces(item.members, item.sizes, target)
        else:
            small.append(item)
    return in_order([*groups, *merge_neighbours(small, target_of)], items)


def in_order(groups: Sequence[Group], items: Sequence[Item]) -> tuple[Group, ...]:
    """Sort groups made of items into the order in which the graph needs them."""
    place = {member: item.place for item in items for member in item.members}
    return tuple(sorted(groups, key=lambda group: (place[group[0]], group)))


def by_place(items: Iterable[Item]) -> list[Item]:
    """Sort items into the order in which the graph needs them."""
    return sorted(items, key=lambda item: (item.place, item.members))


def merge_neighbours(items: Sequence[Item], target_of: Callable[[Item], float]) -> list[Group]:
    """Merge each item with the items of the same key that follow it, until together they have the target size.

    Buckets that are not among ``items`` do not count: small ones merge across a large one between them.
    """
    groups: list[Group] = []
    key: Hashable = None
    merged = 0
    for item in by_place(items):
        if groups and item.key == key and merged < target_of(item):
            groups[-1] += item.members
            merged += sum(item.sizes)
        else:
            groups.append(item.members)
            key, merged = item.key, sum(item.sizes)
    return groups


def _pieces(members: Group, sizes: Sequence[int], target: float) -> list[Group]:
    """Cut a bucket's parameters into runs of at least the target size each."""
    pieces: list[list[tuple[int, int]]] = [[]]
    filled = 0
    left = sum(sizes)
    for member, size in zip(members, sizes, strict=True):
        if pieces[-1] and filled >= target and left >= target:
            pieces.append([])
            filled = 0
        pieces[-1].append(member)
        filled += size
        left -= size
    return list(map(tuple, pieces))
