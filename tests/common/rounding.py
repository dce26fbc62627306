"""Rounded gathers in plain torch, as a reference for the library's."""

from __future__ import annotations

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


def rounded(param: Tensor, ranks: int, policy: GatherPolicy, dim: int = 0) -> Tensor:
    """Return a parameter as a forward sees it that gathers from ``ranks`` ranks."""
    if param.dim() < 2:
        return param
    shards = []
    for shard in param.float().chunk(ranks, dim):
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
