"""Speed, and bytes that ranks send."""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from tqdm import tqdm

from .gpt import GPT


def bytes_sent(model: GPT, args: argparse.Namespace, world: int) -> float:
    """Return the bytes of parameters and gradients that a rank sends per step, with ring algorithms, and without padding.

    In a ring, a rank sends (world - 1) / world of the bytes that are gathered, or reduced and scattered.
    """
    total = 0
    gathered_size = 2 if args.bf16 else 4
    for name, parameter in model.named_parameters():
        gathers = 2 if args.reshard_after_forward and name.startswith("blocks.") else 1
        total += parameter.numel() * (gathers * gathered_size + 4)  # gradients are reduced in float32
    return total * (world - 1) / world


@dataclass
class Meter:
    """The speed of this process's steps. The first one, which is mostly compilation, counts apart."""

    tokens_per_step: int
    bytes_per_step: float  # sent by each rank
    steps: int = 0
    first_seconds: float = 0.0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        self.steps += 1
        if self.steps == 1:
            self.first_seconds = seconds
        else:
            self.seconds += seconds

    @property
    def speed(self) -> str:
        if self.steps < 2:
            return "? tokens/s"
        return f"{self.tokens_per_step * (self.steps - 1) / self.seconds:.0f} tokens/s"

    @property
    def sent(self) -> str:
        return tqdm.format_sizeof(self.steps * self.bytes_per_step, "B")
