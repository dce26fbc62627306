"""Compare the library's predictions of a step with measurements: one table, all of it measured in one run.

    python benchmarks/prediction.py                              # needs root, for links of a given rate
    python benchmarks/prediction.py --link loopback              # configurations over loopback alone
    python benchmarks/prediction.py --only thin,bf16 --rounds 2
    python benchmarks/prediction.py --quick                      # one small configuration, to see that it runs

Two ranks on Gloo have one thread each, and are pinned to a core each. Steps of the sharded and of the unsharded model take
turns. Before and after these rounds, ``python -m fsdp_compile.calibrate``'s functions measure the machine, without any model.
The prediction is the mean of the predictions with either calibration. A preloaded library counts the memory of a step. The
columns:

    step        seconds of forward, backward, SGD and zero_grad on the slower rank; the median over the rounds
    added       seconds that sharding adds to the step of the unsharded model, which the cost model predicts, too
    memory      the most bytes that live during a step, beyond those that live between steps

Each has the measurement, the prediction, and the error of the prediction relative to the measurement.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from harness import allocations, ranks, report
from harness.flags import names_of
from harness.gpt import Size, make_batches
from harness.link import LOOPBACK
from harness.rounds import agreed_steps, slowest, time_rounds, time_steps
from harness.systems import AUTO, BASE, Accumulation, Setting, System, build
from harness.unsharded import build_recorded
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile.calibrate import measure as calibrate
from fsdp_compile.debug import capture
from fsdp_compile.explain.make_report import make_report
from passes.models.hardware import Hardware

_OURS = "ours"
_WARM_UP_STEPS = 2
# Make glibc keep freed memory. Otherwise some steps, but not others, get memory from the system, which zeroes pages.
_KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Configuration:
    """A model and the way in which it is trained.

    Attributes:
        size: of the model and the batch.
        link: the network between the ranks, as in ``make_link``.
        system: "ours" or "ours-auto".
        bf16: if True, compute in bfloat16 and reduce in float32. The unsharded model is then all bfloat16.
        reshard_after_forward: of all units; None: True for all units but the root.
        accumulation: the microbatches.
        memory_limit: of "ours-auto", in MB; None: no limit.
    """

    size: Size
    link: str = LOOPBACK
    system: str = _OURS
    bf16: bool = False
    reshard_after_forward: bool | None = None
    accumulation: Accumulation = field(default_factory=Accumulation)
    memory_limit: int | None = None

    def describe(self) -> str:
        size, accumulation = self.size, self.accumulation
        words = [f"{size.layers} x {size.width}", f"{size.batch} x {size.sequence}", self.link]
        words += ["bf16"] if self.bf16 else []
        words += ["auto"] if self.system == AUTO else []
        words += [f"{self.memory_limit} MB"] if self.memory_limit else []
        words += ["no reshard"] if self.reshard_after_forward is False else []
        if accumulation.microbatches > 1:
            words.append(f"{accumulation.microbatches} microbatches{', kept' if accumulation.keep_unsharded else ''}")
        return ", ".join(words)


def _size(layers: int, width: int, batch: int, sequence: int) -> Size:
    return Size(layers, width, 4, batch, sequence)


_KEPT = Accumulation(microbatches=3, unsharded=True, keep_unsharded=True)
CONFIGURATIONS = {
    "wide": Configuration(_size(2, 1024, 2, 128)),
    "plain": Configuration(_size(8, 512, 4, 128)),
    "thin": Configuration(_size(32, 128, 4, 128)),
    "bf16": Configuration(_size(4, 768, 4, 256), bf16=True),
    "saved": Configuration(_size(12, 256, 8, 64), reshard_after_forward=False),
    "kept": Configuration(_size(4, 768, 2, 128), accumulation=_KEPT),
    "auto": Configuration(_size(16, 256, 2, 256), system=AUTO),
    "4gbit": Configuration(_size(6, 512, 4, 128), link="4gbit"),
    "4gbit-limit": Configuration(_size(4, 512, 4, 256), link="4gbit", system=AUTO, memory_limit=170),
    "4gbit-bf16": Configuration(_size(4, 1024, 2, 256), link="4gbit", bf16=True),
    "4gbit-micro": Configuration(_size(6, 384, 4, 128), link="4gbit", accumulation=Accumulation(microbatches=2)),
    "1gbit": Configuration(_size(8, 384, 4, 256), link="1gbit"),
    "1gbit-auto": Configuration(_size(8, 512, 4, 128), link="1gbit", system=AUTO),
    "1gbit-saved": Configuration(_size(4, 640, 8, 128), link="1gbit", reshard_after_forward=False),
}
QUICK = {"quick": Configuration(_size(2, 64, 2, 32))}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", type=names_of("configuration", CONFIGURATIONS), metavar="A,B", help=", ".join(CONFIGURATIONS))
    parser.add_argument("--link", metavar="RATE", help="only configurations over this link")
    parser.add_argument("--quick", action="store_true", help="one small configuration instead")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="default 4")
    report.add_flags(parser)
    args = parser.parse_args(argv)
    args.device, args.group = "cpu", "gloo"
    args.configurations = dict(QUICK if args.quick else CONFIGURATIONS)
    for name, configuration in list(args.configurations.items()):
        if (args.only and name not in args.only) or (args.link and configuration.link != args.link):
            del args.configurations[name]
    if not args.configurations:
        parser.error("no configuration is left")
    return args


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Predict and measure each configuration. Also return the hardware numbers of the predictions."""
    ranks.pin_to_core()
    scheduled_for = calibrate(torch.device("cpu"))
    found: dict[str, Any] = {}
    for name, configuration in args.configurations.items():
        torch._dynamo.reset()
        found[name] = measure_one(configuration, args.rounds, mesh, scheduled_for)
        ranks.progress(f"{name}: measured")
    return {"configurations": found}


