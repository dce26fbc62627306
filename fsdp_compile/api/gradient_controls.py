"""Methods of sharded modules for gradients: when and how they are synchronised, and when parameters are resharded.

Call the methods at any time before the backward that they govern, also between a forward and its backward. Only
``set_reshard_after_forward`` traces graphs again.

Source: the methods of torch's ``FSDPModule`` (torch/distributed/fsdp/_fully_shard/_fully_shard.py), whose names, arguments and
meaning these have; ``register_comm_hook`` is FSDP1's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from passes.collectives.functional import group_size
from passes.collectives.stateful_hook import HookParameter, StatefulHook
from passes.collectives.traced_hook import HookNotTraceable, apply_in_place_hook, draws_random_numbers
from passes.fx.torch_internals.core import FakeTensorMode

from ..comm_hooks import BoundHook, bind_hook
from ..runtime.gradients import call_hooks, collect_unreduced, discard, in_backward, reduce_pending
from ..runtime.hook_tensors import hook_parameter
from ..runtime.recovery import recover
from ..runtime.uncompiled import forget_forwards
from ..torch_versions import RESET_DISCARDS_GRADIENTS, GradientReductionHandle, reduce_dtype
from ..units.unit import Unit
from .composable import LEFT_OUT


class Controls:
    """The base of the parts of ``FSDPModule``: a module with a unit, whose settings the methods change."""

    _fsdp_unit: Unit

    def _units(self, recurse: bool) -> list[Unit]:
        """Return this module's unit; with ``recurse`` also the units of all modules inside it."""
        if not recurse:
            return [self._fsdp_unit]
        modules = cast(nn.Module, self).modules()
        return list(dict.fromkeys(module._fsdp_unit for module in modules if isinstance(module, Controls)))


