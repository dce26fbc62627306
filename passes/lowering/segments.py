"""Segments: cut a scheduled graph at its collectives, so that the compiler of kernels sees compute only.

Before: one graph of compute and collectives, in the order that the schedule gave it.
After:  a graph of collectives and calls of *segments*, the stretches of compute between them, each a module of its own.

Nothing that optimises a segment can move a collective: the order is kept by construction. And stretches that are equal but for
the tensors they work on share one module: the layers of a deep model are compiled once, not once each.

What a reduction does ahead of its collective, its copy-in, is a stretch of its own
(:func:`~passes.ir.work.kernel_boundaries`). A collective of the model's own is cut at like any other, and so is a copy between
host and device. Views between two collectives stay in the outer graph, as they are no work; so do lookups of random seeds,
whose index would tell equal layers apart. Constants are made where they are read.

Of an output that is a view Inductor keeps the order of the strides and not the strides, and may have laid out otherwise what it
is of; who reads it was traced with the strides. So a segment gives out no view with gaps, but what it is of, and the outer
graph makes the view.
"""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Node

from ..fx.graph import argument_text, is_collective, is_host_copy, is_view
from ..fx.sizes import known_of_unbacked
from ..fx.torch_internals.core import OpOverload, _make_graph_module, _use_lazy_graph_module, make_contiguous_strides_for
from ..fx.torch_internals.operators import lookup_seed
from ..ir.work import kernel_boundaries

_aten = torch.ops.aten

# Constants: a segment makes its own rather than take one that another segment made.
_CONSTANTS = {
    _aten.arange.start_step,
    _aten.full.default,
    _aten.scalar_tensor.default,
    torch.ops.prims.iota.default,
}


# What reads other memory than that of the elements of its input.
_READ_STORAGE = {
    _aten.as_strided.default,
    _aten.as_strided_.default,
    _aten.as_strided_copy.default,
    _aten.as_strided_scatter.default,
}
# Of what Inductor takes for aligned, in bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Segment:
    """A stretch of compute.

    Attributes:
        graph_module: takes what the stretch reads and returns what is read of it, a tuple.
        key: equal for stretches that do the same with tensors of the same shapes, strides and dtypes.
    """

    graph_module: GraphModule
    key: Hashable


def _stays_outside(node: Node, stretch: dict[Node, None]) -> bool:
    return (node.target == lookup_seed and node.args[0] not in stretch) or _is_communicated(node)


def _is_communicated(node: Node) -> bool:
    """Whether a node is an element of what a collective gives: no input of a segment is a tuple."""
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    return is_collective(source) or _is_communicated(source)


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or (node.target in _CONSTANTS and not node.all_input_nodes)


def _is_alias(node: Node) -> bool:
    """Whether a node's result is memory of its input's, as operators declare it."""
    if node.target is operator.getitem:
        return _is_alias(node.args[0])  # type: ignore[arg-type]
    if node.target == _aten._unsafe_view.default:
        return True
    returns = node.target._schema.returns if isinstance(node.target, OpOverload) else []
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _is_told_by_order(node: Node) -> bool:
    """Whether the order of a tensor's strides says what they are: it has no gaps, and no dimension that may have any stride."""
    value = node.meta["val"]
    if not isinstance(value, Tensor) or not all(isinstance(number, int) for number in (*value.shape, *value.stride())):
        return False
    if value.stride() == make_contiguous_strides_for(value.shape):
        return True
    expected = 1
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size == 1 or stride != expected:
            return False
        expected *= size
    return True


def _stretches(graph: Graph) -> list[dict[Node, None]]:
    """The nodes between boundaries, stretch by stretch, without what stays in the outer graph."""
    stretches: list[dict[Node, None]] = [{}]
    boundaries = kernel_boundaries(graph)
    for node in graph.nodes:
        if node in boundaries:
            stretches.append({})
        if node.op != "call_function" or is_collective(node) or is_host_copy(node):
            continue
        if not (_is_constant(node) or _stays_outside(node, stretches[-1])):
            stretches[-1][node] = None
    for stretch in stretches:
        for node in [node for node in stretch if is_view(node)]:
            # A view between two collectives does not belong to the stretch that it stands in.
            if not any(other in stretch for other in (*node.all_input_nodes, *node.users)):
                del stretch[node]
    return [stretch for stretch in stretches if not all(map(is_view, stretch))]


