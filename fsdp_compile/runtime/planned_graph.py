"""Planned graphs: each call makes the plan, binds extra inputs, runs the graph lowered for that plan, and stores extra outputs.

A lowered graph does not know which parameters it works on, as equal blocks may share a graph. The shards among its inputs
identify the parameters (:mod:`fsdp_compile.runtime.graph_inputs`).
"""

from __future__ import annotations

import functools
import itertools
import logging
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import GraphModule

from passes.collectives.host_copies import leave_to_device, wait_on_host
from passes.fx.size_guards import SizeGuard
from passes.fx.torch_internals.core import AutoDispatchBelowAutograd, RecordFunctionFast, top_saved_tensors_default_hooks
from passes.fx.torch_internals.objects import mark_as_boxed
from passes.ir.interface import InputSlot, Interface, OutputSlot
from passes.ir.ops import Unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Sync
from passes.ir.update import UpdateTarget
from passes.transforms.bucket import Buckets, Group
from passes.transforms.offload_activations import offloaded_outputs

from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .call import Call, Gradients
from .collective_log import CheckedProgram
from .gradients import in_order_of_storage, note_backward, note_forward, receive
from .graph_inputs import GraphInputs, ParameterRegistry
from .lent_parameters import write_back
from .schedule_settings import log_idle_lists, max_pending_reductions, must_not_gather, prefetch_lists
from .unsharding import finish_unshard

logger = logging.getLogger(__name__)

#: A warning is logged at so many variants of one plan for different sizes: as many as Dynamo compiles of a frame.
_MANY_VARIANTS = 8

#: A function that takes its arguments as a list, and empties the list.
BoxedFunction = Callable[[list[Any]], Any]


def boxed(function: Callable[[list[Any]], Any]) -> BoxedFunction:
    """Mark a function as one that takes its arguments as a list."""
    mark_as_boxed(function)
    return function


@dataclass(frozen=True)
class Variant:
    """A graph, lowered for one plan.

    Attributes:
        function: the lowered graph.
        inputs, outputs: the extra inputs and outputs, besides those of the traced graph.
        run: the variant as a program that ranks compare.
        reductions: the gradients that each collective reduces, by bucket and position there; None: those of one bucket each.
        guard: tells whether the variant is for the sizes of a call's inputs; None: it is for all sizes.
        communicating: the names in the graph of the units that it communicates for.
    """

    function: BoxedFunction
    inputs: Sequence[InputSlot]
    outputs: Sequence[OutputSlot]
    run: CheckedProgram
    reductions: Sequence[Group] | None = None
    guard: SizeGuard | None = None
    communicating: Sequence[str] = ()

    def begin(self, params: Mapping[str, ShardedParam]) -> None:
        """Begin to run, as ranks compare runs.

        Args:
            params: a parameter of each unit that the graph works for, by the unit's name in the graph. Equal blocks share a
                graph: these tell which block it runs for.
        """
        names = [params[unit].name for unit in self.communicating]
        self.run.begin(sum(map(_number, names)), names[0] if names else "")


@functools.cache
def _number(name: str) -> int:
    return zlib.crc32(name.encode())


#: The name of the range in profiles around each call of a lowered graph, by whether the graph is a backward graph.
RANGES = {False: "FSDP::forward graph", True: "FSDP::backward graph"}

#: Functions that are called before each call of a graph, with the graph, the variant that will run, and the call.
call_observers: list[Callable[[PlannedGraph, Variant, Call], None]] = []


