"""Memory model: how many bytes live at each node of a scheduled graph.

Storages are counted: a value and all views of it are one. A storage lives from the node that makes it to the last node that
reads it or a view of it. The input and output of a collective live at least until its wait, an output of the graph to the end.
Writing in place (``copy_``) makes no storage.

What is on the host is not counted. What is copied there lives at least until the wait for the copy; where only the host waits,
as for gradients, until the next such copy begins, since one follows the other. What is copied to the device lives from the
copy's begin on.

Inputs are the caller's and not counted, but for those that a backward graph is handed to free (activations that forward saved,
and gradients of its outputs: ``meta["freed"]``; gathered parameters that a call leaves to it), which live until their last
reader.

Inputs that are views of one value are one storage, as the joint graph had them.

Unless kernels are given, every node counts as a kernel of its own, except that the casts in a reduction's copy-in are part of
it. Other values that Inductor fuses away are counted all the same, so activations are an upper bound. Gathered parameters,
which no fusion removes, are counted apart. A kernel of several nodes holds all that it reads and writes while it runs, but
writes over a value of the same layout that it is the last to read, if its segment made that.
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

from ..collectives.gloo import copies_what_it_gathers
from ..collectives.host_copies import copy_to_host, fetch, offload, wait_copy
from ..fx.graph import derived, group_of, is_collective, is_view, presence, readers, starts_collective
from ..fx.sizes import num_bytes, size_value
from ..fx.torch_internals.core import OpOverload
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


#: In ``node.meta`` of a joint graph, and of what the partitioner makes of it: the value is a gathered parameter, or made of one
#: by views and casts.
IS_PARAMETER = "fsdp_is_parameter"
#: There, too: if forward saves the value, it waits for backward on the host (:mod:`passes.transforms.offload_activations`).
IS_OFFLOADED = "fsdp_is_offloaded"
# There, too: the name and the fake value of the node in whose memory a view lies.
_MEMORY = "fsdp_memory"
# Of inputs that are freed: a gradient that waited for this graph.
_IS_GRADIENT = "fsdp_is_gradient"


@dataclass(frozen=True)
class LiveBytes:
    """The live bytes of a graph.

    Attributes:
        timeline: for each node: all live bytes while it runs, and those of gathered parameters among them.
        nodes: names of the nodes.
    """

    timeline: tuple[tuple[int, int], ...]
    nodes: tuple[str, ...]

    @property
    def peak(self) -> int:
        """The most bytes that live at once."""
        return max((total for total, _ in self.timeline), default=0)

    @property
    def peak_parameters(self) -> int:
        """The most bytes of gathered parameters that live at once: gathered buffers, and what is cut out of them."""
        return max((parameters for _, parameters in self.timeline), default=0)


class Category(Enum):
    """What memory is there for.

    Attributes:
        PARAMETERS: gathered buffers, and what is cut out of them; also those that forward saved for backward.
        ACTIVATIONS: what a graph of the model gives out, or was given to free: activations and gradients of them.
        GRADIENTS: full gradients until a reduction has copied them, and what reductions leave.
        COMMUNICATION: what collectives read, and what is on its way.
        WORKING: values that come and go within a graph.
    """

    PARAMETERS = "gathered parameters"
    ACTIVATIONS = "activations"
    GRADIENTS = "gradients"
    COMMUNICATION = "communication"
    WORKING = "working memory"


@dataclass(frozen=True)
class Lifetime:
    """How long a storage of a graph lives.

    Attributes:
        num_bytes: what it holds.
        category: what for.
        bucket: that it works for; None: none.
        first, last: the positions of the nodes, in an order, while which it lives.
        is_given_out, is_taken: whether the graph gives it out, or was given it to free, other than as gradients of its outputs.
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
        buckets: by bucket, as far as memory belongs to one.
        given_out: by category, what the graph's outputs hold.
        taken: by category, what others leave to the graph to free, but for gradients of its outputs.
        offloaded: what waits on the host for another graph.
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
    # Of another one, after the kernel that may have taken its place.
    is_rest: bool = False


