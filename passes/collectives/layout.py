"""The layout of a parameter over ranks: cut into equal pieces, one for each rank, and put together again.

Every rank's piece of a parameter has the same *padded* shape, so graphs do not depend on the rank. Dimension 0 is cut as
``torch.chunk`` cuts it (the DTensor ``Shard(0)`` layout): ``ceil(rows / ranks)`` rows each, the last ranks padded. Other
dimensions must divide evenly. A parameter without a dimension to cut (a scalar) is ``REPLICATED``: each rank holds it whole.

The functions are plain tensor code, used by the eager kernels in :mod:`passes.ir.ops` and traced into graphs by the passes.
"""

import math
from collections.abc import Sequence

import torch
from torch import SymInt, Tensor

REPLICATED = -1


def padded_shard_shape(shape: Sequence[int], dim: int, world_size: int) -> list[int]:
    """Return the shape of each rank's padded piece of a parameter of ``shape`` that is cut along ``dim``."""
    piece = list(shape)
    if dim != REPLICATED:
        piece[dim] = -(-piece[dim] // world_size)
    return piece


def padded_shard_numel(shape: Sequence[int], dim: int, world_size: int) -> int:
    """Return the number of elements of each rank's padded piece."""
    return math.prod(padded_shard_shape(shape, dim, world_size))


def padding_to(alignment: int, numel: int) -> int:
    """Return the number of elements to add to ``numel`` to reach a multiple of ``alignment``.

    The formula is such that a symbolic ``numel``, plus the result, simplifies to a multiple.
    """
    return -(-numel // alignment) * alignment - numel


def assemble(pieces: Tensor, shape: Sequence[int], dim: int) -> Tensor:
    """Assemble the full parameter from all ranks' pieces.

    Args:
        pieces: ``[world_size, padded_shard_numel]``; may be strided.
        shape: shape of the full parameter.
        dim: the dimension that the parameter is cut along.

    Returns:
        The parameter, contiguous; a view of ``pieces`` where the layout allows it.
    """
    world_size = pieces.size(0)
    piece = padded_shard_shape(shape, dim, world_size)
    if dim == 0:
        rows = pieces.reshape([world_size * piece[0], *piece[1:]]).contiguous()
        return rows.narrow(0, 0, shape[0]) if _is_padded(world_size * piece[0] - shape[0]) else rows
    return pieces.view([world_size, *piece]).movedim(0, dim).reshape(list(shape)).contiguous()


def _is_padded(padding: int | SymInt) -> bool:
    """Return whether there are rows of padding. True for a symbolic number of rows, which may turn out to be zero."""
    return isinstance(padding, SymInt) or padding > 0


def disassemble(full: Tensor, dim: int, world_size: int) -> Tensor:
    """Cut ``full`` into all ranks' pieces, padded with zeros. Inverse of :func:`assemble`.

    Returns:
        ``[world_size, padded_shard_numel]``; ``REPLICATED``: a copy of ``full`` for each rank.
    """
    if dim == REPLICATED:
        # A collective reads the memory of its flattened input, and an expanded tensor has memory for only one row.
        return full.reshape(1, -1).expand(world_size, -1).contiguous()
    piece = padded_shard_shape(full.shape, dim, world_size)
    if dim == 0:
        padding = piece[0] * world_size - full.size(0)
        if _is_padded(padding):
            full = torch.constant_pad_nd(full, [0, 0] * (full.dim() - 1) + [0, padding])
        return full.reshape(world_size, -1)
    return full.unflatten(dim, (world_size, piece[dim])).movedim(dim, 0).reshape(world_size, -1)
