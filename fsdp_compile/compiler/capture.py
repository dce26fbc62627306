"""``capture``: look at the graphs that are compiled, after all passes, and at the code that Inductor made of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule

from passes.fx.torch_internals.core import _make_graph_module, _use_lazy_graph_module
from passes.models.memory_model import LiveBytes, live_bytes
from passes.pipeline import Observer, graph_text, log_pass


@dataclass
class CapturedGraph:
    """One lowered graph.

    Attributes:
        graph_module: the graph after all passes, as it was handed to the lowering.
        code: the source that Inductor generated; None for the ``aot_eager`` lowering.
        group_names: names of process groups to the names that they have in the mesh.
    """

    graph_module: GraphModule
    code: str | None
    group_names: dict[str, str]

    def readable(self) -> str:
        """The graph as text: deterministic, and equal on all ranks; process groups read as ``shard`` and ``replicate``."""
        return graph_text(self.graph_module.graph, self.group_names)

    def live_bytes(self) -> LiveBytes:
        """How many bytes live at each node, those of gathered parameters apart (see :mod:`passes.models.memory_model`)."""
        return live_bytes(self.graph_module.graph)


@dataclass(frozen=True)
class CapturedPass:
    """A graph before and after one pass.

    Attributes:
        stage: "dynamo", "joint", "forward" or "backward".
        name: the pass.
        before, after: the graph's text.
    """

    stage: str
    name: str
    before: str
    after: str


@dataclass(eq=False)
class Capture:
    """The graphs and passes that a :func:`capture` recorded.

    Attributes:
        forward: forward graphs, those for inference included, in the order they were lowered.
        backward: backward graphs, in the order they were lowered.
        passes: every pass over any of the graphs, in the order they ran.
    """

    forward: list[CapturedGraph] = field(default_factory=list)
    backward: list[CapturedGraph] = field(default_factory=list)
    passes: list[CapturedPass] = field(default_factory=list)


_active: list[Capture] = []


@contextlib.contextmanager
def capture() -> Iterator[Capture]:
    """Record every graph that ``fsdp_backend`` lowers inside of the ``with`` block.

    Graphs are lowered at a compiled model's first call, and backward graphs at the first backward; what was compiled before
    is not seen (``torch._dynamo.reset()`` makes torch compile again).

    Example::

        with fsdp_compile.capture() as captured:
            model(x).sum().backward()
        print(captured.forward[0].readable())
        print(captured.backward[0].code)
    """
    captured = Capture()
    _active.append(captured)
    try:
        yield captured
    finally:
        _active.remove(captured)


def is_capturing() -> bool:
    return bool(_active)


def snapshot(gm: GraphModule) -> GraphModule:
    """A copy of a graph that later changes to ``gm`` do not reach."""
    graph = Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    graph.output_node().meta = dict(gm.graph.output_node().meta)
    with _use_lazy_graph_module(True):
        return _make_graph_module(gm, graph)


def observer() -> Observer:
    """The observers of passes: the log, and all active captures."""
    return _record_pass if _active else log_pass


def _record_pass(stage: str, name: str, before: str, after: str) -> None:
    log_pass(stage, name, before, after)
    for active in _active:
        active.passes.append(CapturedPass(stage, name, before, after))


def record(captured: CapturedGraph, is_backward: bool) -> None:
    """Hand a lowered graph to every capture that is under way."""
    for active in _active:
        (active.backward if is_backward else active.forward).append(captured)
