"""Gathers as plain tensor functions over functional collectives, and the formats in which shards travel.

Eager code calls these functions, and :mod:`passes.transforms.bucket` traces them into graphs. A gather is split where
communication is in flight, so that a schedule can put work between start and finish.

A :class:`GatherFormat` says what a rank sends for its shards, and how the shards of all ranks are read from what arrives:

- :class:`AsNumbers`: numbers of one dtype. Neighbours in flat storage are sent from there.
- :class:`AsBytes`: the bytes of several dtypes.
- :class:`Rounded`: a byte for each element, and scales (:mod:`passes.collectives.rounded_gather`).
- :class:`RoundedBefore`: the bytes of an earlier :class:`Rounded` gather, of which each rank of a smaller group has kept some.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from . import host_copies
from .functional import group_size, resolve_group
from .layout import assemble, padded_shard_shape
from .rounded_gather import GatherPolicy, as_bytes, is_rounded, reinterpret, rounding

_c10d = torch.ops._c10d_functional


class GatherFormat(ABC):
    """The format of the shards that one collective gathers."""

    @property
    def alignment(self) -> int | None:
        """The number of elements that a shard and the gap after it are a multiple of; None: shards travel without gaps."""
        return None

    @abstractmethod
    def encode(self, shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
        """Return the flat tensor that a rank sends. Arguments as for :func:`start_gather`."""

    def sizes(self, shards: Shards) -> list[int]:
        """Return the number of elements that a rank sends for each shard, in a format that is not rounded."""
        raise TypeError(f"Parameters that travel {self} are encoded together.")

    @abstractmethod
    def decode(self, rows: Tensor, shards: Shards) -> list[Tensor]:
        """Return the shards of all ranks, for each parameter ``[ranks, numel of its shard]``.

        Args:
            rows: what arrived, ``[ranks, elements that each rank sent]``.
            shards: the shards.
        """

    def bytes_of(self, rows: Tensor, shards: Shards, index: int) -> list[Tensor]:
        """Return the bytes of one rounded parameter, ``[ranks, bytes]`` each: its elements, and its scales."""
        raise TypeError(f"Parameters that travel {self} are not rounded.")


@dataclass(frozen=True)
class Shards:
    """The shards of a gather: equal in shape on all ranks.

    Attributes:
        shapes: the shapes of the full parameters.
        dims: the dimension that each parameter is cut along.
        ranks: the number of ranks.
        replicas: the number of ranks whose shards came together, one parameter after the other (:func:`finish_node_gather`).
        gaps: the number of unused elements after each shard; empty: the least that the format needs.
        runs: numbers of neighbouring parameters, to cut out together first; empty: cut out each by itself.
    """

    shapes: Sequence[Sequence[int]]
    dims: Sequence[int]
    ranks: int
    gaps: Sequence[int] = ()
    runs: Sequence[int] = ()
    replicas: int = 1

    def shard_shapes(self, ranks: int = 0) -> list[list[int]]:
        """Return the shapes of the padded shards; with ``ranks``, of shards over so many ranks."""
        ranks = ranks or self.ranks
        return [padded_shard_shape(shape, dim, ranks) for shape, dim in zip(self.shapes, self.dims, strict=True)]

    @property
    def numels(self) -> list[int]:
        """The number of elements of each padded shard."""
        return list(map(math.prod, self.shard_shapes()))

    def cut(self, rows: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Cut what arrived into the shards of each parameter, ``[ranks, size]``.

        Args:
            rows: what arrived, ``[ranks / replicas, elements]``.
            sizes: the elements that a rank sent for each parameter.
        """
        if self.replicas == 1:
            return _cut(rows, sizes, self.gaps, self.runs)
        pieces = _cut(rows, [size * self.replicas for size in sizes], (), self.runs)
        by_replica = [piece.view(rows.size(0), self.replicas, -1).movedim(1, 0) for piece in pieces]
        return [piece.reshape(self.ranks, -1) for piece in by_replica]


