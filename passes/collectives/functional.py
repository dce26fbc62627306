"""Gathers and gradient reductions as plain tensor functions over functional collectives.

Eager code calls these functions, and passes trace them into graphs. :mod:`passes.transforms.bucket` traces gathers;
:mod:`passes.transforms.gradient_sync` traces reductions, in the order of :func:`passes.ir.reduction.stages`. Each gather or
reduction is split where communication is in flight, so that a schedule can put work between start and finish.
"""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..fx.symbolic_ranks import overridden_ranks, overridden_size
from ..fx.torch_internals.distributed import resolve_process_group
from . import gloo, host_copies
from .divide_factors import Averaging, factor_dtype, gradient_divide_factors
from .layout import assemble, disassemble, padded_shard_numel, padded_shard_shape
from .rounded_gather import GatherPolicy, is_rounded, reinterpret, rounding
from .stateful_hook import RANDOM, HookParameter, StatefulHook, tensors_of_hook
from .traced_hook import apply_in_place_hook, apply_reduce_hook, apply_stateful_hook

_c10d = torch.ops._c10d_functional


def resolve_group(group: str) -> dist.ProcessGroup:
    """Return the process group of this name."""
    return resolve_process_group(group)  # type: ignore[arg-type]


def group_size(group: str) -> int:
    """Return the number of ranks of the process group of this name; 1 for the empty name (no group).

    Inside :func:`passes.fx.symbolic_ranks.symbolic_ranks` the number may be a symbol.
    """
    supposed = overridden_size(group)
    if supposed is not None:
        return supposed
    return resolve_group(group).size() if group else 1


def group_ranks(group: str) -> Sequence[int]:
    """Return the global ranks in a process group; inside :func:`passes.fx.symbolic_ranks.ranks_at` the ranks set there."""
    return overridden_ranks(group) or dist.get_process_group_ranks(resolve_group(group))


def dimension_of(group: str) -> str:
    """Return the name of the mesh dimension that a process group belongs to; empty if the group has none."""
    description = resolve_group(group).group_desc
    is_named = description.startswith("mesh_") and not description.startswith("mesh_dim_")
    return description.removeprefix("mesh_") if is_named else ""


def supports_averaging(group: str, device: torch.device) -> bool:
    """Return whether the backend that serves ``device`` can average in a reduction. NCCL can, Gloo cannot.

    The fake backend computes nothing; on a CUDA device it stands for NCCL.
    """
    backend = gloo.backend_of(group, device)
    return backend == "nccl" or ("fake" in backend and device.type == "cuda")


def exchanges(group: str, device: torch.device) -> bool:
    """Return whether a reduce-scatter over ``group`` is an exchange (``all_to_all_single``) and a sum on each rank.

    Gloo's own reduce-scatter all-reduces a copy of the whole gradient and drops the pieces of other ranks. An exchange sends
    half as much, and the sum fuses with the division and the accumulation after it.
    """
    return group_size(group) > 1 and gloo.backend_of(group, device) == "gloo"


def resolve_averaging(
    group: str,
    replicate_group: str,
    dtype: torch.dtype,
    device: torch.device,
    factor: float | None = None,
    force_sum: bool = False,
) -> tuple[Averaging, tuple[float, ...]]:
    """Return how gradients are averaged over a shard group and its replicas, with operators that the backend supports.

    Args:
        group: name of the shard group.
        replicate_group: name of the group of replicas; empty: none.
        dtype: dtype that the reduction runs in.
        device: device of the gradients, which decides the backend of ``group``.
        factor: what to divide by; None: the number of ranks of both groups.
        force_sum: reduce with sums only.

    Returns:
        The structure, and the values of its divide factors in the order of its attributes.
    """
    factors = gradient_divide_factors(
        resolve_group(group),
        resolve_group(replicate_group) if replicate_group else None,
        dtype,
        factor,
        force_sum or not supports_averaging(group, device),
    )
    return Averaging.of(factors, factor)


