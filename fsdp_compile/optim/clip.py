"""Gradient clipping over flat gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..units.param_state import FlatSlice, noted_slice

#: A mesh and those of its dimensions over which a gradient is cut; None: the gradient is no DTensor.
_Cut: TypeAlias = tuple[Any, tuple[int, ...]] | None


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients by their norm, as ``torch.nn.utils.clip_grad_norm_``, over flat buffers instead of one by one.

    Gradients that are neighbours in a flat buffer are one tensor for the norm and for the scaling, and there is one all-reduce
    for each process group over which gradients are cut. The norm is that of torch's up to rounding. Unlike torch's, it takes
    gradients on several meshes at once, and plain tensors among DTensors; a plain gradient counts once, however many ranks have
    it.

    Args:
        parameters: those whose gradients are clipped in place; one without gradient is left out.
        max_norm: the norm that gradients have at most afterwards.
        norm_type: a positive number, or infinity. For others (0 counts tensors, not elements), torch's function is called.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        foreach: as for torch's.

    Returns:
        The norm ahead of clipping, whole on every rank: a DTensor, replicated over the gradients' mesh, if they are DTensors of
        one mesh (``full_tensor()`` communicates nothing); else a plain tensor.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not norm_type > 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = [param.grad for param in parameters if param.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    whole: dict[_Cut, list[Tensor]] = {}
    summed: dict[_Cut, list[Tensor]] = {}
    scaled: list[Tensor] = []
    for gradient in gradients:
        if isinstance(gradient, DTensor) and any(placement.is_partial() for placement in gradient.placements):
            # Each rank has a summand: what is to be measured is their sum.
            scaled.append(gradient._local_tensor)
            placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            cut, local = _local(gradient.redistribute(placements=placements))
            summed.setdefault(cut, []).append(local)
        else:
            cut, local = _local(gradient)
            whole.setdefault(cut, []).append(local)
    pieces = {cut: list(_merged(tensors)) for cut, tensors in whole.items()}
    scaled += [piece for merged in pieces.values() for piece in merged]
    for cut, tensors in summed.items():
        pieces.setdefault(cut, []).extend(tensors)
    total = _total_norm(pieces, float(norm_type), foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    clip_grads_with_norm_([_holder(piece) for piece in scaled], max_norm, total, foreach)
    meshes = {cut[0] if cut is not None else None for cut in pieces}
    mesh = meshes.pop()
    if mesh is None or meshes:
        return total
    return DTensor.from_local(total, mesh, [Replicate()] * mesh.ndim, run_check=False)


def _local(gradient: Any) -> tuple[_Cut, Tensor]:
    """How a gradient is cut, and this rank's piece."""
    if not isinstance(gradient, DTensor):
        return None, gradient
    dims = tuple(dim for dim, placement in enumerate(gradient.placements) if not placement.is_replicate())
    return (gradient.device_mesh, dims), gradient._local_tensor


def _merged(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same elements in fewer tensors: neighbours in a flat buffer are one."""
    buffers: dict[int, list[FlatSlice]] = {}
    for tensor in tensors:
        piece = noted_slice(tensor)
        if piece is None or not tensor.is_contiguous():
            yield tensor
        else:
            # Without the padding that may follow, of which a communication hook can have made anything.
            buffers.setdefault(id(piece.flat), []).append(piece._replace(numel=tensor.numel()))
    for pieces in buffers.values():
        pieces.sort(key=lambda piece: piece.offset)
        flat, start, end = pieces[0].flat, pieces[0].offset, pieces[0].offset
        for piece in pieces:
            if piece.offset != end:
                yield flat.narrow(0, start, end - start)
                start = piece.offset
            end = piece.offset + piece.numel
        yield flat.narrow(0, start, end - start)


def _total_norm(pieces: dict[_Cut, list[Tensor]], norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of all elements on all ranks."""
    is_largest = math.isinf(norm_type)
    norms = {cut: get_total_norm(tensors, norm_type, foreach=foreach) for cut, tensors in pieces.items()}
    dtype, device = next((norm.dtype, norm.device) for norm in norms.values())
    # Powers of a half-precision norm overflow early.
    powers = {cut: norm.to(device, torch.promote_types(norm.dtype, torch.float32)) for cut, norm in norms.items()}
    if not is_largest:
        powers = {cut: norm**norm_type for cut, norm in powers.items()}
    operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
    for mesh in dict.fromkeys(cut[0] for cut in powers if cut is not None):
        for dim in range(mesh.ndim):
            cuts = [cut for cut in powers if cut is not None and cut[0] == mesh and dim in cut[1]]
            if cuts and mesh.size(dim) > 1:
                together = torch.stack([powers[cut] for cut in cuts])
                dist.all_reduce(together, operation, group=mesh.get_group(dim))
                powers.update(zip(cuts, together.unbind(), strict=True))
    together = torch.stack(list(powers.values()))
    total = together.amax() if is_largest else together.sum() ** (1 / norm_type)
    return total.to(dtype)


def _holder(gradient: Tensor) -> Tensor:
    """Something with this gradient, for torch's functions on parameters."""
    holder = gradient.detach()
    holder.grad = gradient
    return holder
