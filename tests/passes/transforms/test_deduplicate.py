from collections.abc import Callable
from typing import Any

import torch
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from passes.ir.ops import unshard
from passes.transforms.deduplicate import deduplicate
from tests.passes.tracing import PassTestCase


class TestDeduplicate(PassTestCase):
    def dynamo_graph(self, function: Callable[..., Any], *inputs: torch.Tensor) -> GraphModule:
        captured: list[GraphModule] = []

        def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
            captured.append(gm)
            return gm

        torch._dynamo.reset()
        torch.compile(function, backend=backend, fullgraph=True)(*inputs)
        return captured[0]

    def unshard(self, shard: torch.Tensor, name: str = "tied.weight") -> torch.Tensor:
        return unshard(shard, name, [16, 4], self.shard)

    def test_one_unshard_for_a_parameter_read_twice(self) -> None:
        def forward(shard, x):
            return (x @ self.unshard(shard).t()) @ self.unshard(shard)

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(3, 4))
        deduplicate(gm)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_shard_: "f32[2, 4]", L_x_: "f32[3, 4]"):
    l_shard_ = L_shard_
    l_x_ = L_x_
    unshard_default: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_, 'tied.weight', [16, 4], 'shard')
    t: "f32[4, 16]" = unshard_default.t()
    matmul: "f32[3, 16]" = l_x_ @ t
    matmul_1: "f32[3, 4]" = matmul @ unshard_default
    return (matmul_1,)
""",
        )

    def test_first_read_without_gradients_does_not_cut_off_the_second(self) -> None:
        def forward(shard, x):
            with torch.no_grad():
                target = x @ self.unshard(shard).t()
            return x @ self.unshard(shard).t() - target

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(3, 4))
        deduplicate(gm)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_shard_: "f32[2, 4]", L_x_: "f32[3, 4]"):
    l_shard_ = L_shard_
    l_x_ = L_x_
    unshard_default: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_, 'tied.weight', [16, 4], 'shard')
    _set_grad_enabled = torch._C._set_grad_enabled(False)
    t: "f32[4, 16]" = unshard_default.t()
    target: "f32[3, 16]" = l_x_ @ t
    _set_grad_enabled_1 = torch._C._set_grad_enabled(True)
    t_1: "f32[4, 16]" = unshard_default.t()
    matmul_1: "f32[3, 16]" = l_x_ @ t_1
    sub: "f32[3, 16]" = matmul_1 - target
    return (sub,)
""",
        )

    def test_checkpoint_bodies_take_full_parameters(self) -> None:
        def forward(shard, x):
            def block(x):
                return (x @ self.unshard(shard).t()).relu()

            y = checkpoint(block, x, use_reentrant=False)
            return y @ self.unshard(shard)

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(3, 4))
        deduplicate(gm)
        body = next(module for name, module in gm.named_modules() if name and isinstance(module, GraphModule))
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_x_: "f32[3, 4]", L_shard_: "f32[2, 4]"):
    l_x_ = L_x_
    l_shard_ = L_shard_
    unshard_default_1: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_, 'tied.weight', [16, 4], 'shard')
    wrap_body_0 = self.wrap_body_0
    tag_activation_checkpoint = higher_order.tag_activation_checkpoint(wrap_body_0, l_x_, unshard_default_1, use_reentrant = False)
    y: "f32[3, 16]" = tag_activation_checkpoint[0]
    matmul: "f32[3, 4]" = y @ unshard_default_1
    return (matmul,)
""",
        )
        self.assertExpectedInline(
            self.text(body.graph),
            """\
def forward(self, l_x_: "f32[3, 4]", unsharded_l_shard_: "f32[16, 4]"):
    t: "f32[4, 16]" = unsharded_l_shard_.t()
    matmul: "f32[3, 16]" = l_x_ @ t
    relu: "f32[3, 16]" = matmul.relu()
    return (relu,)
""",
        )

    def test_checkpoint_body_takes_a_parameter_once(self) -> None:
        def forward(shard, x):
            def inner(x):
                return self.unshard(shard).sum() * x

            def block(x):
                x = (x @ self.unshard(shard).t()) @ self.unshard(shard)
                return checkpoint(inner, x, use_reentrant=False)

            return checkpoint(block, x, use_reentrant=False)

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(3, 4))
        deduplicate(gm)
        body = next(module for name, module in gm.named_modules() if name and isinstance(module, GraphModule))
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_x_: "f32[3, 4]", L_shard_: "f32[2, 4]"):
    l_x_ = L_x_
    l_shard_ = L_shard_
    unshard_default: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_, 'tied.weight', [16, 4], 'shard')
    wrap_body_1 = self.wrap_body_1
    tag_activation_checkpoint = higher_order.tag_activation_checkpoint(wrap_body_1, l_x_, unshard_default, use_reentrant = False)
    getitem: "f32[3, 4]" = tag_activation_checkpoint[0]
    return (getitem,)
""",
        )
        self.assertExpectedInline(
            self.text(body.graph),
            """\
def forward(self, l_x_: "f32[3, 4]", unsharded_l_shard_: "f32[16, 4]"):
    t: "f32[4, 16]" = unsharded_l_shard_.t()
    matmul: "f32[3, 16]" = l_x_ @ t
    x: "f32[3, 4]" = matmul @ unsharded_l_shard_
    wrap_body_0 = self.wrap_body_0
    tag_activation_checkpoint = higher_order.tag_activation_checkpoint(wrap_body_0, x, unsharded_l_shard_, use_reentrant = False)
    getitem: "f32[3, 4]" = tag_activation_checkpoint[0]
    return (getitem,)
""",
        )

    def test_different_shards_stay_apart(self) -> None:
        def forward(shard_a, shard_b, x):
            return (x @ self.unshard(shard_a, "a.weight").t()) @ self.unshard(shard_b, "b.weight")

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(3, 4))
        deduplicate(gm)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_shard_a_: "f32[2, 4]", L_x_: "f32[3, 4]", L_shard_b_: "f32[2, 4]"):
    l_shard_a_ = L_shard_a_
    l_x_ = L_x_
    l_shard_b_ = L_shard_b_
    unshard_default: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_a_, 'a.weight', [16, 4], 'shard')
    unshard_default_1: "f32[16, 4]" = fsdp_compile.unshard.default(l_shard_b_, 'b.weight', [16, 4], 'shard')
    t: "f32[4, 16]" = unshard_default.t()
    matmul: "f32[3, 16]" = l_x_ @ t
    matmul_1: "f32[3, 4]" = matmul @ unshard_default_1
    return (matmul_1,)
""",
        )

    def test_refuses_unshards_in_other_bodies(self) -> None:
        def forward(shard, x):
            return torch.cond(x.sum() > 0, lambda: x @ self.unshard(shard).t(), lambda: x.new_zeros(3, 16))

        gm = self.dynamo_graph(forward, torch.zeros(2, 4), torch.zeros(3, 4))
        with self.assertRaisesRegex(NotImplementedError, r"tied\.weight is read inside the body .* of a higher-order"):
            deduplicate(gm)