def measure_one(configuration: Configuration, rounds: int, mesh: DeviceMesh, scheduled_for: Hardware) -> dict[str, Any]:
    """Predict and measure one configuration."""
    device = torch.device("cpu")
    setting = Setting(
        configuration.size,
        mesh,
        device,
        configuration.accumulation,
        policy=_BF16 if configuration.bf16 else MixedPrecisionPolicy(),
        hardware=scheduled_for,
        reshard_after_forward=configuration.reshard_after_forward,
        memory_limit=configuration.memory_limit and configuration.memory_limit * 10**6,
    )
    microbatches = configuration.accumulation.microbatches
    batches = make_batches(configuration.size, dist.get_rank(), microbatches, device)
    with capture(passes=False) as captured:
        ours = build(configuration.system, setting)
        ours.step(batches)
    alone, graphs = build_recorded(setting, torch.bfloat16 if configuration.bf16 else torch.float32)
    systems = {_OURS: ours, BASE: alone}
    for system in systems.values():
        for _ in range(_WARM_UP_STEPS):
            system.step(batches)
    memory = allocations.peaks([lambda: ours.step(batches)], device)[0]
    # Calibrate before and after: the speed of a shared machine changes within minutes.
    before = calibrate(device)
    seconds = time_systems(systems, batches, rounds, device)
    after = calibrate(device)
    between = sum(unit.shard_bytes for unit in captured.census.units) + captured.census.other_bytes
    predictions = []
    for hardware in (before, after):
        said = make_report(captured, hardware, optimizer="sgd")
        predictions.append(
            {
                "step": said.time_ns / 1e9,
                "exposed": sum(call.exposed_ns for call in said.calls) / 1e9,
                BASE: graphs.step_seconds(microbatches, alone.model, hardware),
                "memory": said.memory.peak_bytes - between,
            }
        )
    return {
        "hardware": [asdict(before), asdict(after)],
        "predicted": {name: statistics.mean(one[name] for one in predictions) for name in predictions[0]},
        "predictions": predictions,
        "memory": memory,
        "seconds": seconds,
    }


