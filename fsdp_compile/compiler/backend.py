"""``fsdp_backend``: the torch.compile backend that runs the passes and lowers their graphs.

AOTAutograd, the partitioner and Inductor do what they do for the ``inductor`` backend; ``compile_fx`` has a hook at each place
where a pass belongs, and nothing of them is patched.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule

from passes.auto.auto_schedule import AutoSchedule
from passes.fx.torch_internals.aot import V, functorch_config
from passes.fx.torch_internals.core import (
    CompileContext,
    TracingContext,
    compile_context,
    is_traceable_wrapper_subclass,
    tracing,
)
from passes.fx.torch_internals.dynamo import compile_lock
from passes.fx.torch_internals.inductor import CustomGraphPass, compile_fx, compile_fx_inner, inductor_config
from passes.ir.interface import Interface
from passes.ir.ops import ReduceGrad, Unshard, reduce_grads, unshards, update_args
from passes.ir.plan import Plan
from passes.lowering.collective_sequence import collective_sequence
from passes.lowering.program import write_program
from passes.lowering.segments import Segment, cut_into_segments
from passes.pipeline import run_dynamo_passes, run_joint_passes, run_passes, run_preparing_passes
from passes.transforms.repeated_layers import fold_layers

from ..runtime.course import Run, agree_on_graph
from ..runtime.graph_inputs import Owners, sharded_param
from ..runtime.planned_graph import BoxedFunction, PlannedGraph, boxed
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .background_kernels import kernels_in_background, probe_instruction_set, share_among_ranks, split_among_cores
from .capture import CapturedGraph, is_capturing, observer, record, snapshot
from .cuda_graphs import Recorders
from .garbage import collector_paused
from .options import Options

logger = logging.getLogger(__name__)


@collector_paused()
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
        if parsed.lowering == "inductor" and not parsed.cudagraphs:
            return cast("Callable[..., Any]", compile_fx(gm, example_inputs))
        return _compile_folded(gm, example_inputs, parsed)
    if parsed.lowering == "inductor" and all(example_inputs[index].device.type == "cpu" for index in shards):
        probe_instruction_set()
    # compile_fx consumes its graph; this one can still be run operator by operator.
    uncompiled = snapshot(gm)
    params = {names: sharded_param(example_inputs[index]) for index, names in shards.items()}
    owners = Owners(params)
    compiled = _compile_folded(gm, example_inputs, parsed, params, owners)
    return _check_parameters(compiled, uncompiled, shards, owners)


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
            unit_names[sharded.unit] = _unique_name(sharded.unit.name, {"root", *unit_names.values()})
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


def _check_parameters(
    compiled: Callable[..., Any], uncompiled: GraphModule, shards: dict[int, tuple[str, str]], owners: Owners
) -> Callable[..., Any]:
    """Notice parameters that were swapped, frozen or unfrozen since the graph was traced.

    Dynamo guards on the shards. They follow their parameters' ``requires_grad`` here: this call runs operator by operator, with
    the gradients that are now asked for, and the next call compiles anew.
    """

    def call(*args: Any) -> Any:
        params = [sharded_param(args[index]) for index in shards]
        for names, param in zip(shards.values(), params, strict=True):
            param.check_gather()
            param.check_registered()
            owners.note(names, param)
        if torch.is_grad_enabled():
            changed = [param.sync_requires_grad() for param in params]
            if any(changed):
                return uncompiled(*args)
        return compiled(*args)

    return call


class _JointPass(CustomGraphPass):
    """Inductor's hook for passes of ours over the joint graph, ahead of the user's at the same hook."""

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
        return None if None in uuids else ["fsdp_compile.joint_passes", *uuids]


class _LoweringBegan:
    """Whether a compilation has got as far as lowering a graph: then ranks have agreed on it, and it cannot begin anew."""

    def __init__(self) -> None:
        self.value = False


def _compile_folded(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    params: Mapping[tuple[str, str], ShardedParam] = MappingProxyType({}),
    owners: Owners = Owners({}),  # noqa: B008 (of nobody)
) -> Callable[..., Any]:
    """Compile with repeated layers traced once; and as they are, should the fold be in the way of a graph."""
    # A pass of the user's over the joint graph is to see every layer.
    if inductor_config.joint_custom_pre_pass or inductor_config.joint_custom_post_pass:
        return _compile(gm, example_inputs, options, params, owners, _LoweringBegan())
    unfolded = snapshot(gm)
    began = _LoweringBegan()
    folded = fold_layers(gm)
    try:
        return _compile(gm, example_inputs, options, params, owners, began)
    except Exception as error:
        if began.value or not folded:
            raise
        logger.warning("Repeated layers are traced one by one, as tracing them once failed: %r", error)
    return _compile(unfolded, example_inputs, options, params, owners, began)


def _compile(
    gm: GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    params: Mapping[tuple[str, str], ShardedParam],
    owners: Owners,
    began: _LoweringBegan,
) -> Callable[..., Any]:
    config_patches = {
        "joint_custom_post_pass": _JointPass(inductor_config.joint_custom_post_pass),
        # Parameters that are frozen into the code could not be sharded.
        "freezing": False,
    }
    if options.lowering == "aot_eager":
        # Inductor's random numbers come from seeds, which its operators ignore where no kernel is made of them: a checkpoint
        # would draw others in backward.
        config_patches["fallback_random"] = True
    kernels: dict[Hashable, Any] = {}
    device = next((param.unit.mesh.device for param in params.values()), None)
    auto = options.auto_schedule(device) if device is not None else None
    recorders = Recorders(device) if options.cudagraphs else None

    # AOTAutograd keeps inner_compile, which must not keep the model.
    examples, ahead = list(example_inputs), dict(params)

    def inner_compile(graph_module: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> BoxedFunction:
        began.value = True
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # Nothing is donated. AOTAutograd asks the configuration at run time for that, and refuses retain_graph=True.
            metadata.bw_donated_idxs = []
        _refuse_writes(examples, ahead.values())
        lowering = _Lowering(graph_module, options, config_patches, kwargs, kernels, auto, recorders)
        planned = PlannedGraph(
            graph_module,
            lowering,
            is_backward=lowering.is_backward,
            owners=owners,
            can_keep=not kwargs.get("is_inference", False),
            can_merge=auto is not None,
        )
        if not lowering.is_backward:
            planned.lower_ahead(ahead)
        return boxed(planned)

    # The cache of AOTAutograd stores Inductor's own output; what inner_compile returns is bound to this process. Gathered
    # parameters that are saved for backward may live on after it, so backward must not reuse their memory.
    # The backward is prepared with the forward: AOTAutograd would else keep its graph and give the later compilation a copy.
    with functorch_config.patch(enable_autograd_cache=False, donated_buffer=False, force_non_lazy_backward_lowering=True):
        compiled = compile_fx(
            gm,
            example_inputs,
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=config_patches,
        )
    examples.clear()
    ahead.clear()
    return cast("Callable[..., Any]", compiled)


def _refuse_writes(inputs: Sequence[Any], params: Iterable[ShardedParam]) -> None:
    """Refuse a graph that writes to a parameter that it also unshards: by AOTAutograd's order the write would come last.

    AOTAutograd sees no connection between the parameter and its shard.
    """
    context = TracingContext.try_get()
    infos = context.fw_metadata.input_info if context is not None and context.fw_metadata is not None else []
    mutated = [info.mutates_data for info in infos]
    if not any(mutated):
        return
    flat = [value for value in inputs for _ in (value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else [0])]
    # Of inputs that are views of each other it makes one: which is which is not known then.
    written = [value for index, value in enumerate(flat) if len(mutated) != len(flat) or mutated[index]]
    for param in params:
        if any(param.owns_memory_of(value) for value in written):
            raise RuntimeError(
                f"A compiled function writes to parameter {param.name} and runs the forward that reads it, in one graph. "
                "Write to it outside of the compiled function, or call torch._dynamo.graph_break() between the two."
            )


class _Lowering:
    """Lowers a forward or backward graph for a sync plan, also long after ``compile_fx`` has returned.

    Args:
        gm: the partitioned graph; the preparing passes run over it here.
        options: the backend's options.
        config_patches: Inductor's settings.
        kwargs: what ``compile_fx`` has for ``compile_fx_inner``.
        kernels: compiled segments, shared by all graphs of a model and all their variants.
        auto: what to schedule for; None: the default schedule.
        recorders: make CUDA graphs of programs; None: they do not become any.
    """

    def __init__(
        self,
        gm: GraphModule,
        options: Options,
        config_patches: dict[str, Any],
        kwargs: dict[str, Any],
        kernels: dict[Hashable, Any],
        auto: AutoSchedule | None,
        recorders: Recorders | None,
    ):
        self._gm = gm
        self._options = options
        self._config_patches = config_patches
        self.is_backward = bool(kwargs.get("is_backward"))
        # Which inputs are parameters or saved, by position, is said of the whole graph.
        self._kwargs = {**kwargs, "static_input_idxs": ()}
        self._kernels = kernels
        self._auto = auto
        self._recorders = recorders
        self._group_names = _group_names(gm.graph)
        self._tracing_context = TracingContext.try_get()
        self._compile_context = CompileContext.try_get()
        run_preparing_passes(gm, is_backward=self.is_backward, observer=observer())

    def __call__(self, plan: Plan) -> tuple[BoxedFunction, Interface, Run]:
        gm = snapshot(self._gm)
        with self._compiling():
            interface = run_passes(
                gm,
                plan,
                is_backward=self.is_backward,
                for_inductor=self._options.lowering == "inductor",
                observer=observer(),
                auto=self._auto,
            )
        group_names = self._group_names | _reduce_scatter_groups(plan)
        stage = "backward" if self.is_backward else "forward"
        # Another thread may compile meanwhile: on other ranks it may be that one's turn.
        run = agree_on_graph(stage, collective_sequence(gm.graph, group_names), group_names)
        with self._compiling():
            return self._lower(gm, group_names), interface, run

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            # Neither torch.fx nor Inductor can work for two threads at once. Dynamo holds the lock while it compiles.
            stack.enter_context(compile_lock)
            stack.enter_context(collector_paused())
            stack.enter_context(torch.no_grad())
            stack.enter_context(inductor_config.patch(self._config_patches))
            if TracingContext.try_get() is None and self._tracing_context is not None:
                # The first call with this plan, at run time.
                stack.enter_context(tracing(self._tracing_context))
                stack.enter_context(compile_context(self._compile_context))
                stack.enter_context(V.set_fake_mode(self._tracing_context.fake_mode))
            yield

    def _lower(self, gm: GraphModule, group_names: dict[str, str]) -> BoxedFunction:
        code = None
        if self._options.lowering == "inductor":
            code, function = self._lower_with_inductor(gm)
            lowered = boxed(function)
        else:
            lowered = boxed(lambda args: gm(*_emptied(args)))
        if is_capturing():
            record(CapturedGraph(snapshot(gm), code, group_names), self.is_backward)
        if self._recorders is not None:
            lowered = boxed(self._recorders.recorded(lowered, gm.graph, is_backward=self.is_backward, groups=group_names))
        return lowered

    def _lower_with_inductor(self, gm: GraphModule) -> tuple[str, Callable[[list[Any]], Any]]:
        """The program of collectives and segments: its source, with that of the segments, and its function."""
        outer, segments = cut_into_segments(gm)
        keys = {name: (self.is_backward, segment.key) for name, segment in segments.items()}
        new: dict[Hashable, Segment] = {
            keys[name]: segment for name, segment in segments.items() if keys[name] not in self._kernels
        }
        if _devices(gm.graph) == {torch.device("cpu")}:
            groups = split_among_cores({key: len(segment.graph_module.graph.nodes) for key, segment in new.items()})
            with kernels_in_background() as end_library:
                work = {group: functools.partial(self._compile_together, group, new, end_library) for group in groups}
                done = list(share_among_ranks(work).values())
        else:
            done = [self._compile_together(new, new)]
        # Whole, or after a failure not at all.
        for kernels in done:
            self._kernels.update(kernels)
        compiled = {name: self._kernels[key] for name, key in keys.items()}
        source, function = write_program(outer, compiled, gm)
        parts = [f"# {name}\n{kernels.source_code}" for name, kernels in compiled.items() if hasattr(kernels, "source_code")]
        return "\n\n".join([source, *parts]), function

    def _compile_together(
        self, keys: Iterable[Hashable], segments: Mapping[Hashable, Segment], end_library: Callable[[], None] = lambda: None
    ) -> dict[Hashable, Any]:
        kernels = {key: self._compile_segment(segments[key]) for key in keys}
        end_library()
        return kernels

    def _compile_segment(self, segment: Segment) -> Any:
        inputs = [node.meta["val"] for node in segment.graph_module.graph.find_nodes(op="placeholder")]
        compiled = compile_fx_inner(segment.graph_module, inputs, **self._kwargs)
        context = TracingContext.try_get()
        if context is not None and context.output_strides:
            # What a segment gives out is laid out as it was traced, so the whole graph's outputs are.
            context.output_strides.clear()
        return compiled


def _devices(graph: Graph) -> set[torch.device]:
    values = [node.meta.get("val") for node in graph.nodes]
    return {value.device for value in values if isinstance(value, torch.Tensor)}


def _emptied(args: list[Any]) -> list[Any]:
    taken = list(args)
    args.clear()
    return taken


def _group_names(graph: Graph) -> dict[str, str]:
    """The roles of a graph's process groups in the mesh, by name. To be asked before the passes replace the operators."""
    names: dict[str, str] = {}
    specs: list[Unshard | ReduceGrad] = [Unshard.of(node) for node in unshards(graph.nodes)]
    specs += [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
    for spec in specs:
        names[spec.group] = "shard"
        names[spec.replicate_group] = "replicate"
        names[getattr(spec, "post_forward_group", "")] = "post_forward"
    names.pop("", None)
    return names


def _reduce_scatter_groups(plan: Plan) -> dict[str, str]:
    return {reduction.group: "reduce" for reduction in plan.reductions if reduction.group}
