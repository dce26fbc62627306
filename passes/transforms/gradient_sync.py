"""Gradient sync: reduce, accumulate or return each gradient, as the plan of the microbatch says.

Before: a ``reduce_grad`` for each gradient, whose result is an output.
After:  for each bucket (unit, dtypes and groups), as its :class:`~passes.ir.reduction.Reduction` says:

- ``Sync.NONE``: the full gradients are outputs, or are added in place to those of earlier microbatches. No communication.
- ``Sync.SCATTER``: one ``reduce_scatter_tensor`` just after the bucket's last gradient, of the sum with earlier full
  gradients. Its flat shard is an output, or is added in place to the earlier partial result.
- ``Sync.ALL``: the same; then with replicas one ``all_reduce`` (HSDP) or ``reduce_scatter_tensor`` (shards that are cut over
  replicas, too) of the sum with the earlier partial result. The flat shard of averaged gradients, in ``grad_dtype``, is an
  output, or is added in place to ``param.grad``.
  If the plan updates parameters (:mod:`passes.ir.update`), an existing ``param.grad`` is added to the flat shard instead. Then
  one kernel for each run of neighbours in flat storage updates parameters and optimizer state in place. No gradient is stored.

A reduction absorbs the casts of its gradients that have no other reader. Partial results are added before the all-reduce: added
after it, those of the other replicas would be missing. Divide factors and the tensors of a communication hook are inputs of the
graph. The hook's tensors are overwritten as soon as nothing reads their old values. The outputs that were gradients are None:
the runtime writes ``param.grad`` itself. In a flat shard, gradients are in the order that the plan gives. That is the order of
flat storage, so that an optimizer can use both as they are.

New nodes are marked with their work (:mod:`passes.ir.work`). Nothing overlaps yet.

Leaves alone reductions of the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..collectives.divide_factors import factor_dtype
from ..collectives.functional import group_size, hook_parameters, replica_parameters
from ..collectives.stateful_hook import OVER_REPLICAS, HookParameter, StatefulHook, tensors_of_hook
from ..fx.emit import emit
from ..fx.graph import is_collective, last_element, memory_of, viewed
from ..fx.torch_internals.core import OpOverload
from ..fx.torch_internals.objects import schema_of
from ..ir.interface import (
    DivideFactor,
    HookTensor,
    InputSlot,
    Interface,
    OptimizerState,
    OutputSlot,
    PartialGradient,
    ReducedGradient,
    UnshardedGradient,
    UpdatedRun,
    UpdateNumbers,
)
from ..ir.ops import ReduceGrad, reduce_grads
from ..ir.plan import PlannedReduction
from ..ir.reduction import CarriedTensors, Operand, Reduction, Stage, Sync, stages
from ..ir.storage import Location, mark_location
from ..ir.update import UpdateTarget, updated
from ..ir.work import WORK, Role, Work, mark, mark_gradient, nodes_of
from ..models.memory_model import mark_taken_gradient
from .bucket import Bucket, Group, find_buckets, members_of, regroup, sorted_by_unit, whole_buckets

_cast = torch.ops.prims.convert_element_type.default
_copy = torch.ops.aten.copy_.default
_expand = torch.ops.aten.expand.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def synchronize_gradients(
    graph: Graph,
    plan: Sequence[PlannedReduction],
    interface: Interface,
    groups: Sequence[Group] | None = None,
    *,
    buckets: Sequence[Bucket] | None = None,
) -> None:
    """Replace the ``reduce_grad`` nodes of a backward graph as the plan says. In place.

    Args:
        graph: the graph.
        plan: the reduction of each of ``buckets``.
        interface: receives the inputs and outputs that the plan adds.
        groups: reduce these groups instead of the buckets. Together they have all gradients, and the plan does the same with
            all members of a group.
        buckets: the graph's buckets of reductions; None: those that :func:`~passes.transforms.bucket.find_buckets` finds.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    buckets = find_buckets(graph).reductions if buckets is None else buckets
    reduced = dict.fromkeys(reduce_grads(graph.nodes))
    for node in reduced:
        if any(user is not output for user in node.users):
            raise AssertionError(f"The reduced gradient {node.format_node()} is no output, but read by {list(node.users)}.")
    output.args = (tuple(None if value in reduced else value for value in outputs),)
    assert len(plan) == len(buckets)
    wanted = list(groups) if groups is not None else whole_buckets(buckets)

    def position(member: tuple[int, int]) -> int:
        bucket, place = member
        planned = plan[bucket]
        if planned.updates:
            # The order of the shards that the gradients update.
            return planned.updates[place].offset
        # Gradients that are not reduced form no flat shard.
        return planned.order.index(place) if planned.order and planned.reduction.sync is not Sync.NONE else place

    found = interface.reduction_groups = [sorted_by_unit(group, position) for group in wanted]
    named = zip(found, regroup(buckets, found), members_of(buckets, found), strict=True)
    for index, (group, bucket, members) in enumerate(named):
        interface.members[False, bucket.name] = members
        reduction = plan[group[0][0]].reduction
        places = [(place, plan[place].updates[position]) for place, position in group] if reduction.updates else []
        _ReductionWriter(graph, bucket, index, reduction, interface, places).write()
        for node in bucket.nodes:
            graph.erase_node(node)


