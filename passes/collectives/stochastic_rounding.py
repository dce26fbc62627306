"""Rounding up or down by chance, so that the mean of many roundings is the value."""

from __future__ import annotations

import torch
from torch import Tensor

from .rounded_gather import LARGEST, SCALE

# The bits of a float32 that are its exponent.
_EXPONENT = 0x7F800000


def round_groups_by_chance(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """As :func:`~passes.collectives.rounded_gather.round_groups`, up with the chance that is the distance from below in steps.

    Args:
        groups: ``[..., elements]``.
        dtype: one of :data:`~passes.collectives.rounded_gather.LARGEST`.

    Returns:
        The rounded numbers, ``[..., elements]`` in ``dtype``, and the scales, ``[...]`` in float32.
    """
    numbers = groups.to(SCALE)
    # Nothing divides by zero: what is added is lost in all but the smallest of scales.
    scale = numbers.abs().amax(-1) / LARGEST[dtype] + torch.finfo(SCALE).tiny
    steps = numbers / scale.unsqueeze(-1)
    step = _step(steps, dtype)
    rounded = (steps / step + torch.rand_like(steps)).floor() * step
    # The division may have rounded the largest up.
    return rounded.clamp(-LARGEST[dtype], LARGEST[dtype]).to(dtype), scale


def _step(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between the neighbours of each value in ``dtype``."""
    if dtype == torch.int8:
        return torch.ones_like(values)
    info = torch.finfo(dtype)
    # The power of two below a value: the value without its mantissa.
    power = (values.view(torch.int32) & _EXPONENT).view(torch.float32)
    return power.clamp(min=info.smallest_normal) * info.eps
