"""Copies between host and device: what the operators give, and which stream waits for which."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from passes.collectives.functional import shard_on_device, start_copy_to_device, start_copy_to_host
from passes.collectives.host_copies import StreamEngine, copies_to, engine_of, wait_copy, wait_on_host
from tests.common.copy_engine import CPU, copying


def test_what_they_give() -> None:
    shards = [torch.arange(6.0).view(2, 3), torch.arange(2.0)]
    with copying(1e4) as engine:
        copied = start_copy_to_device(shards, [1, 0], device="cpu")
        assert bool(copied.isnan().all()), "nothing has arrived"
        assert wait_copy(copied).tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 1]
        assert torch.equal(shard_on_device(shards[0], "cpu"), shards[0])
        back = start_copy_to_host(torch.ones(9), pinned=True)
        assert bool(back.isnan().all())
        wait_on_host(back)
        assert torch.equal(back, torch.ones(9))
        assert [(copy.kind, copy.nbytes, copy.pinned) for copy in engine.copies] == [
            ("to_device", 36, False),
            ("to_device", 24, False),
            ("to_host", 36, True),
        ]
        # A second wait has nothing to wait for.
        wait_on_host(back)


def test_they_look_like_what_they_give() -> None:
    with FakeTensorMode():
        copied = start_copy_to_device([torch.empty(2, 3), torch.empty(2)], [1, 0], device="meta")
        assert (wait_copy(copied).shape, copied.device.type) == ((9,), "meta")
        back = start_copy_to_host(torch.empty(4, dtype=torch.bfloat16, device="meta"), pinned=False)
        assert (back.shape, back.dtype, back.device.type) == ((4,), torch.bfloat16, "cpu")


def test_where_there_is_one_memory() -> None:
    assert not copies_to(CPU)
    assert copies_to(torch.device("cuda", 0))
    with copying():
        assert copies_to(CPU)
    assert not copies_to(CPU)


class _Stream:
    """A stream that notes what it is given, and what it waits for, in one list for all."""

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


@pytest.fixture
def log() -> Iterator[list[str]]:
    """What is done on streams, on a device that stands for one that has them."""
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


def test_streams_of_a_copy_to_the_device(log: list[str]) -> None:
    copied = start_copy_to_device([torch.ones(4), torch.ones(2)], device="cpu")
    # Memory for it comes from the stream that computes, whose earlier work may still use it.
    assert log == [
        "in waits for main",
        "on in:",
        "copy 4 without blocking",
        "copy 2 without blocking",
        "on main:",
        "record on in",
    ]
    log.clear()
    assert torch.equal(wait_copy(copied), torch.ones(6))
    assert log == ["main waits for event of in"]


def test_streams_of_a_copy_to_the_host(log: list[str]) -> None:
    copied = start_copy_to_host(torch.ones(4), pinned=False)
    assert log == ["out waits for main", "on out:", "copy 4", "on main:", "keep for out", "record on out"]
    log.clear()
    wait_on_host(copied)
    assert log == ["host waits"]
