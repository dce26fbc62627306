"""Code generated for CUDA on a machine without a GPU, for shards that are kept on the host."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor

from fsdp_compile import MixedPrecisionPolicy, fully_shard
from fsdp_compile.cuda.outline import Step, cuda_steps
from fsdp_compile.debug import CudaCode, cuda_code, cuda_outline
from tests.fsdp_compile.cuda.test_code import Model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.units_apart,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only"),
]


def generate(
    mesh_shape: tuple[int, ...] = (8,),
    prepare: Callable[[Any], None] = lambda _: None,
    step: Callable[..., None] | None = None,
    pin_memory: bool = True,
    **policy: torch.dtype,
) -> CudaCode:
    """Generate the code of a training step of a model on the host. Assert that its shards and gradients are on the host."""

    def shard(model: Any, mesh: Any) -> None:
        options = {"mp_policy": MixedPrecisionPolicy(**policy), "offload_policy": CPUOffloadPolicy(pin_memory)}
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, **options)
        assert all(param.is_cpu and param.to_local().is_cpu for param in model.parameters())
        prepare(model)

    def train(compiled: Any, x: torch.Tensor) -> None:
        compiled(x).sum().backward()
        gradients = [param.grad for param in compiled.parameters()]
        assert all(gradient.is_cpu and gradient.to_local().is_cpu for gradient in gradients)

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
    return cuda_code(model, x, mesh_shape, shard=shard, step=step or train)


def _microbatches(compiled: Any, x: torch.Tensor) -> None:
    """Run two microbatches. The second adds to gradients of the first."""
    for _ in range(2):
        compiled(x).sum().backward()


_BF16: dict[str, Any] = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_CASES: dict[str, Callable[[], CudaCode]] = {
    "bf16": lambda: generate(**_BF16),
    "fp32": generate,
    "hsdp": lambda: generate((2, 4), **_BF16),
    "microbatches": lambda: generate(step=_microbatches),
    "pageable": lambda: generate(pin_memory=False),
}


@functools.cache
def code_of(case: str) -> CudaCode:
    return _CASES[case]()


def copies(steps: list[Step], kind: str) -> list[Step]:
    return [step for step in steps if step.name == kind]


@pytest.mark.parametrize("case", _CASES)
def test_one_copy_for_a_bucket_and_direction(case: str) -> None:
    code = code_of(case)
    for graph in (*code.forward, *code.backward):
        steps = cuda_steps(graph)
        gathers = [step.label.split()[0] for step in copies(steps, "all_gather")]
        copied = copies(steps, "copy_to_device")
        assert [step.label for step in copied] == gathers
        # Shards lie in one run of flat storage, so nothing is cast or joined on the host.
        assert all(len(step.reads) == 1 and step.reads[0].dtype == step.writes[0].dtype == "f32" for step in copied)
        reductions = [step.label.split()[0] for step in copies(steps, "reduce_scatter")]
        assert sorted(step.label for step in copies(steps, "copy_to_host")) == sorted(reductions)
        names = [f"{step.name} {step.label}" for step in steps]
        for bucket, following in itertools.pairwise(gathers):
            # The next copy starts before the compute stream waits for this one.
            assert names.index(f"copy_to_device {following}") < names.index(f"wait copy_to_device {bucket}")
        for bucket in gathers:
            started = next(index for index, name in enumerate(names) if name.startswith(f"all_gather {bucket} "))
            assert names.index(f"wait copy_to_device {bucket}") < started
        # Only streams wait in the graph. The host waits for a copy to the host after the graph.
        assert not any(name.startswith("wait copy_to_host") for name in names)
        assert all(word not in (graph.code or "") for word in (".item()", "synchronize(", ".cpu(", "non_blocking"))


@pytest.mark.parametrize(("case", "pinned"), [("bf16", True), ("pageable", False)])
def test_gradients_arrive_in_memory_as_asked(case: str, pinned: bool) -> None:
    graph = code_of(case).backward[0].graph_module.graph
    nodes = graph.find_nodes(op="call_function", target=torch.ops.fsdp_host.copy_to_host.default)
    assert [node.args[1] for node in nodes] == [pinned] * 3


def test_parameters_on_the_device_are_refused() -> None:
    def load(model: Any) -> None:
        loaded: dict[str, Any] = {}
        for name, param in model.blocks[0].state_dict(keep_vars=True).items():
            local = torch.empty(param.to_local().shape, device="cuda")
            loaded[name] = nn.Parameter(DTensor.from_local(local, param.device_mesh, param.placements, run_check=False))
        message = r"Parameter blocks\.0\.scale was moved to cuda:0, but .* keeps it on the host, where it is again\. Move only"
        with pytest.raises(RuntimeError, match=message):
            model.blocks[0].load_state_dict(loaded, assign=True)
        assert model.blocks[0].scale is loaded["scale"]
        assert loaded["scale"].is_cpu
        assert loaded["scale"].to_local().is_cpu

    generate(prepare=load)


class TestOutline(expecttest.TestCase):
    def test_bf16(self) -> None:
        code = code_of("bf16")
        self.assertExpectedInline(
            cuda_outline(code.forward[0]),
            """\
