from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_collectives import _get_gradient_divide_factors

from passes.collectives.divide_factors import Averaging, DivideFactors, gradient_divide_factors

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
# In torch 2.11 a function makes the operator; builds without NCCL lack the function.
HAS_PREMUL_SUM = hasattr(dist, "_make_nccl_premul_sum") or callable(dist.ReduceOp.PREMUL_SUM)


class _Group:
    """A process group with the one method that both functions use."""

    def __init__(self, size: int):
        self._size = size

    def size(self) -> int:
        return self._size


def _group(size: int | None) -> _Group | None:
    return _Group(size) if size is not None else None


def _op_and_multiplier(op: Any) -> tuple[str, float | None]:
    if op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        return ("sum" if op == dist.ReduceOp.SUM else "avg"), None
    # Comparing operators does not compare their multipliers.
    kind, multiplier = op.__getstate__()
    assert kind.name == "PREMUL_SUM"
    return "premul_sum", multiplier


@pytest.mark.parametrize("force_sum", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_equals_torch(dtype: torch.dtype, force_sum: bool) -> None:
    for shards, replicas in itertools.product((None, *range(1, 9)), (None, 1, 2, 3)):
        for factor in (None, 1.0, float(shards or 1), 3.7, 6.0, 8.0):
            groups = (_group(shards), _group(replicas))
            ours = gradient_divide_factors(*groups, dtype, factor, force_sum)
            if ours.reduce_scatter_op == "premul_sum" and not HAS_PREMUL_SUM:
                continue
            # The device matters for MTIA alone, which only sums.
            before, after, reduce_scatter, all_reduce = _get_gradient_divide_factors(*groups, dtype, "cuda", factor, force_sum)  # type: ignore[arg-type]
            case = (shards, replicas, factor)
            assert (ours.predivide, ours.postdivide) == (before, after), case
            op, multiplier = _op_and_multiplier(reduce_scatter)
            assert (ours.reduce_scatter_op, ours.all_reduce_op) == (op, _op_and_multiplier(all_reduce)[0]), case
            assert (1 / ours.premul_divisor if ours.premul_divisor is not None else None) == multiplier, case


def test_half_precision_keeps_the_range() -> None:
    assert gradient_divide_factors(_Group(8), None, torch.float16) == DivideFactors(4, 2.0, "sum", "sum")
    assert gradient_divide_factors(_Group(3), _Group(2), torch.float16) == DivideFactors(4, 1.5, "sum", "sum")


def averaging(
    dtype: torch.dtype, shards: int, replicas: int | None = None, factor: float | None = None, force_sum: bool = False
) -> tuple[Averaging, tuple[float, ...]]:
    return Averaging.of(gradient_divide_factors(_Group(shards), _group(replicas), dtype, factor, force_sum), factor)


class TestAveraging:
    def test_backend_averages(self) -> None:
        assert averaging(torch.bfloat16, 8) == (Averaging("avg", "avg"), ())
        assert averaging(torch.float32, 4, 2) == (Averaging("avg", "avg"), ())

    def test_one_rank_divides_nothing(self) -> None:
        for dtype, force_sum in itertools.product(DTYPES, (False, True)):
            assert averaging(dtype, 1, 1, force_sum=force_sum) == (Averaging(), ())

    def test_sums_divide_the_result(self) -> None:
        assert averaging(torch.float32, 4, 2, force_sum=True) == (Averaging(divides_result=True), (8.0,))

    def test_factors_come_in_the_order_of_their_places(self) -> None:
        both = Averaging(divides_gradient=True, divides_result=True)
        assert averaging(torch.float16, 4, 2) == (both, (4.0, 2.0))
        assert averaging(torch.float16, 3, 2) == (both, (4.0, 1.5))
        # A division by 1 is left out.
        assert averaging(torch.float16, 2) == (Averaging(divides_gradient=True), (2.0,))
        assert averaging(torch.float16, 3) == (both, (2.0, 1.5))

    @pytest.mark.parametrize("force_sum", [False, True])
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(("shards", "replicas"), [(8, None), (4, 2), (1, 3), (1, None)])
    def test_value_of_a_users_factor_is_no_structure(
        self, dtype: torch.dtype, force_sum: bool, shards: int, replicas: int | None
    ) -> None:
        structures = set()
        for factor in (1.0, float(shards), float(shards * (replicas or 1)), 3.7, 6.0, 1e6):
            structure, values = averaging(dtype, shards, replicas, factor, force_sum)
            structures.add(structure)
            quotient = 1.0
            for value in values:
                quotient *= value
            assert quotient == pytest.approx(factor)
        assert len(structures) == 1

    def test_users_factor_on_a_backend_that_averages(self) -> None:
        # Functional collectives have no operator that scales, so the shard is divided, before anything is added to it.
        assert averaging(torch.float32, 4, 2, factor=6.0) == (Averaging(divides_scattered=True), (6.0,))
        assert averaging(torch.float32, 4, 2, factor=4.0) == (Averaging(divides_scattered=True), (4.0,))
