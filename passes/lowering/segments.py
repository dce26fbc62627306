"""Segments: cut a scheduled graph at its collectives, so that the compiler of kernels sees only compute.

Before: one graph of compute and collectives, in the order that the schedule gave it.
After:  a graph of collectives and calls of *segments*, the regions of compute between them, each a module of its own.

No optimisation of a segment can move a collective: the order is kept by construction. Regions that differ only in their
tensors share one module: the layers of a deep model are compiled once, not once each.

The copy-in of a reduction is a region of its own (:func:`~passes.ir.work.kernel_boundaries`). The graph is also cut at the
model's own collectives, and at copies between host and device. Views between two collectives stay in the outer graph, as they
are no work. Lookups of random seeds stay there, too: their index would make equal layers differ. Each segment makes the
constants that it reads.

If an output is a view, Inductor keeps only the order of its strides, and may lay out its base differently. Readers of the view
were traced with the exact strides. So a segment returns the base of a view with gaps, and the outer graph makes the view.
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
from ..fx.torch_internals.objects import schema_of
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


# Operators that read memory outside of the elements of their input.
_READ_STORAGE = {
    _aten.as_strided.default,
    _aten.as_strided_.default,
    _aten.as_strided_copy.default,
    _aten.as_strided_scatter.default,
}
# The alignment of memory that Inductor's code relies on, in bytes.
_ALIGNMENT = 16


@dataclass(frozen=True)
class Segment:
    """The module of a region of compute.

    Attributes:
        graph_module: takes the values that the region reads, and returns a tuple of those that are read outside of it.
        key: equal for regions that do the same with tensors of the same shapes, strides and dtypes.
    """

    graph_module: GraphModule
    key: Hashable


def _stays_outside(node: Node, region: dict[Node, None]) -> bool:
    return (node.target == lookup_seed and node.args[0] not in region) or _is_communicated(node)


def _is_communicated(node: Node) -> bool:
    """Return whether a node is an element of a collective's result. It stays outside, as no segment takes a tuple."""
    if node.target is not operator.getitem:
        return False
    source: Any = node.args[0]
    return is_collective(source) or _is_communicated(source)


def _is_constant(node: Node) -> bool:
    return node.op == "get_attr" or (node.target in _CONSTANTS and not node.all_input_nodes)


def _is_alias(node: Node) -> bool:
    """Return whether a node's result has its input's memory, by the schema of the operator."""
    if node.target is operator.getitem:
        return _is_alias(node.args[0])  # type: ignore[arg-type]
    if node.target == _aten._unsafe_view.default:
        return True
    returns = schema_of(node.target).returns if isinstance(node.target, OpOverload) else []
    return any(result.alias_info is not None and not result.alias_info.is_write for result in returns)


def _order_determines_strides(node: Node) -> bool:
    """Return whether the order of a tensor's strides determines them: no gaps, and no dimension that may have any stride."""
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


def _compute_regions(graph: Graph) -> list[dict[Node, None]]:
    """Return the nodes between boundaries, region by region, without those that stay in the outer graph."""
    regions: list[dict[Node, None]] = [{}]
    boundaries = kernel_boundaries(graph)
    for node in graph.nodes:
        if node in boundaries:
            regions.append({})
        if node.op != "call_function" or is_collective(node) or is_host_copy(node):
            continue
        if not (_is_constant(node) or _stays_outside(node, regions[-1])):
            regions[-1][node] = None
    for region in regions:
        for node in [node for node in region if is_view(node)]:
            # A view that nothing in the region makes or reads belongs to the outer graph.
            if not any(other in region for other in (*node.all_input_nodes, *node.users)):
                del region[node]
    return [region for region in regions if not all(map(is_view, region))]


def _symbols(value: Any) -> set[Any]:
    """Return the symbols in the sizes, strides and storage offset of a fake value."""
    if isinstance(value, SymInt):
        return set(value.node.expr.free_symbols)
    if isinstance(value, Tensor):
        return set().union(*map(_symbols, [*value.shape, *value.stride(), value.storage_offset()]))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_symbols, value))
    return set()


@dataclass(frozen=True)
class _SizeSource:
    """The source of a symbol that is no input by itself: the dimension of a tensor from which the outer graph reads it."""

    tensor: Node
    dim: int


class _SymbolSources:
    """The nodes and dimensions from which the outer graph gets the symbols of sizes.

    Inductor looks for each symbol ``s`` among the inputs of a segment, and does not derive it from a shape such as ``[2 * s]``.
    So a segment takes each symbol of the values that it holds or reads as an input of its own.
    """

    def __init__(self, graph: Graph):
        self._of: dict[Any, Node | _SizeSource] = {}
        for node in graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, SymInt) and value.node.expr.is_Symbol:
                self._of.setdefault(value.node.expr, node)
        for node in graph.nodes:
            value = node.meta.get("val")
            for dim, size in enumerate(value.shape if isinstance(value, Tensor) else ()):
                if isinstance(size, SymInt) and size.node.expr.is_Symbol:
                    self._of.setdefault(size.node.expr, _SizeSource(node, dim))

    def of(self, nodes: Iterable[Node]) -> dict[Node | _SizeSource, None]:
        """Return the sources of all symbols in the values of ``nodes``."""
        wanted = set().union(*(_symbols(node.meta.get("val")) for node in nodes))
        return dict.fromkeys(self._of[symbol] for symbol in sorted(wanted, key=str) if symbol in self._of)


