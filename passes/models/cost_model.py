"""Cost model: how long each node of a graph takes, from its flops and the bytes that it moves.

- *Products* (matrix products, convolutions, attention) take the longer of flops / rate of their dtype and bytes / memory rate.
  Attention has another rate and takes some time for each score. Causal attention takes half of both (``attention.py``).
- *Fusible* nodes between two others are one kernel: pointwise operators, reductions over elements, and operators that Inductor
  generates with them. The kernel reads each outside value once, and writes each value with outside readers once. If the
  hardware has a time for pointwise operations, and that time is longer, it counts instead.
- *Other operators* are one kernel each, which reads its inputs and writes its outputs.
- Views, waits and inputs take no time.
- *Transfers* run beside compute, for the duration of :func:`transfer_ns`. A collective costs compute its launch and the time by
  which it slows compute down. A copy between host and device costs its launch alone.
- The host's time counts where nothing hides it, for each segment and each call of a graph that communicates.

Times are whole nanoseconds. Their sums do not depend on the order, so equal schedules have equal times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import SymFloat, SymInt, Tensor
from torch.fx import Graph, Node
from torch.utils.flop_counter import flop_registry

from ..collectives.functional import group_ranks, group_size
from ..collectives.host_copies import copy_to_device, copy_to_host, fetch, offload, wait_copy, wait_offload
from ..fx.graph import group_of, is_fused_product, is_host_copy, is_view, presence, starts_collective
from ..fx.sizes import num_bytes, shape_value, smaller
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of
from ..fx.torch_internals.operators import force_stride_order
from ..ir.work import kernel_boundaries
from .attention import computed_part, is_attention, scores
from .group_layout import GroupLayout
from .hardware import Hardware, dtype_name, sent_bytes

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional
_wait = _c10d.wait_tensor.default

# Operators that torch's registry of flop formulas lacks, and the operators for other devices whose formulas they use.
_LIKE = {
    _aten._scaled_dot_product_flash_attention_for_cpu: _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_flash_attention_for_cpu_backward: _aten._scaled_dot_product_flash_attention_backward,
}
#: The operators that start a copy between host and device, with its direction.
COPIES = {
    copy_to_device: "to_device",
    fetch: "to_device",
    copy_to_host: "to_host",
    offload: "to_host",
}
# Operators that Inductor fuses into its kernels, although they are not tagged as pointwise.
_FUSIBLE = {
    _aten._softmax,
    _aten._log_softmax,
    _aten.arange,
    _aten.cat,
    _aten.constant_pad_nd,
    _aten.copy_,
    _aten.embedding,
    _aten.full,
    _aten.index,
    _aten.native_layer_norm,
    torch.ops.prims.iota,
}
_MOVES_NOTHING = {
    _wait,
    wait_copy,
    wait_offload,
    force_stride_order,
}


@dataclass(frozen=True)
class Demand:
    """The work of a node on the computing side.

    Attributes:
        launches: the number of kernels and collectives that it starts.
        moved_bytes: the bytes that it reads and writes.
        flops: the flops of a product; else 0.
        dtype: the dtype that a product computes in; else empty.
        is_attention: whether it is fused attention, which has a rate of its own.
        computed_part: the part of the flops and scores that is computed: half for causal attention.
        scores: the scores of attention, including masked ones; else 0.
        operations: the number of pointwise operations on elements.
        segments: the number of segments that begin with it, which the host calls.
        graphs: the number of graphs that end with it, if they communicate.
    """

    launches: Any = 0
    moved_bytes: Any = 0
    flops: Any = 0
    dtype: str = ""
    is_attention: bool = False
    computed_part: float = 1.0
    scores: Any = 0
    operations: Any = 0
    segments: int = 0
    graphs: int = 0

    def computing_s(self, hardware: Hardware) -> float:
        """Return the seconds of its arithmetic, without those for moving bytes."""
        if not self.dtype:
            return float(self.operations * hardware.operation_s)
        products = self.flops / hardware.rate(self.dtype, attention=self.is_attention)
        return float((products + self.scores * hardware.score_s.get(self.dtype, 0.0)) * self.computed_part)

    def is_bound_by_flops(self, hardware: Hardware) -> bool:
        """Return whether this is a product whose arithmetic takes at least as long as moving its bytes."""
        return bool(self.dtype) and self.computing_s(hardware) >= self.moved_bytes / hardware.bytes_per_s

    def ns(self, hardware: Hardware) -> int:
        """Return the nanoseconds that the node takes on the computing side."""
        moving = self.moved_bytes / hardware.bytes_per_s
        host = self.segments * _ns(hardware.segment_s) + self.graphs * _ns(hardware.graph_s)
        return host + self.launches * _ns(hardware.kernel_s) + _ns(max(self.computing_s(hardware), moving))


_NOTHING = Demand()
#: The fields of :class:`Demand` that may be sympy expressions.
DEMANDED = ("launches", "moved_bytes", "flops", "scores", "operations")


def demands(graph: Graph) -> dict[Node, Demand]:
    """Compute the demand of each node of a graph.

    In a kernel of several nodes, the bytes of a value count at the node that first reads or writes them.
    """
    found: dict[Node, Demand] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output") or is_free(node):
            found[node] = _NOTHING
        elif _is_started(node):
            found[node] = Demand(launches=1)
        elif not is_fusible(node):
            found[node] = _kernel_demand(node)
    for kernel in kernels(graph):
        if is_fusible(kernel[0]):
            found.update(_kernel_demands(kernel))
    for node in _segment_begins(graph):
        found[node] = replace(found[node], segments=1)
    if any(map(starts_collective, graph.nodes)):
        found[graph.output_node()] = Demand(graphs=1)
    return found


def node_ns(graph: Graph, hardware: Hardware) -> dict[Node, int]:
    """Compute the nanoseconds of each node of a graph on the computing side."""
    costs = {node: demand.ns(hardware) for node, demand in demands(graph).items()}
    for node in graph.nodes:
        if starts_collective(node):
            costs[node] += _taken_ns(node, hardware)
        elif is_fused_product(node):
            kind, sent = _fused_traffic(node)
            costs[node] = max(costs[node], _ns(hardware.transfer_s(kind, sent, layout_of(group_of(node)))))
    return costs


def _segment_begins(graph: Graph) -> list[Node]:
    """Find the first working node of each segment, a run of compute between boundaries that no kernel crosses."""
    found: list[Node] = []
    begins = True
    boundaries = kernel_boundaries(graph)
    for node in graph.nodes:
        begins = begins or node in boundaries
        if begins and node.op == "call_function" and not is_free(node) and not _is_started(node):
            found.append(node)
            begins = False
    return found


def _is_started(node: Node) -> bool:
    """Return whether a node starts communication or a copy beside the kernels, and is no kernel itself."""
    return starts_collective(node) or is_host_copy(node)


def kernels(graph: Graph) -> list[list[Node]]:
    """Group the nodes of a graph into kernels: a run of fusible nodes, or one node that is a kernel of its own."""
    found: list[list[Node]] = []
    stretch: list[Node] = []
    boundaries = kernel_boundaries(graph)
    for node in graph.nodes:
        if node in boundaries and stretch:
            found.append(stretch)
            stretch = []
        if node.op in ("placeholder", "get_attr", "output") or is_free(node):
            continue
        if is_fusible(node):
            stretch.append(node)
            continue
        found += [stretch] if stretch else []
        found += [] if _is_started(node) else [[node]]
        stretch = []
    return found + ([stretch] if stretch else [])


def unwritten(graph: Graph) -> set[Node]:
    """Find the nodes whose values no kernel writes: fusible nodes that only nodes of the same kernel read."""
    found: set[Node] = set()
    for kernel in kernels(graph):
        members = set(kernel)
        found |= {node for node in kernel[:-1] if node.users and not _is_read_outside(node, members)}
    return found


def is_transfer(node: Node) -> bool:
    """Return whether a node starts a transfer beside compute: a collective, or a copy between host and device."""
    return starts_collective(node) or node.target in COPIES


def transfer_ns(node: Node, hardware: Hardware) -> int:
    """Return the nanoseconds that a transfer is in flight when it has its wire for itself."""
    if node.target in COPIES:
        return _ns(hardware.host.copy_s(transfer_kind(node), traffic_bytes(node)))
    return _ns(hardware.transfer_s(collective_kind(node), traffic_bytes(node), layout_of(group_of(node))))


def _taken_ns(node: Node, hardware: Hardware) -> int:
    """Return the nanoseconds by which a collective in flight slows down compute."""
    return _ns(hardware.taken_s(collective_kind(node), traffic_bytes(node), layout_of(group_of(node))))


def collective_kind(node: Node) -> str:
    """Return the kind of collective whose costs a node has: "all_gather", "reduce_scatter" or "all_reduce"."""
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet == _c10d.all_gather_into_tensor:
        return "all_gather"
    # An exchange sends as much as a reduce-scatter, which it is over Gloo. Other collectives of the model are not measured, and
    # count as all-reduces.
    return "reduce_scatter" if packet in (_c10d.reduce_scatter_tensor, _c10d.all_to_all_single) else "all_reduce"


def transfer_kind(node: Node) -> str:
    """Return the kind whose costs a transfer has: "to_device" or "to_host" for a copy, else its :func:`collective_kind`."""
    return COPIES.get(node.target) or collective_kind(node)  # type: ignore[arg-type, call-overload]


def traffic_bytes(node: Node) -> float:
    """Return the bytes that each rank sends for a collective, or that a copy moves."""
    if node.target in COPIES:
        return num_bytes(node.meta["val"])
    kind = collective_kind(node)
    values = [node] if kind == "all_gather" else node.all_input_nodes
    return sent_bytes(kind, num_bytes([value.meta["val"] for value in values]), group_size(group_of(node)))


def layout_of(group: str) -> GroupLayout:
    """Return how the ranks of the group of this name lie on nodes."""
    return GroupLayout.of(group_ranks(group))


def is_free(node: Node) -> bool:
    """Return whether a node takes no time: a view, a wait, or arithmetic with sizes."""
    return is_view(node) or node.target in _MOVES_NOTHING or isinstance(node.meta.get("val"), (int, float, SymInt, SymFloat))


def is_fusible(node: Node) -> bool:
    """Return whether Inductor generates one kernel for a node and its fusible neighbours."""
    target = node.target
    if not isinstance(target, OpOverload):
        return False
    return bool({torch.Tag.pointwise, torch.Tag.reduction} & set(target.tags)) or target.overloadpacket in _FUSIBLE


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _kernel_demand(node: Node) -> Demand:
    """Compute the demand of a node that is a kernel of its own."""
    moved = num_bytes(node.meta.get("val")) + sum(num_bytes(source.meta.get("val")) for source in node.all_input_nodes)
    dtype, flops = node_flops(node) or ("", 0)
    return Demand(1, moved, flops, dtype, is_attention(node), computed_part(node), scores(node))


def _fused_flops(node: Node) -> Any:
    """Count the flops of a product that is fused with the gather of its input, or with the reduce-scatter of its result."""
    rows, others = node.args[0].meta["val"], node.args[1]  # type: ignore[union-attr]
    if not isinstance(others, (list, tuple)):
        return 2 * _numel(rows) * shape_value(others.meta["val"])[-1]  # type: ignore[union-attr]
    columns = sum(shape_value(other.meta["val"])[-1] for other in others)  # type: ignore[union-attr]
    return 2 * _numel(rows) * columns * group_size(group_of(node))


def _fused_traffic(node: Node) -> tuple[str, float]:
    """Return the kind of the collective in a fused product, and the bytes that each rank sends for it."""
    gathers = isinstance(node.args[1], (list, tuple))
    kind, shard = ("all_gather", node.args[0]) if gathers else ("reduce_scatter", node)
    ranks = group_size(group_of(node))
    return kind, sent_bytes(kind, num_bytes(shard.meta["val"]) * ranks, ranks)  # type: ignore[union-attr]


def node_flops(node: Node) -> tuple[str, Any] | None:
    """Return the dtype of a product, as :class:`Hardware` spells it, and its flops; None if the node is no product."""
    formula = _flop_formula(node)
    if formula is None and not is_fused_product(node):
        return None
    dtype = node.all_input_nodes[0].meta["val"].dtype
    if formula is None:
        return dtype_name(dtype), _fused_flops(node)
    args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: _shapes(source.meta["val"]))
    return dtype_name(dtype), formula(*_with_all_heads(node, args), **kwargs, out_val=_shapes(node.meta["val"]))


def _with_all_heads(node: Node, shapes: Sequence[Any]) -> Sequence[Any]:
    """Return the shapes of an operator's arguments. Keys and values of attention get as many heads as the query."""
    target: Any = node.target
    if not schema_of(target).name.startswith("aten::_scaled_dot_product"):
        return shapes
    # torch 2.11's formula refuses grouped heads. Those of later versions count every head of the query, too.
    named = {argument.name: shape for argument, shape in zip(schema_of(target).arguments, shapes, strict=False)}
    for name in ("key", "value"):
        batch, _, *rest = named[name]
        named[name] = (batch, named["query"][1], *rest)
    return list(named.values())


