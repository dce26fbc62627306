"""Checkpointed attention: states of random number generators are saved only for what is random."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.stored_graph import can_store
from fsdp_compile.debug import capture
from tests.common.distributed import fake_group
from tests.common.stored_models import Attention


@pytest.mark.skipif(not can_store(), reason="with this torch, states are saved for all attention")
@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_states_are_saved_for_dropout_alone(dropout: float) -> None:
    with fake_group(2), capture() as captured:
        model: Any = Attention(dropout)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=init_device_mesh("cpu", (2,)))
        torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(4, 8)).sum().backward()
    (forward,), (backward,) = captured.forward, captured.backward
    assert ("rng_state" in forward.readable()) == ("rng_state" in backward.readable()) == (dropout > 0)
    # It is recomputed. With dropout, it is no single operator on the CPU.
    assert backward.readable().count("_scaled_dot_product") >= 2 * len(model.blocks) or dropout
