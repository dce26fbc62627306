"""Gradient clipping over flat gradients."""

from __future__ import annotations

import math
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from itertools import compress, count, repeat
from operator import add, attrgetter, is_, itemgetter, ne
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from passes.fx.torch_internals.distributed import DTensorSpec, TensorMeta
from passes.fx.torch_internals.objects import as_local, local_tensor, spec_of

from ..units.gradient_buffer import KeptGradients, buffer_of
from ..units.param_state import noted_slice
from ..units.sharded_param import params_with_memory
from .in_backward import living_optimizers

#: A mesh, and its dimensions over which a gradient is sharded; None: the gradient is no DTensor.
_Cut: TypeAlias = tuple[Any, tuple[int, ...]] | None

_GRAD = attrgetter("grad")
_DTYPE, _NBYTES = attrgetter("dtype"), attrgetter("nbytes")


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """Clip gradients by their norm, as ``torch.nn.utils.clip_grad_norm_``, over flat buffers instead of one by one.

    Gradients that are neighbours in a flat buffer are one tensor for the norm and for the scaling. There is one all-reduce for
    each process group that gradients are sharded over. The norm equals torch's up to rounding. Unlike torch's function, this
    one takes gradients on several meshes at once, and plain tensors among DTensors. A plain gradient counts once, however many
    ranks have it.

    Args:
        parameters: the parameters whose gradients are clipped in place; parameters without gradient are left out.
        max_norm: the largest norm of the gradients after clipping.
        norm_type: a positive number, or infinity. For others (0 counts tensors, not elements), torch's function is called.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        foreach: as for torch's function.

    Returns:
        The norm before clipping, a scalar with the whole value on every rank. If all gradients are DTensors of one mesh, the
        norm is a DTensor replicated over that mesh, whose ``full_tensor()`` communicates nothing. Otherwise it is plain.

    Raises:
        RuntimeError: the norm is not finite, and ``error_if_nonfinite`` is set; or a parameter is updated in backward.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    _refuse_updated(parameters)
    if not norm_type > 0:
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type, error_if_nonfinite, foreach)
    gradients = list(map(_GRAD, parameters))
    if any(map(is_, gradients, repeat(None))):
        gradients = [gradient for gradient in gradients if gradient is not None]
    if not gradients:
        return torch.tensor(0.0)
    return clip_groups(_found(gradients), float(norm_type), max_norm, error_if_nonfinite, foreach)


def clip_groups(
    found: GradientGroups, norm_type: float, max_norm: float, error_if_nonfinite: bool = False, foreach: bool | None = None
) -> Tensor:
    """Clip gradients that :func:`group_gradients` has grouped; see :func:`clip_grad_norm_`."""
    total = _total_norm(found, norm_type, foreach)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be clipped. To "
            "disable this error and scale the gradients by the non-finite norm anyway, set `error_if_nonfinite=False`"
        )
    if len(found.scaled) == 1:
        # The formula of torch's function, without its overhead for lists.
        found.scaled[0].mul_(total.add(1e-6).reciprocal_().mul_(max_norm).clamp_max_(1.0))
    else:
        # torch's function reads only ``grad`` of a parameter.
        holders: list[Any] = list(map(_GradientView, found.scaled))
        clip_grads_with_norm_(holders, max_norm, total, foreach)
    return total if found.spec is None else DTensor(total, found.spec, requires_grad=False)


class GradientGroups(NamedTuple):
    """Gradients, grouped for the norm and for scaling.

    Attributes:
        pieces: for each cut, tensors for the norm, which hold each element of the gradients once. Neighbours are merged.
        scaled: the tensors to scale in place.
        rounds: the all-reduces of the norm: the cuts whose norms take part, and the group.
        spec: the spec of the norm; None: the norm is a plain tensor.
        dtype, device: of the norm.
    """

    pieces: dict[_Cut, list[Tensor]]
    scaled: list[Tensor]
    rounds: list[tuple[list[_Cut], Any]]
    spec: DTensorSpec | None
    dtype: torch.dtype
    device: torch.device


class _Memo(NamedTuple):
    """The groups of gradients that stay in a buffer, which are the same tensors in each step."""

    kept: KeptGradients
    found: GradientGroups


def _found(gradients: Sequence[Any]) -> GradientGroups:
    buffer = buffer_of(gradients[0])
    if buffer is not None and buffer.memo is not None and buffer.memo.kept.are(gradients):
        found: GradientGroups = buffer.memo.found
        return found
    found, has_summands = group_gradients(gradients)
    kept = KeptGradients.of(gradients) if buffer is not None and not has_summands else None
    if buffer is not None and kept is not None:
        buffer.memo = _Memo(kept, found)
    return found


def group_gradients(gradients: Sequence[Any]) -> tuple[GradientGroups, bool]:
    """Group gradients for the norm. Also return whether any is Partial, in which case the groups change every step."""
    first: Tensor = as_local(gradients[0])
    whole, summed = _by_cut(gradients)
    pieces = {cut: list(_merged(tensors)) for cut, tensors in whole.items()}
    scaled = [piece for merged in pieces.values() for piece in merged]
    for gradient in summed:
        # The gradient is Partial: its norm is that of the sum over ranks.
        scaled.append(local_tensor(gradient))
        placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
        pieces.setdefault(_layout(gradient).cut, []).append(gradient.redistribute(placements=placements).to_local())
    meshes = list(dict.fromkeys(cut[0] if cut is not None else None for cut in pieces))
    spec = None
    if len(meshes) == 1 and meshes[0] is not None:
        meta = TensorMeta(torch.Size(), (), first.dtype)
        spec = DTensorSpec(meshes[0], (Replicate(),) * meshes[0].ndim, tensor_meta=meta)
    return GradientGroups(pieces, scaled, _rounds(pieces), spec, first.dtype, first.device), bool(summed)


def _rounds(cuts: Iterable[_Cut]) -> list[tuple[list[_Cut], Any]]:
    """Return the all-reduces of the norm: one for each mesh dimension that gradients are sharded over."""
    rounds = []
    for mesh in dict.fromkeys(cut[0] for cut in cuts if cut is not None):
        for dim in range(mesh.ndim):
            members: list[_Cut] = [cut for cut in cuts if cut is not None and cut[0] == mesh and dim in cut[1]]
            if members and mesh.size(dim) > 1:
                rounds.append((members, mesh.get_group(dim)))
    return rounds


class _GradientView(NamedTuple):
    """A gradient in the form of a parameter, for torch's functions on parameters."""

    grad: Tensor


