"""The report on a training step: what its graphs do, cost and hold."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from passes.auto.memory_budget import Choice
from passes.models.hardware import Hardware

from .chrome_trace import write_trace
from .exposure import Exposure
from .html import page
from .measured import Measured, read_profile
from .parts import CallReport, MemoryReport, Source, Suggestion, UnitReport
from .plot import draw
from .render import render
from .tracks import Picture, predicted

if TYPE_CHECKING:
    from .formulae import Derivation, Formulae


@dataclass(frozen=True)
class Report:
    """What a training step does, costs and holds on each rank, by the models of time and memory. ``print`` it.

    Attributes:
        hardware: the machine.
        mesh: the ranks, by the names of the mesh's dimensions as far as graphs communicate over them.
        units: in the order of the modules.
        calls: the calls of graphs, in order.
        exposures: what is waited for, in order.
        memory: the moment at which most lives.
        optimizer: what it is taken to be.
        optimizer_ns: the time of its step.
        time_ns: of the whole step: graphs and optimizer.
        tokens: tokens of a rank in the step; None: not known.
        flops: of all products, by dtype.
        model_flops: the same without what is recomputed: at most three times those of forward.
        mfu: the part of the step that ``model_flops`` would take at the hardware's peak rates; where these are not known, at
            the rates that it sustains.
        suggestions: changes, evaluated.
        choices: what was tried and chosen for a memory budget, for each joint graph.
        outside: what communicates outside of graphs, which nothing here counts, once for each time.
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
    _derive: Callable[[], Derivation] | None = field(default=None, repr=False, compare=False)

    @property
    def exposed_ns(self) -> int:
        """How long compute waits for communication."""
        return sum(call.exposed_ns for call in self.calls)

    @property
    def exposed_share(self) -> float:
        """The part of the step that compute waits for communication."""
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

    @property
    def formulae(self) -> Formulae:
        """Traffic, memory and time of the step as expressions of sympy. The first use traces the step again, with symbols.

        Raises:
            ValueError: the report is one of a capture, or sizes of the step depend on something other than ranks, batch and
                sequence.
            NotImplementedError: the step copies between device and host.
            RuntimeError: the model is not what it was, or there is a process group already.
        """
        return self._derivation().formulae

    def at(self, **values: int) -> Report:
        """The report on the same step at other sizes, without tracing it.

        Bytes of communication and flops are those of a trace there. Memory and time are those of the graphs that this step has;
        of another batch or sequence torch.compile may save something else, and padding may make a kernel.

        The schedule is that of this report, also where ``schedule="auto"`` would choose another one.

        Args:
            values: S, ranks that parameters are sharded over; R, replicas; B, batch of a rank; T, sequence; M, microbatches, if
                at least two of them do the same. What is not given stays as it is.

        Raises:
            ValueError: as :attr:`formulae`; a name means nothing here; or the model does something else at these sizes.
        """
        return self._derivation().at(values)

    def _derivation(self) -> Derivation:
        if self._derive is None:
            raise ValueError(
                "There are formulae for what explain() reports, which traces the model with symbols, and not for a capture."
            )
        return self._derive()

    def timeline(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Write the step as Chrome trace events: what computes, each process group, and memory over time.

        Args:
            path: a JSON file, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
            measured: what really ran, as a process of its own.
        """
        write_trace(path, self._pictures(measured))

    def plot(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Draw the step by matplotlib: its timeline over its memory, with what is exposed marked.

        Args:
            path: the file to write: ``.png``, ``.svg``, ``.pdf``, or what else matplotlib writes.
            measured: what really ran, as a second timeline.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not know the suffix of ``path``.
        """
        draw(path, self, self._pictures(measured))

    def html(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Write the report as one page of HTML that needs nothing else: timeline and memory, which zoom, and what is printed.

        Args:
            path: the file to write.
            measured: what really ran, as a second timeline and a table.
        """
        Path(path).write_text(page(self, self._pictures(measured), measured), encoding="utf-8")

    def beside(self, profile: Any) -> Measured:
        """What really ran, beside what this report predicts.

        Args:
            profile: a ``torch.profiler.profile`` of one or more whole steps, with ``ProfilerActivity.CPU`` and, on a GPU,
                ``ProfilerActivity.CUDA``, that has stopped; or the path of the trace that it exported (``.json``,
                ``.json.gz``). A profiler exports its trace once, which this then does.

        Returns:
            Times of the graphs, to be printed, and for :meth:`timeline`, :meth:`plot` and :meth:`html`.

        Raises:
            ValueError: the profile is none, or not one of steps with the graphs that the report has.
            NotImplementedError: the step copies between device and host.
        """
        assert self._source is not None
        return read_profile(profile, self, self._source)

    def _pictures(self, measured: Measured | None) -> list[Picture]:
        assert self._source is not None
        return [predicted(self, self._source), *([] if measured is None else [measured.picture])]

    def __str__(self) -> str:
        return render(self)
