"""Gradient reductions as plain tensor functions over functional collectives, and the process groups that they name.

Eager code calls these functions, and :mod:`passes.transforms.gradient_sync` traces them into graphs, in the order of
:func:`passes.ir.reduction.stages`. A reduction is split where communication is in flight, so that a schedule can put work
between start and finish. :mod:`passes.collectives.gather` does the same for gathers.
"""

import functools
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..fx.symbolic_ranks import overridden_ranks, overridden_size
from ..fx.torch_internals.distributed import resolve_process_group
from . import gloo, host_copies
from .divide_factors import Averaging, factor_dtype, gradient_divide_factors
from .layout import disassemble
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


def start_copy_to_host(flat: Tensor, *, pinned: bool) -> Tensor:
    """Begin to copy a flat shard of averaged gradients to the host.

    The result is in flight until :func:`passes.collectives.host_copies.wait_on_host`.
    """
    copied: Tensor = host_copies.copy_to_host(flat, pinned)
    return copied


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
    scattered_over: str = "",
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
        scattered_over: name of the group that a second reduce-scatter will run over (:func:`start_all_reduce`); empty: none.

    Returns:
        The flat shard in flight, ``[sum of padded shard numels]``; with ``scattered_over``, the shards of all its ranks, one
        parameter after the other. If the reduction is an exchange (:func:`exchanges`), the
        addends of all ranks in flight, ``[world_size * sum]``. With a hook, or an empty ``op``, the result is not in flight.
    """
    world_size = group_size(group)
    flat = _flat_gradient(grads, accumulated, factors, dims, world_size, group_size(scattered_over))
    if hook is not None:
        return apply_in_place_hook(hook, flat) if in_place else apply_reduce_hook(hook, flat, world_size)
    if not op:
        # A single gradient may have other readers, and the result would share its memory.
        return flat.clone() if len(grads) == 1 else flat
    return _reduce_scatter(flat, op, group)


def _reduce_scatter(flat: Tensor, op: str, group: str) -> Tensor:
    """Begin to reduce-scatter a flat tensor, by an exchange if it is one (:func:`exchanges`)."""
    world_size = group_size(group)
    if exchanges(group, flat.device):
        assert op == "sum"
        pieces = [flat.numel() // world_size] * world_size
        return _c10d.all_to_all_single(flat, pieces, pieces, group)
    return _c10d.reduce_scatter_tensor(flat, op, world_size, group)


def _wait_scattered(scattered: Tensor, group: str) -> Tensor:
    """Wait for the result of :func:`_reduce_scatter`, and add up the addends of an exchange."""
    flat = _c10d.wait_tensor(scattered)
    return flat.view(group_size(group), -1).sum(0) if exchanges(group, flat.device) else flat


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
    replicas: int = 1,
) -> Tensor:
    if accumulated:
        grads = [kept + grad for kept, grad in zip(accumulated, grads, strict=True)]
    rows = [disassemble(grad, dim, replicas * world_size) for grad, dim in zip(grads, dims, strict=True)]
    if replicas > 1:
        rows = [row.view(replicas, world_size, -1).movedim(1, 0).reshape(world_size, -1) for row in rows]
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
    flat = _divide(_wait_scattered(scattered, group) if in_flight else scattered, factors)
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
    numels: Sequence[int] = (),
) -> Tensor:
    """Finish the reduce-scatter, and begin to all-reduce its flat shard over the replicas, or to scatter it over them, too.

    Args:
        scattered, factors, partial, group, in_flight: as for :func:`finish_reduce_scatter`.
        replicate_group: name of the group of replicas.
        op: "sum" or "avg".
        hook: averages the shard over the replicas in place, instead of the all-reduce.
        numels: for a second reduce-scatter: the number of elements of each parameter's shard. Empty: all-reduce.

    Returns:
        The flat shard in flight, ``[sum of padded shard numels]``. With a hook the result is not in flight.
    """
    flat = finish_reduce_scatter(scattered, factors, partial, group=group, in_flight=in_flight)
    if hook is not None:
        return apply_in_place_hook(hook, flat)
    if numels:
        replicas = group_size(replicate_group)
        rows = [piece.view(replicas, -1) for piece in flat.split([numel * replicas for numel in numels])]
        return _reduce_scatter((rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).reshape(-1), op, replicate_group)
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


def finish_all_reduce(reduced: Tensor, *, in_flight: bool = True, scatter_group: str = "") -> Tensor:
    """Wait for the flat shard of :func:`start_all_reduce`, if it is in flight.

    Args:
        reduced: the result of :func:`start_all_reduce`.
        in_flight: whether there is something to wait for.
        scatter_group: name of the group that it was scattered over; empty: it was all-reduced.
    """
    if scatter_group:
        return _wait_scattered(reduced, scatter_group)
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
