"""Divide factors: a reduction averages by the operator of its collectives, and by divisions before and after them.

:func:`gradient_divide_factors` is the arithmetic, equal to torch's. :class:`Averaging` is the structure of a graph that follows
from it. The factors themselves are inputs of the graph, which is not lowered again for other values.

Source: ``_get_gradient_divide_factors`` in torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch


class SizedGroup(Protocol):
    """The part of a process group that the arithmetic needs."""

    def size(self) -> int: ...


class DivideFactors(NamedTuple):
    """The division of one reduction.

    Attributes:
        predivide: divides the gradient before the reduce-scatter; None: no division there.
        postdivide: divides the shard after the last collective; None: no division there.
        reduce_scatter_op: "sum"; "avg"; or "premul_sum", which multiplies by ``1 / premul_divisor`` and sums (NCCL).
        all_reduce_op: "sum" or "avg".
        premul_divisor: the divisor of "premul_sum"; None: another operator.
    """

    predivide: float | None
    postdivide: float | None
    reduce_scatter_op: str
    all_reduce_op: str
    premul_divisor: float | None = None


def gradient_divide_factors(
    reduce_scatter_group: SizedGroup | None,
    all_reduce_group: SizedGroup | None,
    reduce_dtype: torch.dtype,
    factor: float | None = None,
    force_sum: bool = False,
) -> DivideFactors:
    """Compute the divide factors of a reduction over these groups.

    Args:
        reduce_scatter_group: the group that gradients are scattered over; None: they are only replicated.
        all_reduce_group: the group of replicas; None: there are none.
        reduce_dtype: dtype that the reduction runs in.
        factor: the divisor; None: the number of ranks of both groups.
        force_sum: reduce with sums only; also for a backend that has no other operator.

    In float32 and bfloat16, the backend's operator divides, if it has one. Else the shard is divided after the collectives, as
    it is less data than the gradient. Other dtypes (float16) have little range. With N ranks in all, the gradient is divided by
    about sqrt(N) before the collectives, and the shard by the rest after them. So sums do not overflow, and quotients do not
    underflow.
    """
    has_range = reduce_dtype in (torch.float32, torch.bfloat16)
    num_shards = reduce_scatter_group.size() if reduce_scatter_group is not None else 1
    num_ranks = num_shards * (all_reduce_group.size() if all_reduce_group is not None else 1)
    if has_range and not force_sum:
        if factor is None:
            op = "avg" if num_ranks > 1 else "sum"
            return DivideFactors(None, None, op, op)
        if reduce_scatter_group is not None and factor == num_shards:
            return DivideFactors(None, None, "avg", "sum")
        return DivideFactors(None, None, "premul_sum", "sum", factor)
    divisor = float(num_ranks) if factor is None else factor
    if has_range:
        return DivideFactors(None, divisor, "sum", "sum")
    predivide = 1
    while divisor % predivide == 0 and divisor / predivide > predivide:
        predivide *= 2
    return DivideFactors(predivide, divisor / predivide, "sum", "sum")


def factor_dtype(reduce_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of divide factors for a reduction: float32, or float64 for float64. Narrow dtypes are too coarse."""
    return torch.float64 if reduce_dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Averaging:
    """The operators and divisions of a reduction, as structure of a graph.

    Attributes:
        reduce_scatter_op, all_reduce_op: "sum" or "avg".
        divides_gradient: a factor divides the gradient before the reduce-scatter.
        divides_scattered: a factor divides the shard right after the reduce-scatter, before any accumulation. This division
            replaces "premul_sum", which functional collectives do not have.
        divides_result: a factor divides the shard after the last collective.
    """

    reduce_scatter_op: str = "sum"
    all_reduce_op: str = "sum"
    divides_gradient: bool = False
    divides_scattered: bool = False
    divides_result: bool = False

    @staticmethod
    def of(factors: DivideFactors, factor: float | None) -> tuple[Averaging, tuple[float, ...]]:
        """Separate the structure of a division from its factors.

        Args:
            factors: the division.
            factor: the user's factor; None: none. The structure does not depend on its value.

        Returns:
            The structure, and the values of its factors in the order of its attributes.
        """
        if factors.reduce_scatter_op == "premul_sum" or factors.all_reduce_op != factors.reduce_scatter_op:
            # The operators differ where a user's factor equals the number of shards.
            assert factor is not None
            return Averaging(divides_scattered=True), (factor,)
        divides = [value is not None and (factor is not None or value != 1) for value in factors[:2]]
        values = tuple(float(value) for value, used in zip(factors[:2], divides, strict=True) if used and value is not None)
        return Averaging(factors.reduce_scatter_op, factors.all_reduce_op, divides[0], False, divides[1]), values
