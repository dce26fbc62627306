"""Code generated for CUDA on a machine without a GPU, for activations that wait on the host."""

from __future__ import annotations

import functools
import sys
from typing import Any

import expecttest
import pytest
import torch
from torch import nn

from fsdp_compile import fully_shard
from fsdp_compile.cuda.outline import Step, cuda_steps
from fsdp_compile.debug import CudaCode, cuda_code, cuda_outline
from passes.collectives.host_copies import fetch, offload
from tests.fsdp_compile.cuda.test_code import Model
from tests.fsdp_compile.test_offload_activations import Checkpointed

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.units_apart,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only"),
]


@functools.cache
def code() -> CudaCode:
    def shard(model: Any, mesh: Any) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
        model.blocks = nn.ModuleList([Checkpointed(block, "products") for block in model.blocks])
    return cuda_code(model, x, (8,), shard=shard)


def copies(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if step.name == kind]


def test_copies_are_asynchronous_and_the_host_does_not_wait() -> None:
    generated = code()
    forward, backward = (cuda_steps(graphs[0]) for graphs in (generated.forward, generated.backward))
    out, back = copies(forward, "offload"), copies(backward, "fetch")
    # The first product of each block, and the second of the last block, whose result the root reads.
    shapes = [(16, 2048), (16, 2048), (16, 512)]
    assert [step.reads[0].shape for step in out] == shapes
    assert sorted(step.writes[0].shape or () for step in back) == sorted(shapes)
    names = [step.name if step.name != "wait" else f"wait {step.label.split()[0]}" for step in (*forward, *backward)]
    assert names.count("wait offload") == names.count("wait fetch") == 3
    for graph in (*generated.forward, *generated.backward):
        assert all(word not in (graph.code or "") for word in (".item()", "synchronize(", ".cpu(", "non_blocking"))


def test_what_waits_is_on_the_host() -> None:
    generated = code()
    for graphs, target, device in ((generated.forward, offload, "cpu"), (generated.backward, fetch, "cuda")):
        nodes = graphs[0].graph_module.graph.find_nodes(op="call_function", target=target)
        assert [node.meta["val"].device.type for node in nodes] == [device] * 3
        assert [node.args[0].meta["val"].device.type for node in nodes] == [{"cpu": "cuda", "cuda": "cpu"}[device]] * 3


