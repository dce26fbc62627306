"""Gradients between graphs: where reduced gradients are stored, where unfinished gradients wait, and how a backward ends.

Reduced gradients become ``param.grad``: DTensors over one flat buffer for each bucket. So the next microbatch can add to all of
them with one kernel. Gradients that wait for communication are kept per parameter, so that any graph or eager operator can go
on with them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor

from passes.collectives.divide_factors import Averaging
from passes.collectives.functional import factor_tensor, group_size, resolve_averaging
from passes.collectives.host_copies import wait_on_host
from passes.collectives.stateful_hook import OVER_REPLICAS
from passes.fx.torch_internals.core import current_graph_task_id, queue_callback, will_engine_execute_node
from passes.fx.torch_internals.objects import local_tensor, post_accumulate_grad_hooks
from passes.ir.extension import plain_gradient
from passes.ir.reduction import CarriedTensors, Factor, Operand, Reduction, Sync, reduce_at_once, stages

from ..torch_versions import reduce_dtype
from ..units.mesh import ShardingMesh
from ..units.own_storage import has_memory
from ..units.param_state import FlatSlice, cut, grad_slice, joined, set_grad_in
from ..units.sharded_param import ShardedParam
from ..units.unit import Scope, SyncFlags, Unit
from .checked_program import eager_run
from .group_logs import backward_begins, backward_ends, record_exception
from .hook_tensors import hook_tensors
from .tensor_kind import Like

# Plans for graphs and eager operators.


def _averaging(unit: Unit, mesh: ShardingMesh, like: Like) -> tuple[Averaging, tuple[float, ...]]:
    """Return how a unit averages gradients on one mesh in the dtype of ``like``, and the divide factors."""
    flags = unit.flags
    settings = (
        mesh,
        like.dtype,
        flags.gradient_divide_factor,
        flags.force_sum_reduction,
        flags.comm_hook is not None,
        flags.comm_hook_in_place,
        flags.replica_hook is not None,
    )
    if settings not in unit.averagings:
        unit.averagings[settings] = _resolve_averaging(flags, mesh, like)
    return unit.averagings[settings]


def _resolve_averaging(flags: SyncFlags, mesh: ShardingMesh, like: Like) -> tuple[Averaging, tuple[float, ...]]:
    if flags.comm_hook is None:
        return resolve_averaging(
            mesh.scatter_group,
            mesh.replicate_group if flags.replica_hook is None else "",
            like.dtype,
            like.device,
            flags.gradient_divide_factor,
            flags.force_sum_reduction,
        )
    if flags.comm_hook_in_place or not mesh.replicate_group or flags.replica_hook is not None:
        return Averaging(), ()
    # The hook divides by itself. The average of its results over the replicas is left.
    averaging, factors = resolve_averaging(mesh.replicate_group, "", like.dtype, like.device, None, flags.force_sum_reduction)
    return replace(averaging, divides_gradient=False, divides_scattered=averaging.divides_gradient), factors


def reduction_of(unit: Unit, params: Sequence[ShardedParam], like: Like) -> tuple[Reduction, tuple[float, ...]]:
    """Return the plan for one bucket in this backward, and the divide factors of the plan.

    Args:
        unit: the bucket's unit.
        params: its parameters, which are on one mesh.
        like: has the dtype and device of the reduction.
    """
    flags, mesh = unit.flags, params[0].mesh
    hook, in_place = flags.comm_hook, flags.comm_hook_in_place
    host = "" if not unit.copies else "pinned" if unit.pins_memory else "pageable"
    has_unsharded = any(param.state.unsharded_grad is not None for param in params)
    updates = may_update(params)
    most = Sync.ALL if unit.scope.is_last_backward else flags.before_last
    over_replicas = flags.all_reduce_grads and most is Sync.ALL
    # An in-place hook does the all-reduce, too, so it cannot stop after the reduce-scatter.
    if not flags.reduce_grads or most is Sync.NONE or (in_place and mesh.replicate_group and not over_replicas):
        return Reduction(Sync.NONE, has_unsharded=has_unsharded), ()
    sync = Sync.ALL if over_replicas or not mesh.replicate_group else Sync.SCATTER
    averaging, factors = _averaging(unit, mesh, like)
    return Reduction(
        sync,
        averaging,
        has_unsharded,
        any(param.state.partial_grad is not None for param in params),
        # Gradients that are copied to the host are added up there, after the copy.
        sync is Sync.ALL and not host and any(param.param.grad is not None for param in params),
        flags.reduce_scatter_groups.get(mesh.scatter_group, "") if hook is None else "",
        hook,
        flags.all_reduce_hook,
        in_place,
        flags.replica_hook,
        host,
        sync is Sync.ALL and updates,
    ), factors


def in_order_of_storage(params: Sequence[ShardedParam]) -> tuple[int, ...]:
    """Return the indices of ``params`` in the order of flat storage. Parameters with extensions, not in storage, come first.

    Optimizers can read a flat shard of gradients in this order as it is. The order is the same on all ranks.
    """

    def place(index: int) -> tuple[bool, int, str]:
        param = params[index]
        return param.extension is None, param.offset, param.name

    return tuple(sorted(range(len(params)), key=place))


def may_update(params: Sequence[ShardedParam]) -> bool:
    """Return whether a graph that reduces the gradients of ``params`` may also update these parameters.

    All parameters must have an optimizer in backward. Otherwise, or in one of these cases, the gradients are stored instead:

    - Another backward of the step will read a parameter, or add to its gradient.
    - A post-accumulate-grad hook will see a gradient. The update then follows at the end of the backward.
    - A communication hook reduces. It may leave anything in the padding of a shard, and padding is updated, too.
    """
    unit = params[0].unit
    flags = unit.flags
    if not unit.scope.is_last_backward or any((flags.comm_hook, flags.replica_hook, flags.all_reduce_hook)):
        return False
    return all(
        param.updater is not None and param.state.uses == 0 and not post_accumulate_grad_hooks(param.param) for param in params
    )


# Inputs and results of graphs.


def flat_partial(params: Sequence[ShardedParam]) -> Tensor:
    """Return the partial gradients of a bucket's parameters as one flat shard, in which all of them lie afterwards.

    At least one parameter has a partial gradient. A missing one counts as zero.
    """
    slices = [param.state.partial_grad for param in params]
    flat = joined(slices)
    if flat is None:
        like = next(piece.flat for piece in slices if piece is not None)
        numels = [param.partial_numel for param in params]
        pieces = [like.new_zeros(n) if piece is None else piece.tensor() for piece, n in zip(slices, numels, strict=True)]
        flat = torch.cat(pieces)
        keep_partial(params, flat)
    return flat


def unsharded_grad(param: ShardedParam, like: Like) -> Tensor:
    """Return the full gradient of earlier microbatches, which a graph may add to in place.

    If there is none, make one of zeros, with dtype and device of ``like``, and keep it.
    """
    if param.state.unsharded_grad is None:
        param.state.unsharded_grad = torch.zeros(param.shape, dtype=like.dtype, device=like.device)
    return param.state.unsharded_grad


def keep_partial(params: Sequence[ShardedParam], flat: Tensor) -> None:
    """Keep the shards of a flat partial result for a later all-reduce."""
    for param, piece in zip(params, cut(flat, [param.partial_numel for param in params]), strict=True):
        param.state.partial_grad = piece


def flat_grad(params: Sequence[ShardedParam], dtype: torch.dtype) -> Tensor:
    """Return ``param.grad`` of a bucket's parameters as one flat shard, to add to in place.

    Normally the gradients lie in one flat shard already. If the user replaced one, all move into a new buffer of ``dtype``, in
    which a missing gradient is zero.
    """
    flat = joined([grad_slice(param.param) for param in params])
    if flat is None:
        like = params[0].shard
        flat = torch.zeros(sum(param.padded_numel for param in params), dtype=dtype, device=like.device)
        for param, piece in zip(params, _slices(params, flat), strict=True):
            local = param.unpad(piece.tensor().view(param.padded_shape))
            if param.param.grad is not None:
                local.copy_(local_tensor(param.param.grad))
            set_grad_in(param.param, local, piece)
    return flat


def store_gradients(params: Sequence[ShardedParam], flat: Tensor) -> None:
    """Set ``param.grad`` of a bucket's parameters to their runs of ``flat``, the flat shard of reduced gradients.

    A shard that is being copied to the host is stored at the end of the running backward, so that nothing waits for it before.
    """
    if not params[0].unit.copies:
        _set_gradients(params, flat)
        return
    backward = _backwards.get(current_graph_task_id())
    if backward is None:
        _store_on_host([(params, flat)])
    else:
        backward.arriving.append((params, flat))


def _store_on_host(arriving: Sequence[tuple[Sequence[ShardedParam], Tensor]]) -> None:
    """Wait for gradients that are being copied to the host, and add them to ``param.grad`` or set it."""
    for _, flat in arriving:
        wait_on_host(flat)
    with torch.no_grad():
        for params, flat in arriving:
            if any(param.param.grad is not None for param in params):
                flat_grad(params, flat.dtype).add_(flat)
            else:
                _set_gradients(params, flat)


def _set_gradients(params: Sequence[ShardedParam], flat: Tensor) -> None:
    if _store_in_slots(params, flat):
        return
    runs = flat.split([param.padded_numel for param in params])
    for param, piece, run in zip(params, _slices(params, flat), runs, strict=True):
        set_grad_in(param.param, param.unpad(run.view(param.padded_shape)), piece)


def _store_in_slots(params: Sequence[ShardedParam], flat: Tensor) -> bool:
    """Copy the flat shard of gradients into the buffer that is kept from step to step. Return whether that was possible."""
    slots = [param.state.gradient_slot for param in params]
    if slots[0] is None:
        return False
    buffer = slots[0][0]()
    if buffer is None or any(slot is None or slot[0]() is not buffer for slot in slots):
        return False
    return buffer.store([slot[1] for slot in slots if slot is not None], flat)


def _slices(params: Sequence[ShardedParam], flat: Tensor) -> list[FlatSlice]:
    return cut(flat, [param.padded_numel for param in params])


# The state of a backward.


class _Backward:
    """The state of one backward, which is one call of autograd's engine.

    Attributes:
        scopes: trees of units that took part.
        groups: names of the process groups that parameters which got a gradient are sharded and replicated over.
        received: for each unit, the parameters that got a gradient.
        reduced: parameters whose post-accumulate-grad hooks or updates are due at the end, when their gradients are whole.
        updated: whether graphs have updated parameters.
        at_end: other functions to call at the end.
        arriving: flat shards of gradients that are being copied to the host, with their parameters.
    """

    def __init__(self) -> None:
        self.scopes: dict[Scope, None] = {}
        self.groups: set[str] = set()
        self.received: dict[Unit, set[ShardedParam]] = {}
        self.reduced: dict[ShardedParam, None] = {}
        self.updated = False
        self.at_end: dict[Callable[[], None], None] = {}
        self.arriving: list[tuple[Sequence[ShardedParam], Tensor]] = []


# By the identifier of autograd's task, which holds the record, also where a backward raises and so never ends.
_backwards: WeakValueDictionary[int, _Backward] = WeakValueDictionary()


def in_backward() -> bool:
    """Return whether autograd's engine runs a backward in this thread."""
    return current_graph_task_id() != -1


