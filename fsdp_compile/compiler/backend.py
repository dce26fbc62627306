"""``fsdp_backend``: the torch.compile backend that runs the passes and lowers their graphs.

AOTAutograd, the partitioner and Inductor work as for the ``inductor`` backend: ``compile_fx`` has a hook at each place where a
pass belongs. A few functions of torch are replaced, to be faster or to work with Gloo. :mod:`passes.fx.torch_internals.patches`
lists them.
"""

from __future__ import annotations

import functools
import logging
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes.auto.memory_budget import BudgetTooLow
from passes.fx.decompositions import decompositions
from passes.fx.graph import placeholder_index
from passes.fx.size_guards import SizeGuard
from passes.fx.torch_internals.aot import functorch_config
from passes.fx.torch_internals.core import TracingContext, is_traceable_wrapper_subclass, unset_fake_temporarily
from passes.fx.torch_internals.inductor import CustomGraphPass, compile_fx, inductor_config
from passes.ir.interface import Interface
from passes.ir.ops import Unshard, unshards, update_args
from passes.ir.plan import Plan
from passes.pass_runner import ignore_pass
from passes.pipeline import (
    fold,
    run_dynamo_passes,
    run_joint_passes,
    run_partitioner_passes,
    run_passes,
    run_preparing_passes,
)
from passes.transforms.offload_activations import will_offload
from passes.transforms.refresh_layouts import TracedValues

from ..runtime.collective_log import CheckedProgram
from ..runtime.graph_inputs import GraphInputs, ParameterRegistry, sharded_param
from ..runtime.planned_graph import BoxedFunction, GraphOutputs, PlannedGraph, boxed
from ..runtime.planner import Planner
from ..torch_versions import MESHES_WITHOUT_MEMORY
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .capture import observer, snapshot
from .collector import collector_paused
from .cuda_graphs import Recorders
from .frame_chunks import in_large_frame_chunk
from .full_parameters import FullParameters
from .inductor_options import CUDAGRAPHS, asks_for_cudagraphs
from .lowering import Lowering
from .machine import find_hardware
from .memory_budget import BudgetPartitioner, StepBudget
from .options import LOWERINGS, Options
from .prepared_graph import PreparedGraph
from .traced_forwards import holds_whole_forwards
from .traced_sizes import first_size_proxies
from .variants import Variants

logger = logging.getLogger(__name__)

# Segments are padded. Padding joint graphs, ranks could get different ones (passes/lowering/pad_products.py).
_FOR_JOINT_GRAPHS = {"shape_padding": False}

_FOR_AOTAUTOGRAD = {
    # The cache stores Inductor's own output, but what inner_compile returns is bound to this process.
    "enable_autograd_cache": False,
    # Gathered parameters that are saved for backward may outlive it, so backward must not reuse their memory.
    "donated_buffer": False,
    # Else AOTAutograd would keep the backward graph and compile a copy of it later.
    "force_non_lazy_backward_lowering": True,
    **MESHES_WITHOUT_MEMORY,
}


def fsdp_backend(
    gm: GraphModule, example_inputs: Sequence[Any], *, options: dict[str, Any] | None = None, mode: str | None = None
) -> Callable[..., Any]:
    """Compile a graph of a sharded model. Pass it as ``torch.compile(model, backend=fsdp_backend)``.

    Args:
        gm: the graph that Dynamo captured.
        example_inputs: the graph's inputs.
        options: options of this backend (:class:`Options`) and of Inductor.
        mode: a mode of ``torch.compile``, which stands for options of Inductor.

    Raises:
        ValueError: an option or the mode does not exist, or contradicts what the backend does.
    """
    parsed = Options.parse(options, mode)
    return compile_with(LOWERINGS[parsed.lowering](), gm, example_inputs, parsed)


