"""``fsdp_backend``: the torch.compile backend that runs the passes and lowers their graphs.

AOTAutograd, the partitioner and Inductor do what they do for the ``inductor`` backend; ``compile_fx`` has a hook at each place
where a pass belongs, and nothing of them is patched.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, cast

import torch
import torch._functorch.config as functorch_config
import torch._inductor.config as inductor_config
from torch import nn
from torch._guards import CompileContext, TracingContext, compile_context, tracing
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch._inductor.virtualized import V
from torch.fx import Graph, GraphModule, Node

from passes.interface import Interface
from passes.keep_order import KeepWaits
from passes.lower import INDUCTOR_CONFIG
from passes.ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args
from passes.pipeline import run_dynamo_passes, run_joint_passes, run_passes, run_preparing_passes
from passes.sync_plan import Plan

from .capture import CapturedGraph, is_capturing, observer, record, snapshot
from .runtime import BoxedFunction, PlannedGraph, boxed, sharded_param
from .unit import ShardedParam, Unit

_LOWERINGS = ("inductor", "aot_eager")


@dataclass(frozen=True)
class Options:
    """``torch.compile(..., options={...})`` for this backend.

    Attributes:
        lowering: "inductor": generated kernels. "aot_eager": the same passes, then aten operators one by one, to debug with.
    """

    lowering: str = "inductor"

    @staticmethod
    def parse(options: dict[str, Any] | None) -> Options:
        known = [field.name for field in fields(Options)]
        for key in options or {}:
            if key not in known:
                raise ValueError(f"fsdp_backend has no option {key!r}; it has: {', '.join(known)}.")
        parsed = Options(**(options or {}))
        if parsed.lowering not in _LOWERINGS:
            raise ValueError(f"options['lowering'] must be one of {_LOWERINGS}, not {parsed.lowering!r}.")
        return parsed


def fsdp_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of a model that ``fully_shard`` sharded; for ``torch.compile(model, backend=fsdp_backend)``.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: its inputs.
        options: see :class:`Options`.
        mode: only None; Inductor's modes are not supported.

    Raises:
        ValueError: an option or mode that the backend does not have.
    """
    parsed = Options.parse(options)
    if mode is not None:
        raise ValueError(f"fsdp_backend does not take mode={mode!r}; leave mode out.")
    run_dynamo_passes(gm, observer())
    shards = _qualify_names(gm.graph, example_inputs)
    if not shards:
        if any(isinstance(value, nn.Parameter) and not hasattr(value, "_fsdp_ignored") for value in example_inputs):
            _warn_once_that_nothing_is_sharded()
        if parsed.lowering == "inductor":
            return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
        return _compile(gm, example_inputs, parsed)
    # compile_fx consumes its graph; this one can still be run operator by operator.
    uncompiled = snapshot(gm)
    params = {names: sharded_param(example_inputs[index]) for index, names in shards.items()}
    return _guard_requires_grad(_compile(gm, example_inputs, parsed, params), uncompiled, list(shards))


@functools.cache
def _warn_once_that_nothing_is_sharded() -> None:
    warnings.warn(
        "fsdp_backend compiles a model without a sharded parameter, as plain Inductor would. Call fully_shard on the model "
        "before its first compiled call if it should be sharded.",
        stacklevel=2,
    )


def _qualify_names(graph: Graph, example_inputs: Sequence[Any]) -> dict[int, tuple[str, str]]:
    """Write the qualified names of parameters and units into the graph.

    The code that Dynamo traces knows parameters by their names within a unit, so that equal blocks can share a graph.

    Returns:
        For each input that is a shard, by its index: the names of the unit and of the parameter in the graph.
    """
    index_of = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    unit_names: dict[Unit, str] = {}
    names = {}
    for node in unshards(graph.nodes):
        index = index_of[Unshard.of(node).shard]
        sharded = sharded_param(example_inputs[index])
        if sharded.unit not in unit_names:
            unit_names[sharded.unit] = _unique_name(sharded.unit.name, set(unit_names.values()))
        names[index] = unit_names[sharded.unit], sharded.name
        update_args(node, unit=unit_names[sharded.unit], name=sharded.name)
    return names


def _unique_name(name: str, taken: set[str]) -> str:
    """Units have names within the outermost sharded module; one graph may hold several of those, whose names can be equal."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name or 'root'}_{number}"
    return candidate


def _guard_requires_grad(compiled: Callable[..., Any], uncompiled: GraphModule, shards: list[int]) -> Callable[..., Any]:
    """Notice parameters that were frozen or unfrozen since the graph was traced.

    Dynamo guards on the shards, which follow their parameters here: this call runs operator by operator, with the gradients
    that are now asked for, and the next call compiles anew.
    """

    def call(*args: Any) -> Any:
        if torch.is_grad_enabled():
            changed = [sharded_param(args[index]).sync_requires_grad() for index in shards]
            if any(changed):
                return uncompiled(*args)
        return compiled(*args)

    return call


class _JointPass(CustomGraphPass):
    """Inductor's hook for a pass over the joint graph."""

    def __init__(self, users_passes: Any):
        as_list = users_passes if isinstance(users_passes, (list, tuple)) else [users_passes]
        self._following: list[Callable[[Graph], None]] = [function for function in as_list if function is not None]

    def __call__(self, graph: Graph) -> None:
        run_joint_passes(graph, observer())
        for function in self._following:
            function(graph)

    def uuid(self) -> Any:
        # Inductor's cache is keyed by the graphs that come of this pass anyhow; None would turn the cache off, which is for
        # passes of the user's that do not say what they are.
        uuids = [getattr(function, "uuid", lambda: None)() for function in self._following]
        return None if None in uuids else ["fsdp_compile.reshard_after_forward", *uuids]


