"""Time what the host does for an optimizer's step and for clipping, with torch's functions and with those over flat storage.

    python benchmarks/optimizer_step.py                          # 32 layers of width 32, as one of eight pretended ranks
    python benchmarks/optimizer_step.py --layers 4 --rounds 5

Parameters are so small that computing takes no time to speak of, and collectives do nothing: what is left is the host's time.
Systems take turns in one process: in each round each runs a backward, and then ``clip_grad_norm_`` and ``AdamW.step`` once,
which are timed: on gradients that were not there before, as in training. Reported are medians over the rounds.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from harness.gpt import Size, make_batches
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile

_WORLD_SIZE = 8


class System(NamedTuple):
    """A sharded model, what computes its loss, its parameters, and what clips their gradients and steps them."""

    name: str
    loss: Callable[[], Any]
    parameters: list[nn.Parameter]
    clip: Callable[..., Any]
    optimizer: torch.optim.Optimizer


class Seconds(NamedTuple):
    """Of one round."""

    clip: float
    step: float


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default 15")
    Size.add_flags(parser, layers=32, width=32, batch=1, sequence=16)
    return parser.parse_args(argv)


def build_systems(size: Size) -> list[System]:
    """FSDP2 and this library with torch's functions, and this library over flat storage; each foreach and fused."""
    mesh, cpu = init_device_mesh("cpu", (_WORLD_SIZE,)), torch.device("cpu")
    batch = make_batches(size, 0, 1, cpu)[0]
    systems = []
    for way in ("foreach", "fused"):
        options: dict[str, Any] = {way: True}
        for name, fully_shard in {
            "fsdp2": torch.distributed.fsdp.fully_shard,
            "ours": fsdp_compile.fully_shard,
            "ours-flat": fsdp_compile.fully_shard,
        }.items():
            model = size.build(cpu)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            forward: Any = model
            if name != "fsdp2":
                backend: Any = fsdp_compile.fsdp_backend
                forward = torch.compile(model, backend=backend, options={"lowering": "aot_eager"})
            if name == "ours-flat":
                optimizer = fsdp_compile.flat_optimizer(torch.optim.AdamW, model.parameters(), **options)
                clip: Callable[..., Any] = fsdp_compile.clip_grad_norm_
            else:
                optimizer, clip = torch.optim.AdamW(model.parameters(), **options), torch.nn.utils.clip_grad_norm_
            loss = functools.partial(forward, *batch)
            systems.append(System(f"{name} {way}", loss, list(model.parameters()), clip, optimizer))
    return systems


def run_once(system: System) -> Seconds:
    """Clip and step, behind a backward that is not timed."""
    system.optimizer.zero_grad()
    system.loss().backward()
    for param in system.parameters:
        # Pretended collectives leave what memory held, and arithmetic on denormal numbers is slow.
        param.grad.to_local().normal_()  # type: ignore[union-attr]
    began = time.perf_counter()
    system.clip(system.parameters, 1.0)
    clipped = time.perf_counter()
    system.optimizer.step()
    return Seconds(clipped - began, time.perf_counter() - clipped)


def measure(size: Size, rounds: int) -> dict[str, list[Seconds]]:
    """The times of all systems in turns, after two rounds that do not count."""
    systems = build_systems(size)
    seconds: dict[str, list[Seconds]] = {system.name: [] for system in systems}
    for number in range(rounds + 2):
        for system in systems:
            taken = run_once(system)
            if number >= 2:
                seconds[system.name].append(taken)
    return seconds


def render(seconds: dict[str, list[Seconds]]) -> str:
    """A table: medians in milliseconds, and the sum relative to that of FSDP2 with the same kernels."""
    lines = [f"{'':20}{'clip':>10}{'step':>10}{'together':>10}{'of FSDP2':>10}"]
    for name, rounds in seconds.items():
        yardstick = seconds[f"fsdp2 {name.split()[-1]}"]
        together = [sum(taken) for taken in rounds]
        ratio = statistics.median(own / sum(other) for own, other in zip(together, yardstick, strict=True))
        figures = [statistics.median(column) for column in (*zip(*rounds, strict=True), together)]
        lines.append(f"{name:20}" + "".join(f"{1e3 * value:7.2f} ms" for value in figures) + f"{ratio:10.2f}")
    return "\n".join(lines)


def main(argv: Sequence[str]) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    args = parse_args(argv)
    size = Size.parse(args)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=_WORLD_SIZE)
    print(size.describe())
    print(render(measure(size, args.rounds)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
