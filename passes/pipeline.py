"""The order in which the passes run, and the trace that each leaves.

    Dynamo graph             deduplicate
                             fold_layers
    joint graph              refresh_layouts
                             unfold_layers
                             recompute_regions (with a memory budget)
                             offload_activations
                             reshard_after_forward
    forward, backward graph  resolve_ties
      once                   name_shards
                             mixed_precision
                             fuse_products
                             copy_activations
    forward, backward graph  bucket
      for each plan          gradient_sync (backward)
      that the graph is      flat_storage
      called with            schedule, or auto_schedule
                             order_collectives (where ranks read parameters in different orders)
                             pin_layouts (lowering "inductor")

Before ``bucket``, ``large_parameters`` and ``small_units``, or ``auto_schedule``, decide which parameters share a bucket.
:mod:`passes.transforms` describes the arguments, the result and the header of a pass. The lowering chooses ``fuse_products``
and the passes after the schedule, and hands them in. Under a memory budget, :mod:`passes.auto.memory_budget` chooses which
units reshard and what is recomputed.

An :data:`Observer` is called after every pass. Some passes have work in few graphs, and report only if they change the graph:
``fold_layers``, ``refresh_layouts``, ``unfold_layers``, ``recompute_regions``, ``offload_activations``, ``copy_activations``,
``fuse_products``.
The observer :func:`log_pass` writes to torch's structured trace (tlparse shows it) and to the ``passes`` logger
(``TORCH_LOGS="+passes"``). :func:`ignore_pass` is the observer for graphs that are only tried.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch.fx import Graph, GraphModule

from .auto.auto_schedule import AutoSchedule, find_grouping, schedule_automatically
from .auto.grouping import Grouping
from .auto.large_parameters import separate_large_parameters
from .auto.small_units import merge_small_units
from .auto.step_policy import StepPolicy
from .fx.emit import replaying_traces
from .fx.graph import shard_input
from .fx.torch_internals.aot import stable_topological_sort
from .fx.torch_internals.core import trace_log, trace_structured
from .ir.interface import Interface
from .ir.ops import ReduceGrad, Unshard, reduce_grads, unshards
from .ir.plan import Plan
from .lowering.arrangement import Arrangement, CannotArrange, grouping_of, order_collectives
from .models.memory_model import mark_freed_inputs, mark_memory
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
from .transforms.schedule import find_prefetches, schedule_gathers, schedule_reductions

logger = logging.getLogger(__name__)

#: Called with the stage ("dynamo", "joint", "forward", "backward"), the pass's name, and the graph's text before and after it.
Observer = Callable[[str, str, str, str], None]


def graph_text(graph: Graph, group_names: Mapping[str, str] | None = None, *, tags: bool = False) -> str:
    """Return the graph as Python code, without colours, memory addresses or source positions.

    Args:
        graph: the graph.
        group_names: the names to print, by the names of process groups.
        tags: append to each node its ``recompute`` policy for the partitioner.
    """
    source = graph.python_code("self", verbose=True, include_stride=False, include_device=False).src
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("# ")]
    # Drop the ``;  x = None`` after last uses: generated code frees values elsewhere.
    lines = [re.sub(r";  (\w+ = )+None$", "", line) for line in lines]
    if tags:
        policies = {node.name: node.meta["recompute"].name for node in graph.nodes if "recompute" in node.meta}
        for index, line in enumerate(lines):
            policy = policies.get(re.split(r"[:= ]", line.strip(), maxsplit=1)[0])
            lines[index] = f"{line}  # {policy}" if policy else line
    text = "\n".join(lines).replace("torch.ops.", "")
    for group, name in (group_names or {}).items():
        text = text.replace(f"'{group}'", f"'{name}'")
    return text + "\n"


def log_pass(stage: str, pass_name: str, before: str, after: str) -> None:
    """Write a graph before and after a pass to torch's structured trace and to the log."""
    _log_graph(f"fsdp_{stage}_{pass_name}_before", before)
    _log_graph(f"fsdp_{stage}_{pass_name}_after", after)


def ignore_pass(stage: str, pass_name: str, before: str, after: str) -> None:
    """Record nothing, for graphs that are only tried."""


def _log_graph(name: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
    logger.debug("%s:\n%s", name, text)


def _is_observed(observer: Observer) -> bool:
    if observer is ignore_pass:
        return False
    return observer is not log_pass or logger.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)


@contextlib.contextmanager
def _observed(graph: Graph, stage: str, pass_name: str, observer: Observer, *, if_changed: bool = False) -> Iterator[None]:
    observed = _is_observed(observer)
    before = graph_text(graph, tags=stage == "joint") if observed else ""
    yield
    if not observed:
        return
    graph.lint()
    after = graph_text(graph, tags=stage == "joint")
    if before != after or not if_changed:
        observer(stage, pass_name, before, after)


def run_dynamo_passes(gm: GraphModule, observer: Observer = log_pass) -> None:
    """Run the passes over the graph that Dynamo captured, except :func:`fold`. In place."""
    with _observed(gm.graph, "dynamo", "deduplicate", observer):
        deduplicate(gm)


def fold(gm: GraphModule, observer: Observer = log_pass) -> bool:
    """Run ``fold_layers``, the last pass over Dynamo's graph, which can be left out. In place.

    Returns:
        Whether any layer was folded.
    """
    with _observed(gm.graph, "dynamo", "fold_layers", observer, if_changed=True):
        return fold_layers(gm)


