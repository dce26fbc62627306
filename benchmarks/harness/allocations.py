"""Peaks of memory: the most bytes that live at once while a function runs, beyond those that lived before.

On CPU, a library that is preloaded into the process counts malloc. torch's profiler would not do: it does not see memory that
the threads of a process group free. On CUDA, the caching allocator counts.
"""

from __future__ import annotations

import contextlib
import ctypes
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from torch import Tensor


def preload(folder: Path) -> dict[str, str]:
    """Compile the counting library into ``folder``. Return the environment variables that preload it into a process."""
    library = folder / "allocations.so"
    source = Path(__file__).with_suffix(".c")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    return {"LD_PRELOAD": str(library)}


@contextlib.contextmanager
def counting(device: str) -> Iterator[dict[str, str]]:
    """Yield the environment variables of processes that count allocations on this type of device; valid inside the block."""
    if device != "cpu":
        yield {}
        return
    with tempfile.TemporaryDirectory() as folder:
        yield preload(Path(folder))


def peaks(functions: Sequence[Callable[[], object]], device: torch.device) -> list[int]:
    """Run functions one after the other. Return the most bytes live during each, beyond those live before the first."""
    counter = counter_of(device)
    before = counter.live()
    found = []
    for function in functions:
        counter.reset_peak()
        function()
        found.append(counter.peak() - before)
    return found


def counter_of(device: torch.device) -> Counter:
    """Return the counter of allocations for a device."""
    return CudaCounter() if device.type == "cuda" else MallocCounter()


@contextlib.contextmanager
def inputs_held_in_flight(device: torch.device) -> Iterator[None]:
    """Make reductions of the fake process group hold their inputs until they are waited for, as real reductions do.

    This holds inside the block, in this process, and for functional collectives alone: FSDP2 holds these inputs itself.
    """
    held: dict[int, Tensor] = {}

    def reduce_scatter(grad: Tensor, op: str, group_size: int, group_name: str) -> Tensor:
        reduced = grad.new_empty([grad.size(0) // group_size, *grad.shape[1:]])
        held[reduced.untyped_storage().data_ptr()] = grad
        return reduced

    def wait(reduced: Tensor) -> Tensor:
        held.pop(reduced.untyped_storage().data_ptr(), None)
        return reduced

    library = torch.library.Library("_c10d_functional", "IMPL")
    key = device.type.upper()
    library.impl("reduce_scatter_tensor", torch._disable_dynamo(reduce_scatter), key)
    library.impl("wait_tensor", torch._disable_dynamo(wait), key)
    try:
        yield
    finally:
        library._destroy()


class MallocCounter:
    """A counter of malloc in this whole process, which has to be started with the environment variables of ``counting``."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        if not hasattr(self._library, "peak_bytes"):
            raise RuntimeError("allocations are counted in processes started with the environment of counting() only")
        for name in ("live_bytes", "peak_bytes"):
            getattr(self._library, name).restype = ctypes.c_long

    def live(self) -> int:
        return int(self._library.live_bytes())

    def peak(self) -> int:
        return int(self._library.peak_bytes())

    def reset_peak(self) -> None:
        self._library.reset_peak()


class CudaCounter:
    """A counter of the current GPU's caching allocator."""

    def live(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    def peak(self) -> int:
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated()

    def reset_peak(self) -> None:
        torch.cuda.reset_peak_memory_stats()


Counter = MallocCounter | CudaCounter
