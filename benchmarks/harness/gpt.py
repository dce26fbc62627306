"""The model that is measured: the GPT of examples/train_gpt.py, with biases."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor, nn

from .fresh_module import fresh_module

_EXAMPLE = Path(__file__).parents[2] / "examples" / "helpers" / "gpt.py"


@dataclass(frozen=True)
class Size:
    """Size of the model, and of the batch of one rank and microbatch."""

    layers: int = 8
    width: int = 512
    heads: int = 4
    batch: int = 4
    sequence: int = 128

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser, *, without: Sequence[str] = (), **defaults: int) -> None:
        """Add a flag for each field but those in ``without``; ``defaults`` replaces those of the class."""
        sizes = parser.add_argument_group("model")
        for field in fields(Size):
            if field.name in without:
                continue
            default = defaults.get(field.name, field.default)
            sizes.add_argument(f"--{field.name}", type=int, default=default, metavar="N", help=f"default {default}")

    @staticmethod
    def parse(args: argparse.Namespace, **others: int) -> Size:
        """Return the size that the flags give. ``others`` are fields without a flag."""
        return Size(**others, **{field.name: getattr(args, field.name) for field in fields(Size) if hasattr(args, field.name)})

    def describe(self) -> str:
        model = f"GPT, {self.layers} layers, width {self.width}, {self.parameters / 1e6:.1f} M parameters"
        return f"{model}; {self.batch} x {self.sequence} tokens"

    def build(self, device: torch.device) -> nn.Module:
        """Build a model of this size."""
        return build_gpt(self, device)

    @property
    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(parameter.numel() for parameter in self.build(torch.device("meta")).parameters())


def build_gpt(size: Size, device: torch.device) -> nn.Module:
    """Build a GPT. Its forward takes tokens and targets, and returns the loss.

    Every call gives the same weights, but a new class (see ``fresh_module``).
    """
    torch.manual_seed(0)
    model = fresh_module(_EXAMPLE).GPT(size.layers, size.width, size.heads, size.sequence)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.LayerNorm)):
            # As in GPT-2. Biases make a unit many small parameters instead of a few large ones.
            module.bias = nn.Parameter(torch.zeros(module.weight.shape[0]))
    return model.to(device)


def make_batches(size: Size, rank: int, count: int, device: torch.device) -> list[tuple[Tensor, Tensor]]:
    """Return the microbatches of a rank: tokens and targets, ``[batch, sequence]`` each, int64."""
    random = torch.Generator().manual_seed(rank + 1)
    shape = (2, size.batch, size.sequence)
    pairs = [torch.randint(0, 256, shape, generator=random).to(device) for _ in range(count)]
    return [(tokens, targets) for tokens, targets in pairs]
