"""Unmodified Hugging Face models: what their layers hold is more than tests of one idea each think of."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile.backend
from fsdp_compile import Capture, capture, fsdp_backend, fully_shard
from tests.common.distributed import RankPools, device_mesh
from tests.common.graphs import kinds

pytest.importorskip("transformers", reason="the test extra installs transformers; without it there is no Llama to try")


def build_llama(layers: int) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            use_cache=False,
        )
    )


def shard(model: Any) -> Any:
    mesh = device_mesh((dist.get_world_size(),)) if dist.get_world_size() > 1 else init_device_mesh("cpu", (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def assert_equal_gradients(model: nn.Module, reference: nn.Module) -> None:
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        error = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()  # type: ignore[attr-defined]
        assert error < 1e-5, name


def train_llama() -> None:
    world_size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(world_size)]

    reference = build_llama(2)
    losses = [reference(input_ids=batch, labels=batch).loss for batch in batches]
    (sum(losses) / world_size).backward()

    model = shard(build_llama(2))
    compiled = torch.compile(model, backend=fsdp_backend, fullgraph=True, options={"lowering": "aot_eager"})
    with capture() as captured:
        loss = compiled(input_ids=batches[rank], labels=batches[rank]).loss
        loss.backward()

    assert (len(captured.forward), len(captured.backward)) == (1, 1)
    torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=0)
    assert_equal_gradients(model, reference)


def test_llama_is_one_graph_with_the_references_gradients(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_llama)


def one_step(layers: int) -> tuple[Capture, list[Tensor]]:
    torch._dynamo.reset()
    model = shard(build_llama(layers))
    compiled = torch.compile(model, backend=fsdp_backend, fullgraph=True, options={"lowering": "aot_eager"})
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(1))
    with capture() as captured:
        loss = compiled(input_ids=ids, labels=ids).loss
        loss.backward()
    return captured, [loss.detach(), *(param.grad.full_tensor() for param in model.parameters())]


def test_folded_layers_change_nothing(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nine layers fold; graphs have the same operations, and results are the same to the bit."""
    folded = []
    fold_layers = fsdp_compile.backend.fold_layers
    monkeypatch.setattr(fsdp_compile.backend, "fold_layers", lambda gm: folded.append(fold_layers(gm)) or folded[-1])
    once, found = one_step(9)
    assert folded == [True]

    monkeypatch.setattr(fsdp_compile.backend, "fold_layers", lambda gm: False)
    one_by_one, expected = one_step(9)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    for ours, theirs in zip(once.forward + once.backward, one_by_one.forward + one_by_one.backward, strict=True):
        assert Counter(map(str, kinds(ours.graph_module.graph))) == Counter(map(str, kinds(theirs.graph_module.graph)))


def test_lengths_that_change(one_rank: None) -> None:
    """The second length makes the sizes symbols, of which a segment may see ``2 * s`` alone."""
    reference, model = build_llama(2), shard(build_llama(2))
    compiled = torch.compile(model, backend=fsdp_backend)
    for length in (24, 17, 9):
        ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(length))
        for system in (reference, compiled):
            system(input_ids=ids, labels=ids).loss.backward()
        assert_equal_gradients(model, reference)
