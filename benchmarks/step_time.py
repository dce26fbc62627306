"""Time a training step of each system, all in one run.

    python benchmarks/step_time.py                                          # two ranks on CPU, Gloo over loopback
    python benchmarks/step_time.py --link 2gbit                             # over a link of 2 Gbit/s in each direction
    python benchmarks/step_time.py --layers 32 --width 128
    python benchmarks/step_time.py --link 2gbit --microbatches 4 --accumulate unsharded --keep-unsharded
    python benchmarks/step_time.py --device cuda --group fake               # one GPU as one of eight

Every system trains the same GPT in the same processes. After a warm-up, in which losses are compared, the systems take turns:
in each round each one runs a few steps (forward, backward, optimizer, zero_grad) after a barrier. On CPU a rank is pinned to
one core. The table has medians over the rounds, and what sharding costs in comparison with FSDP2 with compiled blocks,

    (step - unsharded step) / (fsdp2-compiled step - unsharded step)

as the median of the ratios of each round. Noise that lasts longer than a round does not change a ratio.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import ranks, report
from harness.gpt import Size, build_gpt, make_batches
from harness.rounds import ROUND_SECONDS, agreed_steps, slowest, time_rounds, time_steps
from harness.systems import (
    AUTO,
    BASE,
    LOWERINGS,
    ROUNDED,
    SYSTEMS,
    YARDSTICK,
    Accumulation,
    Setting,
    System,
    build,
    default_systems,
    parse_systems,
)
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile.calibrate import measure as calibrate

_WARM_UP_STEPS = 3
# Sizes of all-gathers that measure the link: about one unit of the default model, and more.
_GATHERED_MEGABYTES = (8, 32)
# Relative to a loss; systems sum in different orders.
_TOLERANCE = 1e-4
# The same for a system that rounds parameters and gradients to a byte to send them.
_ROUNDED_TOLERANCE = 2e-2


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    systems = "\n".join(f"  {name:17}{what}" for name, what in SYSTEMS.items())
    parser.epilog = f"systems:\n{systems}"
    parser.add_argument("--systems", type=parse_systems, metavar="A,B", help="see below; default all")
    parser.add_argument("--rounds", type=int, default=10, metavar="N", help="default 10")
    parser.add_argument(
        "--steps", type=int, metavar="N", help=f"of a system in a round; default as many as take about {ROUND_SECONDS} s"
    )
    parser.add_argument(
        "--lowering", default="inductor", choices=LOWERINGS, help="of all systems that compile; default inductor"
    )
    Size.add_flags(parser)
    Accumulation.add_flags(parser)
    ranks.add_flags(parser)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    if args.microbatches == 1:
        for flag, given in {
            "--accumulate unsharded": args.accumulate == "unsharded",
            "--keep-unsharded": args.keep_unsharded,
        }.items():
            if given:
                parser.error(f"{flag} needs --microbatches of at least 2")
    ranks.check_flags(parser, args)
    args.systems = args.systems or default_systems(args.group, args.device)
    return args


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Build, warm up and time all systems, in each rank."""
    device = torch.device(args.device)
    size, accumulation = Size.parse(args), Accumulation.parse(args)
    calibrated = AUTO in args.systems and args.group != "fake" and dist.get_world_size() > 1
    setting = Setting(size, mesh, device, accumulation, args.lowering, hardware=calibrate(device) if calibrated else None)
    batches = make_batches(size, dist.get_rank(), accumulation.microbatches, device)
    result: dict[str, Any] = {"link": {}, "losses": {}, "steps": {}, "hardware": setting.hardware and asdict(setting.hardware)}
    if args.group == "gloo":
        result["link"] = {megabytes: ranks.measure_link(device, megabytes) for megabytes in _GATHERED_MEGABYTES}
    if args.group != "fake":
        result["reference_losses"] = reference_losses(size, accumulation, device)

    systems: dict[str, System] = {}
    for name in args.systems:
        began = time.perf_counter()
        systems[name] = build(name, setting)
        result["losses"][name] = [systems[name].step(batches).item() for _ in range(_WARM_UP_STEPS)]
        ranks.progress(f"{name}: warm after {time.perf_counter() - began:.0f} s")
    if args.device == "cpu":
        ranks.pin_to_core()
    for name, system in systems.items():
        system.step(batches)
        result["steps"][name] = args.steps or agreed_steps(time_steps(system, batches, 1, device), device)
    result["seconds"] = time_rounds(systems, batches, result["steps"], args.rounds, device)
    return result


