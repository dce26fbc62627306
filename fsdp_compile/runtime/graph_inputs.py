"""The inputs of a graph that are shards: the graph tells their indices, the tensors of a call tell their parameters."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from passes.collectives.layout import REPLICATED
from passes.fx.graph import placeholder_index, shard_input
from passes.fx.torch_internals.core import current_autograd_node
from passes.ir.ops import ReduceGrad, Unshard, reduce_grads, reshard_rounded, unshards
from passes.transforms.bucket import Bucket, Buckets, whole_buckets

from ..units.sharded_param import ShardedParam, param_in_memory
from ..units.unit import Unit


def sharded_param(shard: Any) -> ShardedParam:
    """Return the parameter whose shard is a graph input."""
    return shard._fsdp_sharded_param


@dataclass(frozen=True)
class GradientInputs:
    """A bucket of gradients in a graph.

    Attributes:
        members: the indices of the inputs that are the shards of its parameters.
        like: an empty tensor with dtype and device of the reduction.
        grad_dtype: dtype of the reduced gradients.
    """

    members: Sequence[int]
    like: Tensor
    grad_dtype: torch.dtype


class GraphInputs:
    """The inputs of a graph that are shards, by their indices.

    Args:
        graph: a graph after the preparing passes.
        buckets: its buckets.

    Attributes:
        names: for each shard, the names of unit and parameter in the graph.
        units: for each unit, by its name in the graph, the index of one of its shards, the same on all ranks.
        read: the indices of the shards that the graph unshards.
        buckets: as given.
        gathers: for each bucket of gathers, the indices of its shards. None for a bucket that is gathered in any case: its
            shards are not in flat storage (extensions, smaller groups), or the graph keeps its bytes for a smaller group.
        gradients: the buckets of the graph's gradients.
        reduction_groups: the gradients that share a collective unless a schedule merges buckets.
    """

    def __init__(self, graph: Graph, buckets: Buckets):
        self.buckets = buckets
        self._index = placeholder_index(graph)
        gathered = [Unshard.of(node) for node in unshards(graph.nodes)]
        reduced = [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
        self.names: dict[int, tuple[str, str]] = {}
        specs: list[Unshard | ReduceGrad] = [*gathered, *reduced]
        shards: dict[str, list[tuple[bool, str, int]]] = {}
        for spec in specs:
            for index in self._places([spec.shard if isinstance(spec, ReduceGrad) else spec.source]):
                self.names[index] = spec.unit, spec.name
                if isinstance(spec, ReduceGrad) or spec.offset >= 0 or spec.token is not None:
                    # A rank may leave out a scalar, for which it gathers nothing: these come last.
                    shards.setdefault(spec.unit, []).append((spec.dim == REPLICATED, spec.name, index))
        self.units = {unit: min(found)[-1] for unit, found in shards.items()}
        self.read = self._places([spec.source for spec in gathered])
        self.gathers = [self._members_to_keep(bucket) for bucket in buckets.gathers]
        self.gradients = [self._gradients(bucket) for bucket in buckets.reductions]
        self.reduction_groups = whole_buckets(buckets.reductions)

    def _places(self, shards: Sequence[Node]) -> list[int]:
        return [self._index[node] for node in map(shard_input, shards) if node is not None]

    def _members_to_keep(self, bucket: Bucket) -> list[int] | None:
        in_storage = all(Unshard.of(node).offset >= 0 for node in bucket.nodes)
        leaves_bytes = any(user.target == reshard_rounded for node in bucket.nodes for user in node.users)
        return self._places(bucket.shards) if in_storage and not leaves_bytes else None

    def _gradients(self, bucket: Bucket) -> GradientInputs:
        spec = ReduceGrad.of(bucket.nodes[0])
        value = spec.grad.meta["val"]
        like = torch.empty((), dtype=value.dtype, device=value.device)
        return GradientInputs(self._places(bucket.shards), like, spec.grad_dtype or value.dtype)


class ParameterRegistry:
    """The parameters that a model's graphs are called with, by the names of unit and parameter in the graphs.

    Normally a shard among the inputs has an attribute with its parameter. A saved-tensor hook may give backward another tensor
    in the place of the shard. The tensor of a checkpoint lies in the memory of the shard, which identifies the parameter. A
    copy (``save_on_cpu``) belongs to the parameter that the graph was compiled for. If equal blocks share the graph, it belongs
    to the unit that autograd is about to give gradients.
    """

    def __init__(self, params: Mapping[tuple[str, str], ShardedParam]):
        # Weak, as compiled code must not keep a model alive, nor grow with each new model.
        self._seen: dict[tuple[str, str], dict[int, weakref.ref[ShardedParam]]] = {names: {} for names in params}
        for names, param in params.items():
            self.note(names, param)

    def note(self, names: tuple[str, str], param: ShardedParam) -> None:
        """Note that graphs are called with a parameter by these names."""
        known = self._seen[names]
        number = id(param)
        if number not in known:
            known[number] = weakref.ref(param, lambda _: known.pop(number, None))

    def param_of(self, shard: Any, names: tuple[str, str]) -> ShardedParam:
        """Return the parameter of an input.

        Args:
            shard: the shard, or the tensor that a saved-tensor hook gave backward in its place.
            names: the names of unit and parameter in the graph.

        Raises:
            RuntimeError: the input is a copy, the names stand for parameters of several units, and all of these are frozen.
        """
        found = getattr(shard, "_fsdp_sharded_param", None)
        return self._find(shard, names) if found is None else found

    def _find(self, replaced: Tensor, names: tuple[str, str]) -> ShardedParam:
        found = param_in_memory(replaced)
        if found is not None:
            return found
        params = [param for known in list(self._seen.get(names, {}).values()) if (param := known()) is not None]
        if len(params) > 1:
            units = _units_with_gradients()
            params = [param for param in params if param.unit in units]
        if len(params) == 1:
            return params[0]
        raise RuntimeError(
            f"Backward found a copy of the shard of {names[1]} that forward saved, made by a saved-tensor hook (save_on_cpu). "
            "Several frozen modules share the compiled graph, so it cannot be told whose shard it is. Compile the whole model, "
            "or use no such hook around it."
        )


def _units_with_gradients() -> set[Unit]:
    """Return the units to whose shards the running node of autograd passes gradients."""
    node = current_autograd_node()
    following: list[Any] = [] if node is None else [function for function, _ in node.next_functions]
    shards = [function.variable for function in following if hasattr(function, "variable")]
    return {sharded_param(shard).unit for shard in shards if hasattr(shard, "_fsdp_sharded_param")}