@in_large_frame_chunk
@collector_paused()
def compile_with(lowering: Lowering, gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    """Compile a graph as :func:`fsdp_backend` does, with a given lowering.

    Args:
        lowering: a new object, which serves this graph alone.
        gm: the graph that Dynamo captured.
        example_inputs: the graph's inputs.
        options: the backend's options. The field ``lowering`` is ignored.
    """
    with inductor_config.patch(dict(options.inductor)):
        return _compile(lowering, gm, example_inputs, options)


def _compile(lowering: Lowering, gm: GraphModule, example_inputs: Sequence[Any], options: Options) -> Callable[..., Any]:
    full_parameters = FullParameters(gm, example_inputs)
    full_parameters.check_writes()
    run_dynamo_passes(gm, observer())
    shards = _qualify_names(gm.graph, example_inputs)
    if not shards:
        return _compile_unsharded(lowering, gm, example_inputs, options)
    lowering.prepare({example_inputs[index].device.type for index in shards})
    # compile_fx consumes its graph. This copy can still run operator by operator.
    uncompiled = snapshot(gm)
    _gather_by_unit(uncompiled)
    params = {names: sharded_param(example_inputs[index]) for index, names in shards.items()}
    registry = ParameterRegistry(params)
    is_whole = holds_whole_forwards(gm, dict.fromkeys(param.unit for param in params.values()))
    compiled = _Compilation(example_inputs, options, lowering, params, registry, is_whole=is_whole).run(gm)
    checked = _check_parameters(compiled, uncompiled, shards, registry)
    return checked if is_whole else full_parameters.lend_outputs(checked)


def _compile_unsharded(
    lowering: Lowering, gm: GraphModule, example_inputs: Sequence[Any], options: Options
) -> Callable[..., Any]:
    if any(isinstance(value, nn.Parameter) and not hasattr(value, "_fsdp_ignored") for value in example_inputs):
        _warn_once_that_nothing_is_sharded()
    if options.memory_budget is not None:
        raise ValueError(
            "options['memory_budget'] is for a whole step, but this graph uses no sharded parameter: call fully_shard on the "
            "model ahead of its first compiled call, and compile the whole model, without graph breaks "
            "(torch.compile(model, fullgraph=True) says where they are)."
        )
    # The library records programs. If Inductor's own option asks for CUDA graphs, Inductor records this unsharded graph.
    is_recorded = options.cudagraphs and not asks_for_cudagraphs(options.inductor)
    compiled = None if is_recorded else lowering.compile_unsharded(gm, example_inputs)
    return compiled or _Compilation(example_inputs, options, lowering, {}, ParameterRegistry({})).run(gm)


@functools.cache
def _warn_once_that_nothing_is_sharded() -> None:
    warnings.warn(
        "fsdp_backend compiles a model without a sharded parameter, as plain Inductor would. Call fully_shard on the model "
        "before its first compiled call if it should be sharded.",
        stacklevel=2,
    )


def _qualify_names(graph: Graph, example_inputs: Sequence[Any]) -> dict[int, tuple[str, str]]:
    """Write the qualified names of parameters and units into the graph.

    The code that Dynamo traces names parameters within their unit, so that equal blocks can share a graph.

    Returns:
        (unit name, parameter name) in the graph for each input that is a shard, by the input's index.
    """
    index_of = placeholder_index(graph)
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


def _place_in_storage(node: Node) -> tuple[str, int, str]:
    spec = Unshard.of(node)
    return spec.unit, spec.offset, spec.name


def _gather_by_unit(gm: GraphModule) -> None:
    """Sort the unshards at the top of a graph by unit, as ranks may read parameters in different orders."""
    found = unshards(gm.graph.nodes)
    last = found[0].prev
    for node in sorted(found, key=_place_in_storage):
        last.append(node)
        last = node
    gm.recompile()


def _unique_name(name: str, taken: set[str]) -> str:
    """Append a number to a unit's name if another unit of the graph has it.

    Names are qualified within the outermost sharded module. A graph may hold several such modules, with equal names of units.
    """
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name or 'root'}_{number}"
    return candidate


def _check_parameters(
    compiled: Callable[..., Any], uncompiled: GraphModule, shards: dict[int, tuple[str, str]], registry: ParameterRegistry
) -> Callable[..., Any]:
    """Wrap ``compiled`` so that each call notices parameters that were swapped, frozen or unfrozen since the trace.

    A swapped parameter raises. A frozen or unfrozen one passes its ``requires_grad`` on to its shard, on which Dynamo guards.
    This call then runs ``uncompiled`` operator by operator, with the gradients that are now required. The next call compiles
    anew.
    """

    def call(*args: Any) -> Any:
        params = [sharded_param(args[index]) for index in shards]
        for names, param in zip(shards.values(), params, strict=True):
            param.check_gather()
            param.check_registered()
            registry.note(names, param)
        if torch.is_grad_enabled():
            changed = [param.note_requires_grad() for param in params]
            if any(changed):
                return uncompiled(*args)
        return compiled(*args)

    return call


