"""Copies between host and device, each direction a stream of its own."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from unittest import mock

import torch
from torch import Tensor

from passes.collectives import host_copies
from passes.collectives.host_copies import Copy, engine_of
from passes.fx.torch_internals.core import FakeTensor, unset_fake_temporarily
from passes.fx.torch_internals.objects import id_of_storage

from .memory import Memory, new_tensor


class _Begun:
    """A copy on a stream, behind others."""

    def __init__(self, engine: CopyEngine, stream: deque[_Begun], run: Callable[[], None]):
        self._engine = engine
        self.stream = stream
        self.run = run
        stream.append(self)

    def wait_on_device(self) -> None:
        self._engine.wait(self)

    def wait_on_host(self) -> None:
        self._engine.wait(self)


class CopyEngine:
    """The engine of a machine. Late, a copy runs when the device or the host waits for it, or for a later one.

    Args:
        memory: the values of tensors.
        is_late: whether copies run late, instead of at once.
    """

    def __init__(self, memory: Memory, *, is_late: bool):
        self._memory = memory
        self._is_late = is_late
        self._in: deque[_Begun] = deque()
        self._out: deque[_Begun] = deque()

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copy]:
        copy = self._new(pieces[0], sum(piece.numel() for piece in pieces), device)
        return copy, self._begin(self._in, pieces, copy.split([piece.numel() for piece in pieces]))

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, Copy]:
        copy = self._new(value, value.numel(), torch.device("cpu"))
        return copy, self._begin(self._out, [value], [copy])

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> Copy:
        return self._begin(self._out, values, targets)

    def wait(self, begun: _Begun) -> None:
        """Wait for a copy."""
        while begun in begun.stream:
            begun.stream.popleft().run()

    def finish(self) -> None:
        """Finish the copies that nothing has waited for."""
        for stream in (self._in, self._out):
            while stream:
                stream.popleft().run()

    def _new(self, like: Tensor, numel: int, device: torch.device) -> Tensor:
        """Make a tensor without values yet: of the machine, or in an operator's kernel, which works on values, the CPU's."""
        if isinstance(like, FakeTensor):
            return torch.empty(numel, dtype=like.dtype, device=device)
        return new_tensor((numel,), (1,), like.dtype)

    def _begin(self, stream: deque[_Begun], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> Copy:
        pairs = [
            (self._memory.value(target), self._memory.value(source)) for target, source in zip(targets, sources, strict=True)
        ]

        def run() -> None:
            with unset_fake_temporarily(), torch.no_grad():
                for target, source in pairs:
                    target.copy_(source)

        begun = _Begun(self, stream, run)
        if not self._is_late:
            self.finish()
        return begun

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Copy with this engine while the block runs. Operators' kernels see values, which are on the CPU."""

        def storage_id(tensor: Tensor) -> int:
            return id_of_storage(self._memory.value(tensor).untyped_storage())

        with (
            engine_of(torch.device("cuda", 0), self),
            engine_of(torch.device("cpu"), self),
            mock.patch.object(host_copies, "storage_id", storage_id),
        ):
            yield
