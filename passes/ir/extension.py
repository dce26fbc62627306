"""All-gather extensions: user code that encodes a parameter before its gather, and decodes it after the gather.

``unshard_extension`` (:mod:`passes.ir.ops`) names an extension by its key, as graphs hold no objects. Encoding makes the
tensors to send, of any shapes and dtypes, from the inner tensors of a shard. Decoding makes the parameter from the sent tensors
of all ranks, which are concatenated along dimension 0. Encoding and decoding are traced with the graph, and must be traceable.
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
    """The encoding and decoding of a parameter. Errors of both name the parameter."""

    def encode(self, tensors: Mapping[str, Tensor], name: str) -> tuple[Sequence[Tensor], Any]:
        """Encode a shard.

        Args:
            tensors: the inner tensors of the shard, by attribute name.
            name: the parameter's name, for errors.

        Returns:
            The tensors to send, and metadata for :meth:`decode`.
        """

    def decode(self, gathered: Sequence[Tensor], metadata: Any, name: str) -> Tensor:
        """Decode the full parameter.

        Args:
            gathered: the sent tensors of all ranks, concatenated along dimension 0.
            metadata: the metadata that :meth:`encode` returned.
            name: the parameter's name, for errors.
        """


_extensions: weakref.WeakValueDictionary[str, Extension] = weakref.WeakValueDictionary()


def register_extension(key: str, extension: Extension) -> None:
    """Register an extension under a key, by which graphs find it. The reference is weak: the caller keeps the extension."""
    _extensions[key] = extension


def extension_of(key: str, name: str) -> Extension:
    """Return the extension of a key.

    Raises:
        RuntimeError: the extension is gone, as is its parameter ``name``.
    """
    found = _extensions.get(key)
    if found is None:
        raise RuntimeError(f"A graph gathers parameter {name}, but its model is gone.")
    return found


def with_rows(piece: Tensor) -> Tensor:
    """Return a tensor to send, contiguous and at least 1-d. The tensors of ranks are concatenated along dimension 0."""
    return piece.reshape(1) if piece.dim() == 0 else piece.contiguous()


def gathered_shape(piece: Tensor, ranks: int) -> list[int]:
    """Return the shape of the tensors like ``piece`` from all ranks, concatenated along dimension 0."""
    return [ranks * piece.size(0), *piece.shape[1:]]


def plain_gradient(grad: Tensor, name: str) -> Tensor:
    """Convert the gradient of a parameter to a plain tensor.

    A gradient that is a tensor subclass, as the parameter may be, is copied into a plain tensor. The subclasses of other
    parallelisms (DTensor, AsyncCollectiveTensor) are returned as they are.

    Raises:
        NotImplementedError: the gradient is sparse.
        TypeError: the gradient does not copy into a plain tensor.
    """
    if grad.layout != torch.strided:
        raise NotImplementedError(
            f"The gradient of parameter {name} is sparse, as that of nn.Embedding(sparse=True). Sparse gradients are not "
            "supported: build the module with sparse=False."
        )
    if isinstance(grad, (DTensor, AsyncCollectiveTensor)):
        return grad
    return copied_to_plain(grad, f"The gradient of parameter {name}")


def copied_to_plain(tensor: Tensor, what: str) -> Tensor:
    """Copy a tensor subclass into a plain tensor. A plain tensor is returned as it is.

    Args:
        tensor: the tensor.
        what: names it in the error.

    Raises:
        TypeError: the subclass does not copy into a plain tensor.
    """
    if not is_traceable_wrapper_subclass(tensor):
        return tensor
    inner = getattr(tensor, tensor.__tensor_flatten__()[0][0])
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=inner.device)
    try:
        plain.copy_(tensor)
    except Exception as error:
        raise TypeError(
            f"{what} is a {type(tensor).__name__}, which does not copy into a plain tensor: its __torch_dispatch__ has to "
            "support aten.copy_."
        ) from error
    return plain
