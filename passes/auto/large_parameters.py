"""Large parameters over Gloo: each has collectives of its own, so that it need not be copied.

What shares a bucket is copied: parameters out of the gathered buffer, gradients into the one that is reduced. On a GPU that
takes a small part of the network's time. Gloo's network is served by the cores that compute, and a copy costs about as much as
sending. A parameter that is cut along its first dimension and gathered alone needs no copy: the gathered buffer is the
parameter, and its gradient is sent from where it was computed. Nor does it wait for the rest of its unit.

Nor is what is copied from the host: that is one copy for a unit.

A gather that rounds (:mod:`passes.collectives.rounded_gather`) writes all that it sends and all that arrives, and stays whole.

Below :data:`MIN_OWN_BUCKET_BYTES` a collective of its own costs more than the copy: the small parameters of a unit share one.
So do all parameters of a unit with a communication hook, which is called with the unit's bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor
from torch.fx import Graph

from ..collectives.functional import exchanges
from ..ir.ops import ReduceGrad, Unshard
from ..ir.plan import Gather, Plan
from ..transforms.bucket import Group, gather_buckets, reduction_buckets
from .grouping import Grouping

#: The bytes of an unsharded parameter, or of its gradient, from which on it has a bucket of its own.
MIN_OWN_BUCKET_BYTES = 1 << 20


def separate_large_parameters(graph: Graph, plan: Plan) -> Grouping:
    """The parameters that share each collective of a graph.

    Args:
        graph: a graph after the preparing passes. It is not changed.
        plan: what it does.
    """
    gathers: list[Group] = []
    reductions: list[Group] = []
    for index, bucket in enumerate(gather_buckets(graph)):
        if plan.gathers[index] is not Gather.REUSE:
            specs = list(map(Unshard.of, bucket.nodes))
            stays_whole = any(spec.sent_as or spec.packed or spec.device for spec in specs)
            gathers += _separate(index, [not stays_whole and _is_large(spec, spec.shard.meta["val"]) for spec in specs])
    for index, bucket in enumerate(reduction_buckets(graph)):
        may_regroup, grads = plan.reductions[index].may_regroup, map(ReduceGrad.of, bucket.nodes)
        reductions += _separate(index, [may_regroup and _is_large(spec, spec.grad.meta["val"]) for spec in grads])
    return Grouping(tuple(gathers), tuple(reductions))


def _is_large(spec: Unshard | ReduceGrad, like: Tensor) -> bool:
    """Whether a parameter or gradient, which travels in dtype and on the device of ``like``, is better off alone."""
    if spec.dim != 0 or like.device.type != "cpu" or not exchanges(spec.group, like.device):
        return False
    return math.prod(spec.shape) * like.dtype.itemsize >= MIN_OWN_BUCKET_BYTES


def _separate(index: int, is_large: Sequence[bool]) -> Iterator[Group]:
    members = [(index, position) for position in range(len(is_large))]
    small = tuple(member for member, large in zip(members, is_large, strict=True) if not large)
    yield from ((member,) for member, large in zip(members, is_large, strict=True) if large)
    if small:
        yield small