def _compile(
    gm: GraphModule, example_inputs: Sequence[Any], options: Options, params: dict[tuple[str, str], ShardedParam] | None = None
) -> Callable[..., Any]:
    config_patches = {
        **INDUCTOR_CONFIG,
        "joint_custom_post_pass": _JointPass(inductor_config.joint_custom_post_pass),
        # Parameters that are frozen into the code could not be sharded.
        "freezing": False,
    }

    def inner_compile(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> BoxedFunction:
        lowering = _Lowering(graph_module, inputs, options, config_patches, kwargs)
        planned = PlannedGraph(
            graph_module, lowering, is_backward=lowering.is_backward, can_keep=not kwargs.get("is_inference", False)
        )
        if not lowering.is_backward:
            planned.lower_ahead(params or {})
        return boxed(planned)

    # The cache of AOTAutograd stores Inductor's own output; what inner_compile returns is bound to this process. Gathered
    # parameters that are saved for backward may live on after it, so backward must not reuse their memory.
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False):
        compiled = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=config_patches,
        )
    return cast("Callable[..., Any]", compiled)


class _Lowering:
    """Lowers a forward or backward graph for a sync plan, also long after ``compile_fx`` has returned.

    Args:
        gm: the partitioned graph; the preparing passes run over it here.
        inputs: its fake inputs.
        options: the backend's options.
        config_patches: Inductor's settings.
        kwargs: what ``compile_fx`` has for ``compile_fx_inner``.
    """

    def __init__(
        self,
        gm: GraphModule,
        inputs: Sequence[Any],
        options: Options,
        config_patches: dict[str, Any],
        kwargs: dict[str, Any],
    ):
        self._gm = gm
        self._inputs = inputs
        self._options = options
        self._config_patches = config_patches
        self._kwargs = kwargs
        self.is_backward = bool(kwargs.get("is_backward"))
        self._group_names = _group_names(gm.graph)
        self._tracing_context = TracingContext.try_get()
        self._compile_context = CompileContext.try_get()
        self._output_strides: list[Any] | None = None
        run_preparing_passes(gm, is_backward=self.is_backward, observer=observer())

    def __call__(self, plan: Plan) -> tuple[BoxedFunction, Interface]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(torch.no_grad())
            stack.enter_context(inductor_config.patch(self._config_patches))
            if TracingContext.try_get() is None and self._tracing_context is not None:
                # The first call with this plan, at run time.
                stack.enter_context(tracing(self._tracing_context))
                stack.enter_context(compile_context(self._compile_context))
                stack.enter_context(V.set_fake_mode(self._tracing_context.fake_mode))
            return self._lower(snapshot(self._gm), plan)

    def _lower(self, gm: GraphModule, plan: Plan) -> tuple[BoxedFunction, Interface]:
        for_inductor = self._options.lowering == "inductor"
        interface = run_passes(gm, plan, is_backward=self.is_backward, for_inductor=for_inductor, observer=observer())
        captured = snapshot(gm) if is_capturing() else None
        code = None
        if for_inductor:
            lowered: Any = self._lower_with_inductor(gm, interface)
            code = getattr(lowered, "source_code", None)
        else:
            lowered = boxed(lambda args: gm(*_emptied(args)))
        if captured is not None:
            record(CapturedGraph(captured, code, self._group_names), self.is_backward)
        return lowered, interface

    def _lower_with_inductor(self, gm: GraphModule, interface: Interface) -> Any:
        extra = [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")[len(self._inputs) :]]
        if self._output_strides is not None:
            _restride_outputs(gm.graph, self._output_strides)
        with V.set_choices_handler(KeepWaits()):
            lowered = compile_fx_inner(gm, [*self._inputs, *extra], **self._kwargs)
        context = TracingContext.try_get()
        if not self.is_backward and context is not None and context.output_strides:
            # Backward is compiled for the layout in which this variant saves activations; later variants keep to it.
            del context.output_strides[interface.num_outputs :]
            self._output_strides = list(context.output_strides)
        return lowered


def _restride_outputs(graph: Graph, strides: Sequence[Any]) -> None:
    """Have a graph give out its first outputs with these strides."""
    output = graph.output_node()
    for node, stride in zip(output.args[0], strides, strict=False):  # type: ignore[arg-type]
        if isinstance(node, Node) and stride is not None and isinstance(node.meta.get("val"), torch.Tensor):
            node.meta["val"] = node.meta["val"].as_strided(node.meta["val"].shape, stride)
    output.meta["user_visible_output_idxs"] = list(range(len(strides)))


def _emptied(args: list[Any]) -> list[Any]:
    taken = list(args)
    args.clear()
    return taken


def _group_names(graph: Graph) -> dict[str, str]:
    """What the process groups of a graph are in the mesh. To be asked before the passes replace the operators."""
    names: dict[str, str] = {}
    specs: list[Unshard | ReduceGrad] = [Unshard.of(node) for node in unshards(graph.nodes)]
    specs += [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
    for spec in specs:
        names[spec.group] = "shard"
        names[spec.replicate_group] = "replicate"
        names[getattr(spec, "post_forward_group", "")] = "post_forward"
    names.pop("", None)
    return names
