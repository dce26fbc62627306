"""Buffers that gradients of many units lie in, and that stay between steps."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from passes.collectives.layout import padding_to
from passes.fx.torch_internals.core import foreach_copy_, storage_use_count

from .own_storage import with_own_storage
from .param_state import FlatSlice, is_laid_out_alike, neighbours, note_slice, noted_slice
from .sharded_param import ShardedParam
from .unit import Unit

#: Storages and gradients of units begin at multiples of so many bytes, which kernels that read words assume.
_ALIGNMENT = 16

_LOCAL = attrgetter("_local_tensor")


def join_storages(units: Sequence[Unit]) -> None:
    """Let flat storages of units be parts of one buffer for each dtype and device, in the order of the units.

    Units on the host, or without memory, keep their own, and those that are part of a buffer stay there. While the storages of
    a dtype move, there are two of all of them.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Unit]] = {}
    for unit in units:
        if unit.offload is None and not unit.is_meta:
            for dtype, storage in unit.storages.items():
                if unit.places[dtype].flat is storage:
                    kinds.setdefault((dtype, storage.device), []).append(unit)
    for (dtype, device), members in kinds.items():
        if len(members) == 1:
            continue
        places = [unit.places[dtype] for unit in members]
        starts, end = _starts([place.numel for place in places], dtype)
        # What lies between them is read by nobody.
        flat = torch.zeros(end, dtype=dtype, device=device)
        for unit, place, start in zip(members, places, starts, strict=True):
            unit.move_storage(dtype, FlatSlice(flat, start, place.numel))


