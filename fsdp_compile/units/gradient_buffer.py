"""Buffers that keep the gradients of many units from step to step."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import is_, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from passes.collectives.layout import padding_to
from passes.fx.torch_internals.core import foreach_copy_, storage_use_count
from passes.fx.torch_internals.objects import local_of, local_tensor, spec_of, storage_id

from .own_storage import with_own_storage
from .param_state import FlatSlice, is_laid_out_alike, neighbours, note_slice, noted_slice
from .sharded_param import ShardedParam
from .unit import Unit

#: Storages and gradients of units begin at multiples of this number of bytes, as kernels that read words assume.
_ALIGNMENT = 16


def join_storages(units: Sequence[Unit]) -> None:
    """Move flat storages of units into one buffer for each dtype and device, in the order of the units.

    Units on the host, or on the meta device, keep their own storage. Storages that are part of a buffer already stay there.
    During the move, all storages of a dtype exist twice.
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
        # Nobody reads the gaps between storages.
        flat = torch.zeros(end, dtype=dtype, device=device)
        for unit, place, start in zip(members, places, starts, strict=True):
            unit.move_storage(dtype, FlatSlice(flat, start, place.numel))


def _starts(numels: Sequence[int], dtype: torch.dtype) -> tuple[list[int], int]:
    """Return the first element of each part of a buffer, and the end of the last part."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end + padding_to(_ALIGNMENT // dtype.itemsize, end))
        end = starts[-1] + numel
    return starts, end


class GradientBuffer:
    """A buffer for the gradients of parameters, with a DTensor over the part of each parameter.

    A reduced gradient is copied into the buffer, and its DTensor becomes ``param.grad``. While somebody holds the DTensor of an
    earlier step, or part of it, the gradient is not copied.

    Args:
        params: parameters of one dtype, on one device, in the order of their storage.

    Attributes:
        params: as given.
        flat: the buffer. Padding is zero, unless a communication hook wrote to it.
        gradients: a DTensor for each parameter.
        locals: the local tensors of ``gradients``.
        memo: cache of gradient clipping (:mod:`fsdp_compile.optim.clip`).
    """

    def __init__(self, params: Sequence[ShardedParam]):
        self.params = list(params)
        self.memo: Any = None
        self.locals: list[Tensor] = []
        self.gradients: list[Any] = []
        self._pieces: list[FlatSlice] = []
        self.flat = self._lay_out()
        self._addresses = [local.data_ptr() for local in self.locals]
        self._memories = [storage_id(local) for local in self.locals]
        self._idle = self._reference_counts(range(len(self.params)))
        _buffers[id(self.flat)] = self
        for param, gradient, local in zip(self.params, self.gradients, self.locals, strict=True):
            present: Any = param.param.grad
            if is_laid_out_alike(present, param.param):
                local.copy_(local_tensor(present))
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
                self.gradients.append(DTensor(local, spec_of(param.param), requires_grad=False))
                param.state.gradient_slot = (weakref.ref(self), len(self._pieces))
                self._pieces.append(piece)
                start += param.padded_numel
        return flat

    def is_whole(self) -> bool:
        """Return whether all ``gradients`` still lie in the buffer."""
        are_own = all(map(is_, map(local_tensor, self.gradients), self.locals))
        return are_own and list(map(Tensor.data_ptr, self.locals)) == self._addresses

    def store(self, indices: Sequence[int], flat: Tensor) -> bool:
        """Copy a flat shard into the buffer, as gradients of parameters that have none.

        Args:
            indices: the parameters' indices in ``params``, in the order of ``flat``.
            flat: the reduced gradients, padded.

        Returns:
            True; or False with nothing done, if ``flat`` has another dtype or device, or somebody holds an earlier gradient.
        """
        is_alike = flat.dtype == self.flat.dtype and flat.device == self.flat.device
        if not is_alike or not self._reference_counts(indices) <= self._idle:
            return False
        parts = neighbours(self._pieces[index] for index in indices)
        if len(parts) == 1:
            parts[0].tensor().copy_(flat)
        else:
            # Units that were reduced together have the order of backward, not of the buffer.
            foreach_copy_([part.tensor() for part in parts], flat.split([part.numel for part in parts]))
        gradients = [self.gradients[index] for index in indices]
        # If autograd has saved an earlier gradient, the backward that needs it has to raise.
        increment_version(gradients)
        for index, gradient in zip(indices, gradients, strict=True):
            self.params[index].param.grad = gradient
        return True

    def _reference_counts(self, indices: Sequence[int]) -> set[Any]:
        """Return the distinct reference counts (gradient, local tensor, memory); ``{None}`` if a gradient has moved."""
        gradients, locals_ = [self.gradients[index] for index in indices], [self.locals[index] for index in indices]
        addresses = [self._addresses[index] for index in indices]
        if list(map(Tensor.data_ptr, locals_)) != addresses or not all(map(is_, map(local_tensor, gradients), locals_)):
            return {None}
        memories = [self._memories[index] for index in indices]
        counts = map(sys.getrefcount, gradients), map(sys.getrefcount, locals_), map(storage_use_count, memories)
        return set(zip(*counts, strict=True))


_buffers: weakref.WeakValueDictionary[int, GradientBuffer] = weakref.WeakValueDictionary()


def buffer_of(gradient: Any) -> GradientBuffer | None:
    """Return the :class:`GradientBuffer` that a gradient lies in; None if there is none."""
    local = local_of(gradient)
    piece = None if local is None else noted_slice(local)
    return None if piece is None else _buffers.get(id(piece.flat))


class KeptGradients:
    """A sequence of gradients in buffers, to compare with that of a later step (:meth:`are`) by loops in C alone.

    It holds indices instead of the gradients, so as not to raise the reference counts by which buffers notice other holders.
    """

    def __init__(self, buffers: Sequence[GradientBuffer], places: Sequence[Sequence[int]]):
        self._buffers = buffers
        self._getters = [_getter(indices) for indices in places]
        self._addresses = [address for part in self._of("_addresses") for address in part]

    @classmethod
    def of(cls, gradients: Sequence[Any]) -> KeptGradients | None:
        """Return a record of these gradients, in this order; None if one is not the DTensor of a buffer."""
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
        """Return whether ``gradients`` are the same tensors, in the same order, at the same addresses."""
        if len(gradients) != len(self._addresses) or not all(map(is_, gradients, chain.from_iterable(self._of("gradients")))):
            return False
        locals_ = list(map(local_tensor, gradients))
        are_own = all(map(is_, locals_, chain.from_iterable(self._of("locals")))) and all(map(Tensor.is_contiguous, locals_))
        return are_own and list(map(Tensor.data_ptr, locals_)) == self._addresses


def _getter(indices: Sequence[int]) -> Any:
    if list(indices) == list(range(indices[0], indices[0] + len(indices))):
        return itemgetter(slice(indices[0], indices[0] + len(indices)))
    # At least two, as one index is a range: itemgetter returns a tuple.
    return itemgetter(*indices)