@dataclass(frozen=True)
class AsNumbers(GatherFormat):
    """The format of numbers of one dtype.

    Attributes:
        dtype: the dtype that shards are cast to before they are sent; None: no cast.
    """

    dtype: torch.dtype | None = None

    @property
    def alignment(self) -> int | None:
        return 1

    def encode(self, shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
        dtype = self.dtype or shards[0].dtype
        return _flatten([shard.to(dtype) for shard in shards], gaps)

    def sizes(self, shards: Shards) -> list[int]:
        return shards.numels

    def decode(self, rows: Tensor, shards: Shards) -> list[Tensor]:
        return shards.cut(rows, self.sizes(shards))


@dataclass(frozen=True)
class AsBytes(GatherFormat):
    """The format of the bytes of shards with several dtypes, or with one-byte dtypes, which not every backend gathers.

    Attributes:
        dtypes: the dtype of each shard.
    """

    dtypes: tuple[torch.dtype, ...]

    def encode(self, shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
        return as_bytes(shards)

    def sizes(self, shards: Shards) -> list[int]:
        return [numel * dtype.itemsize for numel, dtype in zip(shards.numels, self.dtypes, strict=True)]

    def decode(self, rows: Tensor, shards: Shards) -> list[Tensor]:
        return list(map(reinterpret, shards.cut(rows, self.sizes(shards)), self.dtypes))


@dataclass(frozen=True)
class Rounded(GatherFormat):
    """The format of shards that a policy rounds.

    Attributes:
        policy: the policy.
        dtype: the dtype of the result, and of the shards that are not rounded.
    """

    policy: GatherPolicy
    dtype: torch.dtype

    @property
    def alignment(self) -> int | None:
        return self.policy.alignment

    def encode(self, shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
        numels = [shard.numel() for shard in shards]
        gaps = gaps or self.policy.paddings(numels)
        places, _ = self._places(numels, gaps)
        return self.policy.encode(shards, _flatten(shards, gaps), self.dtype, places)

    def decode(self, rows: Tensor, shards: Shards) -> list[Tensor]:
        return self.policy.decode(rows, shards.shard_shapes(), *self._places(shards.numels, shards.gaps), self.dtype)

    def bytes_of(self, rows: Tensor, shards: Shards, index: int) -> list[Tensor]:
        places = self._places(shards.numels, shards.gaps)
        return self.policy.encoded(rows, shards.shard_shapes(), *places, self.dtype)[index]

    def _places(self, numels: Sequence[int], gaps: Sequence[int]) -> tuple[list[int], int]:
        """Return the first element of each shard in the tensor that :meth:`encode` flattens, and its number of elements."""
        sizes = list(map(operator.add, numels, gaps or self.policy.paddings(numels)))
        ends = list(itertools.accumulate(sizes))
        return [end - size for end, size in zip(ends, sizes, strict=True)], ends[-1]


@dataclass(frozen=True)
class RoundedBefore(GatherFormat):
    """The format of bytes that :func:`reshard_rounded` kept, and of shards in the same smaller group that are not rounded.

    Attributes:
        policy, dtype: as for :class:`Rounded`.
        ranks: the number of ranks of the larger group. Each encoded a row of each parameter.
    """

    policy: GatherPolicy
    dtype: torch.dtype
    ranks: int

    def encode(self, shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
        return as_bytes(shards)

    def decode(self, rows: Tensor, shards: Shards) -> list[Tensor]:
        encoded_shapes = shards.shard_shapes(self.ranks)
        sizes = [
            self.ranks // shards.ranks * self.policy.encoded_numel(shape) if is_rounded(shape) else numel * self.dtype.itemsize
            for shape, numel in zip(encoded_shapes, shards.numels, strict=True)
        ]
        pieces = zip(rows.split(sizes, dim=1), encoded_shapes, strict=True)
        return [
            self._decode_one(piece, shape) if is_rounded(shape) else reinterpret(piece, self.dtype) for piece, shape in pieces
        ]

    def _decode_one(self, piece: Tensor, shape: Sequence[int]) -> Tensor:
        numel = math.prod(shape)
        padded = numel + self.policy.paddings([numel])[0]
        (numbers,) = self.policy.decode(piece.reshape(self.ranks, -1), [shape], [0], padded, self.dtype)
        return numbers


def choose_format(
    shapes: Sequence[Sequence[int]],
    dtypes: Sequence[torch.dtype],
    *,
    dtype: torch.dtype | None = None,
    sent_as: GatherPolicy | None = None,
    packed: bool = False,
    encoded_over: str = "",
    in_bytes: bool = False,
) -> GatherFormat:
    """Return the format of shards that share a gather.

    Args:
        shapes: the shapes of the full parameters.
        dtypes: the dtype of each shard.
        dtype: the dtype that the parameters are gathered in; None: that of the shards.
        sent_as: the policy that rounds the shards, or has rounded them; None: they are not rounded.
        packed: the shards may have several dtypes, and are sent as they are.
        encoded_over: for the results of :func:`reshard_rounded`: name of the group that was gathered over before; else empty.
        in_bytes: packed shards are sent as bytes, also if they have one dtype.
    """
    if packed:
        travel_as_bytes = in_bytes or len(set(dtypes)) > 1 or any(each.itemsize == 1 for each in dtypes)
        return AsBytes(tuple(dtypes)) if travel_as_bytes else AsNumbers()
    dtype, policy = dtype or dtypes[0], rounding(sent_as, shapes)
    if policy is None:
        return AsNumbers(dtype)
    return RoundedBefore(policy, dtype, group_size(encoded_over)) if encoded_over else Rounded(policy, dtype)


def start_gather(
    shards: Sequence[Tensor], group: str, gaps: Sequence[int] = (), *, format: GatherFormat = AsNumbers()
) -> Tensor:
    """Begin to gather padded shards.

    Args:
        shards: the shards.
        group: name of the shard group.
        gaps: the number of unused elements to gather after each shard; empty: the least that the format needs.
        format: the format of the shards.

    Returns:
        The flat buffer in flight, ``[world_size * elements or bytes that each rank sends]``.
    """
    return _c10d.all_gather_into_tensor(format.encode(shards, gaps), group_size(group), group)


def finish_gather(
    gathered: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    group: str,
    gaps: Sequence[int] = (),
    *,
    format: GatherFormat = AsNumbers(),
    runs: Sequence[int] = (),
    resharded: Sequence[int] = (),
    replicate_group: str = "",
) -> list[Tensor]:
    """Wait for a gather that :func:`start_gather` began, and cut the full parameters out of its buffer.

    Args:
        gathered: the buffer in flight.
        shapes: shapes of the full parameters.
        dims: the dimension that each parameter is cut along.
        group: name of the group that the parameters are sharded over.
        gaps, format: as for :func:`start_gather`.
        runs: numbers of neighbouring parameters. Each run is cut out of the buffer as one piece, and its parameters out of the
            piece. Empty: cut out each parameter by itself.
        resharded: indices of the rounded parameters whose bytes are returned, too, for :func:`reshard_rounded`.
        replicate_group: for node shards: name of the group that :func:`start_node_gather` ran over; else empty.

    Returns:
        The parameters; after them, for each index in ``resharded``, two tensors ``[ranks, bytes]``: elements and scales.
    """
    shards = Shards(shapes, dims, group_size(group), gaps, runs, group_size(replicate_group))
    rows = _c10d.wait_tensor(gathered).view(shards.ranks // shards.replicas, -1)
    pieces = format.decode(rows, shards)
    fulls = [assemble(piece, shape, dim) for piece, shape, dim in zip(pieces, shapes, dims, strict=True)]
    return fulls + [part for index in resharded for part in format.bytes_of(rows, shards, index)]


def start_node_gather(shards: Sequence[Tensor], replicate_group: str, *, format: GatherFormat) -> Tensor:
    """Begin to gather node shards: the shards that one rank of each node has, which a gather within the node completes.

    Args:
        shards: the shards, over the ranks of all nodes.
        replicate_group: name of the group with one rank of each node, whose node shards are equal.
        format: the format of the shards.

    Returns:
        The flat buffer in flight, ``[nodes * elements that each rank sent]``.
    """
    return _c10d.all_gather_into_tensor(format.encode(shards, ()), group_size(replicate_group), replicate_group)


def finish_node_gather(
    gathered: Tensor,
    shapes: Sequence[Sequence[int]],
    dims: Sequence[int],
    group: str,
    replicate_group: str,
    *,
    format: GatherFormat,
) -> Tensor:
    """Wait for a gather that :func:`start_node_gather` began. Arguments as there, and as for :func:`finish_gather`.

    Returns:
        The flat node shards, ``[nodes * elements that each rank sent]``: for each parameter the shards of all nodes' ranks.
    """
    rows = _c10d.wait_tensor(gathered).view(group_size(replicate_group), -1)
    pieces = _cut(rows, format.sizes(Shards(shapes, dims, group_size(group))), ())
    return rows.reshape(-1) if len(pieces) == 1 else torch.cat([piece.reshape(-1) for piece in pieces])


def start_gather_of_nodes(node_shards: Tensor, node_group: str) -> Tensor:
    """Begin to gather flat node shards over the ranks of a node."""
    return _c10d.all_gather_into_tensor(node_shards, group_size(node_group), node_group)


def reshard_rounded(parts: Sequence[Tensor], group: str) -> Tensor:
    """Cut this rank's rows in a smaller group out of the bytes of one rounded parameter.

    A gather of these rows over the smaller group (:class:`RoundedBefore`) restores all bytes, so they decode to the same values
    as before.

    Args:
        parts: elements and scales of the parameter, as :func:`finish_gather` returns them, each ``[ranks, bytes]``.
        group: name of the smaller group.

    Returns:
        ``[ranks / ranks of the smaller group, bytes of both parts]``.
    """
    process_group = resolve_group(group)
    rows = parts[0].size(0) // process_group.size()
    return torch.cat([part.narrow(0, process_group.rank() * rows, rows) for part in parts], dim=1)


def start_copy_to_device(shards: Sequence[Tensor], gaps: Sequence[int] = (), *, device: str) -> Tensor:
    """Begin to copy padded shards of one dtype from the host to the device that gathers them.

    Args:
        shards: the shards.
        gaps: the number of unused elements after each shard; empty: none.
        device: the device's type; the copy goes to the current device of this type.

    Returns:
        The flat shard in flight, ``[sum of numels and gaps]``.
    """
    return host_copies.copy_to_device(_pieces(shards, gaps), device)


def start_gather_of_copy(copied: Tensor, group: str, *, format: GatherFormat) -> Tensor:
    """Begin to gather the flat shard in flight of :func:`start_copy_to_device`, which the device may cast."""
    return start_gather([host_copies.wait_copy(copied)], group, format=format)


def shard_on_device(shard: Tensor, device: str) -> Tensor:
    """Copy a shard from the host to the device, and wait for the copy. Returns a new tensor of the same shape."""
    copied: Tensor = host_copies.wait_copy(start_copy_to_device([shard], device=device))
    return copied.view(shard.shape)


def _pieces(shards: Sequence[Tensor], gaps: Sequence[int]) -> list[Tensor]:
    """Flatten shards, with zeros for the gaps between them."""
    pieces = []
    for shard, gap in zip(shards, gaps or [0] * len(shards), strict=True):
        pieces += [shard.reshape(-1), shard.new_zeros(gap)] if gap else [shard.reshape(-1)]
    return pieces


def _flatten(shards: Sequence[Tensor], gaps: Sequence[int]) -> Tensor:
    pieces = _pieces(shards, gaps)
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def _cut(rows: Tensor, numels: Sequence[int], gaps: Sequence[int], runs: Sequence[int] = ()) -> list[Tensor]:
    """Cut pieces of ``numels`` columns, each with a gap after it. With ``runs``, cut runs of so many pieces first."""
    gaps = gaps or [0] * len(numels)
    if runs:
        ends = list(itertools.accumulate(runs))
        slices = [slice(end - run, end) for end, run in zip(ends, runs, strict=True)]
        split = rows.split([sum(numels[piece]) + sum(gaps[piece]) for piece in slices], dim=1)
        pairs = zip(slices, split, strict=True)
        return [cut for piece, run in pairs for cut in _cut(run, numels[piece], gaps[piece])]
    sizes: list[int] = []
    places = []
    for numel, gap in zip(numels, gaps, strict=True):
        places.append(len(sizes))
        sizes += [numel, gap] if gap else [numel]
    split = rows.split(sizes, dim=1) if len(sizes) > 1 else (rows,)
    return [split[place] for place in places]
