"""Memory budget: choose what a step keeps gathered, saves and recomputes, so that it fits into a number of bytes.

Policies are tried one by one on a joint graph: which units stay gathered between forward and backward, and which activations
are saved. For each policy, the graph is partitioned and scheduled, and the models for schedules estimate its time and its
bytes. The fastest policy whose bytes are within the budget is chosen.

The search begins with a grid of policies:

- **Units** whose resharding is open stay gathered, from the last that forward reads to the first. Parameters of the last live
  shortest, and their gathers in backward have the least compute to hide behind. If ranks are on several nodes, each node may
  keep a copy of the other units, a shard on each of its ranks. Backward then gathers them without the network.
- **Activations** are saved as the partitioner does by default. Or the partitioner recomputes cheap ones, its own next step.
  Or the first regions of forward are recomputed whole, too (:mod:`passes.transforms.recompute_regions`), as their
  activations would wait longest. The last region is not recomputed, as backward would do so at once.
- **Host memory**, if granted, holds activations of the first regions until backward
  (:mod:`passes.transforms.offload_activations`): all that the partitioner saves, or those that recomputed regions begin with.
  Or it holds the largest activations of all regions, up to a third or two thirds of a region's bytes.

If the graph is small enough for more trials, :func:`search` also tries neighbours of the best policies: one unit, region or
activation is different, or two are exchanged. If a policy sends more to the host than the host holds, the search tries the
largest values that fit.

The tried policies depend on the graph and the hardware numbers alone, not on the budget. So a larger budget never makes a step
slower, in the model. The choice depends on graph, budget and hardware numbers, which are the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from torch.fx import Graph

from ..models.cost_model import kernels, unwritten
from ..models.hardware import Hardware
from ..models.memory_model import Breakdown, Category, MemoryModel
from ..models.timeline import Costs, simulate
from .step_policy import OpenChoices, StepPolicy, Trial

#: Neighbours are tried until the graphs of all trials together have this many nodes. If activations may wait on the host, the
#: search explores twice, without and with the host, up to this limit each.
_MOST_NODES = 30_000


class BudgetTooLow(ValueError):
    """No tried policy fits into a memory budget."""


@dataclass(frozen=True)
class Choice:
    """The trials for a budget, and the chosen one.

    Attributes:
        limit: the budget in bytes.
        trials: all trials.
        chosen: the fastest trial that fits. Among equally fast ones, it has the fewest bytes, then it is the first.
    """

    limit: int
    trials: tuple[Trial, ...]
    chosen: Trial

    @staticmethod
    def of(trials: Sequence[Trial], limit: int) -> Choice:
        """Choose the fastest trial within a budget.

        Args:
            trials: the trials to choose from.
            limit: the budget in bytes.

        Raises:
            BudgetTooLow: no trial fits.
        """
        fitting = [trial for trial in trials if trial.peak_bytes <= limit]
        if not fitting:
            raise BudgetTooLow(_too_low(limit, min(trial.peak_bytes for trial in trials)))
        return Choice(limit, tuple(trials), min(fitting, key=lambda trial: (trial.time_ns, trial.peak_bytes)))

    def holds_at(self, limit: int) -> bool:
        """Return whether the choice would be the same with another budget."""
        return self.chosen.peak_bytes <= limit and Choice.of(self.trials, limit).chosen == self.chosen

    def frontier(self) -> list[Trial]:
        """Return the trials that some budget would choose, from the fewest bytes to the fastest."""
        return _frontier(self.trials)


def search(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial]) -> list[Trial]:
    """Try a grid of policies, and then neighbours of the best ones.

    The first exploration does not use the host, so granted host memory never makes a step slower.

    Args:
        choices: the open choices.
        attempt: evaluates a policy.

    Returns:
        The trials, without those that send more to the host than it holds.
    """
    tried: dict[StepPolicy, Trial] = {}
    if choices.offloads:
        _explore(replace(choices, offloads=()), attempt, tried)
    _explore(choices, attempt, tried)
    return list(filter(choices.allow, tried.values()))


def _explore(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial], tried: dict[StepPolicy, Trial]) -> None:
    most = len(tried) + _MOST_NODES // choices.num_nodes

    def attempt_all(policies: Iterable[StepPolicy]) -> None:
        for policy in policies:
            if policy not in tried:
                trial = tried[policy] = attempt(policy)
                if not choices.allow(trial):
                    attempt_all([choices.cut_to_host(trial)])

    grid = choices.grid()
    attempt_all(grid)
    attempt_all(policy for trial in [tried[policy] for policy in grid] for policy in choices.partial_offloads(trial))
    around: dict[StepPolicy, Iterator[StepPolicy]] = {}
    while True:
        before = len(tried)
        # Try one neighbour of each of the best in turn, as the limit leaves out most neighbours of a large graph.
        for center in _frontier(filter(choices.allow, tried.values())):
            policies = around.setdefault(center.policy, choices.near(center))
            policy = next((policy for policy in policies if policy not in tried), None)
            if policy is not None and len(tried) < most:
                attempt_all([policy])
        if len(tried) == before:
            return


def _frontier(trials: Iterable[Trial]) -> list[Trial]:
    """Find the trials that are faster than all with as many bytes or fewer, from the fewest bytes to the fastest."""
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.peak_bytes, trial.time_ns)):
        if not found or trial.time_ns < found[-1].time_ns:
            found.append(trial)
    return found


def graph_memory(graph: Graph, *, fuses: bool) -> Breakdown:
    """Count the live bytes of a scheduled graph by category and bucket.

    Args:
        graph: the graph.
        fuses: whether its lowering fuses operators into kernels.
    """
    order = list(graph.nodes)
    if not fuses:
        return MemoryModel(graph).breakdown(order)
    return MemoryModel(graph, unwritten(graph), kernels(graph)).breakdown(order)


def graph_peak(memory: Breakdown) -> int:
    """Return the most bytes that live at once inside of a graph."""
    return int(max(map(sum, zip(*memory.timeline.values(), strict=True)), default=0))


def graph_time(graph: Graph, hardware: Hardware) -> int:
    """Return how long a scheduled graph takes, in nanoseconds."""
    return simulate(list(graph.nodes), Costs.of(graph, hardware)).total


def held_in_backward(forward: Breakdown, backward: Breakdown) -> int:
    """Return the bytes of activations that forward gives out and backward does not free, as others hold them while it runs."""
    return int(max(0, forward.given_out[Category.ACTIVATIONS] - backward.taken[Category.ACTIVATIONS]))


def _too_low(limit: int, needed: int) -> str:
    return (
        f"options['memory_budget'] = {limit} bytes is too low: of all that was tried, the step that needs least needs {needed} "
        "bytes on each rank. Give at least so many, or have less live: more ranks, a smaller batch, smaller units, "
        "reshard_after_forward=None where it is False, an optimizer with less state (options['optimizer'] says which one is "
        "counted; offload_optimizer has none on the device), or units on the host (CPUOffloadPolicy)."
    )
