"""A store whose operations end, whatever happens to the rank that serves it.

A client of torch's ``TCPStore`` waits for an answer without any limit: its timeouts are for keys that nobody has set, not for a
server that is stopped, or cut off. So a thread calls the store, and the caller waits for the thread, with a limit.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

#: Seconds within which the store answers whoever asks again and again, or has failed. It may be asked again.
ANSWERS_WITHIN_S = 2.0


class StoreSilent(RuntimeError):
    """The store of a process group has not answered in time."""


class _Operation:
    """An operation of a store, and its result."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function
        self._is_done = threading.Event()
        self._value: Any = None
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._value = self._function()
        except Exception as error:
            self._error = error
        self._is_done.set()

    def wait(self, seconds: float) -> bool:
        """Return whether the operation ends within some seconds."""
        return self._is_done.wait(seconds)

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class _Worker:
    """A thread that runs operations one after the other. A daemon, as one that a store holds never ends.

    Args:
        operations: the queue of the operations.
    """

    def __init__(self, operations: queue.SimpleQueue[_Operation] | None = None) -> None:
        self._operations = queue.SimpleQueue() if operations is None else operations
        self._process = os.getpid()
        self._is_replaced = False
        threading.Thread(target=self._run, name="fsdp_compile.store", daemon=True).start()

    @property
    def exists(self) -> bool:
        """False in a forked process, which inherits no threads."""
        return self._process == os.getpid()

    def begin(self, operation: _Operation) -> None:
        self._operations.put(operation)

    def replaced(self) -> _Worker:
        """Return another worker, which takes over all operations but the one that runs now."""
        self._is_replaced = True
        return _Worker(self._operations)

    def _run(self) -> None:
        while not self._is_replaced:
            self._operations.get().run()


# For all stores: those of one job have one connection, whose operations wait for each other anyway.
_worker: _Worker | None = None


class BoundedStore:
    """A store whose operations end within a time, or raise :class:`StoreSilent`.

    Args:
        store: the store.
        limit_s: the time in seconds.
    """

    def __init__(self, store: dist.Store, limit_s: float):
        self._store = store
        self._limit_s = limit_s
        # Shared with the views of other limits.
        self._held: list[_Operation] = []

    def within(self, seconds: float) -> BoundedStore:
        """Return this store with another limit."""
        view = BoundedStore(self._store, seconds)
        view._held = self._held
        return view

    def add(self, key: str, amount: int) -> int:
        return self._do(lambda: self._store.add(key, amount))  # type: ignore[no-any-return]

    def check(self, keys: Sequence[str]) -> bool:
        return self._do(lambda: self._store.check(list(keys)))  # type: ignore[no-any-return]

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return self._do(lambda: self._store.compare_set(key, expected, desired))  # type: ignore[no-any-return]

    def delete_key(self, key: str) -> bool:
        return self._do(lambda: self._store.delete_key(key))  # type: ignore[no-any-return]

    def get(self, key: str) -> bytes:
        return self._do(lambda: self._store.get(key))  # type: ignore[no-any-return]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return self._do(lambda: self._store.multi_get(list(keys)))  # type: ignore[no-any-return]

    def set(self, key: str, value: str) -> None:
        self._do(lambda: self._store.set(key, value))

    def _do(self, function: Callable[[], Any]) -> Any:
        global _worker
        if self._held:
            # The store may answer late.
            if not self._held[0].wait(self._limit_s):
                raise self._silent()
            self._held.clear()
        if _worker is None or not _worker.exists:
            _worker = _Worker()
        worker, operation = _worker, _Operation(function)
        worker.begin(operation)
        if not operation.wait(self._limit_s):
            self._held.append(operation)
            if _worker is worker:
                # Stores of other jobs must not wait for this one.
                _worker = worker.replaced()
            raise self._silent()
        return operation.result()

    def _silent(self) -> StoreSilent:
        return StoreSilent(
            f"The store of the process group has not answered for {self._limit_s:g} s. The process that serves it, rank 0 or "
            "its launcher, has stopped, or cannot be reached."
        )
