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
(:mod:`passes.transforms.offload_activations`): all of it, or what stretches that are recomputed begin with.

That is where :func:`search` begins. Then, as long as the graph is small enough for more trials, it looks around the best ones:
one unit or stretch different, or two that change places.

Which policies are tried depends on the graph and hardware numbers alone, not on the budget: so more bytes never make a step
slower, in the model. The choice depends on graph, budget and hardware numbers, which ranks have in common.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch.fx import Graph, Node

from ..collectives.layout import REPLICATED
from ..ir.ops import Unshard, unshards, update_args
from ..models.cost_model import kernels, unwritten
from ..models.hardware import Hardware
from ..models.memory_model import Breakdown, Category, MemoryModel
from ..models.timeline import Costs, simulate
from ..transforms.recompute_stretches import forward_stretches, is_open, units_of_parameters

#: How many numbers of units that stay gathered, and of stretches that are recomputed, are tried; of the units also one, as that
#: is usually the root, which stays gathered by default.
_LEVELS = 4
#: What is near to the best is tried until the trials together have as many nodes as this; twice, where the host is open.
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
        offloaded: the stretches of which what is saved waits on the host, by number; of those that are computed again too, that
            is what the next one begins with.
        in_nodes: of the resharded units, those of which each node keeps a copy.
    """

    kept: tuple[str, ...]
    resharded: tuple[str, ...]
    recomputed: tuple[int, ...]
    stretches: int
    activation_budget: float
    offloaded: tuple[int, ...] = ()
    in_nodes: tuple[str, ...] = ()

    def reshard(self, graph: Graph, node_groups: Mapping[str, str]) -> None:
        """Write into a joint graph which units reshard. In place.

        Args:
            graph: the graph.
            node_groups: see :meth:`OpenChoices.of`.
        """
        for node in unshards(graph.nodes):
            spec = Unshard.of(node)
            if spec.unit in self.kept or spec.unit in self.resharded:
                group = node_groups.get(spec.group, "") if spec.unit in self.in_nodes else ""
                update_args(node, reshard_after_forward=spec.unit in self.resharded, post_forward_group=group)


@dataclass(frozen=True)
class Trial:
    """A policy, and what the models say of its step.

    Attributes:
        policy: what was tried.
        peak_bytes: the most that lives at once, all the time that a step takes.
        time_ns: of forward and backward.
        host_bytes: of activations that wait on the host between the two.
    """

    policy: StepPolicy
    peak_bytes: int
    time_ns: int
    host_bytes: int = 0


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


@dataclass(frozen=True)
class OpenChoices:
    """What a step may do one way or another.

    Attributes:
        units: those whose resharding is to be chosen, from the one that forward reads last.
        stretches: those that can be computed again as a whole, by number.
        num_stretches: how many there are.
        activation_budgets: the partitioner's.
        num_nodes: of the joint graph.
        offloads: stretches of which what is saved can wait on the host, by number.
        in_nodes: units of which nodes can keep a copy.
    """

    units: tuple[str, ...]
    stretches: tuple[int, ...]
    num_stretches: int
    activation_budgets: tuple[float, ...]
    num_nodes: int
    offloads: tuple[int, ...] = ()
    in_nodes: tuple[str, ...] = ()

    @staticmethod
    def of(
        graph: Graph,
        num_forward_outputs: int,
        open_units: Collection[str],
        activation_budget: float = SAVE,
        *,
        offloads: bool = False,
        node_groups: Mapping[str, str] | None = None,
    ) -> OpenChoices:
        """What is open about the step of a joint graph, ahead of the passes that speak to the partitioner.

        Args:
            graph: the graph.
            num_forward_outputs: how many of its outputs are forward's.
            open_units: those whose resharding is to be chosen.
            activation_budget: the partitioner's, as the user has set it; if that is something else than to save, it stays.
            offloads: whether activations may wait on the host.
            node_groups: of groups that shard and are on several nodes, by name: that of the ranks of this rank's node.
        """
        stretches = forward_stretches(graph, num_forward_outputs)
        open_stretches = tuple(number for number, stretch in enumerate(stretches) if is_open(stretch))
        units = tuple(unit for unit in _by_last_reader(graph, stretches) if unit in open_units)
        in_nodes = _units_in_nodes(graph, node_groups or {})
        return OpenChoices(
            units,
            open_stretches,
            len(stretches),
            (SAVE, RECOMPUTE_CHEAP) if activation_budget == SAVE else (activation_budget,),
            len(graph.nodes),
            open_stretches if offloads else (),
            tuple(unit for unit in units if unit in in_nodes),
        )

    def policy(
        self,
        kept: Collection[str],
        recomputed: Collection[int],
        activation_budget: float,
        offloaded: Collection[int] = (),
        in_nodes: Collection[str] = (),
    ) -> StepPolicy:
        """The policy that keeps some units, and of others a copy in each node, computes some stretches again, and has some wait
        on the host."""
        return StepPolicy(
            tuple(unit for unit in self.units if unit in kept),
            tuple(unit for unit in self.units if unit not in kept),
            tuple(sorted(recomputed)),
            self.num_stretches,
            activation_budget,
            tuple(sorted(offloaded)),
            tuple(unit for unit in self.in_nodes if unit in in_nodes and unit not in kept),
        )

    def grid(self) -> list[StepPolicy]:
        """Policies all over what is open: the last units stay gathered, and of the others, nodes have a copy or not; the first
        stretches are computed again, or wait on the host, or both."""
        earlier = [tuple(n for n in numbers if n < self.num_stretches - 1) for numbers in (self.stretches, self.offloads)]
        levels, waiting = ([numbers[:count] for count in _levels(len(numbers))] for numbers in earlier)
        saving, cheap = self.activation_budgets[0], self.activation_budgets[-1]
        policies = [
            self.policy(self.units[:count], recomputed, budget, in_nodes=in_nodes)
            for in_nodes in dict.fromkeys(((), self.in_nodes))
            for budget, recomputed in [(saving, ()), *((cheap, level) for level in levels)]
            for count in sorted({*_levels(len(self.units)), min(1, len(self.units))})
        ]
        # Beside these, units stay gathered as by default, or all.
        policies += [
            self.policy(self.units[:count], recomputed, budget, offloaded)
            for offloaded in waiting[1:]
            for budget, recomputed in ((saving, ()), (cheap, ()), (cheap, offloaded))
            for count in (1, len(self.units))
        ]
        return list(dict.fromkeys(policies))

    def near(self, policy: StepPolicy) -> Iterator[StepPolicy]:
        """Policies that differ in one unit or stretch, or in two that change places, or in what the partitioner does; or in any
        two units of which nodes can keep copies."""
        for budget in self.activation_budgets:
            yield replace(policy, activation_budget=budget)
        for unit in self.units:
            yield self._changed(policy, kept={unit})
        for units in (*((unit,) for unit in self.in_nodes), *itertools.combinations(self.in_nodes, 2)):
            yield from self._in_other_places(policy, units)
        for number in self.stretches:
            yield self._changed(policy, recomputed={number})
        for number in self.offloads:
            yield self._changed(policy, offloaded={number})
            yield self._changed(policy, recomputed={number}, offloaded={number})
        for one, other in itertools.product(policy.kept, policy.resharded):
            yield self._changed(policy, kept={one, other})
        for name, numbers in (("recomputed", self.stretches), ("offloaded", self.offloads)):
            chosen = getattr(policy, name)
            for first, second in itertools.product(chosen, sorted(set(numbers).difference(chosen))):
                yield self._changed(policy, **{name: {first, second}})

    def _in_other_places(self, policy: StepPolicy, units: Sequence[str]) -> Iterator[StepPolicy]:
        """Policies with these units gathered as a whole, or within a node, or not at all."""
        kept, in_nodes = (set(chosen).difference(units) for chosen in (policy.kept, policy.in_nodes))
        for ways in itertools.product(("whole", "in a node", "not at all"), repeat=len(units)):
            placed = list(zip(units, ways, strict=True))
            yield self.policy(
                kept.union(unit for unit, way in placed if way == "whole"),
                policy.recomputed,
                policy.activation_budget,
                policy.offloaded,
                in_nodes.union(unit for unit, way in placed if way == "in a node"),
            )

    def _changed(
        self,
        policy: StepPolicy,
        kept: Set[str] = frozenset(),
        recomputed: Set[int] = frozenset(),
        offloaded: Set[int] = frozenset(),
    ) -> StepPolicy:
        """A policy that does otherwise with these."""
        return self.policy(
            kept ^ set(policy.kept),
            recomputed ^ set(policy.recomputed),
            policy.activation_budget,
            offloaded ^ set(policy.offloaded),
            policy.in_nodes,
        )


def search(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial | None]) -> list[Trial]:
    """Try the grid, and then what is near to the best; at first without the host, which so never makes a step slower.

    Args:
        choices: what is open.
        attempt: evaluates a policy; None: it takes more of the host than there is.
    """
    tried: dict[StepPolicy, Trial | None] = {}
    if choices.offloads:
        _explore(replace(choices, offloads=()), attempt, tried)
    _explore(choices, attempt, tried)
    return list(filter(None, tried.values()))


def _explore(
    choices: OpenChoices, attempt: Callable[[StepPolicy], Trial | None], tried: dict[StepPolicy, Trial | None]
) -> None:
    most = len(tried) + _MOST_NODES // choices.num_nodes
    tried |= {policy: attempt(policy) for policy in choices.grid() if policy not in tried}
    around: dict[StepPolicy, Iterator[StepPolicy]] = {}
    while True:
        before = len(tried)
        # One for each of the best in turn: of a large graph, not all that is near is tried.
        for center in [trial.policy for trial in _frontier(filter(None, tried.values()))]:
            policies = around.setdefault(center, choices.near(center))
            policy = next((policy for policy in policies if policy not in tried), None)
            if policy is not None and len(tried) < most:
                tried[policy] = attempt(policy)
        if len(tried) == before:
            return


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


def _units_in_nodes(graph: Graph, node_groups: Mapping[str, str]) -> set[str]:
    """The units of which nodes can keep a copy: those with parameters that are cut over several nodes. What an extension sends
    is not kept so."""
    specs = [Unshard.of(node) for node in unshards(graph.nodes)]
    excluded = {spec.unit for spec in specs if spec.extension}
    return {spec.unit for spec in specs if spec.group in node_groups and spec.dim != REPLICATED} - excluded


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
