"""Gathers ahead of a forward: what ``unshard()`` starts and whoever needs the parameters finishes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from passes.collectives import finish_gather, start_gather

from .course import Run, eager_run

if TYPE_CHECKING:
    from .unit import ShardedParam, Unit


@dataclass(frozen=True)
class PendingGather:
    """A gather in flight.

    Attributes:
        params: the parameters of a unit that share a dtype.
        dtype: the dtype that they compute in.
        gathered: the flat buffer in flight; None if all of them are whole on every rank.
        run: what the ranks know the gather as.
    """

    params: list[ShardedParam]
    dtype: torch.dtype
    gathered: Tensor | None
    run: Run


@torch.inference_mode(False)
@torch.no_grad()
def start_unshard(unit: Unit) -> None:
    """Start to gather a unit's parameters, one collective for each dtype, unless they are there or on their way.

    Raises:
        RuntimeError: a parameter is on the meta device.
    """
    if unit.is_meta:
        raise RuntimeError(unit.params[0].meta_message())
    if unit.pending:
        return
    if unit.scope.post_optim_event is not None:
        # Not forgotten: the forward may run on another stream.
        unit.scope.post_optim_event.wait()
    for stored in unit.storages:
        params = [param for param in unit.params if param.shard.dtype == stored]
        if all(param.state.full(param.param) is not None for param in params):
            for param in params:
                param.state.is_unsharded = True
            continue
        dtype = params[0].compute_dtype
        sharded = [param for param in params if not param.is_whole]
        pieces = [piece.to(dtype) for piece in _runs(unit, sharded)]
        group = unit.mesh.shard_group
        run = eager_run(f"unshard() of {unit.name or 'the root'}", (sum(map(Tensor.numel, pieces)),), (group,))
        gathered = None
        if pieces:
            run.begin()
            with run:
                gathered = start_gather(pieces, group)
        for param in params:
            param.state.start_full(param.param)
        unit.pending.append(PendingGather(params, dtype, gathered, run))


def _runs(unit: Unit, params: list[ShardedParam]) -> list[Tensor]:
    """The shards of parameters as one run of flat storage where they are neighbours, which needs no copy-in."""
    if not params:
        return []
    first, last, numel = params[0], params[-1], sum(param.padded_numel for param in params)
    if last.offset + last.padded_numel - first.offset == numel:
        return [unit.storages[first.shard.dtype].narrow(0, first.offset, numel)]
    return [param.shard.detach() for param in params]


@torch.inference_mode(False)
@torch.no_grad()
def finish_unshard(unit: Unit) -> None:
    """Wait for what :func:`start_unshard` started, and keep it for the next graph that reads it."""
    for pending in _taken(unit):
        sharded = [param for param in pending.params if not param.is_whole]
        fulls = {param: param.shard.detach().to(pending.dtype, copy=True) for param in pending.params if param.is_whole}
        if pending.gathered is not None:
            shapes, dims = [param.shape for param in sharded], [param.dim for param in sharded]
            with pending.run:
                gathered = finish_gather(pending.gathered, shapes, dims, unit.mesh.shard_group)
            fulls.update(zip(sharded, gathered, strict=True))
        for param, full in fulls.items():
            param.state.keep_full(param.param, full.contiguous())
            param.state.is_unsharded = True


def abandon_unshard(unit: Unit) -> None:
    """Wait for what :func:`start_unshard` started, and forget it."""
    for pending in _taken(unit):
        if pending.gathered is not None:
            with pending.run:
                torch.ops._c10d_functional.wait_tensor(pending.gathered)
        for param in pending.params:
            param.state.drop_full()


def _taken(unit: Unit) -> list[PendingGather]:
    taken, unit.pending = unit.pending, []
    return taken