def start_gather(
    shards: Sequence[Tensor],
    group: str,
    gaps: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
    sent_as: GatherPolicy | None = None,
    dtypes: Sequence[torch.dtype] = (),
) -> Tensor:
    """Begin to gather padded shards of one dtype or, with ``dtypes``, of several.

    Args:
        shards: the shards.
        group: name of the shard group.
        gaps: the number of unused elements to gather after each shard; empty: the least that ``sent_as`` needs.
        dtype: dtype of the gathered parameters; None: that of the shards.
        sent_as: the rounding of the shards; None: send them in ``dtype``.
        dtypes: the dtype of each shard, if shards are sent without a cast. Several dtypes, or one-byte dtypes, are sent as
            bytes, without gaps.

    Returns:
        The flat buffer in flight, ``[world_size * sum of numels and gaps]``; bytes if shards are rounded or sent as bytes.
    """
    if _travel_as_bytes(dtypes):
        flat = torch.cat([shard.reshape(-1).view(torch.uint8) for shard in shards])
        return _c10d.all_gather_into_tensor(flat, group_size(group), group)
    dtype = dtype or shards[0].dtype
    sent_as = rounding(sent_as, [shard.shape for shard in shards])
    if sent_as is None:
        shards = [shard.to(dtype) for shard in shards]
    gaps = gaps or _least_gaps([shard.numel() for shard in shards], sent_as)
    pieces = _flat_pieces(shards, gaps)
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    if sent_as is not None:
        flat = sent_as.encode(shards, flat, dtype)
    return _c10d.all_gather_into_tensor(flat, group_size(group), group)


def _flat_pieces(shards: Sequence[Tensor], gaps: Sequence[int]) -> list[Tensor]:
    pieces = []
    for shard, gap in zip(shards, gaps, strict=True):
        pieces += [shard.reshape(-1), shard.new_zeros(gap)] if gap else [shard.reshape(-1)]
    return pieces


def start_copy_to_device(shards: Sequence[Tensor], gaps: Sequence[int] = (), *, device: str) -> Tensor:
    """Begin to copy padded shards of one dtype from the host to the device that gathers them.

    Args:
        shards: the shards.
        gaps: the number of unused elements after each shard; empty: none.
        device: the device's type; the copy goes to the current device of this type.

    Returns:
        The flat shard in flight, ``[sum of numels and gaps]``.
    """
    return host_copies.copy_to_device(_flat_pieces(shards, gaps or [0] * len(shards)), device)


def start_gather_of_copy(copied: Tensor, group: str, *, dtype: torch.dtype | None = None) -> Tensor:
    """Begin to gather the flat shard in flight of :func:`start_copy_to_device`. The device casts it to ``dtype``."""
    return start_gather([host_copies.wait_copy(copied)], group, dtype=dtype)


def shard_on_device(shard: Tensor, device: str) -> Tensor:
    """Copy a shard from the host to the device, and wait for the copy. Returns a new tensor of the same shape."""
    copied: Tensor = host_copies.wait_copy(start_copy_to_device([shard], device=device))
    return copied.view(shard.shape)


def start_copy_to_host(flat: Tensor, *, pinned: bool) -> Tensor:
    """Begin to copy a flat shard of averaged gradients to the host.

    The result is in flight until :func:`passes.collectives.host_copies.wait_on_host`.
    """
    copied: Tensor = host_copies.copy_to_host(flat, pinned)
    return copied


def _travel_as_bytes(dtypes: Sequence[torch.dtype]) -> bool:
    """Return whether tensors are sent as bytes: if dtypes differ, or are of one byte, which not every backend supports."""
    return len(set(dtypes)) > 1 or any(dtype.itemsize == 1 for dtype in dtypes)


def _least_gaps(numels: Sequence[int], sent_as: GatherPolicy | None) -> list[int]:
    return [0] * len(numels) if sent_as is None else sent_as.paddings(numels)


