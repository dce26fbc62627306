"""The functions that eager kernels of ``unshard`` and ``reduce_grad`` call on a shard (:mod:`passes.ir.ops`).

Such kernels run in the uncompiled rest of a compiled forward, and in graphs of another backend.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from passes.fx.torch_internals.objects import post_accumulate_grad_hooks
from passes.ir.ops import set_find_shard

from ..units.sharded_param import ShardedParam, param_in_memory
from .gradients import drop_eager_gradient, note_forward, receive_gradient
from .lent_parameters import write_back


def attach(param: ShardedParam) -> None:
    """Set the functions that eager kernels call on a parameter's shard."""
    shard: Any = param.shard
    shard._fsdp_before_unshard = functools.partial(before_unshard, param)
    shard._fsdp_receive_gradient = functools.partial(receive_gradient, param)
    if shard.requires_grad and not post_accumulate_grad_hooks(shard):
        shard.register_post_accumulate_grad_hook(drop_eager_gradient)


def before_unshard(param: ShardedParam) -> None:
    """Check a parameter before a gather, wait for the optimizer's event, and note the forward.

    Raises:
        RuntimeError: another backend traced the graph when the parameter was frozen, or another tensor is registered in the
            parameter's place.
        NotImplementedError: the local tensor has a gather of its own.
    """
    if param.sync_requires_grad() and param.shard.requires_grad:
        raise RuntimeError(
            f"Parameter {param.name} was unfrozen after its forward was compiled by another backend than fsdp_backend, "
            "which gives it no gradient. Call the model again, and it compiles anew; or unfreeze it by its module: "
            "module.requires_grad_()."
        )
    param.check_gather()
    param.check_registered()
    write_back(param.unit)
    param.unit.scope.wait_for_optimizer()
    if torch.is_grad_enabled():
        note_forward([param])


def _find_shard(tensor: Tensor) -> Tensor:
    if hasattr(tensor, "_fsdp_sharded_param"):
        return tensor
    param = param_in_memory(tensor)
    return tensor if param is None else param.shard


set_find_shard(_find_shard)
