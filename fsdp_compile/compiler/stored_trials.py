"""Stored trials: what the search under a memory budget found, so that the next process does not search again.

A search depends on its joint graph, on the open choices and the hardware numbers, and on all that passes and schedules depend
on. The first trial tells of the latter: its key has the graphs that this trial scheduled, beside the joint graph. The trials do
not depend on the budget, so a process with another budget finds them, too.

A file that is missing or damaged costs a search. With symbolic sizes, nothing is stored: a search may add guards on them.
"""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor
from torch.fx import Graph, Node

from passes.auto.step_policy import Trial
from passes.fx.torch_internals.core import pytree
from passes.fx.torch_internals.inductor import cache_dir

from .cache_folder import write_whole

logger = logging.getLogger(__name__)

# The keys of ``node.meta`` that the partitioner and passes read, besides those of this library.
_READ = ("partitioner_tag", "recompute", "ac_graph_id", "has_backward_hook", "freed", "custom", "is_gradient_acc")


def trials_key(graphs: Iterable[Graph], parts: object) -> str:
    """Return the key of a search.

    Args:
        graphs: the joint graph, and the graphs that the first trial scheduled.
        parts: what else the trials depend on, such as the surroundings, with a ``repr`` that tells.
    """
    digest = hashlib.sha256(repr(parts).encode())
    for graph in graphs:
        for node in graph.nodes:
            digest.update(_text_of(node).encode())
    return digest.hexdigest()


def _text_of(node: Node) -> str:
    tensors = [
        (value.shape, value.stride(), value.dtype, value.device) if isinstance(value, Tensor) else value
        for value in pytree.tree_leaves(node.meta.get("val"))
    ]
    read = [(key, value) for key, value in node.meta.items() if key in _READ or key.startswith("fsdp")]
    return repr((node.name, node.op, str(node.target), node.args, node.kwargs, tensors, read))


def load_trials(key: str) -> list[Trial]:
    """Return the trials of a search. There are none if nobody has stored them, or the file is damaged."""
    try:
        return pickle.loads(_path(key).read_bytes())  # type: ignore[no-any-return]
    except FileNotFoundError:
        return []
    except Exception as error:
        logger.info("Policies are tried again, as the file with trials cannot be read: %r", error)
        return []


def store_trials(key: str, trials: Sequence[Trial]) -> None:
    """Store the trials of a search. If that fails, as on a full disk, the next process searches again."""
    try:
        write_whole(_path(key), pickle.dumps(list(trials)))
    except Exception as error:
        logger.info("Trials are not stored: %r", error)


def _path(key: str) -> Path:
    return Path(cache_dir()) / "fsdp_compile" / "trials" / key
