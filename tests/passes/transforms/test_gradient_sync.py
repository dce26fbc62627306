from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from passes.collectives.divide_factors import Averaging
from passes.collectives.layout import REPLICATED
from passes.collectives.stateful_hook import HookBucket, HookParameter, StatefulHook
from passes.ir.interface import (
    DivideFactor,
    HookTensor,
    Interface,
    OptimizerState,
    PartialGradient,
    ReducedGradient,
    UnshardedGradient,
    UpdatedRun,
    UpdateNumbers,
)
from passes.ir.ops import reduce_grad
from passes.ir.plan import PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.ir.update import Update, UpdateTarget
from passes.ir.work import Role, role
from passes.transforms.bucket import find_buckets
from passes.transforms.gradient_sync import synchronize_gradients
from passes.transforms.mixed_precision import mixed_precision
from tests.passes.tracing import PassTestCase

SUM = Averaging(divides_result=True)
_REDUCE = ("reduce_scatter_tensor", "wait_tensor")
# Lines of the traced graph and of the copies into the bucket, without dtypes and shapes.
_OF_ALL = """
    sum_1 = aten.sum.dim_IntList(grad, [0])
    t = aten.t.default(grad)
    mm = aten.mm.default(t, x)
    view = aten.view.default(sum_1, [8, -1])
    view_1 = aten.view.default(mm, [8, -1])
    cat = aten.cat.default([view, view_1], 1)
    view_2 = aten.view.default(cat, [-1])
    relu = aten.relu.default(grad)
""".splitlines()


def _synchronize(
    graph: torch.fx.Graph,
    *plan: Reduction,
    updates: Sequence[UpdateTarget] = (),
    order: Sequence[int] = (),
) -> Interface:
    """Synchronize the gradients of a graph. ``updates`` and ``order`` are for each of its buckets."""
    interface = Interface(graph)
    made = [PlannedReduction(reduction, order=tuple(order), updates=tuple(updates)) for reduction in plan]
    synchronize_gradients(graph, made, interface)
    interface.finish()
    return interface


class SyncTestCase(PassTestCase):
    def synchronized(
        self,
        reduction: Reduction,
        *,
        updates: Sequence[UpdateTarget] = (),
        order: Sequence[int] = (),
        dtype: torch.dtype = torch.float32,
        replicas: bool = False,
        **policy: torch.dtype,
    ) -> tuple[str, Interface]:
        """Synchronize the gradients of a weight and a bias of one unit. Return the graph's text and its interface."""
        options: dict[str, Any] = {"replicate_group": self.replicate} if replicas else {}

        def backward(grad, x, weight, bias):
            grad_bias = reduce_grad(grad.sum(0), bias, "up.bias", [16], self.shard, unit="up", **options, **policy)
            grad_weight = reduce_grad(grad.t() @ x, weight, "up.weight", [16, 4], self.shard, unit="up", **options, **policy)
            return grad_weight, grad_bias, grad.relu()

        inputs = [torch.zeros(shape, dtype=dtype) for shape in ((3, 16), (3, 4), (2, 4), (2,))]
        gm = self.trace(backward, *inputs, names="grad x weight bias")
        mixed_precision(gm.graph)
        interface = _synchronize(gm.graph, reduction, updates=updates, order=order)
        return self.text(gm.graph), interface

    def assert_made(self, text: str, expected: str) -> None:
        """Compare the lines that the plan adds to the graph, without plain copies of gradients into their bucket."""
        lines = [line for line in text.splitlines()[1:] if re.sub(r': "[^"]*"', "", line) not in _OF_ALL]
        self.assertExpectedInline("".join(f"{line}\n" for line in lines), expected, skip=1)


class TestReduce(SyncTestCase):
    def test_sum_and_divide(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=SUM))
        assert interface.inputs == [DivideFactor(0, 0)]
        assert interface.outputs == [ReducedGradient(0)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, grad: "f32[3, 16]", x: "f32[3, 4]", weight: "f32[2, 4]", bias: "f32[2]", factor_up: "f32[]"):
    sum_1: "f32[16]" = aten.sum.dim_IntList(grad, [0])
    t: "f32[16, 3]" = aten.t.default(grad)
    mm: "f32[16, 4]" = aten.mm.default(t, x)
    view: "f32[8, 2]" = aten.view.default(sum_1, [8, -1])
    view_1: "f32[8, 8]" = aten.view.default(mm, [8, -1])
    cat: "f32[8, 10]" = aten.cat.default([view, view_1], 1)
    view_2: "f32[80]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    relu: "f32[3, 16]" = aten.relu.default(grad)
    return (None, None, relu, div)
