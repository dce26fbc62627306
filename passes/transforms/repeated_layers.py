"""Repeated layers: trace one of many equal layers, and copy the trace for the others.

``fold_layers``, before AOTAutograd:

Before: a Dynamo graph with all operations of every layer, such as the blocks of a transformer.
After:  the calls of equal modules are one node each. One of them is traced on its own, forward and backward, and runs through
        Inductor's passes over joint graphs.

``unfold_layers``, in the joint graph:

Before: the node of each call, and the node of its backward.
After:  a copy of the trace in the place of each, as if AOTAutograd had traced every layer. Only four things can differ: a copy
        of a gradient whose layout differs from that of the layer's output; zeros for the gradient of an output without one; a
        view of a common input, which each layer makes; and the place of an addition. Gradients add up in the same order.
        (The encoding of an extension, :mod:`passes.ir.extension`, stands with its layer instead of before all layers.)

Once equal layers share their kernels, tracing takes most of the time to compile a deep model. Copying nodes takes a tenth of
that.

Symbolic sizes are inputs of a layer as tensors are: layers are equal if these have the same expressions.

Leaves alone layers where copying could be wrong: calls of higher-order operators such as checkpoints, sizes that depend on
data, inputs that are written to, outputs that are views of inputs, random numbers from Inductor's seeds, which it numbers
through the whole graph, operations with an effect besides their result (switching a mode, entering a transform), and traces
with anything but functional operators that have fake values.

``torch.compiler.nested_compile_region`` (torch/_higher_order_ops/invoke_subgraph.py) has the same aim for regions that the user
marks, but keeps the regions apart in the partitioner, too.
"""

from __future__ import annotations

import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.fx.traceback as fx_traceback
from torch import SymInt, Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true, sym_eq

from ..fx.decompositions import decompositions
from ..fx.fake_values import FakeCopies
from ..fx.sizes import layout
from ..fx.torch_internals.aot import V, aot_function, dedupe_symints, joint_graph_passes
from ..fx.torch_internals.core import OpOverload, TracingContext, log_api_usage_once, pytree, tracing
from ..fx.torch_internals.objects import storage_id
from ..fx.torch_internals.operators import seeds
from ..ir.equal_layers import Layer, Param, equal_layers, mesh_of
from ..ir.ops import ReduceGrad, Unshard, is_unshard, reduce_grad, update_args
from .refresh_layouts import TracedValues, refresh_layouts

logger = logging.getLogger(__name__)

# Fewer layers are traced quickly, and unfolded they keep the node names of Dynamo and AOTAutograd.
MIN_LAYERS = 8

# A module of fewer operations is not worth the nodes that stand for its call.
_MIN_OPERATIONS = 4

# Operations that return nothing, and whose effect a graph need not repeat.
_HARMLESS = {log_api_usage_once}

