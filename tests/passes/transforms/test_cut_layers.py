import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from passes.ir.ops import unshard
from passes.transforms.cut_layers import Cut, cut_layers
from tests.passes.tracing import PassTestCase

DEPTH, WIDTH, KEEP = 4, 8, 2


class Layer(nn.Module):
    def __init__(self, group: str):
        super().__init__()
        self.shard = nn.Parameter(torch.zeros(1, WIDTH))
        self.group = group

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * torch.tanh(x @ unshard(self.shard, "weight", [WIDTH, WIDTH], self.group))


class Model(nn.Module):
    """Equal layers; ``kind`` says how they are called."""

    def __init__(self, group: str, kind: str):
        super().__init__()
        self.layers = nn.ModuleList(Layer(group) for _ in range(DEPTH))
        self.kind = kind
        if kind == "checkpoints":
            for layer in self.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)

    def forward(self, x: Tensor) -> Tensor:
        scale, outputs = x.mean(), []
        for layer in self.layers:
            if self.kind == "beside each other":
                outputs.append(layer(scale * torch.ones(3, WIDTH), scale))
            else:
                x = layer(x, scale)
                outputs.append(x)
        return x + sum(outputs) if self.kind in ("beside each other", "hidden states") else x.sin()


class TestCutLayers(PassTestCase):
    def cut(self, kind: str, can_cut: Callable[[Any], bool] = lambda _: True) -> tuple[GraphModule, list[Cut]]:
        captured: list[GraphModule] = []

        def backend(gm: GraphModule, _: Any) -> Callable[..., Any]:
            captured.append(gm)
            return gm

        torch._dynamo.reset()
        torch.compile(Model(self.shard, kind), backend=backend, fullgraph=True)(torch.zeros(3, WIDTH, requires_grad=True))
        return captured[0], cut_layers(captured[0], KEEP, can_cut)

    def test_leaves_the_first_layers_of_a_chain(self) -> None:
        gm, (cut,) = self.cut("chain")
        self.assertEqual([len(cut.kept), len(cut.removed)], [KEEP, DEPTH - KEEP])
        names = [node.name for inputs in (*cut.kept, *cut.removed) for node in inputs]
        self.assertEqual(names, [f"l_self_modules_layers_modules_{index}_parameters_shard_" for index in range(DEPTH)])
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, L_x_: "f32[3, 8]", L_self_modules_layers_modules_0_parameters_shard_: "f32[1, 8]", L_self_modules_layers_modules_1_parameters_shard_: "f32[1, 8]", L_self_modules_layers_modules_2_parameters_shard_: "f32[1, 8]", L_self_modules_layers_modules_3_parameters_shard_: "f32[1, 8]"):
    l_x_ = L_x_
    l_self_modules_layers_modules_0_parameters_shard_ = L_self_modules_layers_modules_0_parameters_shard_
    l_self_modules_layers_modules_1_parameters_shard_ = L_self_modules_layers_modules_1_parameters_shard_
    l_self_modules_layers_modules_2_parameters_shard_ = L_self_modules_layers_modules_2_parameters_shard_
    l_self_modules_layers_modules_3_parameters_shard_ = L_self_modules_layers_modules_3_parameters_shard_
    scale: "f32[]" = l_x_.mean()
    unshard_default: "f32[8, 8]" = fsdp_compile.unshard.default(l_self_modules_layers_modules_0_parameters_shard_, 'weight', [8, 8], 'shard')
    matmul: "f32[3, 8]" = l_x_ @ unshard_default
    tanh: "f32[3, 8]" = torch.tanh(matmul)
    mul: "f32[3, 8]" = scale * tanh
    x: "f32[3, 8]" = l_x_ + mul
    unshard_default_1: "f32[8, 8]" = fsdp_compile.unshard.default(l_self_modules_layers_modules_1_parameters_shard_, 'weight', [8, 8], 'shard')
    matmul_1: "f32[3, 8]" = x @ unshard_default_1
    tanh_1: "f32[3, 8]" = torch.tanh(matmul_1)
    mul_1: "f32[3, 8]" = scale * tanh_1
    x_1: "f32[3, 8]" = x + mul_1
    sin: "f32[3, 8]" = x_1.sin()
    return (sin,)
""",
        )

    def test_cuts_checkpoints(self) -> None:
        gm, cuts = self.cut("checkpoints")
        self.assertEqual(len(cuts), 1)
        self.assertEqual([name for name, _ in gm.named_children()], ["wrap_body_0", "wrap_body_1"])

    def test_leaves_alone_what_is_no_chain(self) -> None:
        for kind in ("hidden states", "beside each other"):
            with self.subTest(kind):
                gm, cuts = self.cut(kind)
                self.assertEqual(cuts, [])
                self.assertEqual(len(gm.graph.find_nodes(op="call_function", target=torch.tanh)), DEPTH)

    def test_leaves_alone_what_the_caller_refuses(self) -> None:
        asked: list[Any] = []
        _, cuts = self.cut("chain", lambda layers: asked.append(layers) or False)  # type: ignore[func-returns-value]
        self.assertEqual(cuts, [])
        self.assertEqual([[node.op for node in layer] for layer in asked[0]], [["placeholder"]] * DEPTH)
