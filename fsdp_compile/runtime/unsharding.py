"""Gathers outside of graphs: ``unshard()`` or an uncompiled forward starts them, and a reader of the parameters waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.collectives.functional import finish_gather, group_size, reshard_rounded, shard_on_device, start_gather
from passes.collectives.layout import REPLICATED, padded_shard_shape
from passes.collectives.rounded_gather import is_rounded
from passes.ir.extension import gathered_shape, with_rows

from ..units.sharded_param import ShardedParam
from ..units.unit import PackedTensors, PendingGather, Unit
from .collective_log import eager_run


@torch.inference_mode(False)
@torch.no_grad()
def start_unshard(unit: Unit) -> None:
    """Start to gather a unit's parameters, one collective for each dtype and mesh, unless they are gathered or in flight.

    Raises:
        RuntimeError: a parameter is on the meta device.
    """
    if unit.pending:
        check_memory(unit)
        return
    missing = []
    for params in gathered_together(unit):
        if all(param.state.full(param.param) is not None for param in params):
            for param in params:
                param.state.is_unsharded = True
        else:
            missing.append(params)
    unit.pending = start_gathers(unit, missing, f"unshard() of {unit.name or 'the root'}")
    for params in missing:
        for param in params:
            param.state.start_full(param.param)


def check_memory(unit: Unit) -> None:
    """Raise ``RuntimeError`` if the unit's parameters are on the meta device."""
    if unit.is_meta:
        raise RuntimeError(unit.params[0].meta_message())


def gathered_together(unit: Unit) -> list[list[ShardedParam]]:
    """Group a unit's parameters by collective: by dtype and mesh, or by mesh alone if they are packed."""
    found: dict[Any, list[ShardedParam]] = {}
    for param in unit.params:
        found.setdefault(("packed" if param.is_packed else param.shard.dtype, param.mesh), []).append(param)
    return list(found.values())


class Resharded(NamedTuple):
    """A parameter that is sharded over a smaller group between forward and backward.

    Attributes:
        shard: this rank's shard in the smaller group, or its bytes if the parameter was rounded.
        group: name of the smaller group. The unit may have another one by now.
    """

    shard: Tensor
    group: str


_NONE: Mapping[ShardedParam, Resharded] = {}


def start_gathers(
    unit: Unit, buckets: Iterable[list[ShardedParam]], label: str, resharded: Mapping[ShardedParam, Resharded] = _NONE
) -> list[PendingGather]:
    """Start to gather parameters, one collective for each bucket.

    Args:
        unit: the unit of all parameters.
        buckets: parameters of one dtype and mesh each.
        label: names the gather in errors about ranks that disagree.
        resharded: the parameters that are sharded over a smaller group, to gather there.

    Raises:
        RuntimeError: the parameters are on the meta device.
    """
    check_memory(unit)
    if unit.scope.post_optim_event is not None:
        # Do not forget the event: the forward may run on another stream.
        unit.scope.post_optim_event.wait()
    return [_start_gather(unit, params, label, resharded) for params in buckets]


def _start_gather(
    unit: Unit, params: list[ShardedParam], label: str, resharded: Mapping[ShardedParam, Resharded]
) -> PendingGather:
    if params[0].is_packed:
        return _start_packed(params, label)
    dtype, sharded = params[0].compute_dtype, [param for param in params if not param.is_whole]
    is_resharded = any(param in resharded for param in sharded)
    group = resharded[sharded[0]].group if is_resharded else params[0].mesh.shard_group
    sent_as, dtypes, encoded_over = sharded[0].sent_as if sharded else None, [], ""
    if is_resharded:
        shards = [resharded[param].shard for param in sharded]
        if sent_as is not None and any(shard.dtype == torch.uint8 for shard in shards):
            dtypes, encoded_over = [shard.dtype for shard in shards], params[0].mesh.shard_group
        else:
            sent_as = None  # The shards are rounded already, but not kept as bytes.
    elif sent_as is not None:
        shards = [param.shard.detach() for param in sharded]
    else:
        shards = _runs(unit, sharded)
        if unit.copies:
            shards = [shard_on_device(shard, unit.mesh.device.type) for shard in shards]
    run = eager_run(label if sent_as is None else f"{label} as {sent_as}", (sum(map(Tensor.numel, shards)),), (group,))
    gathered = None
    if shards:
        run.begin()
        with run:
            how: dict[str, Any] = {"dtypes": dtypes} if dtypes else {"dtype": dtype, "sent_as": sent_as}
            gathered = start_gather(shards, group, **how)
    return PendingGather(params, dtype, gathered, group, run, sent_as, encoded_over=encoded_over)


def _start_packed(params: list[ShardedParam], label: str) -> PendingGather:
    """Start to gather the tensors that extensions send, packed with other parameters of the unit."""
    group = params[0].mesh.shard_group
    pieces = {param: _pieces(param) for param in params if param.dim != REPLICATED}
    tensors = [tensor for sent in pieces.values() for tensor in sent.tensors]
    run = eager_run(f"{label}, packed", tuple(map(torch.Tensor.numel, tensors)), (group,))
    run.begin()
    with run:
        gathered = start_gather(tensors, group, dtypes=[tensor.dtype for tensor in tensors])
    return PendingGather(params, params[0].compute_dtype, gathered, group, run, pieces=pieces)


