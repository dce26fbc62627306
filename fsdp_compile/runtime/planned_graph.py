"""Planned graphs: each call makes the plan, binds extra inputs, runs the variant for that plan, and stores extra outputs.

A lowered graph does not know which parameters it works on, as equal blocks may share a graph. The shards among its inputs
identify the parameters (:mod:`fsdp_compile.runtime.graph_inputs`).
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.fx import Graph

from passes.collectives.host_copies import leave_to_device, wait_on_host
from passes.fx.size_guards import SizeGuard
from passes.fx.torch_internals.core import AutoDispatchBelowAutograd, RecordFunctionFast, top_saved_tensors_default_hooks
from passes.fx.torch_internals.objects import mark_as_boxed
from passes.ir.interface import InputSlot, OutputSlot
from passes.ir.plan import Gather, Plan
from passes.transforms.bucket import Group
from passes.transforms.offload_activations import offloaded_outputs

from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from .call import Call
from .checked_program import CheckedProgram
from .gradients import note_backward, note_forward
from .graph_inputs import ParameterRegistry
from .lent_parameters import write_back
from .planner import Planner
from .stored_reads import check_is_as_read, note_read
from .unsharding import finish_unshard

#: A function that takes its arguments as a list, and empties the list.
BoxedFunction = Callable[[list[Any]], Any]


def boxed(function: Callable[[list[Any]], Any]) -> BoxedFunction:
    """Mark a function as one that takes its arguments as a list."""
    mark_as_boxed(function)
    return function


@dataclass(frozen=True)
class Variant:
    """A graph, lowered for one plan.

    Attributes:
        function: the lowered graph.
        inputs, outputs: the extra inputs and outputs, besides those of the traced graph.
        run: the variant as a program that ranks compare.
        reductions: the gradients that each collective reduces, by bucket and position there; None: those of one bucket each.
        guard: tells whether the variant is for the sizes of a call's inputs; None: it is for all sizes.
        communicating: the names in the graph of the units that it communicates for.
    """

    function: BoxedFunction
    inputs: Sequence[InputSlot]
    outputs: Sequence[OutputSlot]
    run: CheckedProgram
    reductions: Sequence[Group] | None = None
    guard: SizeGuard | None = None
    communicating: Sequence[str] = ()

    def begin(self, params: Mapping[str, ShardedParam]) -> None:
        """Begin to run, as ranks compare runs.

        Args:
            params: a parameter of each unit that the graph works for, by the unit's name in the graph. Equal blocks share a
                graph: these tell which block it runs for.
        """
        names = [params[unit].name for unit in self.communicating]
        self.run.begin(sum(map(_number, names)), names[0] if names else "")


@functools.cache
def _number(name: str) -> int:
    return zlib.crc32(name.encode())


#: The name of the range in profiles around each call of a lowered graph, by whether the graph is a backward graph.
RANGES = {False: "FSDP::forward graph", True: "FSDP::backward graph"}

#: Functions that are called before each call of a graph, with the graph, the variant that will run, and the call.
call_observers: list[Callable[[PlannedGraph, Variant, Call], None]] = []


@dataclass(frozen=True)
class GraphOutputs:
    """The outputs of a traced graph, without extra outputs.

    Attributes:
        count: their number.
        offloaded: the indices of activations that forward sends to the host.
    """

    count: int
    offloaded: Sequence[int]

    @staticmethod
    def of(graph: Graph) -> GraphOutputs:
        return GraphOutputs(len(graph.output_node().args[0]), offloaded_outputs(graph))  # type: ignore[arg-type]


class PlannedGraph:
    """A forward or backward graph, each call of which runs a variant for the plan of the call.

    Args:
        returns: the outputs of the traced graph.
        planner: the graph's planner.
        find_variant: returns the variant for a plan, the units of the call by their names in the graph, and the call's inputs.
        registry: the parameters of inputs that do not identify their parameter.

    Attributes:
        is_backward: whether it is a backward graph.
        registry: as given.
    """

    def __init__(
        self,
        returns: GraphOutputs,
        planner: Planner,
        find_variant: Callable[[Plan, Mapping[str, Unit], Sequence[Any]], Variant],
        registry: ParameterRegistry,
    ):
        self.is_backward = planner.is_backward
        self.registry = registry
        self._planner = planner
        self._find_variant = find_variant
        self._returns = returns

    def __call__(self, args: list[Any]) -> list[Any]:
        call = Call(self._planner.inputs, self.registry, args)
        if not self.is_backward:
            call.check_shards_differ()
            for unit in call.units.values():
                if unit.scope.lent:
                    write_back(unit)
        self._follow_writes(call, args)
        is_wanted = self.is_backward and call.accumulates()
        # Skipped for models without an optimizer in backward, as it takes time for each parameter.
        if any(unit.updates for unit in call.units.values()):
            if is_wanted:
                note_backward(param for bucket in call.gradients for param in bucket.params)
            elif not self.is_backward and self._planner.can_keep:
                note_forward(map(call.param, self._planner.inputs.read))
        plan = self._planner.plan_of(call, is_wanted=is_wanted)
        variant = self._find_variant(plan, call.units, args)
        variant.begin(call.params)
        if variant.reductions is not None:
            call.regroup(variant.reductions)
        for unit in call.units.values():
            if not self.is_backward:
                unit.scope.wait_for_optimizer()
            if unit.pending:
                finish_unshard(unit)
        for observe in call_observers:
            observe(self, variant, call)
        call.bind(variant.inputs)
        if not self.is_backward and (Gather.REUSE in plan.gathers or None in call.gathers):
            for index in self._planner.inputs.read:
                call.param(index).end_forward()
        call.release(is_backward=self.is_backward)
        # Autograd records nothing here, but each functional collective would go through its autograd formula, in Python.
        with variant.run, AutoDispatchBelowAutograd(), RecordFunctionFast(RANGES[self.is_backward]):
            outputs = list(variant.function(args))
        self._hand_over([outputs[index] for index in self._returns.offloaded])
        call.store(variant.outputs, outputs[self._returns.count :], gradients=is_wanted)
        return outputs[: self._returns.count]

    def _follow_writes(self, call: Call, args: Sequence[Any]) -> None:
        """Check that a backward finds the values of its forward in parameters that it reads where they are stored.

        Raises:
            RuntimeError: a parameter was written since.
        """
        stored = self._planner.inputs.stored
        if not self.is_backward:
            if self._planner.can_keep:
                note_read(map(call.param, stored))
            return
        for index in stored:
            param = call.param(index)
            # Not if a saved-tensor hook kept a copy of it.
            if param.owns_memory_of(args[index]):
                check_is_as_read(param)

    def _hand_over(self, offloaded: Sequence[Tensor]) -> None:
        """Prepare activations on the host for autograd, which saves them next.

        A hook on saved tensors reads them at once, so the host waits for the copies. Without hooks only the device reads them.
        """
        has_hooks = bool(offloaded) and top_saved_tensors_default_hooks(False) is not None
        for copy in offloaded:
            if has_hooks:
                wait_on_host(copy)
            else:
                leave_to_device(copy)
