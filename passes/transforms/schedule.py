"""Schedule: put communication in flight while the graph computes.

Before: a gather starts and finishes just ahead of its unit's first reader; a reduction, at its unit's last gradient.
After:  *gathers* start one unit ahead: the next unit's just before the graph waits for this unit's. A unit with a list of its
        own (:class:`Prefetch`) starts those of its list instead, in the list's order; if it gathers nothing itself, where the
        graph first computes with its parameters, or computes their gradients. A gather without a start starts where it is
        waited for, and the graph's first gather at the top. Shards that are kept on the host begin to be copied to the device
        where the copy before theirs is waited for, so that they are there when their gather starts; the first two at the top.
        *Reductions* start where they did, as soon as the kernel that makes their last gradient has run; waits sink to the end,
        where the results are needed, except that a reduction's input, the unit's whole gradient, is held until the wait: before
        a unit's gradients are copied in, the reduce-scatter of ``max_pending_reductions`` units ago is finished, so that never
        more than so many inputs are held. An all-reduce over replicas (HSDP), which holds a shard only, goes on until the end;
        or, if its result is copied to the host or updates parameters, until one unit later. Copies to the host start where
        reductions finish, and updates run there; but no update ahead of the end of a gather that reads what it writes.

Where a unit has several pieces (:mod:`passes.auto.large_parameters`), those that are read next to each other start together,
and the limit counts units.

Leaves alone the order of everything but the nodes that :mod:`passes.transforms.bucket` and
:mod:`passes.transforms.gradient_sync` marked, and the casts that feed them.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..fx.graph import derived, is_collective, is_view, readers, with_sources
from ..ir.ops import ReduceGrad, Unshard, reduce_grads, reshard, reshard_rounded, unshards
from ..ir.storage import overlap
from ..ir.work import BucketName, Role, nodes_of, role
from ..models.cost_model import is_fusible
from .bucket import gather_buckets


def _move_before(anchor: Node, nodes: list[Node]) -> None:
    for node in nodes:
        if node is not anchor:
            anchor.prepend(node)


@dataclass(frozen=True)
class Prefetch:
    """A unit's own list, in one graph.

    Attributes:
        unit: the unit's buckets.
        uses: nodes that read its parameters or make its gradients.
        targets: the buckets to start.
    """

    unit: tuple[str, ...]
    uses: tuple[Node, ...]
    targets: tuple[str, ...]


def find_prefetches(graph: Graph, lists: Sequence[tuple[str, Sequence[str]]]) -> list[Prefetch]:
    """The lists of a plan, in nodes and buckets of a graph. To be asked before bucketing consumes the operators."""
    if not lists:
        return []
    buckets: dict[str, list[str]] = {}
    for gathered in gather_buckets(graph):
        buckets.setdefault(gathered.unit, []).extend(gathered.name.unit_buckets)
    return [
        Prefetch(
            tuple(buckets.get(unit, ())),
            tuple(_uses(graph, unit)),
            tuple(name for target in targets for name in buckets.get(target, ())),
        )
        for unit, targets in lists
    ]


def _uses(graph: Graph, unit: str) -> list[Node]:
    """The nodes that compute with a unit's parameters, or compute their gradients."""
    fulls = derived(graph, [node for node in unshards(graph.nodes) if Unshard.of(node).unit == unit])
    readers = [reader for full in fulls for reader in full.users if reader not in fulls]
    specs = map(ReduceGrad.of, reduce_grads(graph.nodes))
    gradients = [spec.grad for spec in specs if spec.unit == unit]
    reshards = (reshard, reshard_rounded)
    return [node for node in [*readers, *gradients] if node.op == "call_function" and node.target not in reshards]


def _unit_buckets(name: BucketName) -> tuple[str, ...]:
    return name.unit_buckets


def schedule_gathers(graph: Graph, prefetches: Sequence[Prefetch] = ()) -> None:
    """Start gathers ahead of their readers. In place.

    Args:
        graph: the graph.
        prefetches: the lists of units that have one, from :func:`find_prefetches`.
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
    """Let shards that are kept on the host be copied to the device in the order of the gathers, each where the gather of the
    copy before it starts: that has arrived, so the bus is free."""
    copies = nodes_of(graph, Role.COPY_TO_DEVICE)
    starts = nodes_of(graph, Role.START_GATHER)
    anchor = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for name, start in starts.items():
        if name in copies:
            copy = with_sources(copies[name])
            if anchor not in copy:
                _move_before(anchor, copy)
            anchor = start[0]


def default_max_pending_reductions(*, replicated: bool) -> int:
    """How many reduce-scatters are in flight by default.

    Two let one run beside the computation of the next gradient. With replicas, the all-reduce goes on in its place.
    """
    return 1 if replicated else 2


def _move_behind_kernel(start: list[Node], gradients: set[Node]) -> None:
    """Let a reduction start behind what one kernel computes together with the last of its gradients.

    A unit's backward often ends with the sum that is the gradient of its input. Left behind the start, it would be a kernel of
    its own.
    """

    def is_behind(node: Node) -> bool:
        """Whether the reduction starts behind ``node``, too; what finishes reductions is about to move on."""
        is_small = is_view(node) or is_fusible(node)
        is_end = role(node) in (Role.FINISH_REDUCE, Role.ALL_REDUCE, Role.UPDATE, Role.COPY_TO_HOST)
        return is_end or (is_small and not role(node) and node not in gradients)

    following = start[-1].next
    while is_behind(following):
        following = following.next
    _move_before(following, start)


def _start_of_later_unit(starts: Mapping[BucketName, list[Node]], name: BucketName, distance: int) -> Node | None:
    """Where so many units after that of a bucket begin to be reduced; None: that many do not follow."""
    units: set[tuple[str, ...]] = set()
    for later in itertools.islice(starts, list(starts).index(name) + 1, None):
        if later.unit_buckets != name.unit_buckets:
            units.add(later.unit_buckets)
        if len(units) == distance:
            return starts[later][0]
    return None


def schedule_reductions(graph: Graph, max_pending_reductions: int | None = None) -> None:
    """Let reductions run while the graph computes, and finish them late. In place.

    Args:
        graph: the graph.
        max_pending_reductions: how many reduce-scatters may be in flight; None: the default.
    """
    starts = nodes_of(graph, Role.START_REDUCE)
    all_reduces = nodes_of(graph, Role.ALL_REDUCE)
    finishes = nodes_of(graph, Role.FINISH_REDUCE)
    # What consumes the gradients.
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
            # A copy to the host is to run while the graph computes, too, and an update is to free the gradients.
            later = _start_of_later_unit(starts, name, pending + 1) if name in ends else None
            _move_before(later or output, last)
        else:
            _move_before(anchor, last)
    _order_updates(graph)


def _order_updates(graph: Graph) -> None:
    """Let updates stand behind whatever reads what they write: gathers until they have ended."""
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
    """The nodes that read a value, or a view of it, and the waits for the collectives among them."""
    found = []
    for user in value.users:
        found.append(user)
        if is_view(user):
            found += _last_reads(user)
        elif is_collective(user):
            found += readers(user)
    return found
