"""The time of a compilation, split into phases."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch._dynamo.utils

REST = "running"

# Events that torch times, and their phases. An event that is missing here belongs to the phase of the event around it.
_PHASE_OF_EVENT = {
    "dynamo": "Dynamo",
    "backend_compile": "joint trace",
    "create_aot_dispatcher_function": "joint trace",
    "min_cut_rematerialization_partition": "partition",
    "fsdp_passes": "fsdp passes",
    "inductor_compile": "Inductor lowering",
    "GraphLowering.codegen": "code generation",
    "code_gen": "code generation",
    "compile_file": "C++ compiler, loading",
    "async_compile.wait": "C++ compiler, loading",
    "PyCodeCache.load_by_key_path": "C++ compiler, loading",
}
PHASES = (*dict.fromkeys(_PHASE_OF_EVENT.values()), REST)


class Stopwatch:
    """A stopwatch for nested phases: each moment counts for the innermost open phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)
        self._open: list[tuple[str, str]] = [("", REST)]
        self._since = time.perf_counter()

    def start(self, event: str) -> None:
        self._charge()
        self._open.append((event, _PHASE_OF_EVENT.get(event, self._open[-1][1])))

    def stop(self, event: str) -> None:
        self._charge()
        if self._open.pop()[0] != event:
            raise RuntimeError(f"the event {event!r} ends while another is open")

    def _charge(self) -> None:
        now = time.perf_counter()
        self.seconds[self._open[-1][1]] += now - self._since
        self._since = now


@contextlib.contextmanager
def timed() -> Iterator[dict[str, float]]:
    """Time the phases of compilations in the block. Yields the seconds of each phase, which are filled in when the block ends.

    The seconds sum to the duration of the block. Only the thread that enters the block is timed. Compilers in other processes
    count while this thread waits for them.
    """
    log, passes, thread = torch._dynamo.utils.get_chromium_event_logger(), _passes(), threading.current_thread()
    watch, seconds = Stopwatch(), dict[str, float]()
    with contextlib.ExitStack() as patches:
        for method, note in {"log_event_start": watch.start, "log_event_end": watch.stop}.items():
            patches.enter_context(mock.patch.object(log, method, _also(getattr(log, method), note, thread)))
        for name, function in passes.items():
            patches.enter_context(mock.patch(name, _as_event(function, watch)))
        yield seconds
    watch.stop("")
    seconds.update(watch.seconds)


def _passes() -> dict[str, Any]:
    """Return the functions through which ``fsdp_backend`` runs passes, by the qualified names that it calls."""
    from fsdp_compile.compiler import backend, prepared_graph

    return {
        f"{module.__name__}.{name}": value
        for module in (backend, prepared_graph)
        for name, value in vars(module).items()
        if name.startswith("run_") and name.endswith("passes")
    }


def _also(method: Any, note: Any, thread: threading.Thread) -> Any:
    def call(event: str, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is thread:
            note(event)
        return method(event, *args, **kwargs)

    return call


def _as_event(function: Any, watch: Stopwatch) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        watch.start("fsdp_passes")
        try:
            return function(*args, **kwargs)
        finally:
            watch.stop("fsdp_passes")

    return call
