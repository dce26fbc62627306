"""Fake values of nodes: by running an operator, or for copied nodes, faster than that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_arg

from .torch_internals.core import FakeTensor, enable_python_dispatcher, in_kernel_invocation_manager
from .torch_internals.objects import storage_id


def evaluate(node: Node) -> Any:
    """Return the fake value of an operator, from those of its arguments."""
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    function = cast("Callable[..., Any]", node.target)
    with enable_python_dispatcher():
        return function(*args, **kwargs)


class FakeCopies:
    """Copies of the fake values of a graph, which share memory with each other as the originals do.

    Each copied node needs a fake tensor of its own: two nodes with one fake tensor would look like views of each other. Tensors
    bound to the graph's inputs have to share memory as the inputs do (:func:`shared_memory`).
    """

    def __init__(self) -> None:
        # For each storage of the graph, the copy's storage, and how much to add to storage offsets in it.
        self._storages: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def bind(self, value: Tensor, copy: Tensor) -> None:
        """Use ``copy`` as the copy of ``value``, an input of the graph."""
        offset = copy.storage_offset() - value.storage_offset()
        self._storages[_identity(value)] = copy.untyped_storage(), offset

    def copy(self, value: Any) -> Any:
        """Copy a fake value, or a tuple or list of fake values."""
        if isinstance(value, FakeTensor):
            return self._copy(value)
        return type(value)(map(self.copy, value)) if isinstance(value, (list, tuple)) else value

    def _copy(self, value: FakeTensor) -> FakeTensor:
        identity, shape, stride = _identity(value), value.shape, value.stride()
        with in_kernel_invocation_manager(value.fake_mode):
            meta = torch.empty_strided(shape, stride, dtype=value.dtype, device="meta")
            if identity in self._storages:
                storage, offset = self._storages[identity]
                meta.set_(storage, offset + value.storage_offset(), shape, stride)  # type: ignore[call-overload]
            else:
                self._storages[identity] = meta.untyped_storage(), 0
        return FakeTensor(value.fake_mode, meta, value.device)


def _identity(value: Tensor) -> int:
    return storage_id(value)


def shared_memory(values: Sequence[Tensor]) -> list[tuple[int, str]]:
    """Find, for each value, the first value with the same storage.

    Returns:
        For each value, the index of the first one, and the difference of their storage offsets in elements, as text.
    """
    first: dict[int, int] = {}
    indices = [first.setdefault(_identity(value), index) for index, value in enumerate(values)]
    return [
        (index, str(value.storage_offset() - values[index].storage_offset()))
        for index, value in zip(indices, values, strict=True)
    ]
