"""Time the first step of a model, which compiles it, with an empty cache and with a full one.

    python benchmarks/compile_time.py
    python benchmarks/compile_time.py --depths 8,16,32 --systems ours --phases
    python benchmarks/compile_time.py --after 3
    python benchmarks/compile_time.py --file
    python benchmarks/compile_time.py --layers-are checkpoints

Every figure comes from fresh processes: two ranks, which share Inductor's cache. The first run starts with an empty cache
(cold), the second with the cache that the first run left (warm). The first table has the seconds from the call of the model to
the end of the first step (forward, backward, optimizer), on the slowest rank. It has a column for each depth of the model, and
the seconds that a layer adds. A second table has the host's memory: the most that a rank had in memory up to the end of the
step, and how much of it the step added. With --phases, further tables split the seconds into phases. With --after, a step
with another batch size comes first, which is not timed: the step that is compiles for sizes that change. With --file, our
systems also start with an empty cache and a file of ``save_precompiled``, and loading it counts (file). With --layers-are,
layers differ in something (harness/layer_kinds.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib
import itertools
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import phases, ranks, report
from harness.gpt import Size, make_batches
from harness.layer_kinds import KINDS, Model
from harness.systems import BASE, YARDSTICK, Setting, build, parse_systems
from torch.distributed.device_mesh import DeviceMesh

_CACHES = ("cold", "warm")
_FROM_FILE = "file"
_MEMORY = ("peak_mb", "added_mb")
_KIB = 1024  # the unit of ``ru_maxrss`` on Linux


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--systems", type=parse_systems, default=[BASE, YARDSTICK, "ours"], metavar="A,B")
    parser.add_argument("--depths", type=parse_depths, default=[8, 32], metavar="N,N", help="numbers of layers; default 8,32")
    parser.add_argument(
        "--repeat", type=int, default=1, metavar="N", help="runs of each figure, of which the median; default 1"
    )
    parser.add_argument("--after", type=int, metavar="N", help="take a step with batches of N sequences before")
    parser.add_argument("--layers-are", choices=KINDS, default="equal", help="default equal")
    parser.add_argument("--file", action="store_true", help="also start from a precompiled file")
    parser.add_argument("--save", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    parser.add_argument("--phases", action="store_true", help="also where the time goes")
    Size.add_flags(parser, without=["layers"], width=128)
    ranks.add_flags(parser)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    ranks.check_flags(parser, args)
    return args


def parse_depths(text: str) -> list[int]:
    return sorted(int(depth) for depth in text.split(","))


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Measure the first step of the one system and depth in the flags of a rank."""
    (name,), (depth,), device = args.systems, args.depths, torch.device(args.device)
    size = Size.parse(args, layers=depth)
    batch = make_batches(size, dist.get_rank(), 1, device)
    system = build(name, Setting(Model(size, args.layers_are), mesh, device))
    # fsdp_compile has imported Inductor by now. Other systems would import it while they are timed.
    importlib.import_module("torch._inductor.compile_fx")
    if args.after:
        system.step(make_batches(dataclasses.replace(size, batch=args.after), dist.get_rank(), 1, device)).item()
    dist.barrier()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with phases.timed() if args.phases else contextlib.nullcontext() as of_phases:
        began = time.perf_counter()
        if args.load:
            _ours().load_precompiled(args.load, system.model)
        system.step(batch).item()
        seconds = time.perf_counter() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if args.save and dist.get_rank() == 0:
        _ours().save_precompiled(args.save)
    return {"seconds": seconds, "phases": of_phases, "peak_mb": peak * _KIB / 1e6, "added_mb": (peak - before) * _KIB / 1e6}


def _ours() -> Any:
    """Return this library, which ranks of other systems do not import."""
    return importlib.import_module("fsdp_compile")


# ---------------------------------------------------------------------------------------------- launching


