"""The order in which the passes run, and the trace that each leaves.

    Dynamo graph             deduplicate
    joint graph              reshard_after_forward
    forward, backward graph  resolve_ties -> name_shards -> mixed_precision, once;
                             bucket -> gradient_sync (backward) -> flat_storage -> schedule -> lower (Inductor only),
                             for each sync plan that the graph is called with

Every pass is told to an :data:`Observer`; :func:`log_pass` is the one that writes to torch's structured trace (tlparse shows
it) and to the ``passes`` logger (``TORCH_LOGS="+passes"``).
"""

import contextlib
import logging
import re
from collections.abc import Callable, Iterator, Mapping

from torch._logging import trace_structured
from torch.fx import Graph, GraphModule

from .bucket import bucket_gathers
from .deduplicate import deduplicate
from .flat_storage import flat_storage, locate_shards
from .gradient_sync import synchronize_gradients
from .interface import Interface
from .lower import lower
from .mixed_precision import mixed_precision
from .name_shards import name_shards
from .reshard_after_forward import reshard_after_forward, resolve_ties
from .schedule import schedule_gathers, schedule_reductions
from .sync_plan import Plan

logger = logging.getLogger(__name__)

#: Called with the stage ("dynamo", "joint", "forward", "backward"), the pass, and the graph's text before and after it.
Observer = Callable[[str, str, str, str], None]


def graph_text(graph: Graph, group_names: Mapping[str, str] | None = None, *, tags: bool = False) -> str:
    """The graph as Python code, without colours, memory addresses or source positions.

    Args:
        graph: the graph.
        group_names: names of process groups to the names to print for them.
        tags: append to each node what it tells the partitioner.
    """
    source = graph.python_code("self", verbose=True, include_stride=False, include_device=False).src
    lines = [line for line in source.splitlines() if line.strip() and not line.lstrip().startswith("# ")]
    # What remains says which operator reads what; where values die is for the generated code to show.
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


def _log_graph(name: str, text: str) -> None:
    trace_structured("artifact", metadata_fn=lambda: {"name": name, "encoding": "string"}, payload_fn=lambda: text)
    logger.debug("%s:\n%s", name, text)


def _is_observed(observer: Observer) -> bool:
    from torch._logging._internal import trace_log

    return observer is not log_pass or logger.isEnabledFor(logging.DEBUG) or bool(trace_log.handlers)


@contextlib.contextmanager
def _observed(graph: Graph, stage: str, pass_name: str, observer: Observer) -> Iterator[None]:
    observed = _is_observed(observer)
    before = graph_text(graph, tags=stage == "joint") if observed else ""
    yield
    graph.lint()
    if observed:
        observer(stage, pass_name, before, graph_text(graph, tags=stage == "joint"))


def run_dynamo_passes(gm: GraphModule, observer: Observer = log_pass) -> None:
    """Passes over the graph that Dynamo captured. In place."""
    with _observed(gm.graph, "dynamo", "deduplicate", observer):
        deduplicate(gm)


def run_joint_passes(graph: Graph, observer: Observer = log_pass) -> None:
    """Passes over the joint graph, ahead of the partitioner. In place."""
    with _observed(graph, "joint", "reshard_after_forward", observer):
        reshard_after_forward(graph)


def run_preparing_passes(gm: GraphModule, *, is_backward: bool, observer: Observer = log_pass) -> None:
    """Passes over a partitioned forward or backward graph that do not depend on the sync plan. In place."""
    graph = gm.graph
    stage = "backward" if is_backward else "forward"
    with _observed(graph, stage, "resolve_ties", observer):
        resolve_ties(graph)
    with _observed(graph, stage, "name_shards", observer):
        name_shards(graph)
    with _observed(graph, stage, "mixed_precision", observer):
        mixed_precision(graph)


def run_passes(
    gm: GraphModule, plan: Plan, *, is_backward: bool, for_inductor: bool = True, observer: Observer = log_pass
) -> Interface:
    """Passes over a prepared forward or backward graph, for one sync plan. In place.

    Returns:
        The inputs and outputs that the graph has besides those that it had.
    """
    graph = gm.graph
    stage = "backward" if is_backward else "forward"
    interface = Interface(graph)
    locations = locate_shards(graph)
    with _observed(graph, stage, "bucket", observer):
        bucket_gathers(graph, plan.gathers, interface)
    if is_backward:
        with _observed(graph, stage, "gradient_sync", observer):
            synchronize_gradients(graph, plan.reductions, interface)
    interface.finish()
    with _observed(graph, stage, "flat_storage", observer):
        flat_storage(graph, locations, interface)
    with _observed(graph, stage, "schedule", observer):
        schedule_gathers(graph)
        schedule_reductions(graph)
    if for_inductor:
        with _observed(graph, stage, "lower", observer):
            lower(graph)
    gm.recompile()
    return interface
