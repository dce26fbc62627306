"""torchao's float8 training equals FSDP2 with the same. On CPU, torchao computes scales by emulation."""

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
    """A way to train: with weights gathered in float8 (``gathers``), and with scales computed in advance (``ahead``)."""

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
    """Return FSDP2's losses and gradients of each step, and the library's. Runs on every rank."""
    torch._dynamo.reset()
    expected = steps(build(case, torch.distributed.fsdp.fully_shard), case)
    return expected, steps(build(case, fsdp_compile.fully_shard), case)


@pytest.mark.parametrize(
    "case",
    [
        Case("eager"),
        Case("aot_eager"),
        Case("aot_eager", gathers=False),
        Case("aot_eager", ahead=True),
        Case("eager", ahead=True),
        pytest.param(Case("aot_eager", reshard=False, ahead=True), marks=pytest.mark.night),
        Case("inductor"),
        pytest.param(Case("inductor", ahead=True), marks=pytest.mark.night),
    ],
    ids=str,
)
def test_float8_training_equals_fsdp2(case: Case, rank_pools: RankPools) -> None:
    for expected, found in rank_pools[2].run(both, case=case):
        for ours, theirs in zip(found, expected, strict=True):
            # A sum that is rounded differently may become the neighbouring float8 value.
            scale = theirs.abs().max()
            torch.testing.assert_close(ours / scale, theirs / scale, rtol=0, atol=0.02 if case.system == "inductor" else 1e-5)


class Adapted(nn.Module):
    """A layer with a frozen weight in four bits, and trained low-rank matrices beside it (QLoRA)."""

    def __init__(self) -> None:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4

        super().__init__()
        self.weight = nn.Parameter(to_nf4(torch.randn(256, 256) / 16), requires_grad=False)
        self.down, self.up = nn.Parameter(torch.randn(4, 256) / 16), nn.Parameter(torch.randn(256, 4) / 16)

    def forward(self, value: Tensor) -> Tensor:
        from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4

        return torch.tanh(linear_nf4(value, self.weight) + value @ self.down.T @ self.up.T)


def adapt(system: str) -> list[list[Tensor]]:
    """Return the losses and gradients of FSDP2, and those of the library. Runs on every rank."""
    torch._dynamo.reset()
    results = []
    for library in (torch.distributed.fsdp, fsdp_compile):
        torch.manual_seed(0)
        model: Any = nn.Sequential(Adapted(), Adapted())
        for layer in model:
            library.fully_shard(layer, mesh=device_mesh((2,)))
        library.fully_shard(model, mesh=device_mesh((2,)))
        trained = [param for param in model.parameters() if param.requires_grad]
        optimizer = torch.optim.Adam(trained, lr=0.01)
        run = model
        if library is fsdp_compile and system != "eager":
            run = torch.compile(model, backend=fsdp_backend, options={"lowering": system})
        generator = torch.Generator().manual_seed(torch.distributed.get_rank())
        found = []
        for _ in range(3):
            loss = run(torch.randn(4, 256, generator=generator)).square().mean()
            loss.backward()
            found += [loss.detach(), *(param.grad.to_local().clone() for param in trained)]
            optimizer.step()
            optimizer.zero_grad()
        results.append(found)
        assert type(model[0].weight._local_tensor).__name__ == "NF4Tensor"
    return results


@pytest.mark.parametrize("system", ["eager", "aot_eager", "inductor"])
def test_frozen_weights_in_four_bits_equal_fsdp2s(system: str, rank_pools: RankPools) -> None:
    for expected, found in rank_pools[2].run(adapt, system=system):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_quantized_weights_without_gathers_are_refused(fake_ranks: None) -> None:
    """Quantised weights that cannot be split are refused; FSDP2 fails with them, too."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = nn.Sequential(nn.Linear(32, 32))
    quantize_(model, Int8WeightOnlyConfig())
    with pytest.raises(NotImplementedError, match=r"0\.weight is a Int8Tensor.*ignored_params"):
        fsdp_compile.fully_shard(model)
    ignored = {param for param in model.parameters() if type(param.data).__name__ == "Int8Tensor"}
    assert fsdp_compile.fully_shard(model, ignored_params=ignored)(torch.ones(2, 32)).shape == (2, 32)
