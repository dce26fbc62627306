"""Grouping: which parameters could share a collective, other than those of one unit.

A collective costs a latency, whatever its size. Below the size that takes as long as the latency, merging neighbours is a gain;
far above it, pieces can start sooner, hide better and hold less memory. So the groupings to choose from have one number, the
size that a bucket should have, as a multiple of that size:

- smaller buckets merge with their neighbours, in the order in which the graph needs them, until they have it;
- larger ones split at parameters, in the order in which these lie, into pieces that have it.

Buckets merge only where the graph does the same with them: gathers over the same group in the same dtype, which are kept or
not; reductions of the same plan, whose divide factors are the same numbers. Communication hooks see the buckets of the units.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch.distributed as dist
from torch.fx import Graph

from .bucket import Bucket, Group, gather_buckets, reduction_buckets, sink_derived, whole_buckets
from .collectives import group_size, resolve_group
from .hardware import Hardware, Link
from .ops import ReduceGrad, Unshard
from .sizes import num_bytes
from .sync_plan import Gather, Plan, Reduction

# Of the size at which latency is half of the time: it then is a hundredth, a twentieth, a fifth, a half.
_MULTIPLES = (64, 16, 4, 1)


@dataclass(frozen=True)
class Grouping:
    """The parameters that share each gather and each reduction."""

    gathers: tuple[Group, ...]
    reductions: tuple[Group, ...]


@dataclass(frozen=True)
class _Item:
    """A unit's bucket.

    Attributes:
        index: its index.
        key: equal for buckets that may merge; None: it stays as it is.
        place: where the graph needs it first, or has all of it.
        sizes: bytes of its parameters, unsharded.
        knee: bytes that travel in the time of the latency.
    """

    index: int
    key: Hashable
    place: int
    sizes: tuple[int, ...]
    knee: float


def groupings(graph: Graph, plan: Plan, hardware: Hardware, *, smallest: bool) -> list[Grouping]:
    """The groupings to choose from, each once; the first is that of the units.

    Args:
        graph: a graph after the preparing passes. Views of parameters sink to their readers in it.
        plan: what the graph does.
        hardware: what it runs on.
        smallest: also every parameter by itself, which needs the least memory.
    """
    sink_derived(graph)
    gathers, reductions = gather_buckets(graph), reduction_buckets(graph)
    gather_items = _gather_items(graph, gathers, plan, hardware)
    reduction_items = _reduction_items(graph, reductions, plan, hardware)
    gathered = {item.index for item in gather_items}
    found = [
        Grouping(tuple(group for group in whole_buckets(gathers) if group[0][0] in gathered), tuple(whole_buckets(reductions)))
    ]
    for multiple in (*_MULTIPLES, *((0,) if smallest else ())):
        found.append(Grouping(_group_by_size(gather_items, multiple), _group_by_size(reduction_items, multiple)))
    return list(dict.fromkeys(found))


def _gather_items(graph: Graph, buckets: Sequence[Bucket], plan: Plan, hardware: Hardware) -> list[_Item]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for index, bucket in enumerate(buckets):
        if plan.gathers[index] is Gather.REUSE:
            continue
        spec = Unshard.of(bucket.nodes[0])
        sizes = [num_bytes(shard.meta["val"]) * group_size(spec.group) for shard in bucket.shards]
        key = (plan.gathers[index], spec.group, spec.shard.meta["val"].dtype)
        first = min(place[reader] for node in bucket.nodes for reader in node.users)
        items.append(_Item(index, key, first, tuple(sizes), _knee(hardware, spec.group, lambda links: links.all_gather)))
    return items


def _reduction_items(graph: Graph, buckets: Sequence[Bucket], plan: Plan, hardware: Hardware) -> list[_Item]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for index, bucket in enumerate(buckets):
        specs = [ReduceGrad.of(node) for node in bucket.nodes]
        sizes = [num_bytes(spec.grad.meta["val"]) for spec in specs]
        last = max(place[spec.grad] for spec in specs)
        knee = _knee(hardware, specs[0].group, lambda links: links.reduce_scatter)
        items.append(_Item(index, _reduction_key(specs[0], plan, index), last, tuple(sizes), knee))
    return items


def _reduction_key(spec: ReduceGrad, plan: Plan, index: int) -> Hashable:
    reduction: Reduction = plan.reductions[index]
    if not reduction.may_regroup:
        return None
    dtypes = spec.grad.meta["val"].dtype, spec.grad_dtype
    return reduction, plan.factor_classes[index], dtypes, spec.group, spec.replicate_group


def _knee(hardware: Hardware, group: str, kind: Callable[..., Link]) -> float:
    link = kind(hardware.links(dist.get_process_group_ranks(resolve_group(group))))
    return link.latency_s * link.bytes_per_s


def _group_by_size(items: Sequence[_Item], multiple: int) -> tuple[Group, ...]:
    groups: list[list[tuple[int, int]]] = []
    merging: Hashable = None
    merged = 0
    for item in sorted(items, key=lambda item: (item.place, item.index)):
        size, target = sum(item.sizes), multiple * item.knee
        members = [(item.index, position) for position in range(len(item.sizes))]
        if item.key is None or size >= 2 * target:
            groups += [members] if item.key is None else _pieces(members, item.sizes, target)
            merging = None
        elif merging is not None and item.key == merging and merged < target:
            groups[-1] += members
            merged += size
        else:
            groups.append(members)
            merging, merged = item.key, size
    return tuple(map(tuple, groups))


def _pieces(members: Sequence[tuple[int, int]], sizes: Sequence[int], target: float) -> list[list[tuple[int, int]]]:
    """Runs of a bucket's parameters of at least the target size each."""
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
    return pieces
