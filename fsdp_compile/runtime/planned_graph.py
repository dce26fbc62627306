"""What runs around lowered graphs: the plan is made, extra inputs are bound, extra outputs land.

A lowered graph does not know which parameters it works on: equal blocks may share one. The shards among its inputs say it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from passes.collectives.functional import factor_tensor
from passes.fx.graph import shard_input
from passes.ir.interface import Interface, Slot
from passes.ir.ops import ReduceGrad, Unshard, reduce_grads, unshards
from passes.ir.plan import Gather, Plan, Reduction, Sync
from passes.transforms.bucket import Bucket, Group, gather_buckets, reduction_buckets, whole_buckets

from ..units.sharded_param import ShardedParam, param_in_memory
from ..units.unit import Unit
from .course import Run
from .gradients import (
    accumulates,
    flat_grad,
    flat_partial,
    keep_partial,
    land_gradients,
    receive,
    reduced,
    reduction_of,
    unsharded_grad,
)
from .plan import log_idle_lists, max_pending_reductions, must_not_gather, prefetch_lists
from .unsharding import finish_unshard

#: Takes its arguments as a list, which it empties.
BoxedFunction = Callable[[list[Any]], Any]


def boxed(function: Callable[[list[Any]], Any]) -> BoxedFunction:
    """Mark a function as one that takes its arguments as a list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def sharded_param(shard: Any) -> ShardedParam:
    """The parameter that a graph input is the shard of."""
    return shard._fsdp_sharded_param


class Owners:
    """Whose shards a model's graphs are called with, by the names of unit and parameter in them.

    Graphs ask their inputs. Where a saved-tensor hook has replaced what backward finds, the input does not know. A checkpoint
    gives a tensor in the memory of the shard. A copy (``save_on_cpu``) belongs to the parameter that the graph was compiled
    for, unless it was called with others, too, as with equal blocks that share one graph.
    """

    def __init__(self, params: Mapping[tuple[str, str], ShardedParam]):
        # Compiled code must not keep a model alive.
        self._seen = {names: {id(param): weakref.ref(param)} for names, param in params.items()}

    def note(self, names: tuple[str, str], param: ShardedParam) -> None:
        """Note what a graph is called with."""
        known = self._seen[names].get(id(param))
        if known is None or known() is not param:
            self._seen[names][id(param)] = weakref.ref(param)

    def of(self, shard: Any, names: tuple[str, str]) -> ShardedParam:
        """The parameter of an input that goes by these names in the graph.

        Raises:
            RuntimeError: nobody knows.
        """
        found = getattr(shard, "_fsdp_sharded_param", None)
        return self._find(shard, names) if found is None else found

    def _find(self, replaced: Tensor, names: tuple[str, str]) -> ShardedParam:
        found = param_in_memory(replaced)
        if found is not None:
            return found
        params = [param for known in self._seen.get(names, {}).values() if (param := known()) is not None]
        if len(params) == 1:
            return params[0]
        raise RuntimeError(
            f"Backward found a copy of the shard of {names[1]} that forward saved, made by a saved-tensor hook (save_on_cpu), "
            "and several modules share the compiled graph. Compile the whole model, or use no such hook around it."
        )


@dataclass(frozen=True)
class Variant:
    """A graph, lowered for one plan.

    Attributes:
        function: the lowered graph.
        inputs, outputs: what it takes and gives besides those of the traced graph.
        run: what the ranks know it as.
        reductions: the gradients that it reduces together, by bucket and position there; None: those of each bucket.
    """

    function: BoxedFunction
    inputs: Sequence[Slot]
    outputs: Sequence[Slot]
    run: Run
    reductions: Sequence[Group] | None = None


class _Reductions:
    """A bucket of gradients in one call of a graph."""

    def __init__(self, params: list[ShardedParam], like: Tensor, grad_dtype: torch.dtype):
        self.params = params
        self.like = like
        self.grad_dtype = grad_dtype
        self.plan: Reduction
        self.factors: tuple[float, ...]

    @property
    def unit(self) -> Unit:
        return self.params[0].unit

    def make_plan(self) -> Reduction:
        self.plan, self.factors = reduction_of(self.unit, self.params, self.like)
        return self.plan

    def leave_out(self) -> Reduction:
        """Plan for gradients that nobody has asked for: the graph gives them out as they are, and they are dropped."""
        self.plan, self.factors = Reduction(Sync.NONE), ()
        return self.plan


