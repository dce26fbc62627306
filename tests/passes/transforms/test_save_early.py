from __future__ import annotations

import torch
from torch.fx import Graph

from passes.transforms.save_early import save_early
from tests.passes.tracing import PassTestCase


class TestSaveEarly(PassTestCase):
    def passed(self, forward, *inputs: torch.Tensor) -> Graph:
        graph = self.trace(forward, *inputs, names="x y").graph
        save_early(graph)
        graph.lint()
        return graph

    def test_moves_what_takes_the_place_of_its_input(self) -> None:
        def forward(x, y):
            scale = x.rsqrt()
            layer = y * scale
            head = layer.sin()
            return head, scale / 4

        self.assertExpectedInline(
            self.text(self.passed(forward, torch.ones(3, 1), torch.ones(3, 8))),
            """\
def forward(self, x: "f32[3, 1]", y: "f32[3, 8]"):
    rsqrt: "f32[3, 1]" = aten.rsqrt.default(x)
    mul: "f32[3, 8]" = aten.mul.Tensor(y, rsqrt)
    div: "f32[3, 1]" = aten.div.Tensor(rsqrt, 4)
    sin: "f32[3, 8]" = aten.sin.default(mul)
    return (sin, div)
""",
        )

    def test_leaves_alone_what_would_need_memory(self) -> None:
        def forward(x, y):
            kept, viewed, wide, random = x.exp(), y.exp(), x.cos(), y.cos()
            half, flat = wide.bfloat16(), viewed.view(-1)
            head = (kept + half).sin() + (random * flat.view_as(y)).sum()
            return head, kept, kept / 2, x / 2, flat * 2, kept * y, wide.double(), torch.bernoulli(random), head.neg()

        gm = self.trace(forward, torch.ones(3, 1), torch.ones(3, 8))
        before = self.text(gm.graph)
        save_early(gm.graph)
        assert self.text(gm.graph) == before