copy_to_device blocks.0: f32[262528] -> f32[262528]
copy_to_device blocks.1: f32[262528] -> f32[262528]
wait copy_to_device blocks.0
pointwise kernel: f32[262528] -> bf16[262528]
all_gather blocks.0 over shard: bf16[262528] -> bf16[2100224]
pointwise kernel: f32[16, 512] -> bf16[16, 512]
copy_to_device root: f32[4104] -> f32[4104]
wait copy_to_device blocks.1
pointwise kernel: f32[262528] -> bf16[262528]
all_gather blocks.1 over shard: bf16[262528] -> bf16[2100224]
wait all_gather blocks.0
foreach kernel: bf16[2100224] -> bf16[8, 64], bf16[8, 256], bf16[8, 64]
pointwise kernel: bf16[16, 512], bf16[8, 64] -> bf16[16, 512]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[2048], bf16[16, 512], bf16[512, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[16, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[512], bf16[16, 2048], bf16[2048, 512] -> bf16[16, 512]
pointwise kernel: bf16[16, 512], bf16[16, 512] -> bf16[16, 512]
wait copy_to_device root
pointwise kernel: f32[4104] -> bf16[4104]
all_gather root over shard: bf16[4104] -> bf16[32832]
wait all_gather blocks.1
foreach kernel: bf16[2100224] -> bf16[8, 64], bf16[8, 256], bf16[8, 64]
pointwise kernel: bf16[16, 512], bf16[8, 64] -> bf16[16, 512]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[2048], bf16[16, 512], bf16[512, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[16, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[512], bf16[16, 2048], bf16[2048, 512] -> bf16[16, 512]
pointwise kernel: bf16[16, 512], bf16[16, 512] -> bf16[16, 512]
wait all_gather root
foreach kernel: bf16[32832] -> bf16[8, 4096], bf16[8, 8]
addmm: bf16[64], bf16[16, 512], bf16[512, 64] -> bf16[16, 64]
""",
        )
        self.assertExpectedInline(
            cuda_outline(code.backward[0]),
            """\
copy_to_device blocks.1: f32[262464] -> f32[262464]
copy_to_device blocks.0: f32[262400] -> f32[262400]
wait copy_to_device blocks.1
pointwise kernel: f32[262464] -> bf16[262464]
all_gather blocks.1 over shard: bf16[262464] -> bf16[2099712]
mm: bf16[16, 64], bf16[64, 512] -> bf16[16, 512]
mm: bf16[64, 16], bf16[16, 512] -> bf16[64, 512]
reduction kernel: bf16[16, 64] -> bf16[1, 64]
foreach kernel: bf16[64, 512], bf16[64] -> f32[8, 4096], f32[8, 8]
reduce_scatter root avg over shard: f32[32832] -> f32[4104]
wait copy_to_device blocks.0
pointwise kernel: f32[262400] -> bf16[262400]
all_gather blocks.0 over shard: bf16[262400] -> bf16[2099200]
wait all_gather blocks.1
pointwise kernel: bf16[2099712] -> bf16[8, 64]
pointwise kernel: bf16[2099712] -> bf16[8, 131072]
mm: bf16[16, 512], bf16[512, 2048] -> bf16[16, 2048]
reduction kernel: bf16[16, 2048], bf16[16, 2048] -> bf16[16, 2048], bf16[1, 2048]
pointwise kernel: bf16[2099712] -> bf16[8, 131072]
mm: bf16[16, 2048], bf16[2048, 512] -> bf16[16, 512]
reduction kernel: bf16[16, 512], bf16[16, 512], bf16[8, 64], bf16[16, 512] -> bf16[1, 512], bf16[16, 512], bf16[1, 512]
mm: bf16[512, 16], bf16[16, 2048] -> bf16[512, 2048]
mm: bf16[2048, 16], bf16[16, 512] -> bf16[2048, 512]
foreach kernel: bf16[512], bf16[2048, 512], bf16[2048], bf16[512, 2048], bf16[512] -> f32[8, 64], f32[8, 131072], f32[8, 256], f32[8, 131072], f32[8, 64]
reduce_scatter blocks.1 avg over shard: f32[2100224] -> f32[262528]
wait all_gather blocks.0
reduction kernel: bf16[16, 512] -> bf16[1, 512]
pointwise kernel: bf16[2099200] -> bf16[8, 131072]
mm: bf16[16, 512], bf16[512, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[2099200] -> bf16[8, 131072]
reduction kernel: bf16[16, 2048], bf16[16, 2048] -> bf16[16, 2048], bf16[1, 2048]
mm: bf16[16, 2048], bf16[2048, 512] -> bf16[16, 512]
reduction kernel: bf16[16, 512], bf16[16, 512] -> bf16[1, 512]
mm: bf16[512, 16], bf16[16, 2048] -> bf16[512, 2048]
mm: bf16[2048, 16], bf16[16, 512] -> bf16[2048, 512]
wait reduce_scatter root
copy_to_host root: f32[4104] -> f32[4104]
foreach kernel: bf16[512], bf16[2048, 512], bf16[2048], bf16[512, 2048], bf16[512] -> f32[8, 64], f32[8, 131072], f32[8, 256], f32[8, 131072], f32[8, 64]
reduce_scatter blocks.0 avg over shard: f32[2100224] -> f32[262528]
wait reduce_scatter blocks.1
copy_to_host blocks.1: f32[262528] -> f32[262528]
wait reduce_scatter blocks.0
copy_to_host blocks.0: f32[262528] -> f32[262528]
""",
        )
