"""Ranks that wait for one that has ended, or stopped, end soon, too, and say which one it is and where it was."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from fsdp_compile.runtime import pulse
from fsdp_compile.runtime.pulse import Pulse, Sign


def _pulses(number: int = 2) -> list[Pulse]:
    store = dist.HashStore()
    return [Pulse(store, rank) for rank in range(number)]


def _write(to: Pulse, sign: Sign) -> None:
    to._store.set(to._key(to._rank), json.dumps(sign))


def test_a_rank_says_where_it_is() -> None:
    own, other = _pulses()
    watch = own.watch()
    assert own.sign(1) is None
    assert watch.lost([1]) == ""
    other.beat(0.0)
    other.beat(0.5)
    first = own.sign(1)
    assert first is not None and first.number == 0
    other.beat(1.5)
    assert watch.lost([1]) == ""
    second = own.sign(1)
    assert second is not None and second.number == 1
    assert re.fullmatch(r" Where they are: rank 1 is at test_pulse\.py:\d+, in test_a_rank_says_where_it_is\.", watch.places())


def test_a_rank_that_left_the_job_gives_no_signs(one_rank: None) -> None:
    signs, world = Pulse(dist.HashStore(), 0), dist.group.WORLD
    signs.beat(0.0)
    dist.group.WORLD = None
    try:
        with pytest.raises(RuntimeError, match="left the job"):
            signs.beat(2.0)
    finally:
        dist.group.WORLD = world
    assert signs.sign(0).number == 0


def test_a_rank_ended() -> None:
    own, other = _pulses()
    other.beat(0.0)
    sign = own.sign(1)
    assert sign is not None
    with subprocess.Popen(["true"]) as process:
        pass
    _write(other, sign._replace(process=process.pid, place="train.py:8, in main"))
    said = f"Rank 1 ({sign.host}, process {process.pid}) has ended. It was last at train.py:8, in main."
    assert own.watch().lost([0, 1]) == said
    # Processes of another machine have other numbers.
    _write(other, sign._replace(process=process.pid, machine="elsewhere"))
    assert own.watch().lost([0, 1]) == ""


def test_a_rank_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pulse, "SILENT_AFTER_S", 0.2)
    own, other = _pulses()
    other.beat(0.0)
    watch = own.watch()
    for now in (2.0, 4.0):
        assert watch.lost([1]) == ""
        time.sleep(0.25)
        other.beat(now)
    assert watch.lost([1]) == ""
    time.sleep(0.25)
    assert re.match(r"Rank 1 \(.*\) has given no sign of life for \d+ s\. It was last at test_pulse\.py", watch.lost([1]))


_RANK = """
    import os, signal, sys
    from datetime import timedelta
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from fsdp_compile import fsdp_backend, fully_shard

    port, rank, victim, number, moment, timeout_s = sys.argv[1], *map(int, sys.argv[2:5]), sys.argv[5], int(sys.argv[6])
    dist.init_process_group("gloo", init_method=f"tcp://localhost:{port}", rank=rank, world_size=2)
    # Only this group has the short timeout: on a busy machine, ranks start at different times.
    group = dist.new_group(timeout=timedelta(seconds=timeout_s))
    model = fully_shard(torch.nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})

    def pass_by(here):
        if rank == victim and here == moment:
            print("now", flush=True)
            os.kill(os.getpid(), number)

    for step in range(3):
        if step == 2:
            pass_by("data")
            # A new graph, which the ranks compare.
            model.weight.requires_grad_(moment != "compile")
            pass_by("compile")
        loss = compiled(torch.ones(2, 4)).sum()
        if step == 2:
            pass_by("forward")
        loss.backward()
"""
_TIMED_OUT = "Timed out waiting 10000ms|has not answered"
# Much less than without a limit, and more than a busy machine needs.
_WITHIN_S = 60
_NIGHT = pytest.mark.night


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("victim", "number", "moment", "timeout_s", "error"),
    [
        # The first rank serves the store.
        pytest.param(0, signal.SIGSTOP, "data", 10, _TIMED_OUT, id="stopped in data", marks=_NIGHT),
        pytest.param(0, signal.SIGSTOP, "forward", 10, _TIMED_OUT, id="stopped in forward", marks=_NIGHT),
        pytest.param(0, signal.SIGSTOP, "compile", 10, _TIMED_OUT, id="stopped in compile", marks=_NIGHT),
        pytest.param(1, signal.SIGKILL, "compile", 600, "Rank 1 .* has ended. It was last at <string>", id="killed in compile"),
        pytest.param(0, signal.SIGKILL, "compile", 600, "Error", id="the first killed in compile", marks=_NIGHT),
    ],
)
def test_ranks_end(victim: int, number: int, moment: str, timeout_s: int, error: str, tmp_path: Path) -> None:
    assert re.search(error, _error_of_the_other(victim, number, moment, timeout_s, tmp_path))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("victim", "error"),
    [
        # It serves the store.
        pytest.param(0, "The store .* has not answered", id="the first", marks=_NIGHT),
        pytest.param(1, r"Rank 1 .* has given no sign of life for \d+ s. .* Rank 0 has been in backward graph", id="the last"),
    ],
)
def test_a_rank_that_waits_in_a_program_ends(victim: int, error: str, tmp_path: Path) -> None:
    """The other rank is stopped, and the timeout of the process group is far away."""
    assert re.search(error, _error_of_the_other(victim, signal.SIGSTOP, "forward", 600, tmp_path, silent_after_s=4))


def _error_of_the_other(
    victim: int, number: int, moment: str, timeout_s: int, tmp_path: Path, silent_after_s: float = pulse.SILENT_AFTER_S
) -> str:
    """Run two ranks, of which one gets a signal, and return what the other one has printed when it ends."""
    port = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False).port
    errors = [tmp_path / "0", tmp_path / "1"]
    ranks = []
    for rank, path in enumerate(errors):
        flags = map(str, (port, rank, victim, int(number), moment, timeout_s))
        command = [sys.executable, "-c", textwrap.dedent(_RANK), *flags]
        env = {**os.environ, "FSDP_COMPILE_SILENT_AFTER_S": str(silent_after_s)}
        with path.open("w") as file:
            ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=file, text=True, env=env))
    try:
        stdout = ranks[victim].stdout
        assert stdout is not None
        assert stdout.readline() == "now\n"
        assert ranks[1 - victim].wait(timeout=_WITHIN_S) == 1
    finally:
        for each in ranks:
            each.kill()
            each.communicate()
    return errors[1 - victim].read_text()
