"""The option ``disable_passes``: what it leaves out does not run, and results are the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.options import OPTIONAL_PASSES
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units


def train(disabled: list[str]) -> tuple[set[str], list[Tensor]]:
    """Return the names of the passes that changed a graph, and the gradients of two microbatches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # Enough layers to be folded.
    model: Any = models.Transformer(layers=8).double()
    shard_units(model, device_mesh((2,)), fully_shard)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "disable_passes": disabled})
    with capture() as captured:
        for size in (3, 4):
            compiled(torch.arange(6).expand(size, 6)).square().sum().backward()
    return {each.name for each in captured.passes}, [param.grad.full_tensor() for param in model.parameters()]


def compare(disabled: str) -> tuple[bool, bool]:
    """Return whether the pass ran, by default and where it is disabled."""
    (usual, expected), (found, gradients) = (train(names) for names in ([], [disabled]))
    torch.testing.assert_close(gradients, expected)
    return disabled in usual, disabled in found


@pytest.mark.parametrize("disabled", OPTIONAL_PASSES)
def test_results_are_the_same_without(disabled: str, rank_pools: RankPools) -> None:
    assert rank_pools[2].run(compare, disabled=disabled) == [(True, False)] * 2