class PlannedGraph:
    """A forward or backward graph that is lowered once for each plan that it is called with.

    Args:
        gm: the graph after the preparing passes.
        buckets: its buckets.
        lower: lowers the graph for a plan and for the sizes of a call's inputs. The inputs are None where Dynamo guards sizes.
        is_backward: whether this is a backward graph.
        registry: the parameters of inputs that do not identify their parameter.
        can_keep: whether gathered parameters may outlive a call; False for a graph for inference.
        can_merge: whether ``lower`` may reduce gradients of several buckets together.

    Attributes:
        is_backward, registry: as given.
    """

    def __init__(
        self,
        gm: GraphModule,
        buckets: Buckets,
        lower: Callable[[Plan, Sequence[Any] | None], tuple[BoxedFunction, Interface, CheckedProgram, SizeGuard | None]],
        *,
        is_backward: bool,
        registry: ParameterRegistry,
        can_keep: bool,
        can_merge: bool = False,
    ):
        self._lower = lower
        self.registry = registry
        self.is_backward = is_backward
        self._can_keep = can_keep
        self._can_merge = can_merge
        self._num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        self._variants: dict[Plan, list[Variant]] = {}
        self._offloaded = [] if is_backward else offloaded_outputs(gm.graph)
        self._inputs = GraphInputs(gm.graph, buckets)
        self._orders: tuple[tuple[int, ...], ...] | None = None

    def lower_ahead(self, params: dict[tuple[str, str], ShardedParam]) -> None:
        """Lower a forward graph before its first call, for the plan of that call.

        Args:
            params: the parameters by (unit, name) in the graph.
        """
        self._variant(self.first_plan(params), {unit: param.unit for (unit, _), param in params.items()}, None)

    def first_plan(self, params: Mapping[tuple[str, str], ShardedParam]) -> Plan:
        """Return the plan that the first call will have.

        Args:
            params: the parameters by (unit, name) in the graph.
        """

        def of(members: Sequence[int]) -> list[ShardedParam]:
            return [params[self._inputs.names[index]] for index in members]

        gathers = tuple(self._gather(None if members is None else of(members)) for members in self._inputs.gathers)
        if self.is_backward:
            # By then, the first forward has gathered the parameters that it keeps for later graphs.
            gathers = tuple(Gather.REUSE if gather is Gather.KEEP else gather for gather in gathers)
        units = {unit: params[self._inputs.names[index]].unit for unit, index in self._inputs.units.items()}
        prefetch = self._prefetch(units, gathers)
        if not self.is_backward:
            return Plan(gathers, prefetch=prefetch)
        gradients = [Gradients(of(bucket.members), bucket.like, bucket.grad_dtype) for bucket in self._inputs.gradients]
        return self._reducing(gathers, gradients, prefetch)

    def __call__(self, args: list[Any]) -> list[Any]:
        call = Call(self._inputs, self.registry, args)
        if not self.is_backward:
            call.check_shards_differ()
            for unit in call.units.values():
                if unit.scope.lent:
                    write_back(unit)
        is_wanted = self.is_backward and call.accumulates()
        # Skipped for models without an optimizer in backward, as it takes time for each parameter.
        if any(unit.updates for unit in call.units.values()):
            if is_wanted:
                note_backward(param for bucket in call.gradients for param in bucket.params)
            elif not self.is_backward and self._can_keep:
                note_forward(map(call.param, self._inputs.read))
        plan = self._plan(call, is_wanted)
        variant = self._variant(plan, call.units, args)
        variant.begin(call.params)
        if variant.reductions is not None:
            call.regroup(variant.reductions)
        for unit in call.units.values():
            if not self.is_backward:
                unit.scope.wait_for_optimizer()
            if unit.pending:
                finish_unshard(unit)
        for observe in call_observers:
            observe(self, variant, call)
        call.bind(variant.inputs)
        if not self.is_backward and (Gather.REUSE in plan.gathers or None in call.gathers):
            for index in self._inputs.read:
                call.param(index).end_forward()
        call.release(is_backward=self.is_backward)
        # Autograd records nothing here, but each functional collective would go through its autograd formula, in Python.
        with variant.run, AutoDispatchBelowAutograd(), RecordFunctionFast(RANGES[self.is_backward]):
            outputs = list(variant.function(args))
        self._hand_over([outputs[index] for index in self._offloaded])
        call.store(variant.outputs, outputs[self._num_outputs :], gradients=is_wanted)
        return outputs[: self._num_outputs]

    def _hand_over(self, offloaded: Sequence[Tensor]) -> None:
        """Prepare activations on the host for autograd, which saves them next.

        A hook on saved tensors reads them at once, so the host waits for the copies. Without hooks only the device reads them.
        """
        has_hooks = bool(offloaded) and top_saved_tensors_default_hooks(False) is not None
        for copy in offloaded:
            if has_hooks:
                wait_on_host(copy)
            else:
                leave_to_device(copy)

    def _variant(self, plan: Plan, units: dict[str, Unit], args: Sequence[Any] | None) -> Variant:
        variants = self._variants.get(plan)
        if variants is None:
            found = self._variants
            if plan.has_hooks:
                # Models of the same classes share this graph, each with hooks of its own.
                found = next(iter(units.values())).scope.with_hooks.setdefault(self, {})
            variants = found.setdefault(plan, [])
        for variant in variants:
            if variant.guard is None or (args is not None and variant.guard(args)):
                return variant
        log_idle_lists(units, is_backward=self.is_backward)
        function, interface, run, guard = self._lower(plan, args)
        groups = interface.reduction_groups if interface.reduction_groups != self._inputs.reduction_groups else None
        communicating = self._communicating(plan)
        variants.append(Variant(function, interface.inputs, interface.outputs, run, groups, guard, communicating))
        if len(variants) == _MANY_VARIANTS:
            logger.warning(
                "A %s graph has been compiled for %d sets of sizes, and goes on so: its code is for %s.",
                "backward" if self.is_backward else "forward",
                len(variants),
                guard,
            )
        return variants[-1]

    def _communicating(self, plan: Plan) -> list[str]:
        """Return the names of the units that a plan communicates for, in the order of names."""
        buckets = self._inputs.buckets
        gathering = zip(buckets.gathers, plan.gathers, strict=True)
        reducing = zip(buckets.reductions, plan.reductions, strict=True)
        found = {bucket.unit for bucket, action in gathering if action is not Gather.REUSE}
        found |= {bucket.unit for bucket, planned in reducing if planned.reduction.sync is not Sync.NONE}
        return sorted(found & self._inputs.units.keys())

    def _plan(self, call: Call, is_wanted: bool) -> Plan:
        actions = tuple(self._gather(params) for params in call.gathers)
        prefetch = self._prefetch(call.units, actions)
        if not self.is_backward:
            return Plan(actions, prefetch=prefetch)
        self._check_backward_may_gather(call, actions)
        if not is_wanted:
            return Plan(actions, tuple(PlannedReduction(bucket.leave_out()) for bucket in call.gradients), prefetch)
        for bucket in call.gradients:
            receive(bucket.unit, bucket.params)
        return self._reducing(actions, call.gradients, prefetch)

    def _reducing(
        self, gathers: tuple[Gather, ...], gradients: Sequence[Gradients], prefetch: tuple[tuple[str, tuple[str, ...]], ...]
    ) -> Plan:
        """Return the plan of a backward whose gradients are wanted."""
        if self._orders is None:
            # Made once: equal blocks have equal orders, and parameters that lie in another order train just as well.
            self._orders = tuple(in_order_of_storage(bucket.params) for bucket in gradients)
        made = [bucket.plan() for bucket in gradients]
        factors = [bucket.factors for bucket in gradients]
        classes = map(factors.index, factors) if self._can_merge else itertools.repeat(None)
        reductions = tuple(map(PlannedReduction, made, classes, self._orders, _updates(gradients)))
        reducing = [bucket.unit for bucket in gradients if bucket.reduction.sync is not Sync.NONE]
        return Plan(gathers, reductions, prefetch, max_pending_reductions(reducing))

    def _gather(self, params: list[ShardedParam] | None) -> Gather:
        if params is None:
            return Gather.GATHER
        if all(param.state.will_have_full(param.param) for param in params):
            return Gather.REUSE
        return Gather.KEEP if self._can_keep and not params[0].unit.flags.reshard_after_backward else Gather.GATHER

    def _prefetch(self, units: dict[str, Unit], gathers: Sequence[Gather]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        actions = zip(self._inputs.buckets.gathers, gathers, strict=True)
        gathering = [bucket.unit for bucket, action in actions if action is not Gather.REUSE]
        return prefetch_lists(units, gathering, is_backward=self.is_backward)

    def _check_backward_may_gather(self, call: Call, actions: Sequence[Gather]) -> None:
        for bucket, params, action in zip(self._inputs.buckets.gathers, call.gathers, actions, strict=True):
            unit = call.units.get(bucket.unit)
            if unit is not None and not unit.flags.unshard_in_backward and action is not Gather.REUSE:
                # Parameters in a smaller group are known only by their names.
                names = [param.name for param in params or ()] or [Unshard.of(node).name for node in bucket.nodes]
                raise RuntimeError(must_not_gather(unit, names))


def _updates(gradients: Sequence[Gradients]) -> Iterable[tuple[UpdateTarget, ...]]:
    """Return where each update of a backward writes, by bucket."""
    if not any(bucket.updates for bucket in gradients):
        return itertools.repeat(())
    keys = [update.key for bucket in gradients for update in bucket.updates]
    numbers = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    return [
        tuple(
            UpdateTarget(param.offset, param.padded_numel, planned.update, numbers[planned.key])
            for param, planned in zip(bucket.params, bucket.updates, strict=bool(bucket.updates))
        )
        for bucket in gradients
    ]
