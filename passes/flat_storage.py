"""Flat storage: gather a run of neighbouring shards in place, without a copy-in.

The shards of a unit lie in one flat buffer for each dtype (see ``fsdp_compile.unit``).

Before: ``cat([shard_a, shard_b, shard_c])`` (or of their casts) feeds a bucket's all-gather.
After:  shards that are neighbours in storage enter as one extra placeholder, a run. A bucket that is one run is gathered where
        it lies, or cast in one pass; one of several runs concatenates the runs.

Leaves alone shards without neighbours, and pieces that have no place in storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from .graph import role
from .ops import Unshard, unshards

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default


@dataclass(frozen=True)
class Location:
    """Where a shard lies: in which unit's storage of which dtype, and at which element it starts."""

    unit: str
    dtype: torch.dtype
    offset: int

    def after(self, numel: int) -> Location:
        """Where a neighbour behind ``numel`` elements starts."""
        return Location(self.unit, self.dtype, self.offset + numel)


@dataclass(frozen=True)
class Run:
    """An extra input of a graph: ``numel`` elements of flat storage from ``offset`` on.

    Attributes:
        member: index among the placeholders of a shard that lies in that storage, by which the runtime finds it.
        offset: first element.
        numel: number of elements.
    """

    member: int
    offset: int
    numel: int


def locate_shards(graph: Graph) -> dict[Node, Location]:
    """Where the shards that a graph unshards lie in storage. To be asked before bucketing consumes the unshards."""
    specs = [Unshard.of(node) for node in unshards(graph.nodes)]
    return {
        spec.shard: Location(spec.unit, spec.shard.meta["val"].dtype, spec.offset)
        for spec in specs
        if spec.offset >= 0 and spec.shard.op == "placeholder"
    }


def _strip(piece: Node) -> tuple[Node, torch.dtype | None]:
    """The shard under a flattened, perhaps cast, shard; and the dtype of the cast."""
    dtype = None
    while piece.op != "placeholder":
        if piece.target == _cast:
            dtype = piece.args[1]
        elif piece.target != _aten.view.default:
            break
        piece = piece.args[0]  # type: ignore[assignment]
    return piece, dtype  # type: ignore[return-value]


def _split_into_runs(pieces: list[Node], locations: dict[Node, Location]) -> list[list[Node]]:
    runs: list[list[Node]] = []
    end: Location | None = None
    for piece in pieces:
        shard, _ = _strip(piece)
        location = locations.get(shard)
        if runs and location is not None and location == end:
            runs[-1].append(piece)
        else:
            runs.append([piece])
        end = location.after(math.prod(shard.meta["val"].shape)) if location else None
    return runs


def flat_storage(graph: Graph, locations: dict[Node, Location]) -> list[Run]:
    """Feed all-gathers from runs of flat storage. In place.

    Returns:
        The runs that the graph now takes as placeholders behind those that it had, in that order.
    """
    placeholders = graph.find_nodes(op="placeholder")
    last = placeholders[-1] if placeholders else None
    runs: list[Run] = []
    for cat in [node for node in graph.nodes if node.target == _aten.cat.default and role(node) == "start_gather"]:
        pieces: list[Node] = list(cat.args[0])
        flat = []
        for run in _split_into_runs(pieces, locations):
            if len(run) == 1:
                flat.append(run[0])
                continue
            members, dtypes = zip(*map(_strip, run), strict=True)
            numel = sum(math.prod(member.meta["val"].shape) for member in members)
            location = locations[members[0]]
            with graph.inserting_after(last):
                last = graph.placeholder(f"run_{len(runs)}_{members[0].name.removeprefix('shard_')}")
            last.meta["val"] = members[0].meta["val"].new_empty(numel)
            runs.append(Run(placeholders.index(members[0]), location.offset, numel))
            source = last
            if dtypes[0] is not None:
                with graph.inserting_before(cat):
                    source = graph.call_function(_cast, (source, dtypes[0]))
                source.meta["val"] = last.meta["val"].to(dtypes[0])
                source.meta["fsdp"] = cat.meta["fsdp"]
            flat.append(source)
        if len(flat) == 1:
            cat.replace_all_uses_with(flat[0])
            graph.erase_node(cat)
        else:
            cat.update_arg(0, flat)
    graph.eliminate_dead_code()
    return runs
