"""Offload activations: copy saved tensors to the host until backward, where a policy says so.

``offload_activations``, in the joint graph, speaks to the partitioner, and to the second half:

Before: operators whose results go to the host are ``MUST_CPU_OFFLOAD`` or ``PREFER_CPU_OFFLOAD``.
After:  they are ``MUST_SAVE``, and marked if that is possible; views of them are ``MUST_RECOMPUTE``, so that what is saved is
        the memory, whole and once.

``offload_saved``, after the partitioner, in the forward and the backward graph, does the same for a memory budget: of what the
partitioner has saved of stretches of forward, it marks what a policy says.

``copy_activations``, in the forward and the backward graph:

Before: forward gives out marked values, which backward takes.
After:  in forward, the copy of each to pinned memory begins behind the kernel that is the last to read it (``offload``), and is
        given out in its place. It is waited for (``wait_offload``) ahead of the copies of the second group after it, or at the
        end: until then the value lives. In backward, which takes the copies, those of a group begin to be copied back
        (``fetch``) where the group before is waited for, the first ones at the top; each is waited for (``wait_copy``) ahead of
        the kernel that is the first to read it. A group is what lies between the places where a graph turns from one unit's
        parameters to another's: of layers that are units, a layer. So in each direction no more than two layers' copies are on
        their way.

Leaves alone gathered parameters, whatever a policy says of them, and what is made of them by views and casts; memory of inputs
and outputs of the model, which others hold; values whose device has the host's memory; and every value that nobody marked.
"""

from __future__ import annotations

import functools
import itertools
import operator
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from ..collectives.host_copies import copies_to, fetch, offload, wait_copy, wait_offload
from ..fx.emit import emit
from ..fx.graph import argument_text
from ..fx.sizes import num_bytes
from ..ir.ops import ReduceGrad, reduce_grads
from ..models.cost_model import is_free, kernels
from ..models.memory_model import IS_OFFLOADED, IS_PARAMETER, memory_roots
from .recompute_stretches import units_of_parameters

#: The key in ``node.meta`` of the stretch that a node is of, by number, and of its place there.
_STRETCH = "fsdp_stretch"
#: Of what nobody has named: less is not worth two copies.
_LEAST_BYTES = 1 << 16
_OFFLOADS = (CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_CPU_OFFLOAD)


def offload_activations(graph: Graph) -> None:
    """Mark what goes to the host, and tag it for the partitioner, in a joint (or an inference) graph. In place."""
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
            # Of one region: no boundary of two, at which the partitioner would save.
            node.meta["ac_graph_id"] = root.meta["ac_graph_id"]


def mark_stretches(stretches: Sequence[Sequence[Node]]) -> None:
    """Note on the nodes of a joint graph which stretch they are of, for :func:`offload_saved`. In place."""
    for number, stretch in enumerate(stretches):
        for place, node in enumerate(stretch):
            node.meta[_STRETCH] = (number, place)


class SavedActivation(NamedTuple):
    """Something that a forward graph saves, and that can wait on the host.

    Attributes:
        node: in the forward graph.
        stretch: that it is of, by number.
        place: of the operator that computes it, in the stretch.
    """

    node: Node
    stretch: int
    place: int


def offload_saved(
    forward: Graph, backward: Graph, num_forward_outputs: int, waits: Callable[[int, int], bool]
) -> list[SavedActivation]:
    """Mark what goes to the host, in a partitioned forward and its backward graph. In place.

    Args:
        forward, backward: the graphs.
        num_forward_outputs: how many of forward's outputs are the model's: the first ones.
        waits: whether something that is saved waits on the host, by the number of its stretch and its place there.

    Returns:
        What can wait, in the order of forward's outputs, whether it does or not.
    """
    outputs: Any = forward.output_node().args[0]
    root_of = memory_roots(forward)
    # What is saved twice, or given to the caller as well, would not be freed.
    holds = Counter(root_of[node] for node in dict.fromkeys(outputs) if isinstance(node, Node) and node in root_of)
    found = [
        SavedActivation(node, *node.meta[_STRETCH])
        for node in dict.fromkeys(outputs[num_forward_outputs:])
        if isinstance(node, Node) and _STRETCH in node.meta and _can_wait(node, root_of) and holds[root_of[node]] == 1
    ]
    taken = {node.name: node for node in backward.find_nodes(op="placeholder")}
    for node, stretch, place in found:
        if waits(stretch, place):
            for end in (node, taken[node.name]):
                end.meta[IS_OFFLOADED] = True
    return found


def _can_wait(node: Node, root_of: Mapping[Node, Node]) -> bool:
    root = root_of.get(node)
    if root is None or root.op != "call_function" or IS_PARAMETER in root.meta:
        return False
    return copies_to(node.meta["val"].device) and num_bytes(node.meta["val"]) >= _LEAST_BYTES


def will_offload(graph: Graph) -> bool:
    """Whether :func:`offload_activations` will find something to mark in a joint graph."""
    tagged = [node for node in graph.nodes if node.meta.get("recompute") in _OFFLOADS]
    root_of = memory_roots(graph) if tagged else {}
    return bool(tagged) and not _offloadable(graph, root_of).isdisjoint(root_of.get(node) for node in tagged)


def _offloadable(graph: Graph, root_of: Mapping[Node, Node]) -> set[Node]:
    """The nodes that make what can wait on the host."""
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
    """A number for each node, equal for those that compute the same: the partitioner makes one of them."""
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
    """Copy what is marked, in a forward graph to the host, in a backward graph back. In place."""
    if is_backward:
        _fetch(graph)
    else:
        _offload(graph)


def offloaded_outputs(graph: Graph) -> list[int]:
    """The outputs of a forward graph that are on the host, by index."""
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
            # A compiler of kernels takes no tuples apart that it has not made.
            while last.next.target is operator.getitem:
                last = last.next
            behind.setdefault(last, []).append(node)
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
    """For each node that makes memory, the nodes that read it, but for views."""
    found: dict[Node, list[Node]] = {}
    root_of = memory_roots(graph)
    for node, root in root_of.items():
        found.setdefault(root, []).extend(user for user in node.users if user.op != "output" and not is_free(user))
    return {node: found[root] for node, root in root_of.items()}


def _groups(graph: Graph, place: Mapping[Node, int]) -> Callable[[int], int]:
    """A function that gives the group of a place in a graph: how many turns from one unit to another are ahead of it."""
    unit_of = units_of_parameters(graph)
    uses = [(place[user], unit) for made, unit in unit_of.items() for user in made.users if user not in unit_of]
    uses += [(place[spec.grad], spec.unit) for spec in map(ReduceGrad.of, reduce_grads(graph.nodes))]
    turns = [next(run)[0] for _, run in itertools.groupby(sorted(uses), key=lambda use: use[1])]
    return functools.partial(bisect_right, turns)
