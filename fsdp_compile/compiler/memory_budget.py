"""``options["memory_budget"]``: the partitioner that chooses what a step keeps gathered, recomputes and offloads.

:mod:`passes.auto.memory_budget` tries policies and chooses the best. This module tells the search about the model: the memory
that lives all the time, and the units whose resharding is open. Every graph that is lowered later, for other plans, is held to
the budget, too.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.fx import Graph, GraphModule

from passes.auto.memory_budget import (
    Choice,
    graph_memory,
    graph_peak,
    graph_time,
    held_in_backward,
    search,
)
from passes.auto.step_policy import Activation, OpenChoices, StepPolicy, Trial
from passes.collectives.functional import group_ranks
from passes.collectives.host_copies import copies_to
from passes.fx.emit import replaying_traces
from passes.fx.sizes import num_bytes
from passes.fx.torch_internals.aot import functorch_config, partitioners
from passes.fx.torch_internals.inductor import CustomPartitionerFn, inductor_config
from passes.ir.interface import FullParameter, Interface
from passes.ir.ops import unshards
from passes.models.group_layout import GroupLayout
from passes.models.hardware import Hardware
from passes.models.memory_model import Breakdown, Category
from passes.pass_runner import ignore_pass
from passes.pipeline import run_partitioner_passes
from passes.transforms.offload_activations import offload_saved

from ..optim.device_state import device_state_bytes, on_first_steps
from ..units.mesh import ShardingMesh
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .calls import UnitFacts, other_bytes
from .capture import observer, record_choice, snapshot
from .dynamic_sizes import DynamicSizes
from .optimizer_state import Optimizer
from .stored_trials import load_trials, store_trials, trials_key
from .surroundings import caches_are_on, surroundings

if TYPE_CHECKING:
    from .options import Options

#: The number of cached partitions. Policies that differ only in activations on the host share a partition.
_MOST_PARTITIONS = 8
#: Schedules a forward (False) or backward (True) graph for the plan of its first call, in place.
Scheduler = Callable[[GraphModule, bool], tuple[Graph, Interface]]


@dataclass(frozen=True)
class _Figures:
    """The memory of a scheduled graph.

    Attributes:
        memory: its live bytes.
        peak: the most bytes that live at once.
        parameters: bytes of gathered parameters that the caller holds while the graph runs.
    """

    memory: Breakdown
    peak: int
    parameters: int


class StepBudget:
    """The memory budget of a step, which consists of a forward and a backward graph.

    Args:
        options: options with a ``memory_budget``.
        params: the sharded parameters of the graph, by (unit name, parameter name) in the graph.
        examples: the graph's inputs.
        hardware: numbers of the machine for which the step is predicted.
        fuses: whether the lowering fuses operators into kernels.
        is_whole: whether the graph holds all that a call of the model computes. If so, it may leave units unused.

    Attributes:
        limit: the budget in bytes.

    Raises:
        ValueError: the graph is not all of a step, or Inductor's configuration has a partitioner already.
    """

    def __init__(
        self,
        options: Options,
        params: Mapping[tuple[str, str], ShardedParam],
        examples: Sequence[Any],
        hardware: Hardware,
        *,
        fuses: bool,
        is_whole: bool,
    ):
        units = {name: param.unit for (name, _), param in params.items()}
        left_out = _left_out(units.values())
        if left_out and not is_whole:
            raise ValueError(_not_whole(left_out))
        if inductor_config.custom_partitioner_fn is not None:
            raise ValueError(
                "options['memory_budget'] partitions graphs, and so does torch._inductor.config.custom_partitioner_fn: unset "
                "one of the two."
            )
        self._device = next(iter(units.values())).mesh.device
        self.limit = options.budget_bytes(self._device)
        self._host_limit = options.host_budget_bytes
        self._held, self._inputs = _held(units.values(), examples)
        # Another microbatch of the step may have used these units: their gradients count.
        self._held += sum(map(_gradient_bytes, left_out))
        # Weak references: compiled code must not keep the model alive.
        self._scopes = weakref.WeakSet(unit.scope for unit in units.values())
        self._assumed = Optimizer.of(options.optimizer)
        self._state = self._state_bytes()
        self._choice: Choice | None = None
        # The bytes of optimizer state that the choice counts with.
        self._chosen_for = 0
        self._open = {name for name, unit in units.items() if unit.may_choose_reshard}
        self._nodes = _nodes((units[name] for name in sorted(self._open)), hardware)
        self._node_groups = {mesh.shard_group: mesh.post_forward_group(size, connects=False) for mesh, size in self._nodes}
        self._hardware = hardware
        self._fuses = fuses
        # While the graph is compiled, AOTAutograd's cache is off, and Inductor's configuration holds this object.
        self._surroundings = surroundings() if caches_are_on() else None
        self._sizes: DynamicSizes | None = None
        self._forward: _Figures | None = None

    def partition(
        self, joint: GraphModule, inputs: Sequence[Any], schedule: Scheduler, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        """Partition a joint graph by the best policy.

        Args:
            joint: the graph, before the passes that tag nodes for the partitioner.
            inputs, kwargs: arguments of the partitioner.
            schedule: schedules the graphs whose memory and time count.

        Raises:
            BudgetTooLow: no policy fits.
        """
        outputs = kwargs["num_fwd_outputs"]
        choices = OpenChoices.of(
            joint.graph,
            outputs,
            self._open,
            functorch_config.activation_memory_budget,
            host_bytes=self._host_limit if copies_to(self._device) else 0,
            node_groups=self._node_groups,
        )
        self._sizes = sizes = self._sizes_of(joint.graph)

        @functools.lru_cache(_MOST_PARTITIONS)
        def partitioned(policy: StepPolicy) -> tuple[GraphModule, GraphModule]:
            return self._partition(snapshot(joint), inputs, policy, **kwargs)

        def schedule_step(policy: StepPolicy) -> tuple[Trial, list[tuple[Graph, Interface]]]:
            forward, backward = map(snapshot, partitioned(policy.without_host()))
            saved = offload_saved(forward.graph, backward.graph, outputs, policy.waits)
            scheduled = [schedule(forward, False), schedule(backward, True)]
            with sizes.counted():
                time = sum(graph_time(graph, self._hardware) for graph, _ in scheduled)
                can_wait = [Activation(region, at, node.name, int(num_bytes(node.meta["val"]))) for node, region, at in saved]
                trial = Trial(policy, self._peak(scheduled), time, self._host_bytes(scheduled), tuple(can_wait))
            return trial, scheduled

        with replaying_traces():
            trials = self._trials(joint.graph, choices, schedule_step)
        choice = self._choice = Choice.of(trials, self.limit)
        record_choice(choice)
        self._chosen_for = self._state
        self._watch_optimizers()
        if choice.chosen.policy.in_nodes:
            for mesh, size in self._nodes:
                mesh.post_forward_group(size)
        forward, backward = self._partition(joint, inputs, choice.chosen.policy, is_final=True, **kwargs)
        offload_saved(forward.graph, backward.graph, outputs, choice.chosen.policy.waits)
        if sizes.are_open:
            with replaying_traces():
                scheduled = [schedule(snapshot(forward), False), schedule(snapshot(backward), True)]
            waits = bool(choice.chosen.policy.offloaded)
            sizes.admit_larger(
                lambda: self._peak(scheduled) <= self.limit and not (waits and self._host_bytes(scheduled) > self._host_limit)
            )
        return forward, backward

    def _trials(
        self,
        joint: Graph,
        choices: OpenChoices,
        schedule_step: Callable[[StepPolicy], tuple[Trial, Sequence[tuple[Graph, Interface]]]],
    ) -> Sequence[Trial]:
        """Return the trials of the search, which another process may have stored.

        Args:
            joint: the joint graph.
            choices: the open choices.
            schedule_step: returns the trial of a policy, and the scheduled graphs.
        """
        assert self._sizes is not None
        first, scheduled = schedule_step(choices.grid()[0])
        parts = choices, first, self._hardware, self._fuses, sorted(self._node_groups.items()), self._surroundings
        can_store = self._surroundings is not None and not self._sizes.values
        key = trials_key([joint, *(graph for graph, _ in scheduled)], parts) if can_store else ""
        trials = load_trials(key) if key else []
        if not trials:
            trials = search(choices, lambda policy: first if policy == first.policy else schedule_step(policy)[0])
            if key:
                store_trials(key, trials)
        return trials

    def _partition(
        self, joint: GraphModule, inputs: Sequence[Any], policy: StepPolicy, *, is_final: bool = False, **kwargs: Any
    ) -> tuple[GraphModule, GraphModule]:
        run_partitioner_passes(
            joint.graph,
            observer() if is_final else ignore_pass,
            policy=policy,
            num_forward_outputs=kwargs["num_fwd_outputs"],
            node_groups=self._node_groups,
        )
        with functorch_config.patch(activation_memory_budget=policy.activation_budget):
            return partitioners.min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def _host_bytes(self, scheduled: Sequence[tuple[Graph, Interface]]) -> int:
        """Return the bytes of activations that wait on the host between forward and backward."""
        forward, _ = scheduled[0]
        return int(graph_memory(forward, fuses=self._fuses).offloaded)

    def _peak(self, scheduled: Sequence[tuple[Graph, Interface]]) -> int:
        """Return the most bytes that live at once in a step of these graphs, a forward and a backward."""
        forward, backward = (self._figures(graph, interface) for graph, interface in scheduled)
        return max(self._during_forward(forward), self._during_backward(forward, backward))

    def _figures(self, graph: Graph, interface: Interface) -> _Figures:
        memory = graph_memory(graph, fuses=self._fuses)
        inputs = graph.find_nodes(op="placeholder")
        extra = zip(inputs[len(inputs) - len(interface.inputs) :], interface.inputs, strict=True)
        parameters = sum(num_bytes(node.meta["val"]) for node, slot in extra if isinstance(slot, FullParameter))
        return _Figures(memory, graph_peak(memory), parameters)

    def _sizes_of(self, graph: Graph) -> DynamicSizes:
        return DynamicSizes.of([*(node.meta.get("val") for node in graph.nodes), *self._inputs])

    @property
    def resident(self) -> int:
        """The bytes that live all the time: shards, buffers, optimizer state, inputs, and gradients of unused units."""
        return self._held + self._state + sum(int(num_bytes(value)) for value in self._inputs)

    def _state_bytes(self) -> int:
        """Return the bytes of optimizer state on the device.

        Optimizers that have stepped count with the state that they have, others with that of the option ``optimizer``.
        """
        params = {param for scope in self._scopes for unit in scope.units for param in unit.params if not unit.copies}
        return device_state_bytes((param for param in params if param.param.requires_grad), self._assumed.state_of)

    def _watch_optimizers(self) -> None:
        """Watch for optimizers' first steps. Have the model compiled anew if their state leads to another choice."""
        budget = weakref.ref(self)

        def look() -> None:
            found = budget()
            if found is not None and not found._suits_optimizers():
                # The new compilation has a budget of its own, which watches instead.
                watching.remove()

        watching = on_first_steps(look)
        weakref.finalize(self, watching.remove)

    def _suits_optimizers(self) -> bool:
        assert self._choice is not None and self._sizes is not None
        self._state = self._state_bytes()
        more = self._state - self._chosen_for
        if more == 0 or (not self._sizes.are_open and self._choice.holds_at(self.limit - more)):
            return True
        for scope in self._scopes:
            scope.optimizer_state = str(self._state)
        return False

    def _during_forward(self, forward: _Figures) -> int:
        return self.resident + forward.parameters + forward.peak

    def _during_backward(self, forward: _Figures, backward: _Figures) -> int:
        """Return the peak bytes of backward, or of the forward before it if that is larger.

        Gradients that backward takes, of earlier microbatches, lived during that forward as well.
        """
        waited = int(backward.memory.taken[Category.GRADIENTS])
        inside = held_in_backward(forward.memory, backward.memory) + backward.parameters + backward.peak
        return max(self._during_forward(forward) + waited, self.resident + inside)

    def check(self, graph: Graph, interface: Interface, *, is_backward: bool) -> None:
        """Check that a step with a graph that is about to be lowered is within the budget.

        Raises:
            ValueError: with the plan of the graph, the step does not fit.
        """
        is_first_for_inference = self._sizes is None
        sizes = self._sizes = self._sizes or self._sizes_of(graph)
        with sizes.counted():
            needed = self._needed(graph, interface, is_backward=is_backward)
        if needed > self.limit:
            stage = "backward" if is_backward else "forward"
            raise ValueError(
                f"options['memory_budget'] = {self.limit} bytes is too low for a {stage} with the flags that it is called "
                f"with, which needs {needed} bytes on each rank: there are more gradients of earlier microbatches, or gathered "
                "parameters that are kept between them, than when the step was compiled. Give at least so many, or reduce each "
                "microbatch (set_requires_gradient_sync(True)) and reshard after it (set_reshard_after_backward(True))."
            )
        if is_first_for_inference:
            sizes.admit_larger(lambda: self._needed(graph, interface, is_backward=False) <= self.limit)

    def _needed(self, graph: Graph, interface: Interface, *, is_backward: bool) -> int:
        figures = self._figures(graph, interface)
        if not is_backward:
            self._forward = figures
            return self._during_forward(figures)
        assert self._forward is not None
        return self._during_backward(self._forward, figures)


