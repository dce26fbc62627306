"""Grouping: which parameters could share a collective, other than those of one unit.

Each collective costs a latency, and time for its size. Merging small buckets saves latencies; splitting large ones into pieces
lets them start sooner, hide better and hold less memory. So each grouping has a target size for its buckets: a multiple of the
size whose transfer takes as long as the latency.

- Smaller buckets merge with their neighbours, in the order in which the graph needs them, until they have the target size.
- Larger ones split at parameters, in the order of these in memory, into pieces that have it.

Buckets merge only if the graph treats them alike: gathers over the same group in the same dtype, all of them kept or none;
reductions of the same plan with equal divide factors. Communication hooks are called with the buckets of the units.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Graph

from ..collectives.functional import group_size
from ..fx.sizes import num_bytes
from ..ir.ops import ReduceGrad, Unshard
from ..ir.plan import Plan
from ..ir.reduction import Reduction
from ..models.cost_model import layout_of
from ..models.hardware import Hardware
from ..transforms.bucket import Group, gather_buckets, gather_key, reduction_buckets, regroup, sink_derived

# Of the size at which latency is half of the time: it then is a hundredth, a twentieth, a fifth, a half.
_MULTIPLES = (64, 16, 4, 1)


@dataclass(frozen=True)
class Grouping:
    """The parameters that share each gather and each reduction."""

    gathers: tuple[Group, ...]
    reductions: tuple[Group, ...]


@dataclass(frozen=True)
class _Item:
    """Parameters that share a collective by default.

    Attributes:
        members: the parameters.
        key: equal for buckets that may merge; None: it stays as it is.
        place: where the graph needs it first, or has all of it.
        sizes: bytes of its parameters, unsharded.
        knee: bytes that travel in the time that a collective takes to start.
    """

    members: Group
    key: Hashable
    place: int
    sizes: tuple[int, ...]
    knee: float


def groupings(graph: Graph, plan: Plan, default: Grouping, hardware: Hardware, *, smallest: bool) -> list[Grouping]:
    """The groupings to choose from, each once.

    Args:
        graph: a graph after the preparing passes. Views of parameters sink to their readers in it.
        plan: what the graph does.
        default: the first of them, from whose groups others are made.
        hardware: what it runs on.
        smallest: also every parameter by itself, which needs the least memory.
    """
    sink_derived(graph)
    gather_items = _gather_items(graph, default.gathers, plan, hardware)
    reduction_items = _reduction_items(graph, default.reductions, plan, hardware)
    found = [default]
    for multiple in (*_MULTIPLES, *((0,) if smallest else ())):
        found.append(Grouping(_group_by_size(gather_items, multiple), _group_by_size(reduction_items, multiple)))
    return list(dict.fromkeys(found))


def _gather_items(graph: Graph, groups: Sequence[Group], plan: Plan, hardware: Hardware) -> list[_Item]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for group, bucket in zip(groups, regroup(gather_buckets(graph), groups), strict=True):
        index, _ = group[0]
        spec = Unshard.of(bucket.nodes[0])
        sizes = [num_bytes(shard.meta["val"]) * group_size(spec.group) for shard in bucket.shards]
        key = (plan.gathers[index], gather_key(spec))
        first = min(place[reader] for node in bucket.nodes for reader in node.users)
        items.append(_Item(group, key, first, tuple(sizes), hardware.knee_bytes("all_gather", layout_of(spec.group))))
    return items


def _reduction_items(graph: Graph, groups: Sequence[Group], plan: Plan, hardware: Hardware) -> list[_Item]:
    place = {node: index for index, node in enumerate(graph.nodes)}
    items = []
    for group, bucket in zip(groups, regroup(reduction_buckets(graph), groups), strict=True):
        index, _ = group[0]
        specs = [ReduceGrad.of(node) for node in bucket.nodes]
        sizes = [num_bytes(spec.grad.meta["val"]) for spec in specs]
        last = max(place[spec.grad] for spec in specs)
        items.append(_Item(group, _reduction_key(specs[0], plan, index), last, tuple(sizes), _knee(specs[0], hardware)))
    return items


def _reduction_key(spec: ReduceGrad, plan: Plan, index: int) -> Hashable:
    reduction: Reduction = plan.reductions[index]
    if not reduction.may_regroup:
        return None
    dtypes = spec.grad.meta["val"].dtype, spec.grad_dtype
    return reduction, plan.factor_classes[index], dtypes, spec.group, spec.replicate_group


def _knee(spec: ReduceGrad, hardware: Hardware) -> float:
    """Of a reduction: that of its reduce-scatter or, if that is larger, of the all-reduce of what this leaves."""
    knee = hardware.knee_bytes("reduce_scatter", layout_of(spec.group))
    if not spec.replicate_group:
        return knee
    return max(knee, group_size(spec.group) * hardware.knee_bytes("all_reduce", layout_of(spec.replicate_group)))


def _group_by_size(items: Sequence[_Item], multiple: int) -> tuple[Group, ...]:
    groups: list[list[tuple[int, int]]] = []
    # A large bucket between small ones does not keep them from merging.
    merging: tuple[Hashable, list[tuple[int, int]]] = None, []
    merged = 0
    for item in sorted(items, key=lambda item: (item.place, item.members)):
        size, target = sum(item.sizes), multiple * item.knee
        if item.key is None or size >= 2 * target:
            groups += [list(item.members)] if item.key is None else _pieces(item.members, item.sizes, target)
        elif item.key == merging[0] and merged < target:
            merging[1].extend(item.members)
            merged += size
        else:
            groups.append(list(item.members))
            merging, merged = (item.key, groups[-1]), size
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