class MemoryModel:
    """The storages of a graph. They do not depend on the order of its nodes, so that many orders can be asked about.

    Args:
        graph: the graph.
        unwritten: nodes whose values never live (see :func:`passes.models.cost_model.unwritten`).
        kernels: the nodes of each kernel (see :func:`passes.models.cost_model.kernels`); by default each is one.
        released: inputs, by name, that are gathered parameters which nobody else holds.
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
        elif _gives_back(node) or _is_cast_on_the_way(node):
            self._held[node] = self._held[node.args[0]]  # type: ignore[index]
        else:
            value: Any = node.meta.get("val")
            values = value if isinstance(value, (list, tuple)) else [value]
            # What is on the host takes no memory of the device.
            lives = node not in self._unwritten and node.target not in (copy_to_host, offload)
            made += [
                _Storage(num_bytes(one) * presence(node) if lives else 0, _is_parameter(node), bucket(node), node)
                for one in values
            ]
            self._held[node] = tuple(made)
            if presence(node) != 1:
                # Where it does nothing, its result is its input, which lives on.
                for storage in self._held[node.args[0]]:  # type: ignore[index]
                    rest = storage.num_bytes * (1 - presence(node))
                    made.append(_Storage(rest, storage.is_parameter, storage.bucket, storage.maker, is_rest=True))
                self._held[node] = tuple(made)
            if node.target == _all_gather and copies_what_it_gathers(group_of(node), value.device):
                made.append(_Storage(num_bytes(value), _is_parameter(node), bucket(node), node))
        self._touched[node] = {storage for source in node.all_input_nodes for storage in self._held[source]} | set(made)

    def _input(self, node: Node) -> _Storage:
        """The storage of an input that is freed; that of an earlier one, if both are views of it."""
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
        """End the lives of values that a kernel writes others over."""
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
        """Whether a kernel may write over what it reads: its segment has made it, in another kernel."""
        maker, segment = storage.maker, self._segments.get(next(iter(kernel)))
        if maker is None or maker in kernel or self._segments.get(maker) != segment:
            return False
        return maker.op == "call_function" and not is_collective(maker)

    def live_bytes(self, order: Sequence[Node]) -> LiveBytes:
        """The live bytes when the nodes run in this order, which holds all of them."""
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
        """The storages when the nodes run in this order, which holds all of them."""
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
        """What :meth:`live_bytes` counts, by category and bucket."""
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
        # An activation is one on its way to the host and back, too.
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
        """The bucket that holds most at a position of an order; None if none holds anything."""
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
    """The live bytes of a graph in the order that it has."""
    return MemoryModel(graph).live_bytes(list(graph.nodes))


def mark_memory(graph: Graph) -> None:
    """Mark in a joint graph what backward graphs do not tell of what forward saved: what is a gathered parameter, and whose
    memory a view shows."""
    for node in derived(graph, unshards(graph.nodes)):
        node.meta[IS_PARAMETER] = True
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        if isinstance(source, Node) and (_gives_back(node) or (node.target is operator.getitem and _gives_back(source))):
            node.meta[_MEMORY] = source.meta.get(_MEMORY, (source.name, source.meta.get("val")))


def memory_roots(graph: Graph) -> dict[Node, Node]:
    """For each tensor of a graph, the node in whose memory it lies: itself, unless it is a view of another."""
    root_of: dict[Node, Node] = {}
    for node in graph.nodes:
        source: Any = node.args[0] if node.args else None
        # Of what an operator gives, each is memory of its own, unless the operator gives views.
        is_element = node.target is operator.getitem and root_of.get(source) is source
        root_of[node] = root_of[source] if isinstance(source, Node) and _gives_back(node) and not is_element else node
    return {node: root for node, root in root_of.items() if isinstance(node.meta.get("val"), Tensor)}


def mark_taken_gradient(node: Node) -> None:
    """Mark an input of a graph as a gradient that waited for it, and that it frees."""
    node.meta |= {"freed": True, _IS_GRADIENT: True}


def mark_freed_inputs(graph: Graph, kept: Sequence[Node]) -> None:
    """Mark the inputs of a backward graph whose memory is free after their last reader.

    Args:
        graph: the graph, as the partitioner made it.
        kept: inputs that live on: the shards.
    """
    for node in graph.find_nodes(op="placeholder"):
        # Inputs of the forward graph keep the names that they had there. What waited on the host takes no memory of the device.
        if IS_OFFLOADED in node.meta:
            continue
        if node not in kept and not node.name.startswith("primals") and isinstance(node.meta.get("val"), Tensor):
            node.meta["freed"] = True


def _gives_back(node: Node) -> bool:
    """Whether a node's result is its first argument's memory."""
    if node.target in _GIVES_BACK or is_view(node):
        return True
    if not isinstance(node.target, OpOverload):
        return False
    return any(value.alias_info is not None for value in node.target._schema.returns)


def _is_cast_on_the_way(node: Node) -> bool:
    """Whether a node casts for the kernel that copies gradients in, so that its result never lives."""
    return node.target == _cast and role(node) is Role.START_REDUCE and not _is_communicated(node)


def _is_communicated(node: Node) -> bool:
    """Whether a collective reads a value, or a view of it."""
    return any(is_collective(user) or (is_view(user) and _is_communicated(user)) for user in node.users)


def _is_parameter(node: Node) -> bool:
    return role(node) in MAKES_PARAMETERS or (role(node) is Role.START_GATHER and node.target == _all_gather)


def _segments(graph: Graph) -> dict[Node, int]:
    """For each node the number of its stretch between boundaries that no kernel reaches across."""
    boundaries = kernel_boundaries(graph)
    return dict(zip(graph.nodes, itertools.accumulate(node in boundaries for node in graph.nodes), strict=True))


def _is_like(one: Node | None, other: Node) -> bool:
    """Whether two values have the same layout and dtype."""
    values = [None if node is None else node.meta.get("val") for node in (one, other)]
    if not all(isinstance(value, Tensor) for value in values):
        return False
    first, second = ((num_bytes(value), value.dtype, tuple(map(size_value, value.stride()))) for value in values)  # type: ignore[union-attr]
    return first == second
