"""Code generated for CUDA on a machine without a GPU, for eight pretended H100s."""

from __future__ import annotations

import copy
import functools
import sys
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Shard

import fsdp_compile.cuda.ptx
from fsdp_compile import GatherPolicy, MixedPrecisionPolicy, comm_hooks, fully_shard
from fsdp_compile.compiler.cuda_graphs import find_device
from fsdp_compile.cuda.outline import Step, cuda_steps, triton_kernels
from fsdp_compile.cuda.pretend import require_triton
from fsdp_compile.debug import CapturedGraph, CudaCode, cuda_code, cuda_outline
from passes.fx.graph import is_collective
from passes.transforms.foreach_copies import MAX_FOREACH_BYTES

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.units_apart,
    pytest.mark.skipif(sys.platform != "linux", reason="Triton has wheels for Linux only"),
]

_COLLECTIVES = {"all_gather", "reduce_scatter", "all_reduce"}
_KERNELS = {"pointwise kernel", "reduction kernel", "foreach kernel"}
_DTYPE_BYTES = {"f32": 4, "bf16": 2, "f16": 2}


class Block(nn.Module):
    """A block with two weights of more than 1 MiB, also in half precision, and three small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))
        self.up, self.down = nn.Linear(512, 2048), nn.Linear(2048, 512)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x * self.scale)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(512, 64)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def generate(
    mesh_shape: tuple[int, ...] = (8,), prepare: Callable[[Any], None] = lambda _: None, **policy: torch.dtype
) -> CudaCode:
    """Generate the code of a training step of ``Model``."""

    def shard(model: Any, mesh: Any) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
        prepare(model)

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
    return cuda_code(model, x, mesh_shape, shard=shard)


def compress(model: Any) -> None:
    model.register_comm_hook(comm_hooks.LowPrecisionState(dist.group.WORLD), comm_hooks.bf16_compress_hook)


_CASES: dict[str, Callable[[], CudaCode]] = {
    "fp32": generate,
    "bf16": lambda: generate(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    "bf16 reduction": lambda: generate(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
    "fp16": lambda: generate(param_dtype=torch.float16, reduce_dtype=torch.float16),
    "hook": lambda: generate(prepare=compress),
    "hsdp": lambda: generate((2, 4), param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


@functools.cache
def code_of(case: str) -> CudaCode:
    return _CASES[case]()


def graphs_of(case: str) -> list[CapturedGraph]:
    code = code_of(case)
    assert (len(code.forward), len(code.backward)) == (1, 1)
    return [*code.forward, *code.backward]


every_case = pytest.mark.parametrize("case", _CASES)


def launches(steps: list[Step], buffer: str) -> list[Step]:
    """Return the steps that write into ``buffer`` and are no collectives."""
    return [step for step in steps if step.name not in _COLLECTIVES and any(w.buffer == buffer for w in step.writes)]


@every_case
def test_one_kernel_copies_in(case: str) -> None:
    for graph in graphs_of(case):
        steps = cuda_steps(graph)
        for collective in steps:
            if collective.name in ("all_gather", "reduce_scatter"):
                (sent,) = collective.reads
                writers = launches(steps, sent.buffer)
                # Runs of flat storage are gathered where they lie.
                assert len(writers) == 1 or (not writers and collective.name == "all_gather"), collective
                for writer in writers:
                    assert sum(value.numel for value in writer.writes if value.buffer == sent.buffer) == sent.numel
                    assert {value.dtype for value in writer.writes} == {sent.dtype}, "the cast is in the kernel"


def generate_rounded(dtype: torch.dtype, param_dtype: torch.dtype) -> CudaCode:
    """Generate the code of a training step that rounds all gathered parameters and reduced gradients."""

    def shard(model: Any, mesh: Any) -> None:
        mp_policy = MixedPrecisionPolicy(param_dtype, torch.float32)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=mp_policy, gather_policy=GatherPolicy(dtype))
        model.register_comm_hook(comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.QuantizedReduce(dtype))

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
    return cuda_code(model, x, (8,), shard=shard)


@pytest.mark.parametrize(
    ("dtype", "param_dtype"),
    [
        pytest.param(torch.int8, torch.float32, id="int8"),
        pytest.param(torch.float8_e4m3fn, torch.bfloat16, id="float8"),
    ],
)
def test_one_kernel_rounds_and_copies_in(dtype: torch.dtype, param_dtype: torch.dtype) -> None:
    code = generate_rounded(dtype, param_dtype)
    kernels = set()
    for graph, is_backward in ((code.forward[0], False), (code.backward[0], True)):
        steps = cuda_steps(graph)
        sending = [step for step in steps if step.name in ("all_gather", "all_to_all_single")]
        assert len(sending) == (5 if is_backward else 3)
        for collective in sending:
            (sent,) = collective.reads
            assert sent.dtype == "u8"
            writers = launches(steps, sent.buffer)
            assert sum(value.numel * 4 for step in writers for value in step.writes) == sent.numel, "each byte is written once"
            assert all(value.buffer == sent.buffer for step in writers for value in step.writes), "nothing else is written"
            (rounding,) = [step for step in writers if step.name == "reduction kernel"]
            kernels.add(rounding.source)
            (source,) = rounding.reads
            assert source.dtype == "f32"
            made = [step.name for value in (*writers[0].reads, *writers[-1].reads) for step in launches(steps, value.buffer)]
            if collective.name == "all_gather":
                assert len(writers) <= 2, "one for all that is sent as it is"
                assert not made, "shards are read where they lie"
            else:
                assert writers == [rounding]
                assert {*made} == {"foreach kernel"}, "the copy-in of the gradients"
    named = [kernel for graph in (*code.forward, *code.backward) for kernel in triton_kernels(graph) if kernel[1] in kernels]
    fsdp_compile.cuda.ptx.compile_kernels(named[:1] + named[-1:], ["sm_90"])


@pytest.mark.parametrize(("placement", "mesh_shape", "gathers", "reductions"), [("hybrid", (2, 4), 6, 6), ("ddp", (8,), 0, 3)])
def test_placements(placement: str, mesh_shape: tuple[int, ...], gathers: int, reductions: int) -> None:
    """Two blocks and a root are gathered and reduced in two steps each, or only all-reduced. All kernels compile."""

    def shard(model: Any, mesh: Any) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, placement=placement)

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
    code = cuda_code(model, x, mesh_shape, shard=shard, options={"min_bucket_bytes": 0})
    forward, backward = (Counter(step.name for step in cuda_steps(graph)) for graph in (code.forward[0], code.backward[0]))
    assert forward["all_gather"] == gathers
    assert backward["reduce_scatter"] + backward["all_reduce"] == reductions
    fsdp_compile.cuda.ptx.compile_kernels(triton_kernels(code.backward[0]), ["sm_90"])


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_formats_of_blocks(name: str) -> None:
    """All kernels compile, and a rank sends the bytes of the format."""
    policy = GatherPolicy(name)

    def shard(model: Any, mesh: Any) -> None:
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, gather_policy=policy)

    with torch.device("meta"):
        model, x = Model(), torch.ones(16, 512)
        shards = [torch.empty(param.shape[0] // 8, *param.shape[1:]) for param in model.blocks[0].parameters()]
    code = cuda_code(model, x, (8,), shard=shard)
    sent = [step.reads[0] for step in cuda_steps(code.forward[0]) if step.name == "all_gather"]
    expected = sum(policy.encoded_numel(piece.shape) if piece.dim() > 1 else piece.numel() * 4 for piece in shards)
    assert {value.dtype for value in sent} == {"u8"}
    # With the groups of what lies between two shards in storage.
    assert any(expected <= value.numel < 1.01 * expected for value in sent)
    fsdp_compile.cuda.ptx.compile_kernels(triton_kernels(code.forward[0]), ["sm_90"])


def copies_out(steps: list[Step], gather: Step) -> list[Step]:
    (gathered,) = gather.writes
    readers = [step for step in steps if any(value.buffer == gathered.buffer for value in step.reads)]
    assert all(step.name in _KERNELS for step in readers), "all parameters of these units are copied"
    return readers


@every_case
def test_copies_out_are_few_and_late(case: str) -> None:
    for graph in graphs_of(case):
        steps = cuda_steps(graph)
        for gather in (step for step in steps if step.name == "all_gather"):
            copies = copies_out(steps, gather)
            written = [value for step in copies for value in step.writes]
            assert len({value.buffer for value in written}) == len(written), "each byte is written once"
            assert sum(value.numel for value in written) <= gather.writes[0].numel, "each byte is read once"
            large = [value for value in written if value.numel * _DTYPE_BYTES[value.dtype] > MAX_FOREACH_BYTES]
            small = [step for step in copies if not any(value in large for value in step.writes)]
            assert len(small) <= 1
            assert len(copies) == len(large) + len(small)
            for step in copies:
                assert [value.buffer for value in step.reads] == [gather.writes[0].buffer]
            _check_weights_are_copied_once_and_late(steps, [step for step in copies if step not in small])


def _check_weights_are_copied_once_and_late(steps: list[Step], copies: list[Step]) -> None:
    for copied in copies:
        (value,) = copied.writes
        assert "YBLOCK" not in copied.source, "a transposition"
        readers = [step for step in steps if any(read.buffer == value.buffer for read in step.reads)]
        assert {step.name for step in readers} <= {"mm", "addmm"}, "no copy of the copy"
        between = steps[steps.index(copied) + 1 : steps.index(readers[0])]
        assert not any(step in copies for step in between), "it waits for its reader"


@every_case
def test_nothing_waits_for_the_gpu(case: str) -> None:
    for graph in graphs_of(case):
        assert {step.name for step in cuda_steps(graph)} <= {*_COLLECTIVES, *_KERNELS, "wait", "mm", "addmm"}
        inputs = [node.meta["val"] for node in graph.graph_module.graph.find_nodes(op="placeholder")]
        assert {value.device.type for value in inputs} == {"cuda"}


@every_case
def test_cuda_graphs_can_record_it(case: str) -> None:
    for graph in graphs_of(case):
        device, reason = find_device(graph.graph_module.graph)
        assert device is not None and device.type == "cuda", reason


@every_case
def test_collectives_keep_the_order_of_the_schedule(case: str) -> None:
    for graph in graphs_of(case):
        scheduled = [str(node.target) for node in graph.graph_module.graph.nodes if is_collective(node)]
        generated = [step.name for step in cuda_steps(graph) if step.name in {*_COLLECTIVES, "wait"}]
        assert [target.split(".")[-2].replace("_into_tensor", "").removesuffix("_tensor") for target in scheduled] == generated


@pytest.mark.parametrize(("case", "kernels"), [("fp32", 0), ("bf16", 0), ("bf16 reduction", 1), ("fp16", 1), ("hook", 1)])
def test_kernels_behind_a_reduction(case: str, kernels: int) -> None:
    """NCCL averages, so a kernel follows a reduction only for a cast or a division in low precision."""
    steps = cuda_steps(code_of(case).backward[0])
    reductions = [step for step in steps if step.name == "reduce_scatter"]
    assert len(reductions) == 3
    for reduction in reductions:
        readers = [step for step in steps if any(value.buffer == reduction.writes[0].buffer for value in step.reads)]
        assert len(readers) == kernels
        assert reduction.label.split()[1] == ("sum" if case in ("fp16", "hook") else "avg")


class TestOutlines(expecttest.TestCase):
    def test_bucketed_and_prefetched_forward(self) -> None:
        self.assertExpectedInline(
            cuda_outline(code_of("bf16").forward[0]),
            """\
