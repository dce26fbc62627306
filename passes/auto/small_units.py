"""Small units: those that take longer to start a collective than to send it share one.

A collective costs a latency on the wire, and host time to issue it and to wait for it, however little it sends. So a unit whose
parameters (gradients) have fewer bytes than :data:`MERGE_BELOW_BYTES` merges with the small ones that follow it in the graph,
until they have as many together. At the bandwidth of a node's links so many take about as long as a collective takes to start;
what is gathered too early, and held at once, is less than twice that.

The rule looks at the sizes of whole parameters alone, which are the same on all ranks and for any number of them.

What was said of a unit by itself keeps it to itself: a communication hook; being in a list of prefetches, or having one; and a
limit on the reductions in flight, which counts units. Units merge only with such as are treated alike: gathered over the same
group in the same dtype, lent to later graphs or not, reduced by the same plan.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Graph

from ..ir.plan import Plan
from ..transforms.bucket import Group, sink_derived
from .grouping import Grouping, Item, gather_items, in_order, merge_neighbours, reduction_items

#: Bytes of unsharded parameters, or of their gradients.
MERGE_BELOW_BYTES = 4 << 20


def merge_small_units(graph: Graph, plan: Plan, default: Grouping, below: int) -> Grouping:
    """The parameters that share each collective of a graph.

    Args:
        graph: a graph after the preparing passes. Views of parameters sink to their readers in it.
        plan: what it does.
        default: what shares a collective otherwise.
        below: bytes from which on a unit is not small; 0: no unit is.
    """
    if not below:
        return default
    sink_derived(graph)
    alone = {unit for unit, targets in plan.prefetch for unit in (unit, *targets)}
    gathers = _merge(gather_items(graph, default.gathers, plan), below, alone)
    if plan.max_pending_reductions is not None:
        return Grouping(gathers, default.reductions)
    return Grouping(gathers, _merge(reduction_items(graph, default.reductions, plan), below))


def _merge(items: Sequence[Item], below: int, alone: Collection[str] = ()) -> tuple[Group, ...]:
    def is_small(item: Item) -> bool:
        return item.key is not None and item.spec.unit not in alone and sum(item.sizes) < below

    others = [item.members for item in items if not is_small(item)]
    return in_order([*others, *merge_neighbours(list(filter(is_small, items)), lambda _: below)], items)