def run_joint_passes(graph: Graph, observer: Observer = log_pass, *, traced: TracedValues | None = None) -> None:
    """Run the passes over the joint graph that come before those for the partitioner. In place.

    Args:
        graph: the graph, after Inductor's patterns.
        observer: called after every pass that changed the graph.
        traced: the graph's values before Inductor's patterns; None: there were no patterns.
    """
    # Inductor sorts the nodes of its own patterns only after this hook.
    stable_topological_sort(graph)
    if traced is not None:
        with _observed(graph, "joint", "refresh_layouts", observer, if_changed=True):
            refresh_layouts(graph, traced)
    with _observed(graph, "joint", "unfold_layers", observer, if_changed=True):
        unfold_layers(graph)
    for node in reduce_grads(graph.nodes):
        # A gradient that depends on no tangent, such as zeros, could else be reduced in forward.
        node.meta["partitioner_tag"] = "must_be_in_backward"
    mark_memory(graph)


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
    if policy is not None:
        with _observed(graph, "joint", "recompute_regions", observer, if_changed=True):
            regions = forward_regions(graph, num_forward_outputs)
            recompute_regions(regions, policy.recomputed)
        mark_regions(regions)
        policy.reshard(graph, node_groups or {})
    with _observed(graph, "joint", "offload_activations", observer, if_changed=True):
        offload_activations(graph)
    with _observed(graph, "joint", "reshard_after_forward", observer):
        reshard_after_forward(graph)


def run_preparing_passes(
    gm: GraphModule,
    last_passes: Sequence[Callable[[Graph], None]] = (),
    *,
    is_backward: bool,
    observer: Observer = log_pass,
) -> None:
    """Run the passes over a partitioned forward or backward graph that do not depend on the plan. In place.

    Args:
        gm: the graph.
        last_passes: passes that the lowering adds, in order.
        is_backward: whether the graph is a backward graph.
        observer: called after every pass; after ``last_passes`` and ``copy_activations`` only if they changed the graph.
    """
    graph = gm.graph
    stage = "backward" if is_backward else "forward"
    with _observed(graph, stage, "resolve_ties", observer):
        resolve_ties(graph)
    with _observed(graph, stage, "name_shards", observer):
        name_shards(graph)
    with _observed(graph, stage, "mixed_precision", observer):
        mixed_precision(graph)
    for last_pass in last_passes:
        with _observed(graph, stage, last_pass.__name__, observer, if_changed=True):
            last_pass(graph)
    with _observed(graph, stage, "copy_activations", observer, if_changed=True):
        copy_activations(graph, is_backward=is_backward)
    if is_backward:
        # An offset < 0: a piece that forward saved for a smaller group's gather. It is not in flat storage, so it is freed.
        gathered = [spec.shard for spec in map(Unshard.of, unshards(graph.nodes)) if spec.offset >= 0]
        reduced = [ReduceGrad.of(node).shard for node in reduce_grads(graph.nodes)]
        mark_freed_inputs(graph, [source for source in map(shard_input, [*gathered, *reduced]) if source is not None])


def _insert_collectives(
    graph: Graph,
    buckets: Buckets,
    plan: Plan,
    grouping: Grouping,
    *,
    is_backward: bool,
    unit_by_unit: bool = False,
    observe: Callable[[str], contextlib.AbstractContextManager[None]] = lambda _: contextlib.nullcontext(),
) -> Interface:
    """Replace a graph's ``unshard`` and ``reduce_grad`` by collectives, each where it is needed. Return the interface."""
    interface = Interface(graph)
    locations = locate_shards(graph)
    with observe("bucket"):
        bucket_gathers(graph, plan.gathers, interface, grouping.gathers, buckets=buckets.gathers, unit_by_unit=unit_by_unit)
    if is_backward:
        with observe("gradient_sync"):
            synchronize_gradients(graph, plan.reductions, interface, grouping.reductions, buckets=buckets.reductions)
    interface.finish()
    with observe("flat_storage"):
        flat_storage(graph, locations, interface)
    return interface


def run_passes(
    gm: GraphModule,
    plan: Plan,
    *,
    is_backward: bool,
    final_passes: Sequence[Callable[[Graph], None]] = (),
    observer: Observer = log_pass,
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
    stage = "backward" if is_backward else "forward"

    def observe(pass_name: str) -> contextlib.AbstractContextManager[None]:
        return _observed(graph, stage, pass_name, observer)

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
        grouping = find_grouping(graph, plan, grouping, auto, lambda trial, choice: _try(trial, plan, choice, is_backward))
    prefetches = find_prefetches(graph, buckets, plan.prefetch)
    with replaying_traces():
        interface = _insert_collectives(
            graph, buckets, plan, grouping, is_backward=is_backward, unit_by_unit=auto is None, observe=observe
        )
    with observe("schedule"):
        if auto is not None:
            schedule_automatically(graph, auto)
        else:
            schedule_gathers(graph, prefetches)
            schedule_reductions(graph, plan.max_pending_reductions)
    if arrangement is not None:
        with observe("order_collectives"):
            order_collectives(graph, arrangement)
    for final_pass in final_passes:
        with observe(final_pass.__name__):
            final_pass(graph)
    return interface


def _try(graph: Graph, plan: Plan, grouping: Grouping, is_backward: bool) -> None:
    _insert_collectives(graph, find_buckets(graph), plan, grouping, is_backward=is_backward)


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
