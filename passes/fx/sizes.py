"""Sizes of fake values as plain numbers, also where shapes are dynamic.

A size that is a symbol counts with the value that it had when the graph was traced. Asking for it adds no guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import SymInt, Tensor

# As Inductor does for a size that depends on data.
_UNKNOWN_SIZE = 8192


def size_hint(size: int | SymInt) -> int:
    """A size as a number."""
    if isinstance(size, SymInt):
        hint = size.node.hint
        return _UNKNOWN_SIZE if hint is None else int(hint)
    return int(size)


def shape_hint(value: Tensor) -> tuple[int, ...]:
    """The shape of a fake tensor in numbers."""
    return tuple(map(size_hint, value.shape))


def num_bytes(value: Any) -> int:
    """Bytes of a fake tensor, or of all in a tuple or list; of anything else none."""
    if isinstance(value, Tensor):
        numel = 1
        for size in value.shape:
            numel *= size_hint(size)
        return numel * value.dtype.itemsize
    if isinstance(value, Sequence) and not isinstance(value, (str, torch.Size)):
        return sum(map(num_bytes, value))
    return 0