pointwise kernel: f32[262528] -> bf16[262528]
all_gather blocks.0 over shard: bf16[262528] -> bf16[2100224]
pointwise kernel: f32[16, 512] -> bf16[16, 512]
pointwise kernel: f32[262528] -> bf16[262528]
all_gather blocks.1 over shard: bf16[262528] -> bf16[2100224]
wait all_gather blocks.0
foreach kernel: bf16[2100224] -> bf16[8, 64], bf16[8, 256], bf16[8, 64]
pointwise kernel: f32[4104] -> bf16[4104]
pointwise kernel: bf16[16, 512], bf16[8, 64] -> bf16[16, 512]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[2048], bf16[16, 512], bf16[512, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[16, 2048] -> bf16[16, 2048]
pointwise kernel: bf16[2100224] -> bf16[8, 131072]
addmm: bf16[512], bf16[16, 2048], bf16[2048, 512] -> bf16[16, 512]
pointwise kernel: bf16[16, 512], bf16[16, 512] -> bf16[16, 512]
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

    def test_parameters_that_are_cut_along_the_last_dimension(self) -> None:
        def shard(model: Any, mesh: Any) -> None:
            fully_shard(model, mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1))

        with torch.device("meta"):
            model, x = nn.Sequential(nn.Linear(64, 32), nn.Tanh(), nn.Linear(32, 64)), torch.ones(16, 64)
        self.assertExpectedInline(
            cuda_outline(cuda_code(model, x, (8,), shard=shard).forward[0]),
            """\
all_gather root over shard: f32[524] -> f32[4192]
wait all_gather root
pointwise kernel: f32[4192] -> f32[32, 8, 8]
foreach kernel: f32[4192] -> f32[8, 4], f32[8, 8]
mm: f32[16, 64], f32[64, 32] -> f32[16, 32]
pointwise kernel: f32[16, 32], f32[8, 4] -> f32[16, 32]
pointwise kernel: f32[4192] -> f32[64, 8, 4]
addmm: f32[64], f32[16, 32], f32[32, 64] -> f32[16, 64]
""",
        )

    def test_bf16_with_fp32_reduction(self) -> None:
        self.assertExpectedInline(
            cuda_outline(code_of("bf16").backward[0]),
            """\
pointwise kernel: f32[262464] -> bf16[262464]
all_gather blocks.1 over shard: bf16[262464] -> bf16[2099712]
mm: bf16[16, 64], bf16[64, 512] -> bf16[16, 512]
mm: bf16[64, 16], bf16[16, 512] -> bf16[64, 512]
reduction kernel: bf16[16, 64] -> bf16[1, 64]
foreach kernel: bf16[64, 512], bf16[64] -> f32[8, 4096], f32[8, 8]
reduce_scatter root avg over shard: f32[32832] -> f32[4104]
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
foreach kernel: bf16[512], bf16[2048, 512], bf16[2048], bf16[512, 2048], bf16[512] -> f32[8, 64], f32[8, 131072], f32[8, 256], f32[8, 131072], f32[8, 64]
reduce_scatter blocks.0 avg over shard: f32[2100224] -> f32[262528]
wait reduce_scatter blocks.1
wait reduce_scatter blocks.0
""",
        )

    def test_fp16_with_divide_factors(self) -> None:
        self.assertExpectedInline(
            reductions_of(code_of("fp16").backward[0]),
            """\
foreach kernel: f16[64, 512], f32[], f16[64] -> f16[8, 4096], f16[8, 8]
reduce_scatter root sum over shard: f16[32832] -> f16[4104]
foreach kernel: f16[512], f32[], f16[2048, 512], f16[2048], f16[512, 2048], f16[512] -> f16[8, 64], f16[8, 131072], f16[8, 256], f16[8, 131072], f16[8, 64]
reduce_scatter blocks.1 sum over shard: f16[2100224] -> f16[262528]
wait reduce_scatter root
pointwise kernel: f16[4104], f32[] -> f32[4104]
foreach kernel: f16[512], f32[], f16[2048, 512], f16[2048], f16[512, 2048], f16[512] -> f16[8, 64], f16[8, 131072], f16[8, 256], f16[8, 131072], f16[8, 64]
reduce_scatter blocks.0 sum over shard: f16[2100224] -> f16[262528]
wait reduce_scatter blocks.1
pointwise kernel: f16[262528], f32[] -> f32[262528]
wait reduce_scatter blocks.0
pointwise kernel: f16[262528], f32[] -> f32[262528]
""",
        )

    def test_traced_communication_hook(self) -> None:
        self.assertExpectedInline(
            reductions_of(code_of("hook").backward[0]),
            """\
foreach kernel: f32[64, 512], f32[64] -> bf16[8, 4096], bf16[8, 8]
reduce_scatter root sum over shard: bf16[32832] -> bf16[4104]
foreach kernel: f32[512], f32[2048, 512], f32[2048], f32[512, 2048], f32[512] -> bf16[8, 64], bf16[8, 131072], bf16[8, 256], bf16[8, 131072], bf16[8, 64]
reduce_scatter blocks.1 sum over shard: bf16[2100224] -> bf16[262528]
wait reduce_scatter root
pointwise kernel: bf16[4104] -> f32[4104]
foreach kernel: f32[512], f32[2048, 512], f32[2048], f32[512, 2048], f32[512] -> bf16[8, 64], bf16[8, 131072], bf16[8, 256], bf16[8, 131072], bf16[8, 64]
reduce_scatter blocks.0 sum over shard: bf16[2100224] -> bf16[262528]
wait reduce_scatter blocks.1
pointwise kernel: bf16[262528] -> f32[262528]
wait reduce_scatter blocks.0
pointwise kernel: bf16[262528] -> f32[262528]
""",
        )

    def test_replicas(self) -> None:
        self.assertExpectedInline(
            reductions_of(code_of("hsdp").backward[0]),
            """\
foreach kernel: bf16[64, 512], bf16[64] -> f32[4, 8192], f32[4, 16]
reduce_scatter root avg over shard: f32[32832] -> f32[8208]
wait reduce_scatter root
all_reduce root avg over replicate: f32[8208] -> f32[8208]
foreach kernel: bf16[512], bf16[2048, 512], bf16[2048], bf16[512, 2048], bf16[512] -> f32[4, 128], f32[4, 262144], f32[4, 512], f32[4, 262144], f32[4, 128]
reduce_scatter blocks.1 avg over shard: f32[2100224] -> f32[525056]
wait reduce_scatter blocks.1
all_reduce blocks.1 avg over replicate: f32[525056] -> f32[525056]
foreach kernel: bf16[512], bf16[2048, 512], bf16[2048], bf16[512, 2048], bf16[512] -> f32[4, 128], f32[4, 262144], f32[4, 512], f32[4, 262144], f32[4, 128]
reduce_scatter blocks.0 avg over shard: f32[2100224] -> f32[525056]
wait all_reduce root
wait all_reduce blocks.1
wait reduce_scatter blocks.0
all_reduce blocks.0 avg over replicate: f32[525056] -> f32[525056]
wait all_reduce blocks.0
""",
        )

    def test_sync_plans(self) -> None:
        self.assertExpectedInline(
            outline_of_plans(),
            """\
reduce
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
all_reduce root avg over replicate: f32[36] -> f32[36]
wait all_reduce root
reduce into param.grad
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
all_reduce root avg over replicate: f32[36] -> f32[36]
wait all_reduce root
pointwise kernel: f32[36], f32[36] -> f32[36]
no sync, first
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
no sync, later
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[16], f32[3, 16] -> f32[16]
pointwise kernel: f32[16, 8], f32[16, 8] -> f32[16, 8]
reduce what has accumulated
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16, 8], f32[16], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
all_reduce root avg over replicate: f32[36] -> f32[36]
wait all_reduce root
scatter only, first
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
scatter only, later
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
pointwise kernel: f32[36], f32[36] -> f32[36]
all-reduce with partial results
mm: f32[16, 3], f32[3, 8] -> f32[16, 8]
pointwise kernel: f32[3, 16] -> f32[1, 16]
foreach kernel: f32[16, 8], f32[16] -> f32[4, 32], f32[4, 4]
reduce_scatter root avg over shard: f32[144] -> f32[36]
wait reduce_scatter root
pointwise kernel: f32[36], f32[36] -> f32[36]
all_reduce root avg over replicate: f32[36] -> f32[36]
wait all_reduce root
""",
        )


