"""Attention: which nodes are fused attention, and how much of it they compute.

Fused kernels have a rate of their own (:attr:`passes.models.hardware.Hardware.attention_flops_per_s`). Causal ones skip what
the mask hides: half of the scores, as FlashAttention's authors count it (arXiv:2307.08691, section 4.1). Formulas of flops, and
so the utilisation that is made of them, count all.
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..fx.torch_internals.core import OpOverload

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
    """Whether a node is a fused attention, forward or backward."""
    return isinstance(node.target, OpOverload) and node.target.overloadpacket in _FUSED


def computed_part(node: Node) -> float:
    """The part of the flops by the formula that a node's kernel computes."""
    return 0.5 if is_attention(node) and _is_causal(node) else 1.0


def _is_causal(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index("is_causal")
    given = node.kwargs.get("is_causal", node.args[position] if position < len(node.args) else False)
    return bool(given)
