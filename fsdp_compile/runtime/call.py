"""One call of a graph: its parameters, the extra inputs that are bound and released, and the extra outputs that are stored."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from passes.collectives.functional import factor_tensor
from passes.ir.interface import (
    DivideFactor,
    FullParameter,
    HookTensor,
    InputSlot,
    NodeShards,
    OptimizerState,
    OutputSlot,
    PartialGradient,
    ReducedGradient,
    StorageRun,
    UnshardedGradient,
    UpdatedRun,
    UpdateNumbers,
)
from passes.ir.reduction import Reduction, Sync
from passes.transforms.bucket import Group

from ..units.param_state import cut, joined
from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from ..units.updater import Planned, Updater
from .gradients import (
    accumulates,
    flat_grad,
    flat_partial,
    keep_partial,
    note_update,
    reduced,
    reduction_of,
    store_gradients,
    unsharded_grad,
)
from .graph_inputs import GraphInputs, ParameterRegistry
from .hook_tensors import hook_tensor
from .tensor_kind import Like


class Gradients:
    """A bucket of gradients in one call of a graph.

    Attributes:
        params: the parameters of the gradients.
        like: dtype and device of the reduction.
        grad_dtype: dtype of the reduced gradients.
        reduction: the graph's plan for the gradients.
        factors: the divide factors of ``reduction``.
        updates: the update of each parameter, if the graph updates them.
    """

    def __init__(self, params: list[ShardedParam], like: Like, grad_dtype: torch.dtype):
        self.params = params
        self.like = like
        self.grad_dtype = grad_dtype
        self.reduction: Reduction
        self.factors: tuple[float, ...]
        self.updates: tuple[Planned, ...] = ()

    @property
    def unit(self) -> Unit:
        return self.params[0].unit

    def plan(self) -> Reduction:
        """Plan the reduction, by the unit's flags and the gradients that earlier microbatches left."""
        self.reduction, self.factors = reduction_of(self.unit, self.params, self.like)
        if self.reduction.updates:
            self.updates = tuple(_updater(param).planned(param) for param in self.params)
        return self.reduction

    def leave_out(self) -> Reduction:
        """Plan for gradients that were not asked for: the graph does not reduce them, and :meth:`Call.store` drops them."""
        self.reduction, self.factors = Reduction(Sync.NONE), ()
        return self.reduction

    def merge(self, params: list[ShardedParam]) -> Gradients:
        """Make a bucket of the gradients of ``params``, which come from this bucket and from others with an equal plan."""
        merged = Gradients(params, self.like, self.grad_dtype)
        merged.reduction, merged.factors = self.reduction, self.factors
        return merged


