"""Recomputed attention: without dropout, it computes the same again, whatever the state of random numbers.

torch counts attention as random. So where a checkpoint recomputes it, torch's partitioner saves the state of the generator in
forward for backward: kilobytes for each attention on the CPU, and a graph that depends on the process, which no cache keeps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from passes.fx.torch_internals.aot import partitioners
from passes.fx.torch_internals.core import OpOverload
from passes.fx.torch_internals.objects import schema_of
from passes.fx.torch_internals.patches import functionalize_rng_ops

from .stored_graph import can_store


@contextlib.contextmanager
def without_random_states() -> Iterator[None]:
    """Save no states of generators for attention without dropout in what is partitioned inside of the ``with`` block.

    With torch 2.11, which stores no graphs, they are saved.
    """
    if not can_store() or not functionalize_rng_ops.is_known():
        yield
        return
    with functionalize_rng_ops.replaced(_unless_nothing_is_random):
        yield


def _unless_nothing_is_random(functionalize: Callable[..., Any]) -> Callable[..., Any]:
    def functionalize_rng_ops(joint: GraphModule, forward: GraphModule, backward: GraphModule, num_sym_nodes: int) -> Any:
        if any(map(_is_random_again, joint.graph.nodes)):
            return functionalize(joint, forward, backward, num_sym_nodes)
        return forward, backward

    return functionalize_rng_ops


def _is_random_again(node: Node) -> bool:
    """Return whether a node that is recomputed draws random numbers."""
    target = node.target
    if not partitioners.must_recompute(node) or not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    names = [argument.name for argument in schema_of(target).arguments]
    if "dropout_p" not in names:
        return True
    place = names.index("dropout_p")
    return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))
