"""Bytes of optimizer state on the device for sharded parameters, as found in optimizers that have stepped. Buffers that hold
gradients between steps count, too."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from passes.fx.torch_internals.core import is_traceable_wrapper_subclass
from passes.fx.torch_internals.objects import as_local

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


# Called after every optimizer step. State is allocated in the first.
register_optimizer_step_post_hook(_note_step)


def on_first_steps(function: Callable[[], None]) -> RemovableHandle:
    """Call ``function`` after the first step of each optimizer, until the returned handle is removed."""
    handle = RemovableHandle(_watchers)
    _watchers[handle.id] = function
    return handle


def device_state_bytes(params: Iterable[ShardedParam], assumed: Callable[[ShardedParam], float]) -> int:
    """Return the bytes of state on the device for ``params``, as on the rank with the largest shards: equal on all ranks.

    Scalars, such as step counts, do not count: they alone should not make a memory budget choose anew.

    Args:
        params: the parameters whose state counts.
        assumed: the bytes for a parameter for which no optimizer that has stepped has state yet. If the parameter's optimizers
            have stepped and have no state at all (SGD without momentum), it counts as 0 instead.
    """
    owners: dict[int, list[Optimizer]] = {}
    for optimizer in list(_stepped):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            owners.setdefault(id(param), []).append(optimizer)
    return round(sum(_state_bytes(param, owners.get(id(param.param), ()), assumed) + _home_bytes(param) for param in params))


def _home_bytes(param: ShardedParam) -> int:
    slot = param.state.gradient_slot
    return param.shard.nbytes if slot is not None and slot[0]() is not None else 0


def _state_bytes(param: ShardedParam, optimizers: Sequence[Optimizer], assumed: Callable[[ShardedParam], float]) -> float:
    # Not ``optimizer.state``: after a read of that, a flat optimizer checks its state for changes in each step.
    states = [vars(optimizer)["state"] for optimizer in optimizers]
    entries = [kept[param.param] for kept in states if param.param in kept]
    if not entries and not (states and not any(states)):
        return assumed(param)
    kept = (value for entry in entries for value in entry.values() if isinstance(value, Tensor) and value.dim())
    return sum(_on_largest_rank(value, param) for value in kept)


def _on_largest_rank(value: Any, param: ShardedParam) -> int:
    """Return the bytes of a state tensor on the device, else 0. A tensor of the shard's shape counts as if it were padded."""
    value = as_local(value)
    plain = _plain_tensors(value)
    if any(tensor.device.type != param.compute_device.type for tensor in plain):
        return 0
    num_bytes = sum(tensor.nbytes for tensor in plain)
    if value.shape != param.local.shape:
        return num_bytes
    if type(value) is Tensor or not value.numel():
        return value.dtype.itemsize * param.padded_numel
    # A subclass, such as 8-bit elements with a scale for each block: bytes in proportion to the padded size.
    return -(-num_bytes * param.padded_numel // value.numel())


def _plain_tensors(value: Any) -> list[Tensor]:
    if not is_traceable_wrapper_subclass(value):
        return [value]
    return [plain for name in value.__tensor_flatten__()[0] for plain in _plain_tensors(getattr(value, name))]