""",
        )

    def test_order_of_the_plan(self) -> None:
        """Reduced buckets have the order that is given. Gradients that stay unsharded keep the order of the graph."""
        for sync in Sync:
            text, interface = self.synchronized(Reduction(sync), order=(1, 0))
            if sync is Sync.NONE:
                assert interface.reduction_groups == [((0, 0), (0, 1))]
                continue
            assert interface.reduction_groups == [((0, 1), (0, 0))]
            assert (
                'view: "f32[8, 8]" = aten.view.default(mm, [8, -1])' in text and "aten.cat.default([view, view_1], 1)" in text
            )

    def test_backend_averages(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=Averaging("avg", "avg")))
        assert interface.inputs == []
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'avg', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return (None, None, relu, wait_tensor)
""",
        )

    def test_half_precision_divides_on_either_side(self) -> None:
        averaging = Averaging(divides_gradient=True, divides_result=True)
        text, interface = self.synchronized(Reduction(averaging=averaging), dtype=torch.float16)
        assert interface.inputs == [DivideFactor(0, 0), DivideFactor(0, 1)]
        self.assert_made(
            text,
            """\
    convert_element_type: "f32[80]" = prims.convert_element_type.default(view_2, torch.float32)
    div: "f32[80]" = aten.div.Tensor(convert_element_type, factor_up)
    convert_element_type_1: "f16[80]" = prims.convert_element_type.default(div, torch.float16)
    reduce_scatter_tensor: "f16[10]" = _c10d_functional.reduce_scatter_tensor.default(convert_element_type_1, 'sum', 8, 'shard')
    wait_tensor: "f16[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    convert_element_type_2: "f32[10]" = prims.convert_element_type.default(wait_tensor, torch.float32)
    div_1: "f32[10]" = aten.div.Tensor(convert_element_type_2, factor_up_1)
    convert_element_type_3: "f16[10]" = prims.convert_element_type.default(div_1, torch.float16)
    return (None, None, relu, convert_element_type_3)
""",
        )

    def test_casts_are_one_for_a_bucket(self) -> None:
        text, _ = self.synchronized(
            Reduction(averaging=SUM), dtype=torch.bfloat16, reduce_dtype=torch.float32, grad_dtype=torch.bfloat16
        )
        self.assert_made(
            text,
            """\
    convert_element_type_default: "f32[16]" = prims.convert_element_type.default(sum_1, torch.float32)
    convert_element_type_default_1: "f32[16, 4]" = prims.convert_element_type.default(mm, torch.float32)
    view: "f32[8, 2]" = aten.view.default(convert_element_type_default, [8, -1])
    view_1: "f32[8, 8]" = aten.view.default(convert_element_type_default_1, [8, -1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    convert_element_type: "bf16[10]" = prims.convert_element_type.default(div, torch.bfloat16)
    return (None, None, relu, convert_element_type)
""",
        )

    def test_a_cast_that_others_read_stays_where_it_is(self) -> None:
        def backward(grad, x, shard):
            wide = torch.ops.prims.convert_element_type(grad.t() @ x, torch.float32)
            reduced = reduce_grad(wide, shard, "weight", [16, 4], self.shard)
            return reduced, wide.sum()

        inputs = [torch.zeros(3, 16, dtype=torch.bfloat16), torch.zeros(3, 4, dtype=torch.bfloat16), torch.zeros(2, 4)]
        gm = self.trace(backward, *inputs)
        _synchronize(gm.graph, Reduction())
        (cast,) = gm.graph.find_nodes(op="call_function", target=torch.ops.prims.convert_element_type.default)
        assert role(cast) is None

    def test_replicas_are_reduced_after_shards(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=SUM), replicas=True)
        assert interface.outputs == [ReducedGradient(0)]
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    all_reduce: "f32[10]" = _c10d_functional.all_reduce.default(wait_tensor, 'sum', 'replicate')
    wait_tensor_1: "f32[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    div: "f32[10]" = aten.div.Tensor(wait_tensor_1, factor_up)
    return (None, None, relu, div)
""",
        )

    def test_users_factor_where_the_backend_averages(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=Averaging(divides_scattered=True)), replicas=True)
        assert interface.inputs == [DivideFactor(0, 0)]
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    all_reduce: "f32[10]" = _c10d_functional.all_reduce.default(div, 'sum', 'replicate')
    wait_tensor_1: "f32[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    return (None, None, relu, wait_tensor_1)
""",
        )

    def test_adds_to_an_existing_gradient(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=SUM, has_grad=True))
        assert interface.inputs == [DivideFactor(0, 0), ReducedGradient(0)]
        assert interface.outputs == []
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    add: "f32[10]" = aten.add.Tensor(grad_up, div)
    copy__default: "f32[10]" = aten.copy_.default(grad_up, add)
    return (None, None, relu)
