"""Attention as a GPU runs it, on machines where torch cannot choose a fused kernel.

``scaled_dot_product_attention`` chooses in C++, in code that only a CUDA build with a device runs. Otherwise the operator
becomes products and a softmax over all scores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from passes.fx.torch_internals.objects import undo

_aten = torch.ops.aten
_MAX_FLASH_WIDTH = 256


@contextlib.contextmanager
def fused_attention() -> Iterator[None]:
    """Run ``scaled_dot_product_attention`` on ``cuda`` as the fused operator of GPUs since sm_80 while the block runs.

    Source: torch's ``sdp_utils.cpp``, for conditions and order: flash attention, memory-efficient attention, products.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for key in ("AutogradCUDA", "CUDA"):
            library.impl("scaled_dot_product_attention", _attend, key)
        yield
    finally:
        undo(library)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    width = query.size(-1)
    scale = width**-0.5 if scale is None else scale
    is_fusible = query.dim() == 4 and width == value.size(-1) and query.dtype in (torch.float32, torch.float16, torch.bfloat16)
    if is_fusible and attn_mask is None and query.dtype != torch.float32 and width <= _MAX_FLASH_WIDTH:
        padded = [F.pad(tensor, (0, -width % 8)) if width % 8 else tensor for tensor in (query, key, value)]
        out = _aten._scaled_dot_product_flash_attention(*padded, dropout_p, is_causal, False, scale=scale)[0]
        return out[..., :width] if width % 8 else out
    takes_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    if is_fusible and not enable_gqa and (attn_mask is None or not attn_mask.requires_grad):
        bias = None if attn_mask is None else _as_bias(attn_mask, query, key)
        return _aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, takes_gradient, dropout_p, is_causal, scale=scale
        )[0]
    return _aten._scaled_dot_product_attention_math(
        query, key, value, attn_mask, dropout_p, is_causal, None, scale=scale, enable_gqa=enable_gqa
    )[0]


def _as_bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:-1], key.size(-2))
