"""Flat storage: gather a run of neighbouring shards in place, without a copy-in.

The shards of a unit lie in one flat buffer for each dtype (see ``fsdp_compile.units.unit``).

Before: ``cat([shard_a, shard_b, shard_c])`` (or of their casts) feeds a bucket's all-gather.
After:  shards that are neighbours in storage enter as one extra placeholder, a run. A bucket that is one run is gathered where
        it lies, or cast in one pass; one of several runs concatenates the runs.

Shards between two neighbours that the graph does not read (biases, in backward) are gathered along where they are few: that
is cheaper than the copy that would leave them out.

Leaves alone shards without neighbours, and pieces that have no place in storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..fx.graph import role, shard_input
from ..ir.interface import Interface, Slot
from ..ir.ops import Unshard, unshards

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default

# A gap costs its share of the wire, a copy one of the memory; an eighth is little even where the wire is ten times slower.
_MIN_READ_PER_GAP = 8


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


@dataclass
class _Run:
    """Pieces that lie in storage one behind the other, with gaps between them.

    Attributes:
        pieces: the pieces.
        sizes: their numbers of elements, with that of a gap, negative, between those that have one.
        location: where the first lies; None: nowhere in storage.
    """

    pieces: list[Node]
    sizes: list[int]
    location: Location | None

    @property
    def numel(self) -> int:
        return sum(map(abs, self.sizes))

    def takes(self, location: Location | None, numel: int) -> bool:
        """Whether a piece can go behind the others."""
        if location is None or self.location is None:
            return False
        gap = location.offset - self.location.after(self.numel).offset
        gaps = gap - sum(size for size in self.sizes if size < 0)
        is_same_storage = (location.unit, location.dtype) == (self.location.unit, self.location.dtype)
        return is_same_storage and gap >= 0 and gaps * _MIN_READ_PER_GAP <= self.numel + numel

    def add(self, piece: Node, location: Location, numel: int) -> None:
        assert self.location is not None
        gap = location.offset - self.location.after(self.numel).offset
        self.pieces.append(piece)
        self.sizes += [-gap, numel] if gap else [numel]


def _split_into_runs(pieces: list[Node], locations: dict[Node, Location]) -> list[_Run]:
    runs: list[_Run] = []
    for piece in pieces:
        shard, _ = _strip(piece)
        location = locations.get(shard)
        numel = math.prod(shard.meta["val"].shape)
        if runs and runs[-1].takes(location, numel):
            assert location is not None
            runs[-1].add(piece, location, numel)
        else:
            runs.append(_Run([piece], [numel], location))
    return runs


def _cut_around_gaps(cat: Node, sizes: list[int]) -> None:
    """Leave the gaps of a bucket's pieces out where the gathered buffer of ``cat`` is cut."""
    (gather,) = cat.users
    (wait,) = gather.users
    (rows,) = wait.users
    (split,) = rows.users
    world_size = rows.meta["val"].size(0)
    numel = sum(map(abs, sizes))
    for node, shape in ((gather, [world_size * numel]), (wait, [world_size * numel]), (rows, [world_size, numel])):
        node.meta["val"] = node.meta["val"].new_empty(shape)
    places = [index for index, size in enumerate(sizes) if size > 0]
    split.update_arg(1, [abs(size) for size in sizes])
    split.meta["val"] = rows.meta["val"].split([abs(size) for size in sizes], 1)
    for piece in list(split.users):
        piece.update_arg(1, places[piece.args[1]])  # type: ignore[index]
        piece.meta["val"] = split.meta["val"][piece.args[1]]


def flat_storage(graph: Graph, locations: dict[Node, Location], interface: Interface) -> None:
    """Feed all-gathers from runs of flat storage, which ``interface`` takes as inputs. In place."""
    placeholders = graph.find_nodes(op="placeholder")
    num_runs = 0
    for cat in [node for node in graph.nodes if node.target == _aten.cat.default and role(node) == "start_gather"]:
        pieces: list[Node] = list(cat.args[0])
        flat = []
        runs = _split_into_runs(pieces, locations)
        for run in runs:
            if len(run.pieces) == 1:
                flat.append(run.pieces[0])
                continue
            members, dtypes = zip(*map(_strip, run.pieces), strict=True)
            location = locations[members[0]]
            storage = interface.add_input(
                f"run_{num_runs}_{members[0].name.removeprefix('shard_')}",
                members[0].meta["val"].new_empty(run.numel),
                Slot("storage", index=placeholders.index(members[0]), offset=location.offset, numel=run.numel),
            )
            num_runs += 1
            source = storage
            if dtypes[0] is not None:
                with graph.inserting_before(cat):
                    source = graph.call_function(_cast, (storage, dtypes[0]))
                source.meta["val"] = storage.meta["val"].to(dtypes[0])
                source.meta["fsdp"] = cat.meta["fsdp"]
            flat.append(source)
        sizes = [size for run in runs for size in run.sizes]
        if min(sizes) < 0:
            _cut_around_gaps(cat, sizes)
        if len(flat) == 1:
            cat.replace_all_uses_with(flat[0])
            graph.erase_node(cat)
        else:
            cat.update_arg(0, flat)
            cat.meta["val"] = cat.meta["val"].new_empty(sum(map(abs, sizes)))
    graph.eliminate_dead_code()
