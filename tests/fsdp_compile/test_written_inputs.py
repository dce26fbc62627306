"""Inputs that a forward overwrites: backward has to see their values of before."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, spectral_norm

from fsdp_compile import fsdp_backend, fully_shard
from tests.common.parity import assert_same_gradients, compiled_beside_whole


def legacy() -> nn.Module:
    """Two layers with spectral norm, whose vectors are buffers that each forward updates."""
    return nn.Sequential(spectral_norm(nn.Linear(4, 6)), nn.Tanh(), spectral_norm(nn.Linear(6, 3)))


def parametrized() -> nn.Module:
    return nn.Sequential(
        parametrizations.spectral_norm(nn.Linear(4, 6)), nn.Tanh(), parametrizations.spectral_norm(nn.Linear(6, 3))
    )


class Codebook(nn.Module):
    """A table that follows what it is multiplied with, as vector quantisation with moving averages has it."""

    table: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("table", torch.rand(5, 6))

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        y = torch.tanh(x * self.table.clone())
        with torch.no_grad():
            self.table.mul_(0.9).add_(x, alpha=0.1)
        return y


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
@pytest.mark.parametrize("build", [legacy, parametrized, Codebook])
def test_gradients_are_those_of_the_values_before(build: Any, lowering: str, one_rank: None) -> None:
    options = {"backend": fsdp_backend, "options": {"lowering": lowering}}
    model, compiled, whole = compiled_beside_whole(build, fully_shard, options)
    for step in range(3):
        x = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        for forward in (compiled, whole):
            forward(x).square().sum().backward()
        assert_same_gradients(model, whole)
    for (name, one), other in zip(model.named_buffers(), whole.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12, msg=name)
