"""Gathers outside of graphs: ``unshard()`` or an uncompiled forward starts them, and a reader of the parameters waits."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from passes.collectives.functional import group_size
from passes.collectives.gather import (
    AsNumbers,
    Rounded,
    choose_format,
    finish_gather,
    reshard_rounded,
    shard_on_device,
    start_gather,
)
from passes.collectives.layout import padded_shard_shape
from passes.collectives.rounded_gather import is_rounded
from passes.ir.extension import gathered_shape, with_rows

from ..units.sharded_param import ShardedParam
from ..units.unit import PendingGather, SentTensors, Unit
from .checked_program import eager_run


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
    unit.follow_extensions()
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
    """Group a unit's parameters by collective: by dtypes and mesh, or by mesh alone if they are packed."""
    found: dict[Any, list[ShardedParam]] = {}
    for param in unit.params:
        dtypes = None if param.is_packed else (param.shard.dtype, param.compute_dtype)
        found.setdefault((dtypes, param.mesh), []).append(param)
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
        buckets: parameters that :func:`gathered_together` puts together.
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
    first, kept = params[0], [resharded[param] for param in params if param in resharded]
    group = kept[0].group if kept else first.mesh.shard_group
    sent = {param: _sent(param, resharded) for param in params if param.extension is not None or not param.is_whole}
    tensors = [tensor for of_one in sent.values() for tensor in of_one.tensors]
    if not sent:
        return PendingGather(params, sent, AsNumbers(), None, group, eager_run(label, (0,), (group,)))
    # Shards that are kept in a smaller group, but not as bytes, have been rounded already.
    sent_as = next(iter(sent)).sent_as if not kept or _are_bytes(kept) else None
    format = choose_format(
        [param.shape for param in sent],
        [tensor.dtype for tensor in tensors],
        dtype=first.compute_dtype,
        sent_as=sent_as,
        packed=first.is_packed,
        encoded_over=first.mesh.shard_group if kept else "",
    )
    sizes: tuple[int, ...] = (sum(map(Tensor.numel, tensors)),)
    if first.is_packed:
        label, sizes = f"{label}, packed", tuple(map(Tensor.numel, tensors))
    elif sent_as is not None:
        label = f"{label} as {sent_as}"
    elif not kept:
        tensors = _runs(unit, [*sent])
        if unit.copies:
            tensors = [shard_on_device(tensor, unit.mesh.device.type) for tensor in tensors]
    run = eager_run(label, sizes, (group,))
    run.begin()
    with run:
        gathered = start_gather(tensors, group, format=format)
    return PendingGather(params, sent, format, gathered, group, run)


def _are_bytes(kept: Sequence[Resharded]) -> bool:
    return any(piece.shard.dtype == torch.uint8 for piece in kept)


def _sent(param: ShardedParam, resharded: Mapping[ShardedParam, Resharded]) -> SentTensors:
    if param.extension is not None:
        param.check_gather()
        tensors, metadata = param.extension.encode(param.extension.tensors_of(param.local), param.name)
        return SentTensors([with_rows(tensor) for tensor in tensors], metadata)
    shard = resharded[param].shard if param in resharded else param.shard.detach()
    return SentTensors([shard.to(param.compute_dtype) if param.is_packed else shard])


def _layouts(sent: Mapping[ShardedParam, SentTensors], group: str) -> list[tuple[Sequence[int], int]]:
    """Return the gathered shape of each tensor that is sent, and the dimension that it is cut along."""
    ranks = group_size(group)
    return [
        (param.shape, param.dim) if param.extension is None else (gathered_shape(tensor, ranks), 0)
        for param, of_one in sent.items()
        for tensor in of_one.tensors
    ]


def _runs(unit: Unit, params: list[ShardedParam]) -> list[Tensor]:
    """Return the shards as one run of flat storage if they are neighbours, which needs no copy-in; else one by one."""
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
    fulls = {param: _whole(param) for param in pending.params if param not in pending.sent}
    if pending.gathered is None:
        return fulls
    layouts = _layouts(pending.sent, pending.group)
    shapes, dims = [shape for shape, _ in layouts], [dim for _, dim in layouts]
    to_reshard = {} if resharded is None else _to_reshard(pending)
    with pending.run:
        how: dict[str, Any] = {"format": pending.format, "resharded": [*to_reshard]}
        gathered = iter(finish_gather(pending.gathered, shapes, dims, pending.group, **how))
    for param, of_one in pending.sent.items():
        own = list(itertools.islice(gathered, len(of_one.tensors)))
        fulls[param] = own[0].contiguous() if param.extension is None else _decode(param, own, of_one, pending)
    for param in to_reshard.values():
        assert resharded is not None
        parts, group = list(itertools.islice(gathered, 2)), param.post_forward_group
        resharded[param] = Resharded(reshard_rounded(parts, group), group)
    return fulls


def _decode(param: ShardedParam, own: list[Tensor], sent: SentTensors, pending: PendingGather) -> Tensor:
    assert param.extension is not None
    if group_size(pending.group) == 1:
        # The gathered tensors are runs of one buffer.
        own = [tensor.clone() for tensor in own]
    return param.extension.decode(own, sent.metadata, param.name)


def _whole(param: ShardedParam) -> Tensor:
    """Copy a parameter that this rank has whole into memory of its own, in the dtype that a forward reads it in."""
    shard, dtype = param.shard.detach(), param.compute_dtype
    if param.unit.copies:
        return shard_on_device(shard, param.mesh.device.type).to(dtype).contiguous()
    return shard.to(dtype, copy=True).contiguous()


def _to_reshard(pending: PendingGather) -> dict[int, ShardedParam]:
    """Return the parameters whose bytes are kept in a smaller group, by their places in the gather."""
    if not isinstance(pending.format, Rounded):
        return {}
    ranks = group_size(pending.group)
    return {
        place: param
        for place, param in enumerate(pending.sent)
        if param.post_forward_group and is_rounded(padded_shard_shape(param.shape, param.dim, ranks))
    }


def end_forward(unit: Unit) -> None:
    """Wait for gathers in flight, and free the parameters that ``unshard()`` gathered, as the unit's flags say."""
    finish_unshard(unit)
    for param in unit.params:
        param.end_forward()
