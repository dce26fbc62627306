"""Transfers in flight, mostly collectives: each group carries one after the other, and groups share wires.

All that use a wire at the same time, one of each group, have equal parts of its rate. What a collective takes alone
is that much work for its wire: with another one beside it, both take twice as long for as long as both are there. That is how
processes share a link that is fair to them, and no more is known: how NCCL's kernels share NVLink or an adapter is not
documented.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable
from typing import Generic, TypeVar

T = TypeVar("T", bound=Hashable)


class InFlight(Generic[T]):
    """What is under way, in whole nanoseconds. Time goes forward with each call.

    Attributes:
        begins, ends: of collectives, as far as they are known: those that ended, and those that began.
    """

    def __init__(self) -> None:
        self.begins: dict[T, int] = {}
        self.ends: dict[T, int] = {}
        self._clock = 0
        self._queues: dict[str, deque[T]] = {}
        self._left: dict[T, int] = {}
        self._wire: dict[T, str] = {}

    def __contains__(self, collective: T) -> bool:
        """Whether it has been started."""
        return collective in self._left

    def start(self, collective: T, at: int, duration: int, group: str, wire: str) -> None:
        """Add a collective that takes a duration alone."""
        self._advance(at)
        self._left[collective], self._wire[collective] = duration, wire
        queue = self._queues.setdefault(group, deque())
        queue.append(collective)
        if queue[0] == collective:
            self.begins[collective] = at

    def end(self, collective: T) -> int:
        """When a collective that has been started is over, if none starts before that."""
        self._advance(None, collective)
        return self.ends[collective]

    def finish(self) -> None:
        """Let all come to their end."""
        self._advance(None)

    def _advance(self, until: int | None, collective: T | None = None) -> None:
        """Go on to a time, or to the end of a collective, or of all of them."""
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
        """Let time pass in which no collective starts, and none ends but at its end."""
        self._clock += elapsed
        for group, head in heads.items():
            self._left[head] -= elapsed // sharing[self._wire[head]]
            if self._left[head] <= 0:
                self.ends[head] = self._clock
                queue = self._queues[group]
                queue.popleft()
                if queue:
                    self.begins[queue[0]] = self._clock