def _symbols(value: Any) -> set[Any]:
    """The symbols in the sizes of a fake value."""
    if isinstance(value, SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, Tensor):
        return set().union(*map(_symbols, [*value.shape, *value.stride(), value.storage_offset()]))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_symbols, value))
    return set()


@dataclass(frozen=True)
class _SizeOf:
    """A symbol that only sizes of tensors spell out: where the outer graph reads it."""

    tensor: Node
    dim: int


class _Sources:
    """Where the outer graph has the symbols of a graph's sizes.

    Inductor looks a symbol up among the inputs of what it compiles, where it has to stand by itself: ``[2 * s]`` does not tell
    ``s``. So a segment is given each symbol of whatever it holds or reads as an input of its own.
    """

    def __init__(self, graph: Graph):
        self._of: dict[Any, Node | _SizeOf] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, SymInt) and value.node.expr.is_Symbol:
                self._of.setdefault(value.node.expr, node)
        for node in graph.nodes:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    self._of.setdefault(size.node.expr, _SizeOf(node, dim))

    def of(self, nodes: Iterable[Node]) -> dict[Node | _SizeOf, None]:
        """The sources of all symbols in the values of nodes."""
        wanted = set().union(*(_symbols(node.meta.get("val")) for node in nodes))
        return dict.fromkeys(self._of[symbol] for symbol in sorted(wanted, key=str) if symbol in self._of)


class _Builder:
    """Builds the module of one stretch.

    Attributes:
        inputs: what it is given.
        outputs: what it gives out.
        views: what the outer graph makes of what it gives out, and of what there is already, in order.
    """

    def __init__(self, owner: GraphModule, stretch: dict[Node, None], sources: _Sources, read_elsewhere: set[Node]):
        self.owner = owner
        wanted = [node for node in stretch if node in read_elsewhere or any(user not in stretch for user in node.users)]
        self.views, self.outputs = _split_off_views(wanted, stretch)
        self.body = _read_inside(stretch, self.views)
        self.constants: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        for node in self.body:
            for source in node.all_input_nodes:
                if source not in self.body:
                    (self.constants if _is_constant(source) else inputs)[source] = None
        last = next(reversed(stretch))
        symbols = [source for source in sources.of([*self.body, *inputs]) if _node_of(source) < last]
        self.inputs: dict[Node | _SizeOf, None] = {
            source: None for source in [*symbols, *inputs] if _node_of(source) not in self.body
        }

    def build(self, key: Hashable) -> Segment:
        graph = Graph()
        copies: dict[Any, Node] = {}
        for source in self.inputs:
            copies[source] = graph.placeholder(_name_of(source))
            copies[source].meta = {"val": _value_of(source)}
        for node in (*self.constants, *self.body):
            copies[node] = graph.node_copy(node, copies.__getitem__)
        output = graph.output(tuple(copies[node] for node in self.outputs))
        # Exactly the layout that was traced: the readers of an output were traced with it.
        output.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        with _use_lazy_graph_module(True):
            graph_module = _make_graph_module(self.owner, graph)
        known = known_of_unbacked(node.meta.get("val") for node in graph.nodes)
        if known:
            # Inductor generates checks of it. To find a module in its cache, it looks at attributes, not at symbols.
            graph_module.__dict__["known_of_sizes"] = known
        return Segment(graph_module, key)

    def key(self) -> Hashable:
        body = (*self.constants, *self.body)
        place: dict[Any, str] = {node: f"%{index}" for index, node in enumerate((*self.inputs, *body))}
        reads_storage = any(node.target in _READ_STORAGE for node in body)
        inputs = tuple(_describe(_value_of(source), reads_storage) for source in self.inputs)
        calls = tuple((node.target, argument_text((node.args, node.kwargs), place.__getitem__)) for node in body)
        return inputs, calls, tuple(place[node] for node in self.outputs)


