"""GPTs whose layers differ in something, as those of real models do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .gpt import Size


@dataclass(frozen=True)
class Model:
    """A recipe for a GPT with layers of a kind.

    Attributes:
        size: the size.
        kind: one of :data:`KINDS`.
    """

    size: Size
    kind: str

    def build(self, device: torch.device) -> nn.Module:
        model = self.size.build(device)
        KINDS[self.kind](model)
        return model


class Adapted(nn.Module):
    """A frozen linear layer with a trainable product of two small matrices beside it."""

    def __init__(self, linear: Any, rank: int = 8) -> None:
        super().__init__()
        self.linear = linear.requires_grad_(False)
        self.first = nn.Linear(linear.in_features, rank, bias=False, device=linear.weight.device)
        self.second = nn.Linear(rank, linear.out_features, bias=False, device=linear.weight.device)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.second(self.first(x))


class Scaled(nn.Module):
    """A layer whose result has a factor of its own."""

    def __init__(self, layer: nn.Module, factor: float) -> None:
        super().__init__()
        self.layer = layer
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


class Checkpointed(nn.Module):
    """A layer that is recomputed in backward."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return found


def _freeze(model: Any) -> None:
    for layer in model.blocks[::2]:
        layer.requires_grad_(False)


def _adapt(model: Any) -> None:
    for layer in model.blocks[::2]:
        layer.up = Adapted(layer.up)


def _widen(model: Any) -> None:
    for layer in model.blocks[::2]:
        wide, narrow, device = 2 * layer.up.out_features, layer.up.in_features, layer.up.weight.device
        layer.up, layer.down = nn.Linear(narrow, wide, device=device), nn.Linear(wide, narrow, device=device)


def _scale(model: Any) -> None:
    model.blocks = nn.ModuleList(Scaled(layer, 1 + index / 64) for index, layer in enumerate(model.blocks))


def _checkpoint(model: Any) -> None:
    for index in range(0, len(model.blocks), 2):
        model.blocks[index] = Checkpointed(model.blocks[index])


def _collect(model: Any) -> None:
    def forward(self: Any, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        states = []
        for block in self.blocks:
            x = block(x)
            states.append(x)
        logits = self.lm_head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + torch.stack(states).square().mean()

    model.__class__ = type("Collecting", (type(model),), {"forward": forward})


#: By kind: changes a GPT whose layers are equal. "frozen", "adapters", "wider" and "checkpoints" change every other layer,
#: "factors" each, and "states" collects the hidden states of all layers.
KINDS: dict[str, Callable[[Any], None]] = {
    "equal": lambda model: None,
    "frozen": _freeze,
    "adapters": _adapt,
    "wider": _widen,
    "factors": _scale,
    "checkpoints": _checkpoint,
    "states": _collect,
}
