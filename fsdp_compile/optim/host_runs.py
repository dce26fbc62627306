"""Runs whose state is on the host, and buckets of parts whose states are on the device together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from passes.collectives.host_copies import Copy, copies_to, engine
from passes.fx.torch_internals.objects import local_tensor, spec_of

from ..units.param_state import FlatSlice, is_laid_out_alike, noted_slice
from ..units.sharded_param import ShardedParam
from .flat_optimizer import FlatOptimizer
from .runs import Run, States
from .torch_step import step_as

HOST = torch.device("cpu")


class HostRun(Run):
    """A run whose state is on the host: ``state`` has flat tensors there, and scalars where torch has them.

    Attributes:
        device: the device of its shards.
        copies: whether ``device`` has memory of its own. Otherwise the state is stepped in place, without copies.
    """

    def __init__(self, sharded: Sequence[ShardedParam], states: States, pin_memory: bool):
        self.device = sharded[0].local.device
        self.copies = copies_to(self.device)
        self._pinned = pin_memory and (self.device.type != "cpu" or torch.accelerator.is_available())
        self._new: dict[str, Tensor] = {}
        super().__init__(sharded, states)

    def _buffer(self, values: list[Any]) -> FlatSlice | Tensor:
        buffer = super()._buffer(values)
        if isinstance(buffer, Tensor) or not self.copies:
            return buffer
        if buffer.flat.device == HOST and (not self._pinned or buffer.flat.is_pinned()):
            return buffer
        # The state was loaded, copied with the optimizer, or on the device while its parameter was in no run.
        kept = self._on_host(buffer.numel, buffer.flat.dtype)
        kept.copy_(buffer.tensor())
        return FlatSlice(kept, 0, buffer.numel)

    def _on_host(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(numel, dtype=dtype, device=HOST, pin_memory=self._pinned)

    def has_gradients(self) -> bool:
        """Return whether each parameter has a gradient that is laid out as the parameter."""
        return all(
            isinstance(param.grad, DTensor) and (spec_of(param.grad) is spec_of(param) or is_laid_out_alike(param.grad, param))
            for param in self.params
        )

    def gradient(self, start: int, numel: int) -> Tensor:
        """Return elements of the gradient, in storage order: ``[numel]``. A copy, unless one buffer has them in that order."""
        locals_ = [local_tensor(param.grad) for param in self.params]
        slices, numels = map(noted_slice, locals_), [local.numel() for local in locals_]
        ends = accumulate(numels)
        firsts = [end - count for end, count in zip(ends, numels, strict=True)]
        buffers = {
            (piece.flat, piece.offset - first) if piece is not None and local.is_contiguous() else None
            for piece, local, first in zip(slices, locals_, firsts, strict=True)
        }
        if len(buffers) == 1 and (buffer := buffers.pop()) is not None:
            flat, offset = buffer
            return flat.narrow(0, offset + start, numel)
        return torch.cat(
            [
                local.reshape(-1)[max(start - first, 0) : start + numel - first]
                for local, first, count in zip(locals_, firsts, numels, strict=True)
                if first < start + numel and start < first + count
            ]
            or [self.flat[:0]]
        )

    def host_buffer(self, name: str, value: Tensor) -> Tensor:
        """Return the run's host buffer for the state ``name``: ``[numel of the run]``.

        A missing buffer is allocated in the dtype of ``value``, the state of a part.
        """
        if name in self.state:
            return self.state[name]
        if name not in self._new:
            self._new[name] = self._on_host(self.flat.numel(), value.dtype)
        return self._new[name]

    def keep(self, scalars: Mapping[str, Tensor]) -> None:
        """Add new buffers and ``scalars`` to the state, after all of the run has been stepped."""
        self.state.update(self._new)
        self.state.update(scalars)
        self._new = {}

    def drop_unfinished(self) -> None:
        """Drop new buffers of a failed step, which may hold the state of only a part of the run."""
        self._new = {}


class Part(NamedTuple):
    """Elements of a run that are stepped together.

    Attributes:
        group: the index of the run's group.
        run: the run.
        start, numel: first element in the run, and number of elements.
    """

    group: int
    run: HostRun
    start: int
    numel: int

    @property
    def is_whole(self) -> bool:
        return self.numel == self.run.flat.numel()

    @property
    def is_last(self) -> bool:
        return self.start + self.numel == self.run.flat.numel()

    def of(self, flat: Tensor) -> Tensor:
        """Return the elements of this part in ``flat``, a tensor as long as the run."""
        return flat if self.is_whole else flat.narrow(0, self.start, self.numel)

    def with_gradient(self) -> Tensor:
        """Return the elements of the shards, with their gradient in ``.grad``."""
        flat = self.of(self.run.flat)
        flat.grad = self.run.gradient(self.start, self.numel)
        return flat

    def state(self) -> dict[str, Tensor]:
        """Return the state of the elements, on the host, and scalars."""
        kept = {name: self.of(value) if value.dim() else value for name, value in self.run.state.items()}
        # The step of each part increments the count. Only the last part's count becomes the run's, so the others get copies.
        return kept if self.is_last else {name: value if value.dim() else value.clone() for name, value in kept.items()}


class HostBucket:
    """Parts whose states are on the device together.

    Attributes:
        device: the device of all parts.
        parts: the parts.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.parts: list[Part] = []
        self._states: list[dict[str, Tensor]] = []
        self._fetched: list[Copy] = []
        self._stepped: list[Tensor] = []
        self._returned: Copy | None = None

    def fetch(self) -> None:
        """Begin to copy the states to the device."""
        self._states = [part.state() for part in self.parts]
        if not copies_to(self.device):
            return
        found: defaultdict[torch.dtype, list[tuple[dict[str, Tensor], str]]] = defaultdict(list)
        for state in self._states:
            for name, value in state.items():
                if value.dim():
                    found[value.dtype].append((state, name))
        for places in found.values():
            pieces = [state[name] for state, name in places]
            flat, copy = engine(self.device).to_device(pieces, self.device)
            self._fetched.append(copy)
            for (state, name), piece in zip(places, flat.split([piece.numel() for piece in pieces]), strict=True):
                state[name] = piece

    def step(self, optimizer: FlatOptimizer, step: Callable[[Optimizer], Any], groups: Sequence[dict[str, Any]]) -> None:
        """Step the parts, as soon as their states are on the device."""
        self._wait_for_fetched()
        flats = [part.with_gradient() for part in self.parts]
        members: defaultdict[int, list[Tensor]] = defaultdict(list)
        for part, flat in zip(self.parts, flats, strict=True):
            members[part.group].append(flat)
        kept: defaultdict[Any, dict[str, Tensor]] = defaultdict(dict)
        kept.update(zip(flats, self._states, strict=True))
        try:
            step_as(optimizer, step, [{**groups[group], "params": params} for group, params in members.items()], kept)
        finally:
            for flat in flats:
                flat.grad = None
        self._states = [kept[flat] for flat in flats]

    def give_back(self) -> None:
        """Begin to copy the states to the host, after the step."""
        values, targets = [], []
        for part, state in zip(self.parts, self._states, strict=True):
            scalars = {}
            for name, value in state.items():
                if not value.dim():
                    scalars[name] = value
                elif part.run.copies:
                    values.append(value)
                    targets.append(part.of(part.run.host_buffer(name, value)))
                else:
                    part.run.state[name] = value
            if part.is_last:
                part.run.keep(scalars)
        self._states = []
        if values:
            self._stepped, self._returned = values, engine(self.device).write_back(values, targets)

    def free(self) -> None:
        """Free the states on the device, once they are on the host. The device waits, the host does not."""
        if self._returned is not None:
            self._returned.wait_on_device()
        self._stepped = []

    def end(self) -> None:
        """Wait on the host until no copy is in flight."""
        # After a failed step, fetched states must not be freed while a copy still writes them.
        self._wait_for_fetched()
        if self._returned is not None:
            self._returned.wait_on_host()
        self._states, self._stepped, self._returned = [], [], None

    def _wait_for_fetched(self) -> None:
        for copy in self._fetched:
            copy.wait_on_device()
        self._fetched = []