class Call:
    """One call of a graph.

    Args:
        inputs: the graph's inputs that are shards.
        registry: the parameters of shards that a saved-tensor hook replaced.
        args: the arguments of the call.

    Attributes:
        gathers: the parameters of each bucket of gathers; None for a bucket that is gathered in any case
            (:class:`.GatherInputs`).
        gradients: the gradients, a bucket for each collective.
        params: a parameter of each unit that the graph works for, by the unit's name in the graph; the same on all ranks.
        units: these units.
    """

    def __init__(self, inputs: GraphInputs, registry: ParameterRegistry, args: list[Any]):
        self._inputs = inputs
        self._registry = registry
        self._args = args
        members = [bucket.members for bucket in inputs.gathers]
        self.gathers = [None if found is None else [*map(self.param, found)] for found in members]
        self.gradients = [
            Gradients([*map(self.param, bucket.members)], bucket.like, bucket.grad_dtype) for bucket in inputs.gradients
        ]
        self.params = {name: self.param(member) for name, member in inputs.units.items()}
        self.units = {name: param.unit for name, param in self.params.items()}

    def check_shards_differ(self) -> None:
        """Check that no two inputs are one shard: the graph would keep one of its two gradients.

        Raises:
            RuntimeError: one unit has taken the place of another since the graph was traced.
        """
        names = self._inputs.names
        if len({id(self._args[index]) for index in names}) == len(names):
            return
        seen: dict[int, str] = {}
        for index, (_, name) in names.items():
            shard = id(self._args[index])
            if shard in seen:
                raise RuntimeError(
                    f"Parameters {seen[shard]} and {name} were two when a graph was compiled, and now are one, so the graph "
                    "would lose gradients. Call torch._dynamo.reset() after such a change, so that the model is traced anew."
                )
            seen[shard] = name

    def param(self, index: int) -> ShardedParam:
        """Return the parameter whose shard is the input of this index."""
        return self._registry.param_of(self._args[index], self._inputs.names[index])

    def accumulates(self) -> bool:
        """Return whether the running backward accumulates gradients of parameters."""
        shards = [param.shard for bucket in self.gradients for param in bucket.params]
        # Some parameters may have been frozen since forward.
        shard = next((shard for shard in shards if shard.requires_grad), None)
        return shard is not None and accumulates(shard)

    def regroup(self, groups: Sequence[Group]) -> None:
        """Regroup gradients as a variant of the graph reduces them. Merged gradients have equal plans and factors."""
        buckets = self.gradients
        self.gradients = [
            buckets[group[0][0]].merge([buckets[index].params[position] for index, position in group]) for group in groups
        ]

    def release(self, *, is_backward: bool) -> None:
        """Drop the references to tensors that the graph consumes, so that the graph frees each after its last use."""
        for bucket in self.gradients:
            for param in bucket.params:
                if bucket.reduction.sync is not Sync.NONE:
                    param.state.unsharded_grad = None
                if bucket.reduction.sync is Sync.ALL:
                    param.state.partial_grad = None
        if is_backward:
            for params in self.gathers:
                for param in params or ():
                    if param.unit.flags.reshard_after_backward:
                        param.state.drop_full()

    def released(self, slots: Sequence[InputSlot], *, is_backward: bool) -> dict[int, ShardedParam]:
        """Return each gathered parameter that :meth:`release` leaves to the graph, by its index in ``slots``."""
        found = {}
        for index, slot in enumerate(slots):
            if is_backward and isinstance(slot, FullParameter):
                param = _of_gather(self, slot)
                if param.state.full(param.param) is not None and param.unit.flags.reshard_after_backward:
                    found[index] = param
        return found

    def bind(self, slots: Iterable[InputSlot]) -> None:
        """Append the extra inputs to the arguments."""
        self._args.extend([_BIND[type(slot)](self, slot) for slot in slots])

    def store(self, slots: Iterable[OutputSlot], values: Iterable[Tensor], *, gradients: bool) -> None:
        """Put extra outputs where the next graph, or the user, finds them.

        Args:
            slots: the kind of each output.
            values: the outputs.
            gradients: whether gradients are stored; if not, they are dropped.
        """
        for slot, value in zip(slots, values, strict=True):
            if gradients or isinstance(slot, (FullParameter, NodeShards)):
                _STORE[type(slot)](self, slot, value)
        for bucket in self.gradients:
            if bucket.reduction.updates:
                note_update(bucket.params)
            elif bucket.reduction.sync is Sync.ALL:
                reduced(bucket.params)


# The functions that bind an input of each kind, or store an output.


def _bind_storage(call: Call, slot: StorageRun) -> Tensor:
    param = call.param(slot.placeholder)
    return param.unit.storages[param.shard.dtype].narrow(0, slot.offset, slot.numel)


def _of_gather(call: Call, slot: FullParameter) -> ShardedParam:
    params = call.gathers[slot.bucket]
    assert params is not None
    return params[slot.position]


def _bind_full(call: Call, slot: FullParameter) -> Tensor:
    param = _of_gather(call, slot)
    full = param.state.full(param.param)
    assert full is not None
    return full


def _store_full(call: Call, slot: FullParameter, value: Tensor) -> None:
    param = _of_gather(call, slot)
    param.state.keep_full(param.param, value.contiguous())