def reference_losses(size: Size, accumulation: Accumulation, device: torch.device) -> list[float]:
    """Train the uncompiled, unsharded model on the batches of all ranks together. Return the losses of the first steps."""
    all_ranks = [make_batches(size, rank, accumulation.microbatches, device) for rank in range(dist.get_world_size())]
    together = []
    for of_ranks in zip(*all_ranks, strict=True):
        tokens, targets = zip(*of_ranks, strict=True)
        together.append((torch.cat(tokens), torch.cat(targets)))
    model = build_gpt(size, device)
    system = System(model, model)
    return [system.step(together).item() for _ in range(_WARM_UP_STEPS)]


# --------------------------------------------------------------------------------------------- evaluation


def overhead_ratio(seconds: Sequence[float], base: Sequence[float], yardstick: Sequence[float]) -> float | None:
    """Return the time of a system beyond the base, relative to that of the yardstick: the median over the rounds.

    Return None if the yardstick was not slower than the base in some round.
    """
    rounds = list(zip(seconds, base, yardstick, strict=True))
    if any(other <= unsharded for _, unsharded, other in rounds):
        return None
    return statistics.median((x - unsharded) / (other - unsharded) for x, unsharded, other in rounds)


def check_losses(results: Sequence[dict[str, Any]]) -> None:
    """Compare the losses of the first steps, averaged over ranks, with those of the unsharded model.

    Raises:
        RuntimeError: a system trains differently.
    """
    reference = results[0]["reference_losses"]
    for name in results[0]["losses"]:
        losses = [statistics.mean(of_ranks) for of_ranks in zip(*(result["losses"][name] for result in results), strict=True)]
        # Without communication, only the first step starts from the same weights on all ranks.
        steps = 1 if name == BASE else len(losses)
        for step, (loss, expected) in enumerate(zip(losses[:steps], reference, strict=False)):
            if not math.isclose(loss, expected, rel_tol=_ROUNDED_TOLERANCE if name == ROUNDED else _TOLERANCE):
                raise RuntimeError(f"{name} has a loss of {loss} in step {step}, but the model in one piece has {expected}")


@dataclass(frozen=True)
class Summary:
    """The seconds of a system's steps over the rounds, and its overhead ratio or None."""

    median: float
    least: float
    most: float
    ratio: float | None


def summarize(seconds: dict[str, list[float]]) -> dict[str, Summary]:
    """Summarize each system. Ratios need the systems ``BASE`` and ``YARDSTICK``."""
    comparable = BASE in seconds and YARDSTICK in seconds
    summary = {}
    for name, rounds in seconds.items():
        ratio = overhead_ratio(rounds, seconds[BASE], seconds[YARDSTICK]) if comparable else None
        summary[name] = Summary(statistics.median(rounds), min(rounds), max(rounds), ratio)
    return summary


def describe(args: argparse.Namespace, link: dict[str, float]) -> str:
    micro = f", {args.microbatches} microbatches, {args.accumulate} accumulation" if args.microbatches > 1 else ""
    keep = ", parameters kept unsharded" if args.keep_unsharded else ""
    rates = [f"{megabytes} MB at {rate:.2f} Gbit/s" for megabytes, rate in link.items()]
    gathers = f"; an all-gather of {', of '.join(rates)}" if rates else ""
    return f"{Size.parse(args).describe()}{micro}{keep}\n{ranks.describe(args)}{gathers}\n{args.rounds} rounds"


def print_table(summary: dict[str, Summary]) -> None:
    rows = []
    for name, one in summary.items():
        times = [f"{seconds * 1000:.1f}" for seconds in (one.median, one.least, one.most)]
        rows.append([name, *times, "-" if one.ratio is None else f"{one.ratio:.3f}"])
    print(report.table(["system", "step ms", "least", "most", "ratio"], rows))


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    results = ranks.run_ranks([__file__, *argv], args)
    if args.group != "fake":
        check_losses(results)
    seconds = {name: slowest([result["seconds"][name] for result in results]) for name in args.systems}
    summary = summarize(seconds)
    print(f"\n{report.headline()}\n{describe(args, results[0]['link'])}\n")
    print_table(summary)
    report.write_json(args.json, summary={name: asdict(one) for name, one in summary.items()}, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
