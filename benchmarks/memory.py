"""Count what a training step holds in memory, and compare it with the library's own accounting.

    python benchmarks/memory.py                                  # parameters: activations of one token are negligible
    python benchmarks/memory.py --batch 4 --sequence 128         # with activations
    python benchmarks/memory.py --group gloo                     # with what Gloo itself allocates
    python benchmarks/memory.py --device cuda

Every system trains the same GPT. By default the process group does nothing, so that only the system's own memory counts: Gloo
holds copies of what it gathers and reduces, while it does. The first table has the most bytes that live during a forward and
during a backward, beyond those that live between steps (shards, the state of the process group). They are counted allocations:
on CPU of malloc, on CUDA of the caching allocator. A figure is the most of any rank, and of a few steps. The second table
compares it with ``CapturedGraph.live_bytes()``, for the graphs of fsdp_backend.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from harness import allocations, ranks, report
from harness.gpt import Size, make_batches
from harness.systems import LOWERINGS, SYSTEMS, Setting, System, build, default_systems, parse_systems
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

_WARM_UP_STEPS = 2
_STEPS = 3
_PASSES = ("forward", "backward")


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=parse_systems, metavar="A,B", help=f"of {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--lowering", default="inductor", choices=LOWERINGS, help="of all systems that compile; default inductor"
    )
    Size.add_flags(parser, layers=4, width=1024, batch=1, sequence=1)
    ranks.add_flags(parser)
    parser.set_defaults(group="fake")
    report.add_flags(parser)
    args = parser.parse_args(argv)
    ranks.check_flags(parser, args)
    args.systems = args.systems or default_systems(args.group, args.device)
    return args


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Return the peaks of each system in bytes: counted, and for our systems also accounted."""
    device = torch.device(args.device)
    held = allocations.inputs_held_in_flight(device) if args.group == "fake" else contextlib.nullcontext()
    with held:
        return measure_systems(args, mesh, device)


def measure_systems(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> dict[str, Any]:
    """Build the systems one after the other, and measure each."""
    setting = Setting(Size.parse(args), mesh, device, lowering=args.lowering)
    batch = make_batches(setting.size, dist.get_rank(), 1, device)
    result: dict[str, Any] = {}
    for name in args.systems:
        with captured_graphs(name) as graphs:
            system = build(name, setting)
            for _ in range(_WARM_UP_STEPS):
                system.step(batch)
        of_steps = [counted_peaks(system, *batch[0], device) for _ in range(_STEPS)]
        result[name] = {"counted": dict(zip(_PASSES, map(max, zip(*of_steps, strict=True)), strict=True))}
        if graphs is not None:
            result[name]["graphs"] = {kind: accounted_peaks(getattr(graphs, kind)) for kind in _PASSES}
        ranks.progress(f"{name}: counted")
        del system
    return result


@contextlib.contextmanager
def captured_graphs(system: str) -> Any:
    """Capture the graphs of one of our systems inside the block. Yields None for other systems."""
    if not system.startswith("ours"):
        yield None
        return
    from fsdp_compile.debug import capture

    with capture() as graphs:
        yield graphs


def accounted_peaks(graphs: Sequence[Any]) -> dict[str, int]:
    """Return the live bytes of the one graph of a pass, by the library's own accounting."""
    if len(graphs) != 1:
        raise RuntimeError(f"expected one graph for a pass, there are {len(graphs)}")
    live = graphs[0].live_bytes()
    return {"peak": live.peak, "peak_parameters": live.peak_parameters}


def counted_peaks(system: System, tokens: Tensor, targets: Tensor, device: torch.device) -> list[int]:
    """Run a step. Return the most bytes that live in its forward and in its backward."""
    losses: list[Tensor] = []
    found = allocations.peaks([lambda: losses.append(system.forward(tokens, targets)), lambda: losses[0].backward()], device)
    system.optimizer.step()
    system.optimizer.zero_grad()
    return found


# --------------------------------------------------------------------------------------------- evaluation


@dataclass(frozen=True)
class Comparison:
    """The accounted bytes of a graph beside the counted ones."""

    counted: int
    accounted: int
    parameters: int

    @property
    def error(self) -> float:
        """The error of the accounting relative to the counted bytes; positive if it is too high."""
        return (self.accounted - self.counted) / self.counted


def worst_rank(results: Sequence[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """Return the most bytes that any rank counted, for each system and pass."""
    return {name: {kind: max(result[name]["counted"][kind] for result in results) for kind in _PASSES} for name in results[0]}


def comparisons(results: Sequence[dict[str, Any]]) -> dict[tuple[str, str], Comparison]:
    """Compare counted and accounted bytes, for each system with graphs and each pass."""
    counted = worst_rank(results)
    found = {}
    for name, of_system in results[0].items():
        for kind, peaks in of_system.get("graphs", {}).items():
            found[name, kind] = Comparison(counted[name][kind], peaks["peak"], peaks["peak_parameters"])
    return found


def megabytes(count: int) -> str:
    return f"{count / 1e6:.2f}"


def print_tables(results: Sequence[dict[str, Any]]) -> None:
    rows = [[name, *(megabytes(peaks[kind]) for kind in _PASSES)] for name, peaks in worst_rank(results).items()]
    print(report.table(["most live MB, counted", *_PASSES], rows))
    rows = [
        [f"{name}, {kind}", megabytes(one.counted), megabytes(one.accounted), f"{one.error:+.1%}", megabytes(one.parameters)]
        for (name, kind), one in comparisons(results).items()
    ]
    if rows:
        print("\n" + report.table(["graph", "counted MB", "accounted", "error", "of it parameters"], rows))


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    with allocations.counting(args.device) as environment:
        results = ranks.run_ranks([__file__, *argv], args, environment)
    print(f"\n{report.headline()}\n{Size.parse(args).describe()}\n{ranks.describe(args)}\n")
    print_tables(results)
    report.write_json(args.json, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
