from __future__ import annotations

import torch
import torch.distributed._functional_collectives as fc
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import PlannedReduction
from passes.ir.work import BucketName
from passes.lowering.collective_sequence import Collective, collective_sequence, digest, identities
from passes.transforms.bucket import bucket_gathers, find_buckets
from passes.transforms.gradient_sync import synchronize_gradients
from tests.passes.tracing import PassTestCase


class TestCollectiveSequence(PassTestCase):
    def lines(self, gm: GraphModule) -> str:
        sequence = collective_sequence(gm.graph, {self.shard: "shard", self.replicate: "replicate"})
        return "".join(f"{number}: {collective}\n" for number, collective in enumerate(sequence, start=1))

    def test_gathers_and_reductions(self) -> None:
        def backward(grad, first, second):
            weight = unshard(first, "0.weight", [16, 8], self.shard, unit="0")
            first_grad = reduce_grad(
                grad * weight, first, "0.weight", [16, 8], self.shard, unit="0", replicate_group=self.replicate
            )
            return first_grad, reduce_grad(grad.double(), second, "1.weight", [16, 8], self.shard, unit="1")

        gm = self.trace(backward, torch.zeros(16, 8), torch.zeros(2, 8), torch.zeros(2, 8))
        interface = Interface(gm.graph)
        bucket_gathers(gm.graph)
        synchronize_gradients(gm.graph, [PlannedReduction()] * len(find_buckets(gm.graph).reductions), interface)
        self.assertExpectedInline(
            self.lines(gm),
            """\
1: all_gather_into_tensor 16 x float32 over shard, bucket 0
2: reduce_scatter_tensor(sum) 128 x float32 over shard, bucket 0
3: all_reduce(sum) 16 x float32 over replicate, bucket 0
4: reduce_scatter_tensor(sum) 128 x float64 over shard, bucket 1
""",
        )

    def test_collectives_of_the_model(self) -> None:
        other = torch.distributed.new_group([0, 1, 2])

        def forward(x, y):
            summed, gathered = fc.all_reduce_coalesced([x, y], "sum", self.replicate)
            largest = fc.all_reduce(summed, "max", other)
            first = fc.broadcast(gathered, 0, other)
            # Sizes are left out, as ranks may exchange different numbers of rows.
            exchanged = fc.all_to_all_single(largest, [1] * 6 + [0, 0], [1] * 6 + [0, 0], self.shard)
            return exchanged, first

        gm = self.trace(forward, torch.zeros(6, 2), torch.zeros(3, dtype=torch.float64))
        self.assertExpectedInline(
            self.lines(gm),
            """\
1: all_reduce_coalesced(sum) 12 x float32 + 3 x float64 over replicate
2: all_reduce(max) 12 x float32 over group 1 of 3 ranks
3: broadcast(0) 3 x float64 over group 1 of 3 ranks
4: all_to_all_single float32 over shard
""",
        )

    def test_dynamic_size(self) -> None:
        gm = make_fx(lambda x: fc.all_reduce(x, "sum", self.shard), tracing_mode="symbolic")(torch.zeros(6, 2))
        self.assertExpectedInline(
            self.lines(gm),
            """\
1: all_reduce(sum) ? x float32 over shard
""",
        )

    def test_graph_without_collectives(self) -> None:
        assert self.lines(self.trace(lambda x: x + 1, torch.zeros(2))) == ""


def _bucket(text: str) -> BucketName | None:
    """Return the bucket that prints as ``text``; None if ``text`` is empty."""
    parts = (part.partition("/") for part in text.split("+"))
    return BucketName(tuple((name, int(piece) if piece else None) for name, _, piece in parts)) if text else None


def _sequence(*buckets: str) -> list[Collective]:
    return [Collective("all_gather_into_tensor 8 x float32 over shard", _bucket(bucket), "0") for bucket in buckets]


def _digest(*buckets: str) -> str:
    return digest(identities(_sequence(*buckets), {"0"}))


class TestIdentities:
    def test_sizes_count_over_the_groups_that_compare(self) -> None:
        """Tensor-parallel ranks may have pieces of unequal size, as their shard groups differ."""
        pair = [
            [Collective(f"all_gather {size} x float32 over shard", None, str(size), "all_gather float32 over shard")]
            for size in (4, 3)
        ]
        assert identities(pair[0], set()) == identities(pair[1], set())
        assert identities(pair[0], {"3", "4"}) != identities(pair[1], {"3", "4"})

    def test_order_of_units_counts(self) -> None:
        assert _digest("a", "b") != _digest("b", "a")

    def test_equal_blocks_are_the_same_graph(self) -> None:
        for buckets in ["X", "X.a X.b", "X/0 X/1", "X.a+X.b X.c", "X.a+X.b"]:
            third, fifth = (buckets.replace("X", block).split() for block in ("blocks.3", "blocks.5"))
            assert _digest(*third) == _digest(*fifth)
            assert _digest(*third, "") == _digest(*fifth, "")
            assert _digest(*third, "head") != _digest(*fifth, "head")
