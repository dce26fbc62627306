"""Time the main job against PyTorch's FSDP2 with compiled blocks, side by side.

    python benchmarks/main_job.py --pairs 3 --steps 50

Runs examples/train_gpt.py on two ranks of one thread each; the systems take turns. The table has medians of the training speed
after the first step, and the time of the first step with compilation. Inductor's cache is empty in a system's first run only,
which has a column of its own. Every run trains the same model on the same batches; the script fails if final losses differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from harness import extras

ROOT = Path(__file__).parent.parent
SYSTEMS = ("fsdp-compile", "fsdp2")


def run(system: str, steps: int, flags: list[str], scratch: Path) -> dict[str, float]:
    """Run the main job once. Return tokens per second, seconds of the first step and the final loss."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(ROOT / "examples/train_gpt.py"), "--system", system, "--steps", str(steps), "--out", str(scratch / "out")]
    command += ["--val-batches", "1", "--sample-length", "0", "--save-every", "0", *flags]
    cache = scratch / f"inductor-{system}"
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_CACHE_DIR": str(cache)}
    printed = subprocess.run(command, env=environment, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    found = {
        key: re.search(pattern, printed)
        for key, pattern in {
            "tokens_per_second": r"speed:\s+(\d+) tokens/s",
            "first_step_seconds": r"first step:\s+(\d+) s",
            "final_loss": r"final loss:\s+([\d.]+)",
        }.items()
    }
    missing = [key for key, match in found.items() if match is None]
    if missing:
        raise RuntimeError(f"examples/train_gpt.py did not print {missing}:\n{printed[-2000:]}")
    return {key: float(match[1]) for key, match in found.items() if match is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description="Time the main job against FSDP2.", epilog="Other flags go to the main job.")
    parser.add_argument("--pairs", type=int, default=3, help="runs of each system")
    parser.add_argument("--steps", type=int, default=50, help="training steps of each run")
    parser.add_argument("--json", type=Path, help="file to write all runs to")
    args, flags = parser.parse_known_args()
    extras.need("tqdm", "matplotlib")

    runs: dict[str, list[dict[str, float]]] = {system: [] for system in SYSTEMS}
    with tempfile.TemporaryDirectory() as scratch:
        for _ in range(args.pairs):
            for system in SYSTEMS:
                runs[system].append(run(system, args.steps, flags, Path(scratch)))

    losses = {f"{result['final_loss']:.4f}" for results in runs.values() for result in results}
    if len(losses) > 1:
        raise RuntimeError(f"the systems disagree on the final loss: {losses}")
    print(f"torch {torch.__version__}, {args.steps} steps, {args.pairs} runs each, final loss {losses.pop()}")
    print(f"{'':14}{'tokens/s':>10}{'first step, cold':>18}{'warm':>8}")
    medians = {}
    for system, results in runs.items():
        medians[system] = statistics.median(result["tokens_per_second"] for result in results)
        warm = [result["first_step_seconds"] for result in results[1:]]
        warm_text = f"{statistics.median(warm):.0f} s" if warm else "-"
        print(f"{system:14}{medians[system]:>10.0f}{results[0]['first_step_seconds']:>16.0f} s{warm_text:>8}")
    ratios = [ours["tokens_per_second"] / theirs["tokens_per_second"] for ours, theirs in zip(*runs.values(), strict=True)]
    print(
        f"ratio of speeds, pair by pair: {' '.join(f'{ratio:.2f}' for ratio in ratios)}; median {statistics.median(ratios):.2f}"
    )
    if args.json:
        args.json.write_text(json.dumps(runs, indent=1))


if __name__ == "__main__":
    main()
