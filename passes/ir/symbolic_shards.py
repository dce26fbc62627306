"""Symbolic shards: give the shards in a prepared graph sizes that are expressions in the number of ranks.

Together with :func:`passes.fx.symbolic_ranks.symbolic_ranks`, inside of which this is called, all that passes then make of the
graph has such sizes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..collectives.layout import padded_shard_numel, padded_shard_shape, padding_to
from ..fx.symbolic_ranks import supposed_size
from .ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args


@dataclass(frozen=True)
class Piece:
    """One parameter of a unit, as its flat storage has it.

    Attributes:
        shape: of the full parameter.
        dim: the dimension it is cut along.
        dtype: of the shard.
        offset: where the shard starts, in elements.
        alignment: it takes a multiple of so many elements.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    offset: int
    alignment: int = 1

    def stored_numel(self, ranks: int) -> int:
        """The elements of storage that a shard takes on each of so many ranks."""
        numel = padded_shard_numel(self.shape, self.dim, ranks)
        return numel + padding_to(self.alignment, numel)


def make_shards_symbolic(graph: Graph, layouts: Mapping[str, Sequence[Piece]]) -> None:
    """Replace the fake values of shards, and where these lie. In place.

    Args:
        graph: a graph after the preparing passes.
        layouts: for each unit, its parameters in the order of its storage.

    Raises:
        ValueError: an extension gathers one.
    """
    for node in unshards(graph.nodes):
        gathered = Unshard.of(node)
        if supposed_size(gathered.group) is None:
            continue
        if gathered.token is not None:
            raise ValueError(
                f"Parameter {gathered.name} is gathered by an extension (fsdp_pre_all_gather), whose sizes are those that it "
                "was traced with, so that there are no formulae for it."
            )
        dtype = _set_shapes(gathered)
        if gathered.offset >= 0:
            update_args(node, offset=_offset(gathered, dtype, layouts[gathered.unit]))
    for node in reduce_grads(graph.nodes):
        reduced = ReduceGrad.of(node)
        if supposed_size(reduced.group) is not None:
            _set_shapes(reduced)


def _set_shapes(spec: Unshard | ReduceGrad) -> torch.dtype:
    """Set the shape of a shard, and of what it is a cast of, whose dtype this returns."""
    shape = padded_shard_shape(spec.shape, spec.dim, group_size(spec.group))
    node: Node = spec.shard
    while True:
        node.meta["val"] = node.meta["val"].new_empty(shape)
        if node.op == "placeholder":
            return node.meta["val"].dtype  # type: ignore[no-any-return]
        node = node.all_input_nodes[0]


def _offset(spec: Unshard, dtype: torch.dtype, layout: Sequence[Piece]) -> int:
    pieces = [piece for piece in layout if piece.dtype == dtype and piece.offset < spec.offset]
    return sum(piece.stored_numel(group_size(spec.group)) for piece in pieces)
