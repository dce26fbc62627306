"""Flat storage: gather a run of neighbouring shards in place, without a copy-in.

The shards of a unit lie in one flat buffer for each dtype (see ``fsdp_compile.units.unit``).

Before: ``cat([shard_a, shard_b, shard_c])`` (or of their casts) feeds a bucket's all-gather. Zeros between two shards stand for
        other elements that lie between them in storage, and that the gather sends, too (:mod:`passes.ir.storage`).
After:  neighbours in storage, with the elements between them, are one extra placeholder: a run. A bucket of one run is gathered
        in place, or cast in one pass. A bucket of several runs concatenates them: those of several dtypes as bytes. Copies
        from the host read runs, too.

Leaves alone shards without neighbours, and pieces that are not in flat storage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from ..collectives.host_copies import copy_to_device
from ..fx.graph import placeholder_index, shard_input
from ..fx.sizes import size_hint
from ..ir.interface import Interface, StorageRun
from ..ir.ops import Unshard, unshards
from ..ir.storage import Location, locate, mark_location
from ..ir.work import Role, mark, work

_aten = torch.ops.aten
_cast = torch.ops.prims.convert_element_type.default
_reinterpret = _aten.view.dtype


def locate_shards(graph: Graph) -> dict[Node, Location]:
    """Return the location in flat storage of each shard placeholder. Call this before bucketing consumes the unshards."""
    located = {}
    for spec in map(Unshard.of, unshards(graph.nodes)):
        location, shard = locate(spec), shard_input(spec.shard)
        if location is not None and shard is not None:
            located[shard] = location
    return located


# An operator that changes a shard's dtype, and the dtype.
_Change = tuple[Any, Any]


def _strip(piece: Node) -> tuple[Node, list[_Change]]:
    """Return the shard that ``piece`` flattens, and the changes of its dtype on the way, from the shard on."""
    changes: list[_Change] = []
    while piece.op != "placeholder":
        if piece.target in (_cast, _reinterpret):
            changes.insert(0, (piece.target, piece.args[1]))
        elif piece.target != _aten.view.default:
            break
        piece = piece.args[0]  # type: ignore[assignment]
    return piece, changes


@dataclass
class _Run:
    """Pieces that follow each other in flat storage, and that are sent in one dtype.

    Attributes:
        pieces: flattened shards, and zeros for the elements between two of them.
        numel: the number of elements of all pieces.
        shard: the first shard.
        changes: the changes of the shards' dtype before they are sent.
    """

    pieces: list[Node]
    numel: int
    shard: Node
    changes: list[_Change]


def _split_into_runs(pieces: list[Node], locations: dict[Node, Location]) -> list[_Run]:
    runs: list[_Run] = []
    end: Location | None = None
    for piece in pieces:
        shard, changes = _strip(piece)
        # Elements of the storage, also of pieces that are bytes.
        numel = math.prod(shard.meta["val"].shape)
        is_gap = piece.target == _aten.new_zeros.default
        location = end if is_gap else locations.get(shard)
        follows = end is not None and size_hint(end.distance(location)) == 0
        if is_gap or (follows and changes == runs[-1].changes):
            runs[-1].pieces.append(piece)
            runs[-1].numel += numel
        else:
            runs.append(_Run([piece], numel, shard, changes))
        end = None if location is None else location.after(numel)
    return runs


def flat_storage(graph: Graph, locations: dict[Node, Location], interface: Interface) -> None:
    """Feed all-gathers from runs of flat storage, which are added to ``interface`` as inputs. In place."""
    index = placeholder_index(graph)
    num_runs = 0
    for shard, location in locations.items():
        mark_location(shard, location)
    cats = graph.find_nodes(op="call_function", target=_aten.cat.default)
    for cat in (*cats, *graph.find_nodes(op="call_function", target=copy_to_device)):
        start = work(cat)
        if start is None or start.role not in (Role.START_GATHER, Role.COPY_TO_DEVICE, Role.GATHER_NODE):
            continue
        flat: list[Any] = []
        for run in _split_into_runs(list(cat.args[0]), locations):
            if len(run.pieces) == 1:
                flat.append(run.pieces[0])
                continue
            source = storage = interface.add_input(
                f"run_{num_runs}_{run.shard.name.removeprefix('shard_')}",
                run.shard.meta["val"].new_empty(run.numel),
                StorageRun(index[run.shard], locations[run.shard].offset, run.numel),
            )
            mark_location(storage, locations[run.shard])
            num_runs += 1
            for operator, dtype in run.changes:
                value = operator(source.meta["val"], dtype)
                with graph.inserting_before(cat):
                    source = graph.call_function(operator, (source, dtype))
                source.meta["val"] = value
                mark(source, start)
            flat.append(source)
        if len(flat) == 1 and cat.target != copy_to_device:
            cat.replace_all_uses_with(flat[0])
            graph.erase_node(cat)
        else:
            cat.update_arg(0, flat)
    graph.eliminate_dead_code()