class _JointHook(CustomGraphPass):
    """One of Inductor's two hooks over the joint graph, before and after its own patterns.

    Args:
        users_passes: a pass of the user at the same hook, a list of passes, or None.
    """

    def __init__(self, users_passes: Any):
        as_list = users_passes if isinstance(users_passes, (list, tuple)) else [users_passes]
        self._users_passes: list[Callable[[Graph], None]] = [function for function in as_list if function is not None]

    def uuid(self) -> Any:
        # The graphs that result are part of Inductor's cache key, so a constant serves for the library's passes. None, for a
        # user's pass without a uuid, turns the cache off.
        uuids = [getattr(function, "uuid", lambda: None)() for function in self._users_passes]
        return None if None in uuids else ["fsdp_compile.joint_passes", *uuids]


class _BeforePatterns(_JointHook):
    """The hook before Inductor's patterns: the user's passes.

    Attributes:
        traced: the values in the graph that went through last.
    """

    traced: TracedValues | None = None

    def __call__(self, graph: Graph) -> None:
        for function in self._users_passes:
            function(graph)
        self.traced = TracedValues(graph)


class _AfterPatterns(_JointHook):
    """The hook after Inductor's patterns: this library's passes, then the user's passes.

    Args:
        users_passes: see :class:`_JointHook`.
        before: the hook before the patterns.
        options: checked for conflicts with activations that wait on the host.
        tells_partitioner: run the passes that tag nodes for the partitioner, too.
    """

    def __init__(self, users_passes: Any, before: _BeforePatterns, options: Options, *, tells_partitioner: bool):
        super().__init__(users_passes)
        self._before = before
        self._options = options
        self._tells_partitioner = tells_partitioner

    def __call__(self, graph: Graph) -> None:
        traced, self._before.traced = self._before.traced, None
        run_joint_passes(graph, observer(), traced=traced)
        if will_offload(graph):
            _check_activation_offload(self._options)
        if self._tells_partitioner:
            run_partitioner_passes(graph, observer())
        for function in self._users_passes:
            function(graph)