def _accumulates(reductions: list[_Reductions]) -> bool:
    """Whether the backward that runs is to accumulate gradients of parameters."""
    shards = [param.shard for reduction in reductions for param in reduction.params]
    # One may have been frozen since forward.
    shard = next((shard for shard in shards if shard.requires_grad), None)
    return shard is not None and accumulates(shard)


def _regroup(reductions: list[_Reductions], groups: Sequence[Group] | None) -> list[_Reductions]:
    """The buckets of gradients as a variant reduces them. Those that it merges have one plan, and equal factors."""
    if groups is None:
        return reductions
    regrouped = []
    for group in groups:
        first = reductions[group[0][0]]
        merged = _Reductions([reductions[index].params[position] for index, position in group], first.like, first.grad_dtype)
        merged.plan, merged.factors = first.plan, first.factors
        regrouped.append(merged)
    return regrouped


def _members(graph: Graph, bucket: Bucket) -> list[int]:
    """The placeholders of a bucket's shards."""
    index = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    return [index[node] for node in map(shard_input, bucket.shards) if node is not None]


def _members_to_keep(graph: Graph, bucket: Bucket) -> list[int] | None:
    """The placeholders of a bucket's shards; None for those in a smaller group, which do not tell whose they are."""
    in_storage = all(Unshard.of(node).offset >= 0 for node in bucket.nodes)
    return _members(graph, bucket) if in_storage else None


def _find_units(graph: Graph) -> dict[str, int]:
    """The units of a graph, by their names in it, with the placeholder of a shard of each."""
    index = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    specs: list[Unshard | ReduceGrad] = [spec for spec in map(Unshard.of, unshards(graph.nodes)) if spec.offset >= 0]
    specs += map(ReduceGrad.of, reduce_grads(graph.nodes))
    found: dict[str, int] = {}
    for spec in specs:
        shard = shard_input(spec.shard)
        if shard is not None:
            found.setdefault(spec.unit, index[shard])
    return found


def _names_of_inputs(graph: Graph) -> dict[int, tuple[str, str]]:
    """The names of unit and parameter of each placeholder that is a shard."""
    index = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    specs: list[Unshard | ReduceGrad] = [
        *map(Unshard.of, unshards(graph.nodes)),
        *map(ReduceGrad.of, reduce_grads(graph.nodes)),
    ]
    shards = ((shard_input(spec.shard), spec) for spec in specs)
    return {index[shard]: (spec.unit, spec.name) for shard, spec in shards if shard is not None}


def _shards_read(graph: Graph) -> list[int]:
    """The placeholders of the shards that a graph unshards."""
    index = {node: position for position, node in enumerate(graph.find_nodes(op="placeholder"))}
    shards = [shard_input(Unshard.of(node).shard) for node in unshards(graph.nodes)]
    return [index[shard] for shard in shards if shard is not None]


