"""``fsdp_backend``: the torch.compile backend that runs the passes and lowers their graphs.

AOTAutograd, the partitioner and Inductor work as for the ``inductor`` backend: ``compile_fx`` has a hook at each place where a
pass belongs. A few functions of torch are replaced, to be faster or to work with Gloo. :mod:`passes.fx.torch_internals.patches`
lists them.
"""

from __future__ import annotations

import functools
import logging
import pickle
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from passes.auto.memory_budget import BudgetTooLow
from passes.collectives.functional import group_ranks
from passes.collectives.gloo import backend_of
from passes.fx.decompositions import decompositions
from passes.fx.frames import input_sources
from passes.fx.graph import placeholder_index
from passes.fx.size_guards import InputSizes
from passes.fx.torch_internals.aot import deserialize_bundled_cache_entry, functorch_config
from passes.fx.torch_internals.core import (
    TracingContext,
    is_traceable_wrapper_subclass,
    pytree,
    tracing,
    unset_fake_temporarily,
)
from passes.fx.torch_internals.inductor import CustomGraphPass, compile_fx, inductor_config
from passes.ir.interface import Interface
from passes.ir.ops import Unshard, unshards, update_args
from passes.ir.plan import Plan
from passes.models.group_layout import GroupLayout
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

from ..runtime.graph_inputs import GraphInputs, ParameterRegistry, sharded_param
from ..runtime.planned_graph import BoxedFunction, GraphOutputs, PlannedGraph, boxed
from ..runtime.planner import Planner
from ..torch_versions import MESHES_WITHOUT_MEMORY
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .capture import is_capturing, observer, snapshot
from .collector import collector_paused
from .cuda_graphs import Recorders
from .frame_chunks import in_large_frame_chunk
from .full_parameters import FullParameters, lend_outputs
from .inductor_options import CUDAGRAPHS, asks_for_cudagraphs
from .lowering import Lowering
from .machine import find_hardware
from .memory_budget import BudgetPartitioner, StepBudget
from .options import LOWERINGS, Options
from .precompiled_file import nothing_can_be_taken
from .prepared_graph import LoweredGraph, PreparedGraph, group_names
from .recomputed_attention import without_random_states
from .stored_frame import StoredBackend, record
from .stored_graph import (
    GraphSource,
    GraphSummary,
    StoredGraph,
    bind_new,
    binding,
    can_store,
    configuration,
    read_graph,
    write_graph,
)
from .traced_forwards import holds_whole_forwards
from .traced_sizes import first_size_proxies
from .variants import Variants

logger = logging.getLogger(__name__)

# Segments are padded. Padding joint graphs, ranks could get different ones (passes/lowering/pad_products.py).
_FOR_JOINT_GRAPHS = {"shape_padding": False}

_WITHOUT_HOOKS = {"joint_custom_pre_pass": None, "joint_custom_post_pass": None}

