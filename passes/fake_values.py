"""Fake values for copies of nodes, faster than running the operators again."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager
from torch.utils import _pytree as pytree


class FakeCopies:
    """Copies of the fake values of a graph, which share memory with each other just as those do.

    Nodes that held one fake tensor would look as if they were views of each other.
    """

    def __init__(self) -> None:
        # By the storages of the graph: the copies', and where in it begins what is at the front there.
        self._storages: dict[int, tuple[torch.UntypedStorage, Any]] = {}

    def bind(self, value: Tensor, copy: Tensor) -> None:
        """Say that ``copy`` stands for ``value``, an input of the graph."""
        offset = copy.storage_offset() - value.storage_offset()
        self._storages[_identity(value)] = copy.untyped_storage(), offset

    def copy(self, value: Any) -> Any:
        """A copy of a fake value, or of a tuple or list of such."""
        return pytree.tree_map_only(FakeTensor, self._copy, value)

    def _copy(self, value: FakeTensor) -> FakeTensor:
        mode = value.fake_mode
        with in_kernel_invocation_manager(mode):
            meta = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
            if _identity(value) in self._storages:
                storage, offset = self._storages[_identity(value)]
                meta.set_(storage, offset + value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]
            else:
                self._storages[_identity(value)] = meta.untyped_storage(), 0
        return FakeTensor(mode, meta, value.device)


def _identity(value: Tensor) -> int:
    return value.untyped_storage()._cdata