class PlannedGraph:
    """A forward or backward graph that is lowered once for each plan that it is called with.

    Args:
        gm: the graph after the preparing passes.
        lower: lowers a graph for a plan.
        is_backward: which of the two it is.
        owners: whose shards its inputs are where they do not tell.
        can_keep: whether gathered parameters may live on: not those of a graph for inference.
        can_merge: whether ``lower`` may reduce gradients of several buckets together.
    """

    def __init__(
        self,
        gm: GraphModule,
        lower: Callable[[Plan], tuple[BoxedFunction, Interface, Run]],
        *,
        is_backward: bool,
        owners: Owners,
        can_keep: bool,
        can_merge: bool = False,
    ):
        self._lower = lower
        self._owners = owners
        self._names = _names_of_inputs(gm.graph)
        self._is_backward = is_backward
        self._can_keep = can_keep
        self._can_merge = can_merge
        self._num_outputs = len(gm.graph.output_node().args[0])  # type: ignore[arg-type]
        self._variants: dict[Plan, Variant] = {}
        self.gather_buckets = gather_buckets(gm.graph)
        self._gathers = [_members_to_keep(gm.graph, bucket) for bucket in self.gather_buckets]
        self._units = _find_units(gm.graph)
        self._shards_read = _shards_read(gm.graph)
        self._reductions: list[tuple[list[int], Tensor, torch.dtype]] = []
        buckets = reduction_buckets(gm.graph)
        self._unmerged = whole_buckets(buckets)
        for bucket in buckets:
            members = _members(gm.graph, bucket)
            spec = ReduceGrad.of(bucket.nodes[0])
            value = spec.grad.meta["val"]
            like = torch.empty((), dtype=value.dtype, device=value.device)
            self._reductions.append((members, like, spec.grad_dtype or value.dtype))

    def lower_ahead(self, params: dict[tuple[str, str], ShardedParam]) -> None:
        """Lower a forward graph for the plan that its first call will have, of parameters by (unit, name) in the graph."""
        gathers = []
        for bucket, members in zip(self.gather_buckets, self._gathers, strict=True):
            specs = [Unshard.of(node) for node in bucket.nodes]
            gathers.append(self._gather([params[spec.unit, spec.name] for spec in specs] if members is not None else None))
        units = {unit: param.unit for (unit, _), param in params.items()}
        self._variant(Plan(tuple(gathers), prefetch=self._prefetch(units, gathers)), units)

    def _variant(self, plan: Plan, units: dict[str, Unit]) -> Variant:
        variant = self._variants.get(plan)
        if variant is None:
            log_idle_lists(units, is_backward=self._is_backward)
            function, interface, run = self._lower(plan)
            groups = interface.reduction_groups if interface.reduction_groups != self._unmerged else None
            variant = self._variants[plan] = Variant(function, interface.inputs, interface.outputs, run, groups)
        return variant

    def _gather(self, params: list[ShardedParam] | None) -> Gather:
        if params is None:
            return Gather.GATHER
        if all(param.state.will_have_full(param.param) for param in params):
            return Gather.REUSE
        return Gather.KEEP if self._can_keep and not params[0].unit.flags.reshard_after_backward else Gather.GATHER

    def _prefetch(self, units: dict[str, Unit], gathers: Sequence[Gather]) -> tuple[tuple[str, tuple[str, ...]], ...]:
        actions = zip(self.gather_buckets, gathers, strict=True)
        gathering = [bucket.unit for bucket, action in actions if action is not Gather.REUSE]
        return prefetch_lists(units, gathering, is_backward=self._is_backward)

    def _check_backward_may_gather(
        self, units: dict[str, Unit], gathers: Sequence[list[ShardedParam] | None], actions: Sequence[Gather]
    ) -> None:
        for bucket, params, action in zip(self.gather_buckets, gathers, actions, strict=True):
            unit = units.get(bucket.unit)
            if unit is not None and not unit.flags.unshard_in_backward and action is not Gather.REUSE:
                # Of parameters in a smaller group only the names are known.
                names = [param.name for param in params or ()] or [Unshard.of(node).name for node in bucket.nodes]
                raise RuntimeError(must_not_gather(unit, names))

    def __call__(self, args: list[Any]) -> list[Any]:
        gathers = [
            [self._param(args, member) for member in members] if members is not None else None for members in self._gathers
        ]
        reductions = [
            _Reductions([self._param(args, member) for member in members], like, grad_dtype)
            for members, like, grad_dtype in self._reductions
        ]
        units = {name: self._param(args, member).unit for name, member in self._units.items()}
        is_wanted = _accumulates(reductions)
        plan = self._plan(units, gathers, reductions, is_wanted)
        variant = self._variant(plan, units)
        variant.run.begin()
        reductions = _regroup(reductions, variant.reductions)
        for unit in units.values():
            if not self._is_backward:
                unit.scope.wait_for_optimizer()
            if unit.pending:
                finish_unshard(unit)
        args.extend([self._bind(slot, args, gathers, reductions) for slot in variant.inputs])
        if not self._is_backward and Gather.REUSE in plan.gathers:
            for member in self._shards_read:
                self._param(args, member).end_forward()
        self._release(gathers, reductions)
        # Autograd has nothing to record here, but each functional collective would pass through its formula, in Python.
        with variant.run, torch._C._AutoDispatchBelowAutograd():
            outputs = list(variant.function(args))
        for slot, value in zip(variant.outputs, outputs[self._num_outputs :], strict=True):
            if is_wanted or slot.kind == "full":
                _land(slot, value, gathers, reductions)
        for reduction in reductions:
            if reduction.plan.sync is Sync.ALL:
                reduced(reduction.params)
        return outputs[: self._num_outputs]

    def _param(self, args: list[Any], member: int) -> ShardedParam:
        return self._owners.of(args[member], self._names[member])

    def _plan(
        self,
        units: dict[str, Unit],
        gathers: Sequence[list[ShardedParam] | None],
        reductions: Sequence[_Reductions],
        is_wanted: bool,
    ) -> Plan:
        actions = tuple(self._gather(params) for params in gathers)
        prefetch = self._prefetch(units, actions)
        if not self._is_backward:
            return Plan(actions, prefetch=prefetch)
        self._check_backward_may_gather(units, gathers, actions)
        if not is_wanted:
            left_out = tuple(reduction.leave_out() for reduction in reductions)
            return Plan(actions, left_out, prefetch, None, tuple(range(len(reductions))) if self._can_merge else ())
        for reduction in reductions:
            receive(reduction.unit, reduction.params)
        made = tuple(reduction.make_plan() for reduction in reductions)
        reducing = [reduction.unit for reduction in reductions if reduction.plan.sync is not Sync.NONE]
        factors = [reduction.factors for reduction in reductions]
        classes = tuple(map(factors.index, factors)) if self._can_merge else ()
        return Plan(actions, made, prefetch, max_pending_reductions(reducing), classes)

    def _bind(
        self, slot: Slot, args: list[Any], gathers: Sequence[list[ShardedParam] | None], reductions: Sequence[_Reductions]
    ) -> Tensor:
        """The tensor of an extra input."""
        if slot.kind == "storage":
            param = self._param(args, slot.index)
            return param.unit.storages[param.shard.dtype].narrow(0, slot.offset, slot.numel)
        if slot.kind == "full":
            param = gathers[slot.bucket][slot.index]  # type: ignore[index]
            full = param.state.full(param.param)
            assert full is not None
            return full
        reduction = reductions[slot.bucket]
        if slot.kind == "unsharded":
            return unsharded_grad(reduction.params[slot.index], reduction.like)
        if slot.kind == "partial":
            return flat_partial(reduction.params)
        if slot.kind == "grad":
            return flat_grad(reduction.params, reduction.grad_dtype)
        assert slot.kind == "factor"
        return factor_tensor(reduction.factors[slot.index], reduction.like.dtype, reduction.like.device)

    def _release(self, gathers: Sequence[list[ShardedParam] | None], reductions: Sequence[_Reductions]) -> None:
        """Leave what the graph consumes to the graph alone, so that its memory is free after the last use."""
        for reduction in reductions:
            for param in reduction.params:
                if reduction.plan.sync is not Sync.NONE:
                    param.state.unsharded_grad = None
                if reduction.plan.sync is Sync.ALL:
                    param.state.partial_grad = None
        if self._is_backward:
            for params in gathers:
                for param in params or ():
                    if param.unit.flags.reshard_after_backward:
                        param.state.drop_full()


def _land(slot: Slot, value: Tensor, gathers: Sequence[list[ShardedParam] | None], reductions: Sequence[_Reductions]) -> None:
    """Put an extra output where the next graph, or the user, finds it."""
    if slot.kind == "full":
        param = gathers[slot.bucket][slot.index]  # type: ignore[index]
        param.state.keep_full(param.param, value.contiguous())
    elif slot.kind == "unsharded":
        reductions[slot.bucket].params[slot.index].state.unsharded_grad = value.contiguous()
    elif slot.kind == "partial":
        keep_partial(reductions[slot.bucket].params, value)
    else:
        assert slot.kind == "grad"
        land_gradients(reductions[slot.bucket].params, value)
