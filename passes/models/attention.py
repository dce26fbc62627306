"""Attention: which nodes are fused attention, and how much of the attention they compute.

Fused kernels have a rate of their own (:attr:`passes.models.hardware.Hardware.attention_flops_per_s`). Causal kernels skip
masked scores, which count as half of all, as FlashAttention's authors count them (arXiv:2307.08691, section 4.1). Formulas of
flops count all scores, and so does the utilisation computed from them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..fx.sizes import shape_value
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of

_aten = torch.ops.aten
_FUSED = {
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_backward,
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward,
    _aten._scaled_dot_product_efficient_attention,
    _aten._scaled_dot_product_efficient_attention_backward,
    _aten._scaled_dot_product_cudnn_attention,
    _aten._scaled_dot_product_cudnn_attention_backward,
}


def is_attention(node: Node) -> bool:
    """Return whether a node is fused attention, forward or backward."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _FUSED


def computed_part(node: Node) -> float:
    """Return the part of the formula's flops that a node's kernel computes: half for causal attention, else all."""
    return 0.5 if is_attention(node) and _is_causal(node) else 1.0


def scores(node: Node) -> Any:
    """Count the scores of attention, one for each query and key of each head, including masked ones. Other nodes have 0."""
    if not is_attention(node):
        return 0
    # The first argument of backward is the gradient of the result.
    is_backward = str(node.target).endswith("_backward.default")
    query, key = node.args[1:3] if is_backward else node.args[:2]
    queries, keys = (shape_value(value.meta["val"]) for value in (query, key))  # type: ignore[union-attr]
    return queries[0] * queries[1] * queries[2] * keys[2]


def _is_causal(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in schema_of(node.target).arguments]
    position = names.index("is_causal")
    given = node.kwargs.get("is_causal", node.args[position] if position < len(node.args) else False)
    return bool(given)