def _current_backward() -> _Backward:
    task = current_graph_task_id()
    backward = _backwards.get(task)
    if backward is None:
        backward = _backwards[task] = _Backward()
        queue_callback(functools.partial(_finish_backward, task, backward))
    return backward


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Schedule ``call`` for the end of the running backward. Equal functions are called once."""
    _current_backward().at_end[call] = None


def receive(unit: Unit, params: Sequence[ShardedParam]) -> None:
    """Note that parameters of a unit get gradients in the running backward."""
    backward = _current_backward()
    backward.scopes[unit.scope] = None
    backward.received.setdefault(unit, set()).update(params)
    mesh = None
    for param in params:
        if param.mesh is not mesh:
            mesh = param.mesh
            for group in mesh.groups:
                if group not in backward.groups:
                    backward.groups.add(group)
                    backward_begins(current_graph_task_id(), group)


def reduced(params: Sequence[ShardedParam]) -> None:
    """Note that gradients of parameters are stored. Their post-accumulate-grad hooks and updates follow when backward ends."""
    backward = _current_backward()
    for param in params:
        if param.updater is not None or post_accumulate_grad_hooks(param.param):
            backward.reduced[param] = None


def _finish_backward(task: int, backward: _Backward) -> None:
    if _backwards.get(task) is not backward:
        # reset_iter_state() was called meanwhile.
        return
    try:
        for call in backward.at_end:
            call()
        units = [unit for scope in backward.scopes for unit in scope.units]
        for unit in units:
            if unit.flags.reduce_scatter_unused_params:
                _receive_zeros(unit, backward)
            if unit.flags.reshard_after_backward:
                unit.drop_full()
            if not unit.scope.finalizes_by_hand:
                backward.reduced.update(dict.fromkeys(reduce_pending(unit)))
        _store_on_host(backward.arriving)
        call_hooks(backward.reduced)
        if backward.updated:
            _forget_uses(backward.scopes)
        backward_ends(task, backward.groups)
    except BaseException as error:
        record_exception(error, backward.groups)
        raise
    finally:
        _backwards.pop(task, None)


def call_hooks(params: Iterable[ShardedParam]) -> None:
    """Call the post-accumulate-grad hooks of parameters whose gradients are stored, then update parameters.

    Only parameters with an optimizer in backward are updated, and only after the last backward of a step.
    """
    stored = list(params)
    for param in stored:
        for hook in list((post_accumulate_grad_hooks(param.param) or {}).values()):
            hook(param.param)
    scopes: dict[Scope, None] = {}
    for param in stored:
        if param.updater is not None and param.param.grad is not None and param.unit.scope.is_last_backward:
            param.updater.update(param)
            scopes[param.unit.scope] = None
    _forget_uses(scopes)


def note_update(params: Sequence[ShardedParam]) -> None:
    """Note that a graph has updated parameters."""
    _current_backward().updated = True
    for updater in dict.fromkeys(param.updater for param in params):
        assert updater is not None
        updater.updated([param for param in params if param.updater is updater])


def _forget_uses(scopes: Iterable[Scope]) -> None:
    """Forget forwards that no backward has followed. After an update, they are of no use, as they have read old values."""
    for scope in scopes:
        for unit in scope.units:
            for param in unit.params:
                param.state.uses = 0


def note_forward(params: Iterable[ShardedParam]) -> None:
    """Note that a forward reads parameters, and that a backward may follow.

    Raises:
        RuntimeError: a checkpoint with ``use_reentrant=True`` reruns the forward in a backward that updates a parameter.
    """
    for param in params:
        if param.updater is None or not param.param.requires_grad:
            continue
        state = param.state
        state.was_updated = False
        if not in_backward():
            state.uses += 1
        elif state.uses == 0:
            raise RuntimeError(
                f"Parameter {param.name} is updated in backward (optimizer_in_backward), and a forward reads it there that its "
                "first forward did not tell of. Use torch.utils.checkpoint with use_reentrant=False, or an optimizer of "
                "torch.optim."
            )


def note_backward(params: Iterable[ShardedParam]) -> None:
    """Note that the backward of a forward that read parameters begins.

    Raises:
        RuntimeError: a parameter has been updated since the forward.
    """
    for param in params:
        state = param.state
        if param.updater is not None and state.was_updated and state.uses == 0:
            raise RuntimeError(
                f"Parameter {param.name} was updated in an earlier backward (optimizer_in_backward), and this one needs it "
                "as it was. Add losses up and call backward once; or call set_is_last_backward(False) ahead of all backwards "
                "of a step but the last."
            )
        state.uses = max(0, state.uses - 1)


def _receive_zeros(unit: Unit, backward: _Backward) -> None:
    received = backward.received.get(unit, ())
    missing = [param for param in unit.params if param.param.requires_grad and param not in received]
    _take(unit, {param: zeros_like_gradient(param) for param in missing})


def zeros_like_gradient(param: ShardedParam) -> Tensor:
    """Make a full gradient of zeros, in the compute dtype of the parameter."""
    return torch.zeros(param.shape, dtype=param.compute_dtype, device=param.compute_device)


def discard(scope: Scope) -> None:
    """Forget running backwards of a scope, and its units' gathered parameters, waiting gradients and noted forwards."""
    for task in [task for task, backward in _backwards.items() if scope in backward.scopes]:
        del _backwards[task]
    for unit in scope.units:
        unit.drop_full()
        for param in unit.params:
            param.state.discard_gradients()
            param.state.uses = 0