class _ReductionWriter:
    """The writer of one bucket's reduction into the graph."""

    def __init__(
        self,
        graph: Graph,
        bucket: Bucket,
        index: int,
        reduction: Reduction,
        interface: Interface,
        places: Sequence[tuple[int, UpdateTarget]],
    ):
        self.graph = graph
        self.places = places
        self.bucket = bucket
        self.index = index
        self.reduction = reduction
        self.interface = interface
        self.specs = [ReduceGrad.of(node) for node in bucket.nodes]
        self.grads = [spec.grad for spec in self.specs]
        self.like: torch.Tensor = self.grads[0].meta["val"]

    def write(self) -> None:
        # After the placeholders: an input of backward may itself be a gradient.
        behind = last_element(max([*self.grads, self.graph.find_nodes(op="placeholder")[-1]])).next
        if self.reduction.sync is not Sync.NONE:
            self._take_in_casts(behind)
        with self.graph.inserting_before(behind):
            if self.reduction.sync is Sync.NONE:
                self._keep_unsharded()
            else:
                self._reduce()

    def _work(self, role: Role) -> Work:
        return Work(role, self.bucket.name)

    def _take_in_casts(self, behind: Node) -> None:
        """Make casts of gradients part of the copy-in. Until then, only the gradient in its computed dtype is alive."""
        for grad in self.grads:
            if grad.target == _cast and all(user in self.bucket.nodes for user in grad.users):
                behind.prepend(grad)
                mark(grad, self._work(Role.START_REDUCE))

    def _keep_unsharded(self) -> None:
        work = self._work(Role.ACCUMULATE)
        if self.reduction.has_unsharded:
            for kept, grad in zip(self._unsharded(), self.grads, strict=True):
                self._write_over(kept, emit(self.graph, torch.add, kept, grad, work=work), work)
            return
        for position, grad in enumerate(self.grads):
            mark_gradient(grad, self.bucket.name)
            if _may_share_memory(grad, [*self.graph.output_node().all_input_nodes, *self.interface.output_nodes]):
                grad = emit(self.graph, torch.clone, grad, work=work)
            self.interface.add_output(grad, UnshardedGradient(self.index, position))

    def _reduce(self) -> None:
        spec, reduction = self.specs[0], self.reduction
        group = reduction.group or spec.scatter_group
        found = stages(
            reduction,
            dims=[spec.dim for spec in self.specs],
            group="" if group_size(group) == 1 else group,
            replicate_group=spec.replicate_group,
            grad_dtype=spec.grad_dtype or self.like.dtype,
            numels=self._numels(),
            is_hybrid=bool(spec.node_group),
        )
        value: Any = self.grads
        taken: dict[Operand | None, list[Node]] = {None: []}
        for stage, following in zip(found, [*found[1:], None], strict=True):
            taken |= {operand: self._take(operand) for operand in stage.operands if operand is not None}
            operands = [taken[operand] for operand in stage.operands]
            value = emit(self.graph, stage.function, value, *operands, work=self._work(stage.role), **stage.constants)
            left: list[Node] = []
            if stage.updated is not None:
                value, left = value
            if stage.updated is CarriedTensors.HOOK:
                self._hoist(stage)
            if stage.constants.get("hook") is not None and following is not None:
                self._give_to(following, stage)
            if stage.updated is not None:
                value = self._update(taken[stage.updated], left, value)
        work = self._work(Role.FINISH_REDUCE)
        if reduction.sync is Sync.SCATTER:
            self._leave(value, PartialGradient(self.index), taken.get(CarriedTensors.PARTIAL, []), work)
        elif reduction.updates:
            if reduction.has_grad:
                grad = self._input("grad", value.meta["val"], ReducedGradient(self.index))
                value = emit(self.graph, torch.add, grad, value, work=work)
            self._update_shards(value)
        elif reduction.has_grad:
            grad = self._input("grad", value.meta["val"], ReducedGradient(self.index))
            self._leave(emit(self.graph, torch.add, grad, value, work=work), ReducedGradient(self.index), [grad], work)
        else:
            self._leave(value, ReducedGradient(self.index), [], work)

    def _update_shards(self, flat: Node) -> None:
        """Update parameters from the flat shard of their gradients, run by run."""
        work = self._work(Role.UPDATE)
        start = 0
        for first, numel in _runs(self.places):
            _, place = self.places[first]
            value = flat.meta["val"].new_empty(numel)
            shard = self._input("shards", value, UpdatedRun(self.index, first, numel))
            mark_location(shard, Location(self.specs[first].unit, value.dtype, place.offset))
            states = [
                self._input(name, value.new_empty(numel), OptimizerState(self.index, first, numel, name))
                for name in place.update.states
            ]
            numbers = value.new_empty(place.update.num_numbers, dtype=factor_dtype(value.dtype))
            taken = self._input("numbers", numbers, UpdateNumbers(self.index, first))
            grad = flat
            if numel != flat.meta["val"].numel():
                grad = emit(self.graph, torch.narrow, flat, dim=0, start=start, length=numel, work=work)
            found = emit(self.graph, updated, shard, grad, taken, states, update=place.update, work=work)
            for kept, new in zip((shard, *states), found, strict=True):
                self._write_over(kept, new, work)
            start += numel

    def _hoist(self, stage: Stage) -> None:
        """Move operators of a stage that need none of its collectives before the first, beside those that make the message."""
        written = nodes_of(self.graph, stage.role)[self.bucket.name]
        first = next((node for node in written if is_collective(node)), None)
        behind: set[Node] = set()
        for node in written:
            if is_collective(node) or any(source in behind for source in node.all_input_nodes):
                behind.add(node)
            elif first is not None and node > first:
                first.prepend(node)

    def _give_to(self, following: Stage, stage: Stage) -> None:
        """Mark a hook's operators from its last wait on as work of the following stage."""
        written = nodes_of(self.graph, stage.role)[self.bucket.name]
        waits = [node for node in written if node.target == _wait]
        for node in written[written.index(waits[-1]) :] if waits else []:
            mark(node, self._work(following.role))

    def _take(self, operand: Operand) -> list[Node]:
        """Take an operand of a stage as inputs of the graph."""
        if operand is CarriedTensors.UNSHARDED:
            unsharded = self._unsharded()
            for node in unsharded:
                mark_taken_gradient(node)
            return unsharded
        if operand is CarriedTensors.PARTIAL:
            spec = self.specs[0]
            replicas = group_size(spec.replicate_group) if spec.node_group else 1
            value = self.like.new_empty(replicas * sum(self._numels()))
            partial = self._input("partial", value, PartialGradient(self.index))
            if self.reduction.sync is Sync.ALL:
                mark_taken_gradient(partial)
            return [partial]
        if operand is CarriedTensors.HOOK:
            grads = [grad.meta["val"] for grad in self.grads]
            parameters = hook_parameters(grads, [spec.dim for spec in self.specs], self.specs[0].group)
            return self._hook_tensors(self.reduction.comm_hook, parameters)
        if operand is CarriedTensors.REPLICA_HOOK:
            return self._hook_tensors(self.reduction.replica_hook, replica_parameters(self._numels(), self.like), OVER_REPLICAS)
        factor = self.like.new_empty((), dtype=factor_dtype(self.like.dtype))
        return [self._input("factor", factor, DivideFactor(self.index, operand.number))]

    def _numels(self) -> list[int]:
        return [math.prod(spec.shard.meta["val"].shape) for spec in self.specs]

    def _hook_tensors(self, hook: object, parameters: list[HookParameter], prefix: str = "") -> list[Node]:
        assert isinstance(hook, StatefulHook)
        found = tensors_of_hook(hook, parameters)
        return [
            self._input(
                prefix + name,
                self.like.new_empty(tensor.shape, dtype=tensor.dtype),
                HookTensor(self.index, place, prefix + name),
                self.specs[place].name,
            )
            for place, name, tensor in found
        ]

    def _update(self, kept: list[Node], left: list[Node], value: Node) -> Node:
        """Overwrite a hook's tensors ``kept`` with their new values ``left``, after all reads of the old ones.

        Returns:
            The hook's result ``value``; a clone if it lies in the memory of such a tensor.
        """
        changed = {tensor: new for tensor, new in zip(kept, left, strict=True) if new is not tensor}
        work = value.meta.get(WORK, self._work(Role.FINISH_REDUCE))
        for tensor, new in changed.items():
            if _origin(new) in changed:
                changed[tensor] = emit(self.graph, torch.clone, new, work=work)
        if _origin(value) in changed:
            value = emit(self.graph, torch.clone, value, work=work)
        for tensor, new in changed.items():
            last = max([*_readers(tensor), new])
            with self.graph.inserting_after(last):
                self._write_over(tensor, new, last.meta.get(WORK, work))
        return value

    def _unsharded(self) -> list[Node]:
        return [
            self._input("unsharded", grad.meta["val"].new_empty(spec.shape), UnshardedGradient(self.index, position), spec.name)
            for position, (grad, spec) in enumerate(zip(self.grads, self.specs, strict=True))
        ]

    def _input(self, kind: str, value: torch.Tensor, slot: InputSlot, name: str = "") -> Node:
        return self.interface.add_input(f"{kind}_{name or self.bucket.name}".replace(".", "_"), value, slot)

    def _leave(self, flat: Node, slot: OutputSlot, kept: Sequence[Node], work: Work) -> None:
        """Store a flat shard: over the earlier one in ``kept``, or as a new output."""
        if kept:
            self._write_over(kept[0], flat, work)
            return
        if viewed(flat) is not None:
            # A hook may return a view of the gradient, or of a larger result of its own.
            flat = emit(self.graph, torch.clone, flat, work=work)
        self.interface.add_output(flat, slot)

    def _write_over(self, kept: Node, value: Node, work: Work) -> None:
        update = self.graph.call_function(_copy, (kept, value))
        update.meta = {"val": kept.meta["val"]}
        mark(update, work)