def _flop_formula(node: Node) -> Callable[..., int] | None:
    packet: Any = getattr(node.target, "overloadpacket", None)
    formula = flop_registry.get(_LIKE.get(packet, packet))
    # Formulas that are not wrapped take tensors instead of shapes, and need the values of some.
    return formula if hasattr(formula, "__wrapped__") else None


def _shapes(value: Any) -> Any:
    if isinstance(value, Tensor):
        return shape_value(value)
    return tuple(map(_shapes, value)) if isinstance(value, (list, tuple)) else value


def _memory(node: Node) -> Node:
    """Return the node whose memory a view shows."""
    while is_free(node) and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node


def _reads(node: Node) -> list[Node]:
    """Find the nodes whose memory a node reads."""
    # A copy overwrites its first argument without reading it.
    sources = node.args[1:2] if node.target == _aten.copy_.default else node.all_input_nodes
    return [_memory(source) for source in sources if isinstance(source, Node)]


def _is_read_outside(node: Node, members: set[Node]) -> bool:
    return any(user not in members and (not is_free(user) or _is_read_outside(user, members)) for user in node.users)


def _kernel_demands(stretch: list[Node]) -> Iterator[tuple[Node, Demand]]:
    """Yield the demand of each node of a kernel. A value that the kernel reads counts at its first reader."""
    members = set(stretch)
    seen: set[Node] = set()
    # A kernel that only pads exists only if there are rows to pad.
    is_there = sympy.Max(*map(presence, stretch)) if all(presence(node) != 1 for node in stretch) else 1
    for index, node in enumerate(stretch):
        is_written = _is_read_outside(node, members) or not node.users
        moved = num_bytes(node.meta.get("val")) * presence(node) if is_written else 0
        for source in _reads(node):
            if source not in members and source not in seen:
                seen.add(source)
                read = smaller(num_bytes(source.meta.get("val")), _read_bytes(node, source))
                # If there are no rows to pad, readers in the same kernel read the unpadded value.
                moved += read * presence(node) if is_written else read
        yield node, Demand(0 if index else is_there, moved, operations=_operations(node) * presence(node))


def _operations(node: Node) -> Any:
    """Count the elements that a pointwise operator or a reduction works on."""
    sizes = [_numel(value.meta.get("val")) for value in (node, *node.all_input_nodes)]
    # Sizes may be expressions, of which no maximum can be taken. A reduction reads more than it writes.
    tags = node.target.tags  # type: ignore[union-attr]
    return sizes[1] if torch.Tag.reduction in tags and len(sizes) > 1 else sizes[0]


def _numel(value: Any) -> Any:
    return math.prod(shape_value(value)) if isinstance(value, Tensor) else 0


def _read_bytes(node: Node, source: Node) -> Any:
    """Count the bytes of ``source`` that a node reads: those that its views show; for a lookup, at most its output's size."""
    views = [argument for argument in node.all_input_nodes if _memory(argument) is source]
    shown = sum(num_bytes(view.meta.get("val")) for view in views)
    packet = node.target.overloadpacket  # type: ignore[union-attr]
    if packet in (_aten.embedding, _aten.index):
        return smaller(shown, num_bytes(node.meta.get("val")))
    return shown
