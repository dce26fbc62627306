"""Rounds: systems take turns, and in each round each one runs a few steps after a barrier."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import collector_off
from .systems import System

#: Seconds that the steps of a system should take in a round.
ROUND_SECONDS = 1.5


def agreed_steps(seconds: float, device: torch.device) -> int:
    """Return how many steps of ``seconds`` each make a round. Rank 0 decides for all ranks."""
    steps = torch.tensor(max(1, round(ROUND_SECONDS / seconds)), device=device)
    dist.broadcast(steps, 0)
    return int(steps)


def time_rounds(
    systems: dict[str, System],
    batches: Sequence[tuple[Tensor, Tensor]],
    steps: dict[str, int],
    rounds: int,
    device: torch.device,
) -> dict[str, list[float]]:
    """Time all systems in turns. Return the seconds of a step of each system, in each round."""
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    with collector_off():
        for _ in range(rounds):
            for name, system in systems.items():
                gc.collect()
                seconds[name].append(time_steps(system, batches, steps[name], device))
    return seconds


def time_steps(system: System, batches: Sequence[tuple[Tensor, Tensor]], steps: int, device: torch.device) -> float:
    """Run consecutive steps. Return the mean seconds of a step."""
    dist.barrier()
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for _ in range(steps):
            system.step(batches)
        end.record()
        torch.cuda.synchronize()
        return begin.elapsed_time(end) / 1000 / steps
    began = time.perf_counter()
    for _ in range(steps):
        system.step(batches)
    return (time.perf_counter() - began) / steps


def slowest(of_ranks: Sequence[Sequence[float]]) -> list[float]:
    """Return the seconds of the slowest rank in each round: a round is over when its slowest rank is done."""
    return [max(seconds) for seconds in zip(*of_ranks, strict=True)]
