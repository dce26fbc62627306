"""``capture``: record compiled graphs after all passes, and the code that Inductor generates from them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import GraphModule

from passes.auto.memory_budget import Choice
from passes.fx.graph import copy_of
from passes.fx.torch_internals.core import _make_graph_module, _use_lazy_graph_module
from passes.pass_runner import Observer, log_pass

from ..runtime.call import Call
from ..runtime.checked_program import eager_observers
from ..runtime.planned_graph import BoxedFunction, PlannedGraph, Variant, call_observers
from .calls import Census, GraphCall
from .captured_graph import CapturedGraph


@dataclass(frozen=True)
class CapturedPass:
    """A graph before and after one pass.

    Attributes:
        stage: "dynamo", "joint", "forward" or "backward".
        name: the name of the pass.
        before, after: the graph as text.
    """

    stage: str
    name: str
    before: str
    after: str


@dataclass(eq=False)
class Capture:
    """The graphs, passes and calls that a :func:`capture` recorded.

    Attributes:
        forward: forward graphs, graphs for inference included, in the order of lowering.
        backward: backward graphs, in the order of lowering.
        passes: every pass over any of the graphs, in the order of running; empty with ``passes=False``.
        calls: the calls of these graphs, and of graphs that an earlier capture recorded, in order.
        unknown_calls: the number of calls of graphs that were lowered while no capture was active.
        outside: a label for each run of an operator that communicated outside of graphs, in order.
        choices: the policies tried and the one chosen for a memory budget, for each joint graph.
        census: the sharded models of the calls.
    """

    forward: list[CapturedGraph] = field(default_factory=list)
    backward: list[CapturedGraph] = field(default_factory=list)
    passes: list[CapturedPass] = field(default_factory=list)
    calls: list[GraphCall] = field(default_factory=list)
    unknown_calls: int = 0
    outside: list[str] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)
    census: Census = field(default_factory=Census)
    _takes_passes: bool = field(default=True, repr=False)

    def _observe(self, planned: PlannedGraph, variant: Variant, call: Call) -> None:
        self.census.note(call)
        graph = _graph_of.get(variant.function)
        if graph is None:
            self.unknown_calls += 1
            return
        units = {name or "root": self.census.name_of(unit) for name, unit in call.units.items()}
        held = self.census.gradient_bytes(), self.census.gradients(), self.census.parameter_bytes()
        inputs = graph.graph_module.graph.find_nodes(op="placeholder")
        extra = inputs[len(inputs) - len(variant.inputs) :]
        freed = call.released(variant.inputs, is_backward=planned.is_backward)
        released = {extra[index].name: self.census.parameter_bytes([param]) for index, param in freed.items()}
        self.calls.append(GraphCall(graph, planned.is_backward, planned.registry, units, *held, released))

    def _observe_eager(self, label: str) -> None:
        self.outside.append(label)


_active: list[Capture] = []
# The captured graph of each lowered function.
_graph_of: weakref.WeakKeyDictionary[BoxedFunction, CapturedGraph] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def capture(*, passes: bool = True) -> Iterator[Capture]:
    """Record every graph that ``fsdp_backend`` lowers inside of the ``with`` block.

    Forward graphs are lowered at a compiled model's first call, backward graphs at the first backward. Graphs compiled before
    the block are not recorded; ``torch._dynamo.reset()`` makes torch compile again.

    Args:
        passes: also record the graph before and after each pass. That takes a third of the time of compiling without kernels.

    Example::

        with capture() as captured:
            model(x).sum().backward()
        print(captured.forward[0].readable())
        print(captured.backward[0].code)
    """
    captured = Capture(_takes_passes=passes)
    _active.append(captured)
    call_observers.append(captured._observe)
    eager_observers.append(captured._observe_eager)
    try:
        yield captured
    finally:
        _active.remove(captured)
        call_observers.remove(captured._observe)
        eager_observers.remove(captured._observe_eager)


def is_capturing() -> bool:
    return bool(_active)


def snapshot(gm: GraphModule) -> GraphModule:
    """Copy a graph, so that later changes to ``gm`` do not reach the copy."""
    graph = copy_of(gm.graph)
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    with _use_lazy_graph_module(True):
        return _make_graph_module(gm, graph)


def observer() -> Observer:
    """Return the observer of passes: it writes to the log, and to all active captures that record passes."""
    return _record_pass if any(active._takes_passes for active in _active) else log_pass


def _record_pass(stage: str, name: str, before: str, after: str) -> None:
    log_pass(stage, name, before, after)
    for active in _active:
        if active._takes_passes:
            active.passes.append(CapturedPass(stage, name, before, after))


def record_choice(choice: Choice) -> None:
    """Add the choice for a memory budget to every active capture."""
    for active in _active:
        active.choices.append(choice)


def record(captured: CapturedGraph, is_backward: bool, function: BoxedFunction) -> None:
    """Add a lowered graph to every active capture, and remember it as the graph of its function."""
    _graph_of[function] = captured
    for active in _active:
        (active.backward if is_backward else active.forward).append(captured)