def finish_gather(
    gathered: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    group: str,
    gaps: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
    sent_as: GatherPolicy | None = None,
    runs: Sequence[int] = (),
    dtypes: Sequence[torch.dtype] = (),
    encoded_over: str = "",
    resharded: Sequence[int] = (),
) -> list[Tensor]:
    """Wait for a gather that :func:`start_gather` began and cut the full parameters out of its buffer.

    Args:
        gathered: the buffer in flight.
        shapes: shapes of the full parameters.
        dims: the dimension that each parameter is cut along.
        group: name of the group that the gather ran over.
        gaps, dtype, sent_as, dtypes: as for :func:`start_gather`; with ``sent_as``, ``dtype`` is needed.
        runs: numbers of neighbouring parameters. Each run is cut out of the buffer as one piece, and its parameters out of the
            piece. Empty: cut out each parameter by itself.
        encoded_over: for shards of :func:`reshard_rounded`: name of the larger group that was gathered over before; else empty.
        resharded: indices of the parameters whose bytes are returned, too, for :func:`reshard_rounded`.

    Returns:
        The parameters; after them, for each index in ``resharded``, two tensors ``[ranks, bytes]``: elements and scales.
    """
    world_size = group_size(group)
    sent_as = rounding(sent_as, shapes)
    rows = _c10d.wait_tensor(gathered).view(world_size, -1)
    if encoded_over:
        assert sent_as is not None and dtype is not None
        return _cut_resharded(rows, shapes, dims, group_size(encoded_over), sent_as, dtype)
    numels = [padded_shard_numel(shape, dim, world_size) for shape, dim in zip(shapes, dims, strict=True)]
    if _travel_as_bytes(dtypes):
        sizes = [numel * dtype.itemsize for numel, dtype in zip(numels, dtypes, strict=True)]
        numbers = list(map(reinterpret, _cut(rows, sizes, [0] * len(sizes), runs), dtypes))
        return [assemble(piece, shape, dim) for piece, shape, dim in zip(numbers, shapes, dims, strict=True)]
    gaps = gaps or _least_gaps(numels, sent_as)
    if sent_as is None:
        pieces = _cut(rows, numels, gaps, runs)
    else:
        assert dtype is not None
        shard_shapes = [padded_shard_shape(shape, dim, world_size) for shape, dim in zip(shapes, dims, strict=True)]
        ends = list(itertools.accumulate(map(operator.add, numels, gaps)))
        places = [end - numel - gap for end, numel, gap in zip(ends, numels, gaps, strict=True)]
        pieces = sent_as.decode(rows, shard_shapes, places, ends[-1], dtype)
    fulls = [assemble(piece, shape, dim) for piece, shape, dim in zip(pieces, shapes, dims, strict=True)]
    if resharded:
        assert sent_as is not None and dtype is not None
        encoded = sent_as.encoded(rows, shard_shapes, places, ends[-1], dtype)
        fulls += [part for index in resharded for part in encoded[index]]
    return fulls


def reshard_rounded(parts: Sequence[Tensor], group: str) -> Tensor:
    """Cut this rank's rows in a smaller group out of the bytes of one rounded parameter.

    A gather of these rows over the smaller group restores all bytes, so they decode to the same values as before.

    Args:
        parts: elements and scales of the parameter, as :func:`finish_gather` returns them, each ``[ranks, bytes]``.
        group: name of the smaller group.

    Returns:
        ``[ranks / ranks of the smaller group, bytes of both parts]``.
    """
    process_group = resolve_group(group)
    rows = parts[0].size(0) // process_group.size()
    return torch.cat([part.narrow(0, process_group.rank() * rows, rows) for part in parts], dim=1)


def _cut_resharded(
    rows: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    num_encoded: int,
    sent_as: GatherPolicy,
    dtype: torch.dtype,
) -> list[Tensor]:
    """Cut full parameters out of the bytes that a smaller group has gathered.

    Args:
        rows: ``[ranks of the smaller group, bytes]``.
        shapes: shapes of the full parameters.
        dims: the dimension that each parameter is cut along.
        num_encoded: ranks of the larger group, each of which encoded a row of the rounded parameters.
        sent_as: the rounding.
        dtype: dtype of the result, and of the parameters that were not rounded.
    """
    ranks = rows.size(0)
    shard_shapes = [padded_shard_shape(shape, dim, num_encoded) for shape, dim in zip(shapes, dims, strict=True)]
    sizes = [
        num_encoded // ranks * sent_as.encoded_numel(shard_shape)
        if is_rounded(shard_shape)
        else padded_shard_numel(shape, dim, ranks) * dtype.itemsize
        for shape, dim, shard_shape in zip(shapes, dims, shard_shapes, strict=True)
    ]
    fulls = []
    for piece, shape, dim, shard_shape in zip(rows.split(sizes, dim=1), shapes, dims, shard_shapes, strict=True):
        if is_rounded(shard_shape):
            encoded = piece.reshape(num_encoded, -1)
            numel = math.prod(shard_shape)
            (numbers,) = sent_as.decode(encoded, [shard_shape], [0], numel + sent_as.paddings([numel])[0], dtype)
        else:
            numbers = reinterpret(piece, dtype)
        fulls.append(assemble(numbers, shape, dim))
    return fulls


def _cut(rows: Tensor, numels: Sequence[int], gaps: Sequence[int], runs: Sequence[int] = ()) -> list[Tensor]:
    """Cut pieces of ``numels`` columns, each with a gap after it. With ``runs``, cut runs of so many pieces first."""
    if runs:
        ends = list(itertools.accumulate(runs))
        slices = [slice(end - run, end) for end, run in zip(ends, runs, strict=True)]
        split = rows.split([sum(numels[piece]) + sum(gaps[piece]) for piece in slices], dim=1)
        pairs = zip(slices, split, strict=True)
        return [cut for piece, run in pairs for cut in _cut(run, numels[piece], gaps[piece])]
    sizes: list[int] = []
    places = []
    for numel, gap in zip(numels, gaps, strict=True):
        places.append(len(sizes))
        sizes += [numel, gap] if gap else [numel]
    split = rows.split(sizes, dim=1) if len(sizes) > 1 else (rows,)
    return [split[place] for place in places]


