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
from passes.ir.work import BucketName
from passes.transforms.bucket import Bucket, Group, find_buckets, whole_buckets

from ..units.sharded_param import ShardedParam, find_sharded_param, param_in_memory
from ..units.unit import Unit
from .tensor_kind import TensorKind


def sharded_param(shard: Any) -> ShardedParam:
    """Return the parameter whose shard is a graph input."""
    found = find_sharded_param(shard)
    assert found is not None
    return found


@dataclass(frozen=True)
class GatherInputs:
    """A bucket of gathers in a graph.

    Attributes:
        name: the name of the bucket.
        unit: the name of its unit in the graph.
        parameters: the name of each parameter.
        members: the indices of the inputs that are the shards of its parameters. None for a bucket that is gathered in any
            case: its shards are not in flat storage (extensions, smaller groups), or the graph keeps its bytes for a smaller
            group.
    """

    name: BucketName
    unit: str
    parameters: tuple[str, ...]
    members: tuple[int, ...] | None


@dataclass(frozen=True)
class GradientInputs:
    """A bucket of gradients in a graph.

    Attributes:
        name: the name of the bucket.
        unit: the name of its unit in the graph.
        members: the indices of the inputs that are the shards of its parameters.
        like: dtype and device of the reduction.
        grad_dtype: dtype of the reduced gradients.
    """

    name: BucketName
    unit: str
    members: tuple[int, ...]
    like: TensorKind
    grad_dtype: torch.dtype


@dataclass(frozen=True)
class GraphInputs:
    """The inputs of a graph that are shards, by their indices.

    Attributes:
        names: for each shard, the names of unit and parameter in the graph.
        units: for each unit, by its name in the graph, the index of one of its shards, the same on all ranks.
        read: the indices of the shards that the graph unshards.
        stored: those of them that every rank has whole, so that the graph reads them where they are stored.
        gathers: the buckets of gathers.
        gradients: the buckets of the graph's gradients.
        reduction_groups: the gradients that share a collective unless a schedule merges buckets.
    """

    names: Mapping[int, tuple[str, str]]
    units: Mapping[str, int]
    read: Sequence[int]
    stored: Sequence[int]
    gathers: Sequence[GatherInputs]
    gradients: Sequence[GradientInputs]
    reduction_groups: Sequence[Group]

    @staticmethod
    def of(graph: Graph) -> GraphInputs:
        """Find the inputs of a graph after the preparing passes."""
        places = _Places(graph)
        buckets = find_buckets(graph)
        gathered = [Unshard.of(node) for node in unshards(graph.nodes)]
        reduced = [ReduceGrad.of(node) for node in reduce_grads(graph.nodes)]
        specs: list[Unshard | ReduceGrad] = [*gathered, *reduced]
        names: dict[int, tuple[str, str]] = {}
        shards: dict[str, list[tuple[bool, str, int]]] = {}
        for spec in specs:
            for index in places.of([spec.shard if isinstance(spec, ReduceGrad) else spec.source]):
                names[index] = spec.unit, spec.name
                if isinstance(spec, ReduceGrad) or spec.offset >= 0 or spec.token is not None:
                    # A rank may leave out a scalar, for which it gathers nothing: these come last.
                    shards.setdefault(spec.unit, []).append((spec.dim == REPLICATED, spec.name, index))
        return GraphInputs(
            names=names,
            units={unit: min(found)[-1] for unit, found in shards.items()},
            read=places.of([spec.source for spec in gathered]),
            stored=places.of([spec.source for spec in gathered if spec.dim == REPLICATED]),
            gathers=[places.gather(bucket) for bucket in buckets.gathers],
            gradients=[places.gradients(bucket) for bucket in buckets.reductions],
            reduction_groups=whole_buckets(buckets.reductions),
        )


class _Places:
    """The indices of a graph's inputs."""

    def __init__(self, graph: Graph):
        self._index = placeholder_index(graph)

    def of(self, shards: Sequence[Node]) -> tuple[int, ...]:
        """Return the indices of shards, without those that the graph computes."""
        return tuple(self._index[node] for node in map(shard_input, shards) if node is not None)

    def gather(self, bucket: Bucket) -> GatherInputs:
        specs = [Unshard.of(node) for node in bucket.nodes]
        leaves_bytes = any(user.target == reshard_rounded for node in bucket.nodes for user in node.users)
        can_keep = all(spec.offset >= 0 for spec in specs) and not leaves_bytes
        parameters = tuple(spec.name for spec in specs)
        return GatherInputs(bucket.name, bucket.unit, parameters, self.of(bucket.shards) if can_keep else None)

    def gradients(self, bucket: Bucket) -> GradientInputs:
        spec = ReduceGrad.of(bucket.nodes[0])
        value = spec.grad.meta["val"]
        like = TensorKind(value.dtype, value.device)
        return GradientInputs(bucket.name, bucket.unit, self.of(bucket.shards), like, spec.grad_dtype or value.dtype)


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
        found = find_sharded_param(shard)
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
    found = [find_sharded_param(function.variable) for function in following if hasattr(function, "variable")]
    return {param.unit for param in found if param is not None}