# Gradients of eager operators.


_accumulates_elsewhere: Callable[[], bool | None] = lambda: None  # noqa: E731


def set_accumulates_elsewhere(function: Callable[[], bool | None]) -> None:
    """Set the function that tells whether the backward of another engine than torch's accumulates gradients.

    The function returns None while that engine runs no backward.
    """
    global _accumulates_elsewhere
    _accumulates_elsewhere = function


def accumulates(shard: Tensor) -> bool:
    """Return whether the running backward accumulates gradients of parameters. ``shard`` is the shard of any parameter.

    ``torch.autograd.grad(loss, x)`` and ``backward(inputs=[x])`` run a compiled backward whole, with gradients of parameters
    that were not asked for. Shards are no tensors of the user's, so either all shards accumulate or none.
    """
    elsewhere = _accumulates_elsewhere()
    if elsewhere is not None:
        return elsewhere
    if not in_backward():
        # A backward graph is called as a function, without autograd's engine.
        return True
    with torch.enable_grad():
        wanted = will_engine_execute_node(get_gradient_edge(shard).node)
    scope: Scope = shard._fsdp_sharded_param.unit.scope  # type: ignore[attr-defined]
    scope.left_out_gradients |= not wanted and (scope.finalizes_by_hand or not scope.is_last_backward)
    return wanted


