from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule
from torch.utils.checkpoint import CheckpointPolicy

from passes.ir.ops import unshard
from passes.pass_runner import graph_text
from passes.transforms.recompute_regions import forward_regions, recompute_regions
from passes.transforms.reshard_after_forward import reshard_after_forward
from tests.passes.tracing import PassTestCase


class TestRecomputeRegions(PassTestCase):
    def partitioned(self, count: int, *, tagged: bool = False) -> tuple[str, list[str], Graph, Graph]:
        """Recompute the first ``count`` regions of three layers of two products, and partition the graph.

        Returns:
            The text of the joint graph with its tags, the nodes of each region, and the forward and backward graphs.
        """
        found: list[Any] = []

        def layer(x, shard, unit):
            weight = unshard(shard, f"{unit}.weight", [8, 8], self.shard, unit=unit, offset=0, reshard_after_forward=True)
            return x + (x @ weight).sigmoid() @ weight

        def forward(first, second, third, x):
            for shard, unit in ((first, "a"), (second, "b"), (third, "c")):
                x = layer(x, shard, unit)
            return x

        def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            regions = forward_regions(gm.graph, kwargs["num_fwd_outputs"])
            if tagged:
                regions[0][0].meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            recompute_regions(regions, range(count))
            text = graph_text(gm.graph, {self.shard: "shard"}, tags=True)
            found.extend([text, [" ".join(node.name for node in region) for region in regions]])
            reshard_after_forward(gm.graph)
            gm.recompile()
            parts = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            found.extend(part.graph for part in parts)
            return parts

        shards = [torch.zeros(1, 8, requires_grad=True) for _ in range(3)]
        x = torch.zeros(3, 8, requires_grad=True)
        self.partition(forward, [*shards, x], partition)
        return found[0], found[1], found[2], found[3]

    def test_a_region_is_a_layer(self) -> None:
        _, regions, _, _ = self.partitioned(0)
        self.assertEqual(regions, ["mm sigmoid mm_1 add", "mm_2 sigmoid_1 mm_3 add_1", "mm_4 sigmoid_2 mm_5 add_2"])

    def test_what_the_next_reads_is_saved(self) -> None:
        text, _, forward, backward = self.partitioned(2)
        self.assertExpectedInline(
            self.tags(text),
            """\
mm: "f32[3, 8]" = aten.mm.default(primals_4, unshard)  # MUST_RECOMPUTE
sigmoid: "f32[3, 8]" = aten.sigmoid.default(mm)  # MUST_RECOMPUTE
mm_1: "f32[3, 8]" = aten.mm.default(sigmoid, unshard)  # MUST_RECOMPUTE
add: "f32[3, 8]" = aten.add.Tensor(primals_4, mm_1)  # MUST_SAVE
mm_2: "f32[3, 8]" = aten.mm.default(add, unshard_1)  # MUST_RECOMPUTE
sigmoid_1: "f32[3, 8]" = aten.sigmoid.default(mm_2)  # MUST_RECOMPUTE
mm_3: "f32[3, 8]" = aten.mm.default(sigmoid_1, unshard_1)  # MUST_RECOMPUTE
add_1: "f32[3, 8]" = aten.add.Tensor(add, mm_3)  # MUST_SAVE
""",
        )
        saved = [node.name for node in forward.output_node().args[0]]
        self.assertIn("add", saved)
        self.assertNotIn("sigmoid", saved)
        self.assertNotIn("sigmoid_1", saved)
        self.assertIn("sigmoid_2", saved)
        again = [node.name for node in backward.nodes if str(node.target) == "aten.sigmoid.default"]
        self.assertEqual(again, ["sigmoid_1", "sigmoid"])

    def test_leaves_alone_what_has_tags(self) -> None:
        text, _, _, _ = self.partitioned(1, tagged=True)
        self.assertExpectedInline(
            self.tags(text),
            """\
mm: "f32[3, 8]" = aten.mm.default(primals_4, unshard)  # PREFER_RECOMPUTE
""",
        )

    def test_nothing_is_asked_for(self) -> None:
        text, _, forward, _ = self.partitioned(0)
        self.assertEqual(self.tags(text), "\n")
        self.assertIn("sigmoid", [node.name for node in forward.output_node().args[0]])