_library = torch.library.Library("fsdp_compile", "FRAGMENT")
_library.define("layer(Tensor[] inputs, SymInt[] sizes, int call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_library.define("layer_backward(Tensor[] tangents, int call) -> Tensor[]", tags=(torch.Tag.pt2_compliant_tag,))
_wait = torch.ops._c10d_functional.wait_tensor.default
_layer = torch.ops.fsdp_compile.layer.default
_layer_backward = torch.ops.fsdp_compile.layer_backward.default


@dataclass(eq=False)
class _Trace:
    """The trace of a layer.

    Attributes:
        params: the parameters that the layer unshards.
        inputs, tangents: placeholders of the trace. An input is a tensor or a symbolic size.
        outputs: the values that the layer returns.
        has_tangent: for each output, whether it takes part in backward.
        gradients: for each input, its gradient or None.
        forward, backward: operations, in order.
        constants: tensors that ``get_attr`` nodes read, such as a number that the model turns into a tensor.
    """

    params: list[Param]
    inputs: list[Node]
    tangents: list[Node]
    outputs: list[Node]
    has_tangent: list[bool]
    gradients: list[Node | None]
    forward: list[Node]
    backward: list[Node]
    constants: dict[Node, Tensor]


@dataclass(eq=False)
class _Call:
    """A folded layer: the trace, and the layer's own parameters in the order of ``trace.params``."""

    trace: _Trace
    params: list[Param]


_calls: weakref.WeakValueDictionary[int, _Call] = weakref.WeakValueDictionary()
_call_numbers = itertools.count()


@torch.library.register_fake(_layer, lib=_library)
def _(inputs: Sequence[Tensor], sizes: Sequence[int | SymInt], call: int) -> list[Tensor]:
    return [_empty_like(node.meta["val"]) for node in _calls[call].trace.outputs]


@torch.library.register_fake(_layer_backward, lib=_library)
def _(tangents: Sequence[Tensor], call: int) -> list[Tensor]:
    return [_empty_like(node.meta["val"]) for node in _calls[call].trace.gradients if node is not None]


def _empty_like(value: Tensor) -> Tensor:
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


# ---------------------------------------------------------------------------------------------------- fold


def _is_foldable(layer: Layer) -> bool:
    """Return whether one node can stand for the layer, and copies of its trace for the layer's."""
    return (
        len(layer.operations) >= _MIN_OPERATIONS
        and all(node.op in ("call_function", "call_method") and _only_computes(node) for node in layer.nodes)
        and layer.is_replaceable()
    )


def _only_computes(node: Node) -> bool:
    """Return whether an operation has no effect but its result: it switches no mode and enters no function transform."""
    if node.target in _HARMLESS:
        return True
    results = node.meta.get("example_value")
    leaves = pytree.tree_leaves(results)
    return all(isinstance(leaf, (Tensor, int, float, torch.Size)) for leaf in leaves) and results is not None


def fold_layers(gm: GraphModule, min_layers: int = MIN_LAYERS) -> bool:
    """Fold every set of at least ``min_layers`` equal calls of modules in a Dynamo graph: each call becomes a node. In place.

    Returns:
        Whether any layer was folded.
    """
    folded = False
    for layers in equal_layers(gm.graph, min_layers, _is_foldable):
        trace = _trace(layers[0])
        if trace is None:
            continue
        for layer in layers:
            _fold(gm.graph, layer, trace)
        folded = True
    if folded:
        gm.recompile()
    return folded


def _trace(layer: Layer) -> _Trace | None:
    """Trace a layer's forward and backward as AOTAutograd would. Return None if that fails, or if copies could be wrong."""
    graph = Graph()
    copies = {node: graph.placeholder(node.name) for node in (*layer.inputs, *layer.meshes)}
    for node in layer.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output([copies[node] for node in layer.outputs])
    interpreter = Interpreter(GraphModule({}, graph))

    meshes = [mesh_of(node) for node in layer.meshes]

    def run(*inputs: Tensor | SymInt) -> Any:
        with fx_traceback.preserve_node_meta():
            return interpreter.run(*inputs, *meshes)

    examples = [node.meta["example_value"] for node in layer.inputs]
    # Not the fake mode of the examples: Dynamo gives backends a fake mode of their own.
    fake_mode = TracingContext.get().fake_mode
    assert fake_mode is not None
    has_tangent = [node.meta["example_value"].requires_grad for node in layer.outputs]
    with fake_mode, V.set_fake_mode(fake_mode), tracing(TracingContext(fake_mode)):
        inputs = [
            value if isinstance(value, SymInt) else _empty_like(value).requires_grad_(value.requires_grad) for value in examples
        ]
        try:
            gm = _trace_jointly(run, inputs)
            traced = TracedValues(gm.graph)
            gm = joint_graph_passes(gm, next((value.device for value in examples if isinstance(value, Tensor)), None))
            refresh_layouts(gm.graph, traced)
            return _split(gm, layer.params, len(inputs), has_tangent)
        except Exception as error:
            # If the failure is not the fold's, tracing the whole graph raises it again.
            logger.debug("a repeated layer is traced each time: %s", error)
            return None


class _Traced(BaseException):
    """Raised to stop AOTAutograd when it has traced a graph."""

    def __init__(self, gm: GraphModule):
        self.gm = gm


def _trace_jointly(function: Callable[..., Any], inputs: Sequence[Tensor | SymInt]) -> GraphModule:
    """Trace the joint graph of a function as AOTAutograd hands it on. If no input requires grad, trace the only graph.

    ``aot_export_joint_simple`` would decompose more operators, as it traces for an exported program.
    """

    def stop(gm: GraphModule, *_: Any, **__: Any) -> NoReturn:
        raise _Traced(gm)

    try:
        aot_function(function, stop, partition_fn=stop, decompositions=decompositions(), enable_log=False)(*inputs)
    except _Traced as traced:
        return traced.gm
    raise AssertionError("AOTAutograd traced no graph.")


def _is_copyable(node: Node) -> bool:
    """Return whether a copy of an operation, with a fake value of its own, does the same as the operation."""
    is_operator = isinstance(node.target, OpOverload) or node.target is operator.getitem or node.op == "get_attr"
    is_operator = is_operator or isinstance(node.meta.get("val"), SymInt)
    # torch counts a wait as impure, so that nothing removes it.
    is_pure = node.target == _wait or not node.is_impure(impure_random=False)
    return is_operator and "val" in node.meta and is_pure


def _split(gm: GraphModule, params: list[Param], num_inputs: int, has_tangent: list[bool]) -> _Trace | None:
    graph = gm.graph
    constants: dict[Node, Any] = {node: getattr(gm, str(node.target), None) for node in graph.find_nodes(op="get_attr")}
    operations = [node for node in graph.nodes if node.op not in ("placeholder", "output")]
    if not all(map(_is_copyable, operations)) or not all(type(value) is Tensor for value in constants.values()):
        return None
    if graph.find_nodes(op="call_function", target=seeds):
        return None
    placeholders = graph.find_nodes(op="placeholder")
    tangents = placeholders[num_inputs:]
    results: Any = graph.output_node().args[0]
    outputs, gradients = results[: len(has_tangent)], results[len(has_tangent) :]
    if len(tangents) != sum(has_tangent) or len(gradients) not in (0, num_inputs):
        # AOTAutograd added results for its epilogue, which copies them into inputs or makes views of them.
        return None
    if any(node not in operations for node in outputs) or _share_memory([*placeholders, *outputs]):
        return None
    # Autograd runs all of forward before it starts backward, so the last output ends forward.
    end = 1 + max(operations.index(node) for node in outputs)
    forward, backward = operations[:end], operations[end:]
    if any(user in forward for node in tangents for user in node.users):
        return None
    return _Trace(
        params=params,
        inputs=placeholders[:num_inputs],
        tangents=tangents,
        outputs=list(outputs),
        has_tangent=has_tangent,
        gradients=list(gradients) or [None] * num_inputs,
        forward=forward,
        backward=backward,
        constants=constants,
    )


def _share_memory(nodes: list[Node]) -> bool:
    memory = [storage_id(node.meta["val"]) for node in nodes if isinstance(node.meta["val"], Tensor)]
    return len(set(memory)) < len(memory)


def _fold(graph: Graph, layer: Layer, trace: _Trace) -> None:
    number = next(_call_numbers)
    call = _calls[number] = _Call(trace, layer.params)
    with graph.inserting_after(layer.nodes[-1]):
        folded = graph.call_function(_folded_function(call, number), tuple(layer.inputs))
    folded.meta = {key: value for key, value in layer.nodes[-1].meta.items() if key in ("stack_trace", "nn_module_stack")}
    folded.meta["example_value"] = tuple(node.meta["example_value"] for node in layer.outputs)
    after = folded
    for index, node in enumerate(layer.outputs):
        with graph.inserting_after(after):
            after = graph.call_function(operator.getitem, (folded, index))
        after.meta = dict(node.meta)
        node.replace_all_uses_with(after, delete_user_cb=layer.is_outside)
    for node in reversed(layer.nodes):
        graph.erase_node(node)


def _folded_function(call: _Call, number: int) -> Callable[..., tuple[Tensor, ...]]:
    """Make the function of a folded node. The function keeps ``call`` alive as long as the graph lives."""

    def call_layer(*inputs: Tensor | SymInt) -> tuple[Tensor, ...]:
        if not any(call.trace.has_tangent):
            return _call(number, inputs)
        return _LayerFunction.apply(call.trace, number, *inputs)

    return call_layer


def _call(number: int, inputs: Sequence[Tensor | SymInt]) -> tuple[Tensor, ...]:
    tensors = [value for value in inputs if isinstance(value, Tensor)]
    return tuple(_layer(tensors, [value for value in inputs if not isinstance(value, Tensor)], number))


class _LayerFunction(torch.autograd.Function):
    """The operator ``layer``, with ``layer_backward`` as its backward."""

    @staticmethod
    def forward(trace: _Trace, number: int, *inputs: Tensor | SymInt) -> tuple[Tensor, ...]:
        return _call(number, inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        trace, number, *_ = inputs
        ctx.trace, ctx.number = trace, number
        ctx.mark_non_differentiable(*_select(output, [not differentiable for differentiable in trace.has_tangent]))

    @staticmethod
    def backward(ctx: Any, *output_gradients: Tensor) -> Any:
        trace: _Trace = ctx.trace
        gradients = _select(output_gradients, trace.has_tangent)
        # The layer was traced with gradients laid out as its outputs are.
        tangents = [_laid_out_as(like.meta["val"], gradient) for gradient, like in zip(gradients, trace.tangents, strict=True)]
        found = iter(_layer_backward(tangents, ctx.number))
        return None, None, *(None if node is None else next(found) for node in trace.gradients)


def _select(values: Sequence[Tensor], chosen: Sequence[bool]) -> list[Tensor]:
    return [value for value, is_chosen in zip(values, chosen, strict=True) if is_chosen]


def _laid_out_as(like: Tensor, value: Tensor) -> Tensor:
    """Return ``value`` with the strides of ``like``. Copies where these may differ, as a guard on them is not wanted."""
    if statically_known_true(sym_eq(value.stride(), like.stride())):
        return value
    return value.new_empty_strided(like.shape, like.stride()).copy_(value)


# -------------------------------------------------------------------------------------------------- unfold


def unfold_layers(graph: Graph) -> None:
    """Replace folded layers and their backward in a joint (or an inference) graph by copies of their trace. In place."""
    copies: dict[int, _Copy] = {}
    inputs: Any
    sizes: Any
    tangents: Any
    number: Any
    for node in list(graph.nodes):
        if node.target is _layer:
            inputs, sizes, number = node.args
            copies[number] = _Copy(_calls[number])
            copies[number].write_forward(graph, node, inputs, sizes)
        elif node.target is _layer_backward:
            tangents, number = node.args
            copies[number].write_backward(graph, node, tangents)
    if copies:
        # As after each trace. Sizes of a folded layer's outputs had no operations that compute them.
        dedupe_symints(graph)


class _Copy:
    """The copy of a trace in a joint graph, for one layer."""

    def __init__(self, call: _Call):
        self._trace = call.trace
        traced = [(param.unit, param.name) for param in call.trace.params]
        self._params = dict(zip(traced, call.params, strict=True))
        # In the place of a size there is a number if torch specialized the size after the layer was traced.
        self._nodes: dict[Node, Any] = {}
        self._values = FakeCopies()

    def write_forward(self, graph: Graph, call: Node, inputs: Sequence[Node], sizes: Sequence[Any]) -> None:
        """Replace the node of a folded layer by the operations of forward."""
        is_size = [isinstance(node.meta["val"], SymInt) for node in self._trace.inputs]
        self._nodes.update(zip(itertools.compress(self._trace.inputs, is_size), sizes, strict=True))
        self._bind([node for node in self._trace.inputs if node not in self._nodes], inputs)
        self._write(graph, call, self._trace.forward, self._trace.outputs)

    def write_backward(self, graph: Graph, call: Node, tangents: Sequence[Node]) -> None:
        """Replace the node of a folded layer's backward by the operations of backward."""
        self._bind(self._trace.tangents, tangents)
        accumulations = [user for element in call.users for user in element.users if _accumulates(user, element)]
        self._write(graph, call, self._trace.backward, [node for node in self._trace.gradients if node is not None])
        for node in accumulations:
            _accumulate_one_by_one(graph, node)

    def _bind(self, placeholders: Sequence[Node], sources: Sequence[Node]) -> None:
        for placeholder, source in zip(placeholders, sources, strict=True):
            self._nodes[placeholder] = source
            self._values.bind(placeholder.meta["val"], source.meta["val"])

    def _write(self, graph: Graph, call: Node, operations: Sequence[Node], results: Sequence[Node]) -> None:
        with graph.inserting_before(call):
            for node in operations:
                copy = self._nodes[node] = graph.node_copy(node, self._nodes.__getitem__)
                if node.op == "get_attr":
                    copy.target = _add_constant(graph, self._trace.constants[node])
                copy.meta["val"] = self._values.copy(node.meta["val"])
                # These describe the layer that was traced.
                for key in ("nn_module_stack", "fwd_nn_module_stack", "tensor_meta"):
                    copy.meta.pop(key, None)
                self._name_param(copy)
        for element in list(call.users):
            element.replace_all_uses_with(self._nodes[results[element.args[1]]])  # type: ignore[index]
            graph.erase_node(element)
        graph.erase_node(call)

    def _name_param(self, copy: Node) -> None:
        if is_unshard(copy):
            spec = Unshard.of(copy)
            update_args(copy, **self._params[spec.unit, spec.name]._asdict())
        elif copy.target is reduce_grad:
            param = self._params[ReduceGrad.of(copy).unit, ReduceGrad.of(copy).name]
            update_args(copy, unit=param.unit, name=param.name)


def _add_constant(graph: Graph, constant: Tensor) -> str:
    """Register a tensor in the graph's module, unless it is there, and return its name. So layers share kernels."""
    owner = graph.owning_module
    assert owner is not None
    for name, buffer in owner.named_buffers(recurse=False):
        if buffer is constant:
            return name
    free = (f"_tensor_constant{number}" for number in itertools.count())
    name = next(name for name in free if not hasattr(owner, name))
    owner.register_buffer(name, constant)
    return name


def _accumulates(node: Node, gradient: Node | None = None) -> bool:
    """Return whether ``node`` is autograd's addition of a gradient (of ``gradient``, if given) to earlier ones of a value."""
    is_sum = (
        node.target == torch.ops.aten.add.Tensor and node.meta.get("is_gradient_acc", False) and len(node.all_input_nodes) == 2
    )
    return is_sum and gradient in (None, node.args[1])


def _accumulate_one_by_one(graph: Graph, accumulation: Node) -> None:
    """Turn ``before + (first + second)`` into ``(before + first) + second``, as autograd adds them one by one. In place."""
    before, total = accumulation.all_input_nodes
    sums = []
    node = total
    while _accumulates(node) and len(node.users) == 1:
        sums.append(node)
        node = node.all_input_nodes[0]
    if not sums or len({layout(value.meta["val"])[1] for value in (accumulation, before, node, *sums)}) > 1:
        return
    with graph.inserting_after(max(before, node)):
        first = graph.call_function(torch.ops.aten.add.Tensor, (before, node))
    first.meta = dict(accumulation.meta)
    sums[-1].replace_input_with(node, first)
    accumulation.replace_all_uses_with(total)
    graph.erase_node(accumulation)
