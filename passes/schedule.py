"""Schedule: put communication in flight while the graph computes.

Before: a gather starts and finishes just ahead of its unit's first reader; a reduction, at its unit's last gradient.
After:  *gathers* start ``prefetch`` units ahead: the gather of the next unit starts just before the graph waits for this one's.
        The first starts at the top. *Reductions* start where they did, as soon as their gradients exist; waits sink to the end,
        where the results are needed, except that a reduction's input, the unit's whole gradient, is held until the wait: before
        a unit's reduce-scatter starts, that of ``max_pending_reductions`` units ago is finished, so that never more than so
        many gradients wait. With replicas (HSDP) a reduce-scatter is waited for when the next one is about to start, and its
        all-reduce, which holds a shard only, goes on until the end.

Moves only nodes that :mod:`passes.bucket` marked (and the casts that feed them). Everything else keeps its order.
"""

import operator

from torch.fx import Graph, Node

from .graph import bucket, role


def _blocks(graph: Graph, wanted: str) -> list[list[Node]]:
    """The nodes of one role, grouped by bucket, in graph order."""
    blocks: dict[str, list[Node]] = {}
    for node in graph.nodes:
        if role(node) == wanted:
            blocks.setdefault(bucket(node), []).append(node)
    return list(blocks.values())


def _with_sources(nodes: list[Node]) -> list[Node]:
    """``nodes`` and all they are computed from, in graph order, without placeholders."""
    found: set[Node] = set()
    stack = list(nodes)
    while stack:
        node = stack.pop()
        if node.op != "placeholder" and node not in found:
            found.add(node)
            stack.extend(node.all_input_nodes)
    return sorted(found)


def _move_before(anchor: Node, nodes: list[Node]) -> None:
    for node in nodes:
        if node is not anchor:
            anchor.prepend(node)


def schedule_gathers(graph: Graph, prefetch: int = 1) -> None:
    """Start each bucket's gather ``prefetch`` buckets ahead of its first reader. In place."""
    finishes = _blocks(graph, "finish_gather")
    finishes.sort(key=operator.itemgetter(0))
    starts = {bucket(block[0]): block for block in _blocks(graph, "start_gather")}
    first_compute = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    for position, finish in enumerate(finishes):
        start = _with_sources(starts[bucket(finish[0])])
        anchor = first_compute if position == 0 else finishes[max(position - prefetch, 0)][0]
        if anchor not in start:
            _move_before(anchor, start)


def schedule_reductions(graph: Graph, max_pending_reductions: int = 2) -> None:
    """Let reductions run while the graph computes, and finish them late. In place."""
    starts = _blocks(graph, "start_reduce")
    all_reduces = {bucket(block[0]): block for block in _blocks(graph, "all_reduce")}
    finishes = {bucket(block[0]): block for block in _blocks(graph, "finish_reduce")}
    output = graph.output_node()
    for position, start in enumerate(starts):
        name = bucket(start[0])
        following = position + (1 if name in all_reduces else max_pending_reductions)
        anchor = starts[following][0] if following < len(starts) else output
        if name in all_reduces:
            _move_before(anchor, all_reduces[name])
            _move_before(output, finishes[name])
        else:
            _move_before(anchor, finishes.get(name, []))