class _Builder:
    """The builder of one region's segment.

    Attributes:
        inputs: the nodes and sizes that the segment takes.
        outputs: the nodes that the segment returns.
        views: the nodes that the outer graph makes as views, of ``outputs`` and of values outside, in order.
    """

    def __init__(self, owner: GraphModule, region: dict[Node, None], sources: _SymbolSources, read_elsewhere: set[Node]):
        self.owner = owner
        wanted = [node for node in region if node in read_elsewhere or any(user not in region for user in node.users)]
        self.views, self.outputs = _split_off_views(wanted, region)
        self.body = _read_inside(region, self.views)
        self.constants: dict[Node, None] = {}
        inputs: dict[Node, None] = {}
        for node in self.body:
            for source in node.all_input_nodes:
                if source not in self.body:
                    (self.constants if _is_constant(source) else inputs)[source] = None
        last = next(reversed(region))
        symbols = [source for source in sources.of([*self.body, *inputs]) if _node_of(source) < last]
        self.inputs: dict[Node | _SizeSource, None] = {
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
        # Keep the exact layouts of outputs, as their readers were traced with these.
        output.meta["user_visible_output_idxs"] = list(range(len(self.outputs)))
        with _use_lazy_graph_module(True):
            graph_module = _make_graph_module(self.owner, graph)
        known = known_of_unbacked(node.meta.get("val") for node in graph.nodes)
        if known:
            # Inductor generates checks of these facts. Its cache compares attributes of modules, not what symbols stand for.
            graph_module.__dict__["known_of_sizes"] = known
        return Segment(graph_module, key)

    def key(self) -> Hashable:
        body = (*self.constants, *self.body)
        place: dict[Any, str] = {node: f"%{index}" for index, node in enumerate((*self.inputs, *body))}
        reads_storage = any(node.target in _READ_STORAGE for node in body)
        inputs = tuple(_describe(_value_of(source), reads_storage) for source in self.inputs)
        calls = tuple((node.target, argument_text((node.args, node.kwargs), place.__getitem__)) for node in body)
        return inputs, calls, tuple(place[node] for node in self.outputs)


def _split_off_views(wanted: list[Node], region: dict[Node, None]) -> tuple[list[Node], list[Node]]:
    """Divide ``wanted``, the nodes of a region that are read elsewhere, between the outer graph and the segment.

    Returns:
        The views that the outer graph is to make, with views that they are made of; and the nodes that the segment returns,
        which are the bases of these views and the rest of ``wanted``.
    """
    views: set[Node] = set()
    others: set[Node] = set()
    stack = list(wanted)
    while stack:
        node = stack.pop()
        if node not in region or node in views:
            continue
        if _is_alias(node) and not _order_determines_strides(node):
            views.add(node)
            stack += node.all_input_nodes
        else:
            others.add(node)
    return [node for node in region if node in views], [node for node in region if node in others]


def _read_inside(region: dict[Node, None], views: list[Node]) -> dict[Node, None]:
    """Return the region without those of ``views`` that nothing in the region reads."""
    body = dict.fromkeys(region)
    for node in reversed(views):
        if not any(user in body for user in node.users):
            del body[node]
    return body


def _node_of(source: Node | _SizeSource) -> Node:
    return source.tensor if isinstance(source, _SizeSource) else source


def _name_of(source: Node | _SizeSource) -> str:
    return f"size_{source.dim}_of_{source.tensor.name}" if isinstance(source, _SizeSource) else source.name


def _value_of(source: Node | _SizeSource) -> Any:
    return source.tensor.meta["val"].shape[source.dim] if isinstance(source, _SizeSource) else source.meta["val"]


def _describe(value: Any, with_offset: bool) -> Hashable:
    """Return the properties of an input that generated code specialises on.

    These include the alignment of the storage offset, or with ``with_offset`` the offset itself.
    """
    if not isinstance(value, Tensor):
        return str(value)
    offset = value.storage_offset()
    if isinstance(offset, int) and not with_offset:
        # C++ kernels do not rely on alignment.
        offset = 0 if value.device.type == "cpu" else offset * value.itemsize % _ALIGNMENT
    return str(tuple(value.shape)), str(value.stride()), str(offset), value.dtype, value.device


def cut_into_segments(gm: GraphModule) -> tuple[Graph, dict[str, Segment]]:
    """Cut a scheduled graph at its collectives.

    Args:
        gm: a forward or backward graph after all passes. It is not changed.

    Returns:
        The outer graph, and the distinct segments that it calls, by name.
    """
    regions = _compute_regions(gm.graph)
    stretch_of = {node: region for region in regions for node in region}
    sources = _SymbolSources(gm.graph)
    builders = _builders(gm, regions, sources)
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
                if isinstance(source, _SizeSource) and source not in copies:
                    copies[source] = outer.call_function(_aten.sym_size.int, (copies[source.tensor], source.dim))
            call = outer.create_node("call_module", name, tuple(copies[source] for source in builder.inputs))
            for index, result in enumerate(builder.outputs):
                copies[result] = outer.call_function(operator.getitem, (call, index))
                copies[result].meta = dict(result.meta)
            for view in builder.views:
                copies[view] = outer.node_copy(view, copies.__getitem__)
    return outer, segments


def _builders(gm: GraphModule, regions: list[dict[Node, None]], sources: _SymbolSources) -> dict[Node, _Builder]:
    """Make a builder for each region, by the region's last node."""
    read_elsewhere: set[Node] = set()
    builders = {}
    # From the last on: if a region reads a size of a tensor in an earlier one, the earlier one has to return the tensor.
    for region in reversed(regions):
        builder = builders[next(reversed(region))] = _Builder(gm, region, sources, read_elsewhere)
        read_elsewhere.update(map(_node_of, builder.inputs))
    return builders
