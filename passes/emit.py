"""Write plain tensor code into an FX graph."""

from collections.abc import Callable
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

# Inductor counts on joint graphs being decomposed, and takes no cast in this form.
_DECOMPOSITIONS: dict[Any, Any] = get_decompositions([torch.ops.aten._to_copy.default])


def emit(graph: Graph, function: Callable[..., Any], *args: Any, role: str = "", **constants: Any) -> Any:
    """Trace ``function`` and put its operations at the graph's insertion point.

    Passes can so say what they insert as ordinary PyTorch code, and every node gets its fake value in ``meta["val"]``.

    Args:
        graph: graph to write into; nodes go to its insertion point.
        function: functional tensor code (no in-place operation).
        args: nodes and containers of nodes.
        role: stored as ``meta["fsdp"]`` on every new node, for later passes.
        constants: keyword arguments handed to ``function`` as they are.

    Returns:
        What ``function`` returns, with nodes in the place of tensors.
    """
    flat_args, spec = pytree.tree_flatten(args)

    def flat_function(*tensors: Any) -> Any:
        return function(*pytree.tree_unflatten(tensors, spec), **constants)

    with torch.no_grad():
        # Two nodes may hold the same fake tensor, which tracing would take for one input.
        values = [node.meta["val"].detach() for node in flat_args]
        traced = make_fx(flat_function, decomposition_table=_DECOMPOSITIONS)(*values)
    environment: dict[Node, Node] = {}
    arguments = iter(flat_args)
    output: Any = None
    for node in traced.graph.nodes:
        if node.op == "placeholder":
            environment[node] = next(arguments)
        elif node.op == "output":
            output = torch.fx.map_arg(node.args[0], environment.__getitem__)
        elif node.op == "call_function":
            copy = graph.node_copy(node, environment.__getitem__)
            if role:
                copy.meta["fsdp"] = role
            environment[node] = copy
        else:
            raise AssertionError(f"emit() expects functional tensor code; tracing it gave {node.format_node()}")
    return output
