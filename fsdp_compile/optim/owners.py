"""Owners of matrices: ranks that get whole matrices, of which each rank has a shard.

An optimizer that needs a matrix as a whole would gather it on all ranks, each of which would do the same work. Instead each
matrix has an owner among the ranks that have shards of it. One collective takes the shards of many matrices to their owners,
and another takes the results back (*owners* as in MatrixFSDP and torchtitan's DistMuon). With replicas, the ranks of one
replica do so for a matrix, and a third collective takes the results to the other replicas.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..torch_versions import all_gather


class Matrix(NamedTuple):
    """A matrix that ranks share.

    Attributes:
        shape: the shape of the whole matrix.
        dim: the dimension along which it is cut, as ``torch.chunk`` cuts it.
        owner: the index of its owner in the group of ranks that shard it.
        replica: the replica of its owner.
    """

    shape: tuple[int, ...]
    dim: int
    owner: int
    replica: int = 0

    def rows(self, num_ranks: int) -> list[int]:
        """Return the size of each rank's shard along :attr:`dim`."""
        size = self.shape[self.dim]
        each = -(-size // num_ranks)
        return [max(0, min(each, size - each * rank)) for rank in range(num_ranks)]

    def shard_shape(self, rows: int) -> list[int]:
        """Return the shape of a shard with ``rows`` indices along :attr:`dim`."""
        return [rows if dim == self.dim else size for dim, size in enumerate(self.shape)]


def choose_owners(costs: Sequence[float], num_ranks: int) -> list[int]:
    """Choose a rank for each matrix: the most costly first, each for the rank with the least to do. Equal on all ranks."""
    ranks = [(0.0, rank) for rank in range(num_ranks)]
    owners = [0] * len(costs)
    for index in sorted(range(len(costs)), key=lambda index: -costs[index]):
        load, owners[index] = heapq.heappop(ranks)
        heapq.heappush(ranks, (load + costs[index], owners[index]))
    return owners


class Unshared:
    """The exchange of matrices that one rank has whole: nothing is sent. Its methods are those of :class:`Exchange`."""

    def send_shards(self, shards: Sequence[Tensor]) -> None:
        self._matrices = list(enumerate(shards))

    def whole_matrices(self) -> Iterator[tuple[int, Tensor]]:
        yield from self._matrices

    def send_results(self, results: Mapping[int, Tensor]) -> None:
        self._results = list(results.values())

    def result_shards(self) -> list[Tensor]:
        return self._results


class Exchange:
    """The exchange of some matrices between shards and owners, with one collective in each direction.

    Args:
        matrices: the matrices.
        group: the ranks that have shards of all of these matrices.
        dtype, device: of what is sent.
    """

    def __init__(self, matrices: Sequence[Matrix], group: Any, dtype: torch.dtype, device: torch.device):
        self._matrices, self._group = matrices, group
        rank, self._num_ranks = dist.get_rank(group), dist.get_world_size(group)
        rows = [matrix.rows(self._num_ranks) for matrix in matrices]
        self.owned = [index for index, matrix in enumerate(matrices) if matrix.owner == rank]
        by_owner = sorted(range(len(matrices)), key=lambda index: matrices[index].owner)
        # Shards lie by owner, pieces of owned matrices by rank: each peer's are together.
        own = [(index, matrices[index].owner, rows[index][rank]) for index in by_owner]
        others = [(index, peer, rows[index][peer]) for peer in range(self._num_ranks) for index in self.owned]
        self._shards, shards, self._shard_splits = self._cut(own, rank, dtype, device)
        self._pieces, pieces, self._piece_splits = self._cut(others, rank, dtype, device)
        self._shard_of = {index: view for (index, _, _), view in zip(own, shards, strict=True)}
        self._pieces_of: dict[int, list[Tensor]] = {index: [] for index in self.owned}
        for (index, _, _), view in zip(others, pieces, strict=True):
            self._pieces_of[index].append(view)
        self._work: Any = None

    def _cut(
        self, parts: Sequence[tuple[int, int, int]], rank: int, dtype: torch.dtype, device: torch.device
    ) -> tuple[Tensor, list[Tensor], list[int]]:
        """Make a buffer for parts of matrices.

        Args:
            parts: for each part, the index of its matrix, the peer that it is exchanged with, and its indices along the cut.
            rank: this rank, which sends itself an element of padding: Gloo refuses buffers without elements.
            dtype, device: of the buffer.

        Returns:
            The buffer, a view for each part, and the number of elements for each peer.
        """
        shapes = [self._matrices[index].shard_shape(rows) for index, _, rows in parts]
        numels = list(map(math.prod, shapes))
        splits = [int(peer == rank) for peer in range(self._num_ranks)]
        buffer = torch.zeros(sum(numels) + 1, dtype=dtype, device=device)
        views, offset = [], 0
        for (_, peer, _), shape, numel in zip(parts, shapes, numels, strict=True):
            # The padding ends this rank's own section.
            views.append(buffer.narrow(0, offset + int(peer > rank), numel).view(shape))
            splits[peer] += numel
            offset += numel
        return buffer, views, splits

    def send_shards(self, shards: Sequence[Tensor]) -> None:
        """Send the shards of this rank, one of each matrix, to the owners. They are copied."""
        for index, shard in enumerate(shards):
            self._shard_of[index].copy_(shard)
        self._start(self._pieces, self._shards, self._piece_splits, self._shard_splits)

    def whole_matrices(self) -> Iterator[tuple[int, Tensor]]:
        """Wait for the shards, and yield the index and a new tensor for each matrix that this rank owns."""
        self._finish()
        for index in self.owned:
            yield index, torch.cat(self._pieces_of[index], self._matrices[index].dim)

    def send_results(self, results: Mapping[int, Tensor]) -> None:
        """Send a result of its shape for each owned matrix to the ranks, by the matrix' index. They are copied."""
        for index, pieces in self._pieces_of.items():
            dim = self._matrices[index].dim
            for piece, result in zip(pieces, results[index].split([piece.size(dim) for piece in pieces], dim), strict=True):
                piece.copy_(result)
        self._start(self._shards, self._pieces, self._shard_splits, self._piece_splits)

    def result_shards(self) -> list[Tensor]:
        """Wait for the results, and return this rank's shard of each."""
        self._finish()
        return [self._shard_of[index] for index in range(len(self._matrices))]

    def _start(self, received: Tensor, sent: Tensor, received_splits: list[int], sent_splits: list[int]) -> None:
        self._work = dist.all_to_all_single(received, sent, received_splits, sent_splits, group=self._group, async_op=True)

    def _finish(self) -> None:
        self._work.wait()


class Replicas:
    """The exchange of results between replicas, with one collective.

    Args:
        matrices: matrices that all replicas have, in the same shards.
        num_shards, index: the number of shards of each matrix, and the index of this rank's.
        group: the ranks that have equal shards, one in each replica.
        dtype, device: of what is sent.
    """

    def __init__(
        self, matrices: Sequence[Matrix], num_shards: int, index: int, group: Any, dtype: torch.dtype, device: torch.device
    ):
        self._replica, num_replicas = dist.get_rank(group), dist.get_world_size(group)
        shapes = [matrix.shard_shape(matrix.rows(num_shards)[index]) for matrix in matrices]
        places, ends = [], [0] * num_replicas
        for matrix, shape in zip(matrices, shapes, strict=True):
            places.append((matrix.replica, ends[matrix.replica]))
            ends[matrix.replica] += math.prod(shape)
        # Each replica sends as much as the one with the most.
        self._received = torch.empty(num_replicas, max(ends), dtype=dtype, device=device)
        self._sent = torch.zeros(max(ends), dtype=dtype, device=device)
        self._places, self._shapes, self._group = places, shapes, group
        self._work: Any = None

    def send(self, results: Sequence[Tensor]) -> None:
        """Send this rank's shards of the results that its replica has computed, in their order. They are copied."""
        starts = [start for replica, start in self._places if replica == self._replica]
        for start, result in zip(starts, results, strict=True):
            self._sent.narrow(0, start, result.numel()).view(result.shape).copy_(result)
        # Ranks with equal shards all have nothing to send, or none of them.
        if self._sent.numel():
            self._work = all_gather(self._received.view(-1), self._sent, self._group, async_op=True)

    def results(self) -> list[Tensor]:
        """Wait, and return this rank's shard of each result."""
        if self._work is not None:
            self._work.wait()
        return [
            self._received[replica].narrow(0, start, math.prod(shape)).view(shape)
            for (replica, start), shape in zip(self._places, self._shapes, strict=True)
        ]
