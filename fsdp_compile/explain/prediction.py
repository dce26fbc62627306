"""The prediction of a training step: the numbers that a report's tables and pictures show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from passes.auto.memory_budget import Choice
from passes.models.hardware import Hardware

from .exposure import Exposure
from .parts import CallReport, MemoryReport, Source, Suggestion, UnitReport


@dataclass(frozen=True)
class Prediction:
    """The predicted time, communication and memory of a training step, on each rank.

    The numbers are those of the models of time and memory in :mod:`passes.models`. Times are in nanoseconds.

    Attributes:
        hardware: the machine.
        mesh: the number of ranks of each mesh dimension that graphs communicate over, by name.
        units: the costs of each unit, in the order of the modules.
        calls: the calls of graphs, in order.
        exposures: the transfers that compute waits for, in order.
        memory: the moment with the most live bytes.
        optimizer: the name of the assumed optimizer; "none" for a step without one.
        optimizer_ns: the time of the optimizer's step.
        time_ns: the time of the whole step, graphs and optimizer.
        tokens: tokens of a rank in the step; None: not known.
        flops: the flops of all products, by dtype.
        model_flops: the flops of all products without recomputation: at most three times those of forward.
        mfu: the part of the step that ``model_flops`` would take at the hardware's peak rates, or at its sustained rates where
            peak rates are not known.
        suggestions: changes to the step, each evaluated.
        choices: for each joint graph with a memory budget, the policies that were tried and the one that was chosen.
        outside: the operators that communicated outside of graphs, once for each time. No other number counts them.
    """

    hardware: Hardware
    mesh: Mapping[str, int]
    units: Sequence[UnitReport]
    calls: Sequence[CallReport]
    exposures: Sequence[Exposure]
    memory: MemoryReport
    optimizer: str
    optimizer_ns: int
    time_ns: int
    tokens: int | None
    flops: Mapping[str, int]
    model_flops: int
    mfu: float
    suggestions: Sequence[Suggestion] = ()
    choices: Sequence[Choice] = ()
    outside: Sequence[str] = ()
    _source: Source | None = field(default=None, repr=False, compare=False)

    @property
    def exposed_ns(self) -> int:
        """The time that compute waits for communication, in nanoseconds."""
        return sum(call.exposed_ns for call in self.calls)

    @property
    def exposed_share(self) -> float:
        """The part of the step in which compute waits for communication, from 0 to 1."""
        return self.exposed_ns / self.time_ns if self.time_ns else 0.0

    @property
    def total(self) -> UnitReport:
        """The sums over all units."""
        sums = {
            name: sum(getattr(unit, name) for unit in self.units) for name in UnitReport.__dataclass_fields__ if name != "name"
        }
        sums["collectives"] = round(sums["collectives"])
        return UnitReport("total", **sums)

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens a second of a rank; None: the number of tokens is not known."""
        return None if self.tokens is None else self.tokens / (self.time_ns / 1e9)