def _pieces(param: ShardedParam) -> PackedTensors:
    if param.extension is None:
        return PackedTensors([param.shard.detach().to(param.compute_dtype)])
    param.check_gather()
    tensors, metadata = param.extension.encode(param.extension.tensors_of(param.local), param.name)
    return PackedTensors([with_rows(tensor) for tensor in tensors], metadata)


def _finish_packed(pending: PendingGather) -> dict[ShardedParam, Tensor]:
    assert pending.gathered is not None
    tensors = [tensor for sent in pending.pieces.values() for tensor in sent.tensors]
    ranks = group_size(pending.group)
    shapes, dims = [gathered_shape(tensor, ranks) for tensor in tensors], [0] * len(tensors)
    for place, param in _places_of_plain(pending.pieces):
        shapes[place], dims[place] = [*param.shape], param.dim
    with pending.run:
        gathered = finish_gather(pending.gathered, shapes, dims, pending.group, dtypes=[tensor.dtype for tensor in tensors])
    found, start = {}, 0
    for param, sent in pending.pieces.items():
        # With one rank, the gathered tensors are runs of one buffer.
        own = [full.clone() if ranks == 1 else full for full in gathered[start : start + len(sent.tensors)]]
        start += len(sent.tensors)
        found[param] = (
            own[0].contiguous() if param.extension is None else param.extension.decode(own, sent.metadata, param.name)
        )
    return found


def _places_of_plain(pieces: Mapping[ShardedParam, PackedTensors]) -> list[tuple[int, ShardedParam]]:
    ends = itertools.accumulate(len(sent.tensors) for sent in pieces.values())
    return [(end - 1, param) for end, param in zip(ends, pieces, strict=True) if param.extension is None]


def _runs(unit: Unit, params: list[ShardedParam]) -> list[Tensor]:
    """Return the shards as one run of flat storage if they are neighbours, which needs no copy-in; else one by one."""
    if not params:
        return []
    first, last, numel = params[0], params[-1], sum(param.padded_numel for param in params)
    if last.offset + last.padded_numel - first.offset == numel:
        return [unit.storages[first.shard.dtype].narrow(0, first.offset, numel)]
    return [param.shard.detach() for param in params]


@torch.inference_mode(False)
@torch.no_grad()
def finish_unshard(unit: Unit) -> None:
    """Wait for the gathers that :func:`start_unshard` started, and keep the parameters for the next graph."""
    for pending in unit.take_gathers():
        for param, full in finish_gather_of(pending).items():
            param.state.keep_full(param.param, full)
            param.state.is_unsharded = True


def finish_gather_of(
    pending: PendingGather, resharded: dict[ShardedParam, Resharded] | None = None
) -> dict[ShardedParam, Tensor]:
    """Wait for a gather.

    Args:
        pending: the gather.
        resharded: receives the bytes that ``reshard_after_forward=<int>`` keeps of parameters that were rounded.

    Returns:
        The full parameters, each contiguous and with memory of its own.
    """
    if pending.pieces:
        whole = {
            param: param.shard.detach().to(param.compute_dtype, copy=True)
            for param in pending.params
            if param not in pending.pieces
        }
        return _finish_packed(pending) | whole
    sharded = [param for param in pending.params if not param.is_whole]
    fulls = {param: _whole(param, pending.dtype) for param in pending.params if param.is_whole}
    if pending.gathered is not None:
        shapes, dims = [param.shape for param in sharded], [param.dim for param in sharded]
        how: dict[str, Any] = {"dtype": pending.dtype, "sent_as": pending.sent_as, "encoded_over": pending.encoded_over}
        to_reshard = _places_to_reshard(pending, sharded) if resharded is not None else []
        with pending.run:
            gathered = finish_gather(pending.gathered, shapes, dims, pending.group, resharded=to_reshard, **how)
        fulls.update(zip(sharded, gathered, strict=False))
        parts = iter(gathered[len(sharded) :])
        for param in map(sharded.__getitem__, to_reshard):
            assert resharded is not None
            group = param.post_forward_group
            resharded[param] = Resharded(reshard_rounded([next(parts), next(parts)], group), group)
    return {param: full.contiguous() for param, full in fulls.items()}


def _whole(param: ShardedParam, dtype: torch.dtype) -> Tensor:
    """Copy a parameter that this rank has whole into memory of its own, in ``dtype``."""
    shard = param.shard.detach()
    return shard_on_device(shard, param.mesh.device.type).to(dtype) if param.unit.copies else shard.to(dtype, copy=True)


def _places_to_reshard(pending: PendingGather, params: Sequence[ShardedParam]) -> list[int]:
    if pending.sent_as is None or pending.encoded_over:
        return []
    return [
        place
        for place, param in enumerate(params)
        if param.post_forward_group and is_rounded(padded_shard_shape(param.shape, param.dim, group_size(pending.group)))
    ]


def end_forward(unit: Unit) -> None:
    """Wait for gathers in flight, and free the parameters that ``unshard()`` gathered, as the unit's flags say."""
    finish_unshard(unit)
    for param in unit.params:
        param.end_forward()
