"""Values of symbolic sizes."""

from __future__ import annotations

from typing import cast

import pytest
import sympy
import torch
from torch import SymInt, Tensor
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_compile.compiler.dynamic_sizes import DynamicSizes
from passes.fx.sizes import num_bytes, size_value, sizes_at, symbolic_sizes
from passes.fx.torch_internals.core import FakeTensorMode


@pytest.fixture
def rows() -> Tensor:
    """A float32 tensor of six rows and ten columns, both dynamic."""
    return FakeTensorMode(shape_env=ShapeEnv()).from_tensor(torch.empty(6, 10), static_shapes=False)


def symbol(size: int | SymInt) -> sympy.Symbol:
    return cast("SymInt", size).node.expr


def test_symbols_without_a_value_count_as_traced(rows: Tensor) -> None:
    first = symbol(rows.shape[0])
    with sizes_at({first: 7}):
        assert [size_value(size) for size in rows.shape] == [7, 10]
        assert size_value(rows.shape[0] * rows.shape[1]) == 70 and num_bytes(rows) == 280
    with symbolic_sizes({}):
        assert size_value(rows.shape[0]) == first and not isinstance(size_value(rows.shape[1]), int)
    assert num_bytes(rows) == 240


def test_symbols_that_are_no_size_of_their_own(rows: Tensor) -> None:
    """A graph may see a symbol only within a product, such as a length times the batch."""
    with rows.fake_mode:  # type: ignore[attr-defined]
        product = rows.new_empty(rows.shape[0] * rows.shape[1])
    sizes = DynamicSizes.of([product])
    assert sizes.values == {symbol(rows.shape[0]): 6, symbol(rows.shape[1]): 10} and sizes.are_open
    sizes.admit_larger(lambda: num_bytes(product) <= 4 * 240)
    with sizes.counted():
        assert 3.5 * 240 < num_bytes(product) <= 4 * 240
