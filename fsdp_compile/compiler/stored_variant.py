"""Stored variants: lowered graphs beside Inductor's cache, so that the next process neither schedules nor lowers them.

A variant is stored for a stored graph (:mod:`fsdp_compile.compiler.stored_graph`). Its file names the kernels of its segments
by their keys in Inductor's cache. With symbolic sizes, a file has a variant for each set of conditions on them.

A file that is missing or damaged, and kernels that are not there any more, cost time: the graph is lowered again.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.fx import Graph, GraphModule

from passes.fx.torch_internals.inductor import cache_dir, compiled_fx_graph_hash, inductor_config
from passes.ir.interface import InputSlot, OutputSlot
from passes.ir.plan import Plan
from passes.lowering.collective_sequence import Collective
from passes.transforms.bucket import Group

from .cache_folder import write_whole

logger = logging.getLogger(__name__)

# The file keeps so many variants, the newest.
_MOST_VARIANTS = 8


@dataclass(frozen=True)
class StoredVariant:
    """A graph, lowered for a plan.

    Attributes:
        inputs, outputs: its extra inputs and outputs.
        reduction_groups: the gradients that each collective reduces.
        sequence: its collectives, in order.
        conditions: sympy conditions on symbolic sizes that it relies on, besides those of the trace.
        program: what its lowering makes the function of.
    """

    inputs: Sequence[InputSlot]
    outputs: Sequence[OutputSlot]
    reduction_groups: Sequence[Group]
    sequence: Sequence[Collective]
    conditions: Sequence[Any]
    program: Any


def variant_key(graph_key: str, plan: Plan, options: object, kwargs: Mapping[str, Any]) -> str:
    """Return the key of a variant; empty: it cannot be stored. Call it in the contexts in which the graph is lowered.

    Args:
        graph_key: the key of the graph.
        plan: the plan.
        options: what else passes and lowering depend on, besides the configuration of Inductor, with a ``repr`` that tells.
        kwargs: Inductor's keywords for the graph.
    """
    if plan.has_hooks or plan.has_updates or not inductor_config.fx_graph_cache:
        return ""
    parts = graph_key, plan, options, _configuration(kwargs), torch.get_num_threads()
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _configuration(kwargs: Mapping[str, Any]) -> str:
    """Return the key of a graph without nodes in Inductor's cache: what the code of any graph depends on."""
    graph = Graph()
    graph.output(())
    return compiled_fx_graph_hash(GraphModule({}, graph), [], dict(kwargs), [])[0]  # type: ignore[arg-type]


def load_variants(key: str) -> list[StoredVariant]:
    """Return the stored variants, for different conditions on sizes. There are none if the file is damaged."""
    try:
        return pickle.loads(_path(key).read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return []
    except Exception as error:
        logger.info("A graph is lowered again, as its file cannot be read: %r", error)
        return []


def store_variant(key: str, variant: StoredVariant) -> None:
    """Store a variant. If that fails, as on a full disk, the next process lowers the graph again."""
    path = _path(key)
    # If another rank writes at the same time, the variant of one of them is lost.
    others = [other for other in load_variants(key) if other.conditions != variant.conditions]
    try:
        write_whole(path, pickle.dumps([*others[1 - _MOST_VARIANTS :], variant]))
    except Exception as error:
        logger.info("A lowered graph is not stored: %r", error)


def _path(key: str) -> Path:
    return Path(cache_dir()) / "fsdp_compile" / key[:2] / key
