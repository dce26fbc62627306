"""Bucket: one collective for all parameters of a unit that share dtype and group.

Before: an ``unshard`` for each parameter that the graph reads; a ``reduce_grad`` for each gradient.
After:  for each unit, dtype and group one ``all_gather_into_tensor`` just ahead of the unit's first reader, and one
        ``reduce_scatter_tensor`` (HSDP: then one ``all_reduce``) just after the unit's last gradient. Nothing overlaps yet.

In a bucket, parameters stand in the order of flat storage, never of a hash. Scalars, which every rank holds whole, are read
without a gather; their gradients ride in the bucket like all others.

Nodes are marked ``meta["fsdp"]`` = ``"<role>:<bucket>"`` with the roles ``start_gather``, ``finish_gather``, ``start_reduce``,
``all_reduce`` and ``finish_reduce``, which is what the schedule moves. Collectives of the model's own are not touched.
"""

from collections.abc import Hashable

from torch.fx import Graph, Node

from .collectives import Averaging, finish_gather, finish_reduce, start_all_reduce, start_gather, start_reduce_scatter
from .emit import emit
from .graph import derived
from .layout import REPLICATED
from .ops import ReduceGrad, Unshard, reduce_grads, unshards

# Keyed by the unit's name first, then by what else keeps parameters apart.
_Buckets = dict[tuple[Hashable, ...], list[Node]]


def _named(buckets: _Buckets) -> list[tuple[str, list[Node]]]:
    """A name for each bucket: its unit's, numbered where dtypes or groups give a unit several."""
    counts: dict[str, int] = {}
    named = []
    for (key_unit, *_), nodes in buckets.items():
        unit = str(key_unit)
        counts[unit] = counts.get(unit, 0) + 1
        suffix = f".{counts[unit] - 1}" if counts[unit] > 1 else ""
        named.append(((unit or "root") + suffix, nodes))
    return named


def _sink_derived(graph: Graph) -> None:
    """Move views and casts of unshards next to their first reader, so that they do not pull the gather forward."""
    gathers = dict.fromkeys(unshards(graph.nodes))
    for node in reversed(derived(graph, list(gathers))):
        if node not in gathers and node.users:
            min(node.users).prepend(node)


def bucket_gathers(graph: Graph) -> None:
    """Replace the unshards of a forward or backward graph by one all-gather for each bucket. In place."""
    _sink_derived(graph)
    buckets: _Buckets = {}
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if not node.users:
            graph.erase_node(node)
        elif spec.dim == REPLICATED:
            node.replace_all_uses_with(spec.shard)
            graph.erase_node(node)
        else:
            buckets.setdefault((spec.unit, spec.shard.meta["val"].dtype, spec.group), []).append(node)
    for name, nodes in _named(buckets):
        nodes.sort(key=lambda node: Unshard.of(node).offset)
        specs = [Unshard.of(node) for node in nodes]
        shapes, dims = [spec.shape for spec in specs], [spec.dim for spec in specs]
        group = specs[0].group
        shards = [spec.shard for spec in specs]
        first_reader = min(reader for node in nodes for reader in node.users)
        for shard in shards:
            if shard > first_reader:
                # A cast shard: the cast stands where its own unshard stood.
                first_reader.prepend(shard)
        with graph.inserting_before(first_reader):
            started = emit(graph, start_gather, shards, group=group, role=f"start_gather:{name}")
            fulls = emit(graph, finish_gather, started, shapes=shapes, dims=dims, group=group, role=f"finish_gather:{name}")
        for node, full in zip(nodes, fulls, strict=True):
            node.replace_all_uses_with(full)
            graph.erase_node(node)


def bucket_reductions(graph: Graph) -> None:
    """Replace the reduce_grads of a backward graph by one reduction for each bucket. In place."""
    buckets: _Buckets = {}
    for node in reduce_grads(graph.nodes):
        spec = ReduceGrad.of(node)
        key = (spec.unit, spec.grad.meta["val"].dtype, spec.group, spec.replicate_group)
        buckets.setdefault(key, []).append(node)
    for name, nodes in _named(buckets):
        specs = [ReduceGrad.of(node) for node in nodes]
        shapes, dims = [spec.shape for spec in specs], [spec.dim for spec in specs]
        group, replicate_group = specs[0].group, specs[0].replicate_group
        grads = [spec.grad for spec in specs]
        value = grads[0].meta["val"]
        averaging = Averaging.of_groups(group, replicate_group, value.dtype, value.device)
        with graph.inserting_before(max(grads).next):
            reduced = emit(
                graph,
                start_reduce_scatter,
                grads,
                dims=dims,
                group=group,
                averaging=averaging,
                role=f"start_reduce:{name}",
            )
            if replicate_group:
                reduced = emit(
                    graph,
                    start_all_reduce,
                    reduced,
                    replicate_group=replicate_group,
                    averaging=averaging,
                    role=f"all_reduce:{name}",
                )
            shard_grads = emit(
                graph,
                finish_reduce,
                reduced,
                shapes=shapes,
                dims=dims,
                group=group,
                averaging=averaging,
                role=f"finish_reduce:{name}",
            )
        for node, shard_grad in zip(nodes, shard_grads, strict=True):
            for user in list(node.users):
                if user.op != "output":
                    # The cast back to the parameter's dtype belongs to the reduction.
                    user.meta["fsdp"] = f"finish_reduce:{name}"
            node.replace_all_uses_with(shard_grad)
            graph.erase_node(node)
