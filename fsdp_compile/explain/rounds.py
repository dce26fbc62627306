"""Rounds: microbatches of a step that do the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..compiler.calls import GraphCall


@dataclass(frozen=True)
class Rounds:
    """Calls of a step that repeat.

    Attributes:
        first: the index of the first call.
        length: the number of calls in a round.
        number: the number of rounds.
    """

    first: int
    length: int
    number: int

    @staticmethod
    def find(calls: Sequence[GraphCall]) -> Rounds | None:
        """Find a round of calls that repeats; None: no round equals the next."""
        kinds = [(call.key, tuple(call.units.items()), call.gradients, call.parameter_bytes) for call in calls]
        for length in range(2, len(calls) // 2 + 1):
            for first in range(len(calls) - 2 * length + 1):
                number = 1
                block = kinds[first : first + length]
                while kinds[first + number * length : first + (number + 1) * length] == block:
                    number += 1
                stages = [call.is_backward for call in calls[first : first + length]]
                if number > 1 and any(stages) and not all(stages):
                    return Rounds(first, length, number)
        return None

    def with_more(self, calls: Sequence[GraphCall], more: int) -> list[GraphCall]:
        """Return the calls of the step with ``more`` rounds, fewer if negative."""
        end = self.first + self.length
        last = self.first + self.length * self.number
        return [*calls[: self.first], *list(calls[self.first : end]) * (self.number + more), *calls[last:]]
