"""Measure this machine for ``options={"schedule": "auto"}``:

    torchrun --nproc-per-node 8 -m fsdp_compile.calibrate [--device cpu|cuda] [--output hardware.json]

Run this command like the training: on the same nodes, with the same number of ranks. The calibration takes a few seconds and
writes a JSON file, by default where later compilations look for one. Every number is that of the slowest rank. So all nodes
have the same file, and all ranks choose the same schedule.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from passes.collectives.functional import (
    finish_all_reduce,
    finish_reduce_scatter,
    group_size,
    start_all_reduce,
    start_reduce_scatter,
    supports_averaging,
)
from passes.collectives.gather import finish_gather, start_gather
from passes.models.hardware import Hardware, HostLink, Link, Links, dtype_name

from .calibrate_cpu import cold_product, measure_cpu
from .compiler.machine import default_path, device_name
from .units.mesh import connect

_REPEATS = 7
# Pairs of times, of compute alone and beside a collective, whose median difference is taken.
_PAIRS = 15
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _once(run: Callable[[], object], device: torch.device) -> float:
    """Measure the seconds that one call takes, kernels included."""
    start = time.perf_counter()
    run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the median time of a call in seconds, after two calls that do not count."""
    return statistics.median([_once(run, device) for _ in range(_REPEATS + 2)][2:])


def _slowest(values: Sequence[float], device: torch.device) -> list[float]:
    """Return the largest of all ranks' values for each time, equal on all ranks."""
    times = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(times, op=dist.ReduceOp.MAX)
    return times.tolist()