def is_asked_for(param: nn.Parameter) -> bool:
    """Return whether the running backward is an ``autograd.grad`` with respect to the DTensor parameter ``param``."""
    with torch.enable_grad():
        node = get_gradient_edge(param).node
    try:
        will_engine_execute_node(node)
    except RuntimeError:
        # The engine raises this when autograd.grad captures a leaf.
        return True
    return False


# Gradients that autograd returns, rather than accumulates.


def unreduced_gradient(param: ShardedParam, grad: Tensor) -> DTensor:
    """Wrap this rank's full gradient as a gradient of the parameter: a ``Partial`` DTensor, as each rank has a summand.

    Raises:
        RuntimeError: the parameter has a reduced gradient already, a shard, to which a full one cannot be added.
        NotImplementedError: the parameter is on the host, and the full gradient is on the device.
    """
    dtensor: Any = param.param
    if param.unit.copies:
        raise NotImplementedError(
            f"autograd.grad computes the gradient of {param.name}, as pipelines without bubbles do: it is a whole one on the "
            "device, and the parameter is on the host (offload_policy=CPUOffloadPolicy()). Use backward(), another schedule of "
            "the pipeline, or no such policy."
        )
    if param.param.grad is not None and not _is_unreduced(param):
        raise RuntimeError(
            f"{param.name} has a reduced gradient while autograd.grad computes another, as pipelines without bubbles do. Call "
            "optimizer.zero_grad(set_to_none=True) ahead of each step of the pipeline."
        )
    return DTensor.from_local(
        grad,
        dtensor.device_mesh,
        param.summand_placements,
        run_check=False,
        shape=dtensor.shape,
        stride=dtensor.stride(),
    )


