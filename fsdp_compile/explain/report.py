"""The report on a training step: the time, communication and memory of its graphs."""

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
    """The predicted time, communication and memory of a training step, on each rank. ``print`` it.

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
    _derive: Callable[[], Derivation] | None = field(default=None, repr=False, compare=False)

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

    @property
    def formulae(self) -> Formulae:
        """Traffic, memory and time of the step as expressions of sympy. The first use traces the step again, with symbols.

        Raises:
            ValueError: the report is one of a capture, of a step with a memory budget, or of a mesh with named dimensions;
                units are sharded over groups of different sizes; or a size depends on something other than ranks, batch and
                sequence.
            NotImplementedError: the step copies between device and host.
            RuntimeError: the model has changed since the report was made, or there is a process group already.
        """
        return self._derivation().formulae

    def at(self, **values: int) -> Report:
        """Return the report on the same step at other sizes, without a trace at these sizes.

        The first use traces the step again, with symbols. Bytes of communication and flops are those of a trace at the other
        sizes. Memory and time are those of this step's graphs. For another batch or sequence, torch.compile might save other
        activations, and padding might make a kernel.

        The schedule is that of this report, also where ``schedule="auto"`` would choose another one.

        Args:
            values: S, ranks that parameters are sharded over; R, replicas; B, batch of a rank; T, sequence; M, microbatches, if
                at least two of them do the same. Sizes that are not given stay as they are.

        Raises:
            ValueError: as :attr:`formulae`; the step does not depend on a size of that name; or the model does something else
                at these sizes.
            RuntimeError: as :attr:`formulae`.
        """
        return self._derivation().at(values)

    def _derivation(self) -> Derivation:
        if self._derive is None:
            raise ValueError(
                "There are formulae for what explain() reports, which traces the model with symbols, and not for a capture."
            )
        return self._derive()

    def timeline(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Write the step as Chrome trace events: a track for compute, one for each process group, and memory over time.

        Args:
            path: a JSON file, which Perfetto (https://ui.perfetto.dev) and chrome://tracing open.
            measured: a measured step, as a process of its own.
        """
        write_trace(path, self._pictures(measured))

    def plot(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Draw the step by matplotlib: its timeline over its memory, with exposed communication marked.

        Args:
            path: the file to write: ``.png``, ``.svg``, ``.pdf``, or another format of matplotlib.
            measured: a measured step, as a second timeline.

        Raises:
            ImportError: matplotlib is not installed.
            ValueError: matplotlib does not know the suffix of ``path``.
        """
        draw(path, self, self._pictures(measured))

    def html(self, path: str | os.PathLike[str], *, measured: Measured | None = None) -> None:
        """Write the report as one page of HTML that needs no other file: timeline and memory, which zoom, and printed tables.

        Args:
            path: the file to write.
            measured: a measured step, as a second timeline and a table.
        """
        Path(path).write_text(page(self, self._pictures(measured), measured), encoding="utf-8")

    def beside(self, profile: Any) -> Measured:
        """Compare a profile of the same graphs with this report.

        Args:
            profile: a ``torch.profiler.profile`` of one or more whole steps that has stopped, or the path of the trace that it
                exported (``.json``, ``.json.gz``). Its activities include ``ProfilerActivity.CPU`` and, on a GPU,
                ``ProfilerActivity.CUDA``. A profiler exports its trace once: given a profiler, this method exports it.

        Returns:
            The measured times of the graphs, to be printed, and for :meth:`timeline`, :meth:`plot` and :meth:`html`.

        Raises:
            TypeError: ``profile`` is neither a profiler nor a path.
            ValueError: the profile has no trace, or its steps do not have the report's graphs.
            NotImplementedError: the step copies between device and host.
        """
        assert self._source is not None
        return read_profile(profile, self, self._source)

    def _pictures(self, measured: Measured | None) -> list[Picture]:
        assert self._source is not None
        return [predicted(self, self._source), *([] if measured is None else [measured.picture])]

    def __str__(self) -> str:
        return render(self)
