"""Which forwards a graph of Dynamo holds: those of whole models, or of parts of them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch.fx import GraphModule

from passes.fx.torch_internals.core import TracingContext

from ..units.unit import Unit

# Compilations in which a forward of a unit inside of another was traced by itself.
_of_parts: weakref.WeakSet[TracingContext] = weakref.WeakSet()


def note_traced_forward(*, is_of_root: bool) -> None:
    """Note, while Dynamo traces, the forward of a unit that no forward of another unit surrounds."""
    if not is_of_root:
        _of_parts.add(TracingContext.get())


def holds_whole_forwards(gm: GraphModule, units: Iterable[Unit]) -> bool:
    """Return whether a graph holds all that a call of a model computes, whichever units it computes with.

    False: it ends at a graph break, begins within a forward, or is of a part of a model that is compiled by itself.

    Args:
        gm: the graph, in its compilation.
        units: units whose parameters it reads.
    """
    reason = getattr(gm, "compile_subgraph_reason", None)
    ends_early = reason is not None and reason.graph_break
    # Dynamo has traced that a forward begins, and has not yet done it.
    begins_within = any(unit.scope.active for unit in units)
    context = TracingContext.try_get()
    return not ends_early and not begins_within and context is not None and context not in _of_parts
