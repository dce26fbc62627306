"""Symbolic shards: give the shards in a prepared graph sizes that are expressions in the number of ranks.

:func:`make_shards_symbolic` is called inside :func:`passes.fx.symbolic_ranks.symbolic_ranks`. The values that later passes add
to the graph then have symbolic sizes, too.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..collectives.layout import padded_shard_numel, padded_shard_shape, padding_to
from ..fx.symbolic_ranks import overridden_size
from .ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args


@dataclass(frozen=True)
class StoredParam:
    """The layout of one parameter in its unit's flat storage.

    Attributes:
        shape: shape of the full parameter.
        dim: the dimension that the parameter is cut along.
        dtype: dtype of the shard.
        offset: where the shard starts in the storage, in elements.
        alignment: the shard takes a multiple of this many elements of the storage.
    """

    shape: tuple[int, ...]
    dim: int
    dtype: torch.dtype
    offset: int
    alignment: int = 1

    def stored_numel(self, ranks: int) -> int:
        """Return the number of elements of storage that the shard takes on each of ``ranks`` ranks."""
        numel = padded_shard_numel(self.shape, self.dim, ranks)
        return numel + padding_to(self.alignment, numel)


def make_shards_symbolic(graph: Graph, layouts: Mapping[str, Sequence[StoredParam]]) -> None:
    """Give shards fake values of symbolic sizes, and ``unshard`` nodes symbolic offsets in flat storage. In place.

    Args:
        graph: a graph after the preparing passes.
        layouts: for each unit, its parameters in the order of its storage.

    Raises:
        ValueError: a parameter is gathered by an extension.
    """
    offset_of = {unit: functools.cache(functools.partial(_offsets, layout)) for unit, layout in layouts.items()}
    for node in unshards(graph.nodes):
        gathered = Unshard.of(node)
        if overridden_size(gathered.group) is None:
            continue
        if gathered.token is not None:
            raise ValueError(
                f"Parameter {gathered.name} is gathered by an extension (fsdp_pre_all_gather), whose sizes are those that it "
                "was traced with, so that there are no formulae for it."
            )
        dtype = _set_shapes(gathered)
        if gathered.offset >= 0:
            update_args(node, offset=offset_of[gathered.unit](dtype, gathered.group)[gathered.offset])
    for node in reduce_grads(graph.nodes):
        reduced = ReduceGrad.of(node)
        if overridden_size(reduced.group) is not None:
            _set_shapes(reduced)


def _set_shapes(spec: Unshard | ReduceGrad) -> torch.dtype:
    """Set the shape of a shard and of its sources, up to the placeholder. Returns the placeholder's dtype."""
    shape = padded_shard_shape(spec.shape, spec.dim, group_size(spec.group))
    node: Node = spec.shard
    while True:
        node.meta["val"] = node.meta["val"].new_empty(shape)
        if node.op == "placeholder":
            return node.meta["val"].dtype  # type: ignore[no-any-return]
        node = node.all_input_nodes[0]


def _offsets(layout: Sequence[StoredParam], dtype: torch.dtype, group: str) -> dict[int, int]:
    """Return the offset that is an expression for each offset of a parameter in its unit's storage of a dtype."""
    pieces = sorted((piece for piece in layout if piece.dtype == dtype), key=lambda piece: piece.offset)
    sizes = [piece.stored_numel(group_size(group)) for piece in pieces]
    return {piece.offset: sum(sizes[:index]) for index, piece in enumerate(pieces)}
