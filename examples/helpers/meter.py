"""Speed, and bytes that ranks send."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from tqdm import tqdm

from .gpt import GPT


def graph_bytes(graph_modules: Iterable[torch.fx.GraphModule], world: int) -> float:
    """Return the bytes that a rank sends when it runs these graphs, with ring algorithms.

    In a ring, a rank sends (world - 1) / world of the bytes that are gathered, or reduced and scattered.
    An all-reduce is one of each.
    """
    ops = torch.ops._c10d_functional
    total = 0
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            if node.target == ops.all_gather_into_tensor.default:
                total += node.meta["val"].nbytes
            elif node.target in (ops.reduce_scatter_tensor.default, ops.all_to_all_single.default):
                total += node.args[0].meta["val"].nbytes
            elif node.target == ops.all_reduce.default:
                total += 2 * node.args[0].meta["val"].nbytes
    return total * (world - 1) / world


def estimated_bytes(model: GPT, args: argparse.Namespace, world: int) -> float:
    """Estimate the bytes that a rank sends per step with FSDP2, which has no graph to count in; without padding."""
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
    bytes_per_step: float = 0.0  # sent by each rank
    estimated: bool = False
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
        size = tqdm.format_sizeof(self.steps * self.bytes_per_step, "B")
        return f"{size} (estimated)" if self.estimated else size


def count_bytes(first_step: Callable[[], float], model: GPT, args: argparse.Namespace) -> tuple[float, float, bool]:
    """Run the first step. Return its loss, the bytes a rank sends per step, and whether the bytes are an estimate.

    Only the model's own communication is counted, not the few scalars of the gradient norm and the loss.
    """
    world = dist.get_world_size()
    if args.system == "fsdp2":
        return first_step(), estimated_bytes(model, args, world), True
    from fsdp_compile.debug import capture

    with capture() as captured:
        loss = first_step()
    records = [*captured.forward, *captured.backward]
    return loss, graph_bytes((record.graph_module for record in records), world), False
