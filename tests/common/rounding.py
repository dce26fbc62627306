"""Rounded gathers in plain torch, as a reference for the library's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from fsdp_compile import GatherPolicy
from tests.common.microbatches import Task
from tests.common.parity import Batch

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


def rounded_group(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Round float32 values that share a scale to ``dtype`` and back."""
    scale = values.abs().max() / LARGEST[dtype] + torch.finfo(torch.float32).tiny
    steps = values / scale
    return (steps.round() if dtype == torch.int8 else steps).to(dtype).float() * scale


def _mxfp8(values: Tensor) -> Tensor:
    """Round a block of 32 numbers, one after the other."""
    largest = values.abs().max().item()
    # An exponent of -126 is the least that a scale has here, as that of 0 does not matter.
    scale = 2.0 ** max(math.frexp(largest)[1] - 1 - 8, -126) if largest else 1.0
    return (values / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _nvfp4(values: Tensor, factor: Tensor) -> Tensor:
    """Round a block of 16 numbers to the nearest of a table; of two, to the one with an even index."""
    units = values / factor
    scale = (units.abs().max() / 6).to(torch.float8_e4m3fn).float()
    if scale == 0:
        return torch.zeros_like(values)
    found = []
    for unit in (units / scale).tolist():
        index = min(range(8), key=lambda index: (abs(abs(unit) - _E2M1[index]), index % 2))
        found.append(math.copysign(_E2M1[index], unit))
    return torch.tensor(found) * (scale * factor)


def rounded(param: Tensor, ranks: int, policy: GatherPolicy, dim: int = 0) -> Tensor:
    """Return a parameter as a forward sees it that gathers from ``ranks`` ranks."""
    if param.dim() < 2:
        return param
    shards = []
    for shard in param.float().chunk(ranks, dim):
        if isinstance(policy.dtype, str):
            factor = shard.abs().max() / (448 * 6) + torch.finfo(torch.float32).tiny
            blocks = shard.flatten().split(policy.scale)
            found = [_mxfp8(block) if policy.dtype == "mxfp8" else _nvfp4(block, factor) for block in blocks]
            shards.append(torch.cat(found).view(shard.shape))
            continue
        if isinstance(policy.scale, int):
            groups = list(shard.flatten().split(policy.scale))
        else:
            groups = list(shard) if policy.scale == "row" else [shard]
        shards.append(torch.cat([rounded_group(group.flatten(), policy.dtype) for group in groups]).view(shard.shape))
    return torch.cat(shards, dim).to(param.dtype)


def with_rounded_parameters(task: Task, ranks: int, policy: GatherPolicy) -> Task:
    """Return a task whose loss uses rounded parameters; gradients pass straight through the rounding."""

    def loss(model: Any, batch: Batch) -> Tensor:
        def straight_through(param: Tensor) -> Tensor:
            return param + (rounded(param.detach(), ranks, policy) - param.detach())

        values = {name: straight_through(param) for name, param in model.named_parameters()}
        forward: Callable[[Tensor], Tensor] = lambda inputs: functional_call(model, values, (inputs,))  # noqa: E731
        return task.loss(forward, batch)

    return replace(task, loss=loss)
