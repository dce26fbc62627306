"""Rounded gathers: gathers that send a byte for each element, and scales.

A policy rounds a rank's shards in groups of elements. Each group has a scale (float32), which maps the largest magnitude of the
group to the largest number of the dtype. A group never holds elements of two parameters. So the rounded values of a parameter
do not depend on the bucket: forward, backward and uncompiled code see the same values.

Each rank sends a row of bytes, in this order:

    rounded elements, one byte each; scales, four bytes each; parameters that are not rounded.

Parameters with fewer than two dimensions (biases, norm weights) are not rounded: they are small, and a byte is too coarse for
them. An infinity or NaN makes the scale of its group infinite or NaN. The receiver then decodes the whole group to NaN, so
overflow stays visible. A group of zeros stays zero.

Sources: block-wise scales as in ZeRO++ (Wang et al. 2023, "qwZ") and in the OCP Microscaling formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import padding_to

#: The largest number of each one-byte dtype. int8 is used symmetrically, from -127 to 127.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

#: The dtype of scales.
SCALE = torch.float32


@dataclass(frozen=True)
class GatherPolicy:
    """The rounding of a unit's parameters in their gather. Shards, gradients and optimizer states keep their dtype.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: the elements of a rank's shard that share a scale: a number of neighbouring elements; ``"row"``, each row of the
            shard; or ``"tensor"``, the whole shard.

    Raises:
        ValueError: unknown dtype or scale.
    """

    dtype: torch.dtype = torch.float8_e4m3fn
    scale: int | str = 128

    def __post_init__(self) -> None:
        if self.dtype not in LARGEST:
            known = ", ".join(map(str, LARGEST))
            raise ValueError(f"GatherPolicy(dtype=...) takes one of {known}, not {self.dtype!r}.")
        is_block = isinstance(self.scale, int) and not isinstance(self.scale, bool) and self.scale > 0
        if not is_block and self.scale not in ("row", "tensor"):
            raise ValueError(
                f"GatherPolicy(scale=...) takes a number of elements that share a scale, 'row' or 'tensor', not {self.scale!r}."
            )

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')}:{self.scale}"

    @staticmethod
    def parse(text: str) -> GatherPolicy | None:
        """Parse the result of ``str``. Return None for an empty text, which means no rounding."""
        if not text:
            return None
        dtype, _, scale = text.partition(":")
        return GatherPolicy(getattr(torch, dtype), int(scale) if scale.isdigit() else scale)

    @property
    def alignment(self) -> int:
        """The number of elements that each shard is padded to a multiple of, so that no group spans two shards."""
        return self.scale if isinstance(self.scale, int) else 1

    def paddings(self, numels: Sequence[int]) -> list[int]:
        """Return the padding after each shard, in elements, for shards of ``numels`` elements."""
        return [padding_to(self.alignment, numel) for numel in numels]

    def encode(self, shards: Sequence[Tensor], flat: Tensor, dtype: torch.dtype) -> Tensor:
        """Encode a rank's shards as a row of bytes.

        Args:
            shards: shards of parameters, of one dtype.
            flat: the shards one after the other, each padded to the alignment, perhaps with other values between them.
            dtype: the shards that are not rounded are cast to it.

        Returns:
            ``[bytes]`` of uint8: rounded elements, scales, shards that are not rounded.
        """
        rounded, scales = zip(*(round_groups(group, self.dtype) for group in self._groups(shards, flat)), strict=True)
        whole = [shard.reshape(-1).to(dtype) for shard in shards if not is_rounded(shard.shape)]
        return as_bytes([*rounded, *scales, *whole])

    def encoded_numel(self, shape: Sequence[int]) -> int:
        """Return the number of bytes of one rounded shard of this shape, encoded alone."""
        return sum(count * (elements + SCALE.itemsize) for count, elements in self._groups_of_one(shape))

    def encoded(
        self, rows: Tensor, shapes: Sequence[Sequence[int]], places: Sequence[int], numel: int, dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """Return the bytes of each rounded shard: its elements and its scales.

        The two, concatenated along dimension 1, are the encoding of the shard alone.

        Args:
            rows, shapes, places, numel, dtype: as for :meth:`decode`.

        Returns:
            For each rounded shard two views, ``[ranks, bytes]``; for each other shard an empty list.
        """
        *parts, scales = self._parts(rows, shapes, numel, dtype)[: len(self._group_shapes(shapes, numel)) + 1]
        found: list[list[Tensor]] = []
        end = 0
        for shape, place in zip(shapes, places, strict=True):
            if not is_rounded(shape):
                found.append([])
                continue
            ((count, elements),) = self._groups_of_one(shape)
            if isinstance(self.scale, int):
                first, values = place // elements, parts[0].narrow(1, place, count * elements)
            else:
                first, values = end, parts.pop(0)
            found.append([values, scales.narrow(1, first * SCALE.itemsize, count * SCALE.itemsize)])
            end += count
        return found

    def decode(
        self, rows: Tensor, shapes: Sequence[Sequence[int]], places: Sequence[int], numel: int, dtype: torch.dtype
    ) -> list[Tensor]:
        """Decode the shards of all ranks.

        Args:
            rows: the bytes of all ranks, ``[ranks, bytes]``.
            shapes: shapes of the shards.
            places: the offset of each shard in the tensor ``flat`` that :meth:`encode` took, in elements.
            numel: the number of elements of ``flat``.
            dtype: dtype of the result.

        Returns:
            For each shard ``[ranks, numel of the shard]``.
        """
        groups = self._group_shapes(shapes, numel)
        parts = self._parts(rows, shapes, numel, dtype)
        scales = reinterpret(parts[len(groups)], SCALE).split([count for count, _ in groups], dim=1)
        rounded = [
            restore_groups(part.view(self.dtype).unflatten(1, group), scale).to(dtype).flatten(1)
            for part, scale, group in zip(parts, scales, groups, strict=False)
        ]
        whole = reinterpret(parts[-1], dtype) if len(parts) > len(groups) + 1 else None
        return self._cut(rounded, whole, shapes, places)

    def _parts(self, rows: Tensor, shapes: Sequence[Sequence[int]], numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Split rows into the elements of each run of groups, all scales, and unrounded shards, if any.

        Each part is ``[ranks, bytes]``.
        """
        groups = self._group_shapes(shapes, numel)
        num_whole = sum(math.prod(shape) for shape in shapes if not is_rounded(shape))
        num_scales = sum(count for count, _ in groups)
        bytes_of_whole = [num_whole * dtype.itemsize] if num_whole else []
        return rows.split([*map(math.prod, groups), num_scales * SCALE.itemsize, *bytes_of_whole], dim=1)

    def _cut(
        self, rounded: Sequence[Tensor], whole: Tensor | None, shapes: Sequence[Sequence[int]], places: Sequence[int]
    ) -> list[Tensor]:
        """Cut the shards out of the decoded groups, or out of ``whole``, the unrounded shards one after the other."""
        shards, of_shards, end = [], iter(rounded), 0
        for shape, place in zip(shapes, places, strict=True):
            numel = math.prod(shape)
            if not is_rounded(shape):
                assert whole is not None
                shards.append(whole.narrow(1, end, numel))
                end += numel
            else:
                shards.append(rounded[0].narrow(1, place, numel) if isinstance(self.scale, int) else next(of_shards))
        return shards

    def _groups(self, shards: Sequence[Tensor], flat: Tensor) -> list[Tensor]:
        """Return the values to round, each ``[groups, elements]``: all of ``flat``, or each rounded shard apart."""
        rounded = [flat] if isinstance(self.scale, int) else [shard for shard in shards if is_rounded(shard.shape)]
        shapes = self._group_shapes([shard.shape for shard in shards], flat.numel())
        return [values.reshape(shape) for values, shape in zip(rounded, shapes, strict=True)]

    def _groups_of_one(self, shape: Sequence[int]) -> list[tuple[int, int]]:
        numel = math.prod(shape)
        return self._group_shapes([shape], numel + padding_to(self.alignment, numel))

    def _group_shapes(self, shapes: Sequence[Sequence[int]], numel: int) -> list[tuple[int, int]]:
        if isinstance(self.scale, int):
            return [(numel // self.scale, self.scale)]
        rounded = [shape for shape in shapes if is_rounded(shape)]
        if self.scale == "row":
            return [(shape[0], math.prod(shape[1:])) for shape in rounded]
        return [(1, math.prod(shape)) for shape in rounded]


def rounding(policy: GatherPolicy | None, shapes: Sequence[Sequence[int]]) -> GatherPolicy | None:
    """Return the policy if it rounds any parameter of these shapes, else None."""
    return policy if any(map(is_rounded, shapes)) else None


def is_rounded(shape: Sequence[int]) -> bool:
    """Return whether a parameter of this shape is rounded to bytes."""
    return len(shape) > 1 and 0 not in shape


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
    scale = values.abs().amax(-1) / LARGEST[dtype] + torch.finfo(SCALE).tiny
    rounded = values / scale.unsqueeze(-1)
    return (rounded.round() if dtype == torch.int8 else rounded).to(dtype), scale


def restore_groups(rounded: Tensor, scale: Tensor) -> Tensor:
    """Decode the results of :func:`round_groups`, to ``[..., elements]`` in :data:`SCALE`."""
    return rounded.to(SCALE) * scale.unsqueeze(-1)


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other: ``[bytes]`` of uint8."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def reinterpret(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes in each row as numbers of ``dtype``. Slices are copied first, as numbers have to be aligned."""
    return rows.contiguous().view(dtype)
