"""Time the host in an optimizer's step and in clipping, with torch's functions and with those over flat storage.

    python benchmarks/optimizer_step.py                          # 32 layers of width 32, as one of eight pretended ranks
    python benchmarks/optimizer_step.py --layers 4 --rounds 5

Parameters are small enough to make computation negligible, and collectives do nothing: only the host's time remains. Systems
take turns in one process. A turn is two training steps, of which the second counts: the processor's caches then hold this
system's step, as in training, and not another system's. Timed are ``clip_grad_norm_`` and ``AdamW.step``, on the gradients of a
new backward. The table has medians over the rounds. It also has the time of ``zero_grad`` and backward, where gradients are
made; the ratio does not include that time.
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
    """A sharded model with its optimizer.

    Attributes:
        name: the system and its kernels, "foreach" or "fused".
        loss: runs a forward and returns the loss.
        parameters: of the model.
        clip: takes parameters and the largest norm, and clips gradients.
        optimizer: steps the parameters.
        is_one_call: True if ``clip_and_step`` clips and steps.
    """

    name: str
    loss: Callable[[], Any]
    parameters: list[nn.Parameter]
    clip: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    is_one_call: bool


class Seconds(NamedTuple):
    """Seconds of one round. If one call clips and steps, ``clip`` is 0 and ``step`` has both."""

    backward: float
    clip: float
    step: float

    @property
    def together(self) -> float:
        """The seconds of clipping and the step."""
        return self.clip + self.step


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default 15")
    Size.add_flags(parser, layers=32, width=32, batch=1, sequence=16)
    return parser.parse_args(argv)


def build_systems(size: Size) -> list[System]:
    """Build all systems, each with foreach and with fused kernels.

    With torch's functions: FSDP2 and this library. Over flat storage: this library unit by unit, and over one buffer for all
    units, with two calls and with one.
    """
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
    """Run forward, backward, clipping and the optimizer's step. Return their seconds, without forward."""
    began = time.perf_counter()
    system.optimizer.zero_grad()
    backward = time.perf_counter() - began
    loss = system.loss()
    began = time.perf_counter()
    loss.backward()
    backward += time.perf_counter() - began
    for param in system.parameters:
        # Pretended collectives leave memory unset. It may hold denormal numbers, on which arithmetic is slow.
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
    """Time all systems in turns, after two rounds that do not count. Return the rounds of each system."""
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
    """Return a table: medians in milliseconds, and clipping with the step relative to FSDP2 with the same kernels."""
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
