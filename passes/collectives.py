"""A gather and a gradient reduction as plain tensor functions over functional collectives.

The eager kernels of :mod:`passes.ops` call them; :mod:`passes.bucket` traces them into the graph. Each is split at the point
where communication is in flight, so that a schedule can put work between the two halves.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from . import gloo  # noqa: F401 (makes all-gathers on CPU safe)
from .layout import assemble, disassemble, padded_shard_numel, padded_shard_shape

_c10d = torch.ops._c10d_functional


def resolve_group(group: str) -> dist.ProcessGroup:
    """The process group of that name."""
    return dist.distributed_c10d._resolve_process_group(group)  # type: ignore[arg-type]


def group_size(group: str) -> int:
    """Number of ranks of the process group of that name; 1 for the empty name (no group)."""
    return resolve_group(group).size() if group else 1


def backend_name(group: str, device: torch.device) -> str:
    """The backend that serves ``device`` in a group: "nccl", "gloo", "fake"."""
    process_group = resolve_group(group)
    try:
        return process_group._get_backend(device).name()
    except RuntimeError:
        return dist.get_backend(process_group)


def supports_averaging(group: str, device: torch.device) -> bool:
    """Whether the backend that serves ``device`` reduces with an average. NCCL does, Gloo does not.

    The fake backend has no arithmetic; on a CUDA device it stands for NCCL.
    """
    backend = backend_name(group, device)
    return backend == "nccl" or ("fake" in backend and device.type == "cuda")


@dataclass(frozen=True)
class Averaging:
    """How a reduction averages: divide before by ``before``, reduce with ``op``, divide the shard after by ``after``."""

    op: str
    before: float | None = None
    after: float | None = None

    @staticmethod
    def over(num_ranks: int, dtype: torch.dtype, native: bool) -> "Averaging":
        """The averaging over ``num_ranks`` in ``dtype``, as torch's ``_get_gradient_divide_factors`` chooses it.

        Args:
            num_ranks: all ranks that take part, replicas included.
            dtype: the dtype that the reduction runs in.
            native: whether the backend reduces with an average (see :func:`supports_averaging`).
        """
        if num_ranks == 1:
            return Averaging("sum")
        if dtype not in (torch.float32, torch.bfloat16, torch.float64):
            # fp16 has little range: dividing by about sqrt(N) on either side keeps sums and quotients inside it.
            before = 1.0
            while num_ranks % before == 0 and num_ranks / before > before:
                before *= 2
            return Averaging("sum", before, num_ranks / before)
        # Dividing the shard touches world_size times less data than dividing the gradient.
        return Averaging("avg") if native else Averaging("sum", None, float(num_ranks))

    @staticmethod
    def of_groups(group: str, replicate_group: str, dtype: torch.dtype, device: torch.device) -> "Averaging":
        """The averaging over a shard group and a replicate group (empty: none)."""
        ranks = group_size(group) * group_size(replicate_group)
        return Averaging.over(ranks, dtype, supports_averaging(group, device))


def start_gather(shards: Sequence[Tensor], group: str) -> Tensor:
    """Begin gathering padded shards of one dtype. Returns the flat buffer in flight, ``[world_size * sum of numels]``."""
    pieces = [shard.reshape(-1) for shard in shards]
    flat = pieces[0] if len(pieces) == 1 else torch.cat(pieces)
    world_size = group_size(group)
    return _c10d.all_gather_into_tensor(flat, world_size, group)


def finish_gather(gathered: Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], group: str) -> list[Tensor]:
    """Wait for a gather that :func:`start_gather` began and cut the full parameters out of its buffer."""
    world_size = group_size(group)
    rows = _c10d.wait_tensor(gathered).view(world_size, -1)
    numels = [padded_shard_numel(shape, dim, world_size) for shape, dim in zip(shapes, dims, strict=True)]
    pieces = rows.split(numels, dim=1) if len(numels) > 1 else [rows]
    return [assemble(piece, shape, dim) for piece, shape, dim in zip(pieces, shapes, dims, strict=True)]


def start_reduce_scatter(grads: Sequence[Tensor], dims: Sequence[int], group: str, averaging: Averaging) -> Tensor:
    """Begin reducing full gradients of one dtype. Returns the flat shard in flight, ``[sum of padded shard numels]``."""
    world_size = group_size(group)
    rows = [disassemble(grad, dim, world_size) for grad, dim in zip(grads, dims, strict=True)]
    flat = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).reshape(-1)
    if averaging.before is not None and averaging.before != 1:
        flat = flat / averaging.before
    return _c10d.reduce_scatter_tensor(flat, averaging.op, world_size, group)


def start_all_reduce(reduced: Tensor, replicate_group: str, averaging: Averaging) -> Tensor:
    """Wait for the reduce-scatter and begin to all-reduce its flat shard over the replicas."""
    return _c10d.all_reduce(_c10d.wait_tensor(reduced), averaging.op, replicate_group)


def finish_reduce(
    reduced: Tensor, shapes: Sequence[Sequence[int]], dims: Sequence[int], group: str, averaging: Averaging
) -> list[Tensor]:
    """Wait for the last collective of a reduction and cut each parameter's padded gradient shard out of the flat one."""
    world_size = group_size(group)
    flat = _c10d.wait_tensor(reduced)
    if averaging.after is not None and averaging.after != 1:
        flat = flat / averaging.after
    pieces = [padded_shard_shape(shape, dim, world_size) for shape, dim in zip(shapes, dims, strict=True)]
    numels = [padded_shard_numel(shape, dim, world_size) for shape, dim in zip(shapes, dims, strict=True)]
    shards = flat.split(numels) if len(numels) > 1 else [flat]
    return [shard.view(piece) for shard, piece in zip(shards, pieces, strict=True)]
