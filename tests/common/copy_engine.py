"""A pretended device on the CPU, with memory apart from the host's: copies between them take time, in threads of their own.

The target of a copy holds NaN until the copy is done, so that a reader that does not wait computes NaN. The source is read only
at the end, so that writing over it too early gives wrong results as well.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from passes.collectives.host_copies import engine_of

CPU = torch.device("cpu")


@dataclass
class Copied:
    """A copy that an engine has begun.

    Attributes:
        kind: "to_device" or "to_host".
        nbytes: the size of the copy.
        events: the engine's list of events.
        pinned: whether a copy to the host goes to pinned memory.
        done: set when the copy is done.
    """

    kind: str
    nbytes: int
    events: list[str]
    pinned: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def wait_on_device(self) -> None:
        self.events.append("device waits")
        self.done.wait()

    def wait_on_host(self) -> None:
        self.events.append("host waits")
        self.done.wait()


_Work: TypeAlias = tuple[Copied, Sequence[Tensor], Sequence[Tensor]]


class CopyEngine:
    """An engine that copies at a given rate, one copy after the other in each direction.

    Attributes:
        copies: all copies that were begun, in order.
        events: the events of this thread, in order: "begin to_device", "device waits", "host waits" and the like.
    """

    def __init__(self, bytes_per_s: float):
        self._bytes_per_s = bytes_per_s
        self.copies: list[Copied] = []
        self.events: list[str] = []
        self._queues: dict[str, queue.SimpleQueue[_Work | None]] = {}
        for kind in ("to_device", "to_host"):
            self._queues[kind] = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(self._queues[kind],), daemon=True).start()

    def _work(self, waiting: queue.SimpleQueue[_Work | None]) -> None:
        while (item := waiting.get()) is not None:
            copied, results, pieces = item
            time.sleep(copied.nbytes / self._bytes_per_s)
            # Tensors that were made in inference mode can only be written in this mode.
            with torch.inference_mode():
                for result, piece in zip(results, pieces, strict=True):
                    result.copy_(piece)
            # Free the tensors now, not at the next item.
            del item, results, pieces
            copied.done.set()

    def close(self) -> None:
        for waiting in self._queues.values():
            waiting.put(None)

    def _begin(self, kind: str, results: Sequence[Tensor], pieces: Sequence[Tensor], pinned: bool = False) -> Copied:
        for result in results:
            if result.is_floating_point():
                result.fill_(float("nan"))
        copied = Copied(kind, sum(result.nbytes for result in results), self.events, pinned)
        self.copies.append(copied)
        self.events.append(f"begin {kind}")
        self._queues[kind].put((copied, results, pieces))
        return copied

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, Copied]:
        numels = [piece.numel() for piece in pieces]
        result = torch.empty(sum(numels), dtype=pieces[0].dtype, device=device)
        return result, self._begin("to_device", result.split(numels), pieces)

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> tuple[Tensor, Copied]:
        assert value.dim() == 1
        result = torch.empty_like(value)
        return result, self._begin("to_host", [result], [value], pinned)

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> Copied:
        return self._begin("to_host", targets, values)


@contextlib.contextmanager
def copying(bytes_per_s: float = 1e8) -> Iterator[CopyEngine]:
    """Copy between the host and the CPU as a device in the block.

    Models on the CPU with an offload policy then keep their shards in another memory than they compute in.
    """
    engine = CopyEngine(bytes_per_s)
    try:
        with engine_of(CPU, engine):
            yield engine
    finally:
        engine.close()
