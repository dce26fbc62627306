"""What optimizers keep on the device for sharded parameters, in bytes: asked of those that have stepped. The buffers that they
let gradients lie in between steps count, too."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from passes.fx.torch_internals.core import is_traceable_wrapper_subclass

from ..units.sharded_param import ShardedParam

# Optimizers compare by identity.
_stepped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
_watchers: OrderedDict[int, Callable[[], None]] = OrderedDict()


def _note_step(optimizer: Optimizer, *_: object) -> None:
    if optimizer in _stepped:
        return
    _stepped.add(optimizer)
    for watcher in list(_watchers.values()):
        watcher()


# Every torch optimizer calls it. What is kept exists from the first step on.
register_optimizer_step_post_hook(_note_step)


def on_first_steps(function: Callable[[], None]) -> RemovableHandle:
    """Have a function called whenever an optimizer has stepped for the first time, until the handle is removed."""
    handle = RemovableHandle(_watchers)
    _watchers[handle.id] = function
    return handle


def device_state_bytes(params: Iterable[ShardedParam], assumed: Callable[[ShardedParam], float]) -> int:
    """The bytes of state on the device for some parameters, as on the rank with the largest shards: equal on all ranks.

    Scalars, such as counts of steps, do not count: for them alone, nothing need be chosen anew.

    Args:
        params: those whose state counts.
        assumed: the bytes for a parameter of which no optimizer that has stepped keeps anything yet. One whose optimizer keeps
            nothing for any parameter (SGD without momentum) counts with none.
    """
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in list(_stepped):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            owners.setdefault(id(param), []).append(optimizer)
    return round(sum(_state_bytes(param, owners.get(id(param.param), ()), assumed) + _home_bytes(param) for param in params))


def _home_bytes(param: ShardedParam) -> int:
    home = param.state.home
    return param.shard.nbytes if home is not None and home[0]() is not None else 0


def _state_bytes(param: ShardedParam, optimizers: Sequence[Optimizer], assumed: Callable[[ShardedParam], float]) -> float:
    # Not as an attribute, by which a flat optimizer lends it to users.
    states = [vars(optimizer)["state"] for optimizer in optimizers]
    entries = [kept[param.param] for kept in states if param.param in kept]
    if not entries and not (states and not any(states)):
        return assumed(param)
    kept = (value for entry in entries for value in entry.values() if isinstance(value, Tensor) and value.dim())
    return sum(_on_largest_rank(value, param) for value in kept)


def _on_largest_rank(value: Any, param: ShardedParam) -> int:
    """The bytes of one tensor that is kept for a parameter; of one with the shard's elements, those of a padded shard."""
    value = value._local_tensor if isinstance(value, DTensor) else value
    plain = _plain_tensors(value)
    if any(tensor.device.type != param.compute_device.type for tensor in plain):
        return 0
    num_bytes = sum(tensor.nbytes for tensor in plain)
    if value.shape != param.local.shape:
        return num_bytes
    if type(value) is Tensor or not value.numel():
        return value.dtype.itemsize * param.padded_numel
    # Such as eight bits and a scale for each block.
    return -(-num_bytes * param.padded_numel // value.numel())


def _plain_tensors(value: Any) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [plain for name in value.__tensor_flatten__()[0] for plain in _plain_tensors(getattr(value, name))]
