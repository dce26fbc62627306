"""Offload activations: copy saved tensors to the host until backward, where a policy says so.

``offload_activations``, in the joint graph, tells the partitioner and ``copy_activations`` what to do:

Before: operators whose results go to the host are ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``.
After:  they are ``MUST_SAVE``, and marked if their memory can be offloaded. Views of marked memory are ``MUST_RECOMPUTE``, so
        that the memory is saved whole and once.

``offload_saved``, after the partitioner, in the forward and the backward graph, serves a memory budget. Of the tensors that
regions of forward save, it marks those that the budget's policy sends to the host.

``copy_activations``, in the forward and the backward graph:

Before: marked values are outputs of forward and inputs of backward.
After:  in forward, the copy of each value to pinned memory (``offload``) starts after the last kernel that reads the value. The
        copy is the output instead. Forward waits for it (``wait_offload``) before the copies of the second group after it, or
        at the end; until then the value lives.
        In backward, which takes the copies, a group's copies back (``fetch``) start where the group before is waited for, the
        first group's at the top. Each is waited for (``wait_copy``) before the first kernel that reads it.
        A group lies between two places where a graph turns from one unit's parameters to another's. If layers are units, it
        is a layer. So at most two layers' copies are in flight in each direction.

Leaves alone gathered parameters, with their views and casts, whatever a policy says; memory of the model's inputs and outputs,
which others hold; values on a device that uses the host's memory; and values without a mark.
"""

from __future__ import annotations

import functools
import itertools
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..collectives.host_copies import copies_to, fetch, offload, wait_copy, wait_offload
from ..fx.emit import emit
from ..fx.graph import argument_text, last_element
from ..fx.sizes import num_bytes
from ..ir.ops import ReduceGrad, reduce_grads
from ..models.cost_model import is_free, kernels
from ..models.memory_model import IS_OFFLOADED, IS_PARAMETER, memory_roots
from .recompute_regions import units_of_parameters

#: The key in ``node.meta`` of a node's place in forward: the number of its region, and its index in the region.
_REGION = "fsdp_region"
#: The bytes of the smallest tensor that a budget sends to the host. A smaller one is not worth two copies.
_LEAST_BYTES = 1 << 16
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def offload_activations(graph: Graph) -> None:
    """Mark values that go to the host, and tag them for the partitioner, in a joint (or an inference) graph. In place."""
    tagged = [node for node in graph.nodes if node.meta.get("recompute") in _OFFLOADS]
    if not tagged:
        return
    root_of = memory_roots(graph)
    offloadable = _offloadable(graph, root_of)
    offloaded = offloadable.intersection(root_of.get(node) for node in tagged)
    for node in tagged:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for node, root in root_of.items():
        if root not in offloaded:
            continue
        node.meta[IS_OFFLOADED] = True
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE if node is root else CheckpointPolicy.MUST_RECOMPUTE
        if "ac_graph_id" in root.meta:
            # The same region as its memory: at a boundary of two regions, the partitioner would save the view.
            node.meta["ac_graph_id"] = root.meta["ac_graph_id"]


def mark_regions(regions: Sequence[Sequence[Node]]) -> None:
    """Record the region and place of each node of a joint graph, for :func:`offload_saved`. In place."""
    for number, region in enumerate(regions):
        for place, node in enumerate(region):
            node.meta[_REGION] = (number, place)


class SavedActivation(NamedTuple):
    """A saved tensor that can wait on the host.

    Attributes:
        node: its node in the forward graph.
        region: the number of the region that computes it.
        place: the index in the region of the operator that computes it.
    """

    node: Node
    region: int
    place: int


def offload_saved(
    forward: Graph, backward: Graph, num_forward_outputs: int, waits: Callable[[int, int], bool]
) -> list[SavedActivation]:
    """Mark saved tensors that go to the host, in a partitioned forward graph and its backward graph. In place.

    Args:
        forward, backward: the graphs.
        num_forward_outputs: the number of the model's outputs, which are forward's first ones.
        waits: returns whether a saved tensor waits on the host, from the number of its region and its place there.

    Returns:
        The saved tensors that can wait, whether they do or not, in the order of forward's outputs.
    """
    outputs: Any = forward.output_node().args[0]
    root_of = memory_roots(forward)
    # Memory that is saved twice, or is an output of the model as well, would not be freed.
    holds = Counter(root_of[node] for node in dict.fromkeys(outputs) if isinstance(node, Node) and node in root_of)
    found = [
        SavedActivation(node, *node.meta[_REGION])
        for node in dict.fromkeys(outputs[num_forward_outputs:])
        if isinstance(node, Node) and _REGION in node.meta and _can_wait(node, root_of) and holds[root_of[node]] == 1
    ]
    taken = {node.name: node for node in backward.find_nodes(op="placeholder")}
    for node, region, place in found:
        if waits(region, place):
            for end in (node, taken[node.name]):
                end.meta[IS_OFFLOADED] = True
    return found


def _can_wait(node: Node, root_of: Mapping[Node, Node]) -> bool:
    root = root_of.get(node)
    if root is None or root.op != "call_function" or IS_PARAMETER in root.meta:
        return False
    return copies_to(node.meta["val"].device) and num_bytes(node.meta["val"]) >= _LEAST_BYTES


def will_offload(graph: Graph) -> bool:
    """Return whether :func:`offload_activations` will find something to mark in a joint graph."""
    tagged = [node for node in graph.nodes if node.meta.get("recompute") in _OFFLOADS]
    root_of = memory_roots(graph) if tagged else {}
    return bool(tagged) and not _offloadable(graph, root_of).isdisjoint(root_of.get(node) for node in tagged)


