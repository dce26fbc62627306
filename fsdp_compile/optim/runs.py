"""Runs: parameters that are neighbours in flat storage and are stepped alike, as one plain tensor.

The optimizer's own state stays authoritative: for each parameter a dictionary of DTensors, such as ``exp_avg``, and scalars,
such as ``step``. For a run, the local tensors of these DTensors lie in one buffer, which the optimizer gets instead of them.
All parameters of a run have equal scalars. Each has a scalar of its own, which is set to that of the run after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.fx.torch_internals.distributed import DTensorSpec, TensorMeta
from passes.fx.torch_internals.objects import local_tensor, spec_of

from ..units.own_storage import with_own_storage
from ..units.param_state import FlatSlice, is_laid_out_alike, note_slice, noted_slice
from ..units.sharded_param import ShardedParam, params_with_memory

#: An optimizer's state: for each parameter, tensors by name.
States: TypeAlias = MutableMapping[Any, dict[str, Any]]


class Run:
    """Parameters that are stepped as one tensor.

    Attributes:
        sharded: the parameters, in storage order.
        params: their DTensors.
        locals: their local tensors.
        numels: the number of elements of each.
        numel: the number of elements of all.
        flat: their shards, a view of storage: ``[numel]``.
        state: the optimizer's state for ``flat``.
        scalars: for each scalar in ``state``, a tensor with the scalars of the parameters: ``[len(params)]``.
    """

    def __init__(self, sharded: Sequence[ShardedParam], states: States):
        first = sharded[0]
        self.sharded = sharded
        self.params: list[Any] = [each.param for each in sharded]
        self.locals = [each.local for each in sharded]
        self.numels = [local.numel() for local in self.locals]
        self.numel = sum(self.numels)
        piece = place_of(first)
        # ``.data`` has a version counter of its own, so that autograd does not see a step as a write to the storage.
        self.flat = piece.flat.narrow(0, piece.offset, self.numel).data
        self.state: dict[str, Any] = {}
        self.scalars: dict[str, Tensor] = {}
        entries = [states.get(param) or {} for param in self.params]
        if entries[0]:
            buffers = {name: self._buffer([entry[name] for entry in entries]) for name in entries[0]}
            self._publish(buffers, states)

    def _buffer(self, values: list[Any]) -> FlatSlice | Tensor:
        """Join one state of all parameters into that of the run: a slice of a flat buffer, or a copy of a scalar."""
        if not isinstance(values[0], DTensor):
            return values[0].clone()
        pieces = [noted_slice(local_tensor(value)) for value in values]
        first = pieces[0]
        end = 0 if first is None else first.offset
        for piece, numel in zip(pieces, self.numels, strict=True):
            if piece is None or first is None or piece.flat is not first.flat or piece.offset != end:
                flat = torch.cat([local_tensor(value).reshape(-1) for value in values])
                return FlatSlice(flat, 0, flat.numel())
            end += numel
        assert first is not None
        return FlatSlice(first.flat, first.offset, end - first.offset)

    def _publish(self, buffers: dict[str, FlatSlice | Tensor], states: States) -> None:
        """Make ``buffers`` the state of the run, and give each parameter its part."""
        self.state.clear()
        self.scalars.clear()
        entries = [states[param] for param in self.params]
        for entry in entries:
            for name in [name for name in entry if name not in buffers]:
                del entry[name]
        for name, buffer in buffers.items():
            if isinstance(buffer, Tensor):
                self.state[name] = buffer
                self.scalars[name] = buffer.expand(len(entries)).clone()
                for index, entry in enumerate(entries):
                    entry[name] = self.scalars[name][index]
                continue
            self.state[name] = buffer.tensor()
            offset = buffer.offset
            for entry, param, numel in zip(entries, self.params, self.numels, strict=True):
                piece = FlatSlice(buffer.flat, offset, numel)
                if not _is_slice(entry.get(name), piece):
                    entry[name] = _dtensor(piece, param)
                offset += numel

    def follow(self, states: States) -> None:
        """Publish the state of the run to its parameters, after the optimizer has replaced tensors in it."""
        # Each tensor that is no scalar becomes a buffer, of which parameters get slices.
        buffers = {name: kept if kept.dim() == 0 else FlatSlice(kept, 0, kept.numel()) for name, kept in self.state.items()}
        self._publish(buffers, states)


class FoundRuns(NamedTuple):
    """The runs that :func:`find_runs` has found, and the other parameters.

    Attributes:
        runs: the runs.
        rest: the parameters in no run, which are stepped singly.
        is_final: whether no parameter of ``rest`` can be in a run later.
    """

    runs: list[Run]
    rest: list[Any]
    is_final: bool


def find_runs(params: Iterable[Any], states: States, make: Callable[[Sequence[ShardedParam], States], Run] = Run) -> FoundRuns:
    """Cut parameters with gradients into as few runs as possible.

    In no run are parameters that ``fully_shard`` has not sharded, or whose local tensors are subclasses or not contiguous.
    Neither are parameters that do not lie in their unit's memory (yet), or whose gradient or state is laid out differently.

    Args:
        params: the parameters.
        states: the optimizer's state.
        make: makes a run of its parameters and ``states``.
    """
    known = params_with_memory()
    found: dict[ShardedParam, tuple[Any, ...]] = {}
    rest: list[Any] = []
    is_final = True
    for param in params:
        sharded = known.get(id(param))
        if sharded is None or sharded.param is not param or not has_plain_shard(sharded):
            rest.append(param)
            continue
        history = _history(sharded, states.get(param) or {})
        if history is None:
            rest.append(param)
            is_final = False
        else:
            found[sharded] = history
    runs: list[list[ShardedParam]] = []
    for sharded in sorted(found, key=in_order):
        if runs and _are_neighbours(runs[-1][-1], sharded) and found[runs[-1][-1]] == found[sharded]:
            runs[-1].append(sharded)
        else:
            runs.append([sharded])
    return FoundRuns([make(run, states) for run in runs], rest, is_final)


def place_of(sharded: ShardedParam) -> FlatSlice:
    """Return the slice of flat storage that holds the shard, without padding."""
    place = sharded.unit.places[sharded.local.dtype]
    return FlatSlice(place.flat, place.offset + sharded.offset, sharded.local.numel())


def in_order(sharded: ShardedParam) -> tuple[int, int]:
    """Return a key that sorts parameters by storage, and then by storage offset."""
    place = place_of(sharded)
    return id(place.flat), place.offset


def _are_neighbours(one: ShardedParam, other: ShardedParam) -> bool:
    """Return whether the second shard begins where the first ends. Padding between them would be stepped, too."""
    return place_of(one).is_followed_by(place_of(other))


def has_plain_shard(sharded: ShardedParam) -> bool:
    """Return whether the shard is one contiguous slice of flat storage, which can be part of a run."""
    return sharded.extension is None and type(sharded.local) is Tensor and sharded.local.is_contiguous()


def _history(sharded: ShardedParam, entry: dict[str, Any]) -> tuple[Any, ...] | None:
    """Return a key that is equal for all parameters of a run, or None if the parameter cannot be in a run now."""
    if not sharded.is_bound() or not is_laid_out_alike(sharded.param.grad, sharded.param):
        return None
    history: list[Any] = []
    for name, value in entry.items():
        if type(value) is Tensor and value.dim() == 0:
            history.append((name, value.dtype, value.device, value.item()))
        elif isinstance(value, DTensor) and _has_elements_of(value, sharded.param):
            history.append((name, value.dtype, value.device))
        else:
            return None
    return tuple(sorted(history, key=lambda known: known[0]))


def _has_elements_of(kept: Any, param: Any) -> bool:
    local = local_tensor(kept)
    alike = kept.device_mesh == param.device_mesh and kept.placements == param.placements
    return alike and type(local) is Tensor and local.shape == local_tensor(param).shape


def _is_slice(kept: Any, piece: FlatSlice) -> bool:
    """Return whether ``kept`` is a DTensor whose local tensor is the slice ``piece`` of a buffer."""
    lies_in = noted_slice(local_tensor(kept)) if isinstance(kept, DTensor) else None
    return lies_in is not None and lies_in.flat is piece.flat and lies_in.offset == piece.offset


def _dtensor(piece: FlatSlice, param: Any) -> DTensor:
    local = with_own_storage(piece.tensor().view(local_tensor(param).shape))
    note_slice(local, piece)
    spec = spec_of(param)
    if local.dtype != param.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(param.shape, param.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)
