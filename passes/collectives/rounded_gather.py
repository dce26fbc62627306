"""Gathers that send a byte for each element, and scales.

A policy rounds a rank's shards in groups of elements, each with a scale of its own (float32): the largest magnitude of a group
becomes the largest number of the dtype. A group never holds elements of two parameters, so what becomes of a parameter does not
depend on what is gathered with it: forward, backward and uncompiled code see the same values. Rows of bytes travel, in which
follow each other

    the elements, one byte each; the scales, four bytes each; what is sent as it is.

What has fewer than two dimensions (biases, the weights of norms) is sent as it is: it is little, and a byte is too coarse for
it. An infinity or NaN makes the scale of its group one, and all of the group NaN at the other end: nothing that overflows is
hidden. A group of zeros stays one.

Sources: block-wise scales as in ZeRO++ (Wang et al. 2023, "qwZ") and in the OCP Microscaling formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .layout import padding_to

#: The largest numbers that a byte holds; of int8 as many on either side of zero.
LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}

#: The dtype of scales.
SCALE = torch.float32


@dataclass(frozen=True)
class GatherPolicy:
    """How a unit's parameters are rounded when they are gathered. Shards, gradients and optimizer states keep their dtype.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        scale: what shares one: so many elements that lie side by side in a rank's shard of a parameter; ``"row"``, a row of it;
            or ``"tensor"``, all of it.

    Raises:
        ValueError: a dtype or scale that there is not.
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
        """The inverse of ``str``; None for an empty text, which stands for values as they are."""
        if not text:
            return None
        dtype, _, scale = text.partition(":")
        return GatherPolicy(getattr(torch, dtype), int(scale) if scale.isdigit() else scale)

    @property
    def alignment(self) -> int:
        """The elements of which a shard has to be given a multiple, so that no group reaches into the next shard."""
        return self.scale if isinstance(self.scale, int) else 1

    def paddings(self, numels: Sequence[int]) -> list[int]:
        """The elements that are missing behind shards of so many elements."""
        return [padding_to(self.alignment, numel) for numel in numels]

    def encode(self, shards: Sequence[Tensor], flat: Tensor, dtype: torch.dtype) -> Tensor:
        """A rank's row of bytes.

        Args:
            shards: shards of parameters, of one dtype.
            flat: all of them one behind the other, each padded to the alignment, perhaps with other values between them.
            dtype: what the others become that are not rounded.
        """
        rounded, scales = zip(*(round_groups(group, self.dtype) for group in self._groups(shards, flat)), strict=True)
        whole = [shard.reshape(-1).to(dtype) for shard in shards if not is_rounded(shard.shape)]
        return torch.cat([values.view(-1).view(torch.uint8) for values in (*rounded, *scales, *whole)])

    def encoded_numel(self, shape: Sequence[int]) -> int:
        """The bytes that :meth:`encode` makes of one shard that is rounded."""
        return sum(count * (elements + SCALE.itemsize) for count, elements in self._groups_of_one(shape))

    def encoded(
        self, rows: Tensor, shapes: Sequence[Sequence[int]], places: Sequence[int], numel: int, dtype: torch.dtype
    ) -> list[list[Tensor]]:
        """The bytes of each shard that is rounded, its elements and its scales: side by side, what it alone is encoded as.

        Args:
            rows, shapes, places, numel, dtype: as :meth:`decode` has them.

        Returns:
            Of each shard views ``[ranks, bytes]``; of one that is sent as it is, none.
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
        """The shards of all ranks, each ``[ranks, numel of the shard]``.

        Args:
            rows: the bytes of all ranks, ``[ranks, bytes]``.
            shapes: of the shards.
            places: where each begins in the flat tensor that was encoded.
            numel: the elements of that.
            dtype: of the result.
        """
        groups = self._group_shapes(shapes, numel)
        parts = self._parts(rows, shapes, numel, dtype)
        scales = numbers_of(parts[len(groups)], SCALE).split([count for count, _ in groups], dim=1)
        rounded = [
            restore_groups(part.view(self.dtype).unflatten(1, group), scale).to(dtype).flatten(1)
            for part, scale, group in zip(parts, scales, groups, strict=False)
        ]
        whole = numbers_of(parts[-1], dtype) if len(parts) > len(groups) + 1 else None
        return self._cut(rounded, whole, shapes, places)

    def _parts(self, rows: Tensor, shapes: Sequence[Sequence[int]], numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """The elements of each run of groups, all scales, and what is sent as it is, if any; each ``[ranks, bytes]``."""
        groups = self._group_shapes(shapes, numel)
        num_whole = sum(math.prod(shape) for shape in shapes if not is_rounded(shape))
        num_scales = sum(count for count, _ in groups)
        bytes_of_whole = [num_whole * dtype.itemsize] if num_whole else []
        return rows.split([*map(math.prod, groups), num_scales * SCALE.itemsize, *bytes_of_whole], dim=1)

    def _cut(
        self, rounded: Sequence[Tensor], whole: Tensor | None, shapes: Sequence[Sequence[int]], places: Sequence[int]
    ) -> list[Tensor]:
        """The shards, from the groups that were rounded and from what was not, one behind the other."""
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
        """The values that are rounded, ``[groups, elements]``."""
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
    """The policy, if it rounds any parameter of these shapes."""
    return policy if any(map(is_rounded, shapes)) else None


def is_rounded(shape: Sequence[int]) -> bool:
    """Whether a parameter of a shape is sent in bytes."""
    return len(shape) > 1 and 0 not in shape


def round_groups(groups: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Round numbers that share a scale: the largest magnitude of a group becomes the largest number of ``dtype``.

    Args:
        groups: ``[..., elements]``.
        dtype: one of :data:`LARGEST`.

    Returns:
        The rounded numbers, ``[..., elements]`` in ``dtype``, and the scales, ``[...]`` in :data:`SCALE`.
    """
    values = groups.to(SCALE)
    # Nothing divides by zero: what is added is lost in all but the smallest of scales.
    scale = values.abs().amax(-1) / LARGEST[dtype] + torch.finfo(SCALE).tiny
    rounded = values / scale.unsqueeze(-1)
    return (rounded.round() if dtype == torch.int8 else rounded).to(dtype), scale


def restore_groups(rounded: Tensor, scale: Tensor) -> Tensor:
    """What :func:`round_groups` rounded, in :data:`SCALE`."""
    return rounded.to(SCALE) * scale.unsqueeze(-1)


def numbers_of(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What the bytes in each row stand for. They may begin anywhere in memory, and numbers may not: so they are copied."""
    return rows.contiguous().view(dtype)
