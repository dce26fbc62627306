"""Tensors that share the memory of another tensor, with a storage object of their own."""

from __future__ import annotations

import functools
from typing import NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from passes.fx.torch_internals.core import FakeTensor
from passes.fx.torch_internals.objects import set_how_it_moves


def has_memory(tensor: Tensor) -> bool:
    """Return whether a tensor has values. Meta and fake tensors have none."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def with_own_storage(tensor: Tensor) -> Tensor:
    """Return the same memory as a tensor whose storage begins and ends where the tensor does.

    Users hold such tensors as pieces of a flat buffer. A view would not do, as torch saves and copies its whole storage. A
    DTensor whose local tensor is at an offset can be neither saved nor copied, nor be an input of compiled code. The flat
    buffer lives for as long as the result does.

    The storage refuses to move to shared memory (``share_memory_()``, or by a queue of ``torch.multiprocessing``). Torch would
    move it in place, without the flat buffer.

    Args:
        tensor: not a leaf that requires gradients; of any strides.

    Returns:
        A tensor of the same shape, strides and values at storage offset 0, with a version counter of its own: for autograd it
        is no view. Writes to either tensor are seen in both. If ``tensor`` has no memory (meta, fake): a new tensor of the same
        shape and strides.
    """
    if not has_memory(tensor):
        return tensor.new_empty_strided(tensor.size(), tensor.stride())
    dtype = tensor.dtype
    carrier = _dlpack_dtype(dtype)
    alias = from_dlpack(to_dlpack(tensor if carrier is dtype else tensor.view(carrier)))
    set_how_it_moves(alias.untyped_storage(), _refuse_to_move)
    return alias if carrier is dtype else alias.view(dtype)


def _refuse_to_move(*_: object) -> NoReturn:
    raise RuntimeError(
        "A tensor of a sharded model (a parameter's local tensor, a gradient's, or what unshard() gathered) cannot move to "
        "shared memory: the model would go on with the memory that it has. Share a copy: tensor.clone()."
    )


@functools.cache
def _dlpack_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which tensors of ``dtype`` go through DLPack, which lacks some dtypes and changes others."""
    try:
        if from_dlpack(to_dlpack(torch.empty(1, dtype=dtype, device="cpu"))).dtype is dtype:
            return dtype
    except (BufferError, RuntimeError):
        pass
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
