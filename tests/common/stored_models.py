"""Models that tests of stored graphs and frames compile twice, in the place of two processes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_backend, fully_shard
from passes.transforms.repeated_layers import MIN_LAYERS

from . import models
from .distributed import device_mesh
from .parity import shard_units


class WithNorm(nn.Module):
    """A model whose forward writes to buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.BatchNorm1d(8)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Attention(nn.Module):
    """Attention, recomputed in backward, without dropout or with it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))
        self.dropout = dropout

    def attend(self, block: nn.Module, x: Tensor) -> Tensor:
        query, key, value = block(x).view(1, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(query, key, value, dropout_p=self.dropout, is_causal=True)
        return found.transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(self.attend, block, x, use_reentrant=False)
        return x


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": models.MLP,
    "folded": partial(models.MLP, layers=1 + MIN_LAYERS),
    "checkpointed": partial(models.MLP, checkpointed=True),
    "checkpointed attention": Attention,
    "writes to buffers": WithNorm,
}


def compiled_model(build: Callable[[], nn.Module], lowering: str) -> tuple[Any, Callable[..., Any]]:
    """Return a model in float64 that is sharded over all ranks, and its compiled call, as a new process would."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = build().double()
    shard_units(model, device_mesh((dist.get_world_size(),)), fully_shard)
    return model, torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
