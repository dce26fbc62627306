"""Gradients between the graphs: where reduced ones land, where unfinished ones wait, and what ends a backward.

Reduced gradients become ``param.grad``, as DTensors over one flat buffer for each bucket, so that the next microbatch can add
to all of them with one kernel. What waits for communication is kept per parameter, so that it is found whichever graph, or
eager operator, goes on with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from passes.collectives import (
    factor_tensor,
    finish_all_reduce,
    finish_reduce_scatter,
    finish_reduction,
    resolve_averaging,
    start_all_reduce,
    start_reduce_scatter,
)
from passes.divide_factors import Averaging
from passes.sync_plan import Reduction, Sync

from .course import eager_run
from .param_state import FlatSlice, grad_slice, set_grad_in, whole_buffer
from .torch_versions import reduce_dtype

if TYPE_CHECKING:
    from .unit import Scope, ShardedParam, Unit


# What a graph, or an eager operator, is to do.


def _averaging(unit: Unit, like: Tensor) -> tuple[Averaging, tuple[float, ...]]:
    """How a unit's gradients are averaged in the dtype of ``like``."""
    flags = unit.flags
    settings = (
        like.dtype,
        flags.gradient_divide_factor,
        flags.force_sum_reduction,
        flags.comm_hook is not None,
        flags.comm_hook_in_place,
    )
    if settings not in unit.averagings:
        unit.averagings[settings] = _resolve_averaging(unit, like)
    return unit.averagings[settings]


def _resolve_averaging(unit: Unit, like: Tensor) -> tuple[Averaging, tuple[float, ...]]:
    flags, mesh = unit.flags, unit.mesh
    if flags.comm_hook is None:
        return resolve_averaging(
            mesh.shard_group,
            mesh.replicate_group,
            like.dtype,
            like.device,
            flags.gradient_divide_factor,
            flags.force_sum_reduction,
        )
    if flags.comm_hook_in_place or not mesh.replicate_group:
        return Averaging(), ()
    # The hook divides by itself; what is left is the average over replicas of what it gives.
    averaging, factors = resolve_averaging(mesh.replicate_group, "", like.dtype, like.device, None, flags.force_sum_reduction)
    return replace(averaging, divides_gradient=False, divides_scattered=averaging.divides_gradient), factors


def reduction_of(unit: Unit, params: Sequence[ShardedParam], like: Tensor) -> tuple[Reduction, tuple[float, ...]]:
    """The plan for one bucket in this backward, and its divide factors.

    Args:
        unit: the bucket's unit.
        params: its parameters.
        like: a tensor with dtype and device of the reduction.
    """
    flags, mesh = unit.flags, unit.mesh
    hook, in_place = flags.comm_hook, flags.comm_hook_in_place
    has_unsharded = _all_or_none(params, [param.state.unsharded_grad is not None for param in params])
    # An all-reduce style hook cannot stop half-way.
    if not flags.reduce_grads or (in_place and mesh.replicate_group and not flags.all_reduce_grads):
        return Reduction(Sync.NONE, has_unsharded=has_unsharded), ()
    sync = Sync.ALL if flags.all_reduce_grads or not mesh.replicate_group else Sync.SCATTER
    averaging, factors = _averaging(unit, like)
    return Reduction(
        sync,
        averaging,
        has_unsharded,
        _all_or_none(params, [param.state.partial_grad is not None for param in params]),
        sync is Sync.ALL and any(param.param.grad is not None for param in params),
        flags.reduce_scatter_group if hook is None else "",
        hook,
        flags.all_reduce_hook,
        in_place,
    ), factors


def _all_or_none(params: Sequence[ShardedParam], has: list[bool]) -> bool:
    if any(has) and not all(has):
        without = [param.name for param, one in zip(params, has, strict=True) if not one]
        raise RuntimeError(_changed_set(params[0].unit, without, _ADDED))
    return has[0]


_ADDED = "get a gradient in this microbatch, but got none in earlier ones"


def _changed_set(unit: Unit, names: Sequence[str], what: str) -> str:
    return (
        f"Gradients of {unit.name or 'the root'} accumulate without synchronisation, and the set of parameters that get one "
        f"changed: {', '.join(sorted(names))} {what}. Use the same parameters in every microbatch between two "
        "synchronisations, or synchronise before the set changes; set_reduce_scatter_unused_params(True) counts a missing "
        "gradient as zero. reset_iter_state() on the root discards what has accumulated."
    )


# What graphs read and leave.


def flat_partial(params: Sequence[ShardedParam]) -> Tensor:
    """The partial results of a bucket's parameters as one flat shard; those that wait lie in it afterwards."""
    slices = [param.state.partial_grad for param in params]
    flat = whole_buffer(slices)
    if flat is None:
        flat = torch.cat([piece.tensor() for piece in slices if piece is not None])
        keep_partial(params, flat)
    return flat