class TestOutline(expecttest.TestCase):
    def test_forward(self) -> None:
        self.assertExpectedInline(
            cuda_outline(code().forward[0]),
            """\
all_gather blocks.0 over shard: f32[262528] -> f32[2100224]
all_gather blocks.1 over shard: f32[262528] -> f32[2100224]
wait all_gather blocks.0
foreach kernel: f32[2100224] -> f32[8, 64], f32[8, 256], f32[8, 64]
pointwise kernel: f32[16, 512], f32[8, 64] -> f32[16, 512]
pointwise kernel: f32[2100224] -> f32[8, 131072]
addmm: f32[2048], f32[16, 512], f32[512, 2048] -> f32[16, 2048]
pointwise kernel: f32[2100224] -> f32[8, 131072]
pointwise kernel: f32[16, 2048] -> f32[16, 2048]
offload: f32[16, 2048] -> f32[16, 2048]
mm: f32[16, 2048], f32[2048, 512] -> f32[16, 512]
pointwise kernel: f32[16, 512], f32[16, 512], f32[512] -> f32[16, 512]
all_gather root over shard: f32[4104] -> f32[32832]
wait all_gather blocks.1
foreach kernel: f32[2100224] -> f32[8, 64], f32[8, 256], f32[8, 64]
pointwise kernel: f32[16, 512], f32[8, 64] -> f32[16, 512]
pointwise kernel: f32[2100224] -> f32[8, 131072]
addmm: f32[2048], f32[16, 512], f32[512, 2048] -> f32[16, 2048]
pointwise kernel: f32[2100224] -> f32[8, 131072]
pointwise kernel: f32[16, 2048] -> f32[16, 2048]
offload: f32[16, 2048] -> f32[16, 2048]
addmm: f32[512], f32[16, 2048], f32[2048, 512] -> f32[16, 512]
pointwise kernel: f32[16, 512], f32[16, 512] -> f32[16, 512]
offload: f32[16, 512] -> f32[16, 512]
wait all_gather root
foreach kernel: f32[32832] -> f32[8, 4096], f32[8, 8]
addmm: f32[64], f32[16, 512], f32[512, 64] -> f32[16, 64]
wait offload offload
wait offload offload_1
wait offload offload_2
""",
        )

    def test_backward(self) -> None:
        self.assertExpectedInline(
            cuda_outline(code().backward[0]),
            """\
all_gather blocks.1 over shard: f32[262464] -> f32[2099712]
fetch: f32[16, 512] -> f32[16, 512]
mm: f32[16, 64], f32[64, 512] -> f32[16, 512]
fetch: f32[16, 2048] -> f32[16, 2048]
wait fetch fetch
pointwise kernel: f32[16, 512], f32[16, 512] -> f32[16, 512]
mm: f32[64, 16], f32[16, 512] -> f32[64, 512]
reduction kernel: f32[16, 64] -> f32[1, 64]
foreach kernel: f32[64, 512], f32[64] -> f32[8, 4096], f32[8, 8]
reduce_scatter root avg over shard: f32[32832] -> f32[4104]
all_gather blocks.0 over shard: f32[262464] -> f32[2099712]
wait all_gather blocks.1
pointwise kernel: f32[2099712] -> f32[8, 131072]
mm: f32[16, 512], f32[512, 2048] -> f32[16, 2048]
pointwise kernel: f32[2099712] -> f32[8, 131072]
pointwise kernel: f32[2099712] -> f32[8, 64]
fetch: f32[16, 2048] -> f32[16, 2048]
wait fetch fetch_1
reduction kernel: f32[16, 2048], f32[16, 2048] -> f32[16, 2048], f32[16, 2048], f32[1, 2048]
mm: f32[16, 2048], f32[2048, 512] -> f32[16, 512]
reduction kernel: f32[16, 512], f32[16, 512], f32[512], f32[16, 512] -> f32[1, 512], f32[16, 512], f32[16, 512], f32[1, 512]
mm: f32[512, 16], f32[16, 2048] -> f32[512, 2048]
mm: f32[2048, 16], f32[16, 512] -> f32[2048, 512]
foreach kernel: f32[512], f32[2048, 512], f32[2048], f32[512, 2048], f32[512] -> f32[8, 64], f32[8, 131072], f32[8, 256], f32[8, 131072], f32[8, 64]
reduce_scatter blocks.1 avg over shard: f32[2100224] -> f32[262528]
wait all_gather blocks.0
pointwise kernel: f32[2099712] -> f32[8, 131072]
mm: f32[16, 512], f32[512, 2048] -> f32[16, 2048]
pointwise kernel: f32[2099712] -> f32[8, 131072]
pointwise kernel: f32[2099712] -> f32[8, 64]
wait fetch fetch_2
reduction kernel: f32[16, 512] -> f32[1, 512]
reduction kernel: f32[16, 2048], f32[16, 2048] -> f32[16, 2048], f32[16, 2048], f32[1, 2048]
mm: f32[16, 2048], f32[2048, 512] -> f32[16, 512]
reduction kernel: f32[16, 512], f32[512], f32[16, 512] -> f32[16, 512], f32[1, 512]
mm: f32[512, 16], f32[16, 2048] -> f32[512, 2048]
mm: f32[2048, 16], f32[16, 512] -> f32[2048, 512]
wait reduce_scatter root
foreach kernel: f32[512], f32[2048, 512], f32[2048], f32[512, 2048], f32[512] -> f32[8, 64], f32[8, 131072], f32[8, 256], f32[8, 131072], f32[8, 64]
reduce_scatter blocks.0 avg over shard: f32[2100224] -> f32[262528]
wait reduce_scatter blocks.1
wait reduce_scatter blocks.0
""",
        )
