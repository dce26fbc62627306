"""The tensors of communication hooks: made at the first reduction of a parameter, and found by every later one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from passes.collectives.random_numbers import new_key
from passes.collectives.stateful_hook import RANDOM, HookParameter, StatefulHook, tensors_of_hook

from ..torch_versions import reduce_dtype
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit


def hook_parameter(param: ShardedParam, dtype: torch.dtype, device: torch.device) -> HookParameter:
    """What a hook knows of a parameter.

    Args:
        param: the parameter.
        dtype, device: of the reduction.
    """
    return HookParameter(tuple(param.shape), param.dim, param.mesh.shard_size, dtype, device)


def hook_tensor(param: ShardedParam, name: str, like: Tensor) -> Tensor:
    """A hook's tensor for a parameter.

    Args:
        param: the parameter; its unit has a hook.
        name: what the hook calls it.
        like: a tensor with dtype and device of the reduction.

    Raises:
        RuntimeError: the hook has made tensors for reductions in another dtype or on another device.
    """
    return _tensors(param, like.dtype, like.device)[name]


def hook_tensors(params: Sequence[ShardedParam], like: Tensor) -> list[Tensor]:
    """The tensors that a hook is called with for a bucket."""
    hook = params[0].unit.flags.comm_hook
    assert isinstance(hook, StatefulHook)
    wanted = tensors_of_hook(hook, [hook_parameter(param, like.dtype, like.device) for param in params])
    return [hook_tensor(params[place], name, like) for place, name, _ in wanted]


def tensors_to_save(unit: Unit) -> Iterator[tuple[ShardedParam, dict[str, Tensor]]]:
    """What the hook of a unit keeps for each of its trainable parameters, as far as the parameter has any."""
    for param in unit.params:
        if isinstance(unit.flags.comm_hook, StatefulHook) and param.param.requires_grad:
            yield (
                param,
                _tensors(param, reduce_dtype(unit.mp_policy, param.shard.dtype) or param.compute_dtype, param.shard.device),
            )


def _tensors(param: ShardedParam, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
    state = param.state
    if state.hook_tensors_for is None:
        state.hook_tensors = _make(param, hook_parameter(param, dtype, device))
        state.hook_tensors_for = dtype, device
    elif state.hook_tensors_for != (dtype, device):
        before, on = state.hook_tensors_for
        raise RuntimeError(
            f"The communication hook keeps tensors for {param.name} that are for reductions in {before} on {on}, and it is "
            f"reduced in {dtype} on {device}. Call reset_iter_state() on the root after casting or moving a model: the tensors "
            "begin anew."
        )
    return state.hook_tensors


@torch.inference_mode(False)
@torch.no_grad()
def _make(param: ShardedParam, parameter: HookParameter) -> dict[str, Tensor]:
    hook = param.unit.flags.comm_hook
    assert isinstance(hook, StatefulHook)
    made = hook.new_tensors(parameter)
    if hook.draws:
        made = {RANDOM: new_key(param.unit.flags.comm_hook_seed, dist.get_rank(), param.name, parameter.device), **made}
    return made
