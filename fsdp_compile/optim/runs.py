"""Runs: parameters that are neighbours in flat storage and are stepped alike, as one plain tensor.

An optimizer's own state stays the truth: for each parameter a dictionary with a DTensor for each tensor that is kept, such as
``exp_avg``, and scalars, such as ``step``. The local tensors of one run lie in one buffer, so that the buffer can be handed to
the optimizer in their place. Scalars are equal for all of a run; each parameter has one of its own, which follows that of the
run after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping, Sequence
from itertools import accumulate, chain, repeat
from operator import attrgetter, eq, is_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..units.own_storage import with_own_storage
from ..units.param_state import FlatSlice, note_slice, noted_slice
from ..units.sharded_param import ShardedParam, params_with_memory

#: What an optimizer keeps, by parameter and name.
States: TypeAlias = MutableMapping[Any, dict[str, Any]]

_LOCAL, _GRAD, _SPEC = attrgetter("_local_tensor"), attrgetter("grad"), attrgetter("_spec")


class Run:
    """Parameters of one run.

    Attributes:
        params: the DTensors, in the order of storage.
        flat: their shards, a view of storage: ``[numel]``.
        state: what the optimizer keeps for ``flat``.
    """

    def __init__(self, sharded: Sequence[ShardedParam], states: States):
        first = sharded[0]
        self.params: list[Any] = [each.param for each in sharded]
        self._locals = [each.local for each in sharded]
        self._addresses = [local.data_ptr() for local in self._locals]
        self._specs = [param._spec for param in self.params]
        self._numels = [local.numel() for local in self._locals]
        storage = first.unit.storages[first.local.dtype]
        # A version counter of its own: for autograd, a step is no write to the storage.
        self.flat = storage.narrow(0, first.offset, sum(self._numels)).data
        self.state: dict[str, Any] = {}
        self._entries = [states.get(param) for param in self.params]
        self._scalars: dict[str, Tensor] = {}
        self._published: tuple[int, ...] = ()
        self._expected: tuple[int, ...] = ()
        self._versions: list[int] = []
        entries = [entry or {} for entry in self._entries]
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
        for piece, numel in zip(pieces, self._numels, strict=True):
            if piece is None or first is None or piece.flat is not first.flat or piece.offset != end:
                flat = torch.cat([value._local_tensor.reshape(-1) for value in values])
                return FlatSlice(flat, 0, flat.numel())
            end += numel
        assert first is not None
        return FlatSlice(first.flat, first.offset, end - first.offset)

    def _publish(self, homes: dict[str, FlatSlice | Tensor], states: States) -> None:
        """Give each parameter its part of what is kept for the run."""
        self.state.clear()
        self._scalars.clear()
        entries = [states[param] for param in self.params]
        for entry in entries:
            for name in [name for name in entry if name not in homes]:
                del entry[name]
        for name, home in homes.items():
            if isinstance(home, Tensor):
                self.state[name] = home
                self._scalars[name] = home.expand(len(entries)).clone()
                for index, entry in enumerate(entries):
                    entry[name] = self._scalars[name][index]
                continue
            self.state[name] = home.tensor()
            offset = home.offset
            for entry, param, numel in zip(entries, self.params, self._numels, strict=True):
                piece = FlatSlice(home.flat, offset, numel)
                if not _lies_there(entry.get(name), piece):
                    entry[name] = _dtensor(piece, param)
                offset += numel
        self._entries = list(entries)
        self._expected = _identities(entries)
        self._published = _identities([self.state])
        self._versions = [scalar._version for scalar in self._scalars.values()]

    def holds(self, states: States) -> bool:
        """Whether parameters still lie where they did, and nobody has replaced what is kept for them, or changed a scalar."""
        # Once for each parameter and step: nothing here is a loop of Python's.
        if not all(map(is_, map(_LOCAL, self.params), self._locals)):
            return False
        if list(map(Tensor.data_ptr, self._locals)) != self._addresses:
            return False
        if not all(map(is_, map(states.get, self.params), self._entries)):
            return False
        if _identities(self._entries) != self._expected:
            return False
        return [scalar._version for scalar in self._scalars.values()] == self._versions

    def load_gradients(self) -> bool:
        """Let ``flat.grad`` be the gradients of the run, in place if they lie in its order. False: one of them is missing, or
        not laid out as its parameter."""
        gradients = list(map(_GRAD, self.params))
        if any(map(is_, gradients, repeat(None))):
            return False
        if not all(map(is_, map(_SPEC, gradients), self._specs)) and not all(map(is_laid_out_alike, gradients, self.params)):
            return False
        pieces = list(map(_LOCAL, gradients))
        self.flat.grad = _in_order(pieces, self._numels)
        return True

    def follow(self, states: States) -> None:
        """After a step: let parameters have what the optimizer keeps for the run now."""
        self.flat.grad = None
        if _identities([self.state]) != self._published:
            # It keeps each tensor of the size of a parameter as a buffer, in which those of parameters are to lie.
            homes = {name: kept if kept.dim() == 0 else FlatSlice(kept, 0, kept.numel()) for name, kept in self.state.items()}
            self._publish(homes, states)
            return
        for name, scalar in self._scalars.items():
            scalar.copy_(self.state[name])
        self._versions = [scalar._version for scalar in self._scalars.values()]


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


def find_runs(params: Iterable[Any], states: States) -> Found:
    """Cut parameters with gradients into as few runs as possible.

    Members of none are those that ``fully_shard`` has not sharded, whose local tensors are of a subclass or have gaps, that lie
    in memory that is not their unit's (yet), and whose gradients are laid out otherwise.

    Args:
        params: the parameters.
        states: what the optimizer keeps for each.
    """
    known = params_with_memory()
    found: dict[ShardedParam, tuple[Any, ...]] = {}
    rest: list[Any] = []
    is_final = True
    for param in params:
        sharded = known.get(id(param))
        if sharded is None or sharded.param is not param or not _has_plain_shard(sharded):
            rest.append(param)
            continue
        history = _history(sharded, states.get(param) or {})
        if history is None:
            rest.append(param)
            is_final = False
        else:
            found[sharded] = history
    runs: list[list[ShardedParam]] = []
    for sharded in sorted(found, key=lambda each: (id(_storage(each)), each.offset)):
        if runs and _are_neighbours(runs[-1][-1], sharded) and found[runs[-1][-1]] == found[sharded]:
            runs[-1].append(sharded)
        else:
            runs.append([sharded])
    return Found([Run(run, states) for run in runs], rest, is_final)


def is_laid_out_alike(gradient: Any, param: Any) -> bool:
    """Whether a gradient is a DTensor whose local tensor is that of the parameter's, element by element."""
    if not isinstance(gradient, DTensor) or type(gradient._local_tensor) is not Tensor:
        return False
    local = gradient._local_tensor
    alike = gradient.device_mesh == param.device_mesh and gradient.placements == param.placements
    return alike and local.shape == param._local_tensor.shape and local.dtype == param._local_tensor.dtype


