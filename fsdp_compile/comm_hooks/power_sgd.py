"""PowerSGD: gradients travel as products of two thin matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from passes.collectives.stateful_hook import HookBucket, HookParameter
from passes.fx.torch_internals.distributed import DefaultState

from ..torch_versions import all_gather, reduce_scatter


@dataclass(frozen=True)
class PowerSGD:
    """A hook that averages gradients of low rank: ``register_comm_hook(DefaultState(group), PowerSGD(rank=2))``.

    A gradient plus its residual is a matrix ``M``, with rows along the sharded dimension. Ranks average ``P = M Q`` with the
    ``Q`` of the previous step, and make the columns of ``P`` orthonormal. Then they average ``Q = Mᵀ P``, and take ``P Qᵀ``
    as the gradient. Each rank keeps the residual ``M - P (Mᵀ P)ᵀ``, with its own ``Mᵀ P``, for the next step. Everything is
    sent in float32. Gradients that compress little (vectors, small matrices) are reduced without compression.

    To begin with some steps in full precision, register the hook after these steps.

    Attributes:
        rank: the number of columns of ``P`` and ``Q``.
        min_compression_rate: compress matrices ``[m, n]`` with ``(m + n) * rank * min_compression_rate < m * n``.
        seed: the seed of the first ``Q``, equal on all ranks.

    Raises:
        ValueError: ``rank`` is no positive integer, or ``min_compression_rate`` is not positive.

    Memory: the residual of a matrix is as large as its full gradient, on every rank, in float32. Source: Vogels et al. 2019,
    "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization".
    """

    rank: int = 1
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.rank, bool) or not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"PowerSGD(rank=...) takes a positive number of columns, not {self.rank!r}.")
        if not self.min_compression_rate > 0:
            raise ValueError(f"PowerSGD(min_compression_rate=...) takes a positive number, not {self.min_compression_rate!r}.")

    def init_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        """Make the residual, ``[m, n]``, and ``Q`` (``factor``), ``[n, rank]``, in float32; none for uncompressed gradients."""
        rows, columns = _matrix_shape(parameter)
        if not (rows + columns) * self.rank * self.min_compression_rate < rows * columns:
            return {}
        generator = torch.Generator().manual_seed(self.seed)
        factor = torch.randn(columns, self.rank, generator=generator)
        return {
            "factor": factor.to(parameter.device),
            "residual": torch.zeros(rows, columns, dtype=torch.float32, device=parameter.device),
        }

    def __call__(self, state: DefaultState, grad: Tensor, output: Tensor | None, bucket: HookBucket) -> None:
        """Fill ``output`` with this rank's shard of the approximate average.

        Args:
            state: has the process group.
            grad: flat gradient of this rank's batch, ``[ranks * n]``.
            output: flat shard, ``[n]``.
            bucket: has residuals and factors.

        Raises:
            TypeError: there is no output, as over replicas, where flat shards are reduced, which are no matrices.
        """
        if output is None:
            raise TypeError("PowerSGD reduces over shards, not over replicas.")
        pieces = bucket.pieces(grad.float())
        matrices: dict[int, Tensor] = {}
        for place, (own, parameter) in enumerate(zip(bucket.tensors, bucket.parameters, strict=True)):
            if own:
                matrices[place] = _matrix(pieces[place], parameter) + own["residual"]
                pieces[place] = (matrices[place] @ own["factor"]).view(state.world_size, -1)
        shards = _reduce_scatter(state, pieces)
        if matrices:
            own_rows = [shards[place] for place in matrices]
            for place, approximate in zip(matrices, self._approximate(state, matrices, own_rows, bucket), strict=True):
                shards[place] = _unmatrix(approximate, bucket.parameters[place])
        output.copy_(torch.cat(shards))

    def _approximate(
        self, state: DefaultState, matrices: dict[int, Tensor], own_rows: list[Tensor], bucket: HookBucket
    ) -> list[Tensor]:
        """Return this rank's rows of the approximate average of each matrix, given its rows of the average of each ``P``."""
        own_bases, factors = [], []
        for (place, matrix), rows, all_rows in zip(matrices.items(), own_rows, _all_gather(state, own_rows), strict=True):
            basis, own_basis = _orthonormal(all_rows.reshape(-1, self.rank), rows.view(-1, self.rank))
            factor = matrix.t() @ basis
            left_out = matrix - basis @ factor.t()
            bucket.tensors[place]["residual"].copy_(torch.where(left_out.isfinite(), left_out, 0))
            own_bases.append(own_basis)
            factors.append(factor)
        averages = _average(state, factors)
        for place, average in zip(matrices, averages, strict=True):
            # A factor of zeros would stay zero forever.
            is_usable = average.isfinite().all(0) & (average != 0).any(0)
            kept = bucket.tensors[place]["factor"]
            kept.copy_(torch.where(is_usable, average, kept))
        return [own_basis @ average.t() for own_basis, average in zip(own_bases, averages, strict=True)]