def time_systems(systems: dict[str, System], batches: Any, rounds: int, device: torch.device) -> dict[str, list[float]]:
    """Return the seconds of a step of each system in each round."""
    steps = {}
    for name, system in systems.items():
        system.step(batches)
        steps[name] = agreed_steps(time_steps(system, batches, 1, device), device)
    return time_rounds(systems, batches, steps, rounds, device)


# --------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Comparison:
    """A measured number and its prediction."""

    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """The error of the prediction, relative to the measurement; positive if the prediction is too high."""
        return (self.predicted - self.measured) / self.measured


@dataclass(frozen=True)
class Goal:
    """The number of configurations that have to be predicted within an error.

    Attributes:
        what: a column of the table.
        within: the largest error, relative to the measurement.
        of_twelve: how many of twelve configurations have to be within it.
    """

    what: str
    within: float
    of_twelve: int

    def met(self, rows: Mapping[str, Mapping[str, Comparison]]) -> tuple[int, bool]:
        """Count the rows whose error is small enough. Also return whether these are enough."""
        good = sum(abs(row[self.what].error) <= self.within for row in rows.values())
        return good, 12 * good >= self.of_twelve * len(rows)


GOALS = (Goal("step", 0.1, 10), Goal("step", 0.2, 12), Goal("added", 0.2, 10), Goal("memory", 0.05, 12))


def comparisons(results: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Comparison]]:
    """Compare each column of each configuration. Ranks measure apart, but all have the same prediction."""
    found = {}
    for name, one in results[0]["configurations"].items():
        said = one["predicted"]
        of_ranks = [result["configurations"][name] for result in results]
        ours, alone = (slowest([of_rank["seconds"][system] for of_rank in of_ranks]) for system in (_OURS, BASE))
        added = statistics.median(mine - base for mine, base in zip(ours, alone, strict=True))
        found[name] = {
            "step": Comparison(statistics.median(ours), said["step"]),
            BASE: Comparison(statistics.median(alone), said[BASE]),
            "added": Comparison(added, said["step"] - said[BASE]),
            "memory": Comparison(max(of_rank["memory"] for of_rank in of_ranks), said["memory"]),
        }
    return found


_COLUMNS: dict[str, tuple[str, Callable[[float], str]]] = {
    "step": ("step ms", lambda seconds: f"{seconds * 1e3:.1f}"),
    BASE: ("unsharded ms", lambda seconds: f"{seconds * 1e3:.1f}"),
    "added": ("added ms", lambda seconds: f"{seconds * 1e3:.1f}"),
    "memory": ("memory MB", lambda count: f"{count / 1e6:.1f}"),
}


def print_table(rows: Mapping[str, Mapping[str, Comparison]], configurations: Mapping[str, Configuration]) -> None:
    header = ["configuration"]
    for title, _ in _COLUMNS.values():
        header += [title, "predicted", "error"]
    lines = []
    for name, row in rows.items():
        line = [configurations[name].describe()]
        for what, (_, text) in _COLUMNS.items():
            line += [text(row[what].measured), text(row[what].predicted), f"{row[what].error:+.1%}"]
        lines.append(line)
    print(report.table(header, lines) + "\n")
    for goal in GOALS:
        good, met = goal.met(rows)
        verdict = "met" if met else "missed"
        print(f"{goal.what} within {goal.within:.0%}: {good} of {len(rows)} (to be {goal.of_twelve} in 12): {verdict}")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    rows: dict[str, dict[str, Comparison]] = {}
    raw = {}
    with allocations.counting("cpu") as counted:
        environment = {**counted, **_KEEP_MEMORY}
        for link in dict.fromkeys(configuration.link for configuration in args.configurations.values()):
            args.link = link
            raw[link] = ranks.run_ranks([__file__, *argv, "--link", link], args, environment)
            rows |= comparisons(raw[link])
    print(f"\n{report.headline()}\nworld size 2, cpu, gloo; {args.rounds} rounds\n")
    print_table(rows, args.configurations)
    report.write_json(
        args.json, rows={name: {what: asdict(one) for what, one in row.items()} for name, row in rows.items()}, ranks=raw
    )


if __name__ == "__main__":
    main(sys.argv[1:])
