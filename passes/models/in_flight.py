"""Transfers in flight, mostly collectives: each group carries one at a time, and groups share wires.

Collectives that use a wire at the same time, one of each group, share its rate equally. A collective's time alone is its work
for the wire. While another one is beside it, both take twice as long. Processes share a fair link in this way. Nothing more
exact is known: how NCCL's kernels share NVLink or an adapter is not documented.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class InFlight(Generic[T]):
    """Collectives in flight, with times in whole nanoseconds. Calls move a clock forward.

    Attributes:
        begins, ends: the times at which collectives begin and end. Those after the clock are missing.
    """

    def __init__(self) -> None:
        self.begins: dict[T, int] = {}
        self.ends: dict[T, int] = {}
        self._clock = 0
        self._queues: dict[str, deque[T]] = {}
        self._left: dict[T, int] = {}
        self._wire: dict[T, str] = {}

    def __contains__(self, collective: T) -> bool:
        """Return whether a collective has been started."""
        return collective in self._left

    def start(self, collective: T, at: int, duration: int, group: str, wire: str) -> None:
        """Start a collective.

        Args:
            collective: its name.
            at: the time of its start.
            duration: how long it takes when it has its wire for itself.
            group: the group, which carries one collective at a time.
            wire: the wire, which collectives of several groups share.
        """
        self._advance(at)
        self._left[collective], self._wire[collective] = duration, wire
        queue = self._queues.setdefault(group, deque())
        queue.append(collective)
        if queue[0] == collective:
            self.begins[collective] = at

    def end(self, collective: T) -> int:
        """Return when a started collective ends, if no other starts before that."""
        self._advance(None, collective)
        return self.ends[collective]

    def finish(self) -> None:
        """Run all collectives to their end."""
        self._advance(None)

    def _advance(self, until: int | None, collective: T | None = None) -> None:
        """Move the clock to ``until``, or to the end of ``collective``, or without either to the end of all collectives."""
        while collective is None or collective not in self.ends:
            heads = {group: queue[0] for group, queue in self._queues.items() if queue}
            sharing = Counter(self._wire[head] for head in heads.values())
            next_end = self._clock + min((self._left[head] * sharing[self._wire[head]] for head in heads.values()), default=0)
            if not heads or (until is not None and next_end > until):
                break
            self._pass(next_end - self._clock, heads, sharing)
        if until is not None and until > self._clock:
            heads = {group: queue[0] for group, queue in self._queues.items() if queue}
            self._pass(until - self._clock, heads, Counter(self._wire[head] for head in heads.values()))

    def _pass(self, elapsed: int, heads: dict[str, T], sharing: Counter[str]) -> None:
        """Move the clock by ``elapsed``. Within that time no collective starts, and none ends before its last moment."""
        self._clock += elapsed
        for group, head in heads.items():
            self._left[head] -= elapsed // sharing[self._wire[head]]
            if self._left[head] <= 0:
                self.ends[head] = self._clock
                queue = self._queues[group]
                queue.popleft()
                if queue:
                    self.begins[queue[0]] = self._clock
