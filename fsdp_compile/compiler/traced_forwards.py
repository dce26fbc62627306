"""The forwards in a Dynamo graph: of whole models, or of parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.fx import GraphModule

from passes.fx.torch_internals.core import TracingContext

from ..units.unit import Unit

# Compilations that traced the forward of an inner unit without a forward of its root around it.
_of_parts: weakref.WeakSet[TracingContext] = weakref.WeakSet()


def note_outermost_forward(*, is_of_root: bool) -> None:
    """Note that Dynamo traces the forward of a unit, with no forward of another unit around it.

    Args:
        is_of_root: whether the unit is a root.
    """
    if not is_of_root:
        _of_parts.add(TracingContext.get())


def holds_whole_forwards(gm: GraphModule, units: Iterable[Unit]) -> bool:
    """Return whether a graph holds all that a call of a model computes, whichever units it computes with.

    A graph does not if it ends at a graph break, begins within a forward, or is of a part of a model that is compiled by
    itself.

    Args:
        gm: the graph, in its compilation.
        units: the units whose parameters the graph reads.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    ends_early = reason is not None and reason.graph_break
    # Dynamo applies what it traced only later: a forward that is active now surrounds the graph.
    begins_within = any(unit.scope.active for unit in units)
    context = TracingContext.try_get()
    return not ends_early and not begins_within and context is not None and context not in _of_parts
