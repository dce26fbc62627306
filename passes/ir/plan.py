"""The plan: what one call of a forward or backward graph does about communication.

A plan is known when the graph is called, not when it is traced: it depends on flags that users set at any time and on what
earlier microbatches left. Each distinct plan of a graph is lowered once, on first use. Plans are values: two that are equal
stand for the same lowered graph; nothing in them (a divide factor, say) changes from step to step in ordinary training.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from .reduction import Reduction
from .update import Place


class Gather(Enum):
    """The plan of a graph for the parameters of a bucket.

    Attributes:
        GATHER: gather them.
        KEEP: gather them, and give them out for later graphs.
        REUSE: take parameters that an earlier graph gathered; no collective.
    """

    GATHER = "gather"
    KEEP = "keep"
    REUSE = "reuse"


@dataclass(frozen=True)
class Plan:
    """The plan of a graph.

    Attributes:
        gathers, reductions: bucket by bucket, in the order in which :mod:`passes.transforms.bucket` finds them.
        prefetch: for units that have a list of their own: the unit, and the units whose gathers start when its compute does.
            Units go by their names in the graph. All others prefetch the next gather.
        max_pending_reductions: how many reduce-scatters may be in flight; None: :mod:`passes.transforms.schedule`'s own limits.
        factor_classes: for each reduction, equal numbers where divide factors have equal values; asked for by
            :mod:`passes.auto.grouping` alone.
        updates: for each reduction that updates parameters, where the update of each of them writes; empty: none does.
        orders: for each reduction, its gradients by their places in the bucket, as they are to lie in the flat shard; empty: in
            the order in which backward computes them.
    """

    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    prefetch: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_pending_reductions: int | None = None
    factor_classes: tuple[int, ...] = ()
    updates: tuple[tuple[Place, ...], ...] = ()
    orders: tuple[tuple[int, ...], ...] = ()

    @property
    def has_hooks(self) -> bool:
        """Whether gradients pass through functions of the user's."""
        return any(reduction.has_hooks for reduction in self.reductions)
