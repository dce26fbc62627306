"""Inductor's overlap of tensor parallelism: products and collectives of a sequence-parallel block become single operators."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import expecttest
import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import CudaCode, capture, cuda_code, cuda_outline
from fsdp_compile.explain import explain
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import relative_error

pytestmark = pytest.mark.units_apart

WIDTH = 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def shard(model: Any, mesh: DeviceMesh, dim: int = 0) -> None:
    """Apply tensor parallelism to blocks whose inputs and outputs are sharded along dimension ``dim`` of the tokens."""
    for block in model:
        plan = {"up": ColwiseParallel(input_layouts=Shard(dim)), "down": RowwiseParallel(output_layouts=Shard(dim))}
        parallelize_module(block, mesh["tp"], plan)
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def code_of_a_block() -> CudaCode:
    with torch._inductor.config.patch(_micro_pipeline_tp=True):
        return cuda_code(nn.Sequential(Block()), torch.empty(64, WIDTH), {"dp": 4, "tp": 2}, shard=shard)


class TestOutline(expecttest.TestCase):
    @pytest.mark.cuda
    def test_block_on_cuda(self) -> None:
        """No collective over "tp" is left. Collectives over the shards stay, and the order is the same."""
        with symmetric_memory._test_mode():
            code = code_of_a_block()
        self.assertExpectedInline(
            cuda_outline(code.forward[0]) + "\n" + cuda_outline(code.backward[0]),
            """\
all_gather 0 over shard: f32[2048] -> f32[8192]
wait all_gather 0
foreach kernel: f32[8192] -> f32[4, 1024], f32[4, 1024]
fused_all_gather_matmul over tp: f32[64, 64], f32[64, 64] -> f32[128, 64], f32[128, 64]
pointwise kernel: f32[128, 64] -> f32[128, 64]
fused_matmul_reduce_scatter sum over tp: f32[128, 64], f32[64, 64] -> f32[64, 64]
pointwise kernel: f32[64, 64], f32[64, 64] -> f32[64, 64]

all_gather 0 over shard: f32[1024] -> f32[4096]
wait all_gather 0
fused_all_gather_matmul over tp: f32[64, 64], f32[64, 64] -> f32[128, 64], f32[128, 64]
mm: f32[64, 128], f32[128, 64] -> f32[64, 64]
pointwise kernel: f32[128, 64], f32[128, 64] -> f32[128, 64]
mm: f32[64, 128], f32[128, 64] -> f32[64, 64]
foreach kernel: f32[64, 64], f32[64, 64] -> f32[4, 1024], f32[4, 1024]
reduce_scatter 0 avg over shard: f32[8192] -> f32[2048]
wait reduce_scatter 0
""",
        )


def test_report() -> None:
    """Fusing keeps the number of flops, and removes the model's own collectives."""
    arguments: Any = (nn.Sequential(Block()), torch.empty(64, WIDTH), {"dp": 4, "tp": 2}, "h100")
    apart = explain(*arguments, shard=shard, suggest=False)
    with torch._inductor.config.patch(_micro_pipeline_tp=True), symmetric_memory._test_mode():
        fused = explain(*arguments, shard=shard, suggest=False)
    assert fused.flops == apart.flops
    # Fused are a gather and a scatter in forward and a gather in backward. Three collectives over the shards stay.
    assert (apart.total.collectives, fused.total.collectives) == (6, 3)


@pytest.mark.cuda
def test_a_group_without_symmetric_memory() -> None:
    warns = pytest.warns(UserWarning, match=r"not fused with collectives over tp, .*enable_symm_mem_for_group")
    with symmetric_memory._test_mode(set()), warns:
        code = code_of_a_block()
    assert "fused" not in cuda_outline(code.forward[0])


@contextlib.contextmanager
def fused_on_cpu() -> Iterator[None]:
    """Give the fused operators, which have kernels for CUDA only, their definitions in other operators on CPU."""
    library = torch.library.Library("symm_mem", "IMPL")
    library.impl("fused_all_gather_matmul", symmetric_memory._fused_all_gather_matmul_fallback, "CPU")
    library.impl("fused_matmul_reduce_scatter", symmetric_memory._fused_matmul_reduce_scatter_fallback, "CPU")
    nccl = mock.patch.object(dist, "is_nccl_available", lambda: True)
    try:
        with nccl, symmetric_memory._test_mode(), torch._inductor.config.patch(_micro_pipeline_tp=True):
            yield
    finally:
        library._destroy()


def seeded_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block())


def batch(rank: int) -> Tensor:
    return torch.randn(2, 8, WIDTH, generator=torch.Generator().manual_seed(rank))


def train_fused(dim: int) -> tuple[list[str], dict[str, Tensor]]:
    """Return the fused operators in the graphs of a step, and the full gradients. Runs on every rank."""
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model: Any = seeded_model()
    shard(model, mesh, dim)
    x = batch(mesh["dp"].get_local_rank()).chunk(2, dim)[mesh["tp"].get_local_rank()].contiguous()
    with fused_on_cpu(), capture() as captured:
        torch.compile(model, backend=fsdp_backend, fullgraph=True)(x).square().sum().backward()
    graphs = [graph.graph_module.graph for graph in (*captured.forward, *captured.backward)]
    called = [str(node.target) for node in itertools.chain(*(graph.nodes for graph in graphs))]
    gradients = {name: param.grad for name, param in model.named_parameters()}
    full = {name: grad.full_tensor() for name, grad in gradients.items() if isinstance(grad, DTensor)}
    return [name.split(".")[1] for name in called if "symm_mem" in name], full


@pytest.mark.cuda
@pytest.mark.parametrize("dim", [0, pytest.param(1, marks=pytest.mark.night)])
def test_gradients(dim: int, rank_pools: RankPools) -> None:
    """Gradients equal those of one process in float64. Every collective over "tp" that can be fused is fused."""
    model = seeded_model().double()
    sum(model(batch(rank).double()).square().sum() for rank in range(2)).div(2).backward()  # type: ignore[union-attr]
    gather, scatter = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"
    for called, gradients in rank_pools[4].run(train_fused, dim=dim):
        assert gradients.keys() == dict(model.named_parameters()).keys()
        for name, param in model.named_parameters():
            assert param.grad is not None and relative_error(gradients[name], param.grad, 2) < 1e-5
        assert called == [gather, scatter] * 2 + [gather, scatter, gather]