def _matrix_shape(parameter: HookParameter) -> tuple[int, int]:
    if not parameter.is_cut:
        return 1, 1
    rows = parameter.ranks * parameter.piece_shape[parameter.dim]
    return rows, parameter.ranks * parameter.numel // max(rows, 1)


def _matrix(pieces: Tensor, parameter: HookParameter) -> Tensor:
    """Reshape all pieces of a gradient, ``[ranks, numel]``, to its matrix ``[m, n]``."""
    rows = pieces.reshape(parameter.ranks, *parameter.piece_shape).movedim(parameter.dim + 1, 1)
    return rows.reshape(_matrix_shape(parameter))


def _unmatrix(rows: Tensor, parameter: HookParameter) -> Tensor:
    """Reshape a rank's rows of a matrix to its piece of the gradient, ``[numel]``."""
    shape = list(parameter.piece_shape)
    first = shape.pop(parameter.dim)
    return rows.reshape(first, *shape).movedim(0, parameter.dim).reshape(-1)


def _orthonormal(matrix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Make the columns of a matrix orthonormal (a column of zeros stays one), and do the same with some of its rows.

    The first round leaves little but rounding errors of a column that earlier columns nearly span. The second round makes these
    errors orthogonal.
    """
    tiny, numel = torch.finfo(matrix.dtype).tiny, matrix.size(0)
    columns = list((torch.cat([matrix, rows]) / (matrix.abs().amax() + tiny)).unbind(1))
    for _ in range(2):
        done: list[Tensor] = []
        for column in columns:
            for earlier in done:
                column = column - (earlier[:numel] * column[:numel]).sum() * earlier
            done.append(column / (column[:numel].square().sum().sqrt() + tiny))
        columns = done
    both = torch.stack(columns, dim=1)
    return both[:numel], both[numel:]


def _reduce_scatter(state: DefaultState, pieces: list[Tensor]) -> list[Tensor]:
    """Average tensors ``[ranks, numel]`` with one collective, and return this rank's rows, ``[numel]`` each."""
    rows = torch.cat(pieces, dim=1)
    own = rows.new_empty(rows.size(1))
    reduce_scatter(own, rows.reshape(-1), group=state.process_group)
    return list((own / state.world_size).split([piece.size(1) for piece in pieces]))


def _all_gather(state: DefaultState, rows: list[Tensor]) -> list[Tensor]:
    """Gather the rows of all ranks, ``[ranks, numel]`` each, with one collective."""
    own = torch.cat(rows)
    gathered = own.new_empty(state.world_size * own.numel())
    all_gather(gathered, own, group=state.process_group)
    return list(gathered.view(state.world_size, -1).split([row.numel() for row in rows], dim=1))


def _average(state: DefaultState, tensors: list[Tensor]) -> list[Tensor]:
    """Average tensors over the ranks, with one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=state.process_group)
    runs = (flat / state.world_size).split([tensor.numel() for tensor in tensors])
    return [run.view(tensor.shape) for run, tensor in zip(runs, tensors, strict=True)]