_FOR_AOTAUTOGRAD = {
    # The cache is to keep what inner_compile returns, rather than the key of an entry in Inductor's cache.
    "bundled_autograd_cache": True,
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
        NotPrecompiled: there is the option ``precompiled``, and the graph was traced where nothing stored can be taken.
    """
    parsed = Options.parse(options, mode)
    if parsed.precompiled is not None and not is_capturing():
        raise nothing_can_be_taken()
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
    with inductor_config.patch({**options.inductor, **lowering.config_patches}):
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
    sources = input_sources(gm)
    compilation = _Compilation(example_inputs, options, lowering, params, registry, is_whole=is_whole)
    compiled = compilation.run(gm, uncompiled)
    lent = {} if is_whole else full_parameters.outputs
    record(lambda: compilation.stored(compiled, uncompiled, sources, shards, lent))
    return lend_outputs(_check_parameters(compiled, lambda: uncompiled, shards, registry), lent)


@in_large_frame_chunk
@collector_paused()
def restore(
    stored: StoredBackend, example_inputs: Sequence[Any], options: Options, context: TracingContext
) -> tuple[Callable[..., Any], Callable[[], None]] | None:
    """Make the function of a stored frame's graph again.

    Args:
        stored: what was stored.
        example_inputs: the graph's inputs.
        options: the backend's options.
        context: the context of the frame.

    Returns:
        The function, and a function that lowers its forward graph, for which it waits for the other ranks. None: the graph
        depends on what is different now, such as the ranks of a group.
    """
    lowering = LOWERINGS[options.lowering]()
    with inductor_config.patch({**options.inductor, **lowering.config_patches}):
        params = {names: sharded_param(example_inputs[index]) for index, names in stored.shards.items()}
        lowering.prepare({example_inputs[index].device.type for index in stored.shards})
        registry = ParameterRegistry(params)
        compilation = _Compilation(example_inputs, options, lowering, params, registry)
        compiled = compilation.restore(stored, context)
    if compiled is None:
        return None
    uncompiled = functools.cache(functools.partial(read_graph, stored.uncompiled))
    checked = _check_parameters(compiled, uncompiled, stored.shards, registry)
    return lend_outputs(checked, stored.lent), compilation.lower_ahead


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
    return compiled or _Compilation(example_inputs, options, lowering, {}, ParameterRegistry({})).run(gm, snapshot(gm))


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
    compiled: Callable[..., Any],
    uncompiled: Callable[[], GraphModule],
    shards: Mapping[int, tuple[str, str]],
    registry: ParameterRegistry,
) -> Callable[..., Any]:
    """Wrap ``compiled`` so that each call notices parameters that were swapped, frozen or unfrozen since the trace.

    A swapped parameter raises. A frozen or unfrozen one passes its ``requires_grad`` on to its shard, on which Dynamo guards.
    This call then runs the graph of ``uncompiled`` operator by operator, with the gradients that are now required. The next
    call compiles anew.
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
                return uncompiled()(*args)
        return compiled(*args)

    return call


class _Hook(CustomGraphPass):
    """One of Inductor's hooks for passes over whole graphs.

    Args:
        users_passes: a pass of the user at the same hook, a list of passes, or None.
        key: stands for all that the library's passes depend on, besides the graph.

    Attributes:
        is_keyed: give caches a key. False turns them off.
    """

    is_keyed = True

    def __init__(self, users_passes: Any, key: str):
        self._key = key
        as_list = users_passes if isinstance(users_passes, (list, tuple)) else [users_passes]
        self._users_passes: list[Callable[[Graph], None]] = [function for function in as_list if function is not None]

    def uuid(self) -> Any:
        # None, for a user's pass without a uuid, turns caches off.
        uuids = [getattr(function, "uuid", lambda: None)() for function in self._users_passes]
        return None if None in uuids or not self.is_keyed else [self._key, *uuids]

    @property
    def has_key(self) -> bool:
        """True if every pass of the user says what it depends on."""
        return _Hook.uuid(self) is not None


class _BeforePatterns(_Hook):
    """The hook over the joint graph before Inductor's patterns: the user's passes.

    Attributes:
        traced: the values in the graph that went through last.
    """

    traced: TracedValues | None = None

    def __call__(self, graph: Graph) -> None:
        for function in self._users_passes:
            function(graph)
        self.traced = TracedValues(graph)


class _AfterPatterns(_Hook):
    """The hook over the joint graph after Inductor's patterns: this library's passes, then the user's passes.

    Args:
        users_passes, key: see :class:`_Hook`.
        before: the hook before the patterns.
        options: checked for conflicts with activations that wait on the host.
        tells_partitioner: run the passes that tag nodes for the partitioner, too.
    """

    def __init__(self, users_passes: Any, key: str, before: _BeforePatterns, options: Options, *, tells_partitioner: bool):
        super().__init__(users_passes, key)
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


class _Folding(_Hook):
    """The hook over Dynamo's graph: the user's passes, then ``fold_layers``.

    Attributes:
        is_on: fold layers.
        has_folded: whether a graph was changed.
    """

    def __init__(self, users_passes: Any, key: str, disabled: Sequence[str]):
        super().__init__(users_passes, key)
        self._disabled = disabled
        self.is_on = True
        self.has_folded = False

    def uuid(self) -> Any:
        # Without a key, the pass would have to run before the look into the cache. There is none then.
        return super().uuid() or self._key

    def __call__(self, graph: Graph) -> None:
        for function in self._users_passes:
            function(graph)
        if self.is_on and graph.owning_module is not None:
            self.fold(graph.owning_module)

    def fold(self, gm: GraphModule) -> None:
        """Fold the layers of a graph, in place."""
        # The trace of a layer has no joint graph yet, over which hooks would run.
        with inductor_config.patch({**_FOR_JOINT_GRAPHS, **_WITHOUT_HOOKS}):
            self.has_folded = fold(gm, observer(), self._disabled)


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
        users_passes = (inductor_config.joint_custom_pre_pass, inductor_config.joint_custom_post_pass)
        self._key = key = self._configuration(users_passes)
        before = _BeforePatterns(users_passes[0], key)
        after = _AfterPatterns(users_passes[1], key, before, options, tells_partitioner=self._budget is None)
        self._folding = _Folding(inductor_config.pre_grad_custom_pass, key, options.disable_passes)
        # A user's pass over the joint graph must see every layer.
        self._folding.is_on = not any(users_passes)
        self._config_patches = {
            "shape_padding": inductor_config.shape_padding,
            **options.inductor,
            # CUDA graphs are recorded of whole programs, not of segments.
            CUDAGRAPHS: False,
            **lowering.config_patches,
            # Freezing writes parameters into the code as constants, which cannot be sharded.
            "freezing": False,
        }
        self._partitioning: dict[str, Any] = {
            **_FOR_JOINT_GRAPHS,
            "joint_custom_pre_pass": before,
            "joint_custom_post_pass": after,
        }
        # Segments are no joint graphs, and Inductor copies its configuration, and makes a key of it, for each segment.
        self._config_patches |= _WITHOUT_HOOKS
        if self._budget is not None:
            self._partitioning["custom_partitioner_fn"] = BudgetPartitioner(self._budget, self._schedule)
            self._config_patches["custom_partitioner_fn"] = None
        self._stores = self._can_store()
        # An environment variable may turn AOTAutograd's cache on for good.
        before.is_keyed = self._stores
        self._made: list[StoredGraph] = []
        self._is_stored = self._stores
        # Lowers the forward graph for its first plan.
        self._lower_ahead: Callable[[], object] = lambda: None

    def _configuration(self, users_passes: Sequence[Any]) -> str:
        """Return a key of what the passes over Dynamo's graph and the joint graph depend on, besides these graphs."""
        params = self._params.values()
        devices = {name: param.mesh.device for param in params for name in (*param.mesh.groups, *param.other_groups)}
        groups = [
            (name, GroupLayout.of(group_ranks(name)), backend_of(name, device), self._other_groups.get(name))
            for name, device in sorted(devices.items())
        ]
        options = self._options.disable_passes, self._options.cudagraphs, self._budget is None
        return repr((configuration(), type(self._lowering).__qualname__, options, groups, any(users_passes)))

    def _can_store(self) -> bool:
        """Return whether AOTAutograd's cache may keep the graphs: they depend on nothing but its key, and nobody watches."""
        return (
            can_store()
            and functorch_config.enable_autograd_cache
            and self._folding.has_key
            and self._budget is None
            and not is_capturing()
            # Neither the code of a subclass nor that of an extension is in the key.
            and not any(map(is_traceable_wrapper_subclass, self._examples))
            and all(param.extension is None for param in self._params.values())
        )

    def run(self, gm: GraphModule, uncompiled: GraphModule) -> Callable[..., Any]:
        """Compile with repeated layers traced once. If that fails, compile every layer. Then lower the forward graph.

        Args:
            gm: the graph, which is consumed.
            uncompiled: another copy of it.
        """
        try:
            compiled = self._compile_folded(gm, uncompiled)
        except BaseException:
            self._forget()
            raise
        self.lower_ahead()
        return compiled

    def stored(
        self,
        compiled: Callable[..., Any],
        uncompiled: GraphModule,
        sources: Sequence[Any],
        shards: Mapping[int, tuple[str, str]],
        lent: Mapping[int, int],
    ) -> StoredBackend | None:
        """Return what was made, for the next process; None: it cannot be stored. Call it after :meth:`run`."""
        serialize = getattr(compiled, "serialize", None)
        if not self._is_stored or serialize is None:
            return None
        try:
            content = pickle.dumps(serialize())
        except Exception as error:
            logger.info("A frame is not stored: %r", error)
            return None
        arguments = (argument for node in uncompiled.graph.nodes for argument in pytree.tree_leaves((node.args, node.kwargs)))
        numbers = frozenset(argument for argument in arguments if type(argument) is int)
        return StoredBackend(sources, shards, lent, self._key, content, write_graph(uncompiled), numbers)

    def restore(self, stored: StoredBackend, context: TracingContext) -> Callable[..., Any] | None:
        """Return the function that another process has made; None: it depends on what is different now."""
        if not self._stores or stored.key != self._key:
            return None
        with (
            inductor_config.patch(self._config_patches),
            functorch_config.patch(_FOR_AOTAUTOGRAD | {"enable_autograd_cache": True}),
            binding(self._bind),
            tracing(context),
        ):
            return deserialize_bundled_cache_entry(pickle.loads(stored.content))

    def lower_ahead(self) -> None:
        """Lower the forward graph for its first plan. This object can compile nothing afterwards."""
        try:
            self._lower_ahead()
        finally:
            self._forget()

    def _forget(self) -> None:
        self._lower_ahead = lambda: None
        self._examples.clear()
        self._params.clear()

    def _compile_folded(self, gm: GraphModule, uncompiled: GraphModule) -> Callable[..., Any]:
        try:
            return self._compile(gm)
        except Exception as error:
            if not self._folding.has_folded or isinstance(error, BudgetTooLow):
                raise
            logger.warning("Repeated layers are traced one by one, as tracing them once failed: %r", error)
        self._folding.is_on = False
        return self._compile(snapshot(uncompiled))

    def _compile(self, gm: GraphModule) -> Callable[..., Any]:
        patches = self._config_patches | self._partitioning
        if can_store():
            # After the look into the cache, whose key can only be made of a graph without folded layers.
            patches |= {"pre_grad_custom_pass": self._folding, "pre_grad_pass_timing": "late"}
        elif self._folding.is_on:
            self._folding.fold(gm)
        with (
            functorch_config.patch(_FOR_AOTAUTOGRAD | {"enable_autograd_cache": self._stores}),
            first_size_proxies(),
            without_random_states(),
            binding(self._bind),
        ):
            compiled = compile_fx(
                gm,
                self._examples,
                inner_compile=self._inner_compile,  # type: ignore[arg-type]
                config_patches=patches,
                decompositions=decompositions(),
            )
        self._is_stored = self._stores and all(made.content for made in self._made)
        while self._made:
            # AOTAutograd has written it to its cache.
            self._made.pop().content = b""
        return cast("Callable[..., Any]", compiled)

    def _inner_compile(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> StoredGraph:
        metadata = TracingContext.get().fw_metadata
        if metadata is not None:
            # AOTAutograd reads donated_buffer again at run time, after the patch. With None here, it would refuse
            # retain_graph=True.
            metadata.bw_donated_idxs = []
        is_backward = bool(kwargs.get("is_backward"))
        roles = group_names(gm.graph, self._other_groups)
        run_preparing_passes(gm, self._lowering.preparing_passes, is_backward=is_backward, observer=observer())
        # Indices into the inputs of the whole graph differ from those of a segment. Inductor's cache can make no key of the
        # functions that decompose joint graphs, and would take no segment.
        segment_kwargs = {key: value for key, value in kwargs.items() if key != "get_decomp_fn"} | {"static_input_idxs": ()}
        summary = GraphSummary(
            GraphInputs.of(gm.graph),
            GraphOutputs.of(gm.graph),
            roles,
            InputSizes(gm.graph),
            segment_kwargs,
            [] if metadata is None else [info.mutates_data for info in metadata.input_info],
        )
        made = bind_new(gm, summary, self._bind, stores=self._stores)
        self._made.append(made)
        return made

    def _bind(self, source: GraphSource, summary: GraphSummary) -> BoxedFunction:
        _refuse_writes(self._examples, summary.written, self._params.values())
        prepared = PreparedGraph(
            source,
            summary,
            self._key,
            self._lowering,
            self._config_patches,
            self._auto,
            self._min_bucket_bytes,
            self._recorders,
            self._budget,
            self._options.disable_passes,
        )
        can_keep = not summary.kwargs.get("is_inference", False)
        planner = self._planner(summary.inputs, summary.is_backward, can_keep=can_keep)
        variants = Variants(planner, functools.partial(self._lower, prepared))
        # To lower ahead is to wait for the ranks with Dynamo's lock held. Of several threads only one may do so: on other
        # ranks, another thread may hold the lock and wait for this rank.
        if not summary.is_backward and threading.current_thread() is threading.main_thread():
            units = {unit: param.unit for (unit, _), param in self._params.items()}
            self._lower_ahead = lambda: variants.find(planner.first(self._params), units, None)
        return boxed(PlannedGraph(summary.outputs, planner, variants.find, self._registry))

    def _planner(self, inputs: GraphInputs, is_backward: bool, *, can_keep: bool = True) -> Planner:
        can_merge = self._auto is not None or bool(self._min_bucket_bytes)
        return Planner(inputs, is_backward=is_backward, can_keep=can_keep, can_merge=can_merge)

    def _lower(self, prepared: PreparedGraph, plan: Plan, args: Sequence[Any] | None) -> LoweredGraph:
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


def _refuse_writes(inputs: Sequence[Any], mutated: Sequence[bool], params: Iterable[ShardedParam]) -> None:
    """Refuse a graph that writes to a parameter and also unshards it.

    AOTAutograd does not know that a parameter and its shard share memory. It would run the write after the unshard.

    Args:
        inputs: the inputs of Dynamo's graph.
        mutated: for each input of AOTAutograd's graph, whether it is written.
        params: the parameters that the graph unshards.

    Raises:
        RuntimeError: the graph does so.
    """
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