def _split_off_views(wanted: list[Node], stretch: dict[Node, None]) -> tuple[list[Node], list[Node]]:
    """The views among what is read of a stretch elsewhere, with those that they are of; and what is left to give out."""
    views: set[Node] = set()
    others: set[Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in stretch or node in views:
            continue
        if _is_alias(node) and not _is_told_by_order(node):
            views.add(node)
            stack += node.all_input_nodes
        else:
            others.add(node)
    return [node for node in stretch if node in views], [node for node in stretch if node in others]


def _read_inside(stretch: dict[Node, None], views: list[Node]) -> dict[Node, None]:
    """The stretch without those views that nothing in it reads."""
    body = dict.fromkeys(stretch)
    for node in reversed(views):
        if not any(user in body for user in node.users):
            del body[node]
    return body


def _node_of(source: Node | _SizeOf) -> Node:
    return source.tensor if isinstance(source, _SizeOf) else source


def _name_of(source: Node | _SizeOf) -> str:
    return f"size_{source.dim}_of_{source.tensor.name}" if isinstance(source, _SizeOf) else source.name


def _value_of(source: Node | _SizeOf) -> Any:
    return source.tensor.meta["val"].shape[source.dim] if isinstance(source, _SizeOf) else source.meta["val"]


def _describe(value: Any, with_offset: bool) -> Hashable:
    """What code depends on of an input. Of where it begins in its memory, that is what it may suppose of addresses."""
    if not isinstance(value, Tensor):
        return str(value)
    offset = value.storage_offset()
    if isinstance(offset, int) and not with_offset:
        # C++ kernels suppose nothing.
        offset = 0 if value.device.type == "cpu" else offset * value.itemsize % _ALIGNMENT
    return str(tuple(value.shape)), str(value.stride()), str(offset), value.dtype, value.device


def cut_into_segments(gm: GraphModule) -> tuple[Graph, dict[str, Segment]]:
    """Cut a scheduled graph at its collectives.

    Args:
        gm: a forward or backward graph after all passes. It is not changed.

    Returns:
        The outer graph, and the segments that it calls, by name, each distinct one once.
    """
    stretches = _stretches(gm.graph)
    stretch_of = {node: stretch for stretch in stretches for node in stretch}
    sources = _Sources(gm.graph)
    builders = _builders(gm, stretches, sources)
    outer = Graph()
    read_outside = {view for builder in builders.values() for view in builder.views}
    copies: dict[Any, Node] = {}
    segments: dict[str, Segment] = {}
    names: dict[Hashable, str] = {}
    for node in gm.graph.nodes:
        if node not in stretch_of:
            if not _is_constant(node) or any(user not in stretch_of or user in read_outside for user in node.users):
                copies[node] = outer.node_copy(node, copies.__getitem__)
        elif node is next(reversed(stretch_of[node])):
            builder = builders[node]
            key = builder.key()
            name = names.setdefault(key, f"segment_{len(names)}")
            if name not in segments:
                segments[name] = builder.build(key)
            for source in builder.inputs:
                if isinstance(source, _SizeOf) and source not in copies:
                    copies[source] = outer.call_function(_aten.sym_size.int, (copies[source.tensor], source.dim))
            call = outer.create_node("call_module", name, tuple(copies[source] for source in builder.inputs))
            for index, result in enumerate(builder.outputs):
                copies[result] = outer.call_function(operator.getitem, (call, index))
                copies[result].meta = dict(result.meta)
            for view in builder.views:
                copies[view] = outer.node_copy(view, copies.__getitem__)
    return outer, segments


def _builders(gm: GraphModule, stretches: list[dict[Node, None]], sources: _Sources) -> dict[Node, _Builder]:
    """The builder of each stretch, by the stretch's last node."""
    read_elsewhere: set[Node] = set()
    builders = {}
    # From the last on: what a stretch reads of the sizes in an earlier one, that one gives out.
    for stretch in reversed(stretches):
        builder = builders[next(reversed(stretch))] = _Builder(gm, stretch, sources, read_elsewhere)
        read_elsewhere.update(map(_node_of, builder.inputs))
    return builders
