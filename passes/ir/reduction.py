"""Reductions: the plan for the gradients of a bucket, and the stages that carry it out.

:func:`stages` is the one definition of the arithmetic that docs/gradient-sync.md states. It has two interpreters. The pass
:mod:`passes.transforms.gradient_sync` traces stages into a graph one by one, so that a schedule can put work between them.
:func:`reduce_at_once` runs the stages one after the other, for gradients outside of the library's graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from ..collectives.divide_factors import Averaging
from ..collectives.functional import (
    all_reduce_by_stateful_hook,
    factor_tensor,
    finish_all_reduce,
    finish_reduce_scatter,
    finish_reduction,
    group_size,
    reduce_by_stateful_hook,
    resolve_averaging,
    start_all_reduce,
    start_copy_to_host,
    start_reduce_scatter,
)
from ..collectives.layout import padded_shard_shape
from ..collectives.stateful_hook import StatefulHook
from .work import Role


class Sync(Enum):
    """The collectives that reduce the gradients of a bucket in one backward.

    Attributes:
        ALL: reduce-scatter, and with replicas all-reduce (HSDP) or reduce-scatter (hybrid), into ``param.grad``.
        SCATTER: the first reduce-scatter only; the partial result waits for a later reduction over replicas.
        NONE: no communication; the full gradient waits for a later reduction.
    """

    ALL = "all"
    SCATTER = "scatter"
    NONE = "none"

    # As for :class:`~passes.ir.plan.Gather`.
    __hash__ = object.__hash__


@dataclass(frozen=True)
class Reduction:
    """The plan of a graph for the gradients of a bucket.

    Attributes:
        sync: the collectives that run.
        averaging: the operators of the collectives, and where the reduction divides.
        has_unsharded: full gradients of earlier microbatches are added before the reduce-scatter.
        has_partial: a partial result of earlier microbatches is added after the reduce-scatter.
        has_grad: ``param.grad`` exists, and the averaged gradient is added to it.
        group: name of the group that the reduce-scatter runs on; empty: the group that the parameters are sharded over.
        comm_hook: replaces the reduce-scatter: ``hook(gradient, output)``; or in place, ``hook(gradient)``; or a hook with
            tensors of its own.
        all_reduce_hook: changes the reduced shard in place: ``hook(shard)``.
        comm_hook_in_place: ``comm_hook`` reduces in place. Its bucket is sharded over one rank, and it replaces the all-reduce,
            too.
        replica_hook: averages over the replicas in place, instead of the all-reduce: ``hook(shard)``; or a hook with tensors of
            its own.
        host: the averaged gradient is copied to "pinned" or "pageable" memory of the host; empty: it stays on the device.
        updates: the averaged gradient updates the parameters, by :class:`~passes.ir.update.Update`, and is not stored in
            ``param.grad``.
    """

    sync: Sync = Sync.ALL
    averaging: Averaging = field(default_factory=Averaging)
    has_unsharded: bool = False
    has_partial: bool = False
    has_grad: bool = False
    group: str = ""
    comm_hook: Callable[..., None] | StatefulHook | None = None
    all_reduce_hook: Callable[[Tensor], None] | None = None
    comm_hook_in_place: bool = False
    replica_hook: Callable[[Tensor], None] | StatefulHook | None = None
    host: str = ""
    updates: bool = False

    @property
    def has_hooks(self) -> bool:
        """True if gradients pass through functions of the user."""
        return any(hook is not None for hook in (self.comm_hook, self.replica_hook, self.all_reduce_hook))

    @property
    def may_regroup(self) -> bool:
        """True if gradients may be reduced in other buckets than their unit's. Not with hooks, which see the bucket."""
        return self.sync is not Sync.NONE and not self.has_hooks


class CarriedTensors(Enum):
    """The kind of tensors that earlier microbatches or steps left, and that a stage takes.

    Attributes:
        UNSHARDED: full gradients, one for each gradient that is reduced.
        PARTIAL: one flat shard, reduced over the shard group only.
        HOOK: the tensors of a communication hook; the stage returns their new values.
        REPLICA_HOOK: the tensors of a hook over replicas; the stage returns their new values.
    """

    UNSHARDED = "unsharded"
    PARTIAL = "partial"
    HOOK = "hook"
    REPLICA_HOOK = "replica_hook"


@dataclass(frozen=True)
class Factor:
    """A divide factor, a 0-d tensor.

    Attributes:
        number: its index among the factors of the reduction (:meth:`~passes.collectives.divide_factors.Averaging.of`).
    """

    number: int


#: An input of a stage besides the result of the stage before it. It stands for a sequence of tensors.
Operand = CarriedTensors | Factor


@dataclass(frozen=True)
class Stage:
    """A part of a reduction that runs without interruption. A schedule puts other work between stages.

    Attributes:
        role: the role of the stage's nodes in a graph.
        function: a function of :mod:`passes.collectives.functional`. It takes the result of the stage before it (the first
            stage: the gradients or a flat shard), then the operands, then the constants by name.
        operands: the further inputs; for None the function takes an empty sequence.
        constants: the keyword arguments.
    """

    role: Role
    function: Callable[..., Any]
    operands: tuple[Operand | None, ...] = ()
    constants: dict[str, Any] = field(default_factory=dict)

    @property
    def updated(self) -> CarriedTensors | None:
        """The kind of a hook's tensors that the stage updates; None: none. Then the function returns (result, new tensors)."""
        return next((kept for kept in (CarriedTensors.HOOK, CarriedTensors.REPLICA_HOOK) if kept in self.operands), None)


