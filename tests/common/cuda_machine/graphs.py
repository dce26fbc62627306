"""CUDA graphs: what was launched is launched again, on the memory that it was launched on."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from fsdp_compile.compiler import cuda_graphs
from passes.fx.torch_internals.core import construct_storage_from_data_pointer, unset_fake_temporarily

from .memory import Memory, Tape


class Recorder:
    """A recorder for programs on a machine. Collectives in a recording must not run late.

    Args:
        memory: the values of tensors.

    Attributes:
        replays: how often recordings were replayed.
    """

    def __init__(self, memory: Memory):
        self._memory = memory
        self.replays = 0

    def is_recording(self) -> bool:
        return self._memory.tape is not None

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        tape = self._memory.tape = Tape()
        try:
            run()
        finally:
            self._memory.tape = None
        # On a device, what is recorded does not run.
        with unset_fake_temporarily():
            tape.restore()

        def replay() -> None:
            self.replays += 1
            for launch in tape.launches:
                launch()

        return replay

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Record programs with this recorder while the block runs."""
        address = torch.UntypedStorage.data_ptr

        def data_ptr(storage: torch.UntypedStorage) -> int:
            shadow = self._memory.shadow_of(storage)
            return address(storage if shadow is None else shadow)

        def storage_at(start: int, device: torch.device, nbytes: int) -> Any:
            with unset_fake_temporarily():
                value = torch.empty(0, dtype=torch.uint8)
                value.set_(construct_storage_from_data_pointer(start, torch.device("cpu"), nbytes), 0, (nbytes,))
            return self._memory.tensors_of([value], (), device)[0].untyped_storage()

        def within(output: Any, storage: Any, start: int = 0) -> torch.Tensor:
            # Storages of fake tensors are on the meta device.
            found = torch.empty(0, dtype=output.dtype, device="cuda")
            place = (start + output.offset) // output.dtype.itemsize, output.size, output.stride
            return found.set_(storage, *place)  # type: ignore[call-overload, no-any-return]

        with (
            mock.patch.object(cuda_graphs._Output, "within", within),
            mock.patch.dict(cuda_graphs.RECORDERS, {"cuda": lambda: self}),
            mock.patch.object(cuda_graphs, "construct_storage_from_data_pointer", storage_at),
            mock.patch.object(torch.UntypedStorage, "data_ptr", data_ptr),
        ):
            yield
