"""Memory budget: choose what a step keeps, gathers again and computes again, so that all of it fits.

The policies of a joint graph are tried one by one: which units stay gathered between forward and backward, and how much of the
activations is saved. What comes of each is partitioned, scheduled and asked for its time and its bytes, by the models that
schedule graphs; the fastest whose bytes are within the budget is taken.

**Units** that nobody has decided about stay gathered from the last that forward reads to the first: parameters of the last live
shortest, and their gathers in backward have the least to hide behind. Where ranks are on several nodes, each node may keep a
copy of the others, a shard on each of its ranks, so that backward gathers them without the network.

**Activations** are saved as the partitioner does by default; or what is cheap to compute again is recomputed (its own next
step); or, besides, the first stretches of forward are recomputed whole (:mod:`passes.transforms.recompute_stretches`): those
whose activations would wait longest. The last one would be recomputed at once, and is not.

Where host memory is granted, what the partitioner saves of the first stretches may wait there for backward
(:mod:`passes.transforms.offload_activations`): all of it, or what stretches that are recomputed begin with; or of all stretches
the largest values, up to a third or two thirds of their bytes.

That is where :func:`search` begins. Then, as long as the graph is small enough for more trials, it looks around the best ones:
one unit, stretch or activation different, or two that change places. Of a policy that sends more to the host than it holds, the
largest values are tried that it does hold.

Which policies are tried depends on the graph and hardware numbers alone, not on the budget: so more bytes never make a step
slower, in the model. The choice depends on graph, budget and hardware numbers, which ranks have in common.
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

#: What is near to the best is tried until the trials together have as many nodes as this; twice, where the host is open.
_MOST_NODES = 30_000


class BudgetTooLow(ValueError):
    """Nothing that was tried fits into a memory budget."""


@dataclass(frozen=True)
class Choice:
    """What was tried for a budget, and what was chosen.

    Attributes:
        limit: the budget in bytes.
        trials: all that was tried.
        chosen: the fastest of those that fit; of equals that with the fewest bytes, then the first.
    """

    limit: int
    trials: tuple[Trial, ...]
    chosen: Trial

    @staticmethod
    def of(trials: Sequence[Trial], limit: int) -> Choice:
        """Choose.

        Raises:
            BudgetTooLow: none fits.
        """
        fitting = [trial for trial in trials if trial.peak_bytes <= limit]
        if not fitting:
            raise BudgetTooLow(_too_low(limit, min(trial.peak_bytes for trial in trials)))
        return Choice(limit, tuple(trials), min(fitting, key=lambda trial: (trial.time_ns, trial.peak_bytes)))

    def holds_at(self, limit: int) -> bool:
        """Whether the choice would be the same within another budget."""
        return self.chosen.peak_bytes <= limit and Choice.of(self.trials, limit).chosen == self.chosen

    def frontier(self) -> list[Trial]:
        """The trials that a budget can come to choose, from the least bytes to the fastest."""
        return _frontier(self.trials)


def search(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial]) -> list[Trial]:
    """Try the grid, and then what is near to the best; at first without the host, which so never makes a step slower.

    Args:
        choices: what is open.
        attempt: evaluates a policy.

    Returns:
        What was tried, but for what takes more of the host than there is.
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
    attempt_all(policy for trial in [tried[policy] for policy in grid] for policy in choices.in_part(trial))
    around: dict[StepPolicy, Iterator[StepPolicy]] = {}
    while True:
        before = len(tried)
        # One for each of the best in turn: of a large graph, not all that is near is tried.
        for center in _frontier(filter(choices.allow, tried.values())):
            policies = around.setdefault(center.policy, choices.near(center))
            policy = next((policy for policy in policies if policy not in tried), None)
            if policy is not None and len(tried) < most:
                attempt_all([policy])
        if len(tried) == before:
            return


def _frontier(trials: Iterable[Trial]) -> list[Trial]:
    """Those that are faster than all with as many bytes or fewer, from the least bytes to the fastest."""
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.peak_bytes, trial.time_ns)):
        if not found or trial.time_ns < found[-1].time_ns:
            found.append(trial)
    return found


def graph_memory(graph: Graph, *, fuses: bool) -> Breakdown:
    """The live bytes of a scheduled graph.

    Args:
        graph: the graph.
        fuses: whether its lowering fuses operators into kernels.
    """
    order = list(graph.nodes)
    if not fuses:
        return MemoryModel(graph).breakdown(order)
    return MemoryModel(graph, unwritten(graph), kernels(graph)).breakdown(order)


def graph_peak(memory: Breakdown) -> int:
    """The most that lives at once inside of a graph."""
    return int(max(map(sum, zip(*memory.timeline.values(), strict=True)), default=0))


def graph_time(graph: Graph, hardware: Hardware) -> int:
    """How long a scheduled graph takes, in nanoseconds."""
    return simulate(list(graph.nodes), Costs.of(graph, hardware)).total


def held_in_backward(forward: Breakdown, backward: Breakdown) -> int:
    """The bytes of activations that forward gave out and backward does not free: others hold them while it runs."""
    return int(max(0, forward.given_out[Category.ACTIVATIONS] - backward.taken[Category.ACTIVATIONS]))


def _too_low(limit: int, needed: int) -> str:
    return (
        f"options['memory_budget'] = {limit} bytes is too low: of all that was tried, the step that needs least needs {needed} "
        "bytes on each rank. Give at least so many, or have less live: more ranks, a smaller batch, smaller units, "
        "reshard_after_forward=None where it is False, an optimizer with less state (options['optimizer'] says which one is "
        "counted; offload_optimizer has none on the device), or units on the host (CPUOffloadPolicy)."
    )
