"""The sync plan: what one call of a forward or backward graph does about communication.

A plan is known when the graph is called, not when it is traced: it depends on flags that users set at any time and on what
earlier microbatches left. Each distinct plan of a graph is lowered once, on first use. Plans are values: two that are equal
stand for the same lowered graph; nothing in them (a divide factor, say) changes from step to step in ordinary training.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from ..collectives.divide_factors import Averaging


class Gather(Enum):
    """What a graph does about the parameters of a bucket.

    Attributes:
        GATHER: gather them.
        KEEP: gather them, and give them out for later graphs.
        REUSE: take parameters that an earlier graph gathered; no collective.
    """

    GATHER = "gather"
    KEEP = "keep"
    REUSE = "reuse"


class Sync(Enum):
    """How far a graph reduces the gradients of a bucket.

    Attributes:
        ALL: reduce-scatter, and with replicas (HSDP) all-reduce, into ``param.grad``.
        SCATTER: reduce-scatter only; the partial result waits for a later all-reduce.
        NONE: no communication; the full gradient waits for a later reduction.
    """

    ALL = "all"
    SCATTER = "scatter"
    NONE = "none"


@dataclass(frozen=True)
class Reduction:
    """What a graph does about the gradients of a bucket.

    Attributes:
        sync: how far it reduces.
        averaging: where the reduction divides, and its operators.
        has_unsharded: full gradients of earlier microbatches are to be added before the reduce-scatter.
        has_partial: a partial result of earlier microbatches is to be added after the reduce-scatter.
        has_grad: ``param.grad`` is there already, to be added to.
        group: name of the group that the reduce-scatter runs on; empty: the one that the parameters are sharded over.
        comm_hook: reduces in the place of the reduce-scatter: ``hook(gradient, output)``; or in place, ``hook(gradient)``.
        all_reduce_hook: changes the reduced shard in place: ``hook(shard)``.
        comm_hook_in_place: the latter, of a bucket that is sharded over one rank; then the hook is the all-reduce, too.
    """

    sync: Sync = Sync.ALL
    averaging: Averaging = field(default_factory=Averaging)
    has_unsharded: bool = False
    has_partial: bool = False
    has_grad: bool = False
    group: str = ""
    comm_hook: Callable[..., None] | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    comm_hook_in_place: bool = False

    @property
    def may_regroup(self) -> bool:
        """Whether gradients may be reduced in other buckets than the units' own, which is what hooks see."""
        return self.sync is not Sync.NONE and self.comm_hook is None and self.all_reduce_hook is None


@dataclass(frozen=True)
class Plan:
    """What a graph does.

    Attributes:
        gathers, reductions: bucket by bucket, in the order in which :mod:`passes.transforms.bucket` finds them.
        prefetch: for units that have a list of their own: the unit, and the units whose gathers start when its compute does.
            Units go by their names in the graph. All others prefetch the next gather.
        max_pending_reductions: how many reduce-scatters may be in flight; None: :mod:`passes.transforms.schedule`'s own limits.
        factor_classes: for each reduction, equal numbers where divide factors have equal values; asked for by
            :mod:`passes.auto.grouping` alone.
    """

    gathers: tuple[Gather, ...] = ()
    reductions: tuple[Reduction, ...] = ()
    prefetch: tuple[tuple[str, tuple[str, ...]], ...] = ()
    max_pending_reductions: int | None = None
    factor_classes: tuple[int, ...] = ()
