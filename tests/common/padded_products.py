"""Matrix products with padded operands, which Inductor makes on a GPU where it measures that they are faster."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch._inductor.config
from torch import Tensor
from torch._inductor.fx_passes import pad_mm


@contextlib.contextmanager
def padded_products() -> Iterator[list[tuple[torch.Size, torch.Size]]]:
    """Make Inductor pad each product that it can pad, on any device and without measuring, inside of the ``with`` block.

    It pads dimensions that are no multiple of 16 bytes, of 16 and 32-bit dtypes. A slice of the padded result takes the place of
    the product, with strides of the padded one.

    Yields:
        A list that gets the shapes of the operands of each product that it thinks of padding.
    """
    products: list[tuple[torch.Size, torch.Size]] = []

    def is_on_gpu(left: Tensor, right: Tensor) -> bool:
        products.append((left.shape, right.shape))
        return True

    with (
        torch._inductor.config.patch(force_shape_pad=True),
        patch.object(pad_mm, "check_device", is_on_gpu),
        patch.object(pad_mm, "has_triton", lambda: True),
    ):
        yield products
