"""A graph that a capture recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torch.fx import Graph, GraphModule

from passes.models.memory_model import LiveBytes, live_bytes
from passes.pass_runner import graph_text


@dataclass(eq=False)
class CapturedGraph:
    """A lowered graph.

    Attributes:
        graph_module: the graph after all passes, as it was handed to the lowering.
        code: the source that Inductor generated; None for the ``aot_eager`` lowering.
        group_names: the name of each process group in the mesh, such as "shard", by the group's own name.
        schedule_again: copies the graph as it was before the passes, calls a function that may change the copy, runs the passes
            over it, and returns it.
    """

    graph_module: GraphModule
    code: str | None
    group_names: dict[str, str]
    schedule_again: Callable[[Callable[[Graph], None]], GraphModule] = field(repr=False)

    def readable(self) -> str:
        """Return the graph as text, deterministic and equal on all ranks. Group names are ``shard``, ``replicate`` etc."""
        return graph_text(self.graph_module.graph, self.group_names)

    def live_bytes(self) -> LiveBytes:
        """Count live bytes at each node: all, and gathered parameters (see :mod:`passes.models.memory_model`)."""
        return live_bytes(self.graph_module.graph)