def reductions_of(graph: CapturedGraph) -> str:
    """Return the outline of reductions, with their copy-ins and the kernels that read their results."""
    steps = cuda_steps(graph)
    reduced: set[str] = set()
    lines = []
    for step in reversed(steps):
        is_reduction = step.name in ("reduce_scatter", "all_reduce") or (step.name == "wait" and "all_gather" not in step.label)
        is_copy_in = step.name in _KERNELS and any(value.buffer in reduced for value in step.writes)
        if is_reduction:
            reduced.update(value.buffer for value in step.reads)
        lines.append((step, is_reduction or is_copy_in))
    made = {value.buffer for step in steps if step.name in ("reduce_scatter", "all_reduce") for value in step.writes}
    kept = [
        step
        for step, is_kept in reversed(lines)
        if is_kept or (step.name in _KERNELS and any(value.buffer in made for value in step.reads))
    ]
    return "".join(f"{step}\n" for step in kept)


_PLANS: dict[str, Callable[[Any], None]] = {
    "reduce": lambda model: None,
    "reduce into param.grad": lambda model: None,
    "no sync, first": lambda model: (model.zero_grad(), model.set_requires_gradient_sync(False)),  # type: ignore[dict-item]
    "no sync, later": lambda model: None,
    "reduce what has accumulated": lambda model: model.set_requires_gradient_sync(True),
    "scatter only, first": lambda model: (model.zero_grad(), model.set_requires_all_reduce(False)),  # type: ignore[dict-item]
    "scatter only, later": lambda model: None,
    "all-reduce with partial results": lambda model: model.set_requires_all_reduce(True),
}


