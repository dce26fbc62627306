"""Small units: units whose collectives take longer to start than to send share collectives.

A collective costs a latency on the wire, and host time to issue it and to wait for it, however little it sends. So a unit whose
parameters (gradients) have fewer bytes than :data:`MIN_BUCKET_BYTES` merges with the small units after it in the graph, until
they have that many together. At the bandwidth of a node's links, so many bytes take about as long as a collective takes to
start. Fewer than twice as many bytes are gathered too early and held at once.

Equal units, such as the layers of a deep model, merge in equal numbers if they need several collectives, each of which then has
at least half of that many bytes. So buckets have equal layouts, and their layers share kernels.

The rule depends only on the sizes of whole parameters, which are the same on all ranks and for any number of ranks.

Units merge only with units that are treated alike: gathered over the same group in the same dtype, kept for later graphs or
not, reduced by the same plan. These do not merge:

- gathers of a unit that has a prefetch list or is in one;
- gradients of a unit with a communication hook;
- all gradients if the reductions in flight are limited, as that limit counts units.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence

from torch.fx import Graph

from ..ir.plan import Plan
from ..transforms.bucket import Buckets, Group, sink_derived
from .grouping import Grouping, Item, by_place, gather_items, in_order, merge_neighbours, reduction_items

#: The bytes of unsharded parameters, or of their gradients, below which a unit is small.
MIN_BUCKET_BYTES = 4 << 20


def merge_small_units(graph: Graph, buckets: Buckets, plan: Plan, default: Grouping, below: int) -> Grouping:
    """Group the parameters of a graph by collective, with small units merged.

    Args:
        graph: a graph after the preparing passes. Views of parameters sink to their readers in it.
        buckets: the graph's buckets.
        plan: the plan of the graph.
        default: the grouping without merging.
        below: the bytes below which a unit is small; 0: no unit is, and the default is returned.
    """
    if not below:
        return default
    sink_derived(graph)
    alone = {unit for unit, targets in plan.prefetch for unit in (unit, *targets)}
    gathers = _merge(gather_items(graph, buckets.gathers, default.gathers, plan), below, alone)
    if plan.max_pending_reductions is not None:
        return Grouping(gathers, default.reductions)
    return Grouping(gathers, _merge(reduction_items(graph, buckets.reductions, default.reductions, plan), below))


def _merge(items: Sequence[Item], below: int, alone: Collection[str] = ()) -> tuple[Group, ...]:
    def is_small(item: Item) -> bool:
        return item.key is not None and item.spec.unit not in alone and sum(item.sizes) < below

    groups = [item.members for item in items if not is_small(item)]
    rest: list[Item] = []
    for (_, sizes), equal in itertools.groupby(by_place(filter(is_small, items)), key=lambda item: (item.key, item.sizes)):
        run = list(equal)
        counts = _even_counts(len(run), math.ceil(below / max(1, sum(sizes))))
        if not counts:
            rest += run
        following = iter(run)
        groups += [sum((item.members for item in itertools.islice(following, count)), ()) for count in counts]
    return in_order([*groups, *merge_neighbours(rest, lambda _: below)], items)


def _even_counts(count: int, most: int) -> list[int]:
    """Divide equal units among at least two collectives.

    Args:
        count: the number of units.
        most: the number of units that a collective takes at most; at least half as many.

    Returns:
        The number of units for each collective: all equal if there is such a number, else of two kinds. Empty: one collective
        takes all units.
    """
    if count <= most:
        return []
    number = next((number for number in range(most, most // 2, -1) if count % number == 0), 0)
    if number:
        return [number] * (count // number)
    collectives = math.ceil(count / most)
    number, larger = divmod(count, collectives)
    return [number + 1] * larger + [number] * (collectives - larger)
