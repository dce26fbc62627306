"""Bucket: gather all parameters of a unit that share dtype and group with one collective.

Before: an ``unshard`` for each parameter that the graph reads.
After:  for each unit, dtype and group one ``all_gather_into_tensor`` just before the unit's first reader. Nothing overlaps yet.
        Parameters that the plan keeps are also outputs of the graph. Those that it reuses are inputs, without a gather.

In a bucket, parameters are in the order of flat storage, or of their names where shards are not stored there, never of a hash,
or of what this rank reads first. Scalars, which every rank holds whole, are read without a gather.

If a parameter is rounded for its gather and resharded to a smaller group (``reshard_rounded``), the group's shard is cut from
the bytes in the gather's buffer. Backward gathers these bytes and decodes them as forward did.

Shards on the host are copied to the device before the gather, with one copy for each bucket.

Parameters with a ``node_group`` have two gathers: from one rank of each node, over replicas, which makes *node shards*, and
then within the node. Node shards are outputs of the graph. If the plan has those of an earlier graph, they are inputs, and it
has no first gather.

With ``unit_by_unit``, units that share a gather are cut out of its buffer one by one, so that equal units have equal kernels.

New nodes are marked with their work (:mod:`passes.ir.work`), by which the schedule finds and moves them.
:mod:`passes.transforms.gradient_sync` does the same for gradients.

Leaves alone collectives of the model's own.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..collectives.functional import group_size
from ..collectives.gather import (
    choose_format,
    finish_gather,
    finish_node_gather,
    start_copy_to_device,
    start_gather,
    start_gather_of_copy,
    start_gather_of_nodes,
    start_node_gather,
)
from ..collectives.host_copies import wait_copy
from ..collectives.layout import REPLICATED
from ..collectives.rounded_gather import GatherPolicy
from ..fx.emit import emit
from ..fx.graph import derived, is_collective, shard_input, with_sources
from ..ir.interface import FullParameter, Interface, NodeShards
from ..ir.ops import ReduceGrad, Unshard, is_unshard, reduce_grads, reshard, reshard_rounded, unshards, with_unit
from ..ir.plan import Gather
from ..ir.storage import gaps_to_gather
from ..ir.work import MAKES_PARAMETERS, BucketName, Role, Work, mark, nodes_of, role


@dataclass
class Bucket:
    """Operators that share a collective.

    Attributes:
        name: unique in the graph. A unit's bucket has the unit's name, numbered if dtypes or groups give the unit several.
        unit: the unit's name in the graph; of several units, the first one's.
        nodes: the ``unshard`` nodes, by dtype and in the order of flat storage, or the ``reduce_grad`` nodes, in the order of
            the graph.
        shards: the shard that each node reads.
    """

    name: BucketName
    unit: str
    nodes: list[Node]

    @property
    def shards(self) -> list[Node]:
        return [_spec(node).shard for node in self.nodes]

    @property
    def parameters(self) -> tuple[str, ...]:
        """The name of each node's parameter within its unit. Blocks that share a graph have equal names."""
        return _parameters(self.nodes)


def _spec(node: Node) -> Unshard | ReduceGrad:
    return Unshard.of(node) if is_unshard(node) else ReduceGrad.of(node)


def _parameters(nodes: Sequence[Node]) -> tuple[str, ...]:
    return tuple(_name_in(spec.unit, spec.name) for spec in map(_spec, nodes))


def _name_in(unit: str, name: str) -> str:
    """Return a parameter's name relative to its unit.

    A parameter may be of another module, in a unit of several, or if it is tied. As in a relative import, a dot then stands for
    each module that is left. Of neighbours in a list, the distance is given: all pairs of blocks have equal names.
    """
    if not unit or name.startswith(f"{unit}."):
        return name.removeprefix(f"{unit}.")
    at, to = unit.split("."), name.split(".")
    shared = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], zip(at, to, strict=False))))
    if shared < len(at) and at[shared].isdecimal() and to[shared].isdecimal():
        to[shared] = f"{int(to[shared]) - int(at[shared]):+}"
    return "." * (len(at) - shared) + ".".join(to[shared:])


