"""Composable ``checkpoint``, with models that are compiled whole, by block, or not at all."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.graphs import operations
from tests.common.microbatches import full
from tests.common.parity import shard_units

_AOT_EAGER = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}
_LENGTHS = (4, 5, 7)


def build(shard: bool = True, checkpointed: bool = True, **options: Any) -> Any:
    torch.manual_seed(0)
    model = models.MLP(layers=2)
    for block in model.blocks if checkpointed else ():
        composable_checkpoint(block, **options)
    if shard:
        shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)
    return model


def train(model: nn.Module, **compile_options: Any) -> list[Tensor]:
    """Return the gradients of several lengths together."""
    forward: Any = torch.compile(model, **compile_options) if compile_options else model
    for rows in _LENGTHS:
        forward(torch.linspace(-1, 1, rows * 8).view(rows, 8)).square().sum().backward()
    return [full(param.grad) for param in model.parameters()]


@functools.cache
def expected() -> list[Tensor]:
    """Return the gradients of the model with whole parameters, neither checkpointed nor compiled."""
    return train(build(shard=False, checkpointed=False))


@pytest.mark.parametrize("backend", [pytest.param(fsdp_backend, marks=pytest.mark.inductor), "aot_eager", None])
def test_compiled_by_block(backend: Any, one_rank: None) -> None:
    """The tensors that backward finds lie in the memory of the shards."""
    model = build()
    for block in model.blocks if backend is not None else ():
        block.compile(backend=backend)
    torch.testing.assert_close(train(model), expected(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_compiled_whole(lowering: str, one_rank: None) -> None:
    """Graphs have the checkpoints inside: one graph for the first length, and one for others."""
    model = build()
    torch._dynamo.utils.counters.clear()
    gradients = train(model, backend=fsdp_backend, options={"lowering": lowering})
    torch.testing.assert_close(gradients, expected(), rtol=1e-5, atol=1e-5)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not torch._dynamo.utils.counters["graph_break"]


def test_another_backend(one_rank: None) -> None:
    torch.testing.assert_close(train(build(), backend="aot_eager"), expected(), rtol=1e-5, atol=1e-5)


def test_a_forward_that_is_compiled_inside_of_torchs_hooks(one_rank: None) -> None:
    """Torch's hooks checkpoint it already, so the graph must not."""
    model = build()
    for block in model.blocks:
        block.forward = torch.compile(block.forward, **_AOT_EAGER)
    with capture() as graphs:
        gradients = train(model)
    torch.testing.assert_close(gradients, expected(), rtol=1e-5, atol=1e-5)
    products = [str(node.target) for node in graphs.backward[0].graph_module.graph.nodes].count("aten.mm.default")
    assert products == 4, "two linear layers, each with the gradients of its input and its weight"


def _save_products() -> Any:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


@pytest.mark.parametrize(
    "options", [{}, {"preserve_rng_state": False, "context_fn": _save_products}], ids=["defaults", "options"]
)
def test_graphs_are_those_of_torchs_function(options: dict[str, Any], fake_ranks: None) -> None:
    """``torch.utils.checkpoint`` around the blocks, with the same arguments, makes the same graphs."""

    def graphs_of(model: Any) -> list[Any]:
        torch._dynamo.reset()
        with capture() as graphs:
            torch.compile(model, **_AOT_EAGER)(torch.ones(2, 8)).sum().backward()
        return [operations(graph.graph_module.graph) for graph in (*graphs.forward, *graphs.backward)]

    composable, by_hand = models.MLP(layers=2), models.MLP(layers=2)
    for block in composable.blocks:
        composable_checkpoint(block, **options)
    for block in by_hand.blocks:
        block.forward = functools.partial(torch.utils.checkpoint.checkpoint, block.forward, use_reentrant=False, **options)
    found = []
    for model in (composable, by_hand):
        for block in model.blocks:
            fully_shard(block)
        found.append(graphs_of(fully_shard(model)))
    assert found[0] == found[1]


def test_nothing_changes_where_sharding_fails(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    block = models.Block(4, 4)
    composable_checkpoint(block)
    before = [*block._forward_pre_hooks.values(), *block._forward_hooks.values()]

    def fail(self: Any) -> None:
        raise MemoryError("no memory for shards")

    monkeypatch.setattr("fsdp_compile.units.unit.Unit.allocate", fail)
    with pytest.raises(MemoryError):
        fully_shard(block)
    assert [*block._forward_pre_hooks.values(), *block._forward_hooks.values()] == before
    assert "forward" not in block.__dict__
