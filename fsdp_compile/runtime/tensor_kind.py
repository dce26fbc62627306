"""The dtype and device of tensors that do not exist yet."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class TensorKind(NamedTuple):
    """The dtype and device of a tensor. It can be stored, where a tensor of a trace cannot."""

    dtype: torch.dtype
    device: torch.device


#: A value with the dtype and device of a tensor to make.
Like = Tensor | TensorKind