class BudgetPartitioner(CustomPartitionerFn):  # type: ignore[misc]
    """Inductor's hook for a partitioner.

    Args:
        step: the budget of the step.
        schedule: see :meth:`StepBudget.partition`.
    """

    def __init__(self, step: StepBudget, schedule: Scheduler):
        self._step = step
        self._schedule = schedule

    def __call__(self, gm: GraphModule, joint_inputs: Sequence[Any], **kwargs: Any) -> tuple[GraphModule, GraphModule]:
        if not unshards(gm.graph.nodes):
            # A graph inside of a higher-order operator.
            return partitioners.min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
        return self._step.partition(gm, joint_inputs, self._schedule, **kwargs)

    def uuid(self) -> Any:
        # Inductor lowers segments of the resulting graphs, which are its cache key: a constant is enough.
        return "fsdp_compile.memory_budget"


def _nodes(units: Iterable[Unit], hardware: Hardware) -> list[tuple[ShardingMesh, int]]:
    """Return the meshes whose shard groups span several nodes, each with the number of its ranks on a node."""
    meshes = {mesh.shard_group: mesh for unit in units for mesh in unit.meshes}
    found = []
    for mesh in meshes.values():
        size = GroupLayout.of(group_ranks(mesh.shard_group)).per_node(hardware.ranks_per_node)
        if 1 < size < mesh.shard_size and mesh.shard_size % size == 0:
            found.append((mesh, size))
    return found