def _is_unreduced(param: ShardedParam) -> bool:
    grad = param.param.grad
    return isinstance(grad, DTensor) and any(placement.is_partial() for placement in grad.placements)


@torch.no_grad()
def collect_unreduced(unit: Unit) -> list[ShardedParam]:
    """Move gradients of :func:`unreduced_gradient` from ``param.grad`` to where they wait for the unit's reduction.

    Returns:
        The parameters that had such gradients.
    """
    taken = [param for param in unit.params if _is_unreduced(param)]
    for param in taken:
        grad: Any = param.param.grad
        param.param.grad = None
        full = grad.to_local().to(reduce_dtype(unit.mp_policy, param.shard.dtype) or param.compute_dtype)
        waiting = param.state.unsharded_grad
        param.state.unsharded_grad = full if waiting is None else waiting + full
    return taken


def receive_gradient(param: ShardedParam, grad: Tensor) -> None:
    """Accumulate or reduce one full gradient at once, as graphs do for a bucket. See :func:`receive_gradients`."""
    receive_gradients(param.unit, {param: grad})


def receive_gradients(unit: Unit, grads: Mapping[ShardedParam, Tensor]) -> None:
    """Accumulate or reduce full gradients of a unit at once, as graphs do for a bucket.

    Drop gradients of frozen parameters, and all gradients if the backward was not asked for them.
    """
    wanted = {param: grad for param, grad in grads.items() if param.param.requires_grad and param.shard.requires_grad}
    if wanted and accumulates(next(iter(wanted)).shard):
        _take(unit, wanted)


