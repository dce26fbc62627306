"""Step policies: the ways in which a step can treat parameters and activations between forward and backward.

A :class:`StepPolicy` is one way. :class:`OpenChoices` has all ways: the policies with which a search begins, and the neighbours
of a policy. :mod:`passes.auto.memory_budget` searches among them.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch.fx import Graph, Node

from ..collectives.layout import REPLICATED
from ..ir.ops import Unshard, unshards, update_args
from ..transforms.recompute_regions import forward_regions, is_open, units_of_parameters

#: The number of counts of gathered units, and of recomputed regions, in the grid. The grid also has one gathered unit alone,
#: which is usually the root.
_LEVELS = 4
#: Activation budgets of the partitioner: it saves everything that is faster to save, or recomputes what is cheap. Below that,
#: regions are recomputed instead. Among costly operators the partitioner would choose by size alone, and backward would hold
#: all that it recomputes at once.
SAVE, RECOMPUTE_CHEAP = 1.0, 0.999


class Activation(NamedTuple):
    """A value that forward saves for backward.

    Attributes:
        region: the number of the region that computes it.
        place: the number of its operator in the region, which is the same in equal layers.
        name: the name of its node.
        nbytes: its size in bytes.
    """

    region: int
    place: int
    name: str
    nbytes: int


@dataclass(frozen=True)
class StepPolicy:
    """One way to treat parameters and activations between forward and backward.

    Attributes:
        kept: the open units that stay gathered, from the one that forward reads last.
        resharded: the other open units.
        recomputed: the numbers of the regions of forward that are recomputed.
        regions: the number of all regions.
        activation_budget: the partitioner's budget, from 0 to 1.
        offloaded: the numbers of the regions whose saved values wait on the host. The saved values of a recomputed region
            are those that the next region begins with.
        in_nodes: the resharded units of which each node keeps a copy.
        on_device: the saved values of offloaded regions that stay on the device.
    """

    kept: tuple[str, ...]
    resharded: tuple[str, ...]
    recomputed: tuple[int, ...]
    regions: int
    activation_budget: float
    offloaded: tuple[int, ...] = ()
    in_nodes: tuple[str, ...] = ()
    on_device: tuple[Activation, ...] = ()

    def without_host(self) -> StepPolicy:
        """Return the same policy, but with nothing that waits on the host."""
        return replace(self, offloaded=(), on_device=())

    def waits(self, region: int, place: int) -> bool:
        """Return whether the result of an operator, ``place`` in ``region``, waits on the host if it is saved."""
        stays = ((activation.region, activation.place) for activation in self.on_device)
        return region in self.offloaded and (region, place) not in stays

    def reshard(self, graph: Graph, node_groups: Mapping[str, str]) -> None:
        """Set in a joint graph which open units reshard after forward, and to which group. In place.

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
    """A policy, and the estimates of the models for its step.

    Attributes:
        policy: the tried policy.
        peak_bytes: the most bytes that live at once during the whole step.
        time_ns: the nanoseconds of forward and backward.
        host_bytes: the bytes of activations that wait on the host between forward and backward.
        saved: the activations that can wait there, in the order of forward's outputs.
    """

    policy: StepPolicy
    peak_bytes: int
    time_ns: int
    host_bytes: int = 0
    saved: tuple[Activation, ...] = ()

    @property
    def waiting(self) -> list[Activation]:
        """The activations that wait on the host because of the policy."""
        return [activation for activation in self.saved if self.policy.waits(activation.region, activation.place)]


