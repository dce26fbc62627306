import torch

from passes.ir.ops import reduce_grad, unshard
from passes.transforms.mixed_precision import mixed_precision
from tests.passes.tracing import PassTestCase


class TestMixedPrecision(PassTestCase):
    def test_shard_is_cast_before_its_gather(self) -> None:
        def forward(shard, x):
            weight = unshard(shard, "up.weight", [16, 4], self.shard, param_dtype=torch.bfloat16)
            return x @ weight.t()

        gm = self.trace(forward, torch.zeros(2, 4), torch.zeros(3, 4, dtype=torch.bfloat16), names="shard x")
        mixed_precision(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, shard: "f32[2, 4]", x: "bf16[3, 4]"):
    convert_element_type_default: "bf16[2, 4]" = prims.convert_element_type.default(shard, torch.bfloat16)
    unshard: "bf16[16, 4]" = fsdp_compile.unshard.default(convert_element_type_default, 'up.weight', [16, 4], 'shard')
    t: "bf16[4, 16]" = aten.t.default(unshard)
    mm: "bf16[3, 16]" = aten.mm.default(x, t)
    return mm
""",
        )

    def test_gradient_is_cast_around_its_reduction(self) -> None:
        def backward(grad, shard):
            return reduce_grad(
                grad,
                shard,
                "up.weight",
                [16, 4],
                self.shard,
                reduce_dtype=torch.float32,
                grad_dtype=torch.bfloat16,
            )

        gm = self.trace(
            backward,
            torch.zeros(16, 4, dtype=torch.float16),
            torch.zeros(2, 4, dtype=torch.bfloat16),
            names="grad shard",
        )
        mixed_precision(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f16[16, 4]", shard: "bf16[2, 4]"):
    convert_element_type_default: "f32[16, 4]" = prims.convert_element_type.default(grad, torch.float32)
    reduce_grad: "bf16[2, 4]" = fsdp_compile.reduce_grad.default(convert_element_type_default, shard, 'up.weight', [16, 4], 'shard', grad_dtype = torch.bfloat16)
    return reduce_grad
""",
        )

    def test_gradient_is_cast_as_soon_as_it_exists(self) -> None:
        # Autograd runs reductions last. If their casts came last as well, no compute would hide a reduction.
        def backward(first, second, shard_a, shard_b):
            grad = first.relu()
            later = grad.exp()
            return (
                reduce_grad(grad, shard_a, "a", [16], self.shard, reduce_dtype=torch.float32),
                reduce_grad(second, shard_b, "b", [16], self.shard, reduce_dtype=torch.float32),
                later,
            )

        bf16 = torch.zeros(16, dtype=torch.bfloat16)
        gm = self.trace(backward, bf16, bf16.clone(), torch.zeros(2), torch.zeros(2), names="first second shard_a shard_b")
        mixed_precision(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, first: "bf16[16]", second: "bf16[16]", shard_a: "f32[2]", shard_b: "f32[2]"):
    convert_element_type_default_1: "f32[16]" = prims.convert_element_type.default(second, torch.float32)
    relu: "bf16[16]" = aten.relu.default(first)
    convert_element_type_default: "f32[16]" = prims.convert_element_type.default(relu, torch.float32)
    exp: "bf16[16]" = aten.exp.default(relu)
    reduce_grad: "f32[2]" = fsdp_compile.reduce_grad.default(convert_element_type_default, shard_a, 'a', [16], 'shard')
    reduce_grad_1: "f32[2]" = fsdp_compile.reduce_grad.default(convert_element_type_default_1, shard_b, 'b', [16], 'shard')
    return (reduce_grad, reduce_grad_1, exp)
""",
        )

    def test_leaves_agreeing_dtypes_alone(self) -> None:
        def both(grad, shard):
            return (
                unshard(shard, "up.weight", [16, 4], self.shard, param_dtype=torch.float32),
                reduce_grad(grad, shard, "up.weight", [16, 4], self.shard),
            )

        gm = self.trace(both, torch.zeros(16, 4), torch.zeros(2, 4), names="grad shard")
        mixed_precision(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[16, 4]", shard: "f32[2, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(shard, 'up.weight', [16, 4], 'shard')
    reduce_grad: "f32[2, 4]" = fsdp_compile.reduce_grad.default(grad, shard, 'up.weight', [16, 4], 'shard')
    return (unshard, reduce_grad)
""",
        )
