"""Fuse products: let Inductor's overlap of tensor parallelism see the model's own collectives, if it is on.

Before: a product of what was gathered over ranks, or of which the result is scattered over ranks, beside its collective.
After:  one operator of torch's, which works in pieces: it computes on one while another is on its way
        (``symm_mem.fused_all_gather_matmul``, ``symm_mem.fused_matmul_reduce_scatter``).

The pass is Inductor's own (``torch._inductor.config._micro_pipeline_tp``). Among Inductor's passes it would find nothing, as
segments hold no collectives. It runs ahead of the plans: the only collectives are the model's.

Leaves alone graphs, unless the setting is on; and whatever torch's pass does: products whose group has no symmetric memory, and
all if torch was built without NCCL, of which it warns.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node, map_arg

from ..collectives.functional import dimension_of
from ..fx.graph import group_of, is_collective
from ..fx.torch_internals.distributed import is_symm_mem_enabled_for_group
from ..fx.torch_internals.inductor import force_stride_order, inductor_config, micro_pipeline_tp_pass

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_FUSIBLE = (_c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default)


def fuse_products(graph: Graph) -> None:
    """Fuse products with the collectives of tensor parallelism, if Inductor is told to. In place."""
    if not inductor_config._micro_pipeline_tp:
        return
    _warn_of_groups([group_of(node) for node in graph.nodes if is_collective(node) and node.target in _FUSIBLE])
    nodes, views = set(graph.nodes), graph.find_nodes(op="call_function", target=_aten.view.default)
    results = [_layout(node.meta.get("val")) for node in _outputs(graph)]
    # What Inductor makes of views, and its pass looks for.
    for view in views:
        view.target = _aten.reshape.default
    micro_pipeline_tp_pass(graph)
    changed = _evaluate(graph, nodes)
    for view in set(views) & set(graph.nodes):
        if not changed & {view, *view.all_input_nodes}:
            view.target = _aten.view.default
    _keep_layouts(graph, results)


def _warn_of_groups(groups: Sequence[str]) -> None:
    """Warn where torch's pass would do nothing without a word."""
    asked = "torch._inductor.config._micro_pipeline_tp is on, but products are not fused with collectives over"
    for group in dict.fromkeys(groups):
        name = dimension_of(group) or f"group {group}"
        if not dist.is_nccl_available():
            warnings.warn(f"{asked} {name}: torch was built without NCCL.", stacklevel=2)
        elif not is_symm_mem_enabled_for_group(group):  # type: ignore[arg-type]
            warnings.warn(
                f"{asked} {name}, which has no symmetric memory: call torch.distributed._symmetric_memory."
                "enable_symm_mem_for_group(name of the process group) ahead of the first step.",
                stacklevel=2,
            )


def _outputs(graph: Graph) -> list[Any]:
    return [node for node in graph.output_node().args[0] if isinstance(node, Node)]  # type: ignore[union-attr]


def _layout(value: Any) -> tuple[Any, ...] | None:
    return tuple(value.stride()) if isinstance(value, Tensor) else None


def _evaluate(graph: Graph, known: set[Node]) -> set[Node]:
    """Give fake values to new nodes, and to those behind them whose layout is another one; returns all of these."""
    changed: set[Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or (node in known and not changed & set(node.all_input_nodes)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
        value = node.target(*args, **kwargs)
        if node not in known or _layout(value) != _layout(node.meta["val"]):
            changed.add(node)
            node.meta["val"] = value
    return changed


def _keep_layouts(graph: Graph, layouts: list[Any]) -> None:
    """Give out results as they were laid out: backward was traced with that."""
    for node, layout in zip(_outputs(graph), layouts, strict=True):
        if _layout(node.meta.get("val")) != layout:
            with graph.inserting_before(graph.output_node()):
                copy = graph.call_function(force_stride_order, (node, layout))
            copy.meta["val"] = force_stride_order(node.meta["val"], layout)
            graph.output_node().replace_input_with(node, copy)
