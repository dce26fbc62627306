"""Rounded gathers: gathers that send a byte for each element, or half a byte, and scales.

A policy rounds a rank's shards in groups of elements that share a scale (:mod:`passes.collectives.block_formats`). A group
never holds elements of two parameters. So the rounded values of a parameter do not depend on the bucket: forward, backward and
uncompiled code see the same values.

Each rank sends a row of bytes, in this order:

    rounded elements; scales; in some formats a factor for each rounded parameter; parameters that are not rounded.

Parameters with fewer than two dimensions (biases, norm weights) are not rounded: they are small, and a byte is too coarse for
them. An infinity or NaN makes its group NaN, so overflow stays visible. A group of zeros stays zero.

Sources: block-wise scales as in ZeRO++ (Wang et al. 2023, "qwZ") and in the OCP Microscaling formats.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .block_formats import LARGEST, NAMED, SCALE, BlockFormat, largest, nvfp4_factor
from .layout import padding_to


@dataclass(frozen=True)
class GatherPolicy:
    """The rounding of a unit's parameters in their gather. Shards, gradients and optimizer states keep their dtype.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``; or a format with its own scales, ``"mxfp8"`` or
            ``"nvfp4"``, which has half a byte for each element.
        scale: the elements of a rank's shard that share a scale: a number of neighbouring elements; ``"row"``, each row of the
            shard; or ``"tensor"``, the whole shard. The formats with their own scales have 32 and 16 elements.

    Raises:
        ValueError: unknown dtype or scale.
    """

    dtype: torch.dtype | str = torch.float8_e4m3fn
    scale: int | str = 128

    def __post_init__(self) -> None:
        if self.dtype not in (*LARGEST, *NAMED):
            known = ", ".join([*map(str, LARGEST), *map(repr, NAMED)])
            raise ValueError(f"GatherPolicy(dtype=...) takes one of {known}, not {self.dtype!r}.")
        if isinstance(self.dtype, str):
            block = NAMED[self.dtype].block
            if self.scale not in (type(self).scale, block):
                raise ValueError(
                    f"GatherPolicy({self.dtype!r}) has a scale for {block} elements: leave out scale={self.scale!r}."
                )
            object.__setattr__(self, "scale", block)
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
        known = dtype if dtype in NAMED else getattr(torch, dtype)
        return GatherPolicy(known, int(scale) if scale.isdigit() else scale)

    @property
    def format(self) -> BlockFormat:
        """The format of groups."""
        return NAMED[self.dtype] if isinstance(self.dtype, str) else largest(self.dtype)

    @property
    def alignment(self) -> int:
        """The number of elements that each shard is padded to a multiple of, so that no group spans two shards."""
        return self.scale if isinstance(self.scale, int) else 1

    def paddings(self, numels: Sequence[int]) -> list[int]:
        """Return the padding after each shard, in elements, for shards of ``numels`` elements."""
        return [padding_to(self.alignment, numel) for numel in numels]

    def encode(self, shards: Sequence[Tensor], flat: Tensor, dtype: torch.dtype, places: Sequence[int] = ()) -> Tensor:
        """Encode a rank's shards as a row of bytes.

        Args:
            shards: shards of parameters, of one dtype.
            flat: the shards one after the other, each padded to the alignment, perhaps with other values between them.
            dtype: the shards that are not rounded are cast to it.
            places: the offset of each shard in ``flat``, for a format with factors.

        Returns:
            ``[bytes]`` of uint8: rounded elements, scales, factors, shards that are not rounded.
        """
        format, groups = self.format, self._groups(shards, flat)
        factors: list[Tensor] = []
        of_groups: list[Tensor | None] = [None] * len(groups)
        if format.has_factor:
            factors = [nvfp4_factor(shard) for shard in shards if is_rounded(shard.shape)]
            of_groups = [self._factors(torch.cat(factors), [shard.shape for shard in shards], places, flat.numel())]
        rounded, scales = zip(*map(format.round, groups, of_groups), strict=True)
        whole = [shard.reshape(-1).to(dtype) for shard in shards if not is_rounded(shard.shape)]
        return as_bytes([*rounded, *scales, *factors, *whole])

    def _factors(self, factors: Tensor, shapes: Sequence[Sequence[int]], places: Sequence[int], numel: int) -> Tensor:
        """Return each group's factor, ``[..., groups]``, from ``[..., rounded shards]``. Groups of gaps have a neighbour's."""
        assert isinstance(self.scale, int)
        starts = [place // self.scale for shape, place in zip(shapes, places, strict=True) if is_rounded(shape)]
        ends = [*starts[1:], numel // self.scale]
        starts[0] = 0
        pieces = [
            factors.narrow(-1, index, 1).expand(*factors.shape[:-1], end - start)
            for index, (start, end) in enumerate(zip(starts, ends, strict=True))
        ]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=-1)

    def encoded_numel(self, shape: Sequence[int]) -> int:
        """Return the number of bytes of one rounded shard of this shape, encoded alone."""
        format = self.format
        sizes = [self._bytes(group) + group[0] * format.scales.itemsize for group in self._groups_of_one(shape)]
        return sum(sizes) + (SCALE.itemsize if format.has_factor else 0)

    def _bytes(self, group: tuple[int, int]) -> int:
        """Return the bytes of the elements of groups of a shape."""
        return math.prod(group) * self.format.bits // 8

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
        format, num_runs = self.format, len(self._group_shapes(shapes, numel))
        parts = list(self._parts(rows, shapes, numel, dtype))
        scales, factors = parts[num_runs], parts[num_runs + 1] if format.has_factor else None
        found: list[list[Tensor]] = []
        end = index = 0
        for shape, place in zip(shapes, places, strict=True):
            if not is_rounded(shape):
                found.append([])
                continue
            ((count, elements),) = self._groups_of_one(shape)
            if isinstance(self.scale, int):
                first = place // elements
                values = parts[0].narrow(1, place * format.bits // 8, self._bytes((count, elements)))
            else:
                first, values = end, parts.pop(0)
            scale = scales.narrow(1, first * format.scales.itemsize, count * format.scales.itemsize)
            if factors is not None:
                scale = torch.cat([scale, factors.narrow(1, index * SCALE.itemsize, SCALE.itemsize)], dim=1)
            found.append([values, scale])
            end, index = end + count, index + 1
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
        format, groups = self.format, self._group_shapes(shapes, numel)
        parts = self._parts(rows, shapes, numel, dtype)
        scales = reinterpret(parts[len(groups)], format.scales).split([count for count, _ in groups], dim=1)
        factors: list[Tensor | None] = [None] * len(groups)
        if format.has_factor:
            factors = [self._factors(reinterpret(parts[len(groups) + 1], SCALE), shapes, places, numel)]
        rounded = [
            format.restore(part.view(format.elements).unflatten(1, (count, -1)), scale, factor).to(dtype).flatten(1)
            for part, scale, factor, (count, _) in zip(parts, scales, factors, groups, strict=False)
        ]
        has_whole = len(parts) > len(groups) + 1 + format.has_factor
        return self._cut(rounded, reinterpret(parts[-1], dtype) if has_whole else None, shapes, places)

    def _parts(self, rows: Tensor, shapes: Sequence[Sequence[int]], numel: int, dtype: torch.dtype) -> Sequence[Tensor]:
        """Split rows into the elements of each run of groups, all scales, all factors, and unrounded shards, if any.

        Each part is ``[ranks, bytes]``.
        """
        format, groups = self.format, self._group_shapes(shapes, numel)
        num_whole = sum(math.prod(shape) for shape in shapes if not is_rounded(shape))
        num_scales = sum(count for count, _ in groups)
        rest = [SCALE.itemsize * sum(map(is_rounded, shapes))] if format.has_factor else []
        rest += [num_whole * dtype.itemsize] if num_whole else []
        return rows.split([*map(self._bytes, groups), num_scales * format.scales.itemsize, *rest], dim=1)

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


def as_bytes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the bytes of tensors, one after the other: ``[bytes]`` of uint8."""
    return torch.cat([tensor.reshape(-1).view(torch.uint8) for tensor in tensors])


def reinterpret(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Reinterpret the bytes in each row as numbers of ``dtype``. Slices are copied first, as numbers have to be aligned."""
    return rows.contiguous().view(dtype)
