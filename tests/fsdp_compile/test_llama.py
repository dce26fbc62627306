"""An unmodified Hugging Face model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from fsdp_compile import capture, fsdp_backend, fully_shard
from tests.common.distributed import RankPools, device_mesh

pytest.importorskip("transformers", reason="the test extra installs transformers; without it there is no Llama to try")


def train_llama() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def build() -> Any:
        torch.manual_seed(0)
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=64,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                max_position_embeddings=64,
            )
        )

    world_size, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 64, (2, 16), generator=generator) for _ in range(world_size)]

    reference = build()
    losses = [reference(input_ids=batch, labels=batch).loss for batch in batches]
    (sum(losses) / world_size).backward()

    model = build()
    for layer in model.model.layers:
        fully_shard(layer, mesh=device_mesh((world_size,)))
    fully_shard(model, mesh=device_mesh((world_size,)))
    compiled = torch.compile(model, backend=fsdp_backend, fullgraph=True, options={"lowering": "aot_eager"})
    with capture() as captured:
        loss = compiled(input_ids=batches[rank], labels=batches[rank]).loss
        loss.backward()

    assert (len(captured.forward), len(captured.backward)) == (1, 1)
    torch.testing.assert_close(loss, losses[rank], rtol=1e-5, atol=0)
    for (name, ours), (_, theirs) in zip(model.named_parameters(), reference.named_parameters(), strict=True):
        error = (ours.grad.full_tensor() - theirs.grad).norm() / theirs.grad.norm()
        assert error < 1e-5, name


def test_llama_is_one_graph_with_the_references_gradients(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_llama)
