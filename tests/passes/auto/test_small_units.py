from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch.fx import GraphModule

from passes.auto.grouping import Grouping
from passes.auto.small_units import merge_small_units
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.pipeline import run_passes
from passes.transforms.bucket import find_buckets, regroup, whole_buckets
from tests.passes.tracing import PassTestCase

#: The bytes of a weight of 8 x 8 in float32.
_WEIGHT = 256


def _hook(gradient: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(gradient.chunk(8)[0])


def _plan(reductions: Sequence[Reduction], classes: Sequence[int] = (0, 0, 0)) -> Plan:
    return Plan(reductions=tuple(map(PlannedReduction, reductions, classes)))


class TestSmallUnits(PassTestCase):
    def forward_graph(self, *rows: int) -> GraphModule:
        """Trace a chain of units, each with a weight of ``rows`` x 8."""

        def forward(x, *shards):
            for unit, (shard, size) in enumerate(zip(shards, rows, strict=True)):
                weight = unshard(shard, f"{unit}.weight", [size, 8], self.shard, unit=str(unit), offset=0)
                x = x @ weight.t() @ weight
            return [x]

        names = " ".join(f"weight_{unit}" for unit in range(len(rows)))
        return self.trace(forward, torch.zeros(3, 8), *[torch.zeros(size // 8, 8) for size in rows], names=f"x {names}")

    def backward_graph(self, *rows: int) -> GraphModule:
        """Trace the reductions of units, each with a gradient of ``rows`` x 8."""

        def backward(*args):
            grads, shards = args[: len(rows)], args[len(rows) :]
            pairs = enumerate(zip(grads, shards, strict=True))
            return [
                reduce_grad(grad.relu(), shard, f"{unit}.weight", list(grad.shape), self.shard, unit=str(unit))
                for unit, (grad, shard) in pairs
            ]

        inputs = [torch.zeros(size, 8) for size in rows] + [torch.zeros(size // 8, 8) for size in rows]
        return self.trace(backward, *inputs)

    def merged(self, gm: GraphModule, below: int, plan: Plan | None = None) -> str:
        """Return the names of a graph's buckets after merging: of gathers, or of reductions if there are no gathers."""
        buckets = find_buckets(gm.graph)
        gathers, reductions = buckets.gathers, buckets.reductions
        plan = plan or Plan()
        plan = replace(
            plan,
            gathers=plan.gathers or (Gather.GATHER,) * len(gathers),
            reductions=plan.reductions or (PlannedReduction(factor_class=0),) * len(reductions),
        )
        default = Grouping(tuple(whole_buckets(gathers)), tuple(whole_buckets(reductions)))
        found = merge_small_units(gm.graph, buckets, plan, default, below)
        merged = regroup(gathers, found.gathers) if gathers else regroup(reductions, found.reductions)
        return " ".join(sorted(str(bucket.name) for bucket in merged))

    def test_small_units_share_a_collective(self) -> None:
        gm = self.forward_graph(8, 8, 16)
        run_passes(gm, Plan((Gather.GATHER,) * 3), is_backward=False, min_bucket_bytes=2 * _WEIGHT)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, x: "f32[3, 8]", weight_0: "f32[1, 8]", weight_1: "f32[1, 8]", weight_2: "f32[2, 8]"):
    view: "f32[8]" = aten.view.default(weight_0, [-1])
    view_1: "f32[8]" = aten.view.default(weight_1, [-1])
    cat: "f32[16]" = aten.cat.default([view, view_1])
    all_gather_into_tensor: "f32[128]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    view_5: "f32[16]" = aten.view.default(weight_2, [-1])
    all_gather_into_tensor_1: "f32[128]" = _c10d_functional.all_gather_into_tensor.default(view_5, 8, 'shard')
    wait_tensor: "f32[128]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[8, 16]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 8], 1)
    getitem: "f32[8, 8]" = split_with_sizes[0]
    getitem_1: "f32[8, 8]" = split_with_sizes[1]
    view_3: "f32[8, 8]" = aten.view.default(getitem, [8, 8])
    clone: "f32[8, 8]" = aten.clone.default(view_3, memory_format = torch.contiguous_format)
    t: "f32[8, 8]" = aten.t.default(clone)
    mm: "f32[3, 8]" = aten.mm.default(x, t)
    mm_1: "f32[3, 8]" = aten.mm.default(mm, clone)
    view_4: "f32[8, 8]" = aten.view.default(getitem_1, [8, 8])
    clone_1: "f32[8, 8]" = aten.clone.default(view_4, memory_format = torch.contiguous_format)
    t_1: "f32[8, 8]" = aten.t.default(clone_1)
    mm_2: "f32[3, 8]" = aten.mm.default(mm_1, t_1)
    mm_3: "f32[3, 8]" = aten.mm.default(mm_2, clone_1)
    wait_tensor_1: "f32[128]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_6: "f32[8, 16]" = aten.view.default(wait_tensor_1, [8, -1])
    view_7: "f32[16, 8]" = aten.view.default(view_6, [16, 8])
    t_2: "f32[8, 16]" = aten.t.default(view_7)
    mm_4: "f32[3, 16]" = aten.mm.default(mm_3, t_2)
    mm_5: "f32[3, 8]" = aten.mm.default(mm_4, view_7)
    return (mm_5,)
""",
        )

    def test_until_they_have_the_size_together(self) -> None:
        assert self.merged(self.forward_graph(8, 8, 8, 8, 8), 2 * _WEIGHT) == "0+1 2+3 4"
        assert self.merged(self.forward_graph(8, 8, 8, 8, 8), 100 * _WEIGHT) == "0+1+2+3+4"
        assert self.merged(self.forward_graph(8, 8, 8), _WEIGHT) == "0 1 2"
        assert self.merged(self.forward_graph(8, 8, 8), 0) == "0 1 2"
        assert self.merged(self.backward_graph(8, 8, 8), 2 * _WEIGHT) == "0+1 2"

    def test_equal_units_merge_in_equal_numbers(self) -> None:
        """Three of them would be large enough."""
        assert self.merged(self.forward_graph(*[8] * 8), 3 * _WEIGHT) == "0+1 2+3 4+5 6+7"
        assert self.merged(self.backward_graph(*[8] * 8), 3 * _WEIGHT) == "0+1 2+3 4+5 6+7"
        assert self.merged(self.forward_graph(*[8] * 7), 3 * _WEIGHT) == "0+1+2 3+4 5+6"
        # The others merge among themselves.
        assert self.merged(self.forward_graph(16, 8, 8, 8, 8, 16), 3 * _WEIGHT) == "0+5 1+2 3+4"
        assert self.merged(self.forward_graph(16, 8, 8, 8, 16), 3 * _WEIGHT) == "0+1 2+3+4"

    def test_a_large_unit_between_small_ones_stays_alone(self) -> None:
        assert self.merged(self.forward_graph(8, 64, 8, 8), 3 * _WEIGHT) == "0+2+3 1"
        assert self.merged(self.backward_graph(8, 64, 8, 8), 3 * _WEIGHT) == "0+2+3 1"

    def test_the_rule_knows_no_number_of_ranks(self) -> None:
        """The bytes of nine rows count as nine, although eight padded shards of two rows make sixteen."""
        assert self.merged(self.forward_graph(9, 9), 9 * 32) == "0 1"
        assert self.merged(self.forward_graph(9, 9), 9 * 32 + 1) == "0+1"

    def test_units_that_are_treated_otherwise_do_not_merge(self) -> None:
        many = 100 * _WEIGHT
        kept = Plan((Gather.GATHER, Gather.KEEP, Gather.KEEP))
        assert self.merged(self.forward_graph(8, 8, 8), many, kept) == "0 1+2"
        assert self.merged(self.backward_graph(8, 8, 8), many, _plan([Reduction()] * 3, (0, 0, 2))) == "0+1 2"
        deferred = _plan([Reduction(Sync.NONE), Reduction(), Reduction()])
        assert self.merged(self.backward_graph(8, 8, 8), many, deferred) == "0 1+2"

    def test_what_is_said_of_a_unit_keeps_it_alone(self) -> None:
        many = 100 * _WEIGHT
        listed = Plan(prefetch=(("1", ("2",)),))
        assert self.merged(self.forward_graph(8, 8, 8, 8, 8), many, listed) == "0+3+4 1 2"
        hooked = _plan([Reduction(), Reduction(comm_hook=_hook), Reduction()])
        assert self.merged(self.backward_graph(8, 8, 8), many, hooked) == "0+2 1"
        assert self.merged(self.backward_graph(8, 8, 8), many, Plan(max_pending_reductions=3)) == "0 1 2"
