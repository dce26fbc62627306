"""Graphs of sharding beside context and expert parallelism, for CUDA and in reports, with eight pretended ranks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness.fresh_module import fresh_module
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Shard
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from fsdp_compile import fully_shard
from fsdp_compile.debug import CapturedGraph, CudaCode, cuda_code, cuda_outline
from fsdp_compile.explain import explain

pytestmark = pytest.mark.units_apart

_EXAMPLE = Path(__file__).parents[2] / "examples/train_nd.py"


def communicates(graph: CapturedGraph) -> list[str]:
    """List a graph's collectives over the model's own dimensions, the waits, and the products in between."""
    lines = [line.split(":")[0] for line in cuda_outline(graph).splitlines()]
    own = re.compile(r".* over (cp|ep)|wait \w+$|bmm|.*flex_attention(_backward)?")
    return [found.group() for found in map(own.match, lines) if found]


def context_parallel(attend: Callable[..., Tensor], tokens: int) -> CudaCode:
    """Return the code of a block of which each of four ranks has a fourth of the sequence."""
    example = fresh_module(_EXAMPLE)
    example.WIDTH, example.HEADS = 64, 4

    def shard(block: Any, mesh: DeviceMesh) -> None:
        block.attention.attend = functools.partial(attend, cp=mesh["cp"])
        fully_shard(block, mesh=mesh["dp", "cp"]._flatten("dp_cp"))

    block = example.Block(False, example.attend_alone, None)
    return cuda_code(block, torch.empty(2, tokens, 64), {"dp": 2, "cp": 4}, shard=shard)


@pytest.mark.cuda
def test_ring_on_cuda() -> None:
    """Four parts take three hops in forward, and three for gradients in backward, in one graph each, as on every rank."""
    code = context_parallel(fresh_module(_EXAMPLE).attend_in_ring, 64)
    hop, part = ["all_to_all_single over cp", "wait all_to_all_single"], ["bmm"] * 2
    assert [communicates(graph) for graph in code.forward] == [[*hop, *part, *hop, *part, *hop, *part, *part]]
    assert [communicates(graph) for graph in code.backward] == [[*part * 4, *hop, *part * 2, *hop, *part * 2, *hop]]


def attend_with_blocks(q: Tensor, k: Tensor, v: Tensor, cp: DeviceMesh) -> Tensor:
    """Attend with all keys, gathered, in those blocks of this rank's scores that its mask leaves."""
    k, v = (
        DTensor.from_local(part, cp, [Shard(2)], run_check=False).full_tensor(grad_placements=[Partial()]) for part in (k, v)
    )
    first = cp.get_local_rank() * q.shape[2]
    mask = create_block_mask(
        lambda batch, head, query, key: first + query >= key, None, None, q.shape[2], k.shape[2], device=q.device
    )
    attended = flex_attention(q, k, v, block_mask=mask)
    assert isinstance(attended, Tensor)
    return attended


@pytest.mark.cuda
@pytest.mark.skipif(torch.__version__.startswith("2.11"), reason="its Inductor gives no source of a flex_attention")
def test_flex_attention_on_cuda() -> None:
    """Keys and values are gathered, their gradients scattered. Attention is an Inductor template kernel each way."""
    code = context_parallel(attend_with_blocks, 256)
    kernel, gather = "triton_tem_fused_flex_attention", ["all_gather over cp", "wait all_gather"]
    assert [communicates(graph) for graph in code.forward] == [[*gather, *gather, kernel]]
    scatter = ["reduce_scatter sum over cp", "wait reduce_scatter"]
    assert [communicates(graph) for graph in code.backward] == [[f"{kernel}_backward", *scatter, *scatter]]


MESH, TOKENS = {"edp": 2, "ep": 4}, 512


def experts() -> tuple[nn.Module, Tensor, Callable[[Any, DeviceMesh], None]]:
    """Return a mixture of four experts, a rank's input, and a function that shards the model."""
    example = fresh_module(_EXAMPLE)

    def shard(model: Any, mesh: DeviceMesh) -> None:
        example.split_experts(model.experts, mesh["ep"])
        model.ep = mesh["ep"]
        fully_shard(model.experts, mesh=mesh["edp"], shard_placement_fn=lambda _: Shard(1))
        model.experts.set_gradient_divide_factor(8.0)
        fully_shard(model, mesh=mesh["edp", "ep"]._flatten("dp"))

    with torch.device("meta"):
        return example.MixtureOfExperts(None), torch.empty(1, TOKENS, example.WIDTH), shard


@pytest.mark.parametrize("captures_scalars", [True, False])
def test_a_report_on_experts(captures_scalars: bool) -> None:
    """A report assumes the number of tokens of each expert, whether numbers are sizes in a graph or pass between two graphs."""
    model, tokens, shard = experts()
    with torch._dynamo.config.patch(capture_scalar_outputs=captures_scalars):
        evenly = functools.partial(explain, unknown_size=TOKENS // MESH["ep"])
        report = evenly(model, tokens, MESH, "h100", shard=shard, suggest=False)
    assert report.mesh == {"shard": 8, "ep": 4}
    # Tokens to the experts, results back, and their gradients; the expert of each token; the number of tokens of each expert.
    exchanged = 3 * TOKENS * 32 * 4 + TOKENS * 8 + 4 * 8
    # A rank has one expert. The router's four rows are padded to one for each of eight ranks.
    expert, router = 2 * 32 * 64 * 4, 8 * 32 * 4
    assert report.total.scattered_bytes == exchanged * 3 / 4 + expert / 2 + router * 7 / 8


@pytest.mark.cuda
def test_code_of_experts() -> None:
    model, tokens, shard = experts()
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        code = cuda_code(model, tokens, MESH, shard=shard)
    exchange = ["all_to_all_single over ep", "wait all_to_all_single"]
    assert [communicates(graph) for graph in (*code.forward, *code.backward)] == [exchange * 4, exchange]


def test_no_size_at_all() -> None:
    model, tokens, shard = experts()
    with pytest.raises(ValueError, match=r"unknown_size=0 must be at least 1"):
        explain(model, tokens, MESH, "h100", shard=shard, unknown_size=0)
