"""Pin layouts: give Inductor the strides of copies out of a gather, and put each copy just before its first reader.

Before: the copies that cut parameters out of a gathered buffer are ``clone`` nodes.
After:  each copy is pinned with ``prims.inductor_force_stride_order``, so that Inductor writes it once, in the parameter's own
        layout. Otherwise Inductor would fuse the copy with the transposition through which a matrix product reads it, and
        write a transposed weight, element by element.
        Each copy stands just before its first reader, or before an earlier kernel boundary. Inductor puts it there, to hold
        less memory, and the memory model is to find it there.
        On a GPU, small copies are one operator (:mod:`passes.transforms.foreach_copies`), and rounded messages are packed into
        words (:mod:`passes.transforms.packed_words`).

Leaves alone copies of the model's own. Runs for the Inductor lowering only.
"""

import torch
from torch.fx import Graph

from ..fx.graph import replace_other_uses
from ..fx.torch_internals.operators import force_stride_order
from ..ir.work import MAKES_PARAMETERS, kernel_boundaries, role
from .foreach_copies import copy_in_together, copy_out_together
from .packed_words import pack_words


def pin_layouts(graph: Graph) -> None:
    """Pin the layout of the copies that finish a gather, and move each to just before its first reader. In place."""
    copy_out_together(graph)
    words = pack_words(graph)
    copy_in_together(graph, words)
    _copy_late(graph)
    for node in list(graph.nodes):
        if role(node) in MAKES_PARAMETERS and node.target == torch.ops.aten.clone.default:
            with graph.inserting_after(node):
                pinned = graph.call_function(force_stride_order, (node, list(node.meta["val"].stride())))
            pinned.meta = dict(node.meta)
            replace_other_uses(node, pinned)


def _copy_late(graph: Graph) -> None:
    following = graph.output_node()
    boundaries = kernel_boundaries(graph)
    for node in reversed(list(graph.nodes)):
        if node in boundaries:
            following = node
        elif role(node) in MAKES_PARAMETERS and node.users:
            min(following, *node.users).prepend(node)
