"""Ranks as processes: starting them, the process group between them, pinning them to cores."""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .link import LOOPBACK, Link, make_link

FAKE_WORLD_SIZE = 8
_SHOW_STACKS = signal.SIGUSR1
# Characters of a log that are shown: enough for the stacks of a rank that hangs.
_LOG_END = 20_000
_last_progress = time.perf_counter()


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Turn Python's garbage collector off inside the block. It would visit all models in the middle of a timed step."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


def add_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("ranks")
    group.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="default cpu: two ranks of one thread each")
    group.add_argument(
        "--group",
        choices=["gloo", "nccl", "fake"],
        help="gloo: two ranks, on cuda both on one GPU (default on cpu); nccl: one rank (default on cuda); "
        f"fake: one of {FAKE_WORLD_SIZE} pretended ranks, communication does nothing",
    )
    group.add_argument(
        "--link",
        default=LOOPBACK,
        metavar="RATE",
        help=f"{LOOPBACK!r} (default), or a rate such as 2gbit: the ranks in two network namespaces with a link of that rate "
        "between them, in each direction (needs root and iproute2)",
    )


def check_flags(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    args.group = args.group or ("nccl" if args.device == "cuda" else "gloo")
    if args.group == "nccl" and args.device == "cpu":
        parser.error("--group nccl needs --device cuda")
    if args.link != LOOPBACK and args.group != "gloo":
        parser.error("--link is for --group gloo, which has two ranks")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")


def describe(args: argparse.Namespace) -> str:
    size = FAKE_WORLD_SIZE if args.group == "fake" else world_size(args.group)
    return f"world size {size}, {args.device}, {args.group}" + (f", {args.link}" if args.group == "gloo" else "")


def world_size(group: str) -> int:
    """Return the number of processes that a kind of process group takes."""
    return 2 if group == "gloo" else 1


def is_rank() -> bool:
    """Return whether ``run_ranks`` started this process."""
    return "FSDP_BENCHMARK_OUT" in os.environ


def run_ranks(
    argv: Sequence[str],
    args: argparse.Namespace,
    environment: dict[str, str] | None = None,
    *,
    count: int | None = None,
    timeout_s: float = math.inf,
) -> list[Any]:
    """Run a script once for each rank. Return what the ranks passed to ``give_result``.

    All ranks are killed when one fails, and on any exception here.

    Args:
        argv: the script and its flags.
        args: has the flags of ``add_flags``.
        environment: variables that are added to this process's.
        count: the number of ranks; None: as many as the kind of process group takes.
        timeout_s: seconds that the ranks may take.

    Raises:
        RuntimeError: a rank failed or took too long. The message ends with the end of the rank's standard error.
    """
    count = count or world_size(args.group)
    # Without this, a termination signal would leave ranks and network namespaces behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    # Scripts with several ranks on a node have this flag.
    within = getattr(args, "link_within", LOOPBACK)
    with tempfile.TemporaryDirectory() as scratch, make_link(args.link, count, within) as link:
        ranks: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(count):
                of_rank = {**os.environ, "WORLD_SIZE": str(count), **(environment or {})}
                ranks.append(_start(rank, argv, Path(scratch), link, of_rank))
            _wait(ranks, Path(scratch), timeout_s)
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        return [json.loads((Path(scratch) / f"{rank}.json").read_text()) for rank in range(len(ranks))]


def _start(rank: int, argv: Sequence[str], scratch: Path, link: Link, environment: dict[str, str]) -> subprocess.Popen[bytes]:
    environment |= {"RANK": str(rank), "FSDP_BENCHMARK_OUT": str(scratch), "GLOO_SOCKET_IFNAME": link.interface}
    environment |= {"OMP_NUM_THREADS": "1"}
    with open(scratch / f"{rank}.log", "wb") as log:
        return subprocess.Popen(link.command(rank, [sys.executable, *argv]), env=environment, stderr=log)


def _wait(ranks: list[subprocess.Popen[bytes]], scratch: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while True:
        codes = [process.poll() for process in ranks]
        for rank, (process, code) in enumerate(zip(ranks, codes, strict=True)):
            late = code is None and time.monotonic() > deadline
            if code or late:
                if late:
                    # The rank writes its stacks to its log.
                    process.send_signal(_SHOW_STACKS)
                    time.sleep(1)
                log = (scratch / f"{rank}.log").read_text(errors="replace")
                what = f"has not ended after {timeout_s:.0f} s" if late else f"ended with {code}"
                raise RuntimeError(f"rank {rank} {what}:\n{log[-_LOG_END:]}")
        if None not in codes:
            return
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------- in a rank


def served(args: argparse.Namespace, measure: Callable[[argparse.Namespace, DeviceMesh], Any]) -> bool:
    """Run ``measure`` on the mesh of all ranks and hand its result over, in a process that ``run_ranks`` started.

    Returns:
        Whether ``run_ranks`` started this process; if not, nothing happened.
    """
    if not is_rank():
        return False
    faulthandler.register(_SHOW_STACKS)
    with process_group(args) as mesh:
        give_result(measure(args, mesh))
    return True


def give_result(result: Any) -> None:
    """Hand a result that JSON can hold to the process that started this rank."""
    (Path(os.environ["FSDP_BENCHMARK_OUT"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(result))


def progress(text: str) -> None:
    """Print a line with the seconds since the last one, on the first rank only."""
    global _last_progress
    now = time.perf_counter()
    if os.environ["RANK"] == "0":
        print(f"{text} ({now - _last_progress:.0f} s)", flush=True)
    _last_progress = now


@contextlib.contextmanager
def process_group(args: argparse.Namespace) -> Iterator[DeviceMesh]:
    """Make the process group of all ranks for the duration of the block, and yield its mesh."""
    torch.set_num_threads(1)
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if args.device == "cuda":
        torch.cuda.set_device(0)
    if args.group == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=FAKE_WORLD_SIZE)
    else:
        store = dist.FileStore(os.environ["FSDP_BENCHMARK_OUT"] + "/store", count)
        dist.init_process_group(args.group, store=store, rank=rank, world_size=count)
    try:
        yield init_device_mesh(args.device, (dist.get_world_size(),))
    finally:
        dist.destroy_process_group()


def pin_to_core() -> None:
    """Pin all threads of this process to the core of its rank, those of the process group included."""
    cores = sorted(os.sched_getaffinity(0))
    core = cores[int(os.environ["RANK"]) % len(cores)]
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), {core})
        except ProcessLookupError:
            continue  # It has ended since it was listed.


def measure_link(device: torch.device, megabytes: int) -> float:
    """Return the Gbit/s at which a rank receives in an all-gather of ``megabytes`` MiB: the best of three."""
    world = dist.get_world_size()
    shard = torch.ones(megabytes * 2**20 // 4 // world, device=device)
    gathered = torch.empty(shard.numel() * world, device=device)
    seconds = []
    for _ in range(4):
        dist.barrier()
        began = time.perf_counter()
        dist.all_gather_into_tensor(gathered, shard)
        gathered[-1].item()
        seconds.append(time.perf_counter() - began)
    return shard.nbytes * (world - 1) * 8 / min(seconds[1:]) / 1e9