def _runs(places: Sequence[tuple[int, UpdateTarget]]) -> Iterator[tuple[int, int]]:
    """Yield each run of parameters that are neighbours in storage and are updated alike.

    Yields:
        The index of the run's first parameter, and the run's number of elements.
    """
    first, numel = 0, 0
    for index, (bucket, place) in enumerate(places):
        if index > first:
            source, start = places[first]
            is_next = bucket == source and place.offset == start.offset + numel
            if not is_next or (place.update, place.alike) != (start.update, start.alike):
                yield first, numel
                first, numel = index, 0
        numel += place.numel
    yield first, numel


def _readers(node: Node) -> Iterator[Node]:
    """Yield the nodes that read a value, directly or through views."""
    for user in node.users:
        yield user
        if _source(user) is not None:
            yield from _readers(user)


def _source(node: Node) -> Node | None:
    """Return the node that ``node`` is a view of, or None. Views include those that only a user's hook may contain."""
    returns = schema_of(node.target).returns if isinstance(node.target, OpOverload) else ()
    is_alias = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return node.all_input_nodes[0] if is_alias else viewed(node)


def _origin(node: Node) -> Node:
    source = _source(node)
    return node if source is None else _origin(source)


def _may_share_memory(node: Node, given_out: Sequence[Node]) -> bool:
    """Return whether a value may share memory with an input or a node in ``given_out``, or between its own elements."""
    others = {memory_of(other) for other in given_out}
    while node.op != "placeholder" and node.target != _expand:
        source = viewed(node)
        if source is None:
            return node in others
        node = source
    return True
