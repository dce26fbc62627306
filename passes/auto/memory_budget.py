"""Memory budget: choose what a step keeps, gathers again and computes again, so that all of it fits.

The policies of a joint graph are tried one by one: which units stay gathered between forward and backward, and how much of the
activations is saved. What comes of each is partitioned, scheduled and asked for its time and its bytes, by the models that
schedule graphs; the fastest whose bytes are within the budget is taken.

**Units** that nobody has decided about stay gathered from the last that forward reads to the first: parameters of the last live
shortest, and their gathers in backward have the least to hide behind.

**Activations** are saved as the partitioner does by default; or what is cheap to compute again is recomputed (its own next
step); or, besides, the first stretches of forward are recomputed whole (:mod:`passes.transforms.recompute_stretches`): those
whose activations would wait longest. The last one would be recomputed at once, and is not.

That is where :func:`search` begins. Then, as long as the graph is small enough for more trials, it looks around the best ones:
one unit or stretch different, or two that change places.

Which policies are tried depends on the graph and hardware numbers alone, not on the budget: so more bytes never make a step
slower, in the model. The choice depends on graph, budget and hardware numbers, which ranks have in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from ..ir.ops import Unshard, unshards, update_args
from ..models.cost_model import kernels, unwritten
from ..models.hardware import Hardware
from ..models.memory_model import Breakdown, Category, MemoryModel
from ..models.timeline import Costs, simulate
from ..transforms.recompute_stretches import forward_stretches, is_open, units_of_parameters

#: How many numbers of units that stay gathered, and of stretches that are recomputed, are tried; of the units also one, as that
#: is usually the root, which stays gathered by default.
_LEVELS = 4
#: What is near to the best is tried until the trials together have as many nodes as this.
_MOST_NODES = 30_000
#: For the partitioner: everything is saved that is faster to save; and what is cheap is recomputed. Less is what stretches are
#: for: among what is costly it would choose by size alone, and hold at once in backward what it has saved before.
SAVE, RECOMPUTE_CHEAP = 1.0, 0.999


class BudgetTooLow(ValueError):
    """Nothing that was tried fits into a memory budget."""


@dataclass(frozen=True)
class StepPolicy:
    """What a step does about parameters and activations between forward and backward.

    Attributes:
        kept: units that stay gathered, of those that are open, from the one that forward reads last.
        resharded: the other open ones.
        recomputed: which stretches of forward are computed again, by number.
        stretches: how many there are.
        activation_budget: the partitioner's, from 0 to 1.
    """

    kept: tuple[str, ...]
    resharded: tuple[str, ...]
    recomputed: tuple[int, ...]
    stretches: int
    activation_budget: float

    def reshard(self, graph: Graph) -> None:
        """Write into a joint graph which units reshard. In place."""
        for node in unshards(graph.nodes):
            unit = Unshard.of(node).unit
            if unit in self.kept or unit in self.resharded:
                update_args(node, reshard_after_forward=unit in self.resharded)


@dataclass(frozen=True)
class Trial:
    """A policy, and what the models say of its step.

    Attributes:
        policy: what was tried.
        peak_bytes: the most that lives at once, all the time that a step takes.
        time_ns: of forward and backward.
    """

    policy: StepPolicy
    peak_bytes: int
    time_ns: int


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

    def frontier(self) -> list[Trial]:
        """The trials that a budget can come to choose, from the least bytes to the fastest."""
        return _frontier(self.trials)


@dataclass(frozen=True)
class OpenChoices:
    """What a step may do one way or another.

    Attributes:
        units: those whose resharding is to be chosen, from the one that forward reads last.
        stretches: those that can be computed again as a whole, by number.
        num_stretches: how many there are.
        activation_budgets: the partitioner's.
        num_nodes: of the joint graph.
    """

    units: tuple[str, ...]
    stretches: tuple[int, ...]
    num_stretches: int
    activation_budgets: tuple[float, ...]
    num_nodes: int

    @staticmethod
    def of(graph: Graph, num_forward_outputs: int, open_units: Collection[str], activation_budget: float = SAVE) -> OpenChoices:
        """What is open about the step of a joint graph, ahead of the passes that speak to the partitioner.

        Args:
            graph: the graph.
            num_forward_outputs: how many of its outputs are forward's.
            open_units: those whose resharding is to be chosen.
            activation_budget: the partitioner's, as the user has set it; if that is something else than to save, it stays.
        """
        stretches = forward_stretches(graph, num_forward_outputs)
        return OpenChoices(
            tuple(unit for unit in _by_last_reader(graph, stretches) if unit in open_units),
            tuple(number for number, stretch in enumerate(stretches) if is_open(stretch)),
            len(stretches),
            (SAVE, RECOMPUTE_CHEAP) if activation_budget == SAVE else (activation_budget,),
            len(graph.nodes),
        )

    def policy(self, kept: Collection[str], recomputed: Collection[int], activation_budget: float) -> StepPolicy:
        """The policy that keeps some units and computes some stretches again."""
        return StepPolicy(
            tuple(unit for unit in self.units if unit in kept),
            tuple(unit for unit in self.units if unit not in kept),
            tuple(sorted(recomputed)),
            self.num_stretches,
            activation_budget,
        )

    def grid(self) -> list[StepPolicy]:
        """Policies all over what is open: the last units stay gathered, the first stretches are computed again."""
        earlier = tuple(number for number in self.stretches if number < self.num_stretches - 1)
        saving, cheap = self.activation_budgets[0], self.activation_budgets[-1]
        savings = dict.fromkeys([(saving, ()), *((cheap, earlier[:count]) for count in _levels(len(earlier)))])
        return [
            self.policy(self.units[:count], recomputed, budget)
            for budget, recomputed in savings
            for count in sorted({*_levels(len(self.units)), min(1, len(self.units))})
        ]

    def near(self, policy: StepPolicy) -> Iterator[StepPolicy]:
        """Policies that differ in one unit or stretch, or in two that change places, or in what the partitioner does."""
        kept, recomputed = set(policy.kept), set(policy.recomputed)
        for budget in self.activation_budgets:
            yield self.policy(kept, recomputed, budget)
        for unit in self.units:
            yield self.policy(kept ^ {unit}, recomputed, policy.activation_budget)
        for number in self.stretches:
            yield self.policy(kept, recomputed ^ {number}, policy.activation_budget)
        for one, other in itertools.product(policy.kept, policy.resharded):
            yield self.policy(kept ^ {one, other}, recomputed, policy.activation_budget)
        for first, second in itertools.product(policy.recomputed, sorted(set(self.stretches) - recomputed)):
            yield self.policy(kept, recomputed ^ {first, second}, policy.activation_budget)


def search(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial]) -> list[Trial]:
    """Try the grid, and then what is near to the best.

    Args:
        choices: what is open.
        attempt: evaluates a policy.
    """
    tried = {policy: attempt(policy) for policy in dict.fromkeys(choices.grid())}
    most = max(len(tried), _MOST_NODES // choices.num_nodes)
    around: dict[StepPolicy, Iterator[StepPolicy]] = {}
    while True:
        before = len(tried)
        # One for each of the best in turn: of a large graph, not all that is near is tried.
        for center in [trial.policy for trial in _frontier(tried.values())]:
            policies = around.setdefault(center, choices.near(center))
            policy = next((policy for policy in policies if policy not in tried), None)
            if policy is not None and len(tried) < most:
                tried[policy] = attempt(policy)
        if len(tried) == before:
            return list(tried.values())


def _frontier(trials: Iterable[Trial]) -> list[Trial]:
    """Those that are faster than all with as many bytes or fewer, from the least bytes to the fastest."""
    found: list[Trial] = []
    for trial in sorted(trials, key=lambda trial: (trial.peak_bytes, trial.time_ns)):
        if not found or trial.time_ns < found[-1].time_ns:
            found.append(trial)
    return found


def _levels(count: int) -> list[int]:
    """Numbers from none to all, evenly spread."""
    return sorted({round(count * level / (_LEVELS - 1)) for level in range(_LEVELS)}) if count > 0 else [0]


def _by_last_reader(graph: Graph, stretches: Sequence[Sequence[Node]]) -> list[str]:
    """The units of a graph, from the one that forward reads last to the one that it is done with first."""
    unit_of = units_of_parameters(graph)
    last = dict.fromkeys(unit_of.values(), -1)
    for place, node in enumerate(node for stretch in stretches for node in stretch):
        last |= {unit_of[source]: place for source in node.all_input_nodes if source in unit_of}
    return sorted(last, key=last.__getitem__, reverse=True)


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
        "counted)."
    )