def _square(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Make a matrix to multiply with itself: ``[4096, 4096]`` on a GPU, ``[384, 384]`` on a CPU."""
    size = 4096 if device.type == "cuda" else 384
    return torch.ones(size, size, dtype=dtype, device=device)


def _product(dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Measure a matrix product. Return its flops and its seconds."""
    if device.type == "cuda":
        a = _square(dtype, device)
        return 2.0 * len(a) ** 3, _seconds(lambda: a @ a, device)
    return cold_product(dtype, lambda run: _seconds(run, device))


def _compute(device: torch.device) -> tuple[dict[str, float], float, float]:
    """Measure flops per second by dtype, bytes per second of memory, and seconds per kernel."""
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


def _host_link(device: torch.device) -> HostLink:
    """Measure copies between a GPU and pinned memory, and within the host's memory.

    All ranks copy at the same time, as the ranks of a node share its memory.
    """
    small, large = (torch.ones(numel, device=device) for numel in (16, 1 << 26))
    pinned = [torch.empty(there.shape, pin_memory=True) for there in (small, large)]
    times = []
    for there, here in zip((small, large), pinned, strict=True):
        for target, source in ((there, here), (here, there)):
            dist.barrier()
            times.append(_seconds(functools.partial(target.copy_, source, non_blocking=True), device))
    pageable = torch.empty(large.shape), torch.ones(large.shape)
    times.append(_seconds(lambda: pageable[0].copy_(pageable[1]), torch.device("cpu")))
    *startups, to_device, to_host, computing = _slowest(times, device)
    rates = [large.nbytes / max(whole - startup, 1e-9) for whole, startup in zip((to_device, to_host), startups, strict=True)]
    return HostLink(max(startups), rates[0], rates[1], 2 * large.nbytes / computing)


@dataclass(frozen=True)
class _Collective:
    """A collective, as graphs call it.

    Attributes:
        start: starts the collective for a buffer, and returns the tensor in flight.
        finish: waits for the tensor in flight.
        traffic: the bytes that each rank sends, as a fraction of the buffer's bytes.
    """

    start: Callable[[torch.Tensor], torch.Tensor]
    finish: Callable[[torch.Tensor], object]
    traffic: float

    def link(self, device: torch.device) -> Link:
        """Measure the cost of the collective."""
        ranks = dist.get_world_size()
        small, large = ranks * 16, ranks * ((1 << 24) if device.type == "cuda" else (1 << 19))
        buffers = [torch.ones(numel, device=device) for numel in (small, large)]
        times = [seconds for buffer in buffers for seconds in self._alone_and_hidden(buffer, device)]
        latency, taken, whole, whole_taken = _slowest(times, device)
        sent = self.traffic * buffers[1].nbytes
        # If a large buffer takes no longer than a small one, the rate does not matter.
        rate = sent / max(whole - latency, 1e-9)
        return Link(latency, rate, max(taken, 0.0), max(whole_taken - taken, 0.0) / sent)

    def _alone_and_hidden(self, buffer: torch.Tensor, device: torch.device) -> tuple[float, float]:
        """Return the seconds that the collective takes alone, and those that it adds to matrix products beside it."""
        a = _square(torch.float32, device)
        dist.barrier()
        alone = _seconds(lambda: self.finish(self.start(buffer)), device)
        products = 1 + round(2 * alone / _seconds(lambda: a @ a, device))

        def compute() -> None:
            for _ in range(products):
                a @ a

        def hide() -> None:
            in_flight = self.start(buffer)
            compute()
            self.finish(in_flight)

        taken = []
        for _ in range(_PAIRS):
            # Alternate, so that both times see the same noise. After the barrier, no rank waits for another one.
            computing = _once(compute, device)
            dist.barrier()
            taken.append(_once(hide, device) - computing)
        return alone, statistics.median(taken)


def _links(group: str, device: torch.device) -> Links:
    """Measure the collectives of a group, as graphs call them. Every rank is in one of several groups of equal size."""
    connect(group, device)
    ranks = group_size(group)
    part = (ranks - 1) / ranks
    op = "avg" if supports_averaging(group, device) else "sum"

    gather = _Collective(
        lambda buffer: start_gather([buffer[: buffer.numel() // ranks]], group),
        lambda gathered: finish_gather(gathered, [gathered.shape], [0], group),
        part,
    )
    scatter = _Collective(
        lambda buffer: start_reduce_scatter([buffer], dims=[0], group=group, op=op),
        lambda scattered: finish_reduce_scatter(scattered, group=group),
        part,
    )
    reduce = _Collective(
        lambda buffer: start_all_reduce(buffer, group=group, in_flight=False, replicate_group=group, op=op),
        finish_all_reduce,
        2 * part,
    )
    return Links(gather.link(device), scatter.link(device), reduce.link(device))


def _growing(links: Links, pairs: Links, ranks: int) -> Links:
    """Return links whose latency grows evenly with the ranks: that of ``pairs`` for two, that of ``links`` for ``ranks``."""

    def grow(link: Link, pair: Link) -> Link:
        hop_s = max(0.0, (link.latency_s - pair.latency_s) / (ranks - 2))
        return replace(link, latency_s=link.latency_s - (ranks - 2) * hop_s, hop_s=hop_s)

    return Links(
        grow(links.all_gather, pairs.all_gather),
        grow(links.reduce_scatter, pairs.reduce_scatter),
        grow(links.all_reduce, pairs.all_reduce),
    )


def _links_of_parts(ranks: int, device: torch.device) -> Links:
    """Measure the collectives of groups of ``ranks`` neighbours each."""
    world = dist.get_world_size()
    parts = [list(range(first, min(first + ranks, world))) for first in range(0, world, ranks)]
    group, _ = dist.new_subgroups_by_enumeration(parts)
    return _links(group.group_name, device)


def measure(device: torch.device) -> Hardware:
    """Measure the machine that the default process group runs on. All ranks call this, and all get the same numbers.

    With an even number of ranks above two, pairs of ranks are measured, too: they show how startup grows with a group.

    Raises:
        ValueError: there is only one rank, and so no communication to measure.
    """
    world = dist.get_world_size()
    if world == 1:
        raise ValueError("One rank does not communicate. Run it as training is run: torchrun --nproc-per-node 2 or more.")
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", world))
    rates, bytes_per_s, kernel_s = _compute(device)
    assert dist.group.WORLD is not None
    between = _links(dist.group.WORLD.group_name, device)
    within = _links_of_parts(per_node, device) if 1 < per_node < world else between
    if world > 2 and world % 2 == 0:
        pairs = _links_of_parts(2, device)
        between = _growing(between, pairs, world)
        within = _growing(within, pairs, per_node) if 2 < per_node < world else (pairs if per_node == 2 else between)
    hardware = Hardware(device_name(device.type), rates, bytes_per_s, kernel_s, per_node, within, between)
    if device.type == "cuda":
        return replace(hardware, host=_host_link(device))
    return replace(hardware, **measure_cpu(lambda run: _seconds(run, device), lambda times: _slowest(times, device)))


def main() -> None:
    """Measure on all ranks, and write the file on one rank of each node."""
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
