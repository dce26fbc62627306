"""torchao's float8 training, beside FSDP2 with the same. Scales are computed in the emulation that torchao has for CPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn

import fsdp_compile
from fsdp_compile import fsdp_backend
from tests.common.distributed import RankPools, device_mesh

pytest.importorskip("torchao")


@dataclass(frozen=True)
class Case:
    """How a model trains: whether weights travel in float8, and whether scales are computed ahead."""

    system: str
    gathers: bool = True
    ahead: bool = False
    reshard: bool | None = None


def build(case: Case, fully_shard: Callable[..., Any]) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=case.gathers, emulate=True)
    convert_to_float8_training(model, config=config)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=device_mesh((2,)), reshard_after_forward=case.reshard)
    return fully_shard(model, mesh=device_mesh((2,)))


def steps(model: Any, case: Case) -> list[Tensor]:
    from torchao.float8 import precompute_float8_dynamic_scale_for_fsdp

    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    run = model
    if case.system != "eager" and isinstance(model, fsdp_compile.FSDPModule):
        run = torch.compile(model, backend=fsdp_backend, options={"lowering": case.system})
    found = []
    for _ in range(4):
        loss = run(torch.randn(16, 32, generator=generator)).square().mean()
        loss.backward()
        found += [loss.detach(), *(param.grad.to_local().clone() for param in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
        if case.ahead:
            precompute_float8_dynamic_scale_for_fsdp(model)
    return found


def both(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """A job: FSDP2's losses and gradients of each step, and ours."""
    torch._dynamo.reset()
    expected = steps(build(case, torch.distributed.fsdp.fully_shard), case)
    return expected, steps(build(case, fsdp_compile.fully_shard), case)


@pytest.mark.parametrize(
    "case",
    [
        Case("eager"),
        Case("aot_eager"),
        pytest.param(Case("aot_eager", gathers=False), marks=pytest.mark.exhaustive),
        Case("aot_eager", ahead=True),
        pytest.param(Case("eager", ahead=True), marks=pytest.mark.exhaustive),
        pytest.param(Case("aot_eager", reshard=False, ahead=True), marks=pytest.mark.exhaustive),
        pytest.param(Case("inductor"), marks=pytest.mark.exhaustive),
        pytest.param(Case("inductor", ahead=True), marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_float8_training_equals_fsdp2(case: Case, rank_pools: RankPools) -> None:
    for expected, found in rank_pools[2].run(both, case=case):
        for ours, theirs in zip(found, expected, strict=True):
            # Where a sum is rounded otherwise, what it is rounded to in float8 may be the neighbour.
            scale = theirs.abs().max()
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=0.02 if case.system == "inductor" else 1e-5)