def _offloadable(graph: Graph, root_of: Mapping[Node, Node]) -> set[Node]:
    """Return the nodes whose memory can wait on the host."""
    number_of = _numbers(graph)
    held = {number_of[root_of[node]] for node in graph.output_node().all_input_nodes if node in root_of}
    of_backward = _made_of_tangents(graph)
    return {
        root
        for root in root_of.values()
        if root.op == "call_function"
        and root not in of_backward
        and IS_PARAMETER not in root.meta
        and number_of[root] not in held
        and copies_to(root.meta["val"].device)
    }


def _numbers(graph: Graph) -> dict[Node, int]:
    """Number the nodes; those that compute the same have the same number, as the partitioner merges them."""
    number_of: dict[Node, int] = {}
    seen: dict[Hashable, int] = {}
    for node in graph.nodes:
        is_call = node.op == "call_function"
        text = argument_text((node.args, node.kwargs), lambda source: f"%{number_of[source]}") if is_call else node.name
        number_of[node] = seen.setdefault((node.target, text), len(seen))
    return number_of


def _made_of_tangents(graph: Graph) -> set[Node]:
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and node.name.startswith("tangents")
        if is_tangent or any(source in found for source in node.all_input_nodes):
            found.add(node)
    return found


def copy_activations(graph: Graph, *, is_backward: bool) -> None:
    """Copy marked values: in a forward graph to the host, in a backward graph back. In place."""
    if is_backward:
        _fetch(graph)
    else:
        _offload(graph)


def offloaded_outputs(graph: Graph) -> list[int]:
    """Return the indices of the outputs of a forward graph that are on the host."""
    outputs: Any = graph.output_node().args[0]
    return [index for index, node in enumerate(outputs) if isinstance(node, Node) and node.target == wait_offload]


def _offload(graph: Graph) -> None:
    outputs: Any = graph.output_node().args[0]
    place = {node: index for index, node in enumerate(graph.nodes)}
    last_of_kernel = {node: kernel[-1] for kernel in kernels(graph) for node in kernel}
    readers = _readers(graph)
    behind: dict[Node, list[Node]] = {}
    for node in dict.fromkeys(outputs):
        if isinstance(node, Node) and node.op == "call_function" and IS_OFFLOADED in node.meta:
            last = max([node, *(last_of_kernel.get(reader, reader) for reader in readers[node])], key=place.__getitem__)
            last = max(last, last_of_kernel.get(last, last), key=place.__getitem__)
            behind.setdefault(last_element(last), []).append(node)
    group_at = _groups(graph, place)
    on_their_way: dict[int, list[tuple[Node, Node]]] = {}
    copies: dict[Node, Node] = {}

    def wait(upto: int) -> None:
        for group in [group for group in on_their_way if group <= upto]:
            for copy, value in on_their_way.pop(group):
                copies[value] = emit(graph, wait_offload, copy, value)

    for anchor in sorted(behind, key=place.__getitem__):
        group = group_at(place[anchor])
        with graph.inserting_before(anchor.next):
            wait(group - 2)
            for value in behind[anchor]:
                on_their_way.setdefault(group, []).append((emit(graph, offload, value), value))
    with graph.inserting_before(graph.output_node()):
        wait(max(on_their_way, default=0))
    graph.output_node().args = (type(outputs)(copies.get(value, value) for value in outputs),)


def _fetch(graph: Graph) -> None:
    place = {node: index for index, node in enumerate(graph.nodes)}
    first_of_kernel = {node: kernel[0] for kernel in kernels(graph) for node in kernel}
    top = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    readers = _readers(graph)
    ahead: dict[Node, list[Node]] = {}
    device_of: dict[Node, str] = {}
    for node in graph.find_nodes(op="placeholder"):
        if IS_OFFLOADED not in node.meta:
            continue
        device_of[node] = str(node.meta["val"].device)
        node.meta["val"] = offload(node.meta["val"])
        if node.users:
            first = [*node.users, *(first_of_kernel.get(reader, reader) for reader in readers[node])]
            ahead.setdefault(min(first, key=place.__getitem__), []).append(node)
    group_at = _groups(graph, place)
    anchors = sorted(ahead, key=place.__getitem__)
    begin = top
    for _, group in itertools.groupby(anchors, key=lambda one: group_at(place[one])):
        waits = []
        for anchor, node in [(one, node) for one in group for node in ahead[one]]:
            users = list(node.users)
            with graph.inserting_before(begin):
                copy = emit(graph, fetch, node, device=device_of[node])
            with graph.inserting_before(anchor):
                waits.append(emit(graph, wait_copy, copy))
            for user in users:
                user.replace_input_with(node, waits[-1])
        begin = waits[0]


def _readers(graph: Graph) -> dict[Node, list[Node]]:
    """Map each node to the nodes that read its memory, without views."""
    found: dict[Node, list[Node]] = {}
    root_of = memory_roots(graph)
    for node, root in root_of.items():
        found.setdefault(root, []).extend(user for user in node.users if user.op != "output" and not is_free(user))
    return {node: found[root] for node, root in root_of.items()}


def _groups(graph: Graph, place: Mapping[Node, int]) -> Callable[[int], int]:
    """Return a function from a place in the graph to its group: the number of turns from unit to unit up to that place."""
    unit_of = units_of_parameters(graph)
    uses = [(place[user], unit) for made, unit in unit_of.items() for user in made.users if user not in unit_of]
    uses += [(place[spec.grad], spec.unit) for spec in map(ReduceGrad.of, reduce_grads(graph.nodes))]
    turns = [next(run)[0] for _, run in itertools.groupby(sorted(uses), key=lambda use: use[1])]
    return functools.partial(bisect_right, turns)
