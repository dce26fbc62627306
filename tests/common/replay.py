"""Recordings on the CPU (benchmarks/harness/replay.py), and how often programs make use of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import replay

from fsdp_compile.compiler.cuda_graphs import RecordedProgram


class ReplayRecorder(replay.ReplayRecorder):
    """Counts for the whole process."""

    recorded = 0
    replayed = 0

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        again = super().record(run)
        ReplayRecorder.recorded += 1

        def counting() -> None:
            ReplayRecorder.replayed += 1
            again()

        return counting


class Counts:
    """How often programs ran without a recording, were recorded, and were replayed, the first time included."""

    unrecorded = 0

    def take(self) -> tuple[int, int, int]:
        """(unrecorded, recorded, replayed), and count anew."""
        taken = self.unrecorded, ReplayRecorder.recorded, ReplayRecorder.replayed
        self.unrecorded = ReplayRecorder.recorded = ReplayRecorder.replayed = 0
        return taken


@contextmanager
def recordings_on_cpu() -> Iterator[Counts]:
    """Let ``options={"cudagraphs": True}`` record on the CPU, where programs run operator by operator."""
    counts = Counts()
    counts.take()
    call = RecordedProgram.__call__

    def counting(self: RecordedProgram, args: list[Any]) -> Any:
        before = ReplayRecorder.replayed
        results = call(self, args)
        counts.unrecorded += ReplayRecorder.replayed == before
        return results

    with replay.on_cpu(ReplayRecorder), pytest.MonkeyPatch.context() as patch:
        patch.setattr(RecordedProgram, "__call__", counting)
        yield counts
