"""Write plain tensor code into an FX graph."""

import contextlib
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt
from torch.fx import Graph, Node
from torch.fx.experimental.proxy_tensor import make_fx

from .fake_values import FakeCopies, shared_memory
from .symbolic_ranks import MEANT, symbolic_numbers
from .torch_internals.core import get_decompositions, pytree

#: The key in ``node.meta`` of a node's work (:mod:`passes.ir.work`).
WORK = "fsdp"

# Inductor expects joint graphs to be decomposed, and does not accept this form of a cast.
_DECOMPOSITIONS: dict[Any, Any] = get_decompositions([torch.ops.aten._to_copy.default])


@dataclass
class _Traces:
    graphs: dict[Hashable, Graph]
    is_fresh: bool


_traces: ContextVar[_Traces | None] = ContextVar("_traces", default=None)


@contextlib.contextmanager
def replaying_traces(*, fresh: bool = True) -> Iterator[None]:
    """Trace equal code for equal tensors only once inside of the ``with`` block.

    Equal layers emit equal code many times. Nested blocks share the traces of the outermost one.

    Args:
        fresh: give every node a fake value of its own. False is faster, and only for graphs that are analysed and thrown away:
            nodes with one fake value look as if they shared memory.
    """
    around = _traces.get()
    token = _traces.set(_Traces({} if around is None else around.graphs, fresh))
    try:
        yield
    finally:
        _traces.reset(token)


def emit(graph: Graph, function: Callable[..., Any], *args: Any, work: Hashable = None, **constants: Any) -> Any:
    """Trace ``function`` and put its operations at the graph's insertion point.

    So passes write new nodes as ordinary PyTorch code, and every node gets its fake value in ``meta["val"]``.

    Args:
        graph: graph to write into; nodes go to its insertion point.
        function: functional tensor code (no in-place operation).
        args: nodes and containers of nodes.
        work: the work of the new nodes, stored as ``meta[WORK]``; None: later passes do not need to find them.
        constants: keyword arguments passed to ``function`` as they are.

    Returns:
        The result of ``function``, with nodes in the place of tensors.
    """
    flat_args, spec = pytree.tree_flatten(args)
    values = [node.meta["val"] for node in flat_args]
    traces = _traces.get()
    if traces is None:
        traced = _trace(function, spec, values, constants)
    else:
        key = _key(function, spec, values, constants)
        is_new = key not in traces.graphs
        if is_new:
            traces.graphs[key] = _trace(function, spec, values, constants)
        traced = traces.graphs[key]
    is_symbolic = bool(symbolic_numbers())
    environment: dict[Node, Any] = {}
    values_of_copies = FakeCopies()
    arguments = iter([*flat_args, *symbolic_numbers(constants)])
    output: Any = None
    for node in traced.nodes:
        if node.op == "placeholder":
            environment[node] = next(arguments)
            if isinstance(environment[node], Node):
                values_of_copies.bind(node.meta["val"], environment[node].meta["val"])
        elif is_symbolic and isinstance(node.meta.get("val"), SymInt):
            # Arithmetic with the number of ranks. Its result is the argument, as it is in graphs that run.
            environment[node] = node.meta["val"]
        elif node.target == torch.ops.aten.detach.default:
            # Nothing is differentiated here. Tracing a reinterpreted dtype leaves such a node.
            environment[node] = environment[node.args[0]]
        elif node.op == "output":
            output = torch.fx.map_arg(node.args[0], environment.__getitem__)
        elif node.op == "call_function":
            copy = graph.node_copy(node, environment.__getitem__)
            copy.target = MEANT.get(copy.target, copy.target)
            if work is not None:
                copy.meta[WORK] = work
            if traces is not None and traces.is_fresh and not is_new:
                copy.meta["val"] = values_of_copies.copy(node.meta["val"])
            environment[node] = copy
        else:
            raise AssertionError(f"emit() expects functional tensor code; tracing it gave {node.format_node()}")
    return output


def _trace(function: Callable[..., Any], spec: Any, values: list[torch.Tensor], constants: dict[str, Any]) -> Graph:
    def flat_function(*tensors: Any) -> Any:
        return function(*pytree.tree_unflatten(tensors[: len(values)], spec), **constants)

    with torch.no_grad():
        # Two nodes may hold the same fake tensor, which tracing would treat as one input.
        inputs = [value.detach() for value in values]
        return make_fx(flat_function, decomposition_table=_DECOMPOSITIONS)(*inputs, *symbolic_numbers(constants)).graph


def _key(function: Callable[..., Any], spec: Any, values: list[torch.Tensor], constants: dict[str, Any]) -> Hashable:
    """Make the key of a trace from everything that it depends on."""
    tensors = tuple((str(value.shape), str(value.stride()), value.dtype, value.device) for value in values)
    given = tuple((name, id(value) if callable(value) else repr(value)) for name, value in constants.items())
    return function, str(spec), tensors, tuple(shared_memory(values)), given
