"""Fuse products: let Inductor's overlap of tensor parallelism see the model's own collectives, if it is on.

Before: a matrix product that reads an all-gather, or whose result is reduce-scattered.
After:  one operator of torch's, which works in pieces: it computes one while another is communicated
        (``symm_mem.fused_all_gather_matmul``, ``symm_mem.fused_matmul_reduce_scatter``).

This runs Inductor's own pass (``torch._inductor.config._micro_pipeline_tp``). Inside Inductor the pass would find nothing, as
segments have no collectives. It runs before the passes for each plan, when the only collectives are the model's own.

Leaves alone every graph while the setting is off. With it on, products stay apart, with a warning, if their group has no
symmetric memory or torch was built without NCCL.
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
from ..fx.torch_internals.objects import fuses_products

_aten = torch.ops.aten
_c10d = torch.ops._c10d_functional

_FUSIBLE = (_c10d.all_gather_into_tensor.default, _c10d.reduce_scatter_tensor.default)


def fuse_products(graph: Graph) -> None:
    """Fuse products with the collectives of tensor parallelism, if Inductor's setting asks for it. In place."""
    if not fuses_products(inductor_config):
        return
    _warn_of_groups([group_of(node) for node in graph.nodes if is_collective(node) and node.target in _FUSIBLE])
    nodes, views = set(graph.nodes), graph.find_nodes(op="call_function", target=_aten.view.default)
    results = [_layout(node.meta.get("val")) for node in _outputs(graph)]
    # Inductor turns views into reshapes, and its pass looks for these.
    for view in views:
        view.target = _aten.reshape.default
    micro_pipeline_tp_pass(graph)
    changed = _evaluate(graph, nodes)
    for view in set(views) & set(graph.nodes):
        if not changed & {view, *view.all_input_nodes}:
            view.target = _aten.view.default
    _keep_layouts(graph, results)


def _warn_of_groups(groups: Sequence[str]) -> None:
    """Warn of groups for which torch's pass would silently do nothing."""
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
    """Compute fake values of new nodes, and of later nodes whose layout changes with them. Return all of these."""
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
    """Restore the layouts of the graph's outputs, with which backward was traced."""
    for node, layout in zip(_outputs(graph), layouts, strict=True):
        if _layout(node.meta.get("val")) != layout:
            with graph.inserting_before(graph.output_node()):
                copy = graph.call_function(force_stride_order, (node, layout))
            copy.meta["val"] = force_stride_order(node.meta["val"], layout)
            graph.output_node().replace_input_with(node, copy)
