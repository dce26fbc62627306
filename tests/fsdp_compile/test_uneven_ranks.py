"""Ranks that use different parts of a model in one step, with the same units called: they train as with FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn

from fsdp_compile import fully_shard
from tests.common.distributed import RankPools, device_mesh
from tests.common.models import Block


class TowersFirst(nn.Module):
    """One rank has an image, and reads the tower first; another has none, and runs the tower on a dummy, after the tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.towers = nn.ModuleList(Block(8, 12) for _ in range(2))
        self.head = nn.Linear(8, 11)

    def towered(self, image: Tensor) -> Tensor:
        for tower in self.towers:
            image = tower(image)
        return image

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        if variant:
            x = self.towered(image)
            x = x + self.tokens(tokens)
        else:
            x = self.tokens(tokens)
            x = x + 0.0 * self.towered(torch.zeros_like(image))
        return self.head(x)


class TwoHeads(nn.Module):
    """A head that only some ranks read, in the root's unit, and a parameter in a unit that all ranks call."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(11, 8)
        self.towers = nn.ModuleList(Gated() for _ in range(2))
        self.head = nn.Linear(8, 11)
        self.boxes = nn.Linear(8, 4)

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.tokens(tokens)
        for tower in self.towers:
            x = tower(x, variant)
        logits = self.head(x)
        return torch.cat([logits, self.boxes(x)], -1) if variant else logits


class Gated(Block):
    """A block with a gate that only some ranks read."""

    def __init__(self) -> None:
        super().__init__(8, 12)
        self.gate = nn.Linear(8, 8)

    def forward(self, x: Tensor, is_gated: bool = False) -> Tensor:
        x = super().forward(x)
        return x * torch.sigmoid(self.gate(x)) if is_gated else x


class OtherBranch(TowersFirst):
    """The ranks compute other things with the same parameters."""

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.towered(self.tokens(tokens))
        x = torch.tanh(x) if variant else x.sigmoid().square() - x
        return self.head(x)


class OtherSizes(TowersFirst):
    """One rank has no tokens at all."""

    def forward(self, tokens: Tensor, image: Tensor, variant: bool) -> Tensor:
        x = self.towered(self.tokens(tokens[:0] if variant else tokens))
        return self.head(x)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "another reader first": TowersFirst,
    "parameters that some ranks read": TwoHeads,
    "another branch": OtherBranch,
    "no tokens": OtherSizes,
}


def shard_all(model: nn.Module, shard: Callable[..., Any], mesh: Any) -> Any:
    for tower in model.towers:  # type: ignore[union-attr]
        shard(tower, mesh=mesh, reshard_after_forward=True)
    shard(model, mesh=mesh)
    model.set_reduce_scatter_unused_params(isinstance(model, TwoHeads))  # type: ignore[operator]
    return model


def train_unevenly(kind: str, mesh_shape: tuple[int, ...]) -> None:
    """Take steps with the library and with FSDP2, both uncompiled, and compare gradients. Runs on every rank."""
    rank, mesh = dist.get_rank(), device_mesh(mesh_shape)
    models = []
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        torch.manual_seed(0)
        models.append(shard_all(MODELS[kind]().double(), shard, mesh))
    ours, theirs = models
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        tokens, image = torch.randint(11, (3, 5)), torch.randn(3, 5, 8, dtype=torch.float64)
        # In the third step the ranks are alike, and in the fourth the other way round.
        variant = (rank % 2 == 1) if step < 2 else (True if step == 2 else rank % 2 == 0)
        for model in models:
            model(tokens, image, variant).square().sum().backward()
        for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
            assert (one.grad is None) is (other.grad is None), (step, name)
            if other.grad is not None:
                torch.testing.assert_close(
                    one.grad.full_tensor(), other.grad.full_tensor(), rtol=1e-9, atol=1e-12, msg=f"{step} {name}"
                )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("kind", MODELS)
def test_train_as_with_fsdp2(kind: str, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = torch.Size(mesh_shape).numel()
    rank_pools[world].run(train_unevenly, kind=kind, mesh_shape=mesh_shape)
