"""CUDA-graph recordings on the CPU (benchmarks/harness/replay.py), with counts of their use."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from harness import replay

from fsdp_compile.compiler.cuda_graphs import RecordedProgram


class ReplayRecorder(replay.ReplayRecorder):
    """A recorder that counts recordings and replays of the whole process."""

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
    """The numbers of runs without a replay, of recordings, and of replays, including a recording's first replay."""

    unrecorded = 0

    def take(self) -> tuple[int, int, int]:
        """Return (unrecorded, recorded, replayed), and set the counts to 0."""
        taken = self.unrecorded, ReplayRecorder.recorded, ReplayRecorder.replayed
        self.unrecorded = ReplayRecorder.recorded = ReplayRecorder.replayed = 0
        return taken


@contextmanager
def recordings_on_cpu() -> Iterator[Counts]:
    """Record and replay operators on the CPU in the block, where ``options={"cudagraphs": True}`` asks for CUDA graphs."""
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
