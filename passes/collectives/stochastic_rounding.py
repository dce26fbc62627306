"""Stochastic rounding: up or down at random, so that the mean of many roundings is the value."""

from __future__ import annotations

import torch
from torch import Tensor

from .block_formats import LARGEST, SCALE

# Mask of the exponent bits of a float32.
_EXPONENT = 0x7F800000


def round_groups_by_chance(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round numbers that share a scale as :func:`~passes.collectives.block_formats.round_groups`, but up or down at random.

    The chance to round up is the distance from the lower neighbour in ``dtype``, divided by the step between the neighbours.

    Args:
        groups: ``[..., elements]``.
        dtype: one of :data:`~passes.collectives.block_formats.LARGEST`.

    Returns:
        The rounded numbers, ``[..., elements]`` in ``dtype``, and the scales, ``[...]`` in float32.
    """
    numbers = groups.to(SCALE)
    # Avoid division by zero. Adding tiny changes only the smallest of scales.
    scale = numbers.abs().amax(-1) / LARGEST[dtype] + torch.finfo(SCALE).tiny
    steps = numbers / scale.unsqueeze(-1)
    step = _step(steps, dtype)
    rounded = (steps / step + torch.rand_like(steps)).floor() * step
    # The division may have rounded the largest up.
    return rounded.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the distance between the two neighbours of each value in ``dtype``."""
    if dtype == torch.int8:
        return torch.ones_like(values)
    info = torch.finfo(dtype)
    # The largest power of two that is not above the value's magnitude: the value without sign and mantissa.
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    return power.clamp(min=info.smallest_normal) * info.eps