class GradientControls(Controls):
    """The part of ``FSDPModule`` that controls gradients."""

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Set whether backward reduces gradients: False accumulates full gradients without communication (``no_sync``).

        Args:
            requires_gradient_sync: the new value, also of the setting of :meth:`set_requires_all_reduce`.
            recurse: set it for all units inside, too.
        """
        for unit in self._units(recurse):
            unit.flags.reduce_grads = unit.flags.all_reduce_grads = requires_gradient_sync

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Set whether backward all-reduces over the replicas of a 2-D mesh: False accumulates reduce-scattered gradients."""
        for unit in self._units(recurse):
            unit.flags.all_reduce_grads = requires_all_reduce

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Set whether the next backward is that of the last microbatch, for the whole model.

        An optimizer in backward (:func:`~fsdp_compile.optimizer_in_backward`) may update only in the last one. With the
        placement "zero1", gradients are reduced in the last one only; with "hybrid", they are reduced over nodes there. Other
        reductions do not depend on it: in FSDP2 the last backward waits for those of earlier ones, here every backward finishes
        its own.
        """
        self._fsdp_unit.scope.is_last_backward = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether :meth:`finalize_backward`, not the end of a backward, reduces gradients that the backward left.

        Use it for N backwards without synchronisation, followed by ``set_requires_gradient_sync(True)`` and one finalisation. A
        unit that is set to synchronise when a backward reaches it is still reduced by that backward.

        Raises:
            RuntimeError: this is not the root of its tree of units, or a backward runs.

        Source: torch 2.15.
        """
        scope = self._root("set_manual_backward_finalization").scope
        if enabled != scope.finalizes_by_hand and in_backward():
            raise RuntimeError("set_manual_backward_finalization cannot change the mode during a backward.")
        scope.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> _Finished | None:
        """Reduce accumulated gradients of all units that are set to synchronise, and reshard by the units' flags.

        Args:
            async_op: return a handle to wait for, as FSDP2 does. The reductions are finished already.

        Returns:
            The handle, with ``async_op``.

        Raises:
            RuntimeError: this is not the root; backward is not finalised by hand; a backward runs; a unit holds a gradient
                that was reduced over shards but not over replicas, or is not to be reduced over replicas; or, with
                ``async_op``, a pipeline has left out gradients of a compiled stage.

        Source: torch 2.15.
        """
        scope = self._root("finalize_backward").scope
        if not scope.finalizes_by_hand:
            raise RuntimeError("finalize_backward() wants set_manual_backward_finalization(True) ahead of the backward.")
        if in_backward():
            raise RuntimeError("finalize_backward() must be called after the backward, not within it.")
        for unit in scope.units:
            _check_may_finalize(unit)
        left_out, scope.left_out_gradients = scope.left_out_gradients, False
        if async_op and left_out:
            # Pipelines of torch 2.15 call it with async_op.
            raise RuntimeError(LEFT_OUT)
        for unit in reversed(scope.units):
            if unit.flags.reduce_grads:
                collect_unreduced(unit)
                call_hooks(reduce_pending(unit))
            if unit.flags.reshard_after_backward:
                unit.drop_full()
        return _Finished() if async_op else None

    def _root(self, method: str) -> Unit:
        unit = self._fsdp_unit
        if not unit.is_root:
            raise RuntimeError(f"{method} must be called on the root, not on {unit.name}.")
        return unit

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Set whether gathered parameters are freed after backward.

        False keeps the parameters that compiled graphs gather, from the next forward on. Later microbatches gather nothing,
        forward or backward. After a write to a parameter, above all by an optimizer's step, the parameter is gathered again.
        """
        for unit in self._units(recurse):
            unit.flags.reshard_after_backward = reshard_after_backward

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether backward gathers parameters again (True) or reads those of forward. Compiled graphs are traced again.

        Raises:
            ValueError: ``reshard_after_forward`` is no bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"set_reshard_after_forward takes a bool, not {reshard_after_forward!r}.")
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reduce_scatter_unused_params(self, reduce_scatter_unused_params: bool, *, recurse: bool = True) -> None:
        """Set whether a parameter that gets no gradient in a backward counts as one with a gradient of zeros.

        If so, ranks may use different parameters of a unit, as all of its parameters are gathered and reduced. Compiled code is
        compiled again if the flag changes.
        """
        for unit in self._units(recurse):
            unit.flags.reduce_scatter_unused_params = reduce_scatter_unused_params

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Set the number that this unit's gradients are divided by, instead of the number of ranks.

        The number is an input of compiled graphs: no graph is lowered again for another one.

        Raises:
            ValueError: ``factor`` is not a positive number.
        """
        if not factor > 0:
            raise ValueError(f"set_gradient_divide_factor takes a positive number, not {factor!r}.")
        self._fsdp_unit.flags.gradient_divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """Call :meth:`set_gradient_divide_factor`, by its older name."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Set whether this unit's collectives only sum. Divisions are then kernels of their own."""
        self._fsdp_unit.flags.force_sum_reduction = enable

    def register_comm_hook(self, state: object, hook: Callable[..., None], *, over: str = "shards") -> None:
        """Reduce the gradients of this unit and of all units inside with a function, bucket by bucket.

        The hook is traced, and runs as Python only then. It may use ordinary tensor operations and ``torch.distributed`` calls,
        in place or not. Its divisions replace those of the reduction.

        Args:
            state: passed to the hook as it is.
            hook: ``hook(state, grad, output)``: reduces the flat gradient ``[ranks * n]`` into this rank's shard ``[n]``, in
                the dtype of the reduction. The replicas of a 2-D mesh are averaged afterwards. If every rank holds whole
                parameters (a shard dimension of one rank), ``hook(state, grad)`` reduces in place, also over the replicas. A
                hook with a method ``init_tensors(parameter)`` has tensors of its own: ``hook(state, grad, output, bucket)``,
                with a :class:`~fsdp_compile.comm_hooks.HookParameter` and a :class:`~fsdp_compile.comm_hooks.HookBucket`.
            over: ``"shards"``; or ``"replicas"``, on a 2-D mesh. There ``hook(state, shard)`` replaces the all-reduce: it
                averages flat shards ``[n]``, reduced over the shard group already, over the replicas in place. All replicas
                must get the same result. One hook of each kind may be registered.

        Raises:
            TypeError: the hook has other parameters.
            ValueError: the hook reduces in place, and a unit is sharded over several ranks; the hook is over replicas, and a
                unit has none; a unit has a hook of the kind already; or ``over`` is another text.
            HookNotTraceable: the hook cannot be traced; the message says why.
            NotImplementedError: a unit has the placement "hybrid", and the hook has tensors or random numbers, or is over
                replicas.

        Nothing is registered unless all units can take the hook. Source: ``FullyShardedDataParallel.register_comm_hook``.
        """
        if over not in ("shards", "replicas"):
            raise ValueError(f"register_comm_hook(over=...) takes 'shards' or 'replicas', not {over!r}.")
        bound = bind_hook(state, hook)
        units = self._units(recurse=True)
        if over == "replicas":
            _register_over_replicas(bound, units)
            return
        for unit in units:
            _check_comm_hook(unit, bound)
        if bound.init is not None or bound.reduce is None:
            _refuse_hybrid(units, f"{bound.name} has tensors of its own, or reduces over all replicas")
        try:
            reduce = _traceable(bound, units)
        except HookNotTraceable as error:
            whole = next((unit for unit in units if all(group_size(mesh.scatter_group) == 1 for mesh in unit.meshes)), None)
            if whole is None or bound.in_place is not None:
                raise
            raise HookNotTraceable(
                f"{error} Parameters of {whole.name or 'the root'} are whole on every rank (placement='ddp', or a shard "
                "dimension of one rank), so output is as large as grad: there, a hook (state, grad) reduces in place."
            ) from error
        if isinstance(reduce, StatefulHook):
            _refuse_hybrid(units, f"{bound.name} has random numbers of its own")
        for unit in units:
            unit.flags.comm_hook = reduce
            unit.flags.comm_hook_in_place = bound.reduce is None

    def set_all_reduce_hook(self, hook: Callable[[Tensor], None], *, stream: Any = None) -> None:
        """Change this unit's reduced gradient shards in place with a function, which is traced.

        The hook runs after the all-reduce of a 2-D mesh, or after the reduce-scatter on a 1-D mesh. If the division is a kernel
        of its own, the hook runs before it.

        Args:
            hook: ``hook(reduced)``, with the flat shard of a bucket.
            stream: only None; a graph runs on one stream.

        Raises:
            NotImplementedError: ``stream`` is given.
            HookNotTraceable: the hook cannot be traced.
        """
        if stream is not None:
            raise NotImplementedError(
                "set_all_reduce_hook(stream=...): the hook is part of a compiled graph, which runs on one stream."
            )
        for like in _examples(self._fsdp_unit):
            _trace(functools.partial(apply_in_place_hook, hook), like)
        self._fsdp_unit.flags.all_reduce_hook = hook

    def set_custom_all_gather(self, comm: object) -> NoReturn:
        """Raise ``NotImplementedError``: a Python object that communicates cannot enter a graph."""
        raise NotImplementedError(
            "set_custom_all_gather: gathers are collectives of a compiled graph, and a Python object that communicates cannot "
            "enter it. Use a process group with the backend that you want."
        )

    def set_custom_reduce_scatter(self, comm: object) -> NoReturn:
        """Raise ``NotImplementedError``, as for :meth:`set_custom_all_gather`. Use :meth:`register_comm_hook`."""
        raise NotImplementedError(
            "set_custom_reduce_scatter: reductions are collectives of a compiled graph, and a Python object that communicates "
            "cannot enter it. register_comm_hook(state, hook) takes a function that reduces, which is traced."
        )

    def reset_iter_state(self) -> None:
        """Recover after an exception in forward or backward. Go on with the first microbatch of a step.

        Gathered parameters, gradients that wait for communication, and the tensors of communication hooks are dropped. From
        torch 2.15 on, ``param.grad`` is dropped, too; and in any case after an exception that only some ranks met.

        If this rank has met an exception, or is handling one, the call waits until all ranks have met it, or raised
        ``RankFailed`` and called this.

        Raises:
            RankFailed: the ranks cannot go on together.
            RuntimeError: this is not the root of its tree of units.
        """
        unit = self._root("reset_iter_state")
        updates = any(member.updates for member in unit.scope.units)
        differ = recover(unit.scope.groups, updates_in_backward=updates)
        unit.scope.active = False
        forget_forwards(unit.scope)
        discard(unit.scope)
        for member in unit.scope.units:
            for param in member.params:
                param.state.discard_hook_tensors()
        if RESET_DISCARDS_GRADIENTS or differ:
            for member in unit.scope.units:
                for param in member.params:
                    param.param.grad = None