@torch.no_grad()
def _take(unit: Unit, grads: Mapping[ShardedParam, Tensor]) -> None:
    receive(unit, list(grads))
    buckets: dict[Any, dict[ShardedParam, Tensor]] = {}
    for param, grad in grads.items():
        grad = plain_gradient(grad, param.name)
        grad = grad.to(reduce_dtype(unit.mp_policy, param.shard.dtype) or grad.dtype)
        buckets.setdefault((grad.dtype, param.shard.dtype, param.mesh), {})[param] = grad
    for bucket in buckets.values():
        params = list(bucket)
        _take_bucket(unit, {params[index]: bucket[params[index]] for index in in_order_of_storage(params)})


def _take_bucket(unit: Unit, grads: Mapping[ShardedParam, Tensor]) -> None:
    params = list(grads)
    reduction, values = reduction_of(unit, params, grads[params[0]])
    if reduction.sync is Sync.NONE:
        for param, grad in grads.items():
            if param.state.unsharded_grad is None:
                param.state.unsharded_grad = grad.clone(memory_format=torch.contiguous_format)
            else:
                param.state.unsharded_grad += grad
        return
    names = params[0].name if len(params) == 1 else f"{len(params)} parameters of {unit.name or 'the root'}"
    _reduce(f"reduction of gradients of {names}", params, list(grads.values()), reduction, values)
    if reduction.sync is Sync.ALL:
        reduced(params)


@torch.no_grad()
def reduce_pending(unit: Unit) -> list[ShardedParam]:
    """Reduce gradients of a unit that no backward will reduce, as far as the unit's flags say.

    These are gradients that microbatches accumulated in parameters that the last backward did not reach. If backward is
    finalised by hand, they are all accumulated gradients. Each dtype and mesh has a collective.

    Returns:
        The parameters whose gradients are stored.
    """
    stored = []
    buckets: dict[Any, list[ShardedParam]] = {}
    for param in unit.params:
        full = param.state.unsharded_grad
        if param.state.is_accumulating:
            key = full is None, None if full is None else full.dtype, param.shard.dtype, param.mesh
            buckets.setdefault(key, []).append(param)
    for (is_scattered, *_), params in buckets.items():
        grads = [param.state.unsharded_grad for param in params if param.state.unsharded_grad is not None]
        like = grads[0] if grads else flat_partial(params)
        reduction, values = reduction_of(unit, params, like)
        if reduction.sync is Sync.NONE or (reduction.sync is Sync.SCATTER and is_scattered):
            continue
        for param in params:
            param.state.unsharded_grad = None
        what = f"reduction of gradients of {unit.name or 'the root'} that earlier microbatches left"
        _reduce(what, params, grads, replace(reduction, has_unsharded=False), values)
        if reduction.sync is Sync.ALL:
            stored += params
    return stored