def _starts(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Where parts of a buffer begin, and where the last one ends."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end + padding_to(_ALIGNMENT // dtype.itemsize, end))
        end = starts[-1] + numel
    return starts, end


class GradientBuffer:
    """A buffer for the gradients of parameters, each of which has a DTensor over its part of it.

    A gradient that is reduced is copied there, and the DTensor becomes ``param.grad``, unless somebody still has it, or part of
    it, from an earlier step.

    Args:
        params: parameters of one dtype, on one device, in the order of their storage.

    Attributes:
        params: as given.
        flat: the buffer. Padding is zero, or what communication hooks have made of it.
        gradients: a DTensor for each parameter.
        locals: their local tensors.
        memo: what clipping knows about its gradients.
    """

    def __init__(self, params: Sequence[ShardedParam]):
        self.params = list(params)
        self.memo: Any = None
        self.locals: list[Tensor] = []
        self.gradients: list[Any] = []
        self._pieces: list[FlatSlice] = []
        self.flat = self._lay_out()
        self._addresses = [local.data_ptr() for local in self.locals]
        self._memories = [local.untyped_storage()._cdata for local in self.locals]
        self._idle = self._references(range(len(self.params)))
        _buffers[id(self.flat)] = self
        for param, gradient, local in zip(self.params, self.gradients, self.locals, strict=True):
            present: Any = param.param.grad
            if is_laid_out_alike(present, param.param):
                local.copy_(present._local_tensor)
                param.param.grad = gradient

    def _lay_out(self) -> Tensor:
        by_unit: dict[Unit, list[ShardedParam]] = {}
        for param in self.params:
            by_unit.setdefault(param.unit, []).append(param)
        first = self.params[0].local
        starts, end = _starts([sum(param.padded_numel for param in members) for members in by_unit.values()], first.dtype)
        flat = torch.zeros(end, dtype=first.dtype, device=first.device)
        for start, members in zip(starts, by_unit.values(), strict=True):
            for param in members:
                piece = FlatSlice(flat, start, param.padded_numel)
                local = with_own_storage(param.unpad(piece.tensor().view(param.padded_shape)))
                note_slice(local, piece)
                self.locals.append(local)
                self.gradients.append(DTensor(local, param.param._spec, requires_grad=False))  # type: ignore[attr-defined]
                param.state.home = (weakref.ref(self), len(self._pieces))
                self._pieces.append(piece)
                start += param.padded_numel
        return flat

    def is_whole(self) -> bool:
        """Whether all gradients still lie in it."""
        are_own = all(map(is_, map(_LOCAL, self.gradients), self.locals))
        return are_own and list(map(Tensor.data_ptr, self.locals)) == self._addresses

    def land(self, indices: Sequence[int], flat: Tensor) -> bool:
        """Copy a flat shard into the buffer as the gradients of parameters that have none, in this order. False: nothing was
        done, as it is of another kind, or somebody has a gradient from before."""
        is_alike = flat.dtype == self.flat.dtype and flat.device == self.flat.device
        if not is_alike or not self._references(indices) <= self._idle:
            return False
        parts = neighbours(self._pieces[index] for index in indices)
        if len(parts) == 1:
            parts[0].tensor().copy_(flat)
        else:
            # Several units were reduced together, in the order of backward.
            foreach_copy_([part.tensor() for part in parts], flat.split([part.numel for part in parts]))
        gradients = [self.gradients[index] for index in indices]
        # For autograd, which may have saved one.
        increment_version(gradients)
        for index, gradient in zip(indices, gradients, strict=True):
            self.params[index].param.grad = gradient
        return True

    def _references(self, indices: Sequence[int]) -> set[Any]:
        """How many refer to gradients, their local tensors and these tensors' memory."""
        gradients, locals_ = [self.gradients[index] for index in indices], [self.locals[index] for index in indices]
        addresses = [self._addresses[index] for index in indices]
        if list(map(Tensor.data_ptr, locals_)) != addresses or not all(map(is_, map(_LOCAL, gradients), locals_)):
            return {None}
        memories = [self._memories[index] for index in indices]
        counts = map(sys.getrefcount, gradients), map(sys.getrefcount, locals_), map(storage_use_count, memories)
        return set(zip(*counts, strict=True))


_buffers: weakref.WeakValueDictionary[int, GradientBuffer] = weakref.WeakValueDictionary()


def buffer_of(gradient: Any) -> GradientBuffer | None:
    """The buffer that a gradient lies in; None: none that stays."""
    local = getattr(gradient, "_local_tensor", None)
    piece = None if local is None else noted_slice(local)
    return None if piece is None else _buffers.get(id(piece.flat))


class KeptGradients:
    """Gradients that buffers keep, in some order: to tell whether these are they, by loops in C alone.

    Refers to them by their places, so that buffers can tell whether somebody else has one.
    """

    def __init__(self, buffers: Sequence[GradientBuffer], places: Sequence[Sequence[int]]):
        self._buffers = buffers
        self._getters = [_getter(indices) for indices in places]
        self._addresses = [address for part in self._of("_addresses") for address in part]

    @classmethod
    def of(cls, gradients: Sequence[Any]) -> KeptGradients | None:
        """These gradients; None: some are of no buffer."""
        buffers: list[GradientBuffer] = []
        places: list[list[int]] = []
        index: dict[int, int] = {}
        for gradient in gradients:
            buffer = buffer_of(gradient)
            if buffer is None:
                return None
            if not buffers or buffers[-1] is not buffer:
                buffers.append(buffer)
                places.append([])
                index = {id(own): place for place, own in enumerate(buffer.gradients)}
            if id(gradient) not in index:
                return None
            places[-1].append(index[id(gradient)])
        return cls(buffers, places)

    def _of(self, name: str) -> Iterator[Any]:
        return (getter(getattr(buffer, name)) for buffer, getter in zip(self._buffers, self._getters, strict=True))

    def are(self, gradients: Sequence[Any]) -> bool:
        """Whether these are they, in this order, and lie where they did."""
        if len(gradients) != len(self._addresses) or not all(map(is_, gradients, chain.from_iterable(self._of("gradients")))):
            return False
        locals_ = list(map(_LOCAL, gradients))
        are_own = all(map(is_, locals_, chain.from_iterable(self._of("locals")))) and all(map(Tensor.is_contiguous, locals_))
        return are_own and list(map(Tensor.data_ptr, locals_)) == self._addresses


def _getter(indices: Sequence[int]) -> Any:
    if list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return itemgetter(slice(indices[0], indices[0] + len(indices)))
    # More than one, as they are no range.
    return itemgetter(*indices)
