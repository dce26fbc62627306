"""One call of a graph: whose parameters it is about, and what it binds, releases and lands for them."""

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

from ..units.sharded_param import ShardedParam
from ..units.unit import Unit
from ..units.updater import Planned, Updater
from .gradients import (
    accumulates,
    flat_grad,
    flat_partial,
    keep_partial,
    land_gradients,
    note_update,
    reduced,
    reduction_of,
    unsharded_grad,
)
from .graph_inputs import GraphInputs, Owners
from .hook_tensors import hook_tensor


class Gradients:
    """A bucket of gradients in one call of a graph.

    Attributes:
        params: whose gradients they are.
        like: an empty tensor with dtype and device of the reduction.
        grad_dtype: dtype of the reduced gradients.
        reduction: what the graph does about them.
        factors: the divide factors of that.
        updates: the updates of the parameters, if the graph updates them.
    """

    def __init__(self, params: list[ShardedParam], like: Tensor, grad_dtype: torch.dtype):
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
        """Decide what the graph does, by the unit's flags and what earlier microbatches have left."""
        self.reduction, self.factors = reduction_of(self.unit, self.params, self.like)
        if self.reduction.updates:
            self.updates = tuple(_updater(param).planned(param) for param in self.params)
        return self.reduction

    def leave_out(self) -> Reduction:
        """Decide for gradients that were not asked for: the graph returns them as they are, and they are dropped."""
        self.reduction, self.factors = Reduction(Sync.NONE), ()
        return self.reduction

    def merge(self, params: list[ShardedParam]) -> Gradients:
        """Gradients of these parameters, of which some are of this bucket, and the rest of buckets that do the same."""
        merged = Gradients(params, self.like, self.grad_dtype)
        merged.reduction, merged.factors = self.reduction, self.factors
        return merged


class Call:
    """One call of a graph.

    Args:
        inputs: the graph's inputs.
        owners: whose shards they are.
        args: what it is called with.

    Attributes:
        gathers: for each bucket of gathers its parameters; None where the graph does not tell.
        gradients: its gradients, by what shares a collective.
        units: the units that it works for, by their names in the graph.
    """

    def __init__(self, inputs: GraphInputs, owners: Owners, args: list[Any]):
        self._inputs = inputs
        self._owners = owners
        self._args = args
        self.gathers = [None if members is None else [*map(self.param, members)] for members in inputs.gathers]
        self.gradients = [
            Gradients([*map(self.param, bucket.members)], bucket.like, bucket.grad_dtype) for bucket in inputs.gradients
        ]
        self.units = {name: self.param(member).unit for name, member in inputs.units.items()}

    def param(self, index: int) -> ShardedParam:
        """The parameter whose shard an input is."""
        return self._owners.of(self._args[index], self._inputs.names[index])

    def accumulates(self) -> bool:
        """Whether the backward that runs is to accumulate gradients of parameters."""
        shards = [param.shard for bucket in self.gradients for param in bucket.params]
        # One may have been frozen since forward.
        shard = next((shard for shard in shards if shard.requires_grad), None)
        return shard is not None and accumulates(shard)

    def regroup(self, groups: Sequence[Group]) -> None:
        """Take gradients as a variant of the graph reduces them: those that it merges have one plan, and equal factors."""
        buckets = self.gradients
        self.gradients = [
            buckets[group[0][0]].merge([buckets[index].params[position] for index, position in group]) for group in groups
        ]

    def release(self, *, is_backward: bool) -> None:
        """Leave what the graph consumes to the graph alone, so that its memory is free after the last use."""
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

    def released(self, slots: Sequence[InputSlot], *, is_backward: bool) -> dict[int, int]:
        """Of the extra inputs those that :meth:`release` leaves to the graph alone as gathered parameters: by their places, the
        bytes of each."""
        found = {}
        for index, slot in enumerate(slots):
            if is_backward and isinstance(slot, FullParameter):
                param = _of_gather(self, slot)
                full = param.state.full(param.param)
                if full is not None and param.unit.flags.reshard_after_backward:
                    found[index] = full.nbytes
        return found

    def bind(self, slots: Iterable[InputSlot]) -> None:
        """Append the extra inputs to the arguments."""
        self._args.extend([_BIND[type(slot)](self, slot) for slot in slots])

    def land(self, slots: Iterable[OutputSlot], values: Iterable[Tensor], *, gradients: bool) -> None:
        """Put extra outputs where the next graph, or the user, finds them.

        Args:
            slots: what they are.
            values: the outputs.
            gradients: gradients, too; otherwise these are dropped.
        """
        for slot, value in zip(slots, values, strict=True):
            if gradients or isinstance(slot, FullParameter):
                _LAND[type(slot)](self, slot, value)
        for bucket in self.gradients:
            if bucket.reduction.updates:
                note_update(bucket.params)
            elif bucket.reduction.sync is Sync.ALL:
                reduced(bucket.params)


# For each kind of slot what binds it, and what lands it.


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


def _land_full(call: Call, slot: FullParameter, value: Tensor) -> None:
    param = _of_gather(call, slot)
    param.state.keep_full(param.param, value.contiguous())


def _bind_unsharded(call: Call, slot: UnshardedGradient) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return unsharded_grad(bucket.params[slot.position], bucket.like)


def _land_unsharded(call: Call, slot: UnshardedGradient, value: Tensor) -> None:
    call.gradients[slot.reduction].params[slot.position].state.unsharded_grad = value.contiguous()


def _bind_partial(call: Call, slot: PartialGradient) -> Tensor:
    return flat_partial(call.gradients[slot.reduction].params)


def _land_partial(call: Call, slot: PartialGradient, value: Tensor) -> None:
    keep_partial(call.gradients[slot.reduction].params, value)


def _bind_reduced(call: Call, slot: ReducedGradient) -> Tensor:
    bucket = call.gradients[slot.reduction]
    return flat_grad(bucket.params, bucket.grad_dtype)


def _land_reduced(call: Call, slot: ReducedGradient, value: Tensor) -> None:
    land_gradients(call.gradients[slot.reduction].params, value)


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
    UnshardedGradient: _bind_unsharded,
    PartialGradient: _bind_partial,
    ReducedGradient: _bind_reduced,
    DivideFactor: _bind_factor,
    HookTensor: _bind_hook_tensor,
    UpdatedRun: _bind_updated,
    OptimizerState: _bind_state,
    UpdateNumbers: _bind_numbers,
}
_LAND: dict[type, Callable[[Call, Any, Tensor], None]] = {
    FullParameter: _land_full,
    UnshardedGradient: _land_unsharded,
    PartialGradient: _land_partial,
    ReducedGradient: _land_reduced,
}
