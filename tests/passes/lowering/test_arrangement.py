from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.fx import GraphModule

from passes.auto.grouping import Grouping
from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.lowering.arrangement import Arrangement, CannotArrange, grouping_of, order_collectives
from passes.lowering.collective_sequence import Members, collective_sequence
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

    def lower(self, gm: GraphModule, grouping: Grouping | None = None) -> Arrangement:
        interface = Interface(gm.graph)
        bucket_gathers(gm.graph, None, interface, None if grouping is None else grouping.gathers)
        plan = [PlannedReduction()] * len(find_buckets(gm.graph).reductions)
        synchronize_gradients(gm.graph, plan, interface, None if grouping is None else grouping.reductions)
        interface.finish()
        return self.arrangement(gm, interface.members)

    def arrangement(self, gm: GraphModule, members: Members | None = None) -> Arrangement:
        return Arrangement.of(collective_sequence(gm.graph, {self.shard: "shard"}, members or {}))


class TestOrder(ArrangementTestCase):
    def test_collectives_come_in_the_order_of_another_graph(self) -> None:
        """The other rank reads ``a`` first. Here its gather comes first, too, and its reduction before that of ``b``."""
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        wanted = self.lower(other)
        self.lower(gm)
        # Gathers first: in the other's own order, b is gathered after the reduction of a.
        wanted = replace(wanted, collectives=tuple(sorted(wanted.collectives, key=lambda key: not key[1])))
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
        order_collectives(gm.graph, replace(found, collectives=found.collectives[::-1]))
        names = [node.target for node in gm.graph.nodes]
        assert names.index(torch.ops.aten.add.Tensor) < names.index(torch.ops.aten.copy_.default)

    def test_as_json(self) -> None:
        found = self.lower(self.backward("a", "b"))
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
        wanted = self.lower(other, Grouping((merged,), (merged,)))
        assert wanted.members(gathers=True) == [(("a", "weight"), ("b", "weight"))]
        found = grouping_of(wanted, gm.graph, *self.default(gm))
        # Here b is the first bucket.
        assert found == Grouping((((1, 0), (0, 0)),), (((1, 0), (0, 0)),))
        assert self.lower(gm, found).buckets == wanted.buckets

    def test_pieces_have_the_parameters_of_another_graph(self) -> None:
        """Which pieces of a unit share a collective depends on what is read first. They have the same numbers all the same."""

        def backward(order: str) -> GraphModule:
            def function(grad, a, b, c):
                shards, grads = {"a": a, "b": b, "c": c}, {}
                for name in order:
                    grad = grad * unshard(shards[name], f"unit.{name}", [16, 8], self.shard, unit="unit")
                    grads[name] = grad
                return [
                    reduce_grad(grads[name], shards[name], f"unit.{name}", [16, 8], self.shard, unit="unit") for name in order
                ]

            return self.trace(function, torch.zeros(16, 8), *[torch.zeros(2, 8)] * 3)

        def pieces(gm: GraphModule) -> tuple[Buckets, Plan, Grouping]:
            """Group the two parameters that the graph needs first."""
            buckets, plan, _ = self.default(gm)
            gathers, reductions = buckets.gathers[0].parameters, buckets.reductions[0].parameters
            first, second, third = ((0, gathers.index(name)) for name in reductions)
            return buckets, plan, Grouping(((first, second), (third,)), (((0, 0), (0, 1)), ((0, 2),)))

        other, gm = backward("abc"), backward("cba")
        _, _, grouping = pieces(other)
        wanted = self.lower(other, grouping)
        assert wanted.members(gathers=False) == [(("unit", "a"), ("unit", "b")), (("unit", "c"),)]
        buckets, plan, default = pieces(gm)
        found = grouping_of(wanted, gm.graph, buckets, plan, default)
        # The plan decides on the order of gradients within a bucket.
        same, theirs = (
            {(gathers, *sorted(members)) for gathers, members in one.buckets} for one in (self.lower(gm, found), wanted)
        )
        assert same == theirs

    def test_what_is_treated_unlike_does_not_merge(self) -> None:
        """One unit has gradients of an earlier microbatch that wait, and the other has none."""
        other, gm = self.backward("a", "b"), self.backward("b", "a")
        merged = ((0, 0), (1, 0))
        wanted = self.lower(other, Grouping((merged,), (merged,)))
        buckets, plan, default = self.default(gm, [Reduction(), Reduction(has_unsharded=True)])
        with pytest.raises(CannotArrange, match="bucket of a weight, b weight"):
            grouping_of(wanted, gm.graph, buckets, plan, default)

    def test_reductions_that_do_not_communicate_stay_as_they_are(self) -> None:
        gm = self.backward("a", "b")
        buckets, plan, default = self.default(gm, [Reduction(Sync.NONE)] * 2)
        gathers = Arrangement((), ((True, (("b", "weight"),)), (True, (("a", "weight"),))), ())
        assert grouping_of(gathers, gm.graph, buckets, plan, default) == Grouping((((1, 0),), ((0, 0),)), default.reductions)

    def test_units_that_the_graph_lacks_are_refused(self) -> None:
        other, gm = self.backward("a", "b"), self.backward("a")
        wanted = self.lower(other)
        with pytest.raises(CannotArrange, match="bucket of b weight"):
            grouping_of(wanted, gm.graph, *self.default(gm))
        assert wanted.members(gathers=False) == [(("a", "weight"),), (("b", "weight"),)]
