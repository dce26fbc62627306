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

from .graph import role, shard_input
from .interface import Interface, Slot
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


def locate_shards(graph: Graph) -> dict[Node, Location]:
    """Where the shards that a graph unshards lie in storage. To be asked before bucketing consumes the unshards."""
    located = {}
    for spec in map(Unshard.of, unshards(graph.nodes)):
        shard = shard_input(spec.shard)
        if spec.offset >= 0 and shard is not None:
            located[shard] = Location(spec.unit, shard.meta["val"].dtype, spec.offset)
    return located


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


def flat_storage(graph: Graph, locations: dict[Node, Location], interface: Interface) -> None:
    """Feed all-gathers from runs of flat storage, which ``interface`` takes as inputs. In place."""
    placeholders = graph.find_nodes(op="placeholder")
    num_runs = 0
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
            storage = interface.add_input(
                f"run_{num_runs}_{members[0].name.removeprefix('shard_')}",
                members[0].meta["val"].new_empty(numel),
                Slot("storage", index=placeholders.index(members[0]), offset=location.offset, numel=numel),
            )
            num_runs += 1
            source = storage
            if dtypes[0] is not None:
                with graph.inserting_before(cat):
                    source = graph.call_function(_cast, (storage, dtypes[0]))
                source.meta["val"] = storage.meta["val"].to(dtypes[0])
                source.meta["fsdp"] = cat.meta["fsdp"]
            flat.append(source)
        if len(flat) == 1:
            cat.replace_all_uses_with(flat[0])
            graph.erase_node(cat)
        else:
            cat.update_arg(0, flat)
    graph.eliminate_dead_code()
