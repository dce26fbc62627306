"""Operations of a store end if the process that serves it is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist

from fsdp_compile import RanksDisagree
from fsdp_compile.runtime.agreement import Agreement, Program
from fsdp_compile.runtime.bounded_store import BoundedStore, StoreSilent


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop a child process inside of the ``with`` block."""
    os.kill(process, signal.SIGSTOP)
    # The signal goes to one thread. Another one may answer until the whole process has stopped.
    os.waitid(os.P_PID, process, os.WSTOPPED)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


_SERVER = """
    import sys
    from torch.distributed import TCPStore
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    print(store.port, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[int, int]]:
    """A process that serves a store, and the port."""
    command = [sys.executable, "-c", textwrap.dedent(_SERVER)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        yield process.pid, int(process.stdout.readline())
        process.stdin.close()


def _store(port: int) -> dist.Store:
    return dist.TCPStore("localhost", port, wait_for_workers=False, timeout=timedelta(seconds=60))


def test_operations_end(server: tuple[int, int]) -> None:
    process, port = server
    store, others = BoundedStore(_store(port), 0.5), BoundedStore(dist.HashStore(), 0.5)
    store.set("key", "value")
    assert store.get("key") == b"value"
    start = time.monotonic()
    with stopped(process):
        for _ in range(2):
            with pytest.raises(StoreSilent, match=r"has not answered for 0\.5 s.*rank 0 or its launcher"):
                store.check(["key"])
        # Another store does not wait for this one.
        others.set("key", "other")
        assert others.get("key") == b"other"
    assert time.monotonic() - start < 5
    # Whoever was stopped for a while goes on.
    assert store.within(10.0).check(["key"]) and store.get("key") == b"value"


class _Holding:
    """A store that holds whoever asks it."""

    def __init__(self) -> None:
        self.is_asked, self.is_released = threading.Event(), threading.Event()

    def check(self, keys: list[str]) -> bool:
        self.is_asked.set()
        return self.is_released.wait()


def test_a_store_is_not_held_by_another_one() -> None:
    """An operation goes on that was begun while another store held the thread, once that store counts as silent."""
    holding: Any = _Holding()

    def ask() -> None:
        with contextlib.suppress(StoreSilent):
            BoundedStore(holding, 0.5).check(["key"])

    held = threading.Thread(target=ask)
    held.start()
    holding.is_asked.wait()
    start = time.monotonic()
    BoundedStore(dist.HashStore(), 20.0).set("key", "value")
    assert time.monotonic() - start < 5
    held.join()
    holding.is_released.set()


def test_comparisons_end(server: tuple[int, int]) -> None:
    process, port = server
    agreement = Agreement(_store(port), [0, 1], 1, label="shard", timeout_s=1.0)
    start = time.monotonic()
    with stopped(process):
        with pytest.raises(RanksDisagree, match=r"has not answered.*Rank 1 is about to run a backward graph"):
            agreement.agree(Program("backward graph", ("all_reduce",), ("all_reduce",)))
        # Nobody hears of it, which is no error of its own.
        agreement.announce_failure("reason")
        with pytest.raises(StoreSilent):
            agreement.failure()
    assert time.monotonic() - start < 20
