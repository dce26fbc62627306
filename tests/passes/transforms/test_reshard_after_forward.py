from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule

from passes.ir.ops import unshard
from passes.transforms.reshard_after_forward import reshard_after_forward, resolve_ties
from tests.passes.tracing import PassTestCase


class TestReshardAfterForward(PassTestCase):
    def partitioned(self, **policy: Any) -> tuple[Graph, Graph]:
        """Return the forward and backward graphs of ``relu(x @ w.t()) @ w`` after the pass and the partitioner."""
        graphs: list[Graph] = []

        def forward(shard, x):
            weight = unshard(shard, "up.weight", [16, 4], self.shard, unit="up", offset=0, **policy)
            return (x @ weight.t()).relu() @ weight

        def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            reshard_after_forward(gm.graph)
            gm.recompile()
            parts = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            for part in parts:
                resolve_ties(part.graph)
                graphs.append(part.graph)
            return parts

        shard = torch.zeros(2, 4, requires_grad=True)
        x = torch.zeros(3, 4, requires_grad=True)
        self.partition(forward, [shard, x], partition)
        return graphs[0], graphs[1]

    def test_resharded_parameter_is_gathered_again(self) -> None:
        forward, backward = self.partitioned()
        self.assertExpectedInline(
            self.text(forward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(primals_1, 'up.weight', [16, 4], 'shard', unit = 'up', offset = 0)
    t: "f32[4, 16]" = aten.t.default(unshard)
    mm: "f32[3, 16]" = aten.mm.default(primals_2, t)
    relu: "f32[3, 16]" = aten.relu.default(mm)
    mm_1: "f32[3, 4]" = aten.mm.default(relu, unshard)
    return (mm_1, primals_1, primals_2, relu)
""",
        )
        self.assertExpectedInline(
            self.text(backward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]", relu: "f32[3, 16]", tangents_1: "f32[3, 4]"):
    t_1: "f32[16, 3]" = aten.t.default(relu)
    mm_2: "f32[16, 4]" = aten.mm.default(t_1, tangents_1)
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(primals_1, 'up.weight', [16, 4], 'shard', unit = 'up', offset = 0)
    t: "f32[4, 16]" = aten.t.default(unshard)
    mm_3: "f32[3, 16]" = aten.mm.default(tangents_1, t)
    detach: "f32[3, 16]" = aten.detach.default(relu)
    detach_1: "f32[3, 16]" = aten.detach.default(detach)
    threshold_backward: "f32[3, 16]" = aten.threshold_backward.default(mm_3, detach_1, 0)
    t_3: "f32[16, 3]" = aten.t.default(threshold_backward)
    mm_4: "f32[16, 4]" = aten.mm.default(t_3, primals_2)
    t_4: "f32[4, 16]" = aten.t.default(mm_4)
    t_5: "f32[16, 4]" = aten.t.default(t)
    mm_5: "f32[3, 4]" = aten.mm.default(threshold_backward, t_5)
    t_6: "f32[16, 4]" = aten.t.default(t_4)
    add: "f32[16, 4]" = aten.add.Tensor(mm_2, t_6)
    reduce_grad: "f32[2, 4]" = fsdp_compile.reduce_grad.default(add, primals_1, 'up.weight', [16, 4], 'shard', unit = 'up')
    return (reduce_grad, mm_5)
""",
        )

    def test_kept_parameter_is_saved(self) -> None:
        forward, backward = self.partitioned(reshard_after_forward=False)
        self.assertExpectedInline(
            self.text(forward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(primals_1, 'up.weight', [16, 4], 'shard', unit = 'up', offset = 0, reshard_after_forward = False)
    t: "f32[4, 16]" = aten.t.default(unshard)
    mm: "f32[3, 16]" = aten.mm.default(primals_2, t)
    relu: "f32[3, 16]" = aten.relu.default(mm)
    mm_1: "f32[3, 4]" = aten.mm.default(relu, unshard)
    return (mm_1, primals_1, primals_2, t, relu)
""",
        )
        self.assertExpectedInline(
            self.text(backward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]", t: "f32[4, 16]", relu: "f32[3, 16]", tangents_1: "f32[3, 4]"):
    t_1: "f32[16, 3]" = aten.t.default(relu)
    mm_2: "f32[16, 4]" = aten.mm.default(t_1, tangents_1)
    mm_3: "f32[3, 16]" = aten.mm.default(tangents_1, t)
    detach: "f32[3, 16]" = aten.detach.default(relu)
    detach_1: "f32[3, 16]" = aten.detach.default(detach)
    threshold_backward: "f32[3, 16]" = aten.threshold_backward.default(mm_3, detach_1, 0)
    t_3: "f32[16, 3]" = aten.t.default(threshold_backward)
    mm_4: "f32[16, 4]" = aten.mm.default(t_3, primals_2)
    t_4: "f32[4, 16]" = aten.t.default(mm_4)
    t_5: "f32[16, 4]" = aten.t.default(t)
    mm_5: "f32[3, 4]" = aten.mm.default(threshold_backward, t_5)
    t_6: "f32[16, 4]" = aten.t.default(t_4)
    add: "f32[16, 4]" = aten.add.Tensor(mm_2, t_6)
    reduce_grad: "f32[2, 4]" = fsdp_compile.reduce_grad.default(add, primals_1, 'up.weight', [16, 4], 'shard', unit = 'up')
    return (reduce_grad, mm_5)
""",
        )

    def test_smaller_group_keeps_its_bytes(self) -> None:
        # The eight ranks send a row each: 8 elements of a byte, and a scale of 4 bytes. Two neighbours keep four rows each.
        forward, backward = self.partitioned(post_forward_group=self.replicate, sent_as="int8:8")
        self.assertExpectedInline(
            self.text(forward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(primals_1, 'up.weight', [16, 4], 'shard', unit = 'up', offset = 0, post_forward_group = 'replicate', sent_as = 'int8:8')
    reshard_rounded_default: "u8[4, 12]" = fsdp_compile.reshard_rounded.default([unshard], 'up.weight', [16, 4], 'shard', 'replicate', dim = 0, sent_as = 'int8:8')
    t: "f32[4, 16]" = aten.t.default(unshard)
    mm: "f32[3, 16]" = aten.mm.default(primals_2, t)
    relu: "f32[3, 16]" = aten.relu.default(mm)
    mm_1: "f32[3, 4]" = aten.mm.default(relu, unshard)
    return (mm_1, primals_1, primals_2, reshard_rounded_default, relu)
""",
        )
        (gather,) = backward.find_nodes(op="call_function", target=unshard)
        self.assertEqual((str(gather.args[0]), gather.kwargs["encoded_over"]), ("reshard_rounded_default", self.shard))

    def test_smaller_group_keeps_its_shard(self) -> None:
        # The group of two stands for this rank's neighbours.
        forward, backward = self.partitioned(post_forward_group=self.replicate)
        self.assertExpectedInline(
            self.text(forward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(primals_1, 'up.weight', [16, 4], 'shard', unit = 'up', offset = 0, post_forward_group = 'replicate')
    reshard_default: "f32[8, 4]" = fsdp_compile.reshard.default(unshard, 'up.weight', 'replicate', dim = 0)
    t: "f32[4, 16]" = aten.t.default(unshard)
    mm: "f32[3, 16]" = aten.mm.default(primals_2, t)
    relu: "f32[3, 16]" = aten.relu.default(mm)
    mm_1: "f32[3, 4]" = aten.mm.default(relu, unshard)
    return (mm_1, primals_1, primals_2, reshard_default, relu)
""",
        )
        self.assertExpectedInline(
            self.text(backward),
            """\
def forward(self, primals_1: "f32[2, 4]", primals_2: "f32[3, 4]", reshard_default: "f32[8, 4]", relu: "f32[3, 16]", tangents_1: "f32[3, 4]"):
    t_1: "f32[16, 3]" = aten.t.default(relu)
    mm_2: "f32[16, 4]" = aten.mm.default(t_1, tangents_1)
    unshard_1: "f32[16, 4]" = fsdp_compile.unshard.default(reshard_default, 'up.weight', [16, 4], 'replicate', unit = 'up')
    t: "f32[4, 16]" = aten.t.default(unshard_1)
    mm_3: "f32[3, 16]" = aten.mm.default(tangents_1, t)
    detach: "f32[3, 16]" = aten.detach.default(relu)
    detach_1: "f32[3, 16]" = aten.detach.default(detach)
    threshold_backward: "f32[3, 16]" = aten.threshold_backward.default(mm_3, detach_1, 0)
    t_3: "f32[16, 3]" = aten.t.default(threshold_backward)
    mm_4: "f32[16, 4]" = aten.mm.default(t_3, primals_2)
    t_4: "f32[4, 16]" = aten.t.default(mm_4)
    t_5: "f32[16, 4]" = aten.t.default(t)
    mm_5: "f32[3, 4]" = aten.mm.default(threshold_backward, t_5)
    t_6: "f32[16, 4]" = aten.t.default(t_4)
    add: "f32[16, 4]" = aten.add.Tensor(mm_2, t_6)
    reduce_grad: "f32[2, 4]" = fsdp_compile.reduce_grad.default(add, primals_1, 'up.weight', [16, 4], 'shard', unit = 'up')
    return (reduce_grad, mm_5)
""",
        )
