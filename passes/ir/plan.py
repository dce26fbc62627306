"""The plan: the communication of one call of a forward or backward graph.

A plan is known when the graph is called, not when it is traced. It depends on flags, which users set at any time, and on the
state that earlier microbatches left. Each distinct plan of a graph is lowered once, on first use; equal plans share the lowered
graph. So plans do not contain values that change from step to step in ordinary training, such as divide factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .reduction import Reduction
from .update import UpdateTarget


class Gather(Enum):
    """The plan of a graph for the parameters of a bucket.

    Attributes:
        GATHER: gather the parameters.
        KEEP: gather the parameters, and return them for later graphs.
        REUSE: take parameters that are gathered already; no collective.
    """

    GATHER = "gather"
    KEEP = "keep"
    REUSE = "reuse"


@dataclass(frozen=True)
class Plan:
    """The plan of a graph.

    Attributes:
        gathers, reductions: an entry for each bucket, in the order in which :mod:`passes.transforms.bucket` finds the buckets.
        prefetch: for each unit with a prefetch list, its name in the graph, and the names of the units whose gathers start when
            its compute starts. Other units prefetch the next gather.
        max_pending_reductions: the most reduce-scatters in flight; None: the limits of :mod:`passes.transforms.schedule`.
        factor_classes: a number for each reduction, equal where the divide factors have equal values. Only
            :mod:`passes.auto.grouping` reads them; empty if buckets do not merge.
        updates: for each reduction, where the update of each of its parameters writes; an empty entry: the reduction updates
            nothing. Empty: no reduction updates parameters.
        orders: for each reduction, the positions of its gradients in the bucket, in the order of the flat shard. Empty: the
            order in which backward computes the gradients.
    """

    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    prefetch: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_pending_reductions: int | None = None
    factor_classes: tuple[int, ...] = ()
    updates: tuple[tuple[UpdateTarget, ...], ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    @property
    def has_hooks(self) -> bool:
        """True if gradients pass through functions of the user."""
        return any(reduction.has_hooks for reduction in self.reductions)