def _divide(value: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Divide ``value`` by each factor (0-d). Each quotient is rounded to the dtype of ``value``."""
    for factor in factors:
        # By default, torch rounds a 0-d factor to a low-precision dtype before it divides. Complex values stay complex.
        value = (value.to(torch.promote_types(value.dtype, factor.dtype)) / factor).to(value.dtype)
    return value


def start_reduce_scatter(
    grads: Sequence[Tensor],
    accumulated: Sequence[Tensor] = (),
    factors: Sequence[Tensor] = (),
    *,
    dims: Sequence[int],
    group: str,
    op: str,
    hook: Callable[..., None] | None = None,
    in_place: bool = False,
) -> Tensor:
    """Begin to reduce full gradients of one dtype.

    Args:
        grads: full gradients.
        accumulated: full gradients of earlier microbatches to add, one for each gradient; or empty.
        factors: divide the gradients.
        dims: the dimension that each gradient is cut along.
        group: name of the shard group.
        op: "sum" or "avg"; empty: no communication, as the group has one rank.
        hook: a communication hook that replaces the reduce-scatter.
        in_place: the hook takes only the gradient and writes the result there. The group has one rank.

    Returns:
        The flat shard in flight, ``[sum of padded shard numels]``. If the reduction is an exchange (:func:`exchanges`), the
        addends of all ranks in flight, ``[world_size * sum]``. With a hook, or an empty ``op``, the result is not in flight.
    """
    world_size = group_size(group)
    flat = _flat_gradient(grads, accumulated, factors, dims, world_size)
    if hook is not None:
        return apply_in_place_hook(hook, flat) if in_place else apply_reduce_hook(hook, flat, world_size)
    if not op:
        # Without the copy, the result could share memory with the gradient, which may have other readers.
        return flat.clone()
    if exchanges(group, flat.device):
        assert op == "sum"
        pieces = [flat.numel() // world_size] * world_size
        return _c10d.all_to_all_single(flat, pieces, pieces, group)
    return _c10d.reduce_scatter_tensor(flat, op, world_size, group)


def reduce_by_stateful_hook(
    grads: Sequence[Tensor],
    accumulated: Sequence[Tensor] = (),
    factors: Sequence[Tensor] = (),
    tensors: Sequence[Tensor] = (),
    *,
    dims: Sequence[int],
    group: str,
    hook: StatefulHook,
) -> tuple[Tensor, list[Tensor]]:
    """Reduce full gradients of one dtype with a hook that has tensors; see :func:`start_reduce_scatter`.

    Args:
        tensors: the tensors of the hook, as :func:`tensors_of_hook` lists them.

    Returns:
        The flat shard, and the new values of the hook's tensors.
    """
    flat = _flat_gradient(grads, accumulated, factors, dims, group_size(group))
    parameters = hook_parameters(grads, dims, group)
    names = [(place, name) for place, name, _ in tensors_of_hook(hook, parameters) if name != RANDOM]
    return apply_stateful_hook(hook, flat, parameters, tensors, names)


def hook_parameters(grads: Sequence[Tensor], dims: Sequence[int], group: str) -> list[HookParameter]:
    """Describe to a hook the parameters whose full gradients it reduces."""
    ranks = group_size(group)
    return [
        HookParameter(tuple(grad.shape), dim, ranks, grad.dtype, grad.device) for grad, dim in zip(grads, dims, strict=True)
    ]


def _flat_gradient(
    grads: Sequence[Tensor],
    accumulated: Sequence[Tensor],
    factors: Sequence[Tensor],
    dims: Sequence[int],
    world_size: int,
) -> Tensor:
    if accumulated:
        grads = [kept + grad for kept, grad in zip(accumulated, grads, strict=True)]
    rows = [disassemble(grad, dim, world_size) for grad, dim in zip(grads, dims, strict=True)]
    # A single gradient may be expanded, and a collective reads memory, not strides.
    return _divide((rows[0].contiguous() if len(rows) == 1 else torch.cat(rows, dim=1)).reshape(-1), factors)


def finish_reduce_scatter(
    scattered: Tensor,
    factors: Sequence[Tensor] = (),
    partial: Sequence[Tensor] = (),
    *,
    group: str,
    in_flight: bool = True,
) -> Tensor:
    """Wait for the flat shard of :func:`start_reduce_scatter`, divide it, and add partial results of earlier microbatches.

    Args:
        scattered: the result of :func:`start_reduce_scatter`.
        factors: divide the shard.
        partial: flat shards of earlier microbatches to add.
        group: name of the shard group.
        in_flight: whether there is something to wait for; False after a hook, or without communication.

    Returns:
        The flat shard, reduced over the shard group, ``[sum of padded shard numels]``.
    """
    flat = scattered
    if in_flight:
        flat = _c10d.wait_tensor(scattered)
        if exchanges(group, flat.device):
            flat = flat.view(group_size(group), -1).sum(0)
    flat = _divide(flat, factors)
    for earlier in partial:
        flat = earlier + flat
    return flat


def start_all_reduce(
    scattered: Tensor,
    factors: Sequence[Tensor] = (),
    partial: Sequence[Tensor] = (),
    *,
    group: str,
    in_flight: bool = True,
    replicate_group: str,
    op: str,
    hook: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Finish the reduce-scatter, and begin to all-reduce its flat shard over the replicas.

    Args:
        scattered, factors, partial, group, in_flight: as for :func:`finish_reduce_scatter`.
        replicate_group: name of the group of replicas.
        op: "sum" or "avg".
        hook: averages the shard over the replicas in place, instead of the all-reduce.

    Returns:
        The flat shard in flight, ``[sum of padded shard numels]``. With a hook the result is not in flight.
    """
    flat = finish_reduce_scatter(scattered, factors, partial, group=group, in_flight=in_flight)
    if hook is not None:
        return apply_in_place_hook(hook, flat)
    return _c10d.all_reduce(flat, op, replicate_group)


def all_reduce_by_stateful_hook(
    scattered: Tensor,
    factors: Sequence[Tensor] = (),
    partial: Sequence[Tensor] = (),
    tensors: Sequence[Tensor] = (),
    *,
    numels: Sequence[int],
    group: str,
    in_flight: bool = True,
    hook: StatefulHook,
) -> tuple[Tensor, list[Tensor]]:
    """Finish the reduce-scatter, and average its flat shard over the replicas with a hook that has tensors.

    Args:
        scattered, factors, partial, group, in_flight: as for :func:`finish_reduce_scatter`.
        tensors: the tensors of the hook, as :func:`tensors_of_hook` lists them.
        numels: the number of elements of each parameter's shard.
        hook: the hook.

    Returns:
        The flat shard, and the new values of the hook's tensors.
    """
    flat = finish_reduce_scatter(scattered, factors, partial, group=group, in_flight=in_flight)
    parameters = replica_parameters(numels, flat)
    names = [(place, name) for place, name, _ in tensors_of_hook(hook, parameters) if name != RANDOM]
    return apply_stateful_hook(hook, flat, parameters, tensors, names)


def replica_parameters(numels: Sequence[int], like: Tensor) -> list[HookParameter]:
    """Describe parameters to a hook over replicas: each is a flat shard of one rank."""
    return [HookParameter((numel,), 0, 1, like.dtype, like.device) for numel in numels]


def finish_all_reduce(reduced: Tensor, *, in_flight: bool = True) -> Tensor:
    """Wait for the flat shard of :func:`start_all_reduce`, if it is in flight."""
    return _c10d.wait_tensor(reduced) if in_flight else reduced


def finish_reduction(
    flat: Tensor,
    factors: Sequence[Tensor] = (),
    *,
    grad_dtype: torch.dtype,
    hook: Callable[[Tensor], None] | None = None,
) -> Tensor:
    """Make the flat shard of averaged gradients from the reduced one: call the hook, divide and cast.

    Args:
        flat: the reduced flat shard.
        factors: divide the shard.
        grad_dtype: dtype of the result.
        hook: a user's all-reduce hook, which changes the shard in place before the division.
    """
    if hook is not None:
        flat = apply_in_place_hook(hook, flat)
    return _divide(flat, factors).to(grad_dtype)


@functools.lru_cache(maxsize=4096)
def factor_tensor(factor: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a divide factor as the 0-d tensor that a reduction in ``dtype`` takes. The tensor is made once."""
    return torch.tensor(factor, dtype=factor_dtype(dtype), device=device)


def forget_factors() -> None:
    """Clear the cache of :func:`factor_tensor`: tensors that it makes in a fake mode are fake, and must not be used later."""
    factor_tensor.cache_clear()
