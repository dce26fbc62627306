"""Schedule: put communication in flight while the graph computes.

Before: a gather starts and finishes just before its unit's first reader; a reduction, at its unit's last gradient.
After:  *gathers* start one unit early: the next unit's just before the graph waits for this unit's.
        A unit with a prefetch list of its own (:class:`Prefetch`) starts the gathers of its list instead, in the list's order.
        If such a unit gathers nothing itself, they start where the graph first computes with its parameters or their gradients.
        A gather that nothing else starts begins where the graph waits for it; the graph's first gather, at the top.
        The copy of shards on the host starts where the graph waits for the previous copy, so that the shards are there when
        their gather starts. The first two copies start at the top. So do gathers of node shards.
        *Reductions* start as soon as the kernel that makes their last gradient has run. Waits sink to the end, where the
        results are needed. But a reduction holds its input, the unit's whole gradient, until the wait. So before a unit's
        gradients are copied in, the reduce-scatter of ``max_pending_reductions`` units before is finished: never more than so
        many inputs are held.
        An all-reduce over replicas (HSDP), which holds a shard only, goes on until the end. If its result is copied to the host
        or updates parameters, it goes on until one unit later.
        Copies to the host start where reductions finish. Updates run there, too, but after the wait of any gather that reads
        the storage which they write.

If a unit has several pieces (:mod:`passes.auto.large_parameters`), those that are read next to each other start together. The
limit counts units.

Leaves alone the order of all nodes but those that :mod:`passes.transforms.bucket` and :mod:`passes.transforms.gradient_sync`
marked, and the casts that feed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..fx.graph import derived, is_collective, is_view, last_element, readers, with_sources
from ..ir.ops import ReduceGrad, Unshard, reduce_grads, reshard, reshard_rounded, unshards
from ..ir.storage import overlap
from ..ir.work import BucketName, Role, nodes_of, role
from ..models.cost_model import is_fusible
from .bucket import Buckets


def _move_before(anchor: Node, nodes: list[Node]) -> None:
    for node in nodes:
        if node is not anchor:
            anchor.prepend(node)


@dataclass(frozen=True)
class Prefetch:
    """A unit's own prefetch list, in one graph.

    Attributes:
        unit: the names of the unit's buckets.
        uses: the nodes that read the unit's parameters or make its gradients.
        targets: the names of the buckets whose gathers start.
    """

    unit: tuple[str, ...]
    uses: tuple[Node, ...]
    targets: tuple[str, ...]


def find_prefetches(graph: Graph, buckets: Buckets, lists: Sequence[tuple[str, Sequence[str]]]) -> list[Prefetch]:
    """Express a plan's prefetch lists in nodes and buckets of a graph. Call this before bucketing consumes the operators."""
    if not lists:
        return []
    names: dict[str, list[str]] = {}
    for bucket in buckets.gathers:
        names.setdefault(bucket.unit, []).extend(bucket.name.unit_buckets)
    return [
        Prefetch(
            tuple(names.get(unit, ())),
            tuple(_uses(graph, unit)),
            tuple(name for target in targets for name in names.get(target, ())),
        )
        for unit, targets in lists
    ]


def _uses(graph: Graph, unit: str) -> list[Node]:
    """Return the nodes that compute with a unit's parameters, or compute their gradients."""
    fulls = derived(graph, [node for node in unshards(graph.nodes) if Unshard.of(node).unit == unit])
    readers = [reader for full in fulls for reader in full.users if reader not in fulls]
    specs = map(ReduceGrad.of, reduce_grads(graph.nodes))
    gradients = [spec.grad for spec in specs if spec.unit == unit]
    reshards = (reshard, reshard_rounded)
    return [node for node in [*readers, *gradients] if node.op == "call_function" and node.target not in reshards]


def _unit_buckets(name: BucketName) -> tuple[str, ...]:
    return name.unit_buckets


