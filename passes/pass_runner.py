"""Passes as data, and the one function that runs them: it logs each, and can leave one out."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from torch.fx import Graph

from .fx.torch_internals.core import trace_log, trace_structured

logger = logging.getLogger(__name__)

#: Called with the stage ("dynamo", "joint", "forward", "backward"), the pass's name, and the graph's text before and after it.
Observer = Callable[[str, str, str, str], None]


class HasGraph(Protocol):
    """The subject of the passes of a stage: a graph, with what they know and find out about it."""

    @property
    def graph(self) -> Graph:
        """The graph."""


Subject = TypeVar("Subject", bound=HasGraph)


@dataclass(frozen=True)
class Pass(Generic[Subject]):
    """A pass.

    Attributes:
        name: its name in logs, in ``capture()`` and in the option ``disable_passes``.
        run: changes the graph, in place.
        when: tells whether it is to run; None: always.
        is_rare: whether it has work in few graphs. It is then reported only where it changes a graph.
        is_optional: whether results are right without it, too.
    """

    name: str
    run: Callable[[Subject], object]
    when: Callable[[Subject], bool] | None = None
    is_rare: bool = False
    is_optional: bool = False


def run_all(
    passes: Sequence[Pass[Subject]], on: Subject, stage: str, observer: Observer, disabled: Collection[str] = ()
) -> None:
    """Run passes in order, and report each.

    Args:
        passes: the passes.
        on: the graph, with what the passes know about it.
        stage: see :data:`Observer`.
        observer: called after every pass.
        disabled: the names of optional passes to leave out.
    """
    observed = _is_observed(observer)
    for each in passes:
        if (each.is_optional and each.name in disabled) or (each.when is not None and not each.when(on)):
            continue
        before = graph_text(on.graph, tags=stage == "joint") if observed else ""
        each.run(on)
        if not observed:
            continue
        on.graph.lint()
        after = graph_text(on.graph, tags=stage == "joint")
        if before != after or not each.is_rare:
            observer(stage, each.name, before, after)


def graph_text(graph: Graph, group_names: Mapping[str, str] | None = None, *, tags: bool = False) -> str:
    """Return the graph as Python code, without colours, memory addresses or source positions.

    Args:
        graph: the graph.
        group_names: the names to print, by the names of process groups.
        tags: append to each node its ``recompute`` policy for the partitioner.
    """
    source = graph.python_code("self", verbose=True, include_stride=False, include_device=False).src
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("# ")]
    # Drop the ``;  x = None`` after last uses: generated code frees values elsewhere.
    lines = [re.sub(r";  (\w+ = )+None$", "", line) for line in lines]
    if tags:
        policies = {node.name: node.meta["recompute"].name for node in graph.nodes if "recompute" in node.meta}
        for index, line in enumerate(lines):
            policy = policies.get(re.split(r"[:= ]", line.strip(), maxsplit=1)[0])
            lines[index] = f"{line}  # {policy}" if policy else line
    text = "\n".join(lines).replace("torch.ops.", "")
    for group, name in (group_names or {}).items():
        text = text.replace(f"'{group}'", f"'{name}'")
    return text + "\n"


def log_pass(stage: str, pass_name: str, before: str, after: str) -> None:
    """Write a graph before and after a pass to torch's structured trace and to the log."""
    _log_graph(f"fsdp_{stage}_{pass_name}_before", before)
    _log_graph(f"fsdp_{stage}_{pass_name}_after", after)


def ignore_pass(stage: str, pass_name: str, before: str, after: str) -> None:
    """Record nothing, for graphs that are only tried."""


def _log_graph(name: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
    logger.debug("%s:\n%s", name, text)


def _is_observed(observer: Observer) -> bool:
    if observer is ignore_pass:
        return False
    return observer is not log_pass or logger.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)
