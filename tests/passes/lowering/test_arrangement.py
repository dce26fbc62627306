from __future__ import annotations

import json
from collections.abc import Sequence

import pytest
import torch
from torch.fx import GraphModule

from passes.auto.grouping import Grouping
from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.ir.work import BucketName
from passes.lowering.arrangement import Arrangement, CannotArrange, grouping_of, order_collectives
from passes.lowering.collective_sequence import collective_sequence
from passes.transforms.bucket import Buckets, bucket_gathers, find_buckets, sink_derived, whole_buckets
from passes.transforms.gradient_sync import synchronize_gradients
from tests.passes.tracing import PassTestCase


class ArrangementTestCase(PassTestCase):
    def backward(self, *order: str) -> GraphModule:
        """Trace a backward that multiplies by the weights of units in this order, and reduces a gradient of each."""

        def function(grad, a, b):
            shards, grads = {"a": a, "b": b}, {}
            for unit in order:
                grad = grad * unshard(shards[unit], f"{unit}.weight", [16, 8], self.shard, unit=unit)
                grads[unit] = grad
            return [reduce_grad(grads[unit], shards[unit], f"{unit}.weight", [16, 8], self.shard, unit=unit) for unit in order]

        shards = [torch.zeros(2, 8), torch.zeros(2, 8)]
        return self.trace(function, torch.zeros(16, 8), *shards, names="grad shard_a shard_b")

    def lower(self, gm: GraphModule, grouping: Grouping | None = None) -> None:
        interface = Interface(gm.graph)
        bucket_gathers(gm.graph, None, interface, None if grouping is None else grouping.gathers)
        plan = [PlannedReduction()] * len(find_buckets(gm.graph).reductions)
        synchronize_gradients(gm.graph, plan, interface, None if grouping is None else grouping.reductions)
        interface.finish()

    def arrangement(self, gm: GraphModule) -> Arrangement:
        return Arrangement.of(collective_sequence(gm.graph, {self.shard: "shard"}))


class TestOrder(ArrangementTestCase):
    def test_collectives_come_in_the_order_of_another_graph(self) -> None:
        """The other rank reads ``a`` first. Here its gather comes first, too, and its reduction before that of ``b``."""
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        self.lower(other)
        self.lower(gm)
        wanted = self.arrangement(other)
        # Gathers first: in the other's own order, b is gathered after the reduction of a.
        wanted = Arrangement(tuple(sorted(wanted.collectives, key=lambda key: not key[1])), wanted.by_unit)
        order_collectives(gm.graph, wanted)
        gm.graph.lint()
        assert self.arrangement(gm).collectives == wanted.collectives
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather b
start_gather a
start_gather b
finish_gather b
mul
start_reduce b
finish_gather a
mul
start_reduce a
start_reduce b
finish_reduce b
finish_reduce a
""",
        )

    def test_a_collective_that_needs_a_later_one_is_refused(self) -> None:
        """The other rank reduces ``a`` before it gathers ``b``. Here the gradient of ``a`` is computed with ``b``."""
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        self.lower(other)
        self.lower(gm)
        before = self.text(gm.graph)
        with pytest.raises(CannotArrange, match="needs the result"):
            order_collectives(gm.graph, self.arrangement(other))
        assert self.text(gm.graph) == before

    def test_other_collectives_are_refused(self) -> None:
        one, two = self.backward("a"), self.backward("a", "b")
        self.lower(one)
        self.lower(two)
        with pytest.raises(CannotArrange, match="other collectives"):
            order_collectives(one.graph, self.arrangement(two))

    def test_writes_keep_their_order(self) -> None:
        """A value that is read before its memory is overwritten is still read before."""

        def function(grad, kept, a, b):
            first = grad * unshard(b, "b.weight", [16, 8], self.shard, unit="b")
            late = (kept.view(-1) + 1).view(16, 8) * unshard(a, "a.weight", [16, 8], self.shard, unit="a")
            kept.copy_(grad)
            return first, late

        gm = self.trace(function, *[torch.zeros(16, 8)] * 2, torch.zeros(2, 8), torch.zeros(2, 8))
        bucket_gathers(gm.graph)
        found = self.arrangement(gm)
        order_collectives(gm.graph, Arrangement(found.collectives[::-1], found.by_unit))
        names = [node.target for node in gm.graph.nodes]
        assert names.index(torch.ops.aten.add.Tensor) < names.index(torch.ops.aten.copy_.default)

    def test_as_json(self) -> None:
        gm = self.backward("a", "b")
        self.lower(gm)
        found = self.arrangement(gm)
        assert Arrangement.from_lists(json.loads(json.dumps(found.fields()))) == found


class TestGrouping(ArrangementTestCase):
    def default(self, gm: GraphModule, reductions: Sequence[Reduction] = ()) -> tuple[Buckets, Plan, Grouping]:
        sink_derived(gm.graph)
        buckets = find_buckets(gm.graph)
        made = reductions or [Reduction()] * len(buckets.reductions)
        plan = Plan(
            (Gather.GATHER,) * len(buckets.gathers), tuple(PlannedReduction(reduction, factor_class=0) for reduction in made)
        )
        return buckets, plan, Grouping(tuple(whole_buckets(buckets.gathers)), tuple(whole_buckets(buckets.reductions)))

    def test_buckets_of_another_graph(self) -> None:
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        merged = ((0, 0), (1, 0))
        self.lower(other, Grouping((merged,), (merged,)))
        assert [str(bucket) for bucket in self.arrangement(other).buckets(gathers=True)] == ["a+b"]
        found = grouping_of(self.arrangement(other), gm.graph, *self.default(gm))
        # Here b is the first bucket.
        assert found == Grouping((((1, 0), (0, 0)),), (((1, 0), (0, 0)),))

    def test_what_is_treated_unlike_does_not_merge(self) -> None:
        """One unit has gradients of an earlier microbatch that wait, and the other has none."""
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        merged = ((0, 0), (1, 0))
        self.lower(other, Grouping((merged,), (merged,)))
        buckets, plan, default = self.default(gm, [Reduction(), Reduction(has_unsharded=True)])
        with pytest.raises(CannotArrange, match=r"bucket a\+b"):
            grouping_of(self.arrangement(other), gm.graph, buckets, plan, default)

    def test_reductions_that_do_not_communicate_stay_as_they_are(self) -> None:
        gm = self.backward("a", "b")
        buckets, plan, default = self.default(gm, [Reduction(Sync.NONE)] * 2)
        gathers = Arrangement(
            (("all_gather_into_tensor", True, (("b", None),)), ("all_gather_into_tensor", True, (("a", None),))), ()
        )
        assert grouping_of(gathers, gm.graph, buckets, plan, default) == Grouping((((1, 0),), ((0, 0),)), default.reductions)

    def test_units_that_the_graph_lacks_are_refused(self) -> None:
        other, gm = self.backward("a", "b"), self.backward("a")
        self.lower(other)
        with pytest.raises(CannotArrange, match="bucket b"):
            grouping_of(self.arrangement(other), gm.graph, *self.default(gm))
        assert self.arrangement(other).buckets(gathers=False) == [BucketName.of_unit("a"), BucketName.of_unit("b")]
