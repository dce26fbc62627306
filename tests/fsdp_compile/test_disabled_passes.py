"""The option ``disable_passes``: what it leaves out does not run, and results are the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.options import OPTIONAL_PASSES
from fsdp_compile.debug import capture
from passes.transforms.repeated_layers import MIN_LAYERS
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units


def train(disabled: list[str]) -> tuple[set[str], list[Tensor]]:
    """Return the names of the passes that changed a graph, and the gradients of two microbatches."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    # The first layer does not fold with the others: its input has no gradient.
    model: Any = models.MLP(layers=1 + MIN_LAYERS).double()
    shard_units(model, device_mesh((2,)), fully_shard)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "disable_passes": disabled})
    with capture() as captured:
        for size in (3, 4):
            compiled(torch.ones(size, 8, dtype=torch.float64)).square().sum().backward()
    return {each.name for each in captured.passes}, [param.grad.full_tensor() for param in model.parameters()]


def leave_out_each() -> None:
    """Check that each pass runs by default but not where it is disabled. Compare gradients. Runs on every rank."""
    usual, expected = train([])
    for name in OPTIONAL_PASSES:
        found, gradients = train([name])
        assert (name in usual, name in found) == (True, False), name
        torch.testing.assert_close(gradients, expected)


def test_results_are_the_same_without_a_pass(rank_pools: RankPools) -> None:
    rank_pools[2].run(leave_out_each)