def _left_out(units: Iterable[Unit]) -> list[Unit]:
    """Return the units with parameters that are in the same trees as ``units``, but not among ``units``."""
    present = set(units)
    of_trees = (unit for scope in dict.fromkeys(unit.scope for unit in present) for unit in scope.units)
    return [unit for unit in of_trees if unit not in present and unit.params]


def _not_whole(left_out: Iterable[Unit]) -> str:
    names = ", ".join(unit.name or "the root" for unit in left_out)
    return (
        f"options['memory_budget'] is for a whole step, but a graph of this model, which is not all of its forward, uses no "
        f"parameter of {names}. Compile the whole model, without graph breaks: torch.compile(model, fullgraph=True) says where "
        "they are. For blocks that are compiled one by one there is options['memory_limit'], of one graph."
    )


def _gradient_bytes(unit: Unit) -> int:
    """Return the bytes that gradients of a unit take on the device between microbatches."""
    trained = [param for param in unit.params if param.param.requires_grad and not unit.copies]
    return sum(param.padded_numel * param.shard.element_size() for param in trained)


def _held(units: Iterable[Unit], examples: Sequence[Any]) -> tuple[int, list[Tensor]]:
    """Return the bytes on the device of shards, buffers and unsharded parameters, and the other inputs of the graph."""
    all_units = list(dict.fromkeys(unit for one in units for unit in one.scope.units))
    roots = [unit for unit in all_units if unit.is_root]
    held = {id(value) for root in roots for module in root.modules for value in (*module.buffers(), *module.parameters())}
    held |= {id(param.shard) for unit in all_units for param in unit.params}
    inputs = {id(value): value for value in examples if isinstance(value, Tensor) and id(value) not in held}
    shards = sum(UnitFacts.of(unit, unit.name).shard_bytes for unit in all_units if not unit.copies)
    return shards + sum(map(other_bytes, roots)), list(inputs.values())
