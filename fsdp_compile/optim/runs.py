"""Runs: parameters that are neighbours in flat storage and are stepped alike, as one plain tensor.

An optimizer's own state stays the truth: for each parameter a dictionary with a DTensor for each tensor that is kept, such as
``exp_avg``, and scalars, such as ``step``. The local tensors of one run lie in one buffer, so that the buffer can be handed to
the optimizer in their place. Scalars are equal for all of a run; each parameter has one of its own, which follows that of the
run after each step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, MutableMapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..units.own_storage import with_own_storage
from ..units.param_state import FlatSlice, is_laid_out_alike, note_slice, noted_slice
from ..units.sharded_param import ShardedParam, params_with_memory

#: What an optimizer keeps, by parameter and name.
States: TypeAlias = MutableMapping[Any, dict[str, Any]]


class Run:
    """Parameters of one run.

    Attributes:
        params: the DTensors, in the order of storage.
        locals: their local tensors.
        numels: the elements of each.
        numel: of all.
        flat: their shards, a view of storage: ``[numel]``.
        state: what the optimizer keeps for ``flat``.
        entries: what it keeps for each parameter.
        scalars: of each scalar in ``state``, one for each parameter.
    """

    def __init__(self, sharded: Sequence[ShardedParam], states: States):
        first = sharded[0]
        self.params: list[Any] = [each.param for each in sharded]
        self.locals = [each.local for each in sharded]
        self.numels = [local.numel() for local in self.locals]
        self.numel = sum(self.numels)
        piece = place_of(first)
        # A version counter of its own: for autograd, a step is no write to the storage.
        self.flat = piece.flat.narrow(0, piece.offset, self.numel).data
        self.state: dict[str, Any] = {}
        self.scalars: dict[str, Tensor] = {}
        entries = [states.get(param) or {} for param in self.params]
        if entries[0]:
            homes = {name: self._home([entry[name] for entry in entries]) for name in entries[0]}
            self._publish(homes, states)

    def _home(self, values: list[Any]) -> FlatSlice | Tensor:
        """What the optimizer is to keep for the run, of what it keeps for each parameter."""
        if not isinstance(values[0], DTensor):
            return values[0].clone()
        pieces = [noted_slice(value._local_tensor) for value in values]
        first = pieces[0]
        end = 0 if first is None else first.offset
        for piece, numel in zip(pieces, self.numels, strict=True):
            if piece is None or first is None or piece.flat is not first.flat or piece.offset != end:
                flat = torch.cat([value._local_tensor.reshape(-1) for value in values])
                return FlatSlice(flat, 0, flat.numel())
            end += numel
        assert first is not None
        return FlatSlice(first.flat, first.offset, end - first.offset)

    def _publish(self, homes: dict[str, FlatSlice | Tensor], states: States) -> None:
        """Give each parameter its part of what is kept for the run."""
        self.state.clear()
        self.scalars.clear()
        entries = [states[param] for param in self.params]
        for entry in entries:
            for name in [name for name in entry if name not in homes]:
                del entry[name]
        for name, home in homes.items():
            if isinstance(home, Tensor):
                self.state[name] = home
                self.scalars[name] = home.expand(len(entries)).clone()
                for index, entry in enumerate(entries):
                    entry[name] = self.scalars[name][index]
                continue
            self.state[name] = home.tensor()
            offset = home.offset
            for entry, param, numel in zip(entries, self.params, self.numels, strict=True):
                piece = FlatSlice(home.flat, offset, numel)
                if not _lies_there(entry.get(name), piece):
                    entry[name] = _dtensor(piece, param)
                offset += numel

    def follow(self, states: States) -> None:
        """Let parameters have what the optimizer keeps for the run now, which is something else than before."""
        # It keeps each tensor of the size of a parameter as a buffer, in which those of parameters are to lie.
        homes = {name: kept if kept.dim() == 0 else FlatSlice(kept, 0, kept.numel()) for name, kept in self.state.items()}
        self._publish(homes, states)


class Found(NamedTuple):
    """What parameters were cut into.

    Attributes:
        runs: the runs.
        rest: the parameters that have to be stepped as they are.
        is_final: whether these will be no members of runs later on, either.
    """

    runs: list[Run]
    rest: list[Any]
    is_final: bool


def find_runs(params: Iterable[Any], states: States, make: Callable[[Sequence[ShardedParam], States], Run] = Run) -> Found:
    """Cut parameters with gradients into as few runs as possible.

    Members of none are those that ``fully_shard`` has not sharded, whose local tensors are of a subclass or have gaps, that lie
    in memory that is not their unit's (yet), and whose gradients are laid out otherwise.

    Args:
        params: the parameters.
        states: what the optimizer keeps for each.
        make: makes a run of its parameters.
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
    return Found([make(run, states) for run in runs], rest, is_final)


def place_of(sharded: ShardedParam) -> FlatSlice:
    """Where its shard lies, without padding."""
    place = sharded.unit.places[sharded.local.dtype]
    return FlatSlice(place.flat, place.offset + sharded.offset, sharded.local.numel())


def in_order(sharded: ShardedParam) -> tuple[int, int]:
    """A key by which parameters are sorted as they lie in memory."""
    place = place_of(sharded)
    return id(place.flat), place.offset


def _are_neighbours(one: ShardedParam, other: ShardedParam) -> bool:
    """Whether the second shard begins where the first ends. Padding is not stepped."""
    return place_of(one).is_followed_by(place_of(other))


def has_plain_shard(sharded: ShardedParam) -> bool:
    """Whether its shard is a stretch of flat storage, which can be part of a run."""
    return sharded.extension is None and type(sharded.local) is Tensor and sharded.local.is_contiguous()


def _history(sharded: ShardedParam, entry: dict[str, Any]) -> tuple[Any, ...] | None:
    """What has to be equal for parameters of one run; None if this one can be in none now."""
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
    local = kept._local_tensor
    alike = kept.device_mesh == param.device_mesh and kept.placements == param.placements
    return alike and type(local) is Tensor and local.shape == param._local_tensor.shape


def _lies_there(kept: Any, piece: FlatSlice) -> bool:
    """Whether this is a DTensor whose local tensor is this run of a buffer."""
    lies_in = noted_slice(kept._local_tensor) if isinstance(kept, DTensor) else None
    return lies_in is not None and lies_in.flat is piece.flat and lies_in.offset == piece.offset


def _dtensor(piece: FlatSlice, param: Any) -> DTensor:
    local = with_own_storage(piece.tensor().view(param._local_tensor.shape))
    note_slice(local, piece)
    return DTensor(local, param._spec, requires_grad=False)