def stages(
    reduction: Reduction,
    *,
    dims: Sequence[int],
    group: str,
    replicate_group: str,
    grad_dtype: torch.dtype,
    numels: Sequence[int] = (),
    is_scattered: bool = False,
    is_hybrid: bool = False,
) -> list[Stage]:
    """List the stages of a reduction that communicates, from full gradients of one dtype to a flat shard.

    Args:
        reduction: the reduction; its ``sync`` is not ``NONE``.
        dims: the dimension that each gradient is cut along.
        group: name of the shard group; empty: one rank, which sends nothing.
        replicate_group: name of the group of replicas; empty: none.
        is_hybrid: shards are cut over the replicas, too. So the second collective is a reduce-scatter.
        grad_dtype: dtype of the averaged gradient. A partial result keeps the dtype of the reduction.
        numels: the number of elements of each shard, for hybrid shards, and for a hook over replicas that has tensors.
        is_scattered: begin with a flat shard that was reduced over the shard group before.
    """
    averaging, hook = reduction.averaging, reduction.comm_hook
    uses = (averaging.divides_gradient, averaging.divides_scattered, averaging.divides_result)
    gradient, scattered, result = (Factor(sum(uses[:place])) if used else None for place, used in enumerate(uses))
    finish_scatter: tuple[Operand | None, ...] = (scattered, CarriedTensors.PARTIAL if reduction.has_partial else None)
    in_flight = {"group": group, "in_flight": hook is None and group != ""}
    found = []
    if is_scattered:
        finish_scatter, in_flight = (), {"group": group, "in_flight": False}
    elif isinstance(hook, StatefulHook):
        taken = (CarriedTensors.UNSHARDED if reduction.has_unsharded else None, gradient, CarriedTensors.HOOK)
        found.append(Stage(Role.START_REDUCE, reduce_by_stateful_hook, taken, {"dims": dims, "group": group, "hook": hook}))
    else:
        start = {"op": averaging.reduce_scatter_op if group else "", "hook": hook, "in_place": reduction.comm_hook_in_place}
        operands = (CarriedTensors.UNSHARDED if reduction.has_unsharded else None, gradient)
        if is_hybrid:
            start["scattered_over"] = replicate_group
        found.append(Stage(Role.START_REDUCE, start_reduce_scatter, operands, {"dims": dims, "group": group, **start}))
    if reduction.sync is Sync.ALL and replicate_group and not reduction.comm_hook_in_place:
        over = reduction.replica_hook
        if isinstance(over, StatefulHook):
            taken_over = (*finish_scatter, *([None] * (2 - len(finish_scatter))), CarriedTensors.REPLICA_HOOK)
            constants = {**in_flight, "numels": numels, "hook": over}
            found.append(Stage(Role.ALL_REDUCE, all_reduce_by_stateful_hook, taken_over, constants))
        else:
            replicas = {"replicate_group": replicate_group, "op": averaging.all_reduce_op, "hook": over}
            cut = {"numels": numels} if is_hybrid else {}
            found.append(Stage(Role.ALL_REDUCE, start_all_reduce, finish_scatter, {**in_flight, **replicas, **cut}))
        end: dict[str, Any] = {"scatter_group": replicate_group} if is_hybrid else {"in_flight": over is None}
        found.append(Stage(Role.FINISH_REDUCE, finish_all_reduce, constants=end))
    elif not is_scattered:
        found.append(Stage(Role.FINISH_REDUCE, finish_reduce_scatter, finish_scatter, in_flight))
    if reduction.sync is Sync.ALL:
        last = {"grad_dtype": grad_dtype, "hook": reduction.all_reduce_hook}
        found.append(Stage(Role.FINISH_REDUCE, finish_reduction, (result,), last))
    if reduction.sync is Sync.ALL and reduction.host:
        found.append(Stage(Role.COPY_TO_HOST, start_copy_to_host, constants={"pinned": reduction.host == "pinned"}))
    return found


def reduce_at_once(
    found: Iterable[Stage],
    value: Any,
    take: Callable[[Operand], Sequence[Tensor]],
    update: Callable[[CarriedTensors, Sequence[Tensor]], None] | None = None,
) -> Tensor:
    """Run the stages of a reduction one after the other. Returns the flat shard.

    Args:
        found: the stages.
        value: the gradients, or the flat shard, that the first stage takes.
        take: returns the tensors of an operand.
        update: takes the new values of a hook's tensors; needed if a stage updates any.
    """
    for stage in found:
        operands = [() if operand is None else take(operand) for operand in stage.operands]
        value = stage.function(value, *operands, **stage.constants)
        if stage.updated is not None:
            assert update is not None
            value, left = value
            update(stage.updated, left)
    return value


def average(grad: Tensor, shape: Sequence[int], dim: int, group: str, replicate_group: str) -> Tensor:
    """Average a full gradient over all ranks at once.

    Args:
        grad: the full gradient, on all ranks of both groups.
        shape: shape of the full parameter.
        dim: the dimension that the parameter is cut along, or ``REPLICATED``.
        group: name of the shard group.
        replicate_group: name of the group of replicas; empty: none.

    Returns:
        This rank's padded shard of the average, in the dtype of ``grad``.
    """
    averaging, values = resolve_averaging(group, replicate_group, grad.dtype, grad.device)

    def take(operand: Operand) -> list[Tensor]:
        assert isinstance(operand, Factor)
        return [factor_tensor(values[operand.number], grad.dtype, grad.device)]

    found = stages(
        Reduction(averaging=averaging), dims=[dim], group=group, replicate_group=replicate_group, grad_dtype=grad.dtype
    )
    return reduce_at_once(found, [grad], take).view(padded_shard_shape(shape, dim, group_size(group)))