def keep_partial(params: Sequence[ShardedParam], flat: Tensor) -> None:
    """Let the shards of a flat partial result wait for a later all-reduce."""
    for param, piece in zip(params, _slices(params, flat), strict=True):
        param.state.partial_grad = piece


def flat_grad(params: Sequence[ShardedParam], dtype: torch.dtype) -> Tensor:
    """``param.grad`` of a bucket's parameters as one flat shard, to add to in place.

    They lie in it already unless the user replaced one; then they move into a new buffer. A missing one is zero.
    """
    flat = whole_buffer([grad_slice(param.param) for param in params])
    if flat is None:
        like = params[0].shard
        flat = torch.zeros(sum(param.padded_numel for param in params), dtype=dtype, device=like.device)
        for param, piece in zip(params, _slices(params, flat), strict=True):
            local = param.unpad(piece.tensor().view(param.padded_shape))
            if param.param.grad is not None:
                local.copy_(param.param.grad._local_tensor)  # type: ignore[attr-defined]
            set_grad_in(param.param, local, piece)
    return flat


def land_gradients(params: Sequence[ShardedParam], flat: Tensor) -> None:
    """Set ``param.grad`` of a bucket's parameters to their runs of the flat shard of their gradients."""
    runs = flat.split([param.padded_numel for param in params])
    for param, piece, run in zip(params, _slices(params, flat), runs, strict=True):
        set_grad_in(param.param, param.unpad(run.view(param.padded_shape)), piece)


def _slices(params: Sequence[ShardedParam], flat: Tensor) -> list[FlatSlice]:
    slices, offset = [], 0
    for param in params:
        slices.append(FlatSlice(flat, offset, param.padded_numel))
        offset += param.padded_numel
    return slices


# The course of a backward.


class _Backward:
    """What one call of autograd's engine has done so far.

    Attributes:
        scopes: trees of units that took part.
        accumulating: for each unit, the parameters whose gradients waited for communication when the unit first took part.
        received: for each unit, the parameters that got a gradient.
        reduced: parameters whose hooks are due at the end, when their gradients are whole.
    """

    def __init__(self) -> None:
        self.scopes: dict[Scope, None] = {}
        self.accumulating: dict[Unit, list[ShardedParam]] = {}
        self.received: dict[Unit, set[ShardedParam]] = {}
        self.reduced: dict[ShardedParam, None] = {}


_backwards: dict[int, _Backward] = {}


def _current_backward() -> _Backward:
    task = torch._C._current_graph_task_id()
    if task not in _backwards:
        _backwards[task] = _Backward()
        torch.autograd.Variable._execution_engine.queue_callback(lambda: _finish_backward(task))
    return _backwards[task]


def receive(unit: Unit, params: Sequence[ShardedParam]) -> None:
    """Note that parameters of a unit get gradients in the backward that runs.

    Raises:
        RuntimeError: gradients of other parameters of the unit wait for communication, without these.
    """
    backward = _current_backward()
    backward.scopes[unit.scope] = None
    if unit not in backward.accumulating:
        backward.accumulating[unit] = [param for param in unit.params if param.state.is_accumulating]
    accumulating = backward.accumulating[unit]
    added = [param.name for param in params if param not in accumulating]
    if accumulating and added and not unit.flags.reduce_scatter_unused_params:
        raise RuntimeError(_changed_set(unit, added, _ADDED))
    backward.received.setdefault(unit, set()).update(params)


def reduced(params: Sequence[ShardedParam]) -> None:
    """Note that gradients of parameters have landed: their post-accumulate-grad hooks are due when the backward ends."""
    backward = _current_backward()
    for param in params:
        if param.param._post_accumulate_grad_hooks:  # type: ignore[attr-defined]
            backward.reduced[param] = None


def _finish_backward(task: int) -> None:
    backward = _backwards.get(task)
    if backward is None:
        # reset_iter_state() was called meanwhile.
        return
    try:
        units = [unit for scope in backward.scopes for unit in scope.units]
        for unit in units:
            if unit.flags.reduce_scatter_unused_params:
                _receive_zeros(unit, backward)
            if unit.flags.reshard_after_backward:
                unit.drop_full()
        for param in backward.reduced:
            for hook in list(param.param._post_accumulate_grad_hooks.values()):  # type: ignore[attr-defined]
                hook(param.param)
        for unit in units:
            _check_all_received(unit, backward)
    finally:
        _backwards.pop(task, None)


def _receive_zeros(unit: Unit, backward: _Backward) -> None:
    for param in unit.params:
        if param.param.requires_grad and param not in backward.received.get(unit, ()):
            dtype = unit.mp_policy.param_dtype or param.shard.dtype
            receive_gradient(param, torch.zeros(param.shape, dtype=dtype, device=param.shard.device))


