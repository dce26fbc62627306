"""A pretended device on the CPU, whose streams only log operations and waits."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from passes.collectives.host_copies import StreamEngine, engine_of
from tests.common.copy_engine import CPU


class _Stream:
    """A stream that logs its operations and waits, in a list that all streams share."""

    def __init__(self, name: str, log: list[str]):
        self.name, self.device, self._log = name, CPU, log

    def __enter__(self) -> None:
        self._log.append(f"on {self.name}:")

    def __exit__(self, *_: Any) -> None:
        self._log.append("on main:")

    def wait_stream(self, other: _Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self._log.append(f"{self.name} waits for {event}")

    def record_event(self) -> Any:
        self._log.append(f"record on {self.name}")
        event = mock.MagicMock(synchronize=lambda: self._log.append("host waits"))
        event.__str__ = lambda _: f"event of {self.name}"  # type: ignore[method-assign, assignment]
        return event


@contextlib.contextmanager
def logged_streams() -> Iterator[list[str]]:
    """Log what a :class:`StreamEngine` does on streams in the block, with the CPU as its device."""
    log: list[str] = []
    streams = iter([_Stream("in", log), _Stream("out", log)])
    copy = Tensor.copy_

    def copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        log.append(f"copy {source.numel()}{' without blocking' if non_blocking else ''}")
        return copy(target, source)

    with (
        mock.patch.object(torch, "Stream", lambda device: next(streams)),
        mock.patch.object(torch.accelerator, "current_stream", lambda _: _Stream("main", log)),
        mock.patch.object(Tensor, "copy_", copy_),
        mock.patch.object(Tensor, "record_stream", lambda _, stream: log.append(f"keep for {stream.name}")),
        engine_of(CPU, StreamEngine(CPU)),
    ):
        yield log
