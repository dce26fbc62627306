"""Sharding on top of tensor parallelism equals training in one process, and torch's FSDP2 on top of the same.

Four ranks, two by two; eight with replicas. Tolerances are those of ``test_parity.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import (
    Case,
    Run,
    compare,
    next_token_loss,
    token_batch,
    train_reference,
    train_sharded,
)


def _block_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """The blocks' two products, and of what stands in the root only the head."""
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.get_submodule("head"), mesh, ColwiseParallel(output_layouts=Replicate()))


class _Block(nn.Module):
    """A block of attention and products whose heads can be cut."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class _Decoder(nn.Module):
    def __init__(self, vocab: int = 16, dim: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """As torchtitan lays out a decoder: activations between the products are cut along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    gathered = {"input_layouts": Shard(1)}
    for block in model.get_submodule("blocks").children():
        plan = {
            "norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "query": ColwiseParallel(**gathered),
            "key": ColwiseParallel(**gathered),
            "value": ColwiseParallel(**gathered),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def _tied(model: nn.Module, mesh: DeviceMesh) -> None:
    _sequence_parallel(model, mesh)
    model.get_submodule("head").weight = model.get_submodule("embedding").weight


def _tied_decoder(**sizes: int) -> nn.Module:
    model = _Decoder(**sizes)
    model.head.weight = model.embedding.weight
    return model


_decoder = partial(
    Case,
    build=_Decoder,
    parallelize=_sequence_parallel,
    batch=token_batch,
    loss=next_token_loss,
    tensor_parallel=2,
    worlds=(4,),
)
_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
_TABLE = [
    Case("mlp", models.MLP, parallelize=_block_parallel, tensor_parallel=2, worlds=(4,)),
    _decoder("decoder", clip_norm=0.1, inductor_worlds=(4,)),
]
CASES = {case.name: case for case in _TABLE}


def run_case(name: str, system: str) -> Run:
    """Executed by every rank."""
    case = CASES[name]
    if system == "fsdp2":
        return train_sharded(case, torch.distributed.fsdp.fully_shard)
    from fsdp_compile import fsdp_backend, fully_shard

    if system == "eager":
        return train_sharded(case, fully_shard)
    return train_sharded(case, fully_shard, {"backend": fsdp_backend, "options": {"lowering": system}})


@functools.cache
def _reference(name: str, world: int) -> Run:
    return train_reference(CASES[name], world)


@pytest.fixture(scope="session")
def fsdp2_runs(rank_pools: RankPools) -> Callable[[str, int], list[Run]]:
    return functools.cache(lambda name, world: rank_pools[world].run(run_case, name=name, system="fsdp2"))


def _parameters() -> list[Any]:
    return [
        pytest.param(case, world, system, id=f"{case.name}-{world}-{system}")
        for case in _TABLE
        for world in case.worlds
        for system in ["fsdp2", "eager", "aot_eager"] + ["inductor"] * (world in case.inductor_worlds)
    ]


@pytest.mark.parametrize(("case", "world", "system"), _parameters())
def test_parity(
    case: Case, world: int, system: str, rank_pools: RankPools, fsdp2_runs: Callable[[str, int], list[Run]]
) -> None:
    theirs = fsdp2_runs(case.name, world)
    runs = theirs if system == "fsdp2" else rank_pools[world].run(run_case, name=case.name, system=system)
    if case.reference_rtol is not None:
        compare(runs, _reference(case.name, world // case.tensor_parallel), case.reference_rtol)
    if system != "fsdp2":
        compare(runs, theirs, case.lowered_rtol.get(system, case.fsdp2_rtol))
