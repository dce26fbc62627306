"""Name shards: rename the inputs of a graph after the parameters that they are shards of.

Before: ``primals_3``.
After:  ``shard_layers_0_wq_weight``; or ``piece_...`` for a smaller group's shard that forward saved. The tensor that stands
        for the shard of a tensor subclass is named as a shard.

Leaves alone all other inputs, and shards that the graph computes.
"""

import re

from torch.fx import Graph, Node

from ..fx.torch_internals.objects import rename
from ..ir.ops import ReduceGrad, Unshard, reduce_grads, unshards


def _rename(node: Node, name: str) -> None:
    rename(node, re.sub(r"\W", "_", name))
    node.target = node.name


def name_shards(graph: Graph) -> None:
    """Rename the placeholders that are shards after their parameters. In place."""
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if spec.token is not None:
            _rename(spec.token, f"shard_{spec.name}")
        elif spec.shard.op == "placeholder":
            _rename(spec.shard, f"{'shard' if spec.offset >= 0 else 'piece'}_{spec.name}")
    for node in reduce_grads(graph.nodes):
        reduce = ReduceGrad.of(node)
        if reduce.shard.op == "placeholder" and reduce.shard.name.startswith("primals"):
            _rename(reduce.shard, f"shard_{reduce.name}")