def outline_of_plans() -> str:
    """Return outlines of the backward of one layer for each kind of plan, with two replicas of four shards."""

    def step(model: Any, x: Tensor) -> None:
        for prepare in _PLANS.values():
            prepare(model)
            model(x).sum().backward()

    code = cuda_code(nn.Linear(8, 16, device="meta"), torch.ones(3, 8), (2, 4), step=step)
    assert len(code.forward) == 1
    return "".join(f"{name}\n{cuda_outline(graph)}" for name, graph in zip(_PLANS, code.backward, strict=True))


@pytest.mark.parametrize("archs", [("sm_90",), ("sm_80", "sm_100")], ids=str)
def test_every_kernel_compiles_for_every_architecture(archs: tuple[str, ...]) -> None:
    code = code_of("fp16")
    compiled = code.ptx(*archs)
    assert len(compiled) == len(archs) * len(set(triton_kernels(code.forward[0]) + triton_kernels(code.backward[0])))
    for (_, arch), ptx in compiled.items():
        assert f".target {arch}" in ptx


def test_a_kernel_that_does_not_compile_is_named() -> None:
    name, source = triton_kernels(code_of("fp32").forward[0])[0]
    with pytest.raises(RuntimeError, match=f"(?s)The kernel {name} does not compile for sm_80: .*lode"):
        fsdp_compile.cuda.ptx.compile_kernels([(name, source.replace("tl.load", "tl.lode"))], ["sm_80"])


