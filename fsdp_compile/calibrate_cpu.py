"""Numbers that a calibration measures only on a CPU: attention, pointwise operations, and the host's time.

On a GPU the host runs ahead, and kernels are as fast as memory. A CPU computes and calls kernels with the same core.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.models.hardware import dtype_name

_aten = torch.ops.aten
_attention: Any = _aten._scaled_dot_product_flash_attention_for_cpu.default
_attention_backward: Any = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_DTYPES = (torch.float32, torch.bfloat16)
# Batch and heads, sequence length, and two head sizes: attention's products grow with the head size, its other work does not.
_BATCH, _SEQUENCE = (1, 2), 256
_HEADS = (32, 128)
# Flops for each score and element of a head: two products in forward, five in backward, and half of them if causal.
_FLOPS = (2 + 5) * 2 / 2
_MANY = 100
# So many weights of ``[_ROWS, 2 * _ROWS]`` fit into no cache.
_ROWS, _WEIGHTS = 512, 32
# Time of the library's Python code for a segment and for a call of a graph. The unit is the launch of a kernel, which is Python
# code as well. Measured on an AMD EPYC with models of 2 to 16 layers, so small that nothing else takes time.
_SEGMENT_LAUNCHES = 2.5
_GRAPH_LAUNCHES = 250
# Elements that fit into a core's larger cache only: kernels read values that other kernels have written.
_IN_CACHE = 1 << 17


def measure_cpu(
    seconds: Callable[[Callable[[], object]], float], agree: Callable[[Sequence[float]], list[float]]
) -> dict[str, Any]:
    """Measure a CPU. Return numbers by the names of fields of :class:`~passes.models.hardware.Hardware`.

    Args:
        seconds: measures the seconds that a call takes.
        agree: makes times equal on all ranks.
    """
    times = [seconds(_train_attention(dtype, head)) for dtype in _DTYPES for head in _HEADS]
    *attention, launch, small, large = agree([*times, seconds(_launch), seconds(_pointwise(8)), seconds(_pointwise(_IN_CACHE))])
    rates, scores = {}, {}
    pairs = torch.Size(_BATCH).numel() * _SEQUENCE**2
    for index, dtype in enumerate(_DTYPES):
        short, long = attention[2 * index : 2 * index + 2]
        of_products = max(long - short, 1e-9) / (_HEADS[1] - _HEADS[0])
        rates[dtype_name(dtype)] = _FLOPS * pairs / of_products
        scores[dtype_name(dtype)] = max(short - of_products * _HEADS[0], 0.0) / pairs
    return {
        "attention_flops_per_s": rates,
        "score_s": scores,
        "kernel_s": launch / _MANY,
        "segment_s": _SEGMENT_LAUNCHES * launch / _MANY,
        "graph_s": _GRAPH_LAUNCHES * launch / _MANY,
        "operation_s": max(large - small, 0.0) / _MANY / (_IN_CACHE - 8),
    }


def cold_product(dtype: torch.dtype, seconds: Callable[[Callable[[], object]], float]) -> tuple[float, float]:
    """Measure a product of a matrix in cache with one that is in no cache, like weights. Return its flops and its seconds."""
    source = torch.ones(_ROWS, _ROWS, dtype=dtype)
    weights = itertools.cycle([torch.ones(_ROWS, 2 * _ROWS, dtype=dtype) for _ in range(_WEIGHTS)])
    return 4.0 * _ROWS**3, seconds(lambda: source @ next(weights))


def _train_attention(dtype: torch.dtype, head: int) -> Callable[[], object]:
    """Return a function that runs forward and backward of causal attention. Queries are ``[1, 2, 256, head]``."""
    query, key, value, grad = torch.randn(4, *_BATCH, _SEQUENCE, head, dtype=dtype)

    def train() -> Tensor:
        result, sums = _attention(query, key, value, 0.0, True)
        return _attention_backward(grad, query, key, value, result, sums, 0.0, True)[0]  # type: ignore[no-any-return]

    return train


def _launch() -> None:
    """Run ``_MANY`` times the Python that generated code has around a kernel, with a kernel that does next to nothing."""
    source = torch.ones(8, 8)
    for _ in range(_MANY):
        buffer = torch.empty(8, 8)
        torch.mm(source.t(), source, out=buffer)
        buffer.view(64)


def _pointwise(numel: int) -> Callable[[], None]:
    """Return a function that runs ``_MANY`` pointwise operations in place on ``numel`` elements of float32."""
    values = torch.ones(numel)

    def run() -> None:
        for _ in range(_MANY):
            values.mul_(1.0)

    return run