def _check_all_received(unit: Unit, backward: _Backward) -> None:
    received = backward.received.get(unit, set())
    accumulating = backward.accumulating.get(unit)
    if accumulating is None:
        accumulating = [param for param in unit.params if param.state.is_accumulating]
        if not (unit.flags.reduce_grads and unit.scope.is_last_backward):
            # The unit sat this microbatch out, and there will be others.
            return
    missing = [param.name for param in accumulating if param not in received]
    if missing:
        raise RuntimeError(_changed_set(unit, missing, "got gradients in earlier microbatches, but none in this one"))


def discard(scope: Scope) -> None:
    """Forget whatever backwards and microbatches have left of the units of a scope."""
    for task in [task for task, backward in _backwards.items() if scope in backward.scopes]:
        del _backwards[task]
    for unit in scope.units:
        unit.drop_full()
        for param in unit.params:
            param.state.discard_gradients()


# Gradients of eager operators.


def accumulates(shard: Tensor) -> bool:
    """Whether the backward that runs is to accumulate the gradients of parameters, of which ``shard`` is one's shard.

    ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` run a compiled backward whole, which computes those of
    parameters, too, but nobody has asked for them. Shards are no tensors of the user's: it is all of them or none.
    """
    if torch._C._current_graph_task_id() == -1:
        # A backward graph that is called as a function.
        return True
    with torch.enable_grad():
        return torch._C._will_engine_execute_node(get_gradient_edge(shard).node)


@torch.no_grad()
def receive_gradient(param: ShardedParam, grad: Tensor) -> None:
    """Do with one full gradient, at once, what graphs do with those of a bucket."""
    unit, state = param.unit, param.state
    if not param.param.requires_grad or not param.shard.requires_grad or not accumulates(param.shard):
        return
    receive(unit, [param])
    grad = grad.to(reduce_dtype(unit.mp_policy, param.shard.dtype) or grad.dtype)
    reduction, values = reduction_of(unit, [param], grad)
    if reduction.sync is Sync.NONE:
        if state.unsharded_grad is None:
            state.unsharded_grad = grad.clone(memory_format=torch.contiguous_format)
        else:
            state.unsharded_grad += grad
        return
    mesh = unit.mesh
    replicate_group = mesh.replicate_group if reduction.sync is Sync.ALL and not reduction.comm_hook_in_place else ""
    groups = (mesh.shard_group, replicate_group, reduction.group)
    run = eager_run(f"reduction of the gradient of {param.name}", tuple(param.shape), groups)
    run.begin()
    with run:
        _reduce_gradient(param, grad, reduction, values, replicate_group)


def _reduce_gradient(
    param: ShardedParam, grad: Tensor, reduction: Reduction, values: Sequence[float], replicate_group: str
) -> None:
    state = param.state
    factors = [[factor_tensor(value, grad.dtype, grad.device)] for value in values]
    averaging = reduction.averaging
    before, scattered, result = (
        factors.pop(0) if used else []
        for used in (
            averaging.divides_gradient,
            averaging.divides_scattered,
            averaging.divides_result and reduction.sync is Sync.ALL,
        )
    )
    accumulated = [state.unsharded_grad] if state.unsharded_grad is not None else []
    partial = [flat_partial([param])] if reduction.has_partial else []
    state.discard_gradients()
    group = reduction.group or param.unit.mesh.shard_group
    flat = start_reduce_scatter(
        [grad],
        accumulated,
        before,
        dims=[param.dim],
        group=group,
        op=averaging.reduce_scatter_op,
        hook=reduction.comm_hook,
        in_place=reduction.comm_hook_in_place,
    )
    flat = finish_reduce_scatter(flat, scattered, partial, group=group, in_flight=reduction.comm_hook is None)
    if reduction.sync is Sync.SCATTER:
        keep_partial([param], flat)
        return
    if replicate_group:
        flat = finish_all_reduce(
            start_all_reduce(
                flat,
                group=group,
                in_flight=False,
                replicate_group=replicate_group,
                op=averaging.all_reduce_op,
            )
        )
    flat = finish_reduction(flat, result, grad_dtype=param.shard.dtype, hook=reduction.all_reduce_hook)
    if reduction.has_grad:
        flat_grad([param], flat.dtype).add_(flat)
    else:
        land_gradients([param], flat)
    reduced([param])


def drop_eager_gradient(shard: Tensor) -> None:
    """Hook on shards: the gradient that autograd accumulates there stands for one that :func:`receive_gradient` got.

    Raises:
        RuntimeError: that function did not get any.
    """
    param: ShardedParam = shard._fsdp_sharded_param  # type: ignore[attr-defined]
    backward = _backwards.get(torch._C._current_graph_task_id())
    shard.grad = None
    received = backward is not None and param in backward.received.get(param.unit, ())
    if param.param.requires_grad and not received:
        raise RuntimeError(
            f"A gradient of {param.name} was computed where nobody could tell whose it is: saved-tensor hooks (save_on_cpu, a "
            "checkpoint) have replaced its shard in a graph that another backend than fsdp_backend compiled. Compile with "
            "backend=fsdp_backend, or without the hooks."
        )
