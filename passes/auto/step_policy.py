"""Step policies: what a step may do about parameters and activations between forward and backward, and what is near to that.

A :class:`StepPolicy` is one way, :class:`OpenChoices` are all of them: where a search begins, and the neighbours of a policy.
:mod:`passes.auto.memory_budget` searches among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import Graph, Node

from ..collectives.layout import REPLICATED
from ..ir.ops import Unshard, unshards, update_args
from ..transforms.recompute_stretches import forward_stretches, is_open, units_of_parameters

#: How many numbers of units that stay gathered, and of stretches that are recomputed, are tried; of the units also one, as that
#: is usually the root, which stays gathered by default.
_LEVELS = 4
#: For the partitioner: everything is saved that is faster to save; and what is cheap is recomputed. Less is what stretches are
#: for: among what is costly it would choose by size alone, and hold at once in backward what it has saved before.
SAVE, RECOMPUTE_CHEAP = 1.0, 0.999


class Activation(NamedTuple):
    """Something that forward saves for backward.

    Attributes:
        stretch: the stretch that computes it, by number.
        place: which operator of the stretch does. In equal layers it is the same.
        name: that of the node.
        nbytes: its size.
    """

    stretch: int
    place: int
    name: str
    nbytes: int


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
        on_device: what does not wait on the host, of the stretches of which the rest does.
    """

    kept: tuple[str, ...]
    resharded: tuple[str, ...]
    recomputed: tuple[int, ...]
    stretches: int
    activation_budget: float
    offloaded: tuple[int, ...] = ()
    in_nodes: tuple[str, ...] = ()
    on_device: tuple[Activation, ...] = ()

    def without_host(self) -> StepPolicy:
        """The policy by which nothing waits on the host, and which is the same otherwise."""
        return replace(self, offloaded=(), on_device=())

    def waits(self, stretch: int, place: int) -> bool:
        """Whether what an operator of a stretch computes waits on the host, if it is saved."""
        stays = ((activation.stretch, activation.place) for activation in self.on_device)
        return stretch in self.offloaded and (stretch, place) not in stays

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
        saved: those that can wait there, in the order of forward's outputs.
    """

    policy: StepPolicy
    peak_bytes: int
    time_ns: int
    host_bytes: int = 0
    saved: tuple[Activation, ...] = ()

    @property
    def waiting(self) -> list[Activation]:
        """What waits on the host because of the policy."""
        return [activation for activation in self.saved if self.policy.waits(activation.stretch, activation.place)]


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
        host_bytes: how many may wait there.
    """

    units: tuple[str, ...]
    stretches: tuple[int, ...]
    num_stretches: int
    activation_budgets: tuple[float, ...]
    num_nodes: int
    offloads: tuple[int, ...] = ()
    in_nodes: tuple[str, ...] = ()
    host_bytes: int = 0

    @staticmethod
    def of(
        graph: Graph,
        num_forward_outputs: int,
        open_units: Collection[str],
        activation_budget: float = SAVE,
        *,
        host_bytes: int = 0,
        node_groups: Mapping[str, str] | None = None,
    ) -> OpenChoices:
        """What is open about the step of a joint graph, ahead of the passes that speak to the partitioner.

        Args:
            graph: the graph.
            num_forward_outputs: how many of its outputs are forward's.
            open_units: those whose resharding is to be chosen.
            activation_budget: the partitioner's, as the user has set it; if that is something else than to save, it stays.
            host_bytes: how many of activations may wait on the host.
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
            open_stretches if host_bytes > 0 else (),
            tuple(unit for unit in units if unit in in_nodes),
            host_bytes,
        )

    def policy(
        self,
        kept: Collection[str],
        recomputed: Collection[int],
        activation_budget: float,
        offloaded: Collection[int] = (),
        in_nodes: Collection[str] = (),
        on_device: Collection[Activation] = (),
    ) -> StepPolicy:
        """The policy that keeps some units, and of others a copy in each node, computes some stretches again, and has what is
        saved of some wait on the host, but for what stays on the device."""
        return StepPolicy(
            tuple(unit for unit in self.units if unit in kept),
            tuple(unit for unit in self.units if unit not in kept),
            tuple(sorted(recomputed)),
            self.num_stretches,
            activation_budget,
            tuple(sorted(offloaded)),
            tuple(unit for unit in self.in_nodes if unit in in_nodes and unit not in kept),
            tuple(sorted(activation for activation in on_device if activation.stretch in offloaded)),
        )

    def allow(self, trial: Trial) -> bool:
        """Whether the host holds what waits there. What the user sends there is not a policy's."""
        return not trial.policy.offloaded or trial.host_bytes <= self.host_bytes

    def grid(self) -> list[StepPolicy]:
        """Policies all over what is open: the last units stay gathered, and of the others, nodes have a copy or not; the first
        stretches are computed again, or wait on the host, or both."""
        levels, waiting = (
            [numbers[:count] for count in _levels(len(numbers))]
            for numbers in map(self._earlier, (self.stretches, self.offloads))
        )
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

    def in_part(self, trial: Trial) -> Iterator[StepPolicy]:
        """Where all stretches wait on the host: policies by which of each only the largest values do, together a part of its
        bytes. So copies are spread over all that is computed."""
        policy = trial.policy
        if policy.recomputed or not policy.offloaded or policy.offloaded != self._earlier(self.offloads):
            return
        for level in range(1, _LEVELS - 1):
            wait: list[Activation] = []
            for number in policy.offloaded:
                values = [activation for activation in trial.waiting if activation.stretch == number]
                wait += _largest(values, sum(activation.nbytes for activation in values) * level // (_LEVELS - 1))
            yield self.with_waiting(trial, wait)

    def cut_to_host(self, trial: Trial) -> StepPolicy:
        """The policy by which less waits, where that is more than the host holds: the largest values."""
        others = trial.host_bytes - sum(activation.nbytes for activation in trial.waiting)
        return self.with_waiting(trial, _largest(trial.waiting, self.host_bytes - others))

    def near(self, trial: Trial) -> Iterator[StepPolicy]:
        """Policies that differ in one unit, stretch or activation, or in two that change places, or in what the partitioner
        does; or in any two units of which nodes can keep copies; or in equal activations of all stretches."""
        policy = trial.policy
        for budget in self.activation_budgets:
            # Others are saved then.
            yield policy if budget == policy.activation_budget else replace(policy, activation_budget=budget, on_device=())
        for unit in self.units:
            yield self._changed(policy, kept={unit})
        for units in (*((unit,) for unit in self.in_nodes), *itertools.combinations(self.in_nodes, 2)):
            yield from self._in_other_places(policy, units)
        for number in self.stretches:
            yield self._changed(policy, recomputed={number})
        for number in self.offloads:
            yield self._changed(policy, offloaded={number})
            yield self._changed(policy, recomputed={number}, offloaded={number})
        yield from self._with_other_activations(trial)
        for one, other in itertools.product(policy.kept, policy.resharded):
            yield self._changed(policy, kept={one, other})
        for name, numbers in (("recomputed", self.stretches), ("offloaded", self.offloads)):
            chosen = getattr(policy, name)
            for first, second in itertools.product(chosen, sorted(set(numbers).difference(chosen))):
                yield self._changed(policy, **{name: {first, second}})

    def _with_other_activations(self, trial: Trial) -> Iterator[StepPolicy]:
        """Policies by which something stays on the device that waits on the host, or the other way round, or both."""
        waiting = set(trial.waiting)
        saved = [activation for activation in trial.saved if activation.stretch in self.offloads]
        for place in dict.fromkeys(activation.place for activation in saved):
            equal = {activation for activation in saved if activation.place == place}
            yield self.with_waiting(trial, waiting | equal)
            yield self.with_waiting(trial, waiting - equal)
        for activation in saved:
            yield self.with_waiting(trial, waiting ^ {activation})
        for one, other in itertools.product(trial.waiting, saved):
            if other not in waiting:
                yield self.with_waiting(trial, waiting ^ {one, other})

    def with_waiting(self, trial: Trial, waiting: Collection[Activation]) -> StepPolicy:
        """The policy of a trial, but that of what it saves, these wait on the host."""
        policy = trial.policy
        return self.policy(
            policy.kept,
            policy.recomputed,
            policy.activation_budget,
            {activation.stretch for activation in waiting},
            policy.in_nodes,
            set(trial.saved).difference(waiting),
        )

    def _earlier(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Stretches but for the last one."""
        return tuple(number for number in numbers if number < self.num_stretches - 1)

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
                policy.on_device,
            )

    def _changed(
        self,
        policy: StepPolicy,
        kept: Set[str] = frozenset(),
        recomputed: Set[int] = frozenset(),
        offloaded: Set[int] = frozenset(),
    ) -> StepPolicy:
        """A policy that does otherwise with these."""
        # Of a stretch that changes, others are saved, or all of it begins to wait.
        on_device = [activation for activation in policy.on_device if activation.stretch not in recomputed | offloaded]
        return self.policy(
            kept ^ set(policy.kept),
            recomputed ^ set(policy.recomputed),
            policy.activation_budget,
            offloaded ^ set(policy.offloaded),
            policy.in_nodes,
            on_device,
        )


def _largest(activations: Sequence[Activation], nbytes: int) -> list[Activation]:
    """The largest activations that together have no more bytes than that."""
    left = nbytes
    found = []
    for activation in sorted(activations, key=lambda activation: (-activation.nbytes, activation)):
        if activation.nbytes <= left:
            left -= activation.nbytes
            found.append(activation)
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
