"""Gradient clipping over flat gradients."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from ..units.param_state import noted_slice
from ..units.sharded_param import params_with_memory

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
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set; or a parameter is updated in backward.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _refuse_updated(parameters)
    if not norm_type > 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients: list[Any] = [param.grad for param in parameters if param.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    whole: dict[int, tuple[_Cut, list[Tensor]]] = {}
    summed: list[tuple[_Cut, Tensor]] = []
    scaled: list[Tensor] = []
    for gradient in gradients:
        if not isinstance(gradient, DTensor):
            layout, local = _PLAIN, gradient
        else:
            layout, local = _layout(gradient._spec), gradient._local_tensor
        if layout.is_summand:
            # Each rank has a summand: what is to be measured is their sum.
            scaled.append(local)
            placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
            summed.append((layout.cut, gradient.redistribute(placements=placements).to_local()))
        elif id(layout.cut) in whole:
            whole[id(layout.cut)][1].append(local)
        else:
            whole[id(layout.cut)] = layout.cut, [local]
    first: Tensor = gradients[0]._local_tensor if isinstance(gradients[0], DTensor) else gradients[0]
    pieces: dict[_Cut, list[Tensor]] = {}
    for cut, tensors in whole.values():
        pieces.setdefault(cut, []).extend(_merged(tensors))
    scaled += [piece for merged in pieces.values() for piece in merged]
    for cut, local in summed:
        pieces.setdefault(cut, []).append(local)
    total = _total_norm(pieces, first, float(norm_type), foreach)
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


def _refuse_updated(parameters: Iterable[Tensor]) -> None:
    sharded = params_with_memory()
    for param in parameters:
        found = sharded.get(id(param))
        if found is not None and found.param is param and found.updater is not None:
            raise RuntimeError(
                f"clip_grad_norm_ would find no gradient of {found.name}, which is updated in backward "
                "(optimizer_in_backward), before the norm of all gradients is known. Clip with an optimizer of torch.optim or "
                "flat_optimizer."
            )


class _Layout(NamedTuple):
    """How a gradient lies on ranks.

    Attributes:
        cut: over what it is cut; equal ones are one object.
        is_summand: whether ranks have summands of it.
    """

    cut: _Cut
    is_summand: bool


_PLAIN = _Layout(None, False)
#: Of specs of DTensors, by their ``id``; an equal spec takes longer to be found than to be looked at.
_layouts: dict[int, tuple[weakref.ref[Any], _Layout]] = {}


def _layout(spec: Any) -> _Layout:
    ref, layout = _layouts.get(id(spec), (None, _PLAIN))
    if ref is not None and ref() is spec:
        return layout
    placements = spec.placements
    dims = tuple(dim for dim, placement in enumerate(placements) if not (placement.is_replicate() or placement.is_partial()))
    cut: _Cut = (spec.mesh, dims)
    cut = next((kept.cut for _, kept in list(_layouts.values()) if kept.cut == cut), cut)
    layout = _Layout(cut, any(placement.is_partial() for placement in placements))
    number = id(spec)
    _layouts[number] = weakref.ref(spec, lambda _: _layouts.pop(number, None)), layout
    return layout


def _merged(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """The same elements in fewer tensors: neighbours in a flat buffer are one."""
    # By the buffer's first address: the buffer, and first and last address of each tensor in it. Padding may follow a tensor,
    # of which a communication hook can have made anything.
    buffers: dict[int, tuple[Tensor, list[tuple[int, int]]]] = {}
    start = end = 0
    parts: list[tuple[int, int]] = []
    for tensor in tensors:
        address = tensor.data_ptr()
        if not address:
            # Without elements: of a parameter of fewer rows than ranks.
            continue
        if not tensor.is_contiguous():
            yield tensor
            continue
        if not start <= address < end:
            piece = noted_slice(tensor)
            if piece is None:
                yield tensor
                continue
            start = piece.flat.data_ptr()
            end = start + piece.flat.nbytes
            _, parts = buffers.setdefault(start, (piece.flat, []))
        # What begins at an address in the buffer, which is alive, lies in the buffer.
        parts.append((address, address + tensor.nbytes))
    for start, (flat, parts) in buffers.items():
        parts.sort()
        size = flat.itemsize
        first, last = parts[0][0], parts[0][0]
        for address, after in parts:
            if address != last:
                yield flat.narrow(0, (first - start) // size, (last - first) // size)
                first = address
            last = after
        yield flat.narrow(0, (first - start) // size, (last - first) // size)


def _total_norm(pieces: dict[_Cut, list[Tensor]], like: Tensor, norm_type: float, foreach: bool | None) -> Tensor:
    """The norm of all elements on all ranks, on the device and in the dtype of ``like``."""
    is_largest = math.isinf(norm_type)
    norms = {
        cut: get_total_norm(tensors, norm_type, foreach=foreach) if tensors else like.new_zeros(())
        for cut, tensors in pieces.items()
    }
    dtype, device = like.dtype, like.device
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