def _named(buckets: dict[tuple[Hashable, ...], list[Node]]) -> list[Bucket]:
    """Make a bucket of each list of nodes. The first element of a key is the unit's name.

    Several buckets of a unit are numbered in the order of their parameters' names, whichever this rank reads first.
    """
    # The second bucket of unit "blocks" must not take the name of a unit "blocks.1" inside of it.
    by_unit: dict[str, list[tuple[Hashable, ...]]] = {}
    for key in buckets:
        by_unit.setdefault(str(key[0]) or "root", []).append(key)
    names: dict[tuple[Hashable, ...], str] = {}
    for unit, keys in by_unit.items():
        free = (name for number in itertools.count(1) if (name := f"{unit}.{number}") not in by_unit)
        keys = sorted(keys, key=lambda key: min(_parameters(buckets[key]))) if len(keys) > 1 else keys
        names.update(zip(keys, itertools.chain([unit], free), strict=False))
    return [Bucket(BucketName.of_unit(names[key]), str(key[0]), nodes) for key, nodes in buckets.items()]


#: Parameters that share a collective. Each is the index of its unit's bucket, and its position in that bucket.
Group = tuple[tuple[int, int], ...]


def whole_buckets(buckets: Sequence[Bucket]) -> list[Group]:
    """Return the default groups: one for each unit's bucket."""
    return [tuple((index, position) for position in range(len(bucket.nodes))) for index, bucket in enumerate(buckets)]


def regroup(buckets: Sequence[Bucket], groups: Sequence[Group]) -> list[Bucket]:
    """Merge and split the buckets of units into one bucket for each of ``groups``.

    A merged bucket is named after all its units (``"a+b"``), a piece of a split one by number (``"a/0"``, ``"a/1"``). Numbers
    do not depend on which piece this rank needs first.
    """
    shares = list(map(_by_bucket, groups))
    numbers = _piece_numbers(buckets, shares)
    regrouped = []
    for group, share in zip(groups, shares, strict=True):
        parts: list[tuple[str, int | None]] = []
        for index, positions in share.items():
            (name,) = buckets[index].name.unit_buckets
            parts.append((name, numbers.get((index, positions[0]))))
        nodes = [buckets[index].nodes[position] for index, position in group]
        regrouped.append(Bucket(BucketName(tuple(parts)), buckets[group[0][0]].unit, nodes))
    return regrouped


def members_of(buckets: Sequence[Bucket], groups: Sequence[Group]) -> list[tuple[tuple[str, str], ...]]:
    """Name the parameters of each group: each by its unit's bucket, and by its name within the unit."""
    names = [[(str(bucket.name), name) for name in bucket.parameters] for bucket in buckets]
    return [tuple(names[index][position] for index, position in group) for group in groups]


def _piece_numbers(buckets: Sequence[Bucket], shares: Sequence[dict[int, list[int]]]) -> dict[tuple[int, int], int]:
    """Return the numbers of the pieces of split buckets, by the bucket's index and the piece's first position in its group."""
    pieces: dict[int, list[list[int]]] = {}
    for share in shares:
        for index, positions in share.items():
            if len(positions) < len(buckets[index].nodes):
                pieces.setdefault(index, []).append(positions)
    found = {}
    for index, split in pieces.items():
        # Gathers are sorted alike on all ranks. Gradients are in the order of this rank's graph.
        nodes = buckets[index].nodes
        places = (
            range(len(nodes)) if is_unshard(nodes[0]) else [*zip(buckets[index].parameters, itertools.count(), strict=False)]
        )
        split.sort(key=lambda positions: min(places[position] for position in positions))  # type: ignore[type-var]
        found.update({(index, positions[0]): number for number, positions in enumerate(split)})
    return found


def _by_bucket(group: Group) -> dict[int, list[int]]:
    """Return the positions of a group's parameters by the index of their bucket, in the order of the group."""
    found: dict[int, list[int]] = {}
    for index, position in group:
        found.setdefault(index, []).append(position)
    return found


def sorted_by_unit(group: Group, key: Callable[[tuple[int, int]], int] = operator.itemgetter(1)) -> Group:
    """Sort the parameters of each unit in a group, which may have been split and merged again. Units keep their order.

    Args:
        group: the group.
        key: what to sort a unit's parameters by; their positions in the unit's bucket by default.
    """
    place = {index: number for number, index in enumerate(_by_bucket(group))}
    return tuple(sorted(group, key=lambda member: (place[member[0]], key(member))))


def gather_key(spec: Unshard) -> Hashable:
    """Return a key that is equal for parameters that one collective can gather."""
    if spec.packed:
        return spec.group, spec.node_group
    if spec.encoded_over:
        return spec.group, spec.encoded_over, spec.sent_as, spec.param_dtype
    param_dtype = spec.param_dtype if spec.sent_as or spec.device else None
    return spec.shard.meta["val"].dtype, spec.group, spec.node_group, spec.sent_as, param_dtype, spec.device


