"""A prepared graph: a partitioned forward or backward graph that can be lowered for any plan."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from passes.auto.auto_schedule import AutoSchedule
from passes.collectives.functional import dimension_of
from passes.fx.graph import group_of, starts_collective
from passes.fx.size_guards import Assumptions, SizeGuard, conditions_of, deciding_by, taking_guards
from passes.fx.torch_internals.aot import V
from passes.fx.torch_internals.core import CompileContext, TracingContext, compile_context, tracing, unset_fake_temporarily
from passes.fx.torch_internals.dynamo import compile_lock
from passes.fx.torch_internals.inductor import inductor_config
from passes.ir.interface import InputSlot, Interface, OutputSlot
from passes.ir.ops import ReduceGrad, Unshard, reduce_grads, unshards
from passes.ir.plan import Plan
from passes.lowering.arrangement import Arrangement
from passes.lowering.collective_sequence import Collective, collective_sequence
from passes.pipeline import run_passes
from passes.transforms.bucket import Group

from ..runtime.checked_program import CheckedProgram, agree_on_graph
from ..runtime.collective_log import SHARDING_ROLES
from ..runtime.planned_graph import BoxedFunction, boxed
from .capture import CapturedGraph, is_capturing, observer, record, snapshot
from .collector import collector_paused
from .cuda_graphs import Recorders
from .frame_chunks import in_large_frame_chunk
from .lowering import Lowered, Lowering
from .memory_budget import StepBudget
from .stored_graph import GraphSource, GraphSummary
from .stored_variant import StoredVariant, load_variants, store_variant, variant_key


@dataclass(frozen=True)
class _Scheduled:
    """A copy of a prepared graph after the passes for a plan.

    Attributes:
        gm: the graph.
        interface: its extra inputs and outputs.
        supposed: the conditions on sizes that the passes rely on.
        again: schedules another copy, which a function has prepared.
    """

    gm: GraphModule
    interface: Interface
    supposed: Sequence[Any]
    again: Callable[[Callable[[Graph], None]], GraphModule]


@dataclass(frozen=True)
class LoweredGraph:
    """A graph that was lowered for a plan.

    Attributes:
        function: the graph.
        inputs, outputs: its extra inputs and outputs.
        reduction_groups: the gradients that each collective reduces.
        run: the graph as a program that ranks compare.
        guard: if it is not None, only calls whose sizes pass it may run the function.
    """

    function: BoxedFunction
    inputs: Sequence[InputSlot]
    outputs: Sequence[OutputSlot]
    reduction_groups: Sequence[Group]
    run: CheckedProgram
    guard: SizeGuard | None = None


class PreparedGraph:
    """A graph that can be lowered for a plan, even long after ``compile_fx`` has returned.

    Lowering runs the passes for the plan, has the ranks agree on the result, and makes a function of it.

    Args:
        source: the partitioned graph, after the preparing passes.
        summary: its summary.
        configuration: a key of what passes depend on, besides their graphs.
        lowering: makes functions of scheduled graphs.
        config_patches: settings of Inductor.
        auto: the machine and limit to schedule for; None: the default schedule.
        min_bucket_bytes: the bytes of parameters from which on a unit has collectives of its own.
        recorders: record programs as CUDA graphs; None: programs are not recorded.
        budget: the budget of the step, to which every lowered graph is held; None: there is none.
        disabled: the names of passes to leave out.
    """

    def __init__(
        self,
        source: GraphSource,
        summary: GraphSummary,
        configuration: str,
        lowering: Lowering,
        config_patches: dict[str, Any],
        auto: AutoSchedule | None,
        min_bucket_bytes: int,
        recorders: Recorders | None,
        budget: StepBudget | None = None,
        disabled: Sequence[str] = (),
    ):
        self._source = source
        self._summary = summary
        self._configuration = configuration
        self._lowering = lowering
        self._config_patches = config_patches
        self._is_backward = summary.is_backward
        self._auto = auto
        self._min_bucket_bytes = min_bucket_bytes
        self._budget = budget
        self._disabled = tuple(disabled)
        self._recorders = recorders
        self._tracing_context = TracingContext.try_get()
        self._compile_context = CompileContext.try_get()
        fake_mode = self._tracing_context.fake_mode if self._tracing_context is not None else None
        self._shape_env = fake_mode.shape_env if fake_mode is not None else None
        self._sizes = summary.sizes
        self._traced_for = conditions_of(self._shape_env)

    @in_large_frame_chunk
    def lower(self, plan: Plan, args: Sequence[Any] | None) -> LoweredGraph:
        """Make a function of the graph for a plan.

        Args:
            plan: the plan.
            args: the inputs of the call that needs the function; None: Dynamo is compiling the frame, and takes guards.

        Raises:
            RuntimeError: the sizes of the call do not fulfil conditions that compiled code relies on.
        """
        # A fake mode around the call is not the mode of the graph's fake tensors.
        with unset_fake_temporarily():
            values = {} if args is None else self._sizes.of(args)
            key = self._key(plan)
            stored = self._stored(key, values) if key else None
            group_names = {**self._summary.group_names, **_reduce_scatter_groups(plan)}
            stage = "backward" if self._is_backward else "forward"
            first = stored or self._schedule(plan)
            # Wait for the ranks without the compile lock: another thread may compile meanwhile, whose graph other ranks expect
            # first.
            scheduled, run = agree_on_graph(
                stage,
                first,
                functools.partial(_sequence, group_names=group_names),
                lambda arrangement: self._schedule(plan, arrangement),
                group_names,
                self._kind(plan),
            )
            if isinstance(scheduled, StoredVariant):
                loaded = self._load(scheduled, values)
                if loaded is not None:
                    function, guard = loaded
                    return LoweredGraph(function, scheduled.inputs, scheduled.outputs, scheduled.reduction_groups, run, guard)
                # The same graph, as ranks have agreed on it.
                scheduled = first = self._schedule(plan)
            gm, interface = scheduled.gm, scheduled.interface
            if self._budget is not None:
                self._budget.check(gm.graph, interface, is_backward=self._is_backward)
            with self._compiling() as assumptions, deciding_by(values, gm, self._shape_env):
                if not assumptions.admit(scheduled.supposed):
                    raise RuntimeError(_unfulfilled(stage, SizeGuard(scheduled.supposed, self._sizes)))
                lowered = self._lower(scheduled, assumptions)
                guard = self._guard(assumptions)
                conditions = self._sizes.about(assumptions.added_to(self._traced_for))
            if guard is not None and args is not None and not guard(args):
                raise RuntimeError(_unfulfilled(stage, guard))
            slots = interface.inputs, interface.outputs, interface.reduction_groups
            if key and scheduled is first and lowered.stored is not None and conditions is not None:
                store_variant(key, StoredVariant(*slots, _sequence(scheduled, group_names), conditions, lowered.stored))
            return LoweredGraph(self._recorded(lowered, scheduled, group_names), *slots, run, guard)

    def _key(self, plan: Plan) -> str:
        """Return the key of the variant for a plan; empty: it is not stored."""
        if not self._source.key or self._recorders is not None or is_capturing():
            return ""
        with self._compiling():
            options = self._configuration, self._auto, self._min_bucket_bytes
            return variant_key(self._source.key, plan, options, self._summary.kwargs)

    def _stored(self, key: str, values: Mapping[Any, int]) -> StoredVariant | None:
        """Return the stored variant that can serve sizes with these values of symbols; None: there is none."""
        variants = load_variants(key)
        with contextlib.ExitStack() as stack:
            if any(variant.conditions for variant in variants):
                assumptions = stack.enter_context(self._compiling())
                stack.enter_context(deciding_by(values, None, self._shape_env))
            return next((each for each in variants if not each.conditions or assumptions.fulfil(each.conditions)), None)

    def _load(self, variant: StoredVariant, values: Mapping[Any, int]) -> tuple[BoxedFunction, SizeGuard | None] | None:
        """Return the function of a stored variant and its guard; None: a kernel is not stored any more."""
        kwargs = self._summary.kwargs
        with self._compiling() as assumptions, deciding_by(values, None, self._shape_env):
            assumptions.admit(variant.conditions)
            function = self._lowering.load(
                variant.program, is_backward=self._is_backward, inductor_kwargs=kwargs, assumptions=assumptions
            )
            return None if function is None else (function, self._guard(assumptions))

    def _guard(self, assumptions: Assumptions) -> SizeGuard | None:
        """Return the guard of a graph that was lowered with these assumptions; None: guards of the frame check them."""
        unchecked = assumptions.unchecked(self._sizes)
        return SizeGuard(unchecked, self._sizes) if unchecked else None

    def _kind(self, plan: Plan) -> tuple[int, int]:
        """Return the ``kind`` that :func:`~fsdp_compile.runtime.checked_program.agree_on_graph` asks for.

        The first number is equal for graphs with equal options and controls of the schedule, the second one for graphs that do
        the same with the same buckets, in any order of buckets. A number holds on to no hook of the user.
        """
        gathers = zip((bucket.name for bucket in self._summary.inputs.gathers), plan.gathers, strict=True)
        made = (planned.reduction for planned in plan.reductions)
        reductions = zip((bucket.name for bucket in self._summary.inputs.gradients), made, strict=True)
        options = repr(self._auto), self._min_bucket_bytes, self._disabled
        controls = frozenset(plan.prefetch), plan.max_pending_reductions
        return hash((self._is_backward, options, controls)), hash((frozenset(gathers), frozenset(reductions)))

    def _schedule(
        self, plan: Plan, arrangement: Arrangement | None = None, prepare: Callable[[Graph], None] = lambda _: None
    ) -> _Scheduled:
        """Run the passes for a plan over a copy of the graph.

        Args:
            plan: the plan.
            arrangement: the buckets and the order of collectives to use, in the place of the graph's own.
            prepare: may change the copy before the passes run.
        """
        gm = snapshot(self._source.graph_module)
        prepare(gm.graph)
        with self._compiling() as assumptions:
            interface = run_passes(
                gm,
                plan,
                is_backward=self._is_backward,
                final_passes=self._lowering.final_passes,
                observer=observer(),
                disabled=self._disabled,
                auto=self._auto,
                min_bucket_bytes=self._min_bucket_bytes,
                arrangement=arrangement,
            )
            return _Scheduled(gm, interface, assumptions.added(), lambda prepare: self._schedule(plan, arrangement, prepare).gm)

    @contextlib.contextmanager
    def _compiling(self) -> Iterator[Assumptions]:
        is_late = TracingContext.try_get() is None and self._tracing_context is not None
        with contextlib.ExitStack() as stack:
            # torch.fx and Inductor cannot work for two threads at once. Dynamo holds this lock while it compiles.
            stack.enter_context(compile_lock)
            stack.enter_context(collector_paused())
            stack.enter_context(torch.no_grad())
            stack.enter_context(inductor_config.patch(self._config_patches))
            if self._tracing_context is not None:
                stack.enter_context(V.set_fake_mode(self._tracing_context.fake_mode))
            if is_late:
                assert self._tracing_context is not None
                stack.enter_context(tracing(self._tracing_context))
                stack.enter_context(compile_context(self._compile_context))
                stack.enter_context(taking_guards(self._shape_env))
            yield Assumptions(self._shape_env, is_late=is_late)

    def _lower(self, scheduled: _Scheduled, assumptions: Assumptions) -> Lowered:
        kwargs = self._summary.kwargs
        return self._lowering.lower(
            scheduled.gm, is_backward=self._is_backward, inductor_kwargs=kwargs, assumptions=assumptions
        )

    def _recorded(self, lowered: Lowered, scheduled: _Scheduled, group_names: dict[str, str]) -> BoxedFunction:
        """Record the function as a CUDA graph, and for active captures, where that is asked for."""
        gm, function = scheduled.gm, lowered.function
        if self._recorders is not None:
            function = boxed(self._recorders.recorded(function, gm.graph, is_backward=self._is_backward, groups=group_names))
        if is_capturing():
            captured = CapturedGraph(snapshot(gm), lowered.code, group_names, scheduled.again)
            record(captured, self._is_backward, function)
        return function


def _sequence(graph: _Scheduled | StoredVariant, group_names: Mapping[str, str]) -> Sequence[Collective]:
    if isinstance(graph, StoredVariant):
        return graph.sequence
    return collective_sequence(graph.gm.graph, group_names, graph.interface.members)


def _unfulfilled(stage: str, guard: SizeGuard) -> str:
    return (
        f"A {stage} graph can be compiled only for sizes with {guard}, and is called with others. Compile with "
        "torch.compile(dynamic=False), or mark the size as static (torch._dynamo.mark_static)."
    )


def group_names(graph: Graph, others: Mapping[str, str]) -> dict[str, str]:
    """Return the role in the mesh of each process group of a graph, by the group's name.

    Call it before the passes replace the operators.
    """
    used = dict.fromkeys(group_of(node) for node in graph.nodes if starts_collective(node))
    names = {group: _avoid_role_name(name) for group, name in others.items() if group in used}
    specs: list[Unshard | ReduceGrad] = [Unshard.of(node) for node in unshards(graph.nodes)]
    specs += [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
    for spec in specs:
        names[spec.group] = "shard"
        # Ranks of all nodes shard together, and compare all collectives over the shard group.
        names[spec.replicate_group] = "nodes" if spec.node_group else "replicate"
        names[spec.node_group] = "node"
        names[getattr(spec, "post_forward_group", "")] = "post_forward"
    names.pop("", None)
    # Groups of meshes without parameters, such as the mesh of context parallel.
    return names | {group: _avoid_role_name(name) for group in used if group not in names and (name := dimension_of(group))}


def _avoid_role_name(name: str) -> str:
    """Return the name that another parallelism gives to a group, changed if it is also a role in sharding."""
    return f"{name} of the model" if name in SHARDING_ROLES else name


def _reduce_scatter_groups(plan: Plan) -> dict[str, str]:
    return {planned.reduction.group: "reduce" for planned in plan.reductions if planned.reduction.group}
