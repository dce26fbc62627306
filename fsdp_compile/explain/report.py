"""The report on a training step: the time, communication and memory of its graphs."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from .chrome_trace import write_trace
from .expressions import Formulae
from .html import page
from .measured import Measured, read_profile
from .plot import draw
from .prediction import Prediction
from .render import render
from .tracks import Picture, predicted


class Derivation(Protocol):
    """The formulae of a step, and reports on the step at other sizes."""

    @property
    def formulae(self) -> Formulae: ...

    def at(self, values: Mapping[str, int]) -> Report: ...


@dataclass(frozen=True)
class Report(Prediction):
    """The predicted time, communication and memory of a training step, on each rank. ``print`` it.

    The numbers are the attributes of a :class:`.Prediction`.
    """

    _derive: Callable[[], Derivation] | None = field(default=None, repr=False, compare=False)

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