def _reduce(
    label: str, params: Sequence[ShardedParam], grads: Sequence[Tensor], reduction: Reduction, values: Sequence[float]
) -> None:
    """Reduce full gradients of one dtype. Without any, all-reduce the partial gradients of ``params`` over replicas."""
    mesh = params[0].mesh
    replicate_group = mesh.replicate_group if reduction.sync is Sync.ALL and not reduction.comm_hook_in_place else ""
    replicate_group = replicate_group if group_size(replicate_group) > 1 else ""
    if mesh.node_group:
        # Also where gradients are reduced within the node only: it decides their order.
        replicate_group = mesh.replicate_group
    shapes = tuple(size for param in params for size in param.shape)
    names = () if label.endswith(f" {params[0].name}") else tuple(param.name for param in params)
    groups = mesh.shard_group, "" if mesh.node_group else replicate_group, reduction.group or mesh.node_group
    run = eager_run(label, shapes, groups, names)
    run.begin()
    with run:
        _communicate(params, grads, reduction, values, replicate_group)


_OF_HOOKS = {CarriedTensors.HOOK: "", CarriedTensors.REPLICA_HOOK: OVER_REPLICAS}


def _communicate(
    params: Sequence[ShardedParam],
    grads: Sequence[Tensor],
    reduction: Reduction,
    values: Sequence[float],
    replicate_group: str,
) -> None:
    partial = [flat_partial(params)] if reduction.has_partial else []
    like = grads[0] if grads else partial[0]
    accumulated = [unsharded_grad(param, like) for param in params] if reduction.has_unsharded else []
    kept = {CarriedTensors.UNSHARDED: accumulated, CarriedTensors.PARTIAL: partial}
    for param in params:
        param.state.discard_gradients()

    def take(operand: Operand) -> Sequence[Tensor]:
        if isinstance(operand, Factor):
            return [factor_tensor(values[operand.number], like.dtype, like.device)]
        if operand in _OF_HOOKS:
            kept[operand] = hook_tensors(params, like, _OF_HOOKS[operand])
        return kept[operand]

    def update(operand: CarriedTensors, left: Sequence[Tensor]) -> None:
        for tensor, new in zip(kept[operand], left, strict=True):
            tensor.copy_(new)

    mesh = params[0].mesh
    group = reduction.group or mesh.scatter_group
    found = stages(
        reduction,
        dims=[param.dim for param in params],
        group=group if group_size(group) > 1 else "",
        replicate_group=replicate_group,
        grad_dtype=params[0].shard.dtype,
        numels=[param.padded_numel for param in params],
        is_scattered=not grads,
        is_hybrid=bool(mesh.node_group),
    )
    flat = reduce_at_once(found, grads if grads else partial[0], take, update)
    if reduction.sync is Sync.SCATTER:
        keep_partial(params, flat)
    elif reduction.has_grad:
        flat_grad(params, flat.dtype).add_(flat)
    else:
        store_gradients(params, flat)


def drop_eager_gradient(shard: Tensor) -> None:
    """Drop the gradient that autograd accumulated on a shard, as a post-accumulate-grad hook of the shard.

    The gradient stands for one that :func:`receive_gradient` got, or is zero. A compiled backward gives zeros to a parameter
    that only an unused output needs.

    Raises:
        RuntimeError: the gradient is neither.
    """
    param: ShardedParam = shard._fsdp_sharded_param  # type: ignore[attr-defined]
    backward = _backwards.get(current_graph_task_id())
    gradient, shard.grad = shard.grad, None
    received = backward is not None and param in backward.received.get(param.unit, ())
    if received or not param.param.requires_grad or gradient is None or not has_memory(gradient) or not gradient.any():
        return
    raise RuntimeError(
        f"A gradient of {param.name} was computed where its parameter could not be told: saved-tensor hooks (save_on_cpu) have "
        "replaced its shard in a graph that another backend than fsdp_backend compiled. Compile with backend=fsdp_backend, or "
        "without the hooks."
    )
