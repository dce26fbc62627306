"""Clipping and an optimizer's step in one call, which checks gradients once."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from .clip import clip_grad_norm_, clip_groups
from .flat_optimizer import FlatOptimizer


def clip_and_step(
    optimizer: Optimizer,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip the gradients of all parameters of an optimizer with :func:`clip_grad_norm_`, and call its ``step()``.

    Values are bitwise those of the two calls. With ``flat_optimizer(..., one_buffer=True)``, the host checks the gradients in
    the buffer once, instead of once for each call. In other cases (other optimizers, hooks before steps, replaced gradients)
    this function makes the two calls.

    Args:
        optimizer: any optimizer. Schedulers and hooks are called as by ``optimizer.step()``.
        max_norm, norm_type, error_if_nonfinite, foreach: as for :func:`clip_grad_norm_`.

    Returns:
        The norm before clipping, as :func:`clip_grad_norm_` returns it.

    Raises:
        RuntimeError: as :func:`clip_grad_norm_`; then nothing is stepped.
        TypeError: ``optimizer`` has no ``param_groups``.
    """
    if not hasattr(optimizer, "param_groups"):
        raise TypeError(
            f"clip_and_step takes an optimizer, not a {type(optimizer).__name__}. Call "
            "clip_and_step(optimizer, max_norm); to clip gradients without a step, clip_grad_norm_(parameters, max_norm)."
        )
    if torch.compiler.is_dynamo_compiling():
        return torch.compiler.disable(_clip_and_step)(optimizer, max_norm, norm_type, error_if_nonfinite, foreach)
    return _clip_and_step(optimizer, max_norm, norm_type, error_if_nonfinite, foreach)


def _clip_and_step(optimizer: Optimizer, max_norm: float, norm_type: float, *options: Any) -> Tensor:
    if isinstance(optimizer, FlatOptimizer) and norm_type > 0:
        with torch.no_grad(), optimizer.grouped_gradients() as found:
            if found is not None:
                norm = clip_groups(found, float(norm_type), max_norm, *options)
                optimizer.step()
                return norm
    params = [param for group in optimizer.param_groups for param in group["params"]]
    norm = clip_grad_norm_(params, max_norm, norm_type, *options)
    optimizer.step()
    return norm
