"""Write plain tensor code into an FX graph."""

import contextlib
import operator
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import SymInt, Tensor
from torch.fx import Graph, Node

from .fake_values import FakeCopies, shared_memory
from .symbolic_ranks import MEANT, are_symbolic
from .torch_internals.core import TorchDispatchMode, get_decompositions, pytree

#: The key in ``node.meta`` of a node's work (:mod:`passes.ir.work`).
WORK = "fsdp"

# Inductor expects joint graphs to be decomposed. Of what it does not accept, code that is emitted has these.
_aten = torch.ops.aten
_DECOMPOSITIONS: dict[Any, Any] = get_decompositions([_aten._to_copy.default, _aten.clamp.default, _aten.masked_fill.Scalar])


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
    environment: dict[Node, Any] = {}
    values_of_copies = FakeCopies()
    arguments = iter(flat_args)
    output: Any = None
    for node in traced.nodes:
        if node.op == "placeholder":
            environment[node] = next(arguments)
            values_of_copies.bind(node.meta["val"], environment[node].meta["val"])
        elif node.target == torch.ops.aten.detach.default:
            # Nothing is differentiated here. Tracing a reinterpreted dtype leaves such a node.
            environment[node] = environment[node.args[0]]
        elif node.op == "output":
            output = torch.fx.map_arg(node.args[0], environment.__getitem__)
        else:
            copy = graph.node_copy(node, environment.__getitem__)
            copy.target = MEANT.get(copy.target, copy.target)
            if work is not None:
                copy.meta[WORK] = work
            if traces is not None and traces.is_fresh and not is_new:
                copy.meta["val"] = values_of_copies.copy(node.meta["val"])
            environment[node] = copy
    return output


class _Recorder(TorchDispatchMode):
    """A mode that writes the operators that fake tensors go through into a graph.

    ``make_fx`` does the same for any code, in several times the time: it patches modules, and compiles a module of the result.
    """

    def __init__(self) -> None:
        super().__init__()
        self.graph = Graph()
        # The tensors are kept, so that no other gets the id of one.
        self._nodes: dict[int, tuple[Node, Tensor]] = {}

    def input(self, value: Tensor) -> None:
        self._bind(self.graph.placeholder("input"), value)

    def output(self, result: Any) -> None:
        self.graph.output(pytree.tree_map(self._node, result))
        self.graph.eliminate_dead_code()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _DECOMPOSITIONS:
            with self:
                return _DECOMPOSITIONS[func](*args, **kwargs)
        result = func(*args, **kwargs)
        args, kwargs = pytree.tree_map(self._node, (args, kwargs))
        self._bind(self.graph.create_node("call_function", func, args, kwargs, func.overloadpacket.__name__), result)
        return result

    def _bind(self, node: Node, value: Any) -> None:
        node.meta["val"] = value
        if isinstance(value, Tensor):
            self._nodes[id(value)] = node, value
        elif isinstance(value, (list, tuple)):
            for index, each in enumerate(value):
                self._bind(self.graph.call_function(operator.getitem, (node, index)), each)

    def _node(self, value: Any) -> Any:
        if isinstance(value, SymInt) and not are_symbolic():
            raise AssertionError("emit() expects code whose arguments depend on no size that changes")
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            raise AssertionError("emit() expects functional tensor code that uses no tensors but its arguments")
        return self._nodes[id(value)][0]


def _trace(function: Callable[..., Any], spec: Any, values: list[Tensor], constants: dict[str, Any]) -> Graph:
    recorder = _Recorder()
    # Two nodes may hold the same fake tensor, which recording would treat as one input.
    inputs = [value.detach() for value in values]
    for value in inputs:
        recorder.input(value)
    with torch.no_grad(), recorder:
        result = function(*pytree.tree_unflatten(inputs, spec), **constants)
    recorder.output(result)
    return recorder.graph


def _key(function: Callable[..., Any], spec: Any, values: list[torch.Tensor], constants: dict[str, Any]) -> Hashable:
    """Make the key of a trace from everything that it depends on."""
    tensors = tuple((str(value.shape), str(value.stride()), value.dtype, value.device) for value in values)
    given = tuple((name, id(value) if callable(value) else repr(value)) for name, value in constants.items())
    return function, str(spec), tensors, tuple(shared_memory(values)), given