class _Finished(GradientReductionHandle):
    """The handle of finished reductions."""

    def __init__(self) -> None:
        pass

    def wait(self) -> None:
        pass


def _check_may_finalize(unit: Unit) -> None:
    if not unit.flags.reduce_grads:
        return
    where = unit.name or "the root"
    waits = [param for param in unit.params if param.mesh.replicate_group and param.state.is_accumulating]
    if waits and not unit.flags.all_reduce_grads:
        raise RuntimeError(f"finalize_backward() reduces over replicas, too: call set_requires_all_reduce(True) on {where}.")
    if any(param.state.partial_grad is not None for param in waits):
        raise RuntimeError(
            f"finalize_backward() takes full gradients, but those of {where} were reduced over shards already, with "
            "set_requires_all_reduce(False). Use set_requires_gradient_sync(False) for the microbatches before."
        )


def _examples(unit: Unit) -> list[Tensor]:
    """Make fake flat shards like those that a unit's hooks get, one for each dtype."""
    with FakeTensorMode():
        dtypes = {reduce_dtype(unit.mp_policy, param.local.dtype) or param.compute_dtype for param in unit.params}
        return [torch.empty(8, dtype=dtype, device=unit.mesh.device) for dtype in sorted(dtypes, key=str)]


def _trace(function: Callable[[Tensor], Tensor], like: Tensor) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        make_fx(function)(like)


