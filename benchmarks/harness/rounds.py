"""Rounds: systems take turns, and in each round each one runs a few steps after a barrier."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .ranks import collector_off, pin_to_core, progress
from .systems import System

#: Seconds that the steps of a system should take in a round.
ROUND_SECONDS = 1.5
_WARM_UP_STEPS = 3


def agreed_steps(seconds: float, device: torch.device) -> int:
    """Return how many steps of ``seconds`` each make a round. Rank 0 decides for all ranks."""
    steps = torch.tensor(max(1, round(ROUND_SECONDS / seconds)), device=device)
    dist.broadcast(steps, 0)
    return int(steps)


def warm_and_time(
    names: Iterable[str],
    build: Callable[[str], System],
    batches: Sequence[tuple[Tensor, Tensor]],
    rounds: int,
    steps: int | None,
    device: torch.device,
) -> dict[str, Any]:
    """Build systems on the CPU, train each a few steps, and time them in turns, on a core of this rank.

    Args:
        names: the names of the systems.
        build: builds a system by its name.
        batches: the microbatches of a step.
        rounds: the number of rounds.
        steps: the steps of a system in a round; None: as many as take about :data:`ROUND_SECONDS`.
        device: the device.

    Returns:
        "losses": the losses of the first steps, by system; "seconds": see :func:`time_rounds`.
    """
    systems: dict[str, System] = {}
    losses = {}
    for name in names:
        systems[name] = build(name)
        losses[name] = [systems[name].step(batches).item() for _ in range(_WARM_UP_STEPS)]
        progress(f"{name}: warm")
    pin_to_core()
    counts = {}
    for name, system in systems.items():
        system.step(batches)
        counts[name] = steps or agreed_steps(time_steps(system, batches, 1, device), device)
    return {"losses": losses, "seconds": time_rounds(systems, batches, counts, rounds, device)}


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