def state_of_torch() -> list[Any]:
    """Return the attributes that are replaced while code is generated."""
    from torch._dynamo.device_interface import get_interface_for_device
    from torch._inductor.runtime import triton_helpers
    from torch.utils._triton import has_triton
    from triton.runtime import driver

    functions = ("is_available", "current_device", "get_device_properties", "_lazy_init")
    return [
        *(getattr(torch.cuda, name) for name in functions),
        torch.cuda.is_available(),
        get_interface_for_device("cuda"),
        has_triton(),
        driver._active,  # type: ignore[attr-defined]
        torch.autograd._engine_run_backward,  # type: ignore[attr-defined]
        torch.autograd.graph._engine_run_backward,
        torch._inductor.graph.GraphLowering.save_output_code,
        triton_helpers.set_driver_to_gpu,
        torch._subclasses.FakeTensorMode.avoid_device_init,
        dist.is_initialized(),
        sys.excepthook,
        torch._inductor.config.compile_threads,
    ]


def test_nothing_stays() -> None:
    before = state_of_torch()
    model = nn.Linear(8, 16)
    weights = copy.deepcopy(model.state_dict())

    def fail(compiled: Any, x: Tensor) -> None:
        compiled(x).sum().backward()
        assert torch.cuda.is_available()
        raise KeyError("a user's error")

    with pytest.raises(KeyError, match="a user's error"):
        cuda_code(model, torch.ones(3, 8), (4,), step=fail)
    assert state_of_torch() == before
    cuda_code(model, torch.ones(3, 8), (4,))
    assert state_of_torch() == before
    assert type(model) is nn.Linear
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)
    # The model can be compiled and run for real afterwards.
    x = torch.ones(3, 8)
    torch.testing.assert_close(torch.compile(model, backend="aot_eager")(x), model(x))


