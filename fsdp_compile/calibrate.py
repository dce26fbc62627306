"""Measure this machine for ``options={"schedule": "auto"}``:

    torchrun --nproc-per-node 8 -m fsdp_compile.calibrate [--device cpu|cuda] [--output hardware.json]

Run it as training is run: on the same nodes, with as many ranks on each. It takes a few seconds and writes a JSON file, by
default where later compilations look for it. Every number is reduced over all ranks, of which the slowest counts, so that all
write, and schedule with, the same.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from passes.collectives import (
    finish_all_reduce,
    finish_gather,
    finish_reduce_scatter,
    group_size,
    start_all_reduce,
    start_gather,
    start_reduce_scatter,
    supports_averaging,
)
from passes.hardware import Hardware, Link, Links, dtype_name

from .machine import default_path, device_name

_REPEATS = 7
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _seconds(run: Callable[[], object], device: torch.device, repeats: int = _REPEATS) -> float:
    """The median time of a call, after two that do not count."""

    def once() -> float:
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start

    return statistics.median([once() for _ in range(repeats + 2)][2:])


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Times of the slowest rank, equal on all ranks."""
    times = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _product(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Flops of a product, and its time."""
    size = 4096 if device.type == "cuda" else 384
    a = torch.ones(size, size, dtype=dtype, device=device)
    return 2.0 * size**3, _seconds(lambda: a @ a, device)


def _compute(device: torch.device) -> tuple[dict[str, float], float, float]:
    """Flops a second by dtype, bytes a second, seconds a kernel."""
    products = [_product(dtype, device) for dtype in _DTYPES]
    source = torch.ones(1 << (28 if device.type == "cuda" else 23), device=device)
    target = torch.empty_like(source)
    small = torch.ones(8, device=device)
    many = 100

    def launch() -> None:
        for _ in range(many):
            small.add_(1)

    times = [seconds for _, seconds in products]
    times += [_seconds(lambda: target.copy_(source), device), _seconds(launch, device) / many]
    *product_times, copy_time, kernel_time = _slowest(times, device)
    rates = {
        dtype_name(dtype): flops / seconds for dtype, (flops, _), seconds in zip(_DTYPES, products, product_times, strict=True)
    }
    return rates, 2.0 * source.nbytes / copy_time, kernel_time


def _link(collective: Callable[[torch.Tensor], object], traffic: float, device: torch.device) -> Link:
    """Latency and rate of a collective of a buffer, of which each rank sends the part ``traffic``."""
    ranks = dist.get_world_size()
    small, large = ranks * 16, ranks * ((1 << 24) if device.type == "cuda" else (1 << 19))
    buffers = [torch.ones(numel, device=device) for numel in (small, large)]
    times = []
    for buffer in buffers:
        dist.barrier()
        times.append(_seconds(functools.partial(collective, buffer), device))
    latency, whole = _slowest(times, device)
    # A buffer that takes no longer than a small one says that the rate does not count.
    return Link(latency, traffic * buffers[1].nbytes / max(whole - latency, 1e-9))


def _links(group: str, device: torch.device) -> Links:
    """The collectives of a group, as graphs call them. Every rank is in one such group, of the same size."""
    ranks = group_size(group)
    part = (ranks - 1) / ranks
    op = "avg" if supports_averaging(group, device) else "sum"

    def gather(buffer: torch.Tensor) -> None:
        shard = buffer[: buffer.numel() // ranks]
        finish_gather(start_gather([shard], group), [buffer.shape], [0], group)

    def scatter(buffer: torch.Tensor) -> None:
        finish_reduce_scatter(start_reduce_scatter([buffer], dims=[0], group=group, op=op), group=group)

    def reduce(buffer: torch.Tensor) -> None:
        finish_all_reduce(start_all_reduce(buffer, group=group, in_flight=False, replicate_group=group, op=op))

    return Links(_link(gather, part, device), _link(scatter, part, device), _link(reduce, 2 * part, device))


def measure(device: torch.device) -> Hardware:
    """The numbers of the machine that the default process group runs on. Every rank calls this; all get the same.

    Raises:
        ValueError: there is one rank only, and no communication to measure.
    """
    world = dist.get_world_size()
    if world == 1:
        raise ValueError("One rank does not communicate. Run it as training is run: torchrun --nproc-per-node 2 or more.")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    rates, bytes_per_s, kernel_s = _compute(device)
    assert dist.group.WORLD is not None
    between = _links(dist.group.WORLD.group_name, device)
    within = between
    if 1 < per_node < world:
        nodes = [list(range(first, min(first + per_node, world))) for first in range(0, world, per_node)]
        group, _ = dist.new_subgroups_by_enumeration(nodes)
        within = _links(group.group_name, device)
    return Hardware(device_name(device.type), rates, bytes_per_s, kernel_s, per_node, within, between)


def main() -> None:
    """Measure, and write the file: one rank of each node."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, help="where to write the numbers; default: the user's cache folder")
    options = parser.parse_args()
    device = torch.device(options.device)
    local_rank = int(os.environ["LOCAL_RANK"])
    if device.type == "cuda":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    hardware = measure(device)
    path = options.output or default_path(device.type)
    if local_rank == 0:
        hardware.save(path)
    if dist.get_rank() == 0:
        print(f"{hardware}\nwritten to {path}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