""",
        )


class TestKeepUnsharded(SyncTestCase):
    def test_first_microbatch(self) -> None:
        text, interface = self.synchronized(Reduction(Sync.NONE))
        assert interface.inputs == []
        # In the order in which backward computes them.
        assert interface.outputs == [UnshardedGradient(0, 0), UnshardedGradient(0, 1)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, grad: "f32[3, 16]", x: "f32[3, 4]", weight: "f32[2, 4]", bias: "f32[2]"):
    sum_1: "f32[16]" = aten.sum.dim_IntList(grad, [0])
    t: "f32[16, 3]" = aten.t.default(grad)
    mm: "f32[16, 4]" = aten.mm.default(t, x)
    relu: "f32[3, 16]" = aten.relu.default(grad)
    return (None, None, relu, sum_1, mm)
""",
        )

    def test_later_microbatches(self) -> None:
        text, interface = self.synchronized(Reduction(Sync.NONE, has_unsharded=True))
        assert interface.inputs == [UnshardedGradient(0, 0), UnshardedGradient(0, 1)]
        assert interface.outputs == []
        self.assert_made(
            text,
            """\
    add: "f32[16]" = aten.add.Tensor(unsharded_up_bias, sum_1)
    copy__default: "f32[16]" = aten.copy_.default(unsharded_up_bias, add)
    add_1: "f32[16, 4]" = aten.add.Tensor(unsharded_up_weight, mm)
    copy__default_1: "f32[16, 4]" = aten.copy_.default(unsharded_up_weight, add_1)
    return (None, None, relu)
""",
        )

    def test_low_precision_gradients_are_added_to_float32(self) -> None:
        text, _ = self.synchronized(
            Reduction(Sync.NONE, has_unsharded=True),
            dtype=torch.bfloat16,
            reduce_dtype=torch.float32,
            grad_dtype=torch.bfloat16,
        )
        self.assert_made(
            text,
            """\
    convert_element_type_default: "f32[16]" = prims.convert_element_type.default(sum_1, torch.float32)
    convert_element_type_default_1: "f32[16, 4]" = prims.convert_element_type.default(mm, torch.float32)
    add: "f32[16]" = aten.add.Tensor(unsharded_up_bias, convert_element_type_default)
    copy__default: "f32[16]" = aten.copy_.default(unsharded_up_bias, add)
    add_1: "f32[16, 4]" = aten.add.Tensor(unsharded_up_weight, convert_element_type_default_1)
    copy__default_1: "f32[16, 4]" = aten.copy_.default(unsharded_up_weight, add_1)
    return (None, None, relu)
""",
        )

    def test_one_reduction_for_all_microbatches(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=SUM, has_unsharded=True))
        assert interface.inputs == [UnshardedGradient(0, 0), UnshardedGradient(0, 1), DivideFactor(0, 0)]
        assert interface.outputs == [ReducedGradient(0)]
        self.assert_made(
            text,
            """\
    add: "f32[16]" = aten.add.Tensor(unsharded_up_bias, sum_1)
    add_1: "f32[16, 4]" = aten.add.Tensor(unsharded_up_weight, mm)
    view: "f32[8, 2]" = aten.view.default(add, [8, -1])
    view_1: "f32[8, 8]" = aten.view.default(add_1, [8, -1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    return (None, None, relu, div)
""",
        )


class TestScatter(SyncTestCase):
    def test_first_microbatch(self) -> None:
        text, interface = self.synchronized(Reduction(Sync.SCATTER, SUM), replicas=True)
        # The division waits for the all-reduce.
        assert interface.inputs == []
        assert interface.outputs == [PartialGradient(0)]
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return (None, None, relu, wait_tensor)
""",
        )

    def test_later_microbatches(self) -> None:
        text, interface = self.synchronized(Reduction(Sync.SCATTER, SUM, has_partial=True), replicas=True)
        assert interface.inputs == [PartialGradient(0)]
        assert interface.outputs == []
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    add: "f32[10]" = aten.add.Tensor(partial_up, wait_tensor)
    copy__default: "f32[10]" = aten.copy_.default(partial_up, add)
    return (None, None, relu)
""",
        )

    def test_users_factor_divides_every_microbatch_alike(self) -> None:
        text, interface = self.synchronized(
            Reduction(Sync.SCATTER, Averaging(divides_scattered=True), has_partial=True), replicas=True
        )
        assert interface.inputs == [DivideFactor(0, 0), PartialGradient(0)]
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, factor_up)
    add: "f32[10]" = aten.add.Tensor(partial_up, div)
    copy__default: "f32[10]" = aten.copy_.default(partial_up, add)
    return (None, None, relu)
