"""All-gather extensions: parameters that are encoded ahead of their gather, and decoded behind it, by code of the user's.

``unshard_extension`` (:mod:`passes.ir.ops`) names an extension by its key, as graphs hold no objects. Encoding turns the
tensors that a shard is made of into those that are sent, of any shapes and dtypes; decoding makes the parameter of what all
ranks sent, rank by rank along the first dimension. Both are traced with the graph, and must be traceable.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..fx.torch_internals.core import is_traceable_wrapper_subclass
from ..fx.torch_internals.distributed import AsyncCollectiveTensor


class Extension(Protocol):
    """How a parameter is encoded and decoded. Both raise errors that name the parameter."""

    def encode(self, tensors: Mapping[str, Tensor], name: str) -> tuple[Sequence[Tensor], Any]:
        """What to send of the shard that is made of these tensors, by name, and what decoding needs besides."""

    def decode(self, gathered: Sequence[Tensor], metadata: Any, name: str) -> Tensor:
        """The parameter."""


_extensions: weakref.WeakValueDictionary[str, Extension] = weakref.WeakValueDictionary()


def register_extension(key: str, extension: Extension) -> None:
    """Let graphs find an extension by this key, while something else holds it."""
    _extensions[key] = extension


def extension_of(key: str, name: str) -> Extension:
    """The extension of that key.

    Raises:
        RuntimeError: it is gone, as the parameter of this name is.
    """
    found = _extensions.get(key)
    if found is None:
        raise RuntimeError(f"A graph gathers parameter {name}, but its model is gone.")
    return found


def with_rows(piece: Tensor) -> Tensor:
    """A tensor that is sent, contiguous and with a dimension that ranks follow each other along."""
    return piece.reshape(1) if piece.dim() == 0 else piece.contiguous()


def gathered_shape(piece: Tensor, ranks: int) -> list[int]:
    """The shape of what so many ranks send of such tensors."""
    return [ranks * piece.size(0), *piece.shape[1:]]


def plain_gradient(grad: Tensor, name: str) -> Tensor:
    """The gradient of a parameter as a plain tensor, also where it is a subclass as a parameter of the model is: what it copies
    as. What other parallelisms make of gradients is left to them.

    Raises:
        TypeError: it does not copy into a plain tensor.
    """
    if not is_traceable_wrapper_subclass(grad) or isinstance(grad, (DTensor, AsyncCollectiveTensor)):
        return grad
    inner = getattr(grad, grad.__tensor_flatten__()[0][0])
    plain = torch.empty(grad.shape, dtype=grad.dtype, device=inner.device)
    try:
        plain.copy_(grad)
    except Exception as error:
        raise TypeError(
            f"The gradient of parameter {name} is a {type(grad).__name__}, which does not copy into a plain tensor: its "
            "__torch_dispatch__ has to support aten.copy_."
        ) from error
    return plain
