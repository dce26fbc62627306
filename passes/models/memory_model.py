"""Memory model: how many bytes live at each node of a scheduled graph.

Storages are counted: a value and all its views are one storage. A storage lives from the node that makes it to the last node
that reads it or a view of it. The input and output of a collective live at least until its wait, and an output of the graph
lives to the end. Writing in place (``copy_``) makes no storage.

Memory of the host is not counted. A value that is copied to the host lives at least until the wait for the copy. If only the
host waits, as for gradients, the value lives until the next such copy starts, as one copy follows the other. A value that is
copied to the device lives from the start of the copy.

Inputs belong to the caller and are not counted, except those that a backward graph is given to free. They live until their
last reader: activations that forward saved and gradients of its outputs (``meta["freed"]``), and gathered parameters that the
call leaves to the graph (``released``). Inputs that are views of one value are one storage, as in the joint graph.

By default, every node counts as a kernel of its own, except that the casts in a reduction's copy-in are part of the copy-in.
Other values that Inductor fuses away are counted, so activations are an upper bound. Gathered parameters, which no fusion
removes, are counted apart.

If kernels are given, a kernel of several nodes holds all that it reads and writes while it runs. It writes over a value that it
is the last to read, if the layout is the same and another kernel of its segment made the value.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from ..collectives.gloo import gather_copies_its_input
from ..collectives.host_copies import copy_to_host, fetch, offload, wait_copy
from ..fx.graph import derived, group_of, is_collective, is_view, presence, readers, starts_collective
from ..fx.sizes import num_bytes, size_value
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of
from ..fx.torch_internals.operators import force_stride_order
from ..ir.ops import unshards
from ..ir.work import MAKES_PARAMETERS, BucketName, Role, bucket, kernel_boundaries, role

_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_cast = torch.ops.prims.convert_element_type.default
_wait = torch.ops._c10d_functional.wait_tensor.default
# Operators that return their input, although their schemas do not say so.
_GIVES_BACK = {
    _wait,
    wait_copy,
    torch.ops.aten._unsafe_view.default,
    force_stride_order,
}


#: A key in ``node.meta`` of a joint graph, and of its forward and backward graphs: the value is a gathered parameter, or
#: computed from one by views and casts.
IS_PARAMETER = "fsdp_is_parameter"
#: A key like ``IS_PARAMETER``: if forward saves the value, it waits for backward on the host
#: (:mod:`passes.transforms.offload_activations`).
IS_OFFLOADED = "fsdp_is_offloaded"
# A key like ``IS_PARAMETER``: the name and the fake value of the node in whose memory a view lies.
_MEMORY = "fsdp_memory"
# A key of inputs that are freed: the input is a gradient that earlier microbatches left to this graph.
_IS_GRADIENT = "fsdp_is_gradient"


@dataclass(frozen=True)
class LiveBytes:
    """The live bytes of a graph.

    Attributes:
        timeline: for each node, all live bytes while it runs, and the part of gathered parameters.
        nodes: the names of the nodes, in the same order.
    """

    timeline: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most bytes that live at once."""
        return max((total for total, _ in self.timeline), default=0)

    @property
    def peak_parameters(self) -> int:
        """The most bytes that live at once of gathered buffers and of parameters that are copied out of them."""
        return max((parameters for _, parameters in self.timeline), default=0)


class Category(Enum):
    """The purpose of memory.

    Attributes:
        PARAMETERS: gathered buffers and parameters that are copied out of them; also those that forward saved for backward.
        ACTIVATIONS: outputs of a graph, and inputs that it frees: activations and their gradients.
        GRADIENTS: full gradients until a reduction has copied them, and results of reductions.
        COMMUNICATION: inputs of collectives, and buffers in flight.
        WORKING: values that come and go within a graph.
    """

    PARAMETERS = "gathered parameters"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    COMMUNICATION = "communication"
    WORKING = "working memory"


@dataclass(frozen=True)
class Lifetime:
    """A storage of a graph, and when it lives in an order of the nodes.

    Attributes:
        num_bytes: its size.
        category: its purpose.
        bucket: the bucket that it works for; None: none.
        first, last: the positions of the first and of the last node during which it lives.
        is_given_out: whether it holds an output of the graph that is no input.
        is_taken: whether it holds an input that the graph frees, other than the gradient of an output.
    """

    num_bytes: Any
    category: Category
    bucket: BucketName | None
    first: int
    last: int
    is_given_out: bool
    is_taken: bool


@dataclass(frozen=True)
class Breakdown:
    """The live bytes of a graph by category.

    Attributes:
        timeline: for each category, its live bytes while each node runs.
        buckets: for each bucket, the live bytes that belong to it while each node runs.
        given_out: for each category, the bytes of the graph's outputs.
        taken: for each category, the bytes of inputs that the graph frees, except gradients of its outputs.
        offloaded: the bytes that wait on the host for another graph.
    """

    timeline: Mapping[Category, Sequence[int]]
    buckets: Mapping[BucketName, Sequence[int]]
    given_out: Mapping[Category, int]
    taken: Mapping[Category, int]
    offloaded: int = 0