""",
        )

    def test_partial_results_are_added_before_the_all_reduce(self) -> None:
        text, interface = self.synchronized(Reduction(averaging=SUM, has_partial=True), replicas=True)
        assert interface.inputs == [PartialGradient(0), DivideFactor(0, 0)]
        assert interface.outputs == [ReducedGradient(0)]
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    add: "f32[10]" = aten.add.Tensor(partial_up, wait_tensor)
    all_reduce: "f32[10]" = _c10d_functional.all_reduce.default(add, 'sum', 'replicate')
    wait_tensor_1: "f32[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    div: "f32[10]" = aten.div.Tensor(wait_tensor_1, factor_up)
    return (None, None, relu, div)
""",
        )

    def test_everything_at_once(self) -> None:
        reduction = Reduction(
            averaging=Averaging(divides_gradient=True, divides_result=True),
            has_unsharded=True,
            has_partial=True,
            has_grad=True,
        )
        text, interface = self.synchronized(
            reduction, replicas=True, dtype=torch.bfloat16, reduce_dtype=torch.float16, grad_dtype=torch.bfloat16
        )
        assert interface.inputs == [
            UnshardedGradient(0, 0),
            UnshardedGradient(0, 1),
            DivideFactor(0, 0),
            PartialGradient(0),
            DivideFactor(0, 1),
            ReducedGradient(0),
        ]
        assert [node.target for node in interface.graph.find_nodes(op="placeholder")][4:] == [
            "unsharded_up_bias",
            "unsharded_up_weight",
            "factor_up",
            "partial_up",
            "factor_up_1",
            "grad_up",
        ]
        assert interface.outputs == []
        self.assert_made(
            text,
            """\
    convert_element_type_default: "f16[16]" = prims.convert_element_type.default(sum_1, torch.float16)
    convert_element_type_default_1: "f16[16, 4]" = prims.convert_element_type.default(mm, torch.float16)
    add: "f16[16]" = aten.add.Tensor(unsharded_up_bias, convert_element_type_default)
    add_1: "f16[16, 4]" = aten.add.Tensor(unsharded_up_weight, convert_element_type_default_1)
    view: "f16[8, 2]" = aten.view.default(add, [8, -1])
    view_1: "f16[8, 8]" = aten.view.default(add_1, [8, -1])
    convert_element_type: "f32[80]" = prims.convert_element_type.default(view_2, torch.float32)
    div: "f32[80]" = aten.div.Tensor(convert_element_type, factor_up)
    convert_element_type_1: "f16[80]" = prims.convert_element_type.default(div, torch.float16)
    reduce_scatter_tensor: "f16[10]" = _c10d_functional.reduce_scatter_tensor.default(convert_element_type_1, 'sum', 8, 'shard')
    wait_tensor: "f16[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    add_2: "f16[10]" = aten.add.Tensor(partial_up, wait_tensor)
    all_reduce: "f16[10]" = _c10d_functional.all_reduce.default(add_2, 'sum', 'replicate')
    wait_tensor_1: "f16[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    convert_element_type_2: "f32[10]" = prims.convert_element_type.default(wait_tensor_1, torch.float32)
    div_1: "f32[10]" = aten.div.Tensor(convert_element_type_2, factor_up_1)
    convert_element_type_3: "f16[10]" = prims.convert_element_type.default(div_1, torch.float16)
    convert_element_type_4: "bf16[10]" = prims.convert_element_type.default(convert_element_type_3, torch.bfloat16)
    add_3: "bf16[10]" = aten.add.Tensor(grad_up, convert_element_type_4)
    copy__default: "bf16[10]" = aten.copy_.default(grad_up, add_3)
    return (None, None, relu)
""",
        )


class TestHooks(SyncTestCase):
    def compress(self, grad: Tensor, output: Tensor) -> None:
        """Reduce in bfloat16, and average."""
        small = grad.to(torch.bfloat16).div_(8)
        reduced = torch.empty_like(output, dtype=torch.bfloat16)
        dist.reduce_scatter_tensor(reduced, small)
        output.copy_(reduced)

    def test_comm_hook_reduces_in_the_place_of_the_reduce_scatter(self) -> None:
        text, interface = self.synchronized(Reduction(comm_hook=self.compress))
        assert interface.inputs == []
        assert interface.outputs == [ReducedGradient(0)]
        self.assert_made(
            text,
            """\
    convert_element_type: "bf16[80]" = prims.convert_element_type.default(view_2, torch.bfloat16)
    div: "bf16[80]" = aten.div.Tensor(convert_element_type, 8)
    reduce_scatter_tensor: "bf16[10]" = _c10d_functional.reduce_scatter_tensor.default(div, 'sum', 8, 'shard')
    wait_tensor: "bf16[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    convert_element_type_1: "f32[10]" = prims.convert_element_type.default(wait_tensor, torch.float32)
    return (None, None, relu, convert_element_type_1)
""",
        )

    def test_comm_hook_leaves_the_replicas_to_the_all_reduce(self) -> None:
        reduction = Reduction(averaging=SUM, comm_hook=self.compress, has_partial=True)
        text, _ = self.synchronized(reduction, replicas=True)
        self.assert_made(
            text,
            """\
    convert_element_type: "bf16[80]" = prims.convert_element_type.default(view_2, torch.bfloat16)
    div: "bf16[80]" = aten.div.Tensor(convert_element_type, 8)
    reduce_scatter_tensor: "bf16[10]" = _c10d_functional.reduce_scatter_tensor.default(div, 'sum', 8, 'shard')
    wait_tensor: "bf16[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    convert_element_type_1: "f32[10]" = prims.convert_element_type.default(wait_tensor, torch.float32)
    add: "f32[10]" = aten.add.Tensor(partial_up, convert_element_type_1)
    all_reduce: "f32[10]" = _c10d_functional.all_reduce.default(add, 'sum', 'replicate')
    wait_tensor_1: "f32[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    div_1: "f32[10]" = aten.div.Tensor(wait_tensor_1, factor_up)
    return (None, None, relu, div_1)
""",
        )

    def test_in_place_hook_of_a_group_of_one_is_the_all_reduce_too(self) -> None:
        alone = dist.new_group([0]).group_name

        def everything(grad: Tensor) -> None:
            dist.all_reduce(grad)

        def backward(grad, shard):
            return (reduce_grad(grad.relu(), shard, "weight", [16, 4], alone, replicate_group=self.replicate),)

        gm = self.trace(backward, torch.zeros(16, 4), torch.zeros(16, 4), names="grad shard")
        _synchronize(gm.graph, Reduction(comm_hook=everything, comm_hook_in_place=True))
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[16, 4]", shard: "f32[16, 4]"):
    relu: "f32[16, 4]" = aten.relu.default(grad)
    view: "f32[1, 64]" = aten.view.default(relu, [1, -1])
    view_1: "f32[64]" = aten.view.default(view, [-1])
    all_reduce: "f32[64]" = _c10d_functional.all_reduce.default(view_1, 'sum', 'shard')
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_reduce)
    return (None, wait_tensor)
