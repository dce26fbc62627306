"""Depth: the work of a graph with many equal layers, from a trace with a few of them.

Layers in the middle of a deep model do the same work at the same place relative to their neighbours. So a trace of a few layers
(:mod:`passes.transforms.cut_layers`) is a beginning, periods of one layer each, and an end. A period in the middle is repeated
as often as layers were left out. The result has the work and the storages of the deep graph in their order; it is no
extrapolation of sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.fx import GraphModule, Node

from passes.fx.graph import placeholder_index
from passes.ir.work import bucket
from passes.models.cost_model import Demand
from passes.models.memory_model import Lifetime
from passes.models.timeline import awaited
from passes.transforms.cut_layers import cut_layers

from ..units.sharded_param import find_sharded_param
from .graph_formulae import GraphFormulae

# Prefetches and reductions reach over one or two layers, so that the first few and the last few layers differ from the others.
_LAYERS = 8


class NotPeriodicError(Exception):
    """Raised if the layers that are left do not tell the work of those left out."""


@dataclass(frozen=True)
class _Chain:
    """Equal layers, some of which are left out.

    Attributes:
        units: the names of the units of the layers that are left.
        layers: the number of layers that are left.
        missing: the number of layers that are left out.
    """

    units: frozenset[str]
    layers: int
    missing: int


@dataclass
class Cuts:
    """The layers that are left out of the graphs of a trace.

    Attributes:
        copies: for the units of one layer of each chain, by name, the number of equal units that are left out.
    """

    copies: dict[str, int] = field(default_factory=dict)
    _chains: list[_Chain] = field(default_factory=list)

    def cut(self, gm: GraphModule, inputs: Sequence[Any]) -> None:
        """Leave layers out of a Dynamo graph. In place.

        Args:
            gm: the graph.
            inputs: its inputs.
        """
        index_of = placeholder_index(gm.graph)

        def units(nodes: Sequence[Node]) -> frozenset[str] | None:
            """Return the units of a layer; None: these or other inputs are not the layer's alone."""
            params = [find_sharded_param(inputs[index_of[node]]) for node in nodes]
            found = {param.unit for param in params if param is not None}
            if None in params or not found or len(params) < sum(len(unit.params) for unit in found):
                return None
            return frozenset(unit.name or "root" for unit in found)

        for cut in cut_layers(gm, _LAYERS, lambda layers: None not in map(units, layers)):
            layers = [found for found in map(units, cut.kept) if found is not None]
            self._chains.append(_Chain(frozenset().union(*layers), len(layers), len(cut.removed)))
            self.copies.update(dict.fromkeys(layers[_LAYERS // 2], len(cut.removed)))

    def whole(self, work: GraphWork, units: Mapping[str, str]) -> GraphWork:
        """Return the work of a graph with all layers.

        Args:
            work: the work of the graph without some layers.
            units: the name of each unit by its name in the graph.

        Raises:
            NotPeriodicError: layers in the middle do not do the same.
        """
        for chain in self._chains:
            names = {name for name, unit in units.items() if unit in chain.units}
            if names:
                work = _deepened(work, names, chain.layers, chain.missing)
        return work


@dataclass(frozen=True)
class Sent:
    """A collective: its kind, the name of its group, and the bytes that a rank sends."""

    kind: str
    group: str
    traffic: Any


@dataclass(frozen=True)
class NodeWork:
    """The work of one node.

    Attributes:
        demand: its demand on the computing side.
        unit: the unit that it works for, by its name in the graph.
        others: further units that its bucket is for.
        sent: the collective that it starts.
        awaits: the positions of the collectives that it waits for.
    """

    demand: Demand
    unit: str
    sent: Sent | None
    awaits: Sequence[int]
    others: Sequence[str] = ()

    @property
    def works(self) -> bool:
        """Return whether the node takes time or sends something."""
        return self.demand != Demand() or self.sent is not None


@dataclass(frozen=True)
class GraphWork:
    """The work of a graph's nodes in order, and its storages."""

    order: Sequence[NodeWork]
    storages: Sequence[Lifetime]

    @staticmethod
    def of(formulae: GraphFormulae) -> GraphWork:
        """Collect the work of a graph from its formulae."""
        place = {node: index for index, node in enumerate(formulae.order)}
        return GraphWork(
            [
                NodeWork(
                    formulae.demands[node],
                    formulae.unit_of[node],
                    Sent(formulae.kinds[node], formulae.groups[node], formulae.traffic[node])
                    if node in formulae.traffic
                    else None,
                    [place[source] for source in awaited(node) if source in formulae.traffic],
                    done.unit_buckets[1:] if (done := bucket(node)) is not None else (),
                )
                for node in formulae.order
            ],
            formulae.storages,
        )


@dataclass(frozen=True)
class _Section:
    """A part of a graph in which the work of equal layers follows one another.

    Attributes:
        begin: the position of the first work of the layer that is repeated.
        length: the number of nodes of a layer.
    """

    begin: int
    length: int

    @property
    def after(self) -> int:
        """The position after the layer, where its copies are inserted."""
        return self.begin + self.length


class _Item(NamedTuple):
    """A node's work with the collectives that it waits for, or a storage with its lifetime.

    Attributes:
        label: a number, equal for equal items of two layers.
        positions: the positions in the graph: of the node and of the collectives, or the first and the last of the storage.
        made: the :class:`NodeWork` or the :class:`Lifetime`.
    """

    label: int
    positions: tuple[int, ...]
    made: Any


def _deepened(work: GraphWork, units: set[str], layers: int, missing: int) -> GraphWork:
    """Insert the work of ``missing`` layers in the middle of others.

    Args:
        work: the work of a graph.
        units: the names of the units of equal layers in the graph.
        layers: the number of these layers.
        missing: the number of layers to insert.

    Raises:
        NotPeriodicError: no two layers that follow each other do the same at the same places, or layers share a bucket.
    """
    if any(one.others and not units.isdisjoint((one.unit, *one.others)) for one in work.order):
        # More layers would not fit in it, or another bucket would take some.
        raise NotPeriodicError
    numbers: dict[Hashable, int] = {}

    def label(value: Hashable) -> int:
        return numbers.setdefault(value, len(numbers))

    items = [
        _Item(label((one.demand, one.sent, len(one.awaits))), (position, *one.awaits), one)
        for position, one in enumerate(work.order)
    ]
    items += [
        _Item(label(replace(storage, bucket=None, first=0, last=0)), (storage.first, storage.last), storage)
        for storage in work.storages
    ]
    first, sections = _main_sections(items[: len(work.order)], units, layers)
    for main in sections:
        with contextlib.suppress(NotPeriodicError):
            return _Insertion(items, first, main, missing).result()
    raise NotPeriodicError


def _main_sections(nodes: Sequence[_Item], units: set[str], layers: int) -> tuple[int, list[_Section]]:
    """Return the first position of equal layers, and each layer that has the same nodes as the layer before, the last first.

    The length of a layer is the distance at which most work for the units repeats, if not more often than there are layers.
    """
    label = torch.tensor([node.label for node in nodes])
    is_work = torch.tensor([node.made.unit in units and node.made.works for node in nodes])
    best, found = 0, (0, 0, 0)
    for length in range(1, len(label) // 2):
        # Runs of nodes that are equal to those one length later.
        begin = 0
        for end in [*(label[length:] != label[:-length]).nonzero().flatten().tolist(), len(label) - length]:
            if end - begin >= length and (end - begin) // length < layers:
                count = int(is_work[begin:end].sum())
                if count > best:
                    best, found = count, (begin, end, length)
            begin = end + 1
    begin, end, length = found
    return begin, [_Section(place, length) for place in range(end, begin + length - 1, -length)] if length else []


class _Insertion:
    """Copies of a layer's work, inserted after the layer.

    Items of the layer are compared with those of the layer before. Each position of an item either is the same for both layers,
    or moves on by the length of a section: the main one, or one at the end of a graph, in which reductions of all layers are
    waited for. So it moves for copies, too.

    Args:
        items: the items of a graph.
        first: the first position of equal layers.
        main: the section with the work of layers.
        missing: the number of copies.

    Raises:
        NotPeriodicError: the layer before does something else.
    """

    def __init__(self, items: Sequence[_Item], first: int, main: _Section, missing: int):
        self._items, self._first, self._main, self._missing = items, first, main, missing
        self._sections = [main]
        # The numbers of items of the layer, and of the same items of the layer before, with the distance of each position.
        self._own: dict[int, tuple[int, ...]] = {}
        self._before: dict[int, tuple[int, ...]] = {}
        for section in self._sections:
            self._compare(section)

    def _home(self, item: _Item) -> int:
        """Return the position of the layer that an item belongs to: its first, unless that is before all layers."""
        return next((position for position in item.positions if position >= self._first), -1)

    def _compare(self, section: _Section) -> None:
        """Compare the items of the layer with those of the layer before, and find further sections."""
        own, before = (self._members(place, section.length) for place in (section.begin, section.begin - section.length))
        if [key for key, _, _ in own] != [key for key, _, _ in before]:
            raise NotPeriodicError
        for (_, positions, number), (_, earlier, number_before) in zip(own, before, strict=True):
            moves = tuple(now - then for now, then in zip(positions, earlier, strict=True))
            for position, move in zip(positions, moves, strict=True):
                if move < 0:
                    raise NotPeriodicError
                if move and all(move != known.length for known in self._sections):
                    self._sections.append(_Section(position - move + 1, move))
            self._own[number], self._before[number_before] = moves, moves

    def _members(self, begin: int, length: int) -> list[tuple[tuple[int, int], tuple[int, ...], int]]:
        """Return the items of a layer as sorted (key, positions, number)."""
        found = []
        for number, item in enumerate(self._items):
            place = self._home(item) - begin
            if 0 <= place < length:
                found.append(((place, item.label), item.positions, number))
        return sorted(found)

    def result(self) -> GraphWork:
        """Return the work with all layers."""
        order: dict[int, NodeWork] = {}
        storages: list[Lifetime] = []
        for number, item in enumerate(self._items):
            for positions in self._placed(number, item):
                if isinstance(item.made, NodeWork):
                    if positions[0] in order:
                        raise NotPeriodicError
                    order[positions[0]] = replace(item.made, awaits=positions[1:])
                else:
                    storages.append(replace(item.made, first=positions[0], last=positions[1]))
        if sorted(order) != [*range(len(order))]:
            raise NotPeriodicError
        return GraphWork([order[position] for position in range(len(order))], storages)

    def _placed(self, number: int, item: _Item) -> Iterator[tuple[int, ...]]:
        """Yield the new positions of an item and of its copies."""
        if number in self._own:
            for copy in range(self._missing + 1):
                yield self._moved(item.positions, self._own[number], copy)
        elif number in self._before:
            yield self._moved(item.positions, self._before[number], 0)
        else:
            # A later layer waits for collectives of the layers before it, which are copies.
            near = range(self._main.begin - self._main.length, self._main.after)
            is_later = self._home(item) >= self._main.after
            yield tuple(
                position + self._missing * self._main.length if is_later and position in near else self._after(position)
                for position in item.positions
            )

    def _moved(self, positions: Sequence[int], moves: Sequence[int], copy: int) -> tuple[int, ...]:
        """Return positions of a copy, each of which moves by so much for each copy."""
        return tuple(
            self._after(self._section(position, move).begin) + position - self._section(position, move).begin + copy * move
            if move
            else self._after(position)
            for position, move in zip(positions, moves, strict=True)
        )

    def _section(self, position: int, move: int) -> _Section:
        fitting = [section for section in self._sections if section.length == move]
        return min(fitting, key=lambda section: abs(section.begin - position))

    def _after(self, position: int) -> int:
        """Return the new place of a position that no copy has: after all insertions before it."""
        return position + self._missing * sum(section.length for section in self._sections if section.after <= position)