def run(args: argparse.Namespace, argv: Sequence[str], system: str, depth: int) -> dict[str, Any]:
    """Run once for each state of the cache. Return the slowest rank's seconds, and the most memory of a rank, by the state."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        file = ["--save", f"{folder}/file.zip"] if args.file and system.startswith("ours") else []
        runs = [("cold", "first", file), ("warm", "first", [])]
        if file:
            runs.append((_FROM_FILE, "second", ["--load", file[1]]))
        for state, cache, flags in runs:
            # argparse takes the last of two equal flags.
            command = [__file__, *argv, "--systems", system, "--depths", str(depth), *flags]
            of_ranks = ranks.run_ranks(command, args, {"TORCHINDUCTOR_CACHE_DIR": f"{folder}/{cache}"})
            slowest = max(of_ranks, key=lambda result: result["seconds"])
            results[state] = {**slowest, **{key: max(result[key] for result in of_ranks) for key in _MEMORY}}
    return results


# --------------------------------------------------------------------------------------------- evaluation

Runs = dict[str, dict[int, list[dict[str, Any]]]]


def median_of(runs: Sequence[dict[str, Any]], temperature: str, key: str) -> float:
    return statistics.median(run[temperature][key] for run in runs)


def median_phases(runs: Sequence[dict[str, Any]], temperature: str) -> dict[str, float]:
    return {phase: statistics.median(run[temperature]["phases"][phase] for run in runs) for phase in phases.PHASES}


def growth_per_layer(by_depth: dict[int, float]) -> float:
    """Return the seconds that a layer adds, between the smallest and the largest depth; 0 with one depth."""
    least, most = min(by_depth), max(by_depth)
    return (by_depth[most] - by_depth[least]) / (most - least) if most > least else 0.0


def print_tables(runs: Runs, args: argparse.Namespace) -> None:
    depths = args.depths
    states = (*_CACHES, _FROM_FILE) if args.file else _CACHES
    columns = [(state, depth) for state in states for depth in depths]
    step = "step with other sizes" if args.after else "first step"
    header = [f"{step}, s", *(f"{state}, {depth} layers" for state, depth in columns)]
    header += [f"{state}, per layer" for state in states]
    rows = []
    for system, by_depth in runs.items():
        seconds = {column: median_of(by_depth[column[1]], column[0], "seconds") for column in columns_of(by_depth, columns)}
        of_states = {state: {depth: s for (of, depth), s in seconds.items() if of == state} for state, _ in seconds}
        growth = {state: growth_per_layer(of_state) for state, of_state in of_states.items()}
        cells = [f"{seconds[column]:.1f}" if column in seconds else "" for column in columns]
        rows.append([system, *cells, *(f"{growth[state]:.2f}" if state in growth else "" for state in states)])
    print(report.table(header, rows))
    header = ["host's peak (added), MB", *(f"{state}, {depth} layers" for state, depth in columns)]
    rows = []
    for system, by_depth in runs.items():
        found = {(s, d): [median_of(by_depth[d], s, key) for key in _MEMORY] for s, d in columns_of(by_depth, columns)}
        rows.append([system, *("{:.0f} ({:.0f})".format(*found[column]) if column in found else "" for column in columns)])
    print("\n" + report.table(header, rows))
    for system in runs if args.phases else ():
        of_system = {(s, d): median_phases(runs[system][d], s) for s, d in columns_of(runs[system], columns)}
        print("\n" + phase_table(system, of_system))


def columns_of(by_depth: dict[int, list[dict[str, Any]]], columns: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Return the columns that a system has figures for."""
    return [(state, depth) for state, depth in columns if state in by_depth[depth][0]]


def phase_table(system: str, seconds: dict[tuple[str, int], dict[str, float]]) -> str:
    header = [f"{system}, s", *(f"{temperature}, {depth} layers" for temperature, depth in seconds)]
    rows = [[phase, *(f"{of_run[phase]:.1f}" for of_run in seconds.values())] for phase in phases.PHASES]
    return report.table(header, rows)


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    runs: Runs = {system: {depth: [] for depth in args.depths} for system in args.systems}
    for _, depth, system in itertools.product(range(args.repeat), args.depths, args.systems):
        results = run(args, argv, system, depth)
        runs[system][depth].append(results)
        print(f"{system}, {depth} layers:", ", ".join(f"{t} {results[t]['seconds']:.1f} s" for t in results), flush=True)
    model = f"{Size.parse(args, layers=args.depths[-1]).describe()}; layers: {args.layers_are}"
    print(f"\n{report.headline()}\n{model}\n{ranks.describe(args)}\n")
    print_tables(runs, args)
    report.write_json(args.json, runs=runs)


if __name__ == "__main__":
    main(sys.argv[1:])