@dataclass(frozen=True)
class Buckets:
    """The operators of a graph by the collective that they share unless a schedule merges or splits it.

    Attributes:
        gathers: the unshards, by unit and :func:`gather_key`, without scalars and those that nothing reads.
        reductions: the gradient reductions, by unit, dtypes and groups.
    """

    gathers: list[Bucket]
    reductions: list[Bucket]


def find_buckets(graph: Graph) -> Buckets:
    """Bucket the unshards and gradient reductions of a graph after the preparing passes."""
    return Buckets(_gather_buckets(graph), _reduction_buckets(graph))


def _gather_buckets(graph: Graph) -> list[Bucket]:
    buckets: dict[tuple[Hashable, ...], list[Node]] = {}
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if node.users and spec.dim != REPLICATED:
            buckets.setdefault((spec.unit, gather_key(spec)), []).append(node)
    for nodes in buckets.values():
        nodes.sort(key=_order_in_bucket)
    return _named(buckets)


def _order_in_bucket(node: Node) -> tuple[int, str, int, str]:
    """Return a key to sort a bucket's unshards by, equal on all ranks: whichever parameter a rank reads first, and however it
    computes a shard that is not in flat storage. Tensors that one parameter sends keep their order.
    """
    spec = Unshard.of(node)
    stored = shard_input(spec.shard) if spec.offset >= 0 else None
    dtype = (stored or spec.shard).meta["val"].dtype
    # Wide numbers first: of bytes, the first ones are aligned.
    return -dtype.itemsize, str(dtype), spec.offset, spec.name


def _reduction_buckets(graph: Graph) -> list[Bucket]:
    buckets: dict[tuple[Hashable, ...], list[Node]] = {}
    for node in reduce_grads(graph.nodes):
        spec = ReduceGrad.of(node)
        key = (spec.unit, spec.grad.meta["val"].dtype, spec.grad_dtype, spec.group, spec.replicate_group, spec.node_group)
        buckets.setdefault(key, []).append(node)
    return _named(buckets)


def sink_derived(graph: Graph) -> None:
    """Move views, casts and reshards of unshards to just before their first reader, so that they need no earlier gather."""
    gathers = dict.fromkeys(unshards(graph.nodes))
    for node in reversed(derived(graph, list(gathers))):
        if node not in gathers and node.users:
            min(node.users).prepend(node)
    for full in gathers:
        pieces = [user for user in full.users if user.target in (reshard, reshard_rounded)]
        first_reader = min((user for user in full.users if user not in pieces), default=None)
        if first_reader is not None:
            for piece in pieces:
                first_reader.prepend(piece)


def _drop_readers_of_units(graph: Graph, kept: Sequence[Node]) -> None:
    """Remove each ``with_unit``, and the copies out of buffers that nothing else reads and that are not ``kept``."""
    found = graph.find_nodes(op="call_function", target=with_unit)
    for node in found:
        for element in list(node.users):
            element.replace_all_uses_with(node.args[0][element.args[1]])  # type: ignore[index, arg-type]
            graph.erase_node(element)
        graph.erase_node(node)
    for node in reversed(list(graph.nodes)) if found else ():
        if role(node) in MAKES_PARAMETERS and not node.users and not is_collective(node) and node not in kept:
            graph.erase_node(node)


def _drop_trivial(graph: Graph) -> None:
    """Remove unshards that nothing reads, and unshards of scalars, which every rank holds whole."""
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if spec.dim == REPLICATED and spec.device:
            node.replace_all_uses_with(_whole_on_device(graph, node, spec))
        elif spec.dim == REPLICATED:
            node.replace_all_uses_with(spec.shard)
        if not node.users:
            graph.erase_node(node)


def _whole_on_device(graph: Graph, node: Node, spec: Unshard) -> Node:
    """Copy a parameter that every rank holds whole from the host to the device, in the shape and dtype that readers take."""
    work = Work(Role.COPY_TO_DEVICE, BucketName.of_unit(spec.unit or "root"))
    dtype = spec.param_dtype or spec.shard.meta["val"].dtype
    with graph.inserting_before(node):
        copied = emit(graph, start_copy_to_device, [spec.shard], device=spec.device, work=work)
        whole: Node = emit(graph, _finish_whole, copied, shape=spec.shape, dtype=dtype)
    return whole


