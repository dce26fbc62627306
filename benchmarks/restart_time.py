"""Time a restart: from the kill of a rank to the end of the next optimizer step.

    python benchmarks/restart_time.py
    python benchmarks/restart_time.py --layers 32 --repeat 3

torchrun starts the main job (``examples/train_gpt.py --resume auto``), which saves a checkpoint after each step. After a few
steps one rank is killed. torchrun ends the others and starts all again. The time ends when the next step has its checkpoint. So
it holds the start of Python, imports, loading of the checkpoint, a first step with warm caches, and one save.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from harness import report

_JOB = Path(__file__).parents[1] / "examples" / "train_gpt.py"
_SYSTEMS = ("fsdp2", "fsdp-compile")
#: Steps before the kill.
_STEPS = 3
_TIMEOUT_S = 600.0


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--width", type=int, default=128, metavar="N", help="default 128")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default 2")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="restarts of each system, of which the median; default 1"
    )
    report.add_flags(parser)
    return parser.parse_args(argv)


def time_restart(system: str, args: argparse.Namespace) -> float:
    """Return the seconds from the kill of the last rank to the checkpoint after the next step."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        job = ["--system", system, "--layers", args.layers, "--d-model", args.width, "--heads", 4, "--max-bytes", 1_000_000]
        job += ["--resume", "auto", "--save-every", 1, "--out", out]
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", 1]
        command = [*launcher, "--nproc-per-node", args.ranks, _JOB, *job]
        own = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(Path(folder, "cache"))}
        own["PYTHONPATH"] = os.pathsep.join([str(_JOB.parents[1]), own.get("PYTHONPATH", "")])
        log = Path(folder, "log")
        with log.open("w") as file, subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=own) as launched:
            try:
                wait_for(_STEPS, out, launched, log)
                os.kill(process_of(args.ranks - 1, launched.pid), signal.SIGKILL)
                began, before = time.monotonic(), len(checkpoints(out))
                wait_for(before + 1, out, launched, log)
                return time.monotonic() - began
            finally:
                launched.terminate()


def checkpoints(out: Path) -> list[Path]:
    """Return the whole checkpoints."""
    return [path for path in out.glob("**/step-*") if path.is_dir() and path.suffix != ".partial"]


def wait_for(count: int, out: Path, launched: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + _TIMEOUT_S
    while len(checkpoints(out)) < count:
        if launched.poll() is not None or time.monotonic() > end:
            raise RuntimeError(f"the job has ended, or is late:\n{log.read_text()[-3000:]}")
        time.sleep(0.02)


def process_of(rank: int, launcher: int) -> int:
    """Return the process of a rank, a child of torchrun's."""
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == launcher and f"RANK={rank}".encode() in (path / "environ").read_bytes().split(b"\0"):
                return int(path.name)
        except (FileNotFoundError, PermissionError, ProcessLookupError):
            continue
    raise RuntimeError(f"torchrun has no process of rank {rank}")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    runs: dict[str, list[float]] = {system: [] for system in _SYSTEMS}
    for _ in range(args.repeat):
        for system, seconds in runs.items():
            seconds.append(time_restart(system, args))
            print(f"{system}: {seconds[-1]:.1f} s", flush=True)
    print(f"\n{report.headline()}\n{args.ranks} ranks, {args.layers} layers, width {args.width}\n")
    rows = [[system, f"{statistics.median(seconds):.1f}"] for system, seconds in runs.items()]
    print(report.table(["from the kill to the next step, s", "median"], rows))
    report.write_json(args.json, runs=runs)


if __name__ == "__main__":
    main(sys.argv[1:])
