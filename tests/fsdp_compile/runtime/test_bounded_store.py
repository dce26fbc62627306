"""Operations of a store end, and so do ranks, if the process that serves the store is stopped."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_compile import RanksDisagree
from fsdp_compile.runtime.agreement import Agreement, Program
from fsdp_compile.runtime.bounded_store import BoundedStore, StoreSilent


@contextlib.contextmanager
def stopped(process: int) -> Iterator[None]:
    """Stop a process inside of the ``with`` block."""
    os.kill(process, signal.SIGSTOP)
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


_RANK = """
    import os, signal, sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    from fsdp_compile import fsdp_backend, fully_shard

    port, rank, moment = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    address = f"tcp://localhost:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=timedelta(seconds=5))
    model = fully_shard(torch.nn.Linear(4, 4))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})

    def pass_by(here):
        if rank == 0 and here == moment:
            print("stops", flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)

    for step in range(3):
        if step == 2:
            pass_by("data")
            model.weight.requires_grad_(moment != "compile")
            pass_by("compile")
        loss = compiled(torch.ones(2, 4)).sum()
        if step == 2:
            pass_by("forward")
        loss.backward()
"""


@pytest.mark.ranks
@pytest.mark.parametrize("moment", ["data", *(pytest.param(one, marks=pytest.mark.night) for one in ("forward", "compile"))])
def test_ranks_end(moment: str, tmp_path: Path) -> None:
    """The first rank, which serves the store, stops. The other one ends soon after the timeout of the process group, 5 s."""
    port = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    command = [sys.executable, "-c", textwrap.dedent(_RANK), str(port)]
    errors = tmp_path / "errors"
    with (
        errors.open("w") as file,
        subprocess.Popen([*command, "0", moment], stdout=subprocess.PIPE, text=True) as first,
        subprocess.Popen([*command, "1", moment], stderr=file) as second,
    ):
        try:
            assert first.stdout is not None
            assert first.stdout.readline() == "stops\n"
            assert second.wait(timeout=5 + 15) == 1
        finally:
            first.kill()
            second.kill()
    # Gloo's error, or that of a comparison.
    assert re.search("Timed out waiting 5000ms|has not answered", errors.read_text())