@dataclass(eq=False)
class _Storage:
    num_bytes: int
    is_parameter: bool
    bucket: BucketName | None
    maker: Node | None = None
    # True for an older storage that lives on because a padding node does nothing (:func:`passes.fx.graph.presence`).
    is_rest: bool = False


class MemoryModel:
    """The storages of a graph. They do not depend on the order of its nodes, so one model answers for many orders.

    Args:
        graph: the graph.
        unwritten: nodes whose values take no memory (see :func:`passes.models.cost_model.unwritten`).
        kernels: the nodes of each kernel (see :func:`passes.models.cost_model.kernels`). By default, each node is a kernel.
        released: the names of inputs that are gathered parameters which only this graph holds.
    """

    def __init__(
        self,
        graph: Graph,
        unwritten: Collection[Node] = (),
        kernels: Sequence[Sequence[Node]] = (),
        released: Collection[str] = (),
    ):
        self._unwritten = unwritten
        self._released = released
        self._kernels = [kernel for kernel in kernels if len(kernel) > 1]
        self._segments = _segments(graph) if self._kernels else {}
        self._output = graph.output_node()
        self._inputs: dict[str, _Storage] = {}
        self._made: dict[Node, list[_Storage]] = {}
        self._held: dict[Node, tuple[_Storage, ...]] = {}
        self._touched: dict[Node, set[_Storage]] = {}
        self._freed: list[_Storage] = []
        output = graph.output_node()
        for node in graph.nodes:
            self._enter(node)
        for node in graph.nodes:
            if starts_collective(node):
                waits = [user for user in readers(node) if user.target == _wait]
                for end in waits or [output]:
                    self._touched[end] |= self._touched[node]
        self._kept = set(self._touched[output])
        copies = graph.find_nodes(op="call_function", target=copy_to_host)
        for copy, following in itertools.pairwise([*copies, output]):
            self._touched[following] |= set(self._held[copy.args[0]])  # type: ignore[index]

    def _enter(self, node: Node) -> None:
        made = self._made[node] = []
        if node.op == "placeholder":
            if node.meta.get("freed") or node.name in self._released:
                self._held[node] = (self._input(node),)
            else:
                self._held[node] = ()
        elif node.op in ("get_attr", "output"):
            self._held[node] = ()
        elif node.target is operator.getitem:
            held = self._held[node.args[0]]  # type: ignore[index]
            self._held[node] = (held[node.args[1]],) if len(held) > 1 else held  # type: ignore[index]
        elif _returns_its_input(node) or _is_cast_on_the_way(node):
            self._held[node] = self._held[node.args[0]]  # type: ignore[index]
        else:
            value: Any = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else [value]
            # A copy on the host takes no memory of the device.
            lives = node not in self._unwritten and node.target not in (copy_to_host, offload)
            made += [
                _Storage(num_bytes(one) * presence(node) if lives else 0, _is_parameter(node), bucket(node), node)
                for one in values
            ]
            self._held[node] = tuple(made)
            if presence(node) != 1:
                # Padding by no rows does nothing: its result is its input, which lives on.
                for storage in self._held[node.args[0]]:  # type: ignore[index]
                    rest = storage.num_bytes * (1 - presence(node))
                    made.append(_Storage(rest, storage.is_parameter, storage.bucket, storage.maker, is_rest=True))
                self._held[node] = tuple(made)
            if node.target == _all_gather and gather_copies_its_input(group_of(node), value.device):
                made.append(_Storage(num_bytes(value), _is_parameter(node), bucket(node), node))
        self._touched[node] = {storage for source in node.all_input_nodes for storage in self._held[source]} | set(made)

    def _input(self, node: Node) -> _Storage:
        """Return the storage of an input that is freed. Inputs that are views of one value share a storage."""
        name, value = node.meta.get(_MEMORY, (node.name, node.meta["val"]))
        if name not in self._inputs:
            self._inputs[name] = _Storage(num_bytes(value), node.name in self._released, None, node)
            self._freed.append(self._inputs[name])
        return self._inputs[name]

    def _lifetimes(self, order: Sequence[Node]) -> tuple[dict[_Storage, int], dict[_Storage, int]]:
        first, last = dict.fromkeys(self._freed, 0), dict.fromkeys(self._freed, 0)
        begins = {node: index for index, node in enumerate(order)}
        ends = dict(begins)
        for kernel in self._kernels:
            begin, end = min(map(begins.__getitem__, kernel)), max(map(begins.__getitem__, kernel))
            begins.update(dict.fromkeys(kernel, begin))
            ends.update(dict.fromkeys(kernel, end))
        for node in order:
            for storage in self._made[node]:
                first[storage] = ends[node] + 1 if storage.is_rest else begins[node]
            for storage in self._touched[node]:
                last[storage] = max(last.get(storage, 0), ends[node])
        for kernel in self._kernels:
            self._write_in_place(kernel, begins[kernel[0]], ends[kernel[0]], first, last)
        return first, last

    def _write_in_place(
        self, kernel: Sequence[Node], begin: int, end: int, first: Mapping[_Storage, int], last: dict[_Storage, int]
    ) -> None:
        """End the lives of values that a kernel overwrites with its results."""
        members = set(kernel)
        free = [
            storage
            for storage in dict.fromkeys(storage for node in kernel for storage in self._touched[node])
            if last[storage] == end and self._may_be_overwritten(storage, members)
        ]
        for node in kernel:
            for made in self._made[node]:
                old = next((storage for storage in free if made.num_bytes and _is_like(storage.maker, node)), None)
                if old is not None:
                    free.remove(old)
                    last[old] = begin - 1

    def _may_be_overwritten(self, storage: _Storage, kernel: Collection[Node]) -> bool:
        """Return whether a kernel may write over a storage that it reads: one that another kernel of its segment has made."""
        maker, segment = storage.maker, self._segments.get(next(iter(kernel)))
        if maker is None or maker in kernel or self._segments.get(maker) != segment:
            return False
        return maker.op == "call_function" and not is_collective(maker)

    def live_bytes(self, order: Sequence[Node]) -> LiveBytes:
        """Count the live bytes when nodes run in this order, which holds all nodes of the graph."""
        first, last = self._lifetimes(order)
        totals, parameters = [0] * (len(order) + 1), [0] * (len(order) + 1)
        for storage, start in first.items():
            for changes in (totals, parameters) if storage.is_parameter else (totals,):
                changes[start] += storage.num_bytes
                changes[last[storage] + 1] -= storage.num_bytes
        timeline = []
        total = parameter = 0
        for index in range(len(order)):
            total += totals[index]
            parameter += parameters[index]
            timeline.append((total, parameter))
        return LiveBytes(tuple(timeline), tuple(node.name for node in order))

    def lifetimes(self, order: Sequence[Node]) -> list[Lifetime]:
        """List the storages and their lifetimes when nodes run in this order, which holds all nodes of the graph."""
        first, last = self._lifetimes(order)
        categories = self._categories()
        kept, freed = self._kept, set(self._freed)
        return [
            Lifetime(
                storage.num_bytes,
                categories[storage],
                storage.bucket,
                start,
                last[storage],
                is_given_out=storage in kept and storage not in freed,
                is_taken=storage in freed and not storage.maker.name.startswith("tangents"),  # type: ignore[union-attr]
            )
            for storage, start in first.items()
        ]

    def breakdown(self, order: Sequence[Node]) -> Breakdown:
        """Count the same bytes as :meth:`live_bytes`, by category and bucket."""
        timeline = {category: [0] * len(order) for category in Category}
        buckets: dict[BucketName, list[int]] = {}
        given_out, taken = dict.fromkeys(Category, 0), dict.fromkeys(Category, 0)
        for storage in self.lifetimes(order):
            rows = [timeline[storage.category]]
            if storage.bucket is not None:
                rows.append(buckets.setdefault(storage.bucket, [0] * len(order)))
            for row in rows:
                row[storage.first] += storage.num_bytes
                if storage.last + 1 < len(order):
                    row[storage.last + 1] -= storage.num_bytes
            given_out[storage.category] += storage.num_bytes * storage.is_given_out
            taken[storage.category] += storage.num_bytes * storage.is_taken
        for row in (*timeline.values(), *buckets.values()):
            row[:] = itertools.accumulate(row)
        offloaded = sum(num_bytes(node.meta["val"]) for node in self._held if node.target == offload)
        return Breakdown(timeline, buckets, given_out, taken, offloaded)

    def _categories(self) -> dict[_Storage, Category]:
        # Activations stay activations on their way to the host and back.
        kept = self._kept | {storage for node, held in self._held.items() for storage in (held if node.target == fetch else ())}
        kept |= {storage for node, touched in self._touched.items() if node.target == offload for storage in touched}
        reduced = {
            storage
            for node, touched in self._touched.items()
            if role(node) in (Role.START_REDUCE, Role.ACCUMULATE)
            for storage in touched
            if role(storage.maker) is None  # type: ignore[arg-type]
        }
        return {
            storage: _category(storage, is_kept=storage in kept, is_reduced=storage in reduced)
            for storage in (*self._freed, *(storage for made in self._made.values() for storage in made))
        }

    def largest_bucket(self, order: Sequence[Node], index: int) -> BucketName | None:
        """Return the bucket that holds the most bytes at position ``index`` of an order; None if no bucket holds any."""
        first, last = self._lifetimes(order)
        held: dict[BucketName, int] = {}
        for storage, start in first.items():
            if storage.bucket is not None and start <= index <= last[storage]:
                held[storage.bucket] = held.get(storage.bucket, 0) + storage.num_bytes
        return max(held, key=held.__getitem__) if held else None