@dataclass(frozen=True)
class OpenChoices:
    """All open choices of a step.

    Attributes:
        units: the units whose resharding is open, from the one that forward reads last.
        regions: the numbers of the regions that can be recomputed whole.
        num_regions: the number of all regions.
        activation_budgets: the partitioner's budgets to try.
        num_nodes: the number of nodes of the joint graph.
        offloads: the numbers of the regions whose saved values can wait on the host.
        in_nodes: the units of which each node can keep a copy.
        host_bytes: the bytes of activations that may wait on the host.
    """

    units: tuple[str, ...]
    regions: tuple[int, ...]
    num_regions: int
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
        """Find the open choices of a joint graph, before the passes that tag nodes for the partitioner.

        Args:
            graph: the graph.
            num_forward_outputs: how many of its first outputs are forward's.
            open_units: the units whose resharding is open.
            activation_budget: the partitioner's budget that the user has set. Any other than ``SAVE`` stays.
            host_bytes: the bytes of activations that may wait on the host.
            node_groups: for each sharding group on several nodes, by name, the name of the group of its ranks on this rank's
                node.
        """
        regions = forward_regions(graph, num_forward_outputs)
        open_regions = tuple(number for number, region in enumerate(regions) if is_open(region))
        units = tuple(unit for unit in _by_last_reader(graph, regions) if unit in open_units)
        in_nodes = _units_in_nodes(graph, node_groups or {})
        return OpenChoices(
            units,
            open_regions,
            len(regions),
            (SAVE, RECOMPUTE_CHEAP) if activation_budget == SAVE else (activation_budget,),
            len(graph.nodes),
            open_regions if host_bytes > 0 else (),
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
        """Make a policy.

        Args:
            kept: the units that stay gathered; the other open units reshard.
            recomputed: the numbers of the regions to recompute.
            activation_budget: the partitioner's budget.
            offloaded: the numbers of the regions whose saved values wait on the host.
            in_nodes: the units of which each node keeps a copy, unless they stay gathered.
            on_device: the saved values of ``offloaded`` regions that stay on the device. Others are left out.
        """
        return StepPolicy(
            tuple(unit for unit in self.units if unit in kept),
            tuple(unit for unit in self.units if unit not in kept),
            tuple(sorted(recomputed)),
            self.num_regions,
            activation_budget,
            tuple(sorted(offloaded)),
            tuple(unit for unit in self.in_nodes if unit in in_nodes and unit not in kept),
            tuple(sorted(activation for activation in on_device if activation.region in offloaded)),
        )

    def allow(self, trial: Trial) -> bool:
        """Return whether the host holds the activations of a trial that wait there.

        A trial whose policy sends none there is allowed, however much the user's own policies send.
        """
        return not trial.policy.offloaded or trial.host_bytes <= self.host_bytes

    def grid(self) -> list[StepPolicy]:
        """List policies that are spread over all open choices.

        The last units stay gathered, and nodes keep copies of the others or not. The first regions are recomputed, or wait on
        the host, or both.
        """
        levels, waiting = (
            [numbers[:count] for count in _levels(len(numbers))]
            for numbers in map(self._earlier, (self.regions, self.offloads))
        )
        saving, cheap = self.activation_budgets[0], self.activation_budgets[-1]
        policies = [
            self.policy(self.units[:count], recomputed, budget, in_nodes=in_nodes)
            for in_nodes in dict.fromkeys(((), self.in_nodes))
            for budget, recomputed in [(saving, ()), *((cheap, level) for level in levels)]
            for count in sorted({*_levels(len(self.units)), min(1, len(self.units))})
        ]
        # With regions on the host, only the default unit or all units stay gathered.
        policies += [
            self.policy(self.units[:count], recomputed, budget, offloaded)
            for offloaded in waiting[1:]
            for budget, recomputed in ((saving, ()), (cheap, ()), (cheap, offloaded))
            for count in (1, len(self.units))
        ]
        return list(dict.fromkeys(policies))

    def partial_offloads(self, trial: Trial) -> Iterator[StepPolicy]:
        """Yield policies by which only the largest values of each region wait on the host, up to a part of its bytes.

        So copies are spread over all of compute. There are such policies only for a trial that recomputes nothing and whose
        regions, all but the last, wait on the host.
        """
        policy = trial.policy
        if policy.recomputed or not policy.offloaded or policy.offloaded != self._earlier(self.offloads):
            return
        for level in range(1, _LEVELS - 1):
            wait: list[Activation] = []
            for number in policy.offloaded:
                values = [activation for activation in trial.waiting if activation.region == number]
                wait += _largest(values, sum(activation.nbytes for activation in values) * level // (_LEVELS - 1))
            yield self.with_waiting(trial, wait)

    def cut_to_host(self, trial: Trial) -> StepPolicy:
        """Return a trial's policy with fewer values on the host: the largest ones that the host holds."""
        others = trial.host_bytes - sum(activation.nbytes for activation in trial.waiting)
        return self.with_waiting(trial, _largest(trial.waiting, self.host_bytes - others))

    def near(self, trial: Trial) -> Iterator[StepPolicy]:
        """Yield the neighbours of a trial's policy.

        They differ in one unit, region or activation, or in two that are exchanged. Or they differ in the partitioner's
        budget, in any two units of which nodes can keep copies, or in equal activations of all regions.
        """
        policy = trial.policy
        for budget in self.activation_budgets:
            # With another budget, other values are saved.
            yield policy if budget == policy.activation_budget else replace(policy, activation_budget=budget, on_device=())
        for unit in self.units:
            yield self._changed(policy, kept={unit})
        for units in (*((unit,) for unit in self.in_nodes), *itertools.combinations(self.in_nodes, 2)):
            yield from self._other_residencies(policy, units)
        for number in self.regions:
            yield self._changed(policy, recomputed={number})
        for number in self.offloads:
            yield self._changed(policy, offloaded={number})
            yield self._changed(policy, recomputed={number}, offloaded={number})
        yield from self._with_other_activations(trial)
        for one, other in itertools.product(policy.kept, policy.resharded):
            yield self._changed(policy, kept={one, other})
        for name, numbers in (("recomputed", self.regions), ("offloaded", self.offloads)):
            chosen = getattr(policy, name)
            for first, second in itertools.product(chosen, sorted(set(numbers).difference(chosen))):
                yield self._changed(policy, **{name: {first, second}})

    def _with_other_activations(self, trial: Trial) -> Iterator[StepPolicy]:
        """Yield policies by which activations change between host and device: equal ones, a single one, or two exchanged."""
        waiting = set(trial.waiting)
        saved = [activation for activation in trial.saved if activation.region in self.offloads]
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
        """Return a trial's policy, changed so that of its saved values exactly ``waiting`` wait on the host."""
        policy = trial.policy
        return self.policy(
            policy.kept,
            policy.recomputed,
            policy.activation_budget,
            {activation.region for activation in waiting},
            policy.in_nodes,
            set(trial.saved).difference(waiting),
        )

    def _earlier(self, numbers: Iterable[int]) -> tuple[int, ...]:
        """Leave out the last region."""
        return tuple(number for number in numbers if number < self.num_regions - 1)

    def _other_residencies(self, policy: StepPolicy, units: Sequence[str]) -> Iterator[StepPolicy]:
        """Yield all policies in which each of these units stays gathered whole, within a node, or not at all."""
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
        """Return a policy that treats these units and regions the opposite way."""
        # A region that changes saves other values, or all of its values begin to wait.
        on_device = [activation for activation in policy.on_device if activation.region not in recomputed | offloaded]
        return self.policy(
            kept ^ set(policy.kept),
            recomputed ^ set(policy.recomputed),
            policy.activation_budget,
            offloaded ^ set(policy.offloaded),
            policy.in_nodes,
            on_device,
        )


def _largest(activations: Sequence[Activation], nbytes: int) -> list[Activation]:
    """Choose the largest activations that together have at most ``nbytes`` bytes."""
    left = nbytes
    found = []
    for activation in sorted(activations, key=lambda activation: (-activation.nbytes, activation)):
        if activation.nbytes <= left:
            left -= activation.nbytes
            found.append(activation)
    return found


def _levels(count: int) -> list[int]:
    """Return counts from none to all, evenly spread."""
    return sorted({round(count * level / (_LEVELS - 1)) for level in range(_LEVELS)}) if count > 0 else [0]


def _by_last_reader(graph: Graph, regions: Sequence[Sequence[Node]]) -> list[str]:
    """Sort the units of a graph by their last reader in forward, the latest first."""
    unit_of = units_of_parameters(graph)
    last = dict.fromkeys(unit_of.values(), -1)
    for place, node in enumerate(node for region in regions for node in region):
        last |= {unit_of[source]: place for source in node.all_input_nodes if source in unit_of}
    return sorted(last, key=last.__getitem__, reverse=True)


def _units_in_nodes(graph: Graph, node_groups: Mapping[str, str]) -> set[str]:
    """Find the units of which each node can keep a copy: units with parameters that are sharded over several nodes.

    Units with all-gather extensions are left out, as tensors that an extension sends cannot be kept in this way.
    """
    specs = [Unshard.of(node) for node in unshards(graph.nodes)]
    excluded = {spec.unit for spec in specs if spec.extension}
    return {spec.unit for spec in specs if spec.group in node_groups and spec.dim != REPLICATED} - excluded