def _refuse_updated(parameters: Iterable[Tensor]) -> None:
    if not living_optimizers():
        return
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
    """The layout of a gradient on the ranks.

    Attributes:
        cut: the mesh and the dimensions that it is sharded over.
        is_partial: whether it is Partial over some dimension.
    """

    cut: _Cut
    is_partial: bool


_PLAIN = _Layout(None, False)
#: Layouts by the ``id`` of a DTensor's spec, as hashing a spec takes longer than reading it. Equal layouts are one object.
_layouts: dict[int, _Layout] = {}


def _layout(gradient: Any) -> _Layout:
    if not isinstance(gradient, DTensor):
        return _PLAIN
    spec = spec_of(gradient)
    number = id(spec)
    if number not in _layouts:
        placements = spec.placements
        dims = tuple(dim for dim, placed in enumerate(placements) if not (placed.is_replicate() or placed.is_partial()))
        layout = _Layout((spec.mesh, dims), any(placement.is_partial() for placement in placements))
        # Removed together with the spec, as a later spec may have the same ``id``.
        weakref.finalize(spec, _layouts.pop, number).atexit = False
        known = {id(kept): kept for kept in list(_layouts.values())}.values()
        _layouts[number] = next((kept for kept in known if kept == layout), layout)
    return _layouts[number]


def _by_cut(gradients: Sequence[Any]) -> tuple[dict[_Cut, list[Tensor]], list[Any]]:
    """Group local tensors by cut. Also return the gradients that are Partial, which are in no group."""
    # Every step does this for all gradients. Usually they have one layout, and then all loops run in C.
    if set(map(type, gradients)) == {DTensor}:
        kinds = list(map(_layouts.get, map(id, map(spec_of, gradients))))
        kind = kinds[0]
        if kind is not None and not kind.is_partial and all(map(is_, kinds, repeat(kind))):
            return {kind.cut: list(map(local_tensor, gradients))}, []
    by_layout: dict[int, tuple[_Layout, list[Any]]] = {}
    for gradient in gradients:
        layout = _layout(gradient)
        by_layout.setdefault(id(layout), (layout, []))[1].append(gradient)
    whole: dict[_Cut, list[Tensor]] = {}
    summed: list[Any] = []
    for layout, alike in by_layout.values():
        if layout.is_partial:
            summed += alike
        else:
            whole.setdefault(layout.cut, []).extend(alike if layout is _PLAIN else map(local_tensor, alike))
    return whole, summed