def _category(storage: _Storage, *, is_kept: bool, is_reduced: bool) -> Category:
    maker = storage.maker
    assert maker is not None
    if storage.is_parameter or maker.meta.get(IS_PARAMETER):
        return Category.PARAMETERS
    done = role(maker)
    if maker.op == "placeholder":
        return Category.GRADIENTS if maker.meta.get(_IS_GRADIENT) else Category.ACTIVATIONS
    if is_reduced or done in (Role.ACCUMULATE, Role.FINISH_REDUCE) or (is_kept and done is not None):
        return Category.GRADIENTS
    if (done is not None and done is not Role.UPDATE) or is_collective(maker):
        return Category.COMMUNICATION
    return Category.ACTIVATIONS if is_kept else Category.WORKING


def live_bytes(graph: Graph) -> LiveBytes:
    """Count the live bytes of a graph in its present order."""
    return MemoryModel(graph).live_bytes(list(graph.nodes))


def mark_memory(graph: Graph) -> None:
    """Mark the gathered parameters in a joint graph, and for each view the node in whose memory it lies.

    A backward graph shows neither for the values that forward saved.
    """
    for node in derived(graph, unshards(graph.nodes)):
        node.meta[IS_PARAMETER] = True
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if isinstance(source, Node) and (
            _returns_its_input(node) or (node.target is operator.getitem and _returns_its_input(source))
        ):
            node.meta[_MEMORY] = source.meta.get(_MEMORY, (source.name, source.meta.get("val")))