""",
        )

    def test_a_view_that_a_hook_gives_is_copied(self) -> None:
        # Otherwise the shard would keep the whole gradient alive.
        def all_reduce(grad: Tensor, output: Tensor) -> None:
            dist.all_reduce(grad)
            output.copy_(grad[: output.numel()])

        text, _ = self.synchronized(Reduction(comm_hook=all_reduce))
        self.assert_made(
            text,
            """\
    all_reduce: "f32[80]" = _c10d_functional.all_reduce.default(view_2, 'sum', 'shard')
    wait_tensor: "f32[80]" = _c10d_functional.wait_tensor.default(all_reduce)
    slice_1: "f32[10]" = aten.slice.Tensor(wait_tensor, 0, 0, 10)
    clone: "f32[10]" = aten.clone.default(slice_1)
    return (None, None, relu, clone)
""",
        )

    def test_a_hook_without_a_collective(self) -> None:
        def local(grad: Tensor, output: Tensor) -> None:
            output.copy_(grad.chunk(8)[0])

        text, interface = self.synchronized(Reduction(comm_hook=local))
        assert "_c10d_functional" not in text
        # The memory must not be shared, as later microbatches add to the gradient in place.
        assert [str(node.target) for node in interface.output_nodes] == ["aten.clone.default"]

    def test_work_behind_a_hooks_collective_belongs_to_the_finish(self) -> None:
        def backward(grad, weight):
            return (reduce_grad(grad, weight, "weight", [16], self.shard),)

        gm = self.trace(backward, torch.zeros(16), torch.zeros(2), names="grad weight")
        _synchronize(gm.graph, Reduction(comm_hook=self.compress))
        roles = [(node.name, role(node)) for node in gm.graph.nodes if node.op == "call_function"]
        started = [name for name, node_role in roles if node_role is Role.START_REDUCE]
        finished = [name for name, node_role in roles if node_role is Role.FINISH_REDUCE]
        assert started[-1] == "reduce_scatter_tensor"
        assert finished[0] == "wait_tensor"
        assert len(started) + len(finished) == len(roles)

    def stateful(self, reduce: Callable[..., None], *names: str) -> tuple[str, Interface]:
        def init(parameter: HookParameter) -> dict[str, Tensor]:
            return {name: torch.zeros(parameter.ranks, parameter.numel) for name in names}

        def backward(grad, weight):
            return (reduce_grad(grad, weight, "weight", [16], self.shard),)

        gm = self.trace(backward, torch.zeros(16), torch.zeros(2), names="grad weight")
        interface = _synchronize(gm.graph, Reduction(comm_hook=StatefulHook(reduce, init)))
        return self.text(gm.graph), interface

    def test_tensors_of_a_hook_are_inputs_that_are_written_over_ahead_of_the_collective(self) -> None:
        def reduce(grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
            wanted = grad + bucket.flat("residual")
            sent = wanted.bfloat16()
            bucket.write("residual", wanted - sent.float())
            reduced = torch.empty_like(output, dtype=torch.bfloat16)
            dist.reduce_scatter_tensor(reduced, sent)
            output.copy_(reduced)

        text, interface = self.stateful(reduce, "residual")
        assert interface.inputs == [HookTensor(0, 0, "residual")]
        assert interface.outputs == [ReducedGradient(0)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, grad: "f32[16]", weight: "f32[2]", residual_weight: "f32[8, 2]"):
    view: "f32[8, 2]" = aten.view.default(grad, [8, -1])
    view_1: "f32[16]" = aten.view.default(view, [-1])
    view_2: "f32[16]" = aten.view.default(residual_weight, [-1])
    add: "f32[16]" = aten.add.Tensor(view_1, view_2)
    convert_element_type: "bf16[16]" = prims.convert_element_type.default(add, torch.bfloat16)
    convert_element_type_1: "f32[16]" = prims.convert_element_type.default(convert_element_type, torch.float32)
    sub: "f32[16]" = aten.sub.Tensor(add, convert_element_type_1)
    view_3: "f32[8, 2]" = aten.view.default(sub, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_3, [2], 1)
    getitem: "f32[8, 2]" = split_with_sizes[0]
    copy__default: "f32[8, 2]" = aten.copy_.default(residual_weight, getitem)
    reduce_scatter_tensor: "bf16[2]" = _c10d_functional.reduce_scatter_tensor.default(convert_element_type, 'sum', 8, 'shard')
    wait_tensor: "bf16[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    convert_element_type_2: "f32[2]" = prims.convert_element_type.default(wait_tensor, torch.float32)
    return (None, convert_element_type_2)
""",
        )

    def test_what_needs_no_result_stands_ahead_of_the_collective(self) -> None:
        def reduce(grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
            dist.reduce_scatter_tensor(output, grad)
            bucket.write("old", grad * 2)

        text, _ = self.stateful(reduce, "old")
        targets = [line.split(" = ")[1].split("(")[0] for line in text.splitlines()[1:-1]]
        assert targets[-3:] == ["aten.copy_.default", *(f"_c10d_functional.{name}.default" for name in _REDUCE)]

    def test_what_a_hook_leaves_or_gives_is_no_tensor_that_is_written_over(self) -> None:
        def swap(grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
            own = bucket.tensors[0]
            old = own["a"].clone()
            output.copy_(own["a"][0])
            own["a"].copy_(own["b"])
            own["b"].copy_(old)

        text, _ = self.stateful(swap, "a", "b")
        self.assertExpectedInline(
            text,
            """\
def forward(self, grad: "f32[16]", weight: "f32[2]", a_weight: "f32[8, 2]", b_weight: "f32[8, 2]"):
    clone: "f32[8, 2]" = aten.clone.default(a_weight)
    select: "f32[2]" = aten.select.int(a_weight, 0, 0)
    clone_1: "f32[8, 2]" = aten.clone.default(b_weight)
    copy__default_1: "f32[8, 2]" = aten.copy_.default(b_weight, clone)
    clone_2: "f32[2]" = aten.clone.default(select)
    copy__default: "f32[8, 2]" = aten.copy_.default(a_weight, clone_1)
    return (None, clone_2)
""",
        )

    def test_all_reduce_hook_comes_ahead_of_the_division(self) -> None:
        def clip(shard: Tensor) -> None:
            shard.clamp_(-1, 1)

        text, _ = self.synchronized(Reduction(averaging=SUM, all_reduce_hook=clip), replicas=True)
        self.assert_made(
            text,
            """\
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    all_reduce: "f32[10]" = _c10d_functional.all_reduce.default(wait_tensor, 'sum', 'replicate')
    wait_tensor_1: "f32[10]" = _c10d_functional.wait_tensor.default(all_reduce)
    clamp_min: "f32[10]" = aten.clamp_min.default(wait_tensor_1, -1)
    clamp_max: "f32[10]" = aten.clamp_max.default(clamp_min, 1)
    div: "f32[10]" = aten.div.Tensor(clamp_max, factor_up)
    return (None, None, relu, div)
""",
        )


class TestLayouts(PassTestCase):
    def test_uneven_rows_columns_and_scalars(self) -> None:
        def backward(rows, columns, scalar, shard_rows, shard_columns, shard_scalar):
            return (
                reduce_grad(rows.relu(), shard_rows, "rows", [13, 4], self.shard),
                reduce_grad(columns.relu(), shard_columns, "columns", [3, 16], self.shard, dim=1),
                reduce_grad(scalar.relu(), shard_scalar, "scalar", [], self.shard, dim=REPLICATED),
            )

        shapes = ((13, 4), (3, 16), (), (2, 4), (3, 2), ())
        gm = self.trace(backward, *map(torch.zeros, shapes), names="rows columns scalar shard_rows shard_columns shard_scalar")
        _synchronize(gm.graph, Reduction())
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, rows: "f32[13, 4]", columns: "f32[3, 16]", scalar: "f32[]", shard_rows: "f32[2, 4]", shard_columns: "f32[3, 2]", shard_scalar: "f32[]"):
    relu: "f32[13, 4]" = aten.relu.default(rows)
    relu_1: "f32[3, 16]" = aten.relu.default(columns)
    relu_2: "f32[]" = aten.relu.default(scalar)
    constant_pad_nd: "f32[16, 4]" = aten.constant_pad_nd.default(relu, [0, 0, 0, 3])
    view: "f32[8, 8]" = aten.view.default(constant_pad_nd, [8, -1])
    view_1: "f32[3, 8, 2]" = aten.view.default(relu_1, [3, 8, 2])
    permute: "f32[8, 3, 2]" = aten.permute.default(view_1, [1, 0, 2])
    clone: "f32[8, 3, 2]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[8, 6]" = aten._unsafe_view.default(clone, [8, 6])
    view_2: "f32[1, 1]" = aten.view.default(relu_2, [1, -1])
    expand: "f32[8, 1]" = aten.expand.default(view_2, [8, -1])
    clone_1: "f32[8, 1]" = aten.clone.default(expand, memory_format = torch.contiguous_format)
    cat: "f32[8, 15]" = aten.cat.default([view, _unsafe_view, clone_1], 1)
    view_3: "f32[120]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor: "f32[15]" = _c10d_functional.reduce_scatter_tensor.default(view_3, 'sum', 8, 'shard')
    wait_tensor: "f32[15]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return (None, None, None, wait_tensor)
""",
        )

    def test_units_dtypes_and_groups_stay_apart(self) -> None:
        def backward(grad, a, b, c, d):
            return (
                reduce_grad(grad.relu(), a, "up.a", [16], self.shard, unit="up"),
                reduce_grad(grad.exp().bfloat16(), b, "up.b", [16], self.shard, unit="up"),
                reduce_grad(grad.sin(), c, "up.c", [16], self.shard, unit="up", replicate_group=self.replicate),
                reduce_grad(grad.cos(), d, "down.d", [16], self.shard, unit="down"),
            )

        gm = self.trace(backward, torch.zeros(16), *[torch.zeros(2)] * 4, names="grad a b c d")
        assert [str(bucket.name) for bucket in find_buckets(gm.graph).reductions] == ["up", "up.1", "up.2", "down"]
        interface = _synchronize(
            gm.graph, Reduction(Sync.NONE), Reduction(averaging=SUM), Reduction(Sync.SCATTER), Reduction(has_grad=True)
        )
        # Every bucket follows a plan of its own.
        assert interface.inputs == [DivideFactor(1, 0), ReducedGradient(3)]
        assert interface.outputs == [UnshardedGradient(0, 0), ReducedGradient(1), PartialGradient(2)]

    def test_leaves_the_models_own_collectives_alone(self) -> None:
        def forward(x):
            reduced = torch.ops._c10d_functional.reduce_scatter_tensor(x, "sum", 8, self.shard)
            return (torch.ops._c10d_functional.wait_tensor(reduced),)

        gm = self.trace(forward, torch.zeros(16), names="x")
        before = self.text(gm.graph)
        _synchronize(gm.graph)
        assert self.text(gm.graph) == before

    def test_gradients_that_backward_is_handed(self) -> None:
        def backward(first, second, a, b):
            return (
                reduce_grad(first, a, "up.a", [16], self.shard, unit="up"),
                reduce_grad(second, b, "down.b", [16], self.shard, unit="down"),
            )

        gm = self.trace(backward, torch.zeros(16), torch.zeros(16), torch.zeros(2), torch.zeros(2), names="first second a b")
        _synchronize(gm.graph, Reduction(averaging=SUM), Reduction(averaging=SUM, has_unsharded=True))
        assert list(gm.graph.nodes)[:7] == gm.graph.find_nodes(op="placeholder")
        gm.graph.lint()

    def test_refuses_a_reduced_gradient_that_the_graph_reads(self) -> None:
        def backward(grad, shard):
            return (reduce_grad(grad, shard, "up.weight", [16], self.shard).relu(),)

        gm = self.trace(backward, torch.zeros(16), torch.zeros(2), names="grad shard")
        with pytest.raises(AssertionError, match=r"up\.weight.* is no output, but read by \[relu\]"):
            _synchronize(gm.graph, Reduction())


class TestSharedMemory(PassTestCase):
    """Later microbatches add to full gradients in place, so their memory must not be shared."""

    def outputs(self, function: Any, *shapes: tuple[int, ...]) -> list[str]:
        """Return the operators that compute the full gradients among a graph's outputs."""
        gm = self.trace(function, *map(torch.zeros, shapes))
        interface = _synchronize(gm.graph, *[Reduction(Sync.NONE)] * len(find_buckets(gm.graph).reductions))
        gm.graph.lint()
        return [str(node.target) for node in interface.output_nodes]

    def reduce(self, grad: Tensor, shard: Tensor, unit: str = "up") -> Tensor:
        return reduce_grad(grad, shard, f"{unit}.weight", list(grad.shape), self.shard, unit=unit)

    def test_a_gradient_of_its_own_goes_out_as_it_is(self) -> None:
        # A bias's gradient is a view, too, but of a sum that has no other reader.
        outputs = self.outputs(lambda grad, shard: [self.reduce(grad.sum(0, keepdim=True).view(16), shard)], (3, 16), (2,))
        assert outputs == ["aten.view.default"]

    def test_one_gradient_of_two_parameters(self) -> None:
        def backward(x, a, b):
            grad = x.relu()
            return [self.reduce(grad, a), self.reduce(grad, b)]

        assert self.outputs(backward, (16,), (2,), (2,)) == ["aten.relu.default", "aten.clone.default"]

    def test_one_gradient_of_two_units(self) -> None:
        def backward(x, a, b):
            grad = x.relu()
            return [self.reduce(grad, a, "up"), self.reduce(grad.view(4, 4), b, "down")]

        assert self.outputs(backward, (16,), (2,), (1, 4)) == ["aten.relu.default", "aten.clone.default"]

    def test_pieces_of_one_tensor(self) -> None:
        # The pieces do not overlap, but the pass does not know their places.
        def backward(x, a, b):
            first, second = x.relu().chunk(2)
            return [self.reduce(first, a), self.reduce(second, b)]

        assert self.outputs(backward, (32,), (2,), (2,)) == ["<built-in function getitem>", "aten.clone.default"]

    def test_a_view_of_an_input(self) -> None:
        outputs = self.outputs(lambda grad, shard: [self.reduce(grad.view(16), shard)], (4, 4), (2,))
        assert outputs == ["aten.clone.default"]

    def test_an_expanded_one(self) -> None:
        outputs = self.outputs(lambda grad, shard: [self.reduce(grad.sum().expand(16), shard)], (4, 4), (2,))
        assert outputs == ["aten.clone.default"]

    def test_a_view_of_another_output(self) -> None:
        def backward(x, shard):
            grad_x = x.relu()
            return [grad_x, self.reduce(grad_x.view(16), shard)]

        assert self.outputs(backward, (4, 4), (2,)) == ["aten.clone.default"]

    def test_a_view_of_what_another_output_is_a_view_of(self) -> None:
        def backward(x, shard):
            grad_x = x.relu()
            return [grad_x.view(4, 4), self.reduce(grad_x.view(2, 8), shard)]

        assert self.outputs(backward, (16,), (1, 8)) == ["aten.clone.default"]


class TestUpdates(SyncTestCase):
    AVERAGED = Reduction(averaging=Averaging("avg", "avg"), updates=True)
    MOMENTUM = Update("sgd", has_momentum=True)

    def test_neighbours_in_storage_are_updated_together(self) -> None:
        """In storage the bias comes after the weight, although its gradient is computed first."""
        updates = [UpdateTarget(8, 2, self.MOMENTUM, 0), UpdateTarget(0, 8, self.MOMENTUM, 0)]
        text, interface = self.synchronized(self.AVERAGED, updates=updates)
        assert interface.reduction_groups == [((0, 1), (0, 0))]
        assert interface.inputs == [UpdatedRun(0, 0, 10), OptimizerState(0, 0, 10, "momentum_buffer"), UpdateNumbers(0, 0)]
        assert interface.outputs == []
        self.assert_made(
            text,
            """\
    view: "f32[8, 8]" = aten.view.default(mm, [8, -1])
    view_1: "f32[8, 2]" = aten.view.default(sum_1, [8, -1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'avg', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    select: "f32[]" = aten.select.int(numbers_up, 0, 0)
    select_1: "f32[]" = aten.select.int(numbers_up, 0, 1)
    select_2: "f32[]" = aten.select.int(numbers_up, 0, 2)
    select_3: "f32[]" = aten.select.int(numbers_up, 0, 3)
    mul: "f32[10]" = aten.mul.Tensor(select, shards_up)
    add: "f32[10]" = aten.add.Tensor(wait_tensor, mul)
    mul_1: "f32[10]" = aten.mul.Tensor(select_1, momentum_buffer_up)
    mul_2: "f32[10]" = aten.mul.Tensor(select_2, add)
    add_1: "f32[10]" = aten.add.Tensor(mul_1, mul_2)
    mul_3: "f32[10]" = aten.mul.Tensor(select_3, add_1)
    add_2: "f32[10]" = aten.add.Tensor(shards_up, mul_3)
    copy__default: "f32[10]" = aten.copy_.default(shards_up, add_2)
    copy__default_1: "f32[10]" = aten.copy_.default(momentum_buffer_up, add_1)
    return (None, None, relu)
""",
        )

    def test_what_is_not_alike_is_updated_apart(self) -> None:
        """Updates with different numbers or arithmetic, or with a gap between them in storage, are separate."""
        for second in (
            UpdateTarget(8, 2, Update("sgd"), 1),
            UpdateTarget(8, 2, self.MOMENTUM, 0),
            UpdateTarget(9, 2, Update("sgd"), 0),
        ):
            text, interface = self.synchronized(self.AVERAGED, updates=[second, UpdateTarget(0, 8, Update("sgd"), 0)])
            runs = [slot for slot in interface.inputs if isinstance(slot, UpdatedRun)]
            assert runs == [UpdatedRun(0, 0, 8), UpdatedRun(0, 1, 2)]
            assert "aten.slice.Tensor(wait_tensor, 0, 8, 10)" in text

    def test_a_gradient_that_is_there_is_added_and_consumed(self) -> None:
        updates = [UpdateTarget(8, 2, Update("sgd"), 0), UpdateTarget(0, 8, Update("sgd"), 0)]
        text, interface = self.synchronized(
            Reduction(averaging=Averaging("avg", "avg"), has_grad=True, updates=True), updates=updates
        )
        assert ReducedGradient(0) in interface.inputs and interface.outputs == []
        assert "aten.add.Tensor(grad_up, wait_tensor)" in text
        assert text.count("copy_") - text.count("copy__") == 1 and "aten.copy_.default(shards_up" in text
