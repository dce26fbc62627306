import torch

from passes.ir.ops import unshard
from passes.transforms.bucket import bucket_gathers
from passes.transforms.pin_layouts import pin_layouts
from tests.passes.tracing import PassTestCase


class TestLower(PassTestCase):
    def test_copies_out_of_a_bucket_are_pinned(self) -> None:
        def forward(weight, bias, x):
            full_weight = unshard(weight, "up.weight", [16, 4], self.shard, unit="up", offset=0)
            full_bias = unshard(bias, "up.bias", [16], self.shard, unit="up", offset=8)
            return torch.addmm(full_bias, x, full_weight.t())

        gm = self.trace(forward, torch.zeros(2, 4), torch.zeros(2), torch.zeros(3, 4), names="weight bias x")
        bucket_gathers(gm.graph)
        pin_layouts(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, weight: "f32[2, 4]", bias: "f32[2]", x: "f32[3, 4]"):
    view: "f32[8]" = aten.view.default(weight, [-1])
    view_1: "f32[2]" = aten.view.default(bias, [-1])
    cat: "f32[10]" = aten.cat.default([view, view_1])
    all_gather_into_tensor: "f32[80]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "f32[80]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[8, 10]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 2], 1)
    getitem: "f32[8, 8]" = split_with_sizes[0]
    clone: "f32[8, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    inductor_force_stride_order_default: "f32[8, 8]" = prims.inductor_force_stride_order.default(clone, [8, 1])
    _unsafe_view: "f32[16, 4]" = aten._unsafe_view.default(inductor_force_stride_order_default, [16, 4])
    t: "f32[4, 16]" = aten.t.default(_unsafe_view)
    getitem_1: "f32[8, 2]" = split_with_sizes[1]
    clone_1: "f32[8, 2]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    inductor_force_stride_order_default_1: "f32[8, 2]" = prims.inductor_force_stride_order.default(clone_1, [2, 1])
    _unsafe_view_1: "f32[16]" = aten._unsafe_view.default(inductor_force_stride_order_default_1, [16])
    addmm: "f32[3, 16]" = aten.addmm.default(_unsafe_view_1, x, t)
    return addmm
""",
        )

    def test_leaves_a_bucket_of_one_and_the_models_clones_alone(self) -> None:
        def forward(weight, x):
            return x.t().clone(memory_format=torch.contiguous_format) @ unshard(weight, "w", [16, 4], self.shard, offset=0)

        gm = self.trace(forward, torch.zeros(2, 4), torch.zeros(16, 3), names="weight x")
        bucket_gathers(gm.graph)
        before = self.text(gm.graph)
        pin_layouts(gm.graph)
        assert self.text(gm.graph) == before
