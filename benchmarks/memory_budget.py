"""Count what a step holds under a memory budget, and compare it with the budget.

    python benchmarks/memory_budget.py                           # three budgets, from the least possible to all that helps
    python benchmarks/memory_budget.py --budgets 5 --layers 8

A GPT trains within budgets that are spread over those at which the choice changes, and is compiled for each. The script counts
the bytes that ``options={"memory_budget": ...}`` limits: the most that live at once, with shards, the optimizer's state and
inputs. By default the process group does nothing, so that allocations of Gloo itself do not count.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import allocations, ranks, report
from harness.gpt import Size, build_gpt, make_batches
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from fsdp_compile.debug import capture
from passes.auto.memory_budget import Choice

_WARM_UP_STEPS = 2
_STEPS = 3
_LARGE = 1 << 50


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=3, metavar="N", help="how many; default 3, at least 2")
    Size.add_flags(parser, layers=4, width=128, batch=8, sequence=128)
    ranks.add_flags(parser)
    parser.set_defaults(group="fake")
    report.add_flags(parser)
    args = parser.parse_args(argv)
    ranks.check_flags(parser, args)
    if args.budgets < 2:
        parser.error("--budgets has to be at least 2")
    return args


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> list[dict[str, Any]]:
    """Return the chosen policy and the counted bytes of each budget."""
    device = torch.device(args.device)
    held = allocations.inputs_held_in_flight(device) if args.group == "fake" else contextlib.nullcontext()
    with held:
        first, choice = measure_one(Size.parse(args), mesh, device, _LARGE)
        peaks = [trial.peak_bytes for trial in choice.frontier()]
        places = sorted({round(index * (len(peaks) - 1) / (args.budgets - 1)) for index in range(args.budgets)})
        found = [measure_one(Size.parse(args), mesh, device, peaks[place])[0] for place in places[:-1]]
    return [*found, {**first, "budget": peaks[-1]}]


def measure_one(size: Size, mesh: DeviceMesh, device: torch.device, budget: int) -> tuple[dict[str, Any], Choice]:
    """Train a model within one budget. Return its figures, and the choice of the library."""
    torch._dynamo.reset()
    model = build_gpt(size, device)
    for block in model.get_submodule("blocks").children():
        fsdp_compile.fully_shard(block, mesh=mesh)
    fsdp_compile.fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens, targets = make_batches(size, dist.get_rank(), 1, device)[0]
    compiled = torch.compile(model, backend=fsdp_compile.fsdp_backend, fullgraph=True, options={"memory_budget": budget})

    def step() -> int:
        losses: list[Any] = []
        functions = [lambda: losses.append(compiled(tokens, targets)), lambda: losses[0].backward()]
        peak = max(allocations.peaks(functions, device))
        optimizer.step()
        optimizer.zero_grad()
        return peak

    with capture(passes=False) as captured:
        for _ in range(_WARM_UP_STEPS):
            step()
    counted = max(step() for _ in range(_STEPS))
    (choice,) = captured.choices
    policy = choice.chosen.policy
    ranks.progress(f"{budget}: counted")
    return {
        "budget": budget,
        "accounted": choice.chosen.peak_bytes,
        "counted": counted + _resident_bytes(model, optimizer, [tokens, targets]),
        "predicted_ns": choice.chosen.time_ns,
        "kept": len(policy.kept),
        "recomputed": len(policy.recomputed),
    }, choice


def _resident_bytes(model: torch.nn.Module, optimizer: torch.optim.Optimizer, inputs: Sequence[torch.Tensor]) -> int:
    """Return the bytes of tensors that outlive a step: parameters, buffers, the optimizer's state and inputs."""
    states = [value for state in optimizer.state.values() for value in state.values() if torch.is_tensor(value)]
    tensors = [*model.parameters(), *model.buffers(), *states, *inputs]
    return sum(getattr(tensor, "_local_tensor", tensor).nbytes for tensor in tensors)


# --------------------------------------------------------------------------------------------- evaluation


def print_table(results: Sequence[Sequence[dict[str, Any]]]) -> None:
    rows = []
    for of_ranks in zip(*results, strict=True):
        found = {**of_ranks[0], "counted": max(of_rank["counted"] for of_rank in of_ranks)}
        megabytes = [f"{found[name] / 1e6:.2f}" for name in ("budget", "accounted", "counted")]
        share = f"{found['counted'] / found['budget'] - 1:+.1%}"
        chosen = [str(found[name]) for name in ("kept", "recomputed")]
        rows.append([*megabytes, share, *chosen, f"{found['predicted_ns'] / 1e6:.1f}"])
    print(report.table(["budget MB", "accounted", "counted", "to budget", "units kept", "regions again", "predicted ms"], rows))


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    with allocations.counting(args.device) as environment:
        results = ranks.run_ranks([__file__, *argv], args, environment)
    print(f"\n{report.headline()}\n{Size.parse(args).describe()}\n{ranks.describe(args)}\n")
    print_table(results)
    report.write_json(args.json, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
