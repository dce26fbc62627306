"""Large parameters over Gloo: each has collectives of its own, so that it need not be copied.

Parameters that share a bucket are copied out of the gathered buffer, and their gradients into the buffer that is reduced. On a
GPU, these copies take a small part of the network's time. Over Gloo, the cores that compute also serve the network, and a copy
costs about as much as sending. A parameter that is sharded on its first dimension and gathered alone needs no copy. The
gathered buffer is the parameter, and its gradient is sent from where it was computed. Such a parameter also does not wait for
the rest of its unit.

Some parameters keep sharing a collective:

- parameters below :data:`MIN_OWN_BUCKET_BYTES`, for which a collective of their own costs more than the copy;
- gathers of shards on the host, which are copied to the device by one copy for a unit;
- gathers that round (:mod:`passes.collectives.rounded_gather`), which write all that they send and all that arrives;
- gathers of all-gather extensions, whose tensors share a collective as bytes;
- gradients of a unit with a communication hook, which is called with the unit's bucket.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from torch import Tensor

from ..collectives.functional import exchanges
from ..ir.ops import ReduceGrad, Unshard
from ..ir.plan import Gather, Plan
from ..transforms.bucket import Buckets, Group
from .grouping import Grouping

#: The least bytes of an unsharded parameter, or of its gradient, with a bucket of its own.
MIN_OWN_BUCKET_BYTES = 1 << 20


def separate_large_parameters(buckets: Buckets, plan: Plan) -> Grouping:
    """Group the parameters of a graph by collective, with a collective for each large parameter.

    Args:
        buckets: the graph's buckets.
        plan: the plan of the graph.
    """
    gathers: list[Group] = []
    reductions: list[Group] = []
    for index, bucket in enumerate(buckets.gathers):
        if plan.gathers[index] is not Gather.REUSE:
            specs = list(map(Unshard.of, bucket.nodes))
            stays_whole = any(spec.sent_as or spec.token or spec.device for spec in specs)
            gathers += _separate(index, [not stays_whole and _is_large(spec, spec.shard.meta["val"]) for spec in specs])
    for index, bucket in enumerate(buckets.reductions):
        may_regroup, grads = plan.reductions[index].reduction.may_regroup, map(ReduceGrad.of, bucket.nodes)
        reductions += _separate(index, [may_regroup and _is_large(spec, spec.grad.meta["val"]) for spec in grads])
    return Grouping(tuple(gathers), tuple(reductions))


def _is_large(spec: Unshard | ReduceGrad, like: Tensor) -> bool:
    """Return whether a parameter or gradient gets a collective of its own.

    Args:
        spec: its operator.
        like: a tensor with the dtype in which it travels, on the device on which it does.
    """
    if spec.dim != 0 or like.device.type != "cpu" or not exchanges(spec.group, like.device):
        return False
    return math.prod(spec.shape) * like.dtype.itemsize >= MIN_OWN_BUCKET_BYTES


def _separate(index: int, is_large: Sequence[bool]) -> Iterator[Group]:
    members = [(index, position) for position in range(len(is_large))]
    small = tuple(member for member, large in zip(members, is_large, strict=True) if not large)
    yield from ((member,) for member, large in zip(members, is_large, strict=True) if large)
    if small:
        yield small