def _finish_whole(copied: Tensor, *, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    on_device: Tensor = wait_copy(copied)
    return on_device.view(shape).to(dtype)


class _Gathered(NamedTuple):
    """A bucket that is gathered.

    Attributes:
        fulls: the full parameters.
        encoded: for each that ``reshard_rounded`` reads, by its position in the bucket, its bytes: rounded elements and scales,
            ``[ranks, bytes]`` each.
        node_shards: the flat node shards; None: the parameters have none.
    """

    fulls: list[Node]
    encoded: dict[int, list[Node]]
    node_shards: Node | None


def _gather(
    graph: Graph, bucket: Bucket, runs: Sequence[int] = (), take_node_shards: Callable[[Tensor], Node] | None = None
) -> _Gathered:
    """Gather a bucket before its first reader.

    Args:
        graph: the graph.
        bucket: the bucket.
        runs: numbers of parameters, to cut runs of so many out of the buffer first.
        take_node_shards: makes the input of the graph for node shards that an earlier graph returned, from their fake value.
            None: if the parameters have node shards, gather these first.
    """
    specs = [Unshard.of(node) for node in bucket.nodes]
    first, shapes, shards = specs[0], [spec.shape for spec in specs], bucket.shards
    format = choose_format(
        shapes,
        [shard.meta["val"].dtype for shard in shards],
        dtype=first.param_dtype,
        sent_as=GatherPolicy.parse(first.sent_as),
        packed=first.packed,
        encoded_over=first.encoded_over,
        in_bytes=bool(first.node_group),
    )
    # Node shards are kept by parameter, so other elements are not among them.
    gaps = [] if format.alignment is None or first.node_group else gaps_to_gather(specs, format.alignment)
    resharded = [place for place, node in enumerate(bucket.nodes) if _rounded_reshards(node)]
    first_reader = min(reader for node in bucket.nodes for reader in node.users)
    _move_shard_sources_before(first_reader, bucket)
    with graph.inserting_before(first_reader):
        start, finish = Work(Role.START_GATHER, bucket.name), Work(Role.FINISH_GATHER, bucket.name)
        how: dict[str, Any] = {"group": first.group, "format": format}
        layout: dict[str, Any] = {"shapes": shapes, "dims": [spec.dim for spec in specs]}
        node_shards: Node | None = None
        if first.node_group:
            over = {"replicate_group": first.replicate_group}
            if take_node_shards is None:
                gather = Work(Role.GATHER_NODE, bucket.name)
                started = emit(graph, start_node_gather, shards, format=format, work=gather, **over)
                node_shards = emit(graph, finish_node_gather, started, work=start, **layout, **how, **over)
            else:
                row = format.encode([shard.meta["val"] for shard in shards], ())
                node_shards = take_node_shards(row.new_empty(group_size(first.replicate_group) * row.numel()))
            started = emit(graph, start_gather_of_nodes, node_shards, node_group=first.node_group, work=start)
            how |= over
        elif first.device:
            copy = Work(Role.COPY_TO_DEVICE, bucket.name)
            copied = emit(graph, start_copy_to_device, shards, gaps=gaps, device=first.device, work=copy)
            started = emit(graph, start_gather_of_copy, copied, work=start, **how)
        else:
            started = emit(graph, start_gather, shards, gaps=gaps, work=start, **how)
        how |= {**layout, "gaps": gaps, "runs": runs, "resharded": resharded}
        found = emit(graph, finish_gather, started, work=finish, **how)
    fulls, parts = found[: len(shards)], iter(found[len(shards) :])
    return _Gathered(fulls, {place: [next(parts), next(parts)] for place in resharded}, node_shards)


def _rounded_reshards(full: Node) -> list[Node]:
    return [user for user in full.users if user.target == reshard_rounded]


def _move_shard_sources_before(anchor: Node, bucket: Bucket) -> None:
    """Move the casts and encodings that make a bucket's shards before ``anchor``.

    Encodings that nothing else reads earlier move to just before ``anchor``.
    """
    sources = with_sources(bucket.shards)
    for node in sources:
        if node > anchor:
            # It was made for its own unshard, which comes after the bucket's first reader.
            anchor.prepend(node)
    if not Unshard.of(bucket.nodes[0]).packed:
        return
    for node in reversed(sources):
        if all(user >= anchor or user in bucket.nodes for user in node.users):
            anchor.prepend(node)
            anchor = node


def bucket_gathers(
    graph: Graph,
    plan: Sequence[Gather] | None = None,
    interface: Interface | None = None,
    groups: Sequence[Group] | None = None,
    *,
    buckets: Sequence[Bucket] | None = None,
    unit_by_unit: bool = False,
) -> None:
    """Replace the unshards of a forward or backward graph by one all-gather for each bucket. In place.

    Args:
        graph: the graph.
        plan: the action for each of ``buckets``; None: gather all.
        interface: receives the inputs and outputs that the plan adds.
        groups: gather these groups instead of the buckets. Together they have all parameters that the plan gathers.
        buckets: the graph's buckets of gathers; None: those that :func:`find_buckets` finds.
        unit_by_unit: cut each unit out of a shared buffer before that unit's first reader, not all units before the first
            reader of any.
    """
    sink_derived(graph)
    buckets = find_buckets(graph).gathers if buckets is None else buckets
    for index, bucket in enumerate(buckets):
        if plan is not None and plan[index] is Gather.REUSE:
            assert interface is not None
            _reuse(graph, bucket, index, interface)
    if groups is None:
        reused = {index for index, action in enumerate(plan or ()) if action is Gather.REUSE}
        groups = [group for group in whole_buckets(buckets) if group[0][0] not in reused]
    groups = list(map(sorted_by_unit, groups))
    for group, bucket, members in zip(groups, regroup(buckets, groups), members_of(buckets, groups), strict=True):
        if interface is not None:
            interface.members[True, bucket.name] = members
        shares = unit_by_unit and len(bucket.name.parts) > 1
        runs = [len(list(run)) for _, run in itertools.groupby(group, _bucket_of)] if shares else ()
        action = Gather.GATHER if plan is None else plan[group[0][0]]
        take = None
        if action is Gather.WITHIN_NODE:
            assert interface is not None
            take = functools.partial(interface.add_input, f"node_{bucket.name}", slot=NodeShards(group))
        fulls, encoded, node_shards = _gather(graph, bucket, runs, take)
        if interface is not None and node_shards is not None and action is Gather.GATHER:
            interface.add_output(node_shards, NodeShards(group))
        for (index, position), full in zip(group, fulls, strict=True):
            if plan is not None and plan[index] is Gather.KEEP:
                assert interface is not None
                interface.add_output(full, FullParameter(index, position))
        for place, parts in encoded.items():
            for piece in _rounded_reshards(bucket.nodes[place]):
                piece.update_arg(0, parts)
        _replace(graph, bucket, fulls)
        if shares:
            units = [buckets[index].name for index, _ in group]
            made = [*zip(fulls, units, strict=True), *((part, units[place]) for place in encoded for part in encoded[place])]
            _unpack(graph, bucket.name, made)
    _drop_readers_of_units(graph, interface.output_nodes if interface is not None else ())
    _drop_trivial(graph)


def _bucket_of(member: tuple[int, int]) -> int:
    return member[0]


def _unpack(graph: Graph, name: BucketName, made: Sequence[tuple[Node, BucketName]]) -> None:
    """Move the nodes that cut one unit out of a shared buffer to just before that unit's first reader.

    Args:
        graph: the graph.
        name: the name of the bucket that the units share.
        made: the values that are cut out of the buffer, each with the name of its unit's own bucket.
    """
    finish = nodes_of(graph, Role.FINISH_GATHER)[name]
    needed_by: dict[Node, set[BucketName]] = {node: {unit} for node, unit in made}
    alone: dict[BucketName, list[Node]] = {}
    for node in reversed(finish):
        wanted = needed_by.setdefault(node, set()).union(*(needed_by.get(user, ()) for user in node.users))
        needed_by[node] = wanted
        if not wanted:
            graph.erase_node(node)  # cuts out a gap
        elif len(wanted) == 1:
            alone.setdefault(next(iter(wanted)), []).append(node)
    for unit, found in alone.items():
        # A getitem moves only together with the node that makes its tuple.
        nodes = [node for node in found if node.target is not operator.getitem or node.args[0] in found]
        first_reader = min(user for node in nodes for user in node.users if user not in needed_by)
        for node in reversed(nodes):
            first_reader.prepend(node)
            mark(node, Work(Role.UNPACK, unit))


def _reuse(graph: Graph, bucket: Bucket, index: int, interface: Interface) -> None:
    """Take the parameters of a bucket as inputs of the graph, without a gather."""
    fulls = [
        interface.add_input(f"full_{node.args[1]}".replace(".", "_"), node.meta["val"], FullParameter(index, position))
        for position, node in enumerate(bucket.nodes)
    ]
    _replace(graph, bucket, fulls)


def _replace(graph: Graph, bucket: Bucket, fulls: Sequence[Node]) -> None:
    for node, full in zip(bucket.nodes, fulls, strict=True):
        node.replace_all_uses_with(full)
        graph.erase_node(node)
