"""Foreach copies: join the many small copies of a bucket into one kernel, on a GPU.

A unit has many copies, and copying a bias takes a kernel launch, as copying a matrix does. A foreach operator is one kernel for
a list of tensors of any shapes. The kernel includes elementwise operators that compute these tensors.

Before: a ``clone`` for each parameter that is cut out of a gathered buffer. A ``cat`` of the tensors that a collective sends,
        followed by casts and divisions.
After:  one foreach copy for all parameters of a bucket of up to 1 MiB each. Larger parameters keep copies of their own, which
        are worth a launch. Each of these is made as late as possible, so that a bucket is never held twice as a whole. So do
        parameters that are cut along another dimension than the first: a foreach operator keeps the order of strides.
        One foreach copy of the inputs of the ``cat`` into its buffer, after the casts and divisions.

Leaves alone graphs on the CPU: a launch costs nothing there.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Container
from typing import Any

import torch
from torch.fx import Graph, Node

from ..fx.emit import WORK
from ..fx.graph import with_sources
from ..fx.sizes import num_bytes
from ..ir.work import MAKES_PARAMETERS, Role, nodes_of, role

_aten = torch.ops.aten
# Multiplying by one copies to the bit. _foreach_copy keeps gaps between elements, and torch 2.11 has no _foreach_clone.
_copy = _aten._foreach_mul.Scalar

#: The bytes of the largest parameter that joins a foreach copy. Copying a larger one is worth a kernel launch of its own.
MAX_FOREACH_BYTES = 1 << 20

# Elementwise operators, which may run on the pieces before they are joined.
_ELEMENTWISE = {_aten.div.Tensor, _aten.mul.Tensor, torch.ops.prims.convert_element_type.default}


def is_on_gpu(node: Node) -> bool:
    """Return whether a node's value is on a device with kernel launches: neither ``cpu`` nor ``meta``."""
    return node.meta["val"].device.type not in ("cpu", "meta")


def _may_join(clone: Node) -> bool:
    """Return whether a clone is small, and a foreach copy of its source would have its strides."""
    source: Node = clone.args[0]  # type: ignore[assignment]
    small = is_on_gpu(clone) and num_bytes(clone.meta["val"]) <= MAX_FOREACH_BYTES
    return small and torch.empty_like(source.meta["val"]).stride() == clone.meta["val"].stride()


def copy_all(graph: Graph, sources: list[Node], like: Node) -> list[Node]:
    """Copy ``sources`` with one operator at the graph's insertion point, with the work of ``like``.

    A copy has no gaps, and keeps the order of its source's strides.
    """
    copied = graph.call_function(_copy, (sources, 1))
    copies = [graph.call_function(operator.getitem, (copied, index)) for index in range(len(sources))]
    values = [torch.empty_like(source.meta["val"]) for source in sources]
    for node, value in zip([copied, *copies], [values, *values], strict=True):
        node.meta = {"val": value, WORK: like.meta[WORK]}
    return copies


def copy_out_together(graph: Graph) -> None:
    """Cut the small parameters of a bucket out of its gathered buffer with one operator. In place."""
    for nodes in itertools.chain.from_iterable(nodes_of(graph, made).values() for made in MAKES_PARAMETERS):
        clones = [node for node in nodes if node.target == _aten.clone.default and _may_join(node)]
        sources: list[Node] = [clone.args[0] for clone in clones]  # type: ignore[misc]
        # A clone that others are computed from, such as the scales of a rounded gather, stays before them.
        ahead = {*with_sources(sources)}
        clones = [clone for clone in clones if clone not in ahead]
        if len(clones) < 2:
            continue
        first = clones[0]
        sources = [clone.args[0] for clone in clones]  # type: ignore[misc]
        for source in with_sources(sources):
            if source > first:
                first.prepend(source)
        with graph.inserting_before(first):
            copies = copy_all(graph, sources, first)
        for clone, copy in zip(clones, copies, strict=True):
            clone.replace_all_uses_with(copy)
            graph.erase_node(clone)


def copy_in_together(graph: Graph, written: Container[Node] = ()) -> None:
    """Write the tensors that a collective sends into one buffer with one operator. In place.

    Args:
        graph: the graph.
        written: ``cat`` nodes to leave alone, as the kernels that write their inputs cannot include a foreach operator.
    """
    for cat in graph.find_nodes(op="call_function", target=_aten.cat.default):
        if cat in written or role(cat) not in (Role.START_GATHER, Role.START_REDUCE) or not is_on_gpu(cat):
            continue
        rows: list[Node] = list(cat.args[0])  # type: ignore[arg-type]
        with graph.inserting_before(cat):
            for apply in _take_elementwise(graph, cat):
                rows = [apply(row) for row in rows]
            cat.update_arg(0, copy_all(graph, rows, cat))
        for node in _with_views(cat):
            node.meta["val"] = node.meta["val"].to(rows[0].meta["val"].dtype)


def _with_views(cat: Node) -> list[Node]:
    """Return ``cat`` and the views after it, each the only reader of the node before."""
    chain = [cat]
    while len(chain[-1].users) == 1:
        (user,) = chain[-1].users
        if user.target != _aten.view.default:
            break
        chain.append(user)
    return chain


def _take_elementwise(graph: Graph, cat: Node) -> list[Callable[[Node], Node]]:
    """Remove the elementwise operators after ``cat``. Return functions that apply them to another node, in order."""
    taken: list[Callable[[Node], Node]] = []
    while True:
        flat = _with_views(cat)[-1]
        user = next(iter(flat.users)) if len(flat.users) == 1 else None
        if (
            user is None
            or user.target not in _ELEMENTWISE
            or user.args[0] is not flat
            or not all(map(_is_scalar, user.args[1:]))
        ):
            return taken
        taken.append(_applying(graph, user))
        user.replace_all_uses_with(flat)
        graph.erase_node(user)


def _is_scalar(value: Any) -> bool:
    return not isinstance(value, Node) or (value.op == "placeholder" and value.meta["val"].dim() == 0)


def _applying(graph: Graph, node: Node) -> Callable[[Node], Node]:
    target, rest, meta = node.target, node.args[1:], dict(node.meta)

    def apply(row: Node) -> Node:
        applied = graph.call_function(target, (row, *rest))  # type: ignore[arg-type]
        applied.meta = {**meta, "val": row.meta["val"].to(meta["val"].dtype)}
        return applied

    return apply