class _Compilation:
    """A compilation of a Dynamo graph by ``compile_fx``, with the passes at its hooks.

    Args:
        example_inputs: the graph's inputs.
        options: the backend's options.
        lowering: makes functions of the forward and the backward graph.
        params: the sharded parameters that the graph reads, by (unit name, parameter name) in the graph.
        registry: finds the parameters that a call's inputs belong to.
        is_whole: whether the graph holds all that a call of the model computes.
    """

    def __init__(
        self,
        example_inputs: Sequence[Any],
        options: Options,
        lowering: Lowering,
        params: Mapping[tuple[str, str], ShardedParam],
        registry: ParameterRegistry,
        *,
        is_whole: bool = False,
    ):
        # AOTAutograd keeps this object alive, which must not keep the model alive: run() empties the two attributes.
        self._examples = list(example_inputs)
        self._params = dict(params)
        self._other_groups = {name: role for param in params.values() for name, role in param.other_groups.items()}
        self._lowering = lowering
        self._registry = registry
        device = next((param.mesh.device for param in params.values()), None)
        _check_offload(options, params.values())
        if any(param.updater is not None for param in params.values()):
            _refuse_updates(options)
        self._min_bucket_bytes = options.small_unit_bytes
        self._options = options
        self._auto = options.auto_schedule(device) if device is not None else None
        self._recorders = Recorders(device) if options.records_on(device) else None
        self._budget: StepBudget | None = None
        if options.memory_budget is not None and device is not None:
            hardware = find_hardware(options.hardware, device.type)
            self._budget = StepBudget(options, self._params, self._examples, hardware, fuses=lowering.fuses, is_whole=is_whole)
        before = _BeforePatterns(inductor_config.joint_custom_pre_pass)
        after = _AfterPatterns(inductor_config.joint_custom_post_pass, before, options, tells_partitioner=self._budget is None)
        self._config_patches = {
            "shape_padding": inductor_config.shape_padding,
            **options.inductor,
            # CUDA graphs are recorded of whole programs, not of segments.
            CUDAGRAPHS: False,
            **lowering.config_patches,
            "joint_custom_pre_pass": before,
            "joint_custom_post_pass": after,
            # Freezing writes parameters into the code as constants, which cannot be sharded.
            "freezing": False,
        }
        self._partitioning: dict[str, Any] = dict(_FOR_JOINT_GRAPHS)
        if self._budget is not None:
            self._partitioning["custom_partitioner_fn"] = BudgetPartitioner(self._budget, self._schedule)
            # Segments have nothing to partition, and Inductor copies its configuration for each segment.
            self._config_patches["custom_partitioner_fn"] = None
        # Once a graph is lowered, ranks have agreed on it: the compilation cannot start over.
        self._is_any_lowered = False

    def run(self, gm: GraphModule) -> Callable[..., Any]:
        """Compile with repeated layers traced once. If that fails before a graph is lowered, compile every layer."""
        try:
            # A user's pass over the joint graph must see every layer.
            if inductor_config.joint_custom_pre_pass or inductor_config.joint_custom_post_pass:
                return self._compile(gm)
            unfolded = snapshot(gm)
            with inductor_config.patch(_FOR_JOINT_GRAPHS):
                folded = fold(gm, observer(), self._options.disable_passes)
            try:
                return self._compile(gm)
            except Exception as error:
                if self._is_any_lowered or not folded or isinstance(error, BudgetTooLow):
                    raise
                logger.warning("Repeated layers are traced one by one, as tracing them once failed: %r", error)
            return self._compile(unfolded)
        finally:
            self._examples.clear()
            self._params.clear()

    def _compile(self, gm: GraphModule) -> Callable[..., Any]:
        with (
            functorch_config.patch(_FOR_AOTAUTOGRAD),
            first_size_proxies(),
        ):
            compiled = compile_fx(
                gm,
                self._examples,
                inner_compile=self._inner_compile,  # type: ignore[arg-type]
                config_patches=self._config_patches | self._partitioning,
                decompositions=decompositions(),
            )
        return cast("Callable[..., Any]", compiled)

    def _inner_compile(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> BoxedFunction:
        self._is_any_lowered = True
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # AOTAutograd reads donated_buffer again at run time, after the patch. With None here, it would refuse
            # retain_graph=True.
            metadata.bw_donated_idxs = []
        _refuse_writes(self._examples, self._params.values())
        prepared = PreparedGraph(
            gm,
            self._lowering,
            self._config_patches,
            kwargs,
            self._auto,
            self._min_bucket_bytes,
            self._recorders,
            self._other_groups,
            self._budget,
            self._options.disable_passes,
        )
        can_keep = not kwargs.get("is_inference", False)
        planner = self._planner(prepared.inputs, prepared.is_backward, can_keep=can_keep)
        variants = Variants(planner, functools.partial(self._lower, prepared))
        # To lower ahead is to wait for the ranks with Dynamo's lock held. Of several threads only one may do so: on other
        # ranks, another thread may hold the lock and wait for this rank.
        if not prepared.is_backward and threading.current_thread() is threading.main_thread():
            units = {unit: param.unit for (unit, _), param in self._params.items()}
            variants.find(planner.first(self._params), units, None)
        return boxed(PlannedGraph(GraphOutputs.of(gm.graph), planner, variants.find, self._registry))

    def _planner(self, inputs: GraphInputs, is_backward: bool, *, can_keep: bool = True) -> Planner:
        can_merge = self._auto is not None or bool(self._min_bucket_bytes)
        return Planner(inputs, is_backward=is_backward, can_keep=can_keep, can_merge=can_merge)

    def _lower(
        self, prepared: PreparedGraph, plan: Plan, args: Sequence[Any] | None
    ) -> tuple[BoxedFunction, Interface, CheckedProgram, SizeGuard | None]:
        if plan.has_updates:
            # The optimizer may have been made after the model was compiled.
            _refuse_updates(self._options)
        return prepared.lower(plan, args)

    def _schedule(self, gm: GraphModule, is_backward: bool) -> tuple[Graph, Interface]:
        """Run all passes over a graph, in place, for the plan of its first call. Return the graph and its interface."""
        run_preparing_passes(gm, self._lowering.preparing_passes, is_backward=is_backward, observer=ignore_pass)
        planner = self._planner(GraphInputs.of(gm.graph), is_backward)
        # As in PreparedGraph.lower.
        with unset_fake_temporarily(), torch.no_grad():
            interface = run_passes(
                gm,
                planner.first(self._params),
                is_backward=is_backward,
                final_passes=self._lowering.final_passes,
                observer=ignore_pass,
                disabled=self._options.disable_passes,
                auto=self._auto,
                min_bucket_bytes=self._min_bucket_bytes,
            )
        return gm.graph, interface


def _check_offload(options: Options, params: Iterable[ShardedParam]) -> None:
    """Check that no option conflicts with parameters on the host.

    Raises:
        ValueError: parameters are on the host, and the automatic schedule or CUDA graphs are on.
    """
    chosen = _first_enabled(options, "schedule", "cudagraphs")
    for param in params:
        if chosen is not None and param.unit.copies:
            value = getattr(options, chosen)
            raise ValueError(
                f"options[{chosen!r}] = {value!r} is not supported for {param.unit.name or 'the root'}, whose parameters "
                "are copied from the host (offload_policy=CPUOffloadPolicy()). Compile without the option, or shard without "
                "the policy."
            )


def _refuse_updates(options: Options) -> None:
    """Check that no option conflicts with a backward that updates parameters.

    Raises:
        ValueError: a memory budget, the automatic schedule or CUDA graphs are on.
    """
    chosen = _first_enabled(options, "memory_budget", "schedule", "cudagraphs")
    if chosen is not None:
        raise ValueError(
            f"options[{chosen!r}] = {getattr(options, chosen)!r} does not know of updates in backward (optimizer_in_backward). "
            "Compile without the option, or use an optimizer of torch.optim or flat_optimizer."
        )


def _check_activation_offload(options: Options) -> None:
    """Check that CUDA graphs are off, which do not support activations that wait on the host.

    Raises:
        ValueError: CUDA graphs are on.
    """
    if options.cudagraphs:
        raise ValueError(
            f"options['cudagraphs'] = {options.cudagraphs!r} is not supported for a model with activations that wait on the "
            "host, as a policy of create_selective_checkpoint_contexts says with MUST_CPU_OFFLOAD or PREFER_CPU_OFFLOAD. "
            "Compile without the option, or have the policy answer MUST_SAVE or MUST_RECOMPUTE."
        )


def _first_enabled(options: Options, *names: str) -> str | None:
    """Return the first of these options that is on."""
    is_set = {
        "memory_budget": options.memory_budget is not None,
        "schedule": options.schedule == "auto",
        "cudagraphs": options.cudagraphs,
    }
    return next((name for name in names if is_set[name]), None)


def _refuse_writes(inputs: Sequence[Any], params: Iterable[ShardedParam]) -> None:
    """Refuse a graph that writes to a parameter and also unshards it.

    AOTAutograd does not know that a parameter and its shard share memory. It would run the write after the unshard.

    Raises:
        RuntimeError: the graph does so.
    """
    context = TracingContext.try_get()
    infos = context.fw_metadata.input_info if context is not None and context.fw_metadata is not None else []
    mutated = [info.mutates_data for info in infos]
    if not any(mutated):
        return
    flat = [value for value in inputs for _ in (value.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(value) else [0])]
    # AOTAutograd merges inputs that are views of each other. Then indices do not match, and every input counts as written.
    written = [value for index, value in enumerate(flat) if len(mutated) != len(flat) or mutated[index]]
    for param in params:
        if any(param.owns_memory_of(value) for value in written):
            raise RuntimeError(
                f"A compiled function writes to parameter {param.name} and runs the forward that reads it, in one graph. "
                "Write to it outside of the compiled function, or call torch._dynamo.graph_break() between the two."
            )
