"""Compare losses of the main job in full precision and in each low precision, over seeds.

    python benchmarks/training_losses.py --json losses.json --picture losses.png
    python benchmarks/training_losses.py --json losses.json --ways full,fp8-gathers --seeds 0 --steps 100
    python benchmarks/training_losses.py --json muon.json --ways full,muon --picture muon.png    # the other optimizer

Trains the GPT of ``examples/train_gpt.py`` on two ranks, with its optimizer, clipping and schedule. A way is an encoding of the
parameters and gradients that are sent. Ways with the same seed begin with the same weights and see the same batches, so they
differ by rounding alone. The spread over seeds shows how much is chance. The columns:

    sent          bytes that a rank sends in a step, counted in the graphs
    validation    loss on held-out text after the last step, in nats per byte; mean over the seeds
    lost          difference of the validation loss from full precision, seed by seed: mean, least and most
    training      mean of the last 20 training losses, over the seeds

All ways take more than an hour on two cores. Runs that the file of ``--json`` already has are not made again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import extras, ranks, report
from harness.flags import names_of
from harness.fresh_module import fresh_module
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import GatherPolicy, comm_hooks, fsdp_backend, fully_shard
from fsdp_compile.debug import capture

extras.need("tqdm", "matplotlib")
_EXAMPLE = Path(__file__).parents[1] / "examples" / "train_gpt.py"
sys.path.append(str(_EXAMPLE.parent))
FULL = "full"
_MUON = "muon"
_LAST = 20  # the last training losses, of which the mean is taken, as in the main job


@dataclass(frozen=True)
class Way:
    """An encoding of the parameters and gradients that are sent.

    Attributes:
        what: the label in the picture.
        gather_policy: of the blocks; the root's parameters are sent in full precision.
        hook: makes the communication hook of all units; None: no hook.
        optimizer: that of the main job.
    """

    what: str
    gather_policy: GatherPolicy | None = None
    hook: Callable[[], Any] | None = None
    optimizer: str = "adamw"


_FP8 = GatherPolicy(torch.float8_e4m3fn, 128)


def _int8() -> comm_hooks.QuantizedReduce:
    return comm_hooks.QuantizedReduce(torch.int8, block=128)


WAYS = {
    FULL: Way("full precision"),
    "fp8-gathers": Way("gathers in float8", _FP8),
    "int8-reductions": Way("reductions in int8", None, _int8),
    "int8-feedback": Way("reductions in int8, error feedback", None, lambda: comm_hooks.ErrorFeedback(_int8())),
    "fp8-int8": Way("gathers in float8, reductions in int8", _FP8, _int8),
    "powersgd": Way("PowerSGD, rank 2", None, lambda: comm_hooks.PowerSGD(rank=2)),
    _MUON: Way("full precision, Muon", optimizer="muon"),
}


@dataclass(frozen=True)
class Run:
    """The results of one training run.

    Attributes:
        losses: of the training batches, in nats per byte; the mean over the ranks.
        validation: the mean loss on held-out text after the last step.
        sent: bytes that a rank sends in a step.
    """

    losses: list[float]
    validation: float
    sent: float

    @property
    def last(self) -> float:
        return statistics.mean(self.losses[-_LAST:])


# --------------------------------------------------------------------------------------------- in a rank


def graph_bytes(graph_modules: Iterable[torch.fx.GraphModule], world: int) -> float:
    """Return the bytes that a rank sends when it runs these graphs, with ring algorithms.

    In a ring, a rank sends (world - 1) / world of the bytes that are gathered, or reduced and scattered.
    An all-reduce is one of each.
    """
    ops = torch.ops._c10d_functional
    total = 0
    for graph_module in graph_modules:
        for node in graph_module.graph.nodes:
            if node.target == ops.all_gather_into_tensor.default:
                total += node.meta["val"].nbytes
            elif node.target in (ops.reduce_scatter_tensor.default, ops.all_to_all_single.default):
                total += node.args[0].meta["val"].nbytes
            elif node.target == ops.all_reduce.default:
                total += 2 * node.args[0].meta["val"].nbytes
    return total * (world - 1) / world


def train(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Train with the one way and the one seed of the flags. Return the fields of a ``Run``."""
    job = fresh_module(_EXAMPLE)
    way = WAYS[args.ways[0]]
    settings = job.parse_args(["--seed", str(args.seeds[0]), "--steps", str(args.steps), "--optimizer", way.optimizer])
    device = torch.device("cpu")
    text, held_out, _ = job.read_text(settings.max_bytes)

    with torch.device("meta"):
        model: Any = job.GPT(settings.layers, settings.d_model, settings.heads, settings.seq_length)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, gather_policy=way.gather_policy)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.to_empty(device=device)
    job.init_weights(model, settings.seed)
    if way.hook is not None:
        model.register_comm_hook(comm_hooks.DefaultState(mesh.get_group()), way.hook())
    compiled = torch.compile(model, backend=fsdp_backend, dynamic=False, options={"lowering": args.lowering})
    optimizers = job.make_optimizers(model, settings)

    def run_step(step: int) -> float:
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            group["lr"] = job.learning_rate(step, settings)
        loss = compiled(*job.crops(text, settings, device, "train", settings.seed, step))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return job.mean_over_ranks(loss)

    with capture() as captured:
        losses = [run_step(0)]
    losses += [run_step(step) for step in range(1, args.steps)]
    graphs = [record.graph_module for record in (*captured.forward, *captured.backward)]
    validation = job.validate(compiled, held_out, settings, device)
    return asdict(Run(losses, validation, graph_bytes(graphs, dist.get_world_size())))