def _merged(tensors: Sequence[Tensor]) -> Iterator[Tensor]:
    """Merge tensors that are neighbours in a flat buffer, and yield the others as they are.

    The order follows from that of ``tensors``, not from addresses: a sum of norms rounds alike in every run.
    """
    if not all(map(Tensor.is_contiguous, tensors)):
        yield from (tensor for tensor in tensors if not tensor.is_contiguous())
        tensors = [tensor for tensor in tensors if tensor.is_contiguous()]
    dtypes = dict.fromkeys(map(_DTYPE, tensors))
    if len(dtypes) > 1:
        for dtype in dtypes:
            yield from _merged([tensor for tensor in tensors if tensor.dtype == dtype])
        return
    addresses = list(map(Tensor.data_ptr, tensors))
    order = sorted(range(len(tensors)), key=addresses.__getitem__)
    starts = [addresses[index] for index in order]
    # Tensors without elements have address 0. They are of parameters with fewer rows than ranks.
    empty = bisect_right(starts, 0)
    order, starts = order[empty:], starts[empty:]
    if not order:
        return
    ordered = [tensors[index] for index in order]
    ends = list(map(add, starts, map(_NBYTES, ordered)))
    # Padding after a tensor separates it from the next: a communication hook may have written anything there.
    heads = [0, *compress(count(1), map(ne, starts[1:], ends))]
    pieces: list[tuple[int, Tensor]] = []
    for head, tail in zip(heads, [*heads[1:], len(ordered)], strict=True):
        for begin, end, piece in _of_buffers(ordered[head:tail], starts[head:tail], ends[head:tail]):
            pieces.append((min(order[head + begin : head + end]), piece))
    yield from (piece for _, piece in sorted(pieces, key=itemgetter(0)))


def _of_buffers(tensors: Sequence[Tensor], starts: Sequence[int], ends: Sequence[int]) -> Iterator[tuple[int, int, Tensor]]:
    """Merge tensors, each of which begins where the previous one ends, into one for each flat buffer.

    Yields:
        For each merged tensor, the range of the indices of its parts, and the tensor.
    """
    index = 0
    while index < len(tensors):
        piece = noted_slice(tensors[index])
        if piece is None:
            yield index, index + 1, tensors[index]
            index += 1
            continue
        # The buffer is alive, so tensors at addresses inside it are parts of it.
        flat = piece.flat
        following = bisect_right(ends, flat.data_ptr() + flat.nbytes, lo=index)
        numel = (ends[following - 1] - starts[index]) // flat.itemsize
        yield index, following, flat if numel == flat.numel() else flat.narrow(0, piece.offset, numel)
        index = following


def _total_norm(found: GradientGroups, norm_type: float, foreach: bool | None) -> Tensor:
    """Compute the norm of all elements on all ranks, as a new scalar tensor."""
    is_largest = math.isinf(norm_type)
    dtype, device = found.dtype, found.device
    # Powers of a half-precision norm overflow early.
    wide = dtype if dtype == torch.float32 else torch.promote_types(dtype, torch.float32)
    powers = {}
    for cut, tensors in found.pieces.items():
        norm = _norm(tensors, norm_type, foreach) if tensors else torch.zeros((), dtype=dtype, device=device)
        if norm.dtype != wide or norm.device != device:
            norm = norm.to(device, torch.promote_types(norm.dtype, wide))
        powers[cut] = norm if is_largest else norm.mul_(norm) if norm_type == 2.0 else norm.pow_(norm_type)
    operation = dist.ReduceOp.MAX if is_largest else dist.ReduceOp.SUM
    for cuts, group in found.rounds:
        together = torch.stack([powers[cut] for cut in cuts]) if len(cuts) > 1 else powers[cuts[0]]
        dist.all_reduce(together, operation, group=group)
        if len(cuts) > 1:
            powers.update(zip(cuts, together.unbind(), strict=True))
    total, *others = powers.values()
    if others:
        together = torch.stack([total, *others])
        total = together.amax() if is_largest else together.sum()
    if not is_largest:
        total = total.sqrt_() if norm_type == 2.0 else total.pow_(1 / norm_type)
    return total if total.dtype == dtype else total.to(dtype)


def _norm(tensors: list[Tensor], norm_type: float, foreach: bool | None) -> Tensor:
    """Compute the norm of all elements of ``tensors``, on this rank alone."""
    if len(tensors) > 1:
        return get_total_norm(tensors, norm_type, foreach=foreach)
    return torch.linalg.vector_norm(tensors[0], norm_type)
