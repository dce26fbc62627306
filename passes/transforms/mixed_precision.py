"""Mixed precision: write the casts of the policy as nodes.

Before: ``unshard(shard, ..., param_dtype=p)`` and ``reduce_grad(grad, ..., reduce_dtype=r, grad_dtype=g)``.
After:  the shard is cast to ``p`` before its gather, which then moves the smaller dtype; the gradient is cast to ``r`` before
        its reduction. As nodes, the casts fuse with the copies around the collectives.
        (:mod:`passes.transforms.gradient_sync` casts the reduced shard to ``g``, once for a bucket.)

Leaves alone operators whose dtypes agree already, and gathers that send bytes: they round the uncast shard and decode to ``p``
(:mod:`passes.collectives.rounded_gather`). Shards on the host are cast on the device, after their copy. A cast on the host
would halve the copied bytes, but block the thread that launches everything else.
"""

import torch
from torch.fx import Graph, Node

from ..ir.ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args

_cast = torch.ops.prims.convert_element_type.default


def _emit_cast(graph: Graph, source: Node, dtype: torch.dtype) -> Node:
    cast = graph.call_function(_cast, (source, dtype))
    cast.meta["val"] = source.meta["val"].to(dtype)
    return cast


def mixed_precision(graph: Graph) -> None:
    """Move the dtypes of a forward or backward graph's operators into cast nodes. In place."""
    for node in unshards(graph.nodes):
        unshard = Unshard.of(node)
        update_args(node, reduce_dtype=None)
        if unshard.sent_as:
            continue
        if unshard.param_dtype not in (None, unshard.shard.meta["val"].dtype):
            if unshard.device:
                continue
            with graph.inserting_before(node):
                update_args(node, shard=_emit_cast(graph, unshard.shard, unshard.param_dtype))
        update_args(node, param_dtype=None)
    for node in reduce_grads(graph.nodes):
        reduce = ReduceGrad.of(node)
        reduce_dtype = reduce.reduce_dtype or reduce.grad.meta["val"].dtype
        if reduce.grad.meta["val"].dtype != reduce_dtype:
            # After the gradient, which is reduced as soon as it exists: autograd puts ``reduce_grad`` at the graph's end.
            with graph.inserting_after(max(reduce.grad, graph.find_nodes(op="placeholder")[-1])):
                update_args(node, grad=_emit_cast(graph, reduce.grad, reduce_dtype))
        update_args(node, reduce_dtype=None)
