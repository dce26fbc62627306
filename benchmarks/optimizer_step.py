"""Time what the host does for an optimizer's step and for clipping, with torch's functions and with those over flat storage.

    python benchmarks/optimizer_step.py                          # 32 layers of width 32, as one of eight pretended ranks
    python benchmarks/optimizer_step.py --layers 4 --rounds 5

Parameters are so small that computing takes no time to speak of, and collectives do nothing: what is left is the host's time.
Systems take turns in one process. A turn is two steps of training, of which the second counts: caches of the processor have
seen the same model's step before, as in training, and not that of another system. Timed are ``clip_grad_norm_`` and
``AdamW.step``, on the gradients of a new backward. Reported are medians over the rounds. Of a backward, with the ``zero_grad``
ahead of it, the time is told as well, since gradients are made there; it is no part of the ratio.
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
    """A sharded model, what computes its loss, its parameters, what clips their gradients and steps them, and whether
    ``clip_and_step`` does both."""

    name: str
    loss: Callable[[], Any]
    parameters: list[nn.Parameter]
    clip: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    is_one_call: bool


class Seconds(NamedTuple):
    """Of one round. One call for both is a step."""

    backward: float
    clip: float
    step: float

    @property
    def together(self) -> float:
        """Of clipping and the step."""
        return self.clip + self.step


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default 15")
    Size.add_flags(parser, layers=32, width=32, batch=1, sequence=16)
    return parser.parse_args(argv)


def build_systems(size: Size) -> list[System]:
    """FSDP2 and this library with torch's functions, this library over flat storage, unit by unit, and over one buffer for all
    units, with two calls and with one; each foreach and fused."""
    mesh, cpu = init_device_mesh("cpu", (_WORLD_SIZE,)), torch.device("cpu")
    batch = make_batches(size, 0, 1, cpu)[0]
    systems = []
    for way in ("foreach", "fused"):
        options: dict[str, Any] = {way: True}
        for name in ("fsdp2", "ours", "ours-flat", "ours-one-buffer", "ours-one-call"):
            fully_shard: Any = torch.distributed.fsdp.fully_shard if name == "fsdp2" else fsdp_compile.fully_shard
            model = size.build(cpu)
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(model, mesh=mesh)
            forward: Any = model
            if name != "fsdp2":
                backend: Any = fsdp_compile.fsdp_backend
                forward = torch.compile(model, backend=backend, options={"lowering": "aot_eager"})
            if name in ("ours-flat", "ours-one-buffer", "ours-one-call"):
                options["one_buffer"] = name != "ours-flat"
                optimizer = fsdp_compile.flat_optimizer(torch.optim.AdamW, model.parameters(), **options)
                clip: Callable[..., Any] = fsdp_compile.clip_grad_norm_
            else:
                optimizer, clip = torch.optim.AdamW(model.parameters(), **options), torch.nn.utils.clip_grad_norm_
            loss = functools.partial(forward, *batch)
            systems.append(System(f"{name} {way}", loss, list(model.parameters()), clip, optimizer, name == "ours-one-call"))
    return systems


def run_once(system: System) -> Seconds:
    """A backward, clipping and a step."""
    began = time.perf_counter()
    system.optimizer.zero_grad()
    backward = time.perf_counter() - began
    loss = system.loss()
    began = time.perf_counter()
    loss.backward()
    backward += time.perf_counter() - began
    for param in system.parameters:
        # Pretended collectives leave what memory held, and arithmetic on denormal numbers is slow.
        param.grad.to_local().normal_()  # type: ignore[union-attr]
    began = time.perf_counter()
    if system.is_one_call:
        fsdp_compile.clip_and_step(system.optimizer, 1.0)
        return Seconds(backward, 0.0, time.perf_counter() - began)
    system.clip(system.parameters, 1.0)
    clipped = time.perf_counter()
    system.optimizer.step()
    return Seconds(backward, clipped - began, time.perf_counter() - clipped)


def measure(size: Size, rounds: int) -> dict[str, list[Seconds]]:
    """The times of all systems in turns, after two rounds that do not count."""
    systems = build_systems(size)
    seconds: dict[str, list[Seconds]] = {system.name: [] for system in systems}
    for number in range(rounds + 2):
        for system in systems:
            run_once(system)
            taken = run_once(system)
            if number >= 2:
                seconds[system.name].append(taken)
    return seconds


def render(seconds: dict[str, list[Seconds]]) -> str:
    """A table: medians in milliseconds, and the sum relative to that of FSDP2 with the same kernels."""
    lines = [f"{'':24}{'backward':>10}{'clip':>10}{'step':>10}{'together':>10}{'of FSDP2':>10}"]
    for name, rounds in seconds.items():
        yardstick = seconds[f"fsdp2 {name.split()[-1]}"]
        together = [taken.together for taken in rounds]
        ratio = statistics.median(own / other.together for own, other in zip(together, yardstick, strict=True))
        figures = [statistics.median(column) for column in (*zip(*rounds, strict=True), together)]
        lines.append(f"{name:24}" + "".join(f"{1e3 * value:7.2f} ms" for value in figures) + f"{ratio:10.2f}")
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