# ---------------------------------------------------------------------------------------------- the runs


def read_runs(path: Path | None, steps: int) -> dict[tuple[str, int], Run]:
    """Read the runs in a file that this script wrote, by way and seed. Without a file, return none.

    Raises:
        SystemExit: the runs in the file have another number of steps.
    """
    if path is None or not path.exists():
        return {}
    found = json.loads(path.read_text())
    if found["steps"] != steps:
        raise SystemExit(f"{path} has runs of {found['steps']} steps, not {steps}: give another file, or delete it")
    return {(name, int(seed)): Run(**run) for name, seeds in found["runs"].items() for seed, run in seeds.items()}


def write_runs(path: Path | None, steps: int, runs: dict[tuple[str, int], Run]) -> None:
    nested: dict[str, dict[int, Any]] = {}
    for (name, seed), run in runs.items():
        nested.setdefault(name, {})[seed] = asdict(run)
    report.write_json(path, steps=steps, runs=nested)


def make_table(runs: dict[tuple[str, int], Run], ways: Sequence[str], seeds: Sequence[int]) -> str:
    """Return a table with a row for each way; the column ``lost`` needs runs in full precision."""
    rows = []
    for name in ways:
        found = [runs[name, seed] for seed in seeds]
        lost = "-"
        if name != FULL and FULL in ways:
            differences = [runs[name, seed].validation - runs[FULL, seed].validation for seed in seeds]
            lost = f"{statistics.mean(differences):+.4f} ({min(differences):+.4f} to {max(differences):+.4f})"
        means = (statistics.mean(run.validation for run in found), statistics.mean(run.last for run in found))
        rows.append([name, f"{found[0].sent / 1e6:.2f} MB", f"{means[0]:.4f}", lost, f"{means[1]:.4f}"])
    return report.table(["way", "sent", "validation", "lost", "training"], rows)


def draw(runs: dict[tuple[str, int], Run], ways: Sequence[str], seeds: Sequence[int], path: Path) -> None:
    """Draw the training losses of each way, and their distance from full precision: means over the seeds, smoothed."""
    import matplotlib

    matplotlib.use("Agg")
    from helpers.results import smooth
    from matplotlib import pyplot as plt

    def mean_losses(name: str) -> list[float]:
        return [statistics.mean(step) for step in zip(*(runs[name, seed].losses for seed in seeds), strict=True)]

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 7), layout="constrained", sharex=True)
    full = mean_losses(FULL)
    for index, name in enumerate(ways):
        losses = mean_losses(name)
        colour = f"C{index}"
        above.plot(range(1, len(losses) + 1), smooth(losses), color=colour, label=WAYS[name].what, linewidth=1)
        if name != FULL:
            differences = [ours - theirs for ours, theirs in zip(losses, full, strict=True)]
            below.plot(range(1, len(losses) + 1), smooth(differences, 20), color=colour, linewidth=1)
    below.axhline(0, color="C0", linewidth=1)
    above.set(ylabel="training loss (nats per byte)", ylim=(None, smooth(full)[min(30, len(full) - 1)]))
    below.set(xlabel="step", ylabel="distance from full precision")
    above.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    ways = [name for name in WAYS if name != _MUON]
    parser.add_argument(
        "--ways", type=names_of("way", WAYS), default=ways, help=f"of {', '.join(WAYS)}; default all but {_MUON}"
    )
    parser.add_argument("--seeds", type=lambda text: [int(seed) for seed in text.split(",")], default=[0, 1, 2], metavar="N,N")
    parser.add_argument("--steps", type=int, default=600, metavar="N", help="of each run; default 600")
    parser.add_argument("--lowering", choices=["inductor", "aot_eager"], default="inductor", help="default inductor")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses; needs the way in full precision")
    report.add_flags(parser)
    args = parser.parse_args()
    if args.picture and FULL not in args.ways:
        parser.error(f"--picture needs {FULL} among --ways")
    args.device, args.group, args.link = "cpu", "gloo", ranks.LOOPBACK
    if ranks.served(args, train):
        return

    runs = read_runs(args.json, args.steps)
    for seed, name in itertools.product(args.seeds, args.ways):
        if (name, seed) not in runs:
            flags = ["--ways", name, "--seeds", str(seed), "--steps", str(args.steps), "--lowering", args.lowering]
            runs[name, seed] = Run(**ranks.run_ranks([__file__, *flags], args)[0])
            write_runs(args.json, args.steps, runs)
            found = runs[name, seed]
            print(
                f"{name}, seed {seed}: validation {found.validation:.4f}, training {found.last:.4f}",
                file=sys.stderr,
                flush=True,
            )
    seeds = ", ".join(map(str, args.seeds))
    print(f"{report.headline()}\n{args.steps} steps, seeds {seeds}\n\n{make_table(runs, args.ways, args.seeds)}")
    if args.picture:
        draw(runs, args.ways, args.seeds, args.picture)


if __name__ == "__main__":
    main()
