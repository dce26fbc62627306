"""Time steps under memory budgets, beside steps with flags that people set by hand, all in one run.

    python benchmarks/budget_time.py --link 1gbit                 # needs root; without the flag, over loopback
    python benchmarks/budget_time.py --link 1gbit --budgets 3 --layers 8

A GPT trains within budgets that are spread over those at which the choice changes, from the least possible to all that helps.
The same model also trains with three sets of flags:

- all units stay gathered after forward;
- the default: all units but the root reshard after forward;
- all units reshard after forward, and every block has a checkpoint.

The library predicts times with hardware numbers that are measured first, over the same link. The systems take turns, as in
step_time.py. Bytes are those that the library accounts for.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from harness import ranks, report
from harness.gpt import Size, build_gpt, make_batches
from harness.rounds import agreed_steps, slowest, time_rounds, time_steps
from harness.systems import System, shard_blocks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from fsdp_compile.calibrate import measure as calibrate
from fsdp_compile.debug import capture
from fsdp_compile.explain import explain_captured
from passes.models.hardware import Hardware

_WARM_UP_STEPS = 3
_UNLIMITED = 1 << 50
#: Sets of flags by name: ``reshard_after_forward``, and True if blocks have a checkpoint.
_BY_HAND: dict[str, tuple[bool | None, bool]] = {
    "kept by hand": (False, False),
    "default flags": (None, False),
    "checkpoints, resharded": (True, True),
}


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--budgets", type=int, default=5, metavar="N", help="how many; default 5, at least 2")
    parser.add_argument("--rounds", type=int, default=8, metavar="N", help="default 8")
    parser.add_argument("--lowering", default="inductor", choices=["inductor", "aot_eager"], help="default inductor")
    Size.add_flags(parser, layers=4, width=256, batch=8, sequence=128)
    ranks.add_flags(parser)
    report.add_flags(parser)
    args = parser.parse_args(argv)
    ranks.check_flags(parser, args)
    if args.budgets < 2:
        parser.error("--budgets has to be at least 2")
    if args.group == "fake":
        parser.error("--group fake does not communicate, so there is nothing to time")
    return args


# --------------------------------------------------------------------------------------------- in a rank


def measure(args: argparse.Namespace, mesh: DeviceMesh) -> dict[str, Any]:
    """Build, warm up and time all systems, in each rank."""
    device, size = torch.device(args.device), Size.parse(args)
    hardware = calibrate(device)
    batches = make_batches(size, dist.get_rank(), 1, device)
    made = _Makers(size, mesh, device, hardware, args.lowering, batches)
    systems: dict[str, System] = {}
    facts: dict[str, dict[str, Any]] = {}
    unlimited, frontier = made.within(_UNLIMITED)
    places = sorted({round(index * (len(frontier) - 1) / (args.budgets - 1)) for index in range(args.budgets)})
    for place in places:
        trial = frontier[place]
        name = f"budget {trial.peak_bytes / 1e6:.1f} MB"
        systems[name] = unlimited if place == places[-1] else made.within(trial.peak_bytes)[0]
        policy = trial.policy
        facts[name] = {"bytes": trial.peak_bytes, "kept": len(policy.kept), "recomputed": len(policy.recomputed)}
    for name, (reshard, has_checkpoints) in _BY_HAND.items():
        systems[name], nbytes = made.by_hand(reshard, has_checkpoints)
        facts[name] = {"bytes": nbytes}
    if args.device == "cpu":
        ranks.pin_to_core()
    steps = {}
    for name, system in systems.items():
        system.step(batches)
        steps[name] = agreed_steps(time_steps(system, batches, 1, device), device)
    return {"facts": facts, "losses": made.losses, "seconds": time_rounds(systems, batches, steps, args.rounds, device)}


class _Makers:
    """A maker of systems, which also warms them up.

    Attributes:
        losses: the losses of the warm-up steps of each system.
    """

    def __init__(
        self, size: Size, mesh: DeviceMesh, device: torch.device, hardware: Hardware, lowering: str, batches: Sequence[Any]
    ):
        self.losses: list[list[float]] = []
        self._size, self._mesh, self._device, self._hardware = size, mesh, device, hardware
        self._options = {"lowering": lowering}
        self._batches = batches

    def within(self, budget: int) -> tuple[System, Any]:
        """Make a system within a budget. Return it, and the trials that some budget would choose."""
        torch._dynamo.reset()
        model = build_gpt(self._size, self._device)
        shard_blocks(model, fsdp_compile.fully_shard, mesh=self._mesh)
        options = {"memory_budget": budget, "optimizer": "sgd", "hardware": self._hardware}
        with capture(passes=False) as captured:
            system = self._warm(model, options)
        (choice,) = captured.choices
        return system, choice.frontier()

    def by_hand(self, reshard_after_forward: bool | None, has_checkpoints: bool) -> tuple[System, int]:
        """Make a system with flags. Return it, and the bytes that the library says it needs."""
        torch._dynamo.reset()
        model: Any = build_gpt(self._size, self._device)
        for index, block in enumerate(model.blocks):
            model.blocks[index] = checkpoint_wrapper(block) if has_checkpoints else block
        sharding = {"mesh": self._mesh, "reshard_after_forward": reshard_after_forward}
        shard_blocks(model, fsdp_compile.fully_shard, **sharding)
        with capture(passes=False) as captured:
            system = self._warm(model, {})
        memory = explain_captured(captured, self._hardware, optimizer="sgd").memory
        return system, memory.peak_bytes + sum(value.nbytes for batch in self._batches for value in batch)

    def _warm(self, model: torch.nn.Module, options: dict[str, Any]) -> System:
        compiled = torch.compile(model, backend=fsdp_compile.fsdp_backend, fullgraph=True, options={**self._options, **options})
        system = System(model, compiled)
        self.losses.append([system.step(self._batches).item() for _ in range(_WARM_UP_STEPS)])
        ranks.progress(f"{len(self.losses)}: warm")
        return system


# --------------------------------------------------------------------------------------------- evaluation


def check_losses(results: Sequence[dict[str, Any]]) -> None:
    """Compare the losses of the systems, on each rank.

    Raises:
        AssertionError: a system trains differently.
    """
    for result in results:
        for losses in result["losses"][1:]:
            torch.testing.assert_close(torch.tensor(losses), torch.tensor(result["losses"][0]), rtol=1e-4, atol=0)


def print_table(results: Sequence[dict[str, Any]]) -> None:
    rows = []
    for name, facts in results[0]["facts"].items():
        seconds = slowest([result["seconds"][name] for result in results])
        times = [f"{value * 1000:.0f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
        chosen = [str(facts.get(key, "")) for key in ("kept", "recomputed")]
        rows.append([name, f"{facts['bytes'] / 1e6:.1f}", *chosen, *times])
    print(report.table(["system", "MB", "units kept", "regions again", "step ms", "least", "most"], rows))


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    if ranks.served(args, measure):
        return
    results = ranks.run_ranks([__file__, *argv], args)
    check_losses(results)
    print(f"\n{report.headline()}\n{Size.parse(args).describe()}\n{ranks.describe(args)}\n{args.rounds} rounds\n")
    print_table(results)
    report.write_json(args.json, ranks=results)


if __name__ == "__main__":
    main(sys.argv[1:])