def schedule_gathers(graph: Graph, prefetches: Sequence[Prefetch] = ()) -> None:
    """Start gathers early, so that they run while the graph computes. In place.

    Args:
        graph: the graph.
        prefetches: the units with a prefetch list of their own, from :func:`find_prefetches`.
    """
    starts = nodes_of(graph, Role.START_GATHER)
    waits = {name: nodes[0] for name, nodes in nodes_of(graph, Role.FINISH_GATHER).items()}
    if not waits:
        return
    order = list(waits)
    runs = [list(run) for _, run in itertools.groupby(order, _unit_buckets)]
    issues = {waits[run[0]]: [*run, *following] for run, following in zip(runs, [*runs[1:], []], strict=True)}
    for prefetch in prefetches:
        own, targets = (
            [piece for name in names for piece in order if name in piece.unit_buckets]
            for names in (prefetch.unit, prefetch.targets)
        )
        for name in own:
            issues[waits[name]] = [*own, *targets]
        if not own and prefetch.uses:
            issues.setdefault(min(prefetch.uses), []).extend(targets)
    issues.setdefault(next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr")), []).insert(0, order[0])
    started: set[BucketName] = set()
    for anchor in sorted(issues):
        for name in issues[anchor]:
            if name in starts and name not in started:
                started.add(name)
                start = with_sources(starts[name])
                if anchor not in start:
                    _move_before(anchor, start)
    _schedule_copies(graph)


def _schedule_copies(graph: Graph) -> None:
    """Start copies of shards from the host, or from other nodes, each where the gather of the previous copy starts.

    By then, the previous copy has arrived, so the bus is free. Those of a unit's pieces start together, as their gathers do.
    """
    copies = nodes_of(graph, Role.COPY_TO_DEVICE) | nodes_of(graph, Role.GATHER_NODE)
    starts = nodes_of(graph, Role.START_GATHER)
    anchor = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for _, run in itertools.groupby((name for name in starts if name in copies), _unit_buckets):
        names = list(run)
        for name in names:
            copy = with_sources(copies[name])
            if anchor not in copy:
                _move_before(anchor, copy)
        anchor = starts[names[0]][0]


def default_max_pending_reductions(*, replicated: bool) -> int:
    """Return how many reduce-scatters are in flight by default.

    With two, one runs while the next gradient is computed. With replicas, the all-reduce runs then, so one is enough.
    """
    return 1 if replicated else 2


def _move_behind_kernel(start: list[Node], gradients: set[Node]) -> None:
    """Start a reduction after the fused kernel that produces its last gradient.

    A unit's backward often ends with the sum that is the gradient of its input. If the reduction started before this sum, the
    sum would be a kernel of its own.
    """

    def starts_after(node: Node) -> bool:
        """Return whether the reduction starts after ``node``: part of the kernel, or a node that moves later anyway."""
        is_small = is_view(node) or is_fusible(node)
        is_end = role(node) in (Role.FINISH_REDUCE, Role.ALL_REDUCE, Role.UPDATE, Role.COPY_TO_HOST)
        return is_end or (is_small and not role(node) and node not in gradients)

    following = start[-1].next
    while starts_after(following):
        following = last_element(following).next
    _move_before(following, start)


def _start_of_later_unit(starts: Mapping[BucketName, list[Node]], name: BucketName, distance: int) -> Node | None:
    """Return where the reduction of the ``distance``-th unit after a bucket's unit starts; None if fewer units follow."""
    units: set[tuple[str, ...]] = set()
    for later in itertools.islice(starts, list(starts).index(name) + 1, None):
        if later.unit_buckets != name.unit_buckets:
            units.add(later.unit_buckets)
        if len(units) == distance:
            return starts[later][0]
    return None


def schedule_reductions(graph: Graph, max_pending_reductions: int | None = None) -> None:
    """Finish reductions late, so that they run while the graph computes. In place.

    Args:
        graph: the graph.
        max_pending_reductions: the most reduce-scatters in flight; None: :func:`default_max_pending_reductions`.
    """
    starts = nodes_of(graph, Role.START_REDUCE)
    all_reduces = nodes_of(graph, Role.ALL_REDUCE)
    finishes = nodes_of(graph, Role.FINISH_REDUCE)
    # The nodes that consume reduced gradients.
    ends = nodes_of(graph, Role.COPY_TO_HOST) | nodes_of(graph, Role.UPDATE)
    output = graph.output_node()
    gradients = {source for start in starts.values() for node in start for source in node.all_input_nodes}
    for start in starts.values():
        _move_behind_kernel(start, gradients)
    for name in starts:
        pending = max_pending_reductions or default_max_pending_reductions(replicated=name in all_reduces)
        anchor = _start_of_later_unit(starts, name, pending) or output
        last = [*finishes.get(name, []), *ends.get(name, [])]
        if name in all_reduces:
            _move_before(anchor, all_reduces[name])
            # Not at the end: a copy to the host is to run while the graph computes, and an update is to free gradients.
            later = _start_of_later_unit(starts, name, pending + 1) if name in ends else None
            _move_before(later or output, last)
        else:
            _move_before(anchor, last)
    _order_updates(graph)


def _order_updates(graph: Graph) -> None:
    """Move updates after all readers of the storage that they write. A gather reads until its wait."""
    updates = nodes_of(graph, Role.UPDATE)
    if not updates:
        return
    placeholders = graph.find_nodes(op="placeholder")
    for nodes in updates.values():
        written = {source for node in nodes for source in node.all_input_nodes if source.op == "placeholder"}
        last = nodes[0]
        for shard in placeholders:
            if shard not in written and any(overlap(shard, other) for other in written):
                last = max([last, *_last_reads(shard)])
        if last is not nodes[0]:
            for node in reversed(nodes):
                last.append(node)


def _last_reads(value: Node) -> list[Node]:
    """Return the nodes that read a value or a view of it, and the waits of the collectives among these nodes."""
    found = []
    for user in value.users:
        found.append(user)
        if is_view(user):
            found += _last_reads(user)
        elif is_collective(user):
            found += readers(user)
    return found
