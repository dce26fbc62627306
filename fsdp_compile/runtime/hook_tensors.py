"""The tensors of communication hooks: made at the first reduction of a parameter, and used by every later one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes.collectives.random_numbers import new_key
from passes.collectives.stateful_hook import OVER_REPLICAS, RANDOM, HookParameter, StatefulHook, tensors_of_hook

from ..torch_versions import reduce_dtype
from ..units.param_state import MadeByHook
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .tensor_kind import Like


def hook_parameter(param: ShardedParam, dtype: torch.dtype, device: torch.device) -> HookParameter:
    """Describe a parameter for a hook.

    Args:
        param: the parameter.
        dtype, device: of the reduction.
    """
    return HookParameter(tuple(param.shape), param.dim, param.mesh.shard_size, dtype, device)


def hook_tensor(param: ShardedParam, name: str, like: Like) -> Tensor:
    """Return a hook's tensor for a parameter. The first call makes all tensors of the hook for it.

    Args:
        param: the parameter; its unit has a hook.
        name: the hook's name for the tensor, after :data:`OVER_REPLICAS` if it is the hook over replicas.
        like: has the dtype and device of the reduction.

    Raises:
        RuntimeError: the hook has made tensors for reductions in another dtype or on another device.
    """
    prefix = OVER_REPLICAS if name.startswith(OVER_REPLICAS) else ""
    return _tensors(param, prefix, like.dtype, like.device)[name]


def hook_tensors(params: Sequence[ShardedParam], like: Like, prefix: str = "") -> list[Tensor]:
    """Return the tensors that a hook is called with for a bucket.

    Args:
        params: the parameters of the bucket.
        like: has the dtype and device of the reduction.
        prefix: :data:`OVER_REPLICAS` for the hook over replicas; else empty.
    """
    wanted = tensors_of_hook(
        _hook(params[0].unit, prefix), [_parameter(param, prefix, like.dtype, like.device) for param in params]
    )
    return [hook_tensor(params[place], prefix + name, like) for place, name, _ in wanted]


def tensors_to_save(unit: Unit) -> Iterator[tuple[ShardedParam, dict[str, Tensor]]]:
    """Yield each trainable parameter of a unit with the tensors by name that a hook keeps for it, hook by hook."""
    for param in unit.params:
        if not param.param.requires_grad:
            continue
        dtype = reduce_dtype(unit.mp_policy, param.shard.dtype) or param.compute_dtype
        for prefix, hook in (("", unit.flags.comm_hook), (OVER_REPLICAS, unit.flags.replica_hook)):
            if isinstance(hook, StatefulHook):
                yield param, _tensors(param, prefix, dtype, param.compute_device)


def _hook(unit: Unit, prefix: str) -> StatefulHook:
    hook = unit.flags.replica_hook if prefix else unit.flags.comm_hook
    assert isinstance(hook, StatefulHook)
    return hook


def _parameter(param: ShardedParam, prefix: str, dtype: torch.dtype, device: torch.device) -> HookParameter:
    if not prefix:
        return hook_parameter(param, dtype, device)
    return HookParameter((param.padded_numel,), 0, 1, dtype, device)


def _tensors(param: ShardedParam, prefix: str, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    made = param.state.hook_tensors
    if prefix not in made:
        made[prefix] = MadeByHook((dtype, device), _make(param, prefix, _parameter(param, prefix, dtype, device)))
    if made[prefix].made_for != (dtype, device):
        before, on = made[prefix].made_for
        raise RuntimeError(
            f"The communication hook keeps tensors for {param.name} that are for reductions in {before} on {on}, and it is "
            f"reduced in {dtype} on {device}. Call reset_iter_state() on the root after casting or moving a model: the tensors "
            "begin anew."
        )
    return made[prefix].tensors


@torch.inference_mode(False)
@torch.no_grad()
def _make(param: ShardedParam, prefix: str, parameter: HookParameter) -> dict[str, Tensor]:
    hook = _hook(param.unit, prefix)
    made = hook.new_tensors(parameter)
    if hook.draws:
        made = {RANDOM: new_key(hook.seed, dist.get_rank(), prefix + param.name, parameter.device), **made}
    return {prefix + name: tensor for name, tensor in made.items()}