class Broken(nn.Module):
    """A model with sharded parameters in its first graph, and none in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        torch._dynamo.graph_break()
        return x.relu().sum(-1)


class Scaled(nn.Module):
    """A model with a parameter without dimensions, which moves a tensor to the current device."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x + torch.ones(8).to("cuda")) * self.scale


def test_parameters_without_dimensions_and_the_current_device() -> None:
    code = cuda_code(Scaled(), torch.zeros(4, 8), (8,))
    assert len(code.forward) == len(code.backward) == 1


def test_a_graph_in_which_nothing_is_sharded_is_not_loaded_either() -> None:
    results: list[Tensor] = []

    def step(compiled: Any, x: Tensor) -> None:
        results.append(compiled(x))
        results[0].sum().backward()

    code = cuda_code(Broken(), torch.ones(3, 8), (4,), step=step)
    assert (len(code.forward), len(code.backward)) == (1, 1)
    assert (results[0].shape, results[0].device.type) == ((3,), "cuda")


def test_other_threads_are_refused() -> None:
    errors: list[BaseException] = []

    def intrude() -> None:
        try:
            cuda_code(nn.Linear(8, 16), torch.ones(3, 8), (4,))
        except BaseException as error:
            errors.append(error)

    def step(compiled: Any, x: Tensor) -> None:
        thread = threading.Thread(target=intrude)
        thread.start()
        thread.join()

    cuda_code(nn.Linear(8, 16), torch.ones(3, 8), (4,), step=step)
    (error,) = errors
    assert isinstance(error, RuntimeError)
    assert "in another thread" in str(error)


def test_triton_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton.compiler", None)
    with pytest.raises(RuntimeError, match="pip install"):
        require_triton()


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"arch": "sm_42"}, ValueError, "known are: sm_80, sm_90, sm_100"),
        ({"mesh_shape": (2, 2, 2)}, ValueError, "mesh_shape"),
        ({"mesh_shape": (0,)}, ValueError, "mesh_shape"),
        ({"model": nn.Linear}, TypeError, "an nn.Module"),
    ],
)
def test_arguments_are_checked(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        cuda_code(**{"model": nn.Linear(8, 16), "inputs": torch.ones(3, 8), "mesh_shape": (4,), **arguments})


def test_a_world_of_the_users_is_left_alone(fake_ranks: None) -> None:
    with pytest.raises(RuntimeError, match="there is one already"):
        cuda_code(nn.Linear(8, 16), torch.ones(3, 8), (4,))
    assert dist.get_world_size() == 8
