"""Tensors in the memory of another, with a storage object of their own."""

from __future__ import annotations

import functools
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack, to_dlpack

from passes.fx.torch_internals.core import FakeTensor


def has_memory(tensor: Tensor) -> bool:
    """Whether there are values behind a tensor: not on the meta device, nor in a fake mode."""
    return not tensor.is_meta and not isinstance(tensor, FakeTensor)


def with_own_storage(tensor: Tensor) -> Tensor:
    """The same memory, as a tensor whose storage begins and ends where the tensor does.

    For pieces of a flat buffer that users hold. A view would not do: torch saves and copies the whole storage of a tensor. A
    DTensor whose local tensor is at an offset can be neither saved nor copied, nor be an input of compiled code. The flat
    buffer lives for as long as the result does.

    The storage refuses to be moved to shared memory (``share_memory_()``, or by a queue of ``torch.multiprocessing``): torch
    would do that in place, and the flat buffer would stay behind.

    Args:
        tensor: not a leaf that requires gradients; of any strides.

    Returns:
        A tensor of the same shape, strides and values at storage offset 0, and with a version counter of its own: for autograd
        it is no view. Writes to the one are seen in the other. Without memory (meta, fake) there is nothing to share: a new
        tensor that looks alike.
    """
    if not has_memory(tensor):
        return tensor.new_empty_strided(tensor.size(), tensor.stride())
    dtype = tensor.dtype
    carrier = _carrier(dtype)
    alias = from_dlpack(to_dlpack(tensor if carrier is dtype else tensor.view(carrier)))
    storage: Any = alias.untyped_storage()
    storage._share_fd_cpu_ = storage._share_filename_cpu_ = _refuse_to_move
    return alias if carrier is dtype else alias.view(dtype)


def _refuse_to_move(*_: object) -> NoReturn:
    raise RuntimeError(
        "A tensor of a sharded model (a parameter's local tensor, a gradient's, or what unshard() gathered) cannot move to "
        "shared memory: the model would go on with the memory that it has. Share a copy: tensor.clone()."
    )


@functools.cache
def _carrier(dtype: torch.dtype) -> torch.dtype:
    """The dtype as which tensors of a dtype go through DLPack, which lacks some of torch's and returns others changed."""
    try:
        if from_dlpack(to_dlpack(torch.empty(1, dtype=dtype, device="cpu"))).dtype is dtype:
            return dtype
    except (BufferError, RuntimeError):
        pass
    return {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
