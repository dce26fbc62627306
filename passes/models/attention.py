"""Attention: which nodes are fused attention, and how much of it they compute.

Fused kernels have a rate of their own (:attr:`passes.models.hardware.Hardware.attention_flops_per_s`). Causal ones skip what
the mask hides: half of the scores, as FlashAttention's authors count it (arXiv:2307.08691, section 4.1). Formulas of flops, and
so the utilisation that is made of them, count all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..fx.sizes import shape_value
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


def scores(node: Node) -> Any:
    """The scores of attention, one for each pair of a query and a key, of each head, those that are masked included; else 0."""
    if not is_attention(node):
        return 0
    # Backward takes the gradient of the result first.
    is_backward = str(node.target).endswith("_backward.default")
    query, key = node.args[1:3] if is_backward else node.args[:2]
    queries, keys = (shape_value(value.meta["val"]) for value in (query, key))  # type: ignore[union-attr]
    return queries[0] * queries[1] * queries[2] * keys[2]


def _is_causal(node: Node) -> bool:
    assert isinstance(node.target, OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    position = names.index("is_causal")
    given = node.kwargs.get("is_causal", node.args[position] if position < len(node.args) else False)
    return bool(given)
