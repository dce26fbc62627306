"""PowerSGD: gradients travel as products of two thin matrices."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from passes.collectives.stateful_hook import HookBucket, HookParameter
from passes.fx.torch_internals.distributed import DefaultState

from .default_hooks import all_gather, reduce_scatter


@dataclass(frozen=True)
class PowerSGD:
    """A hook that averages gradients of low rank: ``register_comm_hook(DefaultState(group), PowerSGD(rank=2))``.

    A gradient, with what earlier steps left out of it, is a matrix ``M``: its rows are those along the dimension that is cut
    into shards. Ranks average ``P = M Q`` with the ``Q`` of the step before, make the columns of ``P`` orthonormal, average
    ``Q = Mᵀ P``, and take ``P Qᵀ`` for the gradient. Each keeps what its own message leaves out, ``M - P (Mᵀ P)ᵀ``, for the
    next step. Everything is sent in float32. What compresses little (vectors, small matrices) is reduced as it is.

    To begin with some steps in full precision, register the hook after them.

    Attributes:
        rank: the columns of ``P`` and ``Q``.
        min_compression_rate: compress matrices ``[m, n]`` with ``(m + n) * rank * min_compression_rate < m * n``.
        seed: of the first ``Q``, equal on all ranks.

    Raises:
        ValueError: a rank or rate that there is not.

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
        """The residual ``[m, n]`` and ``Q``, ``[n, rank]``, in float32; of what is reduced as it is nothing."""
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
            state: its process group.
            grad: flat gradient of this rank's batch, ``[ranks * n]``.
            output: flat shard, ``[n]``.
            bucket: residuals and factors.

        Raises:
            TypeError: there is no output, as over replicas: flat shards are no matrices.
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
        """This rank's rows of the approximate averages of matrices, from its rows of the averages of ``P``."""
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
            # From a factor of zeros no other would ever follow.
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
    """The matrix ``[m, n]`` of all pieces of a gradient, ``[ranks, numel]``."""
    rows = pieces.reshape(parameter.ranks, *parameter.piece_shape).movedim(parameter.dim + 1, 1)
    return rows.reshape(_matrix_shape(parameter))


def _unmatrix(rows: Tensor, parameter: HookParameter) -> Tensor:
    """A piece of a gradient, ``[numel]``, from its rows in the matrix."""
    shape = list(parameter.piece_shape)
    first = shape.pop(parameter.dim)
    return rows.reshape(first, *shape).movedim(0, parameter.dim).reshape(-1)


def _orthonormal(matrix: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Make the columns of a matrix orthonormal (a column of zeros stays one), and do the same with some of its rows.

    A column that the ones before it nearly span is little but rounding errors, which the second round makes orthogonal.
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
    """The averages of this rank's rows of tensors ``[ranks, ...]``, with one collective."""
    rows = torch.cat(pieces, dim=1)
    own = rows.new_empty(rows.size(1))
    reduce_scatter(own, rows.reshape(-1), group=state.process_group)
    return list((own / state.world_size).split([piece.size(1) for piece in pieces]))


def _all_gather(state: DefaultState, rows: list[Tensor]) -> list[Tensor]:
    """All ranks' rows of tensors, ``[ranks, ...]`` each, with one collective."""
    own = torch.cat(rows)
    gathered = own.new_empty(state.world_size * own.numel())
    all_gather(gathered, own, group=state.process_group)
    return list(gathered.view(state.world_size, -1).split([row.numel() for row in rows], dim=1))


def _average(state: DefaultState, tensors: list[Tensor]) -> list[Tensor]:
    """The averages of tensors over the ranks, with one collective."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=state.process_group)
    runs = (flat / state.world_size).split([tensor.numel() for tensor in tensors])
    return [run.view(tensor.shape) for run, tensor in zip(runs, tensors, strict=True)]
