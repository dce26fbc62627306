"""Where the time of a compilation goes."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch._dynamo.utils

REST = "running"

# The events that torch times. One that is missing here belongs to the phase of the event around it.
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
    """Splits time over phases: each moment belongs to the innermost phase that is open then."""

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
    """Gives the seconds of each phase, which are filled in when the ``with`` block ends. They sum to those of the block.

    Times the thread that enters it. Compilers in other processes count while it waits for them.
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
    """The functions through which ``fsdp_backend`` runs passes, by the names that it calls them by."""
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
