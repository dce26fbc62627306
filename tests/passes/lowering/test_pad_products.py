import torch
from torch._inductor.virtualized import V

from passes.lowering.pad_products import pad_products
from tests.common.padded_products import padded_products
from tests.passes.tracing import PassTestCase


class TestPadProducts(PassTestCase):
    def test_a_result_that_leaves_the_segment_is_copied(self) -> None:
        def segment(x, weight):
            logits = x @ weight
            return logits, logits.exp().sum(1)

        gm = self.trace(segment, torch.zeros(8, 4), torch.zeros(4, 6), names="x weight")
        mode = next(node.meta["val"].fake_mode for node in gm.graph.nodes)
        with padded_products(), V.set_fake_mode(mode):
            pad_products(gm)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, x: "f32[8, 4]", weight: "f32[4, 6]"):
    constant_pad_nd_default: "f32[4, 8]" = aten.constant_pad_nd.default(weight, [0, 2, 0, 0])
    mm_default: "f32[8, 8]" = aten.mm.default(x, constant_pad_nd_default)
    slice_tensor: "f32[8, 6]" = aten.slice.Tensor(mm_default, 1, 0, -2)
    exp: "f32[8, 6]" = aten.exp.default(slice_tensor)
    sum_1: "f32[8]" = aten.sum.dim_IntList(exp, [1])
    clone: "f32[8, 6]" = aten.clone.default(slice_tensor, memory_format = torch.contiguous_format)
    return (clone, sum_1)
""",
        )

    def test_leaves_a_cpu_alone(self) -> None:
        gm = self.trace(torch.mm, torch.zeros(8, 4), torch.zeros(4, 6), names="x weight")
        before = self.text(gm.graph)
        pad_products(gm)
        assert self.text(gm.graph) == before
