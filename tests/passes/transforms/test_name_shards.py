import torch

from passes.ir.ops import reduce_grad, unshard
from passes.transforms.name_shards import name_shards
from tests.passes.tracing import PassTestCase


class TestNameShards(PassTestCase):
    def test_inputs_are_called_after_parameters(self) -> None:
        def backward(primals_1, primals_2, saved, tangents_1):
            up = unshard(primals_1, "layers.0.up.weight", [16, 4], self.shard, offset=0)
            down = unshard(saved, "layers.0.down.weight", [16, 4], self.replicate)
            return up, down, reduce_grad(tangents_1, primals_2, "layers.0.down.weight", [16, 4], self.shard)

        gm = self.trace(
            backward,
            torch.zeros(2, 4),
            torch.zeros(2, 4),
            torch.zeros(8, 4),
            torch.zeros(16, 4),
            names="primals_1 primals_2 saved tangents_1",
        )
        name_shards(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, shard_layers_0_up_weight: "f32[2, 4]", shard_layers_0_down_weight: "f32[2, 4]", piece_layers_0_down_weight: "f32[8, 4]", tangents_1: "f32[16, 4]"):
    unshard: "f32[16, 4]" = fsdp_compile.unshard.default(shard_layers_0_up_weight, 'layers.0.up.weight', [16, 4], 'shard', offset = 0)
    unshard_1: "f32[16, 4]" = fsdp_compile.unshard.default(piece_layers_0_down_weight, 'layers.0.down.weight', [16, 4], 'replicate')
    reduce_grad: "f32[2, 4]" = fsdp_compile.reduce_grad.default(tangents_1, shard_layers_0_down_weight, 'layers.0.down.weight', [16, 4], 'shard')
    return (unshard, unshard_1, reduce_grad)
""",
        )
