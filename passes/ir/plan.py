"""The plan: the communication of one call of a forward or backward graph.

A plan is known when the graph is called, not when it is traced. It depends on flags, which users set at any time, and on the
state that earlier microbatches left. Each distinct plan of a graph is lowered once, on first use; equal plans share the lowered
graph. So plans do not contain values that change from step to step in ordinary training, such as divide factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from .reduction import Reduction
from .update import UpdateTarget


class Gather(Enum):
    """The plan of a graph for the parameters of a bucket.

    Attributes:
        GATHER: gather the parameters. Their node shards, if they have any (``node_group``), are returned for later graphs.
        WITHIN_NODE: gather the parameters from node shards that an earlier graph returned.
        KEEP: gather the parameters, and return them for later graphs.
        REUSE: take parameters that are gathered already; no collective.
    """

    GATHER = "gather"
    WITHIN_NODE = "within_node"
    KEEP = "keep"
    REUSE = "reuse"

    # Plans are hashed at each call of a graph, and an enumeration's own hash is written in Python.
    __hash__ = object.__hash__


class PlannedReduction(NamedTuple):
    """The plan of a graph for the gradients of a bucket.

    Attributes:
        reduction: what happens to the gradients.
        factor_class: a number that is equal for buckets whose divide factors have equal values; None: the bucket shares no
            collective with others.
        order: the positions of the gradients in the bucket, in the order of the flat shard. Empty: the order in which backward
            computes the gradients.
        updates: where the update of each parameter writes; empty: the reduction updates nothing.
    """

    reduction: Reduction = Reduction()
    factor_class: int | None = None
    order: tuple[int, ...] = ()
    updates: tuple[UpdateTarget, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The plan of a graph.

    Attributes:
        gathers, reductions: an entry for each bucket, in the order of :func:`passes.transforms.bucket.find_buckets`.
        prefetch: for each unit with a prefetch list, its name in the graph, and the names of the units whose gathers start when
            its compute starts. Other units prefetch the next gather.
        max_pending_reductions: the most reduce-scatters in flight; None: the limits of :mod:`passes.transforms.schedule`.
    """

    gathers: tuple[Gather, ...] = ()
    reductions: tuple[PlannedReduction, ...] = ()
    prefetch: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_pending_reductions: int | None = None

    @property
    def has_hooks(self) -> bool:
        """True if gradients pass through functions of the user."""
        return any(planned.reduction.has_hooks for planned in self.reductions)

    @property
    def has_updates(self) -> bool:
        """True if the graph updates parameters."""
        return any(planned.updates for planned in self.reductions)
