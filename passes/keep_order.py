"""Keep order: hold Inductor's scheduler to the order of the graph.

Inductor fuses kernels and then sorts them anew. Two things can undo a schedule there, and each has its remedy:

- A kernel that fuses work from before a wait with work from behind it must run behind it. If somebody before the wait needs
  the first part, the wait is dragged forward and hides nothing. :class:`KeepWaits` refuses such a fusion; it allows all
  others, also across a wait where nobody is kept waiting (the sum that ends a block with the norm that starts the next).
- A fused kernel is placed where its *first* operation stood. :func:`keep_order` places it where its *last* one stood, or just
  ahead of its first reader, so that collectives keep their places among the kernels.

Sources of the hooks: ``InductorChoices`` in torch/_inductor/choices.py, ``_post_fusion_custom_pass`` in
torch/_inductor/config.py.
"""

from __future__ import annotations

import heapq
import math
from typing import Any

from torch._inductor import ir
from torch._inductor.choices import InductorChoices
from torch._inductor.custom_graph_pass import get_hash_for_files

from .compat import CustomSchedulerPass


class KeepWaits(InductorChoices):
    """Inductor's own heuristics, and no fusion that drags a wait forward."""

    @staticmethod
    def can_fuse(scheduler: Any, node1: Any, node2: Any, shared_data_score: int) -> bool:
        return InductorChoices.can_fuse(scheduler, node1, node2, shared_data_score) and not _drags_a_wait(
            _waits(scheduler), [*node1.get_nodes(), *node2.get_nodes()]
        )


class _Waits:
    """The waits of a graph, numbered from 1 in its order, and where each node stands to them.

    Attributes:
        before: for each node, by name: the last wait that stands before it.
        needed: the last wait that it depends on, however indirectly.
    """

    def __init__(self, nodes: list[Any]):
        self.before: dict[str, int] = {}
        self.needed: dict[str, int] = {}
        needed_of_buffer: dict[str, int] = {}
        waits = 0
        for node in nodes:
            name = node.get_name()
            self.before[name] = waits
            needed = max((needed_of_buffer.get(dep.name, 0) for dep in node.unmet_dependencies), default=0)
            if isinstance(node.node, ir._WaitKernel):
                waits += 1
                needed = waits
            self.needed[name] = needed
            needed_of_buffer.update(dict.fromkeys(node.get_buffer_names(), needed))


def _waits(scheduler: Any) -> _Waits:
    # Counted once, at the first question, when nothing is fused yet.
    if not hasattr(scheduler, "_fsdp_waits"):
        scheduler._fsdp_waits = _Waits(scheduler.nodes)
    return scheduler._fsdp_waits


def _drags_a_wait(waits: _Waits, parts: list[Any]) -> bool:
    """Whether a kernel of these parts has a reader that stands before a wait which the kernel must run behind."""
    fused = {part.get_name() for part in parts}
    must_run_behind = max(waits.needed.get(name, 0) for name in fused)
    readers = {user.node.get_name() for part in parts for buffer in part.get_outputs() for user in buffer.users}
    return any(waits.before.get(name, math.inf) < must_run_behind for name in readers - fused)


def keep_order(nodes: list[Any]) -> list[Any]:
    """Sort Inductor's scheduler nodes by dependencies first, then by the place that the graph gave them."""
    producer = {buffer: node for node in nodes for buffer in node.get_buffer_names()}
    sources = {
        node: dict.fromkeys(
            producer[dep.name] for dep in sorted(node.unmet_dependencies, key=lambda dep: dep.name) if dep.name in producer
        )
        for node in nodes
    }
    readers: dict[Any, list[Any]] = {node: [] for node in nodes}
    for node in nodes:
        sources[node].pop(node, None)
        for source in sources[node]:
            readers[source].append(node)

    # The scheduler hands the nodes over in an order that respects dependencies, so readers come later.
    place: dict[Any, float] = {}
    for node in reversed(nodes):
        place[node] = min([node.max_order, *(place[reader] for reader in readers[node])])
    position = {node: index for index, node in enumerate(nodes)}

    waiting_for = {node: len(sources[node]) for node in nodes}
    ready = [(place[node], position[node], node) for node in nodes if not waiting_for[node]]
    heapq.heapify(ready)
    ordered = []
    while ready:
        _, _, node = heapq.heappop(ready)
        ordered.append(node)
        for reader in readers[node]:
            waiting_for[reader] -= 1
            if not waiting_for[reader]:
                heapq.heappush(ready, (place[reader], position[reader], reader))
    assert len(ordered) == len(nodes), "Inductor's kernels depend on each other in a circle"
    return ordered


class KeepOrder(CustomSchedulerPass):
    """:func:`keep_order` in the form that Inductor's config takes, and that its cache can key."""

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return keep_order(nodes)

    def uuid(self) -> Any:
        # Inductor's cache knows nothing of KeepWaits; both change with this file.
        return get_hash_for_files((__file__,))
