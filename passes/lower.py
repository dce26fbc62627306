"""Lower: say to Inductor what an FX graph's order alone does not.

Before: the copies that cut parameters out of a gathered buffer are ``clone`` nodes.
After:  each copy is pinned with ``prims.inductor_force_stride_order``, so that Inductor writes it once, in the parameter's own
        layout. Otherwise it would fuse the copy with the transposition that a matrix product reads it through, and write a
        transposed weight, element by element.

Only for the Inductor lowering; ``INDUCTOR_CONFIG`` is its other half: the settings that keep the schedule.
"""

from typing import Any

import torch
import torch._inductor.inductor_prims  # registers the operator below
from torch.fx import Graph

from .graph import replace_other_uses, role
from .keep_order import KeepOrder

_pin = torch.ops.prims.inductor_force_stride_order.default

INDUCTOR_CONFIG: dict[str, Any] = {
    # Both reorder the graph by memory alone, and put every all-gather next to its wait: nothing would overlap.
    "reorder_for_peak_memory": False,
    "reorder_for_locality": False,
    "_post_fusion_custom_pass": KeepOrder(),
}


def lower(graph: Graph) -> None:
    """Pin the layout of the copies that finish a gather. In place."""
    for node in list(graph.nodes):
        if role(node) == "finish_gather" and node.target == torch.ops.aten.clone.default:
            with graph.inserting_after(node):
                pinned = graph.call_function(_pin, (node, list(node.meta["val"].stride())))
            pinned.meta = dict(node.meta)
            replace_other_uses(node, pinned)
