"""The passes, in the order in which they run: a list for each stage.

Before ``bucket``, ``large_parameters`` and ``small_units``, or ``auto_schedule``, decide which parameters share a bucket.
:mod:`passes.transforms` describes the arguments, the result and the header of a pass. The lowering chooses ``fuse_products``
and the passes after the schedule, and hands them in. Under a memory budget, :mod:`passes.auto.memory_budget` chooses which
units reshard and what is recomputed.

A new pass is an entry here. :func:`.pass_runner.run_all` runs a list, and calls an observer after every pass:
:func:`.pass_runner.log_pass` writes to torch's structured trace (tlparse shows it) and to the ``passes`` logger
(``TORCH_LOGS="+passes"``); :func:`.pass_runner.ignore_pass` is for graphs that are only tried.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule, Node

from .auto.auto_schedule import AutoSchedule, find_grouping, schedule_automatically
from .auto.grouping import Grouping
from .auto.large_parameters import separate_large_parameters
from .auto.small_units import merge_small_units
from .auto.step_policy import StepPolicy
from .fx.emit import replaying_traces
from .fx.graph import inputs_first, shard_input
from .fx.torch_internals.aot import stable_topological_sort
from .ir.interface import Interface
from .ir.ops import ReduceGrad, Unshard, reduce_grads, unshards
from .ir.plan import Plan
from .ir.storage import Location
from .lowering.arrangement import Arrangement, CannotArrange, grouping_of, order_collectives
from .models.memory_model import mark_freed_inputs, mark_memory
from .pass_runner import Observer, Pass, ignore_pass, log_pass, run_all
from .transforms.bucket import Buckets, bucket_gathers, find_buckets, sink_derived
from .transforms.deduplicate import deduplicate
from .transforms.flat_storage import flat_storage, locate_shards
from .transforms.gradient_sync import synchronize_gradients
from .transforms.mixed_precision import mixed_precision
from .transforms.name_shards import name_shards
from .transforms.offload_activations import copy_activations, mark_regions, offload_activations
from .transforms.recompute_regions import forward_regions, recompute_regions
from .transforms.refresh_layouts import TracedValues, refresh_layouts
from .transforms.repeated_layers import fold_layers, unfold_layers
from .transforms.reshard_after_forward import reshard_after_forward, resolve_ties
from .transforms.save_before_writes import save_before_writes
from .transforms.save_early import save_early
from .transforms.schedule import Prefetch, find_prefetches, schedule_gathers, schedule_reductions

# Dynamo's graph.


@dataclass
class DynamoGraph:
    """The graph that Dynamo captured.

    Attributes:
        gm: the graph.
        is_folded: whether repeated layers were folded.
    """

    gm: GraphModule
    is_folded: bool = False

    @property
    def graph(self) -> Graph:
        """The graph, without its attributes."""
        return self.gm.graph

    def fold(self) -> None:
        """Fold repeated layers."""
        self.is_folded = fold_layers(self.gm)


DYNAMO_PASSES = [Pass[DynamoGraph]("deduplicate", lambda on: deduplicate(on.gm))]
FOLDING_PASSES = [Pass("fold_layers", DynamoGraph.fold, is_rare=True, is_optional=True)]


def run_dynamo_passes(gm: GraphModule, observer: Observer = log_pass) -> None:
    """Run the passes over the graph that Dynamo captured, except :func:`fold`. In place."""
    run_all(DYNAMO_PASSES, DynamoGraph(gm), "dynamo", observer)


def fold(gm: GraphModule, observer: Observer = log_pass, disabled: Collection[str] = ()) -> bool:
    """Run ``fold_layers``, the last pass over Dynamo's graph, without which a model is compiled, too. In place.

    Args:
        gm: the graph.
        observer: called after the pass if it changed the graph.
        disabled: the names of passes to leave out.

    Returns:
        Whether any layer was folded.
    """
    on = DynamoGraph(gm)
    run_all(FOLDING_PASSES, on, "dynamo", observer, disabled)
    return on.is_folded


# The joint graph.


@dataclass
class JointGraph:
    """The joint graph, after Inductor's patterns.

    Attributes:
        graph: the graph.
        traced: its values before the patterns; None: there were none.
    """

    graph: Graph
    traced: TracedValues | None = None

    def refresh(self) -> None:
        """Refresh layouts."""
        assert self.traced is not None
        refresh_layouts(self.graph, self.traced)


JOINT_PASSES = [
    Pass("refresh_layouts", JointGraph.refresh, when=lambda on: on.traced is not None, is_rare=True),
    Pass[JointGraph]("unfold_layers", lambda on: unfold_layers(on.graph), is_rare=True),
]


def run_joint_passes(graph: Graph, observer: Observer = log_pass, *, traced: TracedValues | None = None) -> None:
    """Run the passes over the joint graph that come before those for the partitioner. In place.

    Args:
        graph: the graph, after Inductor's patterns.
        observer: called after every pass that changed the graph.
        traced: the graph's values before Inductor's patterns; None: there were no patterns.
    """
    # Inductor sorts the nodes of its own patterns only after this hook.
    stable_topological_sort(graph)
    run_all(JOINT_PASSES, JointGraph(graph, traced), "joint", observer)
    for node in reduce_grads(graph.nodes):
        # A gradient that depends on no tangent, such as zeros, could else be reduced in forward.
        node.meta["partitioner_tag"] = "must_be_in_backward"
    mark_memory(graph)


@dataclass
class SavingChoices:
    """The joint graph, and what is known of what forward saves for backward.

    Attributes:
        graph: the graph.
        policy, num_forward_outputs, node_groups: see :func:`run_partitioner_passes`.
    """

    graph: Graph
    policy: StepPolicy | None
    num_forward_outputs: int
    node_groups: Mapping[str, str]

    def recompute(self) -> None:
        """Recompute the regions that the policy says."""
        assert self.policy is not None
        regions = forward_regions(self.graph, self.num_forward_outputs)
        recompute_regions(regions, self.policy.recomputed)
        mark_regions(regions)
        self.policy.reshard(self.graph, self.node_groups)


PARTITIONER_PASSES = [
    Pass("recompute_regions", SavingChoices.recompute, when=lambda on: on.policy is not None, is_rare=True),
    Pass[SavingChoices]("offload_activations", lambda on: offload_activations(on.graph), is_rare=True),
    Pass[SavingChoices]("reshard_after_forward", lambda on: reshard_after_forward(on.graph)),
]


def run_partitioner_passes(
    graph: Graph,
    observer: Observer = log_pass,
    *,
    policy: StepPolicy | None = None,
    num_forward_outputs: int = 0,
    node_groups: Mapping[str, str] | None = None,
) -> None:
    """Run the passes over the joint graph that tell the partitioner what to save. In place.

    Args:
        graph: the graph.
        observer: called after every pass.
        policy: a memory budget's choice of units that stay gathered, and of what is recomputed; None: there is no budget.
        num_forward_outputs: with a policy: the number of forward's outputs, which are the graph's first ones.
        node_groups: with a policy: see :meth:`~passes.auto.step_policy.OpenChoices.of`.
    """
    on = SavingChoices(graph, policy, num_forward_outputs, node_groups or {})
    run_all(PARTITIONER_PASSES, on, "joint", observer)


# A forward or backward graph, once.


@dataclass
class PartitionedGraph:
    """A forward or backward graph, before any plan.

    Attributes:
        graph: the graph.
        is_backward: whether it is a backward graph.
    """

    graph: Graph
    is_backward: bool


PREPARING_PASSES = [
    Pass[PartitionedGraph]("save_before_writes", lambda on: save_before_writes(on.graph), is_rare=True),
    Pass[PartitionedGraph]("save_early", lambda on: save_early(on.graph), when=lambda on: not on.is_backward, is_rare=True),
    Pass[PartitionedGraph]("resolve_ties", lambda on: resolve_ties(on.graph)),
    Pass[PartitionedGraph]("name_shards", lambda on: name_shards(on.graph)),
    Pass[PartitionedGraph]("mixed_precision", lambda on: mixed_precision(on.graph)),
]
# After the passes of the lowering.
COPYING_PASSES = [
    Pass[PartitionedGraph]("copy_activations", lambda on: copy_activations(on.graph, is_backward=on.is_backward), is_rare=True),
]


def run_preparing_passes(
    gm: GraphModule,
    last_passes: Sequence[Pass[PartitionedGraph]] = (),
    *,
    is_backward: bool,
    observer: Observer = log_pass,
) -> None:
    """Run the passes over a partitioned forward or backward graph that do not depend on the plan. In place.

    Args:
        gm: the graph.
        last_passes: passes that the lowering adds, in order.
        is_backward: whether the graph is a backward graph.
        observer: called after every pass.
    """
    graph = gm.graph
    # AOTAutograd makes tokens of effects ahead of the inputs.
    inputs_first(graph)
    on = PartitionedGraph(graph, is_backward)
    run_all([*PREPARING_PASSES, *last_passes, *COPYING_PASSES], on, _stage(is_backward), observer)
    if is_backward:
        # An offset < 0: a piece that forward saved for a smaller group's gather. It is not in flat storage, so it is freed.
        gathered = [spec.shard for spec in map(Unshard.of, unshards(graph.nodes)) if spec.offset >= 0]
        reduced = [ReduceGrad.of(node).shard for node in reduce_grads(graph.nodes)]
        mark_freed_inputs(graph, [source for source in map(shard_input, [*gathered, *reduced]) if source is not None])


# A forward or backward graph, for each plan.


@dataclass
class GraphOfPlan:
    """A prepared forward or backward graph, in the course of the passes for a plan.

    Attributes:
        graph: the graph.
        plan: the plan.
        is_backward: whether it is a backward graph.
        buckets: the buckets of the prepared graph.
        grouping: which of their members share a collective.
        auto, arrangement: see :func:`run_passes`.
        prefetches: the plan's prefetch lists, in nodes of the graph.
        locations: where the shards lie in flat storage.
        interface: the extra inputs and outputs.
    """

    graph: Graph
    plan: Plan
    is_backward: bool
    buckets: Buckets
    grouping: Grouping
    auto: AutoSchedule | None = None
    arrangement: Arrangement | None = None
    prefetches: Sequence[Prefetch] = ()
    locations: dict[Node, Location] = field(init=False)
    interface: Interface = field(init=False)

    def __post_init__(self) -> None:
        self.interface = Interface(self.graph)
        self.locations = locate_shards(self.graph)

    @property
    def stage(self) -> str:
        """The stage, for observers."""
        return _stage(self.is_backward)

    def bucket(self) -> None:
        """Make collectives of the gathers."""
        bucket_gathers(
            self.graph,
            self.plan.gathers,
            self.interface,
            self.grouping.gathers,
            buckets=self.buckets.gathers,
            unit_by_unit=self.auto is None,
        )

    def synchronize(self) -> None:
        """Make collectives of the reductions."""
        groups = self.grouping.reductions
        if self.arrangement is None:
            # In the order of the graph's outputs. In which order backward computes gradients may differ between ranks.
            groups = tuple(tuple(sorted(group)) for group in groups)
        synchronize_gradients(self.graph, self.plan.reductions, self.interface, groups, buckets=self.buckets.reductions)

    def schedule(self) -> None:
        """Put the collectives where they start and where the graph waits for them."""
        if self.auto is not None:
            schedule_automatically(self.graph, self.auto)
        else:
            schedule_gathers(self.graph, self.prefetches)
            schedule_reductions(self.graph, self.plan.max_pending_reductions)

    def order(self) -> None:
        """Give the collectives the order of the arrangement."""
        assert self.arrangement is not None
        order_collectives(self.graph, self.arrangement)


COLLECTIVE_PASSES = [
    Pass("bucket", GraphOfPlan.bucket),
    Pass("gradient_sync", GraphOfPlan.synchronize, when=lambda on: on.is_backward),
]
# With the interface's outputs, which the passes above collect.
STORAGE_PASSES = [Pass[GraphOfPlan]("flat_storage", lambda on: flat_storage(on.graph, on.locations, on.interface))]
SCHEDULING_PASSES = [
    Pass("schedule", GraphOfPlan.schedule, is_optional=True),
    # Where ranks read parameters in different orders.
    Pass("order_collectives", GraphOfPlan.order, when=lambda on: on.arrangement is not None),
]


def run_passes(
    gm: GraphModule,
    plan: Plan,
    *,
    is_backward: bool,
    final_passes: Sequence[Pass[GraphOfPlan]] = (),
    observer: Observer = log_pass,
    disabled: Collection[str] = (),
    auto: AutoSchedule | None = None,
    min_bucket_bytes: int = 0,
    arrangement: Arrangement | None = None,
) -> Interface:
    """Run the passes over a prepared forward or backward graph, for one plan. In place.

    Args:
        gm: the graph.
        plan: the plan.
        is_backward: whether the graph is a backward graph.
        final_passes: passes that the lowering adds, in order.
        observer: called after every pass.
        disabled: the names of passes to leave out.
        auto: chooses buckets and issue points by the cost model; None: the default schedule.
        min_bucket_bytes: the bytes from which on a unit has collectives of its own (:mod:`passes.auto.small_units`); 0: all do.
        arrangement: the buckets and the order of collectives to use, in the place of the graph's own.

    Returns:
        The extra inputs and outputs of the graph.

    Raises:
        ValueError: no schedule keeps the memory limit; or with ``auto``, the plan has prefetch lists or a limit on pending
            reductions.
        CannotArrange: the graph cannot have the arrangement.
    """
    graph = gm.graph
    buckets = find_buckets(graph)
    separate = separate_large_parameters(buckets, plan)
    if arrangement is not None:
        if plan.has_updates:
            # Updates write to memory that gathers read by other inputs.
            raise CannotArrange("a graph that updates parameters keeps its order")
        sink_derived(graph)
        grouping = grouping_of(arrangement, graph, buckets, plan, separate)
    else:
        grouping = merge_small_units(graph, buckets, plan, separate, min_bucket_bytes)
    if auto is not None and arrangement is None:
        _refuse_explicit_schedule(plan)
        grouping = find_grouping(
            graph, plan, grouping, auto, lambda trial, choice: _try(trial, plan, choice, is_backward, auto)
        )
    prefetches = find_prefetches(graph, buckets, plan.prefetch)
    on = GraphOfPlan(graph, plan, is_backward, buckets, grouping, auto, arrangement, prefetches)
    with replaying_traces():
        _insert_collectives(on, observer)
    run_all([*SCHEDULING_PASSES, *final_passes], on, on.stage, observer, disabled)
    return on.interface


def _stage(is_backward: bool) -> str:
    return "backward" if is_backward else "forward"


def _insert_collectives(on: GraphOfPlan, observer: Observer) -> None:
    """Replace a graph's ``unshard`` and ``reduce_grad`` by collectives, each where it is needed."""
    run_all(COLLECTIVE_PASSES, on, on.stage, observer)
    on.interface.finish()
    run_all(STORAGE_PASSES, on, on.stage, observer)


def _try(graph: Graph, plan: Plan, grouping: Grouping, is_backward: bool, auto: AutoSchedule) -> None:
    on = GraphOfPlan(graph, plan, is_backward, find_buckets(graph), grouping, auto)
    _insert_collectives(on, ignore_pass)


def _refuse_explicit_schedule(plan: Plan) -> None:
    """Raise if a plan has prefetch lists or a limit on pending reductions, as the automatic schedule chooses both."""
    if plan.prefetch:
        units = ", ".join(unit or "the root" for unit, _ in plan.prefetch)
        raise ValueError(
            f"options['schedule'] = 'auto' chooses what to prefetch, but {units} has a list of "
            "set_modules_to_forward_prefetch or set_modules_to_backward_prefetch. Clear it with an empty list, or compile with "
            "options['schedule'] = 'default'."
        )
    if plan.max_pending_reductions is not None:
        raise ValueError(
            "options['schedule'] = 'auto' chooses when reductions are waited for, but set_reduce_scatter_max_input_buffers was "
            "called. Give options['memory_limit'] instead, or compile with options['schedule'] = 'default'."
        )
