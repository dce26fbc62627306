"""Locations of shards in flat storage, and the gaps between shards that a gather includes."""

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

# The least number of elements in a run for each element of its gaps. A gap costs network time, a copy without it memory time.
# Gaps of an eighth are cheap, even if the network is ten times slower than memory.
_MIN_READ_PER_GAP = 8


@dataclass(frozen=True)
class Location:
    """The location of a shard in flat storage.

    Attributes:
        unit: name of the unit that the storage belongs to.
        dtype: dtype of the storage.
        offset: where the shard starts in the storage, in elements.
    """

    unit: str
    dtype: torch.dtype
    offset: int

    def after(self, numel: int) -> Location:
        """Return the location ``numel`` elements after this one."""
        return Location(self.unit, self.dtype, self.offset + numel)

    def distance(self, other: Location | None) -> int:
        """Return the number of elements from here to ``other``; negative if ``other`` is before, or not in this storage."""
        if other is None or (self.unit, self.dtype) != (other.unit, other.dtype):
            return -1
        distance = other.offset - self.offset
        # The hint is a plain number even if the offsets are symbols, so that neighbours are 0 apart.
        return distance if size_hint(distance) > 0 else size_hint(distance)


def locate(spec: Unshard) -> Location | None:
    """Return the location of an ``unshard``'s shard; None: the shard is not in flat storage."""
    shard = shard_input(spec.shard)
    if spec.offset < 0 or shard is None:
        return None
    return Location(spec.unit, shard.meta["val"].dtype, spec.offset)


#: The key in ``node.meta`` of an input's location in flat storage.
_LOCATION = "fsdp_location"


def mark_location(placeholder: Node, location: Location) -> None:
    """Record an input's location in flat storage, for :func:`overlap`."""
    placeholder.meta[_LOCATION] = location


def overlap(one: Node, other: Node) -> bool:
    """Return whether two inputs share elements of flat storage. False if the location of either is not recorded."""
    first, second = one.meta.get(_LOCATION), other.meta.get(_LOCATION)
    if first is None or second is None:
        return False
    if (first.unit, first.dtype) != (second.unit, second.dtype):
        return False
    first_numel, second_numel = (size_hint(math.prod(node.meta["val"].shape)) for node in (one, other))
    return first.offset < second.offset + second_numel and second.offset < first.offset + first_numel


def gaps_to_gather(specs: Sequence[Unshard], alignment: int = 1) -> list[int]:
    """Choose the gap after each shard of one collective: elements that are gathered although the graph does not read them.

    A gap, the storage between two shards, holds parameters that the graph does not read (biases, in backward). Small gaps are
    gathered, as that is cheaper than a copy without them. Large gaps are not.

    Args:
        specs: the ``unshard`` operators, in the order of flat storage.
        alignment: the least gap after a shard pads the shard to a multiple of this many elements, as in storage.

    Returns:
        For each shard, the number of elements after it to gather.
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
