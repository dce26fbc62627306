"""Memory over a step: live bytes inside of its graphs, by the memory model, and live bytes outside of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from passes.fx.sizes import larger, smaller
from passes.models.memory_model import Category

from ..compiler.calls import Census, GraphCall
from .figures import GraphFigures

SHARDS, OPTIMIZER, OTHER = "shards", "optimizer state", "buffers and the like"
#: Categories of memory, in the order in which they are printed.
CATEGORIES = (SHARDS, OPTIMIZER, OTHER, *(category.value for category in Category))


@dataclass(frozen=True)
class _Saved:
    """The bytes that a forward leaves until its backward.

    Attributes:
        activations: activations among its outputs, to autograd and to its caller.
        parameters: gathered parameters among its outputs, without :attr:`kept`.
        kept: gathered parameters among its outputs that the units hold, too.
        offloaded: activations that wait on the host.
    """

    activations: int = 0
    parameters: int = 0
    kept: int = 0
    offloaded: int = 0


@dataclass(frozen=True)
class Moment:
    """The bytes that live at a moment.

    Attributes:
        held: live bytes by category.
        buckets: live bytes by bucket, of memory that belongs to one.
    """

    held: Mapping[str, int]
    buckets: Mapping[str, int]


class StepMemory:
    """The bytes that live during the calls of a step.

    Args:
        calls: the calls.
        figures: the figures of each call's graph.
        census: the sharded models of the step.
        optimizer_bytes: the bytes of the optimizer's state on the device.
        kept_on_host: the bytes that are on the host throughout the step.

    Attributes:
        around: for each call, the bytes that live outside of its graph, by category.
        on_host: for each call, the bytes on the host at the end of a forward, or during a backward: ``kept_on_host``, and
            activations that wait there.
    """

    def __init__(
        self,
        calls: Sequence[GraphCall],
        figures: Sequence[GraphFigures],
        census: Census,
        optimizer_bytes: int,
        kept_on_host: int = 0,
    ) -> None:
        self._calls, self._figures = calls, figures
        constant = {
            SHARDS: sum(unit.shard_bytes for unit in census.units if not unit.is_copied),
            OPTIMIZER: optimizer_bytes,
            OTHER: census.other_bytes,
        }
        self.on_host: list[int] = []
        self.around: list[Counter[str]] = [Counter({**constant, **held}) for held in self._held()]
        self.on_host = [kept_on_host + waiting for waiting in self.on_host]

    def _held(self) -> list[dict[str, int]]:
        """Return the bytes outside of each call's graph that change from call to call, by category. Also fill ``on_host``."""
        waiting: dict[object, list[_Saved]] = {}
        held = []
        for index, (call, figures) in enumerate(zip(self._calls, self._figures, strict=True)):
            mine = waiting.setdefault(call.compilation, [])
            own = mine.pop() if call.is_backward and mine else _Saved()
            others = [saved for stack in waiting.values() for saved in stack]
            # The graph counts the bytes that it frees. The caller holds the forward's other outputs until this call ends.
            taken = figures.memory.taken
            activations = sum(saved.activations for saved in others) + larger(0, own.activations - taken[Category.ACTIVATIONS])
            parameters = call.parameter_bytes + sum(saved.parameters for saved in others)
            held.append(
                {
                    Category.ACTIVATIONS.value: activations,
                    Category.PARAMETERS.value: parameters
                    - smaller(own.kept + sum(call.released.values()), taken[Category.PARAMETERS]),
                    Category.GRADIENTS.value: call.gradient_bytes - taken[Category.GRADIENTS],
                }
            )
            self.on_host.append(sum(saved.offloaded for saved in (own, *others)) + figures.memory.offloaded)
            if not call.is_backward:
                mine.append(self._saved(index))
        return held

    def _saved(self, index: int) -> _Saved:
        call, given_out = self._calls[index], self._figures[index].memory.given_out
        following = self._calls[index + 1].parameter_bytes if index + 1 < len(self._calls) else call.parameter_bytes
        kept = smaller(max(0, following - call.parameter_bytes), given_out[Category.PARAMETERS])
        offloaded = self._figures[index].memory.offloaded
        return _Saved(given_out[Category.ACTIVATIONS], given_out[Category.PARAMETERS] - kept, kept, offloaded)

    def totals(self, index: int) -> list[int]:
        """Return all live bytes of a call, for each node of its graph."""
        rows = self._figures[index].memory.timeline.values()
        around = sum(self.around[index].values())
        return [around + sum(live) for live in zip(*rows, strict=True)]

    def moment(self, index: int, position: int) -> Moment:
        """Return the bytes that live while the node at ``position`` of a call's graph runs."""
        memory = self._figures[index].memory
        held = Counter(self.around[index])
        for category, row in memory.timeline.items():
            held[category.value] += row[position]
        buckets = {str(name): row[position] for name, row in memory.buckets.items() if row[position]}
        return Moment({name: held[name] for name in CATEGORIES}, buckets)

    def peak(self) -> tuple[int, int]:
        """Return the call, and the position in its graph, with the most live bytes; of equals the first."""
        peaks = [
            max((total, -position) for position, total in enumerate(self.totals(each))) for each in range(len(self._calls))
        ]
        index = max(range(len(peaks)), key=lambda each: (peaks[each][0], -each))
        return index, -peaks[index][1]
