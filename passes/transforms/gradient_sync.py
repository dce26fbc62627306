"""Gradient sync: what a backward graph does with its gradients, by the plan for this microbatch.

Before: a ``reduce_grad`` for each gradient, whose result is an output.
After:  for each bucket (unit, dtypes and groups) what its :class:`~passes.ir.plan.Reduction` says:

- ``Sync.NONE``: the full gradients are outputs, or are added to those of earlier microbatches in place. No communication.
- ``Sync.SCATTER``: one ``reduce_scatter_tensor`` just after the bucket's last gradient, of the sum with earlier full
  gradients. Its flat shard is an output, or is added to the earlier partial result in place.
- ``Sync.ALL``: the same, then with replicas (HSDP) one ``all_reduce`` of the sum with the earlier partial result; the flat
  shard of averaged gradients, in their dtype, is an output, or is added to ``param.grad`` in place.

What reduces takes in the casts of its gradients that nobody else reads. Partial results are added before the all-reduce: after
it, those of the other replicas would be missing. Divide factors are inputs of the graph. The outputs that were gradients are
None: the runtime lands gradients itself.

Nodes are marked ``meta["fsdp"]`` = ``"<role>:<bucket>"`` with the roles ``accumulate``, ``start_reduce``, ``all_reduce`` and
``finish_reduce``. Nothing overlaps yet.

Leaves alone reductions of the model's own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Graph, Node

from ..collectives.divide_factors import factor_dtype
from ..collectives.functional import (
    finish_all_reduce,
    finish_reduce_scatter,
    finish_reduction,
    start_all_reduce,
    start_reduce_scatter,
)
from ..fx.emit import emit
from ..fx.graph import memory_of, viewed
from ..ir.interface import Interface, Slot
from ..ir.ops import ReduceGrad, reduce_grads
from ..ir.plan import Reduction, Sync
from .bucket import Bucket, Group, reduction_buckets, regroup, whole_buckets

_cast = torch.ops.prims.convert_element_type.default
_copy = torch.ops.aten.copy_.default
_expand = torch.ops.aten.expand.default
_wait = torch.ops._c10d_functional.wait_tensor.default


def synchronize_gradients(
    graph: Graph, plan: Sequence[Reduction], interface: Interface, groups: Sequence[Group] | None = None
) -> None:
    """Replace the ``reduce_grad`` nodes of a backward graph by what the plan says. In place.

    Args:
        graph: the graph.
        plan: what to do about each bucket of :func:`~passes.transforms.bucket.reduction_buckets`.
        interface: takes the inputs and outputs that the plan adds.
        groups: reduce these together instead of each bucket. They have all gradients, and the plan does the same with all of
            a group.
    """
    output = graph.output_node()
    outputs: list[Any] = list(output.args[0])  # type: ignore[arg-type]
    buckets = reduction_buckets(graph)
    reduced = dict.fromkeys(reduce_grads(graph.nodes))
    for node in reduced:
        if any(user is not output for user in node.users):
            raise AssertionError(f"The reduced gradient {node.format_node()} is no output, but read by {list(node.users)}.")
    output.args = (tuple(None if value in reduced else value for value in outputs),)
    assert len(plan) == len(buckets)
    interface.reduction_groups = list(groups) if groups is not None else whole_buckets(buckets)
    for index, (group, bucket) in enumerate(
        zip(interface.reduction_groups, regroup(buckets, interface.reduction_groups), strict=True)
    ):
        _Writer(graph, bucket, index, plan[group[0][0]], interface).write()
        for node in bucket.nodes:
            graph.erase_node(node)


class _Writer:
    """Writes one bucket's part into the graph."""

    def __init__(self, graph: Graph, bucket: Bucket, index: int, reduction: Reduction, interface: Interface):
        self.graph = graph
        self.bucket = bucket
        self.index = index
        self.reduction = reduction
        self.interface = interface
        self.specs = [ReduceGrad.of(node) for node in bucket.nodes]
        self.grads = [spec.grad for spec in self.specs]
        self.like: torch.Tensor = self.grads[0].meta["val"]
        self.grad_dtype = self.specs[0].grad_dtype or self.like.dtype
        self.group = reduction.group or self.specs[0].group
        self.num_factors = 0

    def write(self) -> None:
        # Not among the placeholders, where a gradient that backward is handed stands.
        behind = max([*self.grads, self.graph.find_nodes(op="placeholder")[-1]]).next
        if self.reduction.sync is not Sync.NONE:
            self._take_in_casts(behind)
        with self.graph.inserting_before(behind):
            if self.reduction.sync is Sync.NONE:
                self._keep_unsharded()
            else:
                self._reduce()

    def _take_in_casts(self, behind: Node) -> None:
        """Make casts of gradients part of the copy-in: until then, what lives is the gradient as it was computed."""
        for grad in self.grads:
            if grad.target == _cast and all(user in self.bucket.nodes for user in grad.users):
                behind.prepend(grad)
                grad.meta["fsdp"] = f"start_reduce:{self.bucket.name}"

    def _input(self, kind: str, value: torch.Tensor, position: int = 0, name: str = "") -> Node:
        label = f"{kind}_{name or self.bucket.name}".replace(".", "_")
        return self.interface.add_input(label, value, Slot(kind, self.index, position))

    def _unsharded(self) -> list[Node]:
        return [
            self._input("unsharded", grad.meta["val"].new_empty(spec.shape), position, spec.name)
            for position, (grad, spec) in enumerate(zip(self.grads, self.specs, strict=True))
        ]

    def _factor(self, used: bool) -> list[Node]:
        """The next divide factor, if there is one at this place."""
        if not used:
            return []
        self.num_factors += 1
        return [self._input("factor", self.like.new_empty((), dtype=factor_dtype(self.like.dtype)), self.num_factors - 1)]

    def _update(self, kept: Node, value: Node, role: str) -> None:
        update = self.graph.call_function(_copy, (kept, value))
        update.meta = {"val": kept.meta["val"], "fsdp": f"{role}:{self.bucket.name}"}

    def _keep_unsharded(self) -> None:
        role = f"accumulate:{self.bucket.name}"
        if self.reduction.has_unsharded:
            for kept, grad in zip(self._unsharded(), self.grads, strict=True):
                self._update(kept, emit(self.graph, torch.add, kept, grad, role=role), "accumulate")
            return
        for position, grad in enumerate(self.grads):
            if _may_share_memory(grad, [*self.graph.output_node().all_input_nodes, *self.interface.output_nodes]):
                grad = emit(self.graph, torch.clone, grad, role=role)
            self.interface.add_output(grad, Slot("unsharded", self.index, position))

    def _reduce(self) -> None:
        spec, reduction = self.specs[0], self.reduction
        finish = f"finish_reduce:{self.bucket.name}"
        all_reduces = reduction.sync is Sync.ALL and spec.replicate_group != "" and not reduction.comm_hook_in_place
        flat = self._start_reduce_scatter(f"all_reduce:{self.bucket.name}" if all_reduces else finish)
        in_flight = reduction.comm_hook is None
        factor = self._factor(reduction.averaging.divides_scattered)
        shard = self.like.new_empty(sum(math.prod(spec.shard.meta["val"].shape) for spec in self.specs))
        partial = [self._input("partial", shard)] if reduction.has_partial else []
        if all_reduces:
            flat = emit(
                self.graph,
                start_all_reduce,
                flat,
                factor,
                partial,
                group=self.group,
                in_flight=in_flight,
                replicate_group=spec.replicate_group,
                op=reduction.averaging.all_reduce_op,
                role=f"all_reduce:{self.bucket.name}",
            )
            flat = emit(self.graph, finish_all_reduce, flat, role=finish)
        else:
            flat = emit(
                self.graph, finish_reduce_scatter, flat, factor, partial, group=self.group, in_flight=in_flight, role=finish
            )
        if reduction.sync is Sync.SCATTER:
            self._give("partial", flat, partial[0] if partial else None)
            return
        flat = emit(
            self.graph,
            finish_reduction,
            flat,
            self._factor(reduction.averaging.divides_result),
            grad_dtype=self.grad_dtype,
            hook=reduction.all_reduce_hook,
            role=finish,
        )
        grad = None
        if reduction.has_grad:
            grad = self._input("grad", flat.meta["val"])
            flat = emit(self.graph, torch.add, grad, flat, role=finish)
        self._give("grad", flat, grad)

    def _start_reduce_scatter(self, following_role: str) -> Node:
        """The flat shard in flight. What a hook does after its last collective belongs to ``following_role``."""
        reduction = self.reduction
        role = f"start_reduce:{self.bucket.name}"
        flat: Node = emit(
            self.graph,
            start_reduce_scatter,
            self.grads,
            self._unsharded() if reduction.has_unsharded else [],
            self._factor(reduction.averaging.divides_gradient),
            dims=[spec.dim for spec in self.specs],
            group=self.group,
            op=reduction.averaging.reduce_scatter_op,
            hook=reduction.comm_hook,
            in_place=reduction.comm_hook_in_place,
            role=role,
        )
        if reduction.comm_hook is not None:
            written = [node for node in self.graph.nodes if node.meta.get("fsdp") == role]
            waits = [node for node in written if node.target == _wait]
            for node in written[written.index(waits[-1]) :] if waits else []:
                node.meta["fsdp"] = following_role
        return flat

    def _give(self, kind: str, flat: Node, kept: Node | None) -> None:
        """Leave a flat shard for later: written over the earlier one, or as a new output."""
        if kept is not None:
            self._update(kept, flat, "finish_reduce")
        else:
            if viewed(flat) is not None:
                # A hook may give a view: of the gradient, or of all that it has reduced.
                flat = emit(self.graph, torch.clone, flat, role=f"finish_reduce:{self.bucket.name}")
            self.interface.add_output(flat, Slot(kind, self.index))


def _may_share_memory(node: Node, given_out: Sequence[Node]) -> bool:
    """Whether a value may live in memory that somebody else has, or several of its elements in the same place."""
    others = {memory_of(other) for other in given_out}
    while node.op != "placeholder" and node.target != _expand:
        source = viewed(node)
        if source is None:
            return node in others
        node = source
    return True