def memory_roots(graph: Graph) -> dict[Node, Node]:
    """Find, for each tensor of a graph, the node in whose memory it lies: itself, unless it is a view of another."""
    root_of: dict[Node, Node] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        # Each element of an operator's result has memory of its own, unless the operator returns views.
        is_element = node.target is operator.getitem and root_of.get(source) is source
        root_of[node] = root_of[source] if isinstance(source, Node) and _returns_its_input(node) and not is_element else node
    return {node: root for node, root in root_of.items() if isinstance(node.meta.get("val"), Tensor)}


def mark_taken_gradient(node: Node) -> None:
    """Mark an input of a graph as a gradient of earlier microbatches, which the graph frees."""
    node.meta |= {"freed": True, _IS_GRADIENT: True}


def mark_freed_inputs(graph: Graph, kept: Sequence[Node]) -> None:
    """Mark the inputs of a backward graph whose memory is free after their last reader.

    Args:
        graph: the backward graph, as the partitioner made it.
        kept: the inputs that live on, which are the shards.
    """
    for node in graph.find_nodes(op="placeholder"):
        # A value that waited on the host takes no memory of the device. Inputs of the forward graph keep their names,
        # "primals_*", and belong to the caller.
        if IS_OFFLOADED in node.meta:
            continue
        if node not in kept and not node.name.startswith("primals") and isinstance(node.meta.get("val"), Tensor):
            node.meta["freed"] = True


def _returns_its_input(node: Node) -> bool:
    """Return whether a node's result lies in the memory of its first argument."""
    if node.target in _GIVES_BACK or is_view(node):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return any(value.alias_info is not None for value in schema_of(node.target).returns)


def _is_cast_on_the_way(node: Node) -> bool:
    """Return whether a node is a cast inside of a reduction's copy-in kernel, so that its result takes no memory."""
    return node.target == _cast and role(node) is Role.START_REDUCE and not _is_communicated(node)


def _is_communicated(node: Node) -> bool:
    """Return whether a collective reads a value, or a view of it."""
    return any(is_collective(user) or (is_view(user) and _is_communicated(user)) for user in node.users)


def _is_parameter(node: Node) -> bool:
    return role(node) in MAKES_PARAMETERS or (role(node) is Role.START_GATHER and node.target == _all_gather)


def _segments(graph: Graph) -> dict[Node, int]:
    """Number the segments between boundaries that no kernel crosses. Return the number of each node's segment."""
    boundaries = kernel_boundaries(graph)
    return dict(zip(graph.nodes, itertools.accumulate(node in boundaries for node in graph.nodes), strict=True))


def _is_like(one: Node | None, other: Node) -> bool:
    """Return whether two values have the same layout and dtype."""
    values = [None if node is None else node.meta.get("val") for node in (one, other)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = ((num_bytes(value), value.dtype, tuple(map(size_value, value.stride()))) for value in values)  # type: ignore[union-attr]
    return first == second
