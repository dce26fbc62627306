"""Traced sizes: a symbol of a traced graph stays what it was first, an input's size.

AOTAutograd's tracer notes for each symbol how the graph gets its value. DTensors compute strides by ``max(size, 1)``, whose
value is the symbol ``size`` again. torch 2.13 then notes that the symbol is the result of this operation, which reads the
symbol: a ``RecursionError`` for tensor parallel layers whose sequence length is dynamic
(https://github.com/pytorch/pytorch/issues/152954).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import sympy
import torch

from passes.fx.torch_internals.patches import set_proxy_slot


@contextlib.contextmanager
def first_size_proxies() -> Iterator[None]:
    """Keep the first proxy of each symbol in what is traced inside of the ``with`` block."""
    if not set_proxy_slot.is_known():
        yield
        return
    with set_proxy_slot.replaced(_keeping_the_first):
        yield


def _keeping_the_first(set_slot: Callable[..., None]) -> Callable[..., None]:
    def set_proxy_slot(value: Any, tracer: Any, proxy: Any) -> None:
        symbol = value.node.expr if isinstance(value, torch.SymInt) else None
        first = tracer.sympy_expr_tracker.get(symbol) if isinstance(symbol, sympy.Symbol) else None
        set_slot(value, tracer, proxy)
        if first is not None:
            tracer.sympy_expr_tracker[symbol] = first

    return set_proxy_slot