def _check_comm_hook(unit: Unit, hook: BoundHook) -> None:
    where = unit.name or "the root"
    if unit.flags.comm_hook is not None:
        raise ValueError(f"{where} has a communication hook already. Register one hook, once.")
    world_size = max(group_size(mesh.scatter_group) for mesh in unit.meshes)
    if hook.reduce is None and world_size > 1:
        raise ValueError(
            f"{hook.name}(state, grad) reduces in place, but {where} is sharded over {world_size} ranks. Register a hook that "
            "takes (state, grad, output) and writes this rank's shard to output."
        )


def _refuse_hybrid(units: list[Unit], reason: str) -> None:
    for unit in units:
        if any(mesh.node_group for mesh in unit.meshes):
            raise NotImplementedError(
                f"{unit.name or 'The root'} is sharded over replicas, too (placement='hybrid'), and {reason}. Use "
                "placement='hsdp', or a hook (state, grad, output) that sends plain numbers within the node."
            )


def _register_over_replicas(hook: BoundHook, units: list[Unit]) -> None:
    if hook.in_place is None and hook.init is None:
        raise TypeError(f"A communication hook over replicas takes (state, shard); {hook.name!r} does not.")
    for unit in units:
        where = unit.name or "the root"
        if unit.flags.replica_hook is not None:
            raise ValueError(f"{where} has a communication hook over replicas already. Register one hook, once.")
        _refuse_hybrid([unit], f"{hook.name} gives each replica all of a shard")
        if not all(mesh.replicate_group for mesh in unit.meshes):
            raise ValueError(
                f"{where} has no replicas for {hook.name} to reduce over: shard it on a 2-D mesh (replicate, shard)."
            )
        if unit.flags.comm_hook_in_place:
            raise ValueError(
                f"{where} has a communication hook that reduces over the replicas, too: {hook.name} has nothing to do."
            )
    reduce = hook.reduce if hook.init is not None else hook.in_place
    assert reduce is not None
    stateful = StatefulHook(reduce, hook.init, in_place=True, seed=torch.initial_seed())
    draws = [draws_random_numbers(stateful, [_of_vector(like, 1)]) for unit in units for like in _examples(unit)]
    is_plain = hook.init is None and not any(draws)
    for unit in units:
        unit.flags.replica_hook = reduce if is_plain else replace(stateful, draws=any(draws))


def _traceable(hook: BoundHook, units: list[Unit]) -> Callable[..., None] | StatefulHook:
    """Trace a hook for all units, and return the function that replaces their reduce-scatter."""
    if hook.init is not None:
        assert hook.reduce is not None
        return _trace_stateful(hook.reduce, hook.init, units)
    draws = False
    for unit in units:
        world_size = max(group_size(mesh.scatter_group) for mesh in unit.meshes)
        for like in _examples(unit):
            if hook.reduce is None:
                assert hook.in_place is not None
                _trace(functools.partial(apply_in_place_hook, hook.in_place), like)
            else:
                draws |= draws_random_numbers(hook.reduce, [_of_vector(like, world_size)])
    reduce = hook.reduce or hook.in_place
    assert reduce is not None
    return StatefulHook(reduce, draws=True, seed=torch.initial_seed()) if draws else reduce


def _of_vector(like: Tensor, world_size: int) -> HookParameter:
    """Describe a parameter whose shards are all like ``like``."""
    return HookParameter((world_size * like.numel(),), 0, world_size, like.dtype, like.device)


def _trace_stateful(
    reduce: Callable[..., None], init: Callable[[HookParameter], dict[str, Tensor]], units: list[Unit]
) -> StatefulHook:
    hook = StatefulHook(reduce, init, seed=torch.initial_seed())
    buckets = dict.fromkeys(bucket for unit in units for bucket in _buckets(unit))
    draws = [draws_random_numbers(hook, bucket) for bucket in buckets]
    return replace(hook, draws=any(draws))


def _buckets(unit: Unit) -> list[tuple[HookParameter, ...]]:
    """Describe the parameters of a unit for hooks, one tuple for each dtype and mesh."""
    found: dict[Any, list[HookParameter]] = {}
    for param in unit.params:
        dtype = reduce_dtype(unit.mp_policy, param.shard.dtype) or param.compute_dtype
        parameter = hook_parameter(param, dtype, unit.mesh.device)
        found.setdefault((param.mesh, dtype), []).append(parameter)
    return [tuple(parameters) for parameters in found.values()]
