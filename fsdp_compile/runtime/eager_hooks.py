"""The runtime of the eager kernels of ``unshard`` and ``reduce_grad`` (:mod:`passes.ir.ops`).

Such kernels run in the uncompiled rest of a compiled forward, and in graphs of another backend.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from passes.fx.torch_internals.objects import post_accumulate_grad_hooks
from passes.ir.ops import EagerRuntime, set_eager_runtime

from ..units.sharded_param import ShardedParam, find_sharded_param, param_in_memory
from .checked_program import eager_run
from .gradients import drop_eager_gradient, note_forward, receive_gradient
from .lent_parameters import write_back


def attach(param: ShardedParam) -> None:
    """Drop the gradients that autograd will accumulate on a parameter's shard."""
    shard = param.shard
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


class _Runtime(EagerRuntime):
    def before_unshard(self, shard: Tensor) -> None:
        param = find_sharded_param(shard)
        if param is not None:
            before_unshard(param)

    def receiver(self, shard: Tensor, *, is_saved: bool = False) -> Callable[[Tensor], None] | None:
        param = find_sharded_param(shard)
        if param is None and is_saved:
            param = param_in_memory(shard)
        return None if param is None else functools.partial(receive_gradient, param)

    @contextlib.contextmanager
    def communicating(
        self, operator: str, shard: Tensor, name: str, shape: Sequence[int], groups: tuple[str, ...]
    ) -> Iterator[None]:
        # ``name`` is the parameter's name within its unit.
        param = find_sharded_param(shard)
        run = eager_run(f"{operator} of {name if param is None else param.name}", tuple(shape), groups)
        run.begin()
        with run:
            yield


set_eager_runtime(_Runtime())
