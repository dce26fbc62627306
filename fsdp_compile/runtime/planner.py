"""The planner of a graph: makes the plan of each call, from flags and state of the units."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence

from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Sync
from passes.ir.update import UpdateTarget

from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .call import Call, Gradients
from .gradients import in_order_of_storage, receive
from .graph_inputs import GraphInputs
from .schedule_settings import max_pending_reductions, must_not_gather, prefetch_lists


class Planner:
    """The planner of a forward or backward graph.

    Args:
        inputs: the graph's inputs that are shards.
        is_backward: whether it is a backward graph.
        can_keep: whether gathered parameters may outlive a call; False for a graph for inference.
        can_merge: whether gradients of several buckets may be reduced together.

    Attributes:
        inputs, is_backward, can_keep: as given.
    """

    def __init__(self, inputs: GraphInputs, *, is_backward: bool, can_keep: bool, can_merge: bool):
        self.inputs = inputs
        self.is_backward = is_backward
        self.can_keep = can_keep
        self._can_merge = can_merge
        self._orders: tuple[tuple[int, ...], ...] | None = None

    def first(self, params: Mapping[tuple[str, str], ShardedParam]) -> Plan:
        """Return the plan that the first call will have.

        Args:
            params: the parameters by (unit, name) in the graph.
        """

        def of(members: Sequence[int]) -> list[ShardedParam]:
            return [params[self.inputs.names[index]] for index in members]

        members = [bucket.members for bucket in self.inputs.gathers]
        gathers = tuple(self._gather(None if found is None else of(found)) for found in members)
        if self.is_backward:
            # By then, the first forward has gathered the parameters that it keeps for later graphs.
            gathers = tuple(map(_after_forward, gathers, (None if found is None else of(found) for found in members)))
        units = {unit: params[self.inputs.names[index]].unit for unit, index in self.inputs.units.items()}
        prefetch = self._prefetch(units, gathers)
        if not self.is_backward:
            return Plan(gathers, prefetch=prefetch)
        gradients = [Gradients(of(bucket.members), bucket.like, bucket.grad_dtype) for bucket in self.inputs.gradients]
        return self._reducing(gathers, gradients, prefetch)

    def plan_of(self, call: Call, *, is_wanted: bool) -> Plan:
        """Return the plan of a call.

        Args:
            call: the call.
            is_wanted: whether it is a backward whose gradients of parameters are wanted.

        Raises:
            RuntimeError: backward would gather parameters that it must not gather (``set_unshard_in_backward(False)``).
        """
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

    def communicating(self, plan: Plan) -> list[str]:
        """Return the names of the units that a plan communicates for, in the order of names."""
        gathering = zip(self.inputs.gathers, plan.gathers, strict=True)
        reducing = zip(self.inputs.gradients, plan.reductions, strict=True)
        found = {bucket.unit for bucket, action in gathering if action is not Gather.REUSE}
        found |= {bucket.unit for bucket, planned in reducing if planned.reduction.sync is not Sync.NONE}
        return sorted(found & self.inputs.units.keys())

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
        if self.can_keep and not params[0].unit.flags.reshard_after_backward:
            return Gather.KEEP
        if not params[0].mesh.node_group:
            return Gather.GATHER
        # Asked of all of them: those that have changed are freed before new ones are made.
        have_node_shards = [param.state.node_shard(param.param) is not None for param in params]
        return Gather.WITHIN_NODE if all(have_node_shards) else Gather.GATHER

    def _prefetch(self, units: dict[str, Unit], gathers: Sequence[Gather]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        actions = zip(self.inputs.gathers, gathers, strict=True)
        gathering = [bucket.unit for bucket, action in actions if action is not Gather.REUSE]
        return prefetch_lists(units, gathering, is_backward=self.is_backward)

    def _check_backward_may_gather(self, call: Call, actions: Sequence[Gather]) -> None:
        for bucket, params, action in zip(self.inputs.gathers, call.gathers, actions, strict=True):
            unit = call.units.get(bucket.unit)
            if unit is not None and not unit.flags.unshard_in_backward and action is not Gather.REUSE:
                # Parameters in a smaller group are known only by their names.
                names = [param.name for param in params or ()] or bucket.parameters
                raise RuntimeError(must_not_gather(unit, names))


def _after_forward(gather: Gather, params: Sequence[ShardedParam] | None) -> Gather:
    """Return the plan of a backward for a bucket, from that of the forward."""
    if gather is Gather.KEEP:
        return Gather.REUSE
    has_nodes = gather is Gather.GATHER and params is not None and params[0].mesh.node_group
    return Gather.WITHIN_NODE if has_nodes else gather


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