def _of_node_shards(call: Call, slot: NodeShards) -> list[ShardedParam]:
    buckets = call.gathers
    return [(buckets[bucket] or [])[position] for bucket, position in slot.members]


def _bind_node_shards(call: Call, slot: NodeShards) -> Tensor:
    params = _of_node_shards(call, slot)
    slices = [param.state.node_shard(param.param) for param in params]
    flat = joined(slices)
    if flat is None:
        # Another graph gathered them in other buckets.
        pieces = [piece.tensor() for piece in slices if piece is not None]
        flat = torch.cat(pieces)
        _keep_node_shards(params, [piece.numel() for piece in pieces], flat)
    return flat


def _store_node_shards(call: Call, slot: NodeShards, value: Tensor) -> None:
    params = _of_node_shards(call, slot)
    numels = [param.padded_numel for param in params]
    if value.dtype == torch.uint8:
        numels = [numel * param.compute_dtype.itemsize for numel, param in zip(numels, params, strict=True)]
    _keep_node_shards(params, [numel * params[0].mesh.nodes for numel in numels], value)


def _keep_node_shards(params: Sequence[ShardedParam], numels: Sequence[int], flat: Tensor) -> None:
    for param, piece in zip(params, cut(flat, numels), strict=True):
        param.state.keep_node_shard(param.param, piece)


def _bind_unsharded(call: Call, slot: UnshardedGradient) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return unsharded_grad(bucket.params[slot.position], bucket.like)


def _store_unsharded(call: Call, slot: UnshardedGradient, value: Tensor) -> None:
    call.gradients[slot.reduction].params[slot.position].state.unsharded_grad = value.contiguous()


def _bind_partial(call: Call, slot: PartialGradient) -> Tensor:
    return flat_partial(call.gradients[slot.reduction].params)


def _store_partial(call: Call, slot: PartialGradient, value: Tensor) -> None:
    keep_partial(call.gradients[slot.reduction].params, value)


def _bind_reduced(call: Call, slot: ReducedGradient) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return flat_grad(bucket.params, bucket.grad_dtype)


def _store_reduced(call: Call, slot: ReducedGradient, value: Tensor) -> None:
    store_gradients(call.gradients[slot.reduction].params, value)


def _bind_factor(call: Call, slot: DivideFactor) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return factor_tensor(bucket.factors[slot.number], bucket.like.dtype, bucket.like.device)


def _bind_hook_tensor(call: Call, slot: HookTensor) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return hook_tensor(bucket.params[slot.position], slot.name, bucket.like)


def _updater(param: ShardedParam) -> Updater:
    assert param.updater is not None
    return param.updater


def _bind_updated(call: Call, slot: UpdatedRun) -> Tensor:
    param = call.gradients[slot.reduction].params[slot.position]
    return param.unit.storages[param.shard.dtype].narrow(0, param.offset, slot.numel)


def _bind_state(call: Call, slot: OptimizerState) -> Tensor:
    param = call.gradients[slot.reduction].params[slot.position]
    return _updater(param).state_run(param, slot.numel, slot.name)


def _bind_numbers(call: Call, slot: UpdateNumbers) -> Tensor:
    param = call.gradients[slot.reduction].params[slot.position]
    return _updater(param).numbers(param)


_BIND: dict[type, Callable[[Call, Any], Tensor]] = {
    StorageRun: _bind_storage,
    FullParameter: _bind_full,
    NodeShards: _bind_node_shards,
    UnshardedGradient: _bind_unsharded,
    PartialGradient: _bind_partial,
    ReducedGradient: _bind_reduced,
    DivideFactor: _bind_factor,
    HookTensor: _bind_hook_tensor,
    UpdatedRun: _bind_updated,
    OptimizerState: _bind_state,
    UpdateNumbers: _bind_numbers,
}
_STORE: dict[type, Callable[[Call, Any, Tensor], None]] = {
    FullParameter: _store_full,
    NodeShards: _store_node_shards,
    UnshardedGradient: _store_unsharded,
    PartialGradient: _store_partial,
    ReducedGradient: _store_reduced,
}
