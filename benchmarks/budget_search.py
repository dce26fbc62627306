"""Compare the choice within a memory budget with the best of all possible choices.

    python benchmarks/budget_search.py                # 200 random graphs
    python benchmarks/budget_search.py --graphs 20
    python benchmarks/budget_search.py --several-nodes   # those of the 200 whose ranks are on several nodes
    python benchmarks/budget_search.py --host            # activations may wait on the host

Small random models are traced for random machines, of one node or several. Brute force partitions, schedules and evaluates
every combination of

- units that stay gathered, or of which nodes keep copies;
- regions that are computed again;
- with ``--host``, activations that wait on the host.

By the models of time and memory, the best combination is the best that a search can find. It is compared with the backend's
search under ``options={"memory_budget": ...}``: for all budgets at which the best combination changes, and for one drawn at
random between the least and the most. Nothing is run, and no process group is needed.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple
from unittest import mock

import torch
from harness import report
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from fsdp_compile.compiler import memory_budget
from fsdp_compile.explain import explain
from passes.auto.memory_budget import BudgetTooLow, Choice, search
from passes.auto.step_policy import OpenChoices, StepPolicy, Trial

_UNLIMITED = 1 << 50
_RANKS_PER_NODE = 8


def parse_args(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200, metavar="N", help="how many; default 200")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="of the first graph; default 0")
    parser.add_argument("--several-nodes", action="store_true", help="leave out graphs whose ranks share a node")
    parser.add_argument(
        "--host", action="store_true", help="let activations wait on the host, of models of one block in one node, on a GPU"
    )
    report.add_flags(parser)
    args = parser.parse_args(argv)
    if args.graphs < 1:
        parser.error("--graphs has to be at least 1")
    return args


# ------------------------------------------------------------------------------------------ random models


class Block(nn.Module):
    """A feed-forward block; norm, gate, biases, activation and residual connection are drawn at random."""

    def __init__(self, numbers: random.Random, width: int):
        super().__init__()
        inner = width * numbers.choice([1, 2, 4])
        self.norm = nn.LayerNorm(width) if numbers.random() < 0.5 else nn.Identity()
        self.up = nn.Linear(width, inner, bias=numbers.random() < 0.5)
        self.gate = nn.Linear(width, inner, bias=False) if numbers.random() < 0.3 else None
        self.down = nn.Linear(inner, width, bias=numbers.random() < 0.5)
        self.act = numbers.choice([torch.relu, torch.tanh, nn.functional.gelu, nn.functional.silu])
        self.has_residual = numbers.random() < 0.7

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        inner = self.act(self.up(normed))
        if self.gate is not None:
            inner = inner * self.gate(normed)
        y: Tensor = self.down(inner)
        return x + y if self.has_residual else y


class Model(nn.Module):
    def __init__(self, numbers: random.Random, width: int, depth: int):
        super().__init__()
        self.blocks = nn.ModuleList([Block(numbers, width) for _ in range(depth)])
        self.head = nn.Linear(width, numbers.choice([8, width, 8 * width]))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return torch.log_softmax(self.head(x), -1).square().mean()


def shard(model: nn.Module, mesh: DeviceMesh) -> None:
    for block in model.get_submodule("blocks").children():
        fsdp_compile.fully_shard(block, mesh=mesh)
    fsdp_compile.fully_shard(model, mesh=mesh)


class Drawn(NamedTuple):
    """A random model, with its input, the shape of its mesh, and the machine."""

    model: nn.Module
    x: Tensor
    shape: tuple[int, ...]
    hardware: str

    @staticmethod
    def of(seed: int) -> Drawn:
        numbers = random.Random(seed)
        width, depth, rows = 2 ** numbers.randint(5, 11), numbers.choice([1, 2, 2]), 2 ** numbers.randint(3, 14)
        with torch.device("meta"):
            model, x = Model(numbers, width, depth), torch.empty(rows, width)
        shape = numbers.choice([(2,), (8,), (64,), (2, 8)])
        return Drawn(model, x, shape, numbers.choice(["cpu", "a100", "h100", "b200"]))

    @property
    def has_several_nodes(self) -> bool:
        """True if the ranks that share parameters are on several nodes. A node of these machines has eight ranks."""
        return self.shape[-1] > _RANKS_PER_NODE

    @property
    def suits_host(self) -> bool:
        """True if there is a host to copy to, and if policies are few enough for brute force."""
        return self.hardware != "cpu" and not self.has_several_nodes and len(self.model.get_submodule("blocks")) == 1  # type: ignore[arg-type]


def trials_of(drawn: Drawn, *, host: bool = False) -> dict[str, list[Trial]]:
    """Try policies for a random model. Return the trials by the grid alone, by the search, and by brute force."""
    found: dict[str, list[Trial]] = {}

    def search_all(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial]) -> list[Trial]:
        known: dict[StepPolicy, Trial] = {}

        def attempt_once(policy: StepPolicy) -> Trial:
            if policy not in known:
                known[policy] = attempt(policy)
            return known[policy]

        found["grid"] = [attempt_once(policy) for policy in choices.grid()]
        found["search"] = search(choices, attempt_once)
        found["all"] = every_trial(choices, attempt_once)
        return found["search"]

    with mock.patch.object(memory_budget, "search", search_all):
        options: dict[str, Any] = {"memory_budget": _UNLIMITED, "host_budget": _UNLIMITED if host else None}
        explain(drawn.model, drawn.x, drawn.shape, drawn.hardware, shard=shard, options=options, suggest=False)
    return found


def every_policy(choices: OpenChoices) -> Iterator[StepPolicy]:
    """Yield all policies for the open choices, without activations on the host."""
    subsets = (_subsets(values) for values in (choices.units, choices.in_nodes, choices.regions))
    for kept, in_nodes, recomputed in itertools.product(*subsets):
        if not set(kept).intersection(in_nodes):
            for budget in choices.activation_budgets:
                yield choices.policy(kept, recomputed, budget, in_nodes=in_nodes)


def every_trial(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial]) -> list[Trial]:
    """Try all policies, and each with every set of its saved activations on the host, where that is open."""
    found = []
    for trial in map(attempt, every_policy(choices)):
        found.append(trial)
        for waiting in _subsets(trial.saved)[1:] if choices.offloads else []:
            found.append(attempt(choices.with_waiting(trial, waiting)))
    return found


def _subsets(values: Sequence[Any]) -> list[tuple[Any, ...]]:
    return [subset for size in range(len(values) + 1) for subset in itertools.combinations(values, size)]


# --------------------------------------------------------------------------------------------- evaluation


def slower_by(trials: Sequence[Trial], best: Sequence[Trial], budget: int) -> float:
    """Return the extra time of the choice among ``trials``, relative to the best; infinity if no trial fits the budget."""
    optimum = Choice.of(best, budget).chosen.time_ns
    try:
        return Choice.of(trials, budget).chosen.time_ns / optimum - 1
    except BudgetTooLow:
        return float("inf")


def compare(seed: int, *, host: bool = False) -> dict[str, Any]:
    """Compare the choices of grid and search with the best ones, for one random graph."""
    found = trials_of(Drawn.of(seed), host=host)
    frontier = Choice.of(found["all"], _UNLIMITED).frontier()
    drawn = random.Random(f"budget of {seed}").randint(frontier[0].peak_bytes, frontier[-1].peak_bytes)
    budgets = [trial.peak_bytes for trial in frontier]
    result: dict[str, Any] = {"seed": seed, "tried": {name: len(trials) for name, trials in found.items()}}
    for name in ("grid", "search"):
        every = [slower_by(found[name], found["all"], budget) for budget in budgets]
        result[name] = {"drawn": slower_by(found[name], found["all"], drawn), "every": every}
    return result


def print_table(results: Sequence[dict[str, Any]]) -> None:
    rows = []
    for name, label in (("grid", "where it begins"), ("search", "all of it")):
        drawn = [result[name]["drawn"] for result in results]
        every = [value for result in results for value in result[name]["every"]]
        tried = statistics.median(result["tried"][name] for result in results)
        row = [label, f"{tried:g}"]
        for values in (drawn, every):
            row += [f"{len(values)}", f"{sum(value == 0 for value in values) / len(values):.1%}", f"{max(values):.2%}"]
        rows.append(row)
    every_policy_count = statistics.median(result["tried"]["all"] for result in results)
    head = ["search", "tried", "drawn budgets", "best found", "worst", "budgets at changes", "best found", "worst"]
    print(report.table(head, rows))
    print(f"Medians of what is tried; there are {every_policy_count:g} policies in all.")


def main(argv: Sequence[str]) -> None:
    args = parse_args(argv)
    results = []
    for seed in range(args.first, args.first + args.graphs):
        drawn = Drawn.of(seed)
        if (args.several_nodes and not drawn.has_several_nodes) or (args.host and not drawn.suits_host):
            continue
        results.append(compare(seed, host=args.host))
        print(f"graph {seed}: {results[-1]['tried']}", file=sys.stderr, flush=True)
    print(f"\n{report.headline()}\n{len(results)} graphs\n")
    print_table(results)
    report.write_json(args.json, graphs=results)


if __name__ == "__main__":
    main(sys.argv[1:])
