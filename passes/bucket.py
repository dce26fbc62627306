"""Bucket: one collective for all parameters of a unit that share dtype and group.

Before: an ``unshard`` for each parameter that the graph reads.
After:  for each unit, dtype and group one ``all_gather_into_tensor`` just ahead of the unit's first reader. Nothing overlaps
        yet. A bucket whose parameters the plan keeps goes out of the graph, too; one that it reuses comes in, without a gather.

In a bucket, parameters stand in the order of flat storage, never of a hash. Scalars, which every rank holds whole, are read
without a gather.

Nodes are marked ``meta["fsdp"]`` = ``"<role>:<bucket>"`` with the roles ``start_gather`` and ``finish_gather``, which is what
the schedule moves. Collectives of the model's own are not touched. :mod:`passes.gradient_sync` does the same for gradients.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from .collectives import finish_gather, start_gather
from .emit import emit
from .graph import derived
from .interface import Interface, Slot
from .layout import REPLICATED
from .ops import ReduceGrad, Unshard, reduce_grads, unshard, unshards
from .sync_plan import Gather


@dataclass
class Bucket:
    """Operators that share a collective.

    Attributes:
        name: the unit's name, numbered where dtypes or groups give a unit several buckets.
        nodes: the ``unshard`` nodes, in the order of flat storage, or the ``reduce_grad`` nodes, in that of the graph.
        shards: their shards.
    """

    name: str
    nodes: list[Node]

    @property
    def shards(self) -> list[Node]:
        return [(Unshard if node.target == unshard else ReduceGrad).of(node).shard for node in self.nodes]


def _named(buckets: dict[tuple[Hashable, ...], list[Node]]) -> list[Bucket]:
    """Buckets by their keys, of which the unit's name is the first."""
    counts: dict[str, int] = {}
    named = []
    for (key_unit, *_), nodes in buckets.items():
        unit = str(key_unit)
        counts[unit] = counts.get(unit, 0) + 1
        suffix = f".{counts[unit] - 1}" if counts[unit] > 1 else ""
        named.append(Bucket((unit or "root") + suffix, nodes))
    return named


def gather_buckets(graph: Graph) -> list[Bucket]:
    """The buckets of a graph's gathers."""
    buckets: dict[tuple[Hashable, ...], list[Node]] = {}
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if node.users and spec.dim != REPLICATED:
            buckets.setdefault((spec.unit, spec.shard.meta["val"].dtype, spec.group), []).append(node)
    for nodes in buckets.values():
        nodes.sort(key=lambda node: Unshard.of(node).offset)
    return _named(buckets)


def reduction_buckets(graph: Graph) -> list[Bucket]:
    """The buckets of a graph's gradient reductions."""
    buckets: dict[tuple[Hashable, ...], list[Node]] = {}
    for node in reduce_grads(graph.nodes):
        spec = ReduceGrad.of(node)
        key = (spec.unit, spec.grad.meta["val"].dtype, spec.grad_dtype, spec.group, spec.replicate_group)
        buckets.setdefault(key, []).append(node)
    return _named(buckets)


def _sink_derived(graph: Graph) -> None:
    """Move views and casts of unshards next to their first reader, so that they do not pull the gather forward."""
    gathers = dict.fromkeys(unshards(graph.nodes))
    for node in reversed(derived(graph, list(gathers))):
        if node not in gathers and node.users:
            min(node.users).prepend(node)


def _drop_trivial(graph: Graph) -> None:
    """Remove unshards that nothing reads, and those of scalars, which are whole already."""
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if spec.dim == REPLICATED:
            node.replace_all_uses_with(spec.shard)
        if not node.users:
            graph.erase_node(node)


def _gather(graph: Graph, bucket: Bucket) -> list[Node]:
    """Gather a bucket ahead of its first reader. Returns the full parameters."""
    specs = [Unshard.of(node) for node in bucket.nodes]
    shapes, dims, group = [spec.shape for spec in specs], [spec.dim for spec in specs], specs[0].group
    shards = bucket.shards
    first_reader = min(reader for node in bucket.nodes for reader in node.users)
    for shard in shards:
        if shard > first_reader:
            # A cast shard: the cast stands where its own unshard stood.
            first_reader.prepend(shard)
    with graph.inserting_before(first_reader):
        started = emit(graph, start_gather, shards, group=group, role=f"start_gather:{bucket.name}")
        return emit(graph, finish_gather, started, shapes=shapes, dims=dims, group=group, role=f"finish_gather:{bucket.name}")


def bucket_gathers(graph: Graph, plan: Sequence[Gather] | None = None, interface: Interface | None = None) -> None:
    """Replace the unshards of a forward or backward graph by one all-gather for each bucket. In place.

    Args:
        graph: the graph.
        plan: what to do about each bucket of :func:`gather_buckets`; None: gather all.
        interface: takes the inputs and outputs that a plan adds.
    """
    _sink_derived(graph)
    for index, bucket in enumerate(gather_buckets(graph)):
        action = plan[index] if plan is not None else Gather.GATHER
        if action is Gather.REUSE:
            assert interface is not None
            fulls = [
                interface.add_input(f"full_{node.args[1]}".replace(".", "_"), node.meta["val"], Slot("full", index, position))
                for position, node in enumerate(bucket.nodes)
            ]
        else:
            fulls = _gather(graph, bucket)
        if action is Gather.KEEP:
            assert interface is not None
            for position, full in enumerate(fulls):
                interface.add_output(full, Slot("full", index, position))
        for node, full in zip(bucket.nodes, fulls, strict=True):
            node.replace_all_uses_with(full)
            graph.erase_node(node)
    _drop_trivial(graph)
