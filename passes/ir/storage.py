"""Where shards lie in flat storage, and what a gather may take along between two of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..collectives.layout import padding_to
from ..fx.graph import shard_input
from ..fx.sizes import size_hint
from .ops import Unshard

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

    def distance(self, other: Location | None) -> int:
        """The elements from here to another place; negative if that is no place behind this one."""
        if other is None or (self.unit, self.dtype) != (other.unit, other.dtype):
            return -1
        distance = other.offset - self.offset
        # That is a number also where both are symbols: neighbours are zero apart.
        return distance if size_hint(distance) > 0 else size_hint(distance)


def locate(spec: Unshard) -> Location | None:
    """Where the shard of an ``unshard`` lies; None: not in storage."""
    shard = shard_input(spec.shard)
    if spec.offset < 0 or shard is None:
        return None
    return Location(spec.unit, shard.meta["val"].dtype, spec.offset)


#: The key in ``node.meta`` of where an input lies in storage.
_LOCATION = "fsdp_location"


def mark_location(placeholder: Node, location: Location) -> None:
    """Say that an input lies in storage."""
    placeholder.meta[_LOCATION] = location


def overlap(one: Node, other: Node) -> bool:
    """Whether two inputs, both of which lie in storage as far as is marked, share elements of it."""
    first, second = one.meta.get(_LOCATION), other.meta.get(_LOCATION)
    if first is None or second is None:
        return False
    if (first.unit, first.dtype) != (second.unit, second.dtype):
        return False
    first_numel, second_numel = (size_hint(math.prod(node.meta["val"].shape)) for node in (one, other))
    return first.offset < second.offset + second_numel and second.offset < first.offset + first_numel


def gaps_to_gather(specs: Sequence[Unshard], alignment: int = 1) -> list[int]:
    """For each of the shards that one collective gathers, the elements behind it that are gathered along.

    They lie between it and the next, where nothing of the graph reads them (biases, in backward), and are few: that is cheaper
    than the copy that would leave them out.

    Args:
        specs: in the order of flat storage.
        alignment: the least gaps are those that make shards multiples of so many elements; so they lie in storage.
    """
    gaps = [padding_to(alignment, math.prod(spec.shard.meta["val"].shape)) for spec in specs]
    end: Location | None = None
    num_read = num_gaps = 0
    for index, spec in enumerate(specs):
        numel = math.prod(spec.shard.meta["val"].shape)
        location = locate(spec)
        gap = -1 if end is None else end.distance(location)
        if size_hint(gap) >= 0 and size_hint((num_gaps + gap) * _MIN_READ_PER_GAP - num_read - num_gaps - numel) <= 0:
            gaps[index - 1] = gap
        else:
            gap = num_read = num_gaps = 0
        num_read, num_gaps = num_read + numel, num_gaps + gap
        end = None if location is None else location.after(numel)
    return gaps
