"""Where reduced gradients end up: ``param.grad``, as DTensors, then the parameter's post-accumulate-grad hooks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

if TYPE_CHECKING:
    from .unit import ShardedParam

# Parameters whose hooks are due when a backward ends, by the id that autograd gives the backward.
_hooks_due: dict[int, dict[ShardedParam, None]] = {}


@torch.no_grad()
def land_gradients(params: Sequence[ShardedParam], padded_grads: Sequence[Tensor]) -> None:
    """Set or add to ``param.grad`` of each parameter, from this rank's padded shard of its reduced gradient."""
    sums: list[Tensor] = []
    addends: list[Tensor] = []
    for sharded, padded_grad in zip(params, padded_grads, strict=True):
        param = sharded.param
        grad = sharded.unpad(padded_grad)
        if param.grad is None:
            param.grad = DTensor(grad, param._spec, requires_grad=False)  # type: ignore[attr-defined]
        else:
            sums.append(param.grad._local_tensor)  # type: ignore[attr-defined]
            addends.append(grad)
        if param._post_accumulate_grad_hooks:
            _call_hooks_after_backward(sharded)
    if sums:
        torch._foreach_add_(sums, addends)


def _call_hooks_after_backward(sharded: ShardedParam) -> None:
    """Call a parameter's hooks once, when its gradient is whole: several graphs may add to it in one backward."""
    backward = torch._C._current_graph_task_id()
    if backward not in _hooks_due:
        _hooks_due[backward] = {}
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _call_hooks(backward))
    _hooks_due[backward][sharded] = None


def _call_hooks(backward: int) -> None:
    for sharded in _hooks_due.pop(backward):
        for hook in list(sharded.param._post_accumulate_grad_hooks.values()):  # type: ignore[attr-defined]
            hook(sharded.param)
