"""Copies between host and device: results of the operators, and which stream waits for which."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._subclasses import FakeTensorMode

from passes.collectives.functional import start_copy_to_host
from passes.collectives.gather import shard_on_device, start_copy_to_device
from passes.collectives.host_copies import copies_to, engine, wait_copy, wait_on_host
from tests.common.copy_engine import CPU, copying
from tests.common.streams import logged_streams


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


def test_tensors_on_the_host_that_are_written_back() -> None:
    values, targets = [torch.ones(3), torch.arange(2)], [torch.zeros(3), torch.zeros(2, dtype=torch.int64)]
    with copying(1e4) as copies:
        begun = engine(CPU).write_back(values, targets)
        assert bool(targets[0].isnan().all()), "nothing has arrived"
        begun.wait_on_host()
        assert [(copy.kind, copy.nbytes) for copy in copies.copies] == [("to_host", 28)]
    assert all(map(torch.equal, targets, values))


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


@pytest.fixture
def log() -> Iterator[list[str]]:
    with logged_streams() as log:
        yield log


def test_streams_of_a_copy_to_the_device(log: list[str]) -> None:
    copied = start_copy_to_device([torch.ones(4), torch.ones(2)], device="cpu")
    # The result's memory comes from the compute stream, whose earlier work may still use it.
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


def test_streams_of_tensors_that_are_written_back(log: list[str]) -> None:
    """Values are not recorded on the stream: the caller keeps them alive until the device waits."""
    values = [torch.ones(4), torch.ones(2)]
    begun = engine(CPU).write_back(values, [torch.empty(4), torch.empty(2)])
    copies = ["copy 4 without blocking", "copy 2 without blocking"]
    assert log == ["out waits for main", "on out:", *copies, "on main:", "record on out"]
    log.clear()
    begun.wait_on_device()
    assert log == ["main waits for event of out"]
