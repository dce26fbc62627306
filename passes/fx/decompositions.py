"""Inductor's decompositions of operators, without those of products that depend on the number of rows.

On CPU, Inductor makes sums of elementwise products of small products with one row. The partitioner may then recompute what a
product reads, for which backward gathers further parameters. Ranks with one row and ranks with several would gather different
ones. Whole products are as fast, or nearly so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .torch_internals.operators import select_decomp_table

_PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the decompositions to trace joint graphs with, by operator."""
    table = select_decomp_table()
    return {**table, **{product: _except_on_cpu(table[product]) for product in _PRODUCTS if product in table}}


def _except_on_cpu(decompose: Callable[..., Any]) -> Callable[..., Any]:
    def decomposed(first: Tensor, *args: Any, **kwargs: Any) -> Any:
        return NotImplemented if first.device.type == "cpu" else decompose(first, *args, **kwargs)

    return decomposed
