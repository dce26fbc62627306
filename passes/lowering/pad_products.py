"""Pad products: let Inductor pad the matrix products of a segment where that is faster on the GPU.

Before: products whose rows are not aligned to 16 bytes, such as logits of a vocabulary of 50,257 words.
After:  products of padded operands, and slices of their results, where Inductor measured that they take less time. Values that
        leave the segment are copied into the strides that they were traced with.

Inductor pads joint graphs. Each rank measures for itself, so ranks could get different graphs from then on, which would choose
different memory budgets or schedules. A segment has no collectives, so here the choice cannot lead ranks apart.

Leaves alone CPUs, sizes that change, and everything if ``torch._inductor.config.shape_padding`` is off.
"""

import functools

import torch
from torch.fx import GraphModule, Node

from ..fx.torch_internals.aot import stable_topological_sort
from ..fx.torch_internals.inductor import PatternMatcherPass, _pad_mm_init, inductor_config, joint_graph, pad_mm
from ..transforms.refresh_layouts import TracedValues, refresh_layouts

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.bmm.default, torch.ops.aten.addmm.default)


@functools.cache
def _patterns() -> PatternMatcherPass:
    """Return Inductor's patterns of products to pad, without its other patterns of joint graphs."""
    patterns = PatternMatcherPass(pass_name="pad_products")
    others, joint_graph.patterns = joint_graph.patterns, patterns
    try:
        # Without its cache, as it has filled the other patterns, too.
        _pad_mm_init.__wrapped__()
    finally:
        joint_graph.patterns = others
    return patterns


def pad_products(gm: GraphModule) -> None:
    """Pad products of a segment, in place, in the fake mode of its compilation."""
    graph = gm.graph
    products = [node for target in _PRODUCTS for node in graph.find_nodes(op="call_function", target=target)]
    if not inductor_config.shape_padding or not any(map(_is_on_gpu, products)):
        return
    traced = TracedValues(graph)
    if _patterns().apply(gm):
        stable_topological_sort(graph)
        refresh_layouts(graph, traced)
        gm.recompile()


def _is_on_gpu(product: Node) -> bool:
    return bool(pad_mm.check_device(*(operand.meta["val"] for operand in product.all_input_nodes[-2:])))