def _storage(sharded: ShardedParam) -> Tensor:
    return sharded.unit.storages[sharded.local.dtype]


def _are_neighbours(one: ShardedParam, other: ShardedParam) -> bool:
    """Whether the second shard begins where the first ends. Padding is not stepped."""
    return _storage(one) is _storage(other) and one.offset + one.local.numel() == other.offset


def _has_plain_shard(sharded: ShardedParam) -> bool:
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


def _identities(entries: Iterable[dict[str, Any] | None]) -> tuple[int, ...]:
    return tuple(map(id, chain.from_iterable(map(dict.values, filter(None, entries)))))


def _lies_there(kept: Any, piece: FlatSlice) -> bool:
    """Whether this is a DTensor whose local tensor is this run of a buffer."""
    lies_in = noted_slice(kept._local_tensor) if isinstance(kept, DTensor) else None
    return lies_in is not None and lies_in.flat is piece.flat and lies_in.offset == piece.offset


def _dtensor(piece: FlatSlice, param: Any) -> DTensor:
    local = with_own_storage(piece.tensor().view(param._local_tensor.shape))
    note_slice(local, piece)
    return DTensor(local, param._spec, requires_grad=False)


def _in_order(gradients: Sequence[Tensor], numels: Sequence[int]) -> Tensor:
    """Gradients as one tensor: the part of a flat buffer that consists of them in this order, else a copy."""
    first = min(gradients, key=Tensor.data_ptr)
    buffer = noted_slice(first)
    count = sum(numels)
    if buffer is None or buffer.offset + count > buffer.flat.numel() or not all(map(Tensor.is_contiguous, gradients)):
        return torch.cat([gradient.reshape(-1) for gradient in gradients])
    addresses = list(map(Tensor.data_ptr, gradients))
    order = sorted(range(len(addresses)), key=addresses.__getitem__)
    sizes = [numels[index] for index in order]
    ends = accumulate(sizes, lambda end, numel: end + numel * first.itemsize, initial=addresses[order[0]])
    # What begins at an address in the buffer, which is alive, lies in the buffer.
    if not all(map(eq, (addresses[index] for index in order), ends)):
        return torch.cat([gradient.reshape(-1) for gradient in gradients])
    together = buffer.flat.narrow(0, buffer.offset, count)
    if order == list(range(len(order))):
        return together
    # As a compiled backward leaves them, last layer first. Views of a split cost less than one for each gradient.
    pieces = dict(zip(order, together.split(sizes), strict=True))
    return torch.cat([pieces[index] for index in range(len(order))])
