"""Auto schedule: choose buckets and issue points by the cost model, under a memory limit.

Before: gathers and reductions finish where they start, in the buckets of a :class:`~passes.auto.grouping.Grouping`.
After:  - a gather starts at the last boundary that still hides it behind compute, with a margin, and no earlier than its link
          is free. A boundary is where something else communicates, or the top;
        - a reduction starts when its gradients exist, and is waited for at the first boundary after its end, with a margin;
        - while more bytes live than the limit allows, at the last place over the limit, the gather in flight that is needed
          last starts after that place. If there is none, the oldest reduction in flight is waited for before the places over
          the limit.

:func:`find_grouping` does this for each grouping. Among the fastest grouping and those that are about as fast, it takes the one
with the least memory. Among equals, it takes the fastest, then the one with the fewest collectives. The choice depends only on
the graph, the plan, the limit and the numbers of :class:`~passes.models.hardware.Hardware`, so ranks with the same ones choose
the same.

:mod:`passes.auto.placement` defines where communication may stand.

Leaves alone collectives of the model's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch.fx import Graph

from ..fx.emit import replaying_traces
from ..fx.graph import copy_of
from ..ir.plan import Plan
from ..ir.work import BucketName
from ..models.hardware import Hardware
from ..transforms.bucket import find_buckets
from .grouping import Grouping, groupings
from .placement import Placement, Result

# Schedules that take at most 1/50 longer than the fastest count as equally fast, as the model is not exact.
_AS_GOOD = 50

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class AutoSchedule:
    """The machine and the limit to schedule for.

    Attributes:
        hardware: the machine.
        memory_limit: the most bytes that may live at once in one graph, as :mod:`passes.models.memory_model` counts; None: no
            limit.
    """

    hardware: Hardware
    memory_limit: int | None = None


def find_grouping(
    graph: Graph, plan: Plan, default: Grouping, auto: AutoSchedule, insert: Callable[[Graph, Grouping], None]
) -> Grouping:
    """Find the best grouping of a graph's collectives.

    Args:
        graph: a graph after the preparing passes; it is not changed.
        plan: the plan of the graph.
        default: the grouping of the default schedule.
        auto: the machine and the limit to schedule for.
        insert: writes the collectives of a grouping into a graph.

    Raises:
        ValueError: the memory limit is too low for any schedule.
    """
    limit = auto.memory_limit
    fitting: list[tuple[tuple[int, int, int], Grouping]] = []
    too_large: list[tuple[int, BucketName | None]] = []
    with replaying_traces(fresh=False):
        sunk = copy_of(graph)
        for grouping in groupings(sunk, find_buckets(sunk), plan, default, auto.hardware, smallest=limit is not None):
            trial = copy_of(graph)
            insert(trial, grouping)
            placement = Placement(trial, auto.hardware)
            # Nothing is in flight yet: no schedule needs less memory.
            needed = placement.live_bytes().peak
            if limit is not None and needed > limit:
                too_large.append((needed, placement.largest_at_peak()))
                continue
            result = placement.place(limit)
            logger.debug("%d gathers, %d reductions: %s", len(grouping.gathers), len(grouping.reductions), result)
            fitting.append(((result.total_ns, result.collectives, result.peak_bytes), grouping))
    if not fitting:
        assert limit is not None
        raise ValueError(_too_low(limit, *min(too_large, key=lambda held: held[0])))
    first = min(total for (total, _, _), _ in fitting)
    as_good = [
        (peak, total, collectives, grouping)
        for (total, collectives, peak), grouping in fitting
        if total <= first + first // _AS_GOOD
    ]
    return min(as_good, key=lambda scored: scored[:3])[3]


def schedule_automatically(graph: Graph, auto: AutoSchedule) -> Result:
    """Move the collectives of a graph, in the grouping from :func:`find_grouping`, to their issue points. In place."""
    placement = Placement(graph, auto.hardware)
    result = placement.place(auto.memory_limit)
    placement.write()
    logger.info("automatic schedule: %s", result)
    return result


def _too_low(limit: int, needed: int, bucket: BucketName | None) -> str:
    what = "of activations alone" if bucket is None else f"most of them for unit {'+'.join(bucket.unit_buckets)}"
    return (
        f"options['memory_limit'] = {limit} is too low: with nothing in flight and every parameter by itself, a graph of this "
        f"model still needs {needed} bytes at once, {what}. Raise the limit to that at least, or have less live at once: "
        "smaller parameters in that unit, a smaller batch, activation checkpointing."
    )
