"""Formats of blocks: elements of eight or four bits that share a scale, as bytes.

``largest``  a float32 scale maps the largest magnitude of a group to the largest number of the dtype.
``mxfp8``    32 elements in float8_e4m3fn, and a power of two in a byte (e8m0): the exponent of the largest magnitude, less 8.
             In a group whose largest magnitude is 1.9 * 2**e, those above 1.75 * 2**e become that number.
``nvfp4``    16 elements of four bits (e2m1, two in a byte), a scale in float8_e4m3fn, and a float32 *factor* for each tensor.

An infinity or NaN makes its group NaN, in ``nvfp4`` its tensor. Zeros stay zeros.

Sources: OCP Microscaling Formats (MX) 1.0; NVIDIA's NVFP4 (Transformer Engine, torchao ``NVFP4Tensor``).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

#: The largest number of each one-byte dtype. int8 is used symmetrically, from -127 to 127.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
#: The dtype that is rounded from, and restored to; and the dtype of scales of ``largest``.
SCALE = torch.float32

_TINY = torch.finfo(SCALE).tiny
_MANTISSA_BITS = 23
#: The exponent of the largest number of float8_e4m3fn, 1.75 * 2**8.
_MX_EXPONENT = 8
_NAN = 255
#: The magnitudes that round up from each of e2m1's numbers to the next; ties go to the even one.
_E2M1_ROUNDS_UP: tuple[tuple[float, bool], ...] = (
    (0.25, False),
    (0.75, True),
    (1.25, False),
    (1.75, True),
    (2.5, False),
    (3.5, True),
    (5.0, False),
)
#: The differences between e2m1's numbers: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
_E2M1_STEPS = (0.5, 0.5, 0.5, 0.5, 1.0, 1.0, 2.0)
_E2M1_LARGEST = 6.0


class BlockFormat(NamedTuple):
    """A format of groups.

    Attributes:
        bits: of an element.
        elements: dtype of the bytes of elements.
        scales: dtype of scales.
        block: the number of elements that share a scale; 0: any.
        has_factor: whether each tensor has a factor in float32.
        round: rounds ``[groups, elements]``, with factors ``[groups]`` or None, to elements and scales.
        restore: the inverse, to :data:`SCALE`: of elements ``[..., groups, bytes]`` and scales and factors ``[..., groups]``.
    """

    bits: int
    elements: torch.dtype
    scales: torch.dtype
    block: int
    has_factor: bool
    round: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor]]
    restore: Callable[[Tensor, Tensor, Tensor | None], Tensor]


@functools.cache
def largest(dtype: torch.dtype) -> BlockFormat:
    """Make the format whose scales map the largest magnitude of a group to the largest number of ``dtype``."""

    def round(groups: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
        return round_groups(groups, dtype)

    def restore(rounded: Tensor, scale: Tensor, _: Tensor | None) -> Tensor:
        return restore_groups(rounded, scale)

    return BlockFormat(8, dtype, SCALE, 0, has_factor=False, round=round, restore=restore)


def round_groups(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round numbers that share a scale, to the nearest. The largest magnitude of a group becomes the largest of ``dtype``.

    Args:
        groups: ``[..., elements]``.
        dtype: one of :data:`LARGEST`.

    Returns:
        The rounded numbers, ``[..., elements]`` in ``dtype``, and the scales, ``[...]`` in :data:`SCALE`.
    """
    values = groups.to(SCALE)
    # Avoid division by zero. Adding tiny changes only the smallest of scales.
    scale = values.abs().amax(-1) / LARGEST[dtype] + _TINY
    rounded = values / scale.unsqueeze(-1)
    return (rounded.round() if dtype == torch.int8 else rounded).to(dtype), scale


def restore_groups(rounded: Tensor, scale: Tensor) -> Tensor:
    """Decode the results of :func:`round_groups`, to ``[..., elements]`` in :data:`SCALE`."""
    return rounded.to(SCALE) * scale.unsqueeze(-1)


def _power_of_two(exponents: Tensor) -> Tensor:
    """Return the float32 numbers with these biased exponents, 1 to 254, as int32."""
    return (exponents << _MANTISSA_BITS).view(SCALE)


def _round_mxfp8(groups: Tensor, _: Tensor | None) -> tuple[Tensor, Tensor]:
    values = groups.to(SCALE)
    # The biased exponent; that of an infinity or NaN is 255.
    exponent = values.abs().amax(-1).view(torch.int32) >> _MANTISSA_BITS
    scale = (exponent - _MX_EXPONENT).clamp(min=1).masked_fill(exponent == _NAN, _NAN)
    limit = LARGEST[torch.float8_e4m3fn]
    rounded = values / _power_of_two(scale.clamp(max=_NAN - 1)).unsqueeze(-1)
    return rounded.clamp(-limit, limit).to(torch.float8_e4m3fn), scale.to(torch.uint8)


def _restore_mxfp8(rounded: Tensor, scale: Tensor, _: Tensor | None) -> Tensor:
    exponent = scale.to(torch.int32)
    power = _power_of_two(exponent.clamp(1, _NAN - 1)).masked_fill(exponent == _NAN, torch.nan)
    return rounded.to(SCALE) * power.unsqueeze(-1)


def nvfp4_factor(tensor: Tensor) -> Tensor:
    """Return the factor of a tensor, ``[1]``: its largest magnitude, relative to the largest that its bytes represent."""
    return tensor.to(SCALE).abs().amax().reshape(1) / (LARGEST[torch.float8_e4m3fn] * _E2M1_LARGEST) + _TINY


def _round_nvfp4(groups: Tensor, factor: Tensor | None) -> tuple[Tensor, Tensor]:
    assert factor is not None
    values = groups.to(SCALE) / factor.unsqueeze(-1)
    scale = (values.abs().amax(-1) / _E2M1_LARGEST).to(torch.float8_e4m3fn)
    # A scale that rounds to zero leaves zeros.
    divisor = scale.to(SCALE)
    units = values / divisor.masked_fill(divisor == 0, torch.inf).unsqueeze(-1)
    magnitude = units.abs()
    code = sum((magnitude >= limit if ties else magnitude > limit).to(torch.uint8) for limit, ties in _E2M1_ROUNDS_UP)
    code = code | ((units < 0).to(torch.uint8) << 3)
    pairs = code.unflatten(-1, (-1, 2))
    return pairs.select(-1, 0) | (pairs.select(-1, 1) << 4), scale


def _restore_nvfp4(packed: Tensor, scale: Tensor, factor: Tensor | None) -> Tensor:
    assert factor is not None
    code = torch.cat([(packed & 15).unsqueeze(-1), (packed >> 4).unsqueeze(-1)], dim=-1).flatten(-2)
    index = code & 7
    magnitude = sum((index >= place).to(SCALE) * step for place, step in enumerate(_E2M1_STEPS, start=1))
    return torch.where(code > 7, -magnitude, magnitude) * (scale.to(SCALE) * factor).unsqueeze(-1)


MXFP8 = BlockFormat(8, torch.float8_e4m3fn, torch.uint8, 32, has_factor=False, round=_round_mxfp8, restore=_restore_mxfp8)
NVFP4 = BlockFormat(4, torch.uint8, torch.float8_e4m3fn, 16, has_factor=True, round=_round_nvfp4, restore=_restore_nvfp4)
#: The formats that have names.
NAMED = {"mxfp8": MXFP8, "nvfp4": NVFP4}
