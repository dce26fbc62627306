"""A step as a figure: its timeline over its memory, by matplotlib.

Bars are drawn by unit, not by kernel. Time in which compute waits is red, across all tracks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .colours import CATEGORIES, EXPOSED, SORTS, colour
from .exposure import WORDS, milliseconds
from .prediction import Prediction
from .render import fold, scale_of, size
from .tracks import Kind, Picture, Span, lanes, legible

_WIDTH, _DPI = 16.0, 100
_TEXT, _GREY = "#22272e", "#6b7280"
# The font size of names (False) and of numbers (True), and the part of the timeline's width that a character takes.
_LABELS = {False: (8.0, 1 / 180), True: (6.0, 1 / 215)}


def draw(path: str | os.PathLike[str], report: Prediction, pictures: Sequence[Picture]) -> None:
    """Draw the timelines of ``pictures`` and the memory of the first, and write the figure to ``path``.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: matplotlib does not know the suffix of ``path``.
    """
    rows = [_rows(picture) for picture in pictures]
    heights = [0.45 + 0.42 * len(each) for each in rows]
    figure = _figure(path, 1.4 + sum(heights) + 2.6)
    axes = figure.subplots(len(pictures) + 1, 1, sharex=True, height_ratios=[*heights, 2.6])
    total = max(picture.total_ns for picture in pictures)
    for axis, picture, each in zip(axes, pictures, rows, strict=False):
        _timeline(axis, picture, each, total)
    _memory(axes[-1], report, pictures[0], total)
    figure.suptitle(_title(report), x=0.008, ha="left", fontsize=12, color=_TEXT)
    _legend(figure, pictures)
    figure.savefig(path, dpi=_DPI, metadata=_without_date(path))


def draw_memory(path: str | os.PathLike[str], reports: Mapping[str, Prediction], pictures: Sequence[Picture]) -> None:
    """Draw the memory of several steps on equal axes, each with its name and budget, and write the figure to ``path``.

    Raises:
        ImportError, ValueError: as :func:`draw`.
    """
    figure = _figure(path, 0.4 + 2.2 * len(reports))
    axes = figure.subplots(len(reports), 1, sharex=True, sharey=True, squeeze=False)[:, 0]
    total = max(picture.total_ns for picture in pictures)
    for axis, (name, report), picture in zip(axes, reports.items(), pictures, strict=True):
        _memory(axis, report, picture, total)
        axis.set_title(name, loc="left", fontsize=10, color=_GREY)
        for choice in report.choices:
            axis.axhline(choice.limit / scale_of(report.memory.peak_bytes)[0], color=EXPOSED, linestyle="--", linewidth=1)
        if axis is not axes[-1]:
            axis.set_xlabel("")
        if axis is not axes[0]:
            axis.get_legend().remove()
    axes[0].set_ylim(
        0, 1.15 * max(report.memory.peak_bytes / scale_of(report.memory.peak_bytes)[0] for report in reports.values())
    )
    axes[0].set_xlim(0, total / 1e6)
    figure.savefig(path, dpi=_DPI, metadata=_without_date(path))


def _figure(path: str | os.PathLike[str], height: float) -> Any:
    """Make an empty figure of ``height`` inches that can be written to ``path``."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError(
            "report.plot draws with matplotlib, which is not installed: pip install matplotlib (the extra 'examples' has it). "
            "report.html needs nothing."
        ) from error
    figure: Any = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    known = FigureCanvasAgg(figure).get_supported_filetypes()
    if Path(path).suffix[1:].lower() not in known:
        raise ValueError(f"{str(path)!r} has no suffix that matplotlib writes: {', '.join(f'.{each}' for each in known)}.")
    return figure


def _without_date(path: str | os.PathLike[str]) -> dict[str, None]:
    """Return metadata that removes the date, so that equal reports make equal files."""
    keys = {".svg": "Date", ".pdf": "CreationDate"}
    return {keys[suffix]: None} if (suffix := Path(path).suffix.lower()) in keys else {}


def _title(report: Prediction) -> str:
    ranks = " x ".join(f"{number} ({role})" for role, number in report.mesh.items()) or "one"
    step = f"Step {milliseconds(report.time_ns)} on {report.hardware.name}, ranks: {ranks}"
    exposed = f"exposed communication {milliseconds(report.exposed_ns)} ({report.exposed_share:.1%})"
    units = ", ".join(unit.name for unit, _ in fold(report.units))
    return f"{step}: {exposed}, peak memory {size(report.memory.peak_bytes)}.\nUnits: {units}"


def _rows(picture: Picture) -> dict[str, list[Sequence[Span]]]:
    """Return the rows of a picture by name, each of one or more lanes. In a lane, later spans cover earlier ones."""
    rows: dict[str, list[Sequence[Span]]] = {
        "graphs": [picture.compute(Kind.GRAPH, Kind.OPTIMIZER)],
        "units": [[*picture.compute(Kind.UNIT), *picture.compute(Kind.WAIT)]],
    }
    return rows | {name: list(lanes(spans)) for name, spans in picture.groups.items()}


def _timeline(axis: Any, picture: Picture, rows: Mapping[str, Sequence[Sequence[Span]]], total: int) -> None:
    waits = picture.compute(Kind.WAIT)
    axis.broken_barh([_extent(span) for span in waits], (-0.5, len(rows)), color=EXPOSED, alpha=0.15, linewidth=0, gid="waits")
    for row, (name, parts) in enumerate(rows.items()):
        height = 0.84 / len(parts)
        for lane, spans in enumerate(parts):
            _bars(axis, spans, row - 0.42 + lane * height, height)
        if len(parts) == 1 and name in ("graphs", "units"):
            _labels(axis, [span for span in parts[0] if span.kind is not Kind.WAIT], row, total)
    axis.set_yticks(range(len(rows)), list(rows))
    axis.set_ylim(len(rows) - 0.5, -0.5)
    axis.set_xlim(0, total / 1e6)
    title = f"{picture.title}: {milliseconds(picture.total_ns)}, of which {milliseconds(_sum(waits))} exposed"
    axis.set_title(title, loc="left", fontsize=10, color=_GREY)
    _bare(axis)


def _bars(axis: Any, spans: Sequence[Span], bottom: float, height: float) -> None:
    for is_thin in (False, True):
        # An edge keeps the shortest bars visible.
        chosen = [span for span in spans if (span.kind in (Kind.WAIT, Kind.COLLECTIVE)) == is_thin]
        extents, faces = [_extent(span) for span in chosen], [colour(span) for span in chosen]
        axis.broken_barh(
            extents, (bottom, height), facecolors=faces, edgecolors=faces if is_thin else "none", linewidth=0.6 * is_thin
        )


def _labels(axis: Any, spans: Sequence[Span], row: int, total: int) -> None:
    def fits(text: str, duration: int) -> bool:
        return len(text) * _LABELS[text.isdigit()][1] < duration / total

    for text, begin, end in legible(spans, fits, visible_ns=total / 800):
        middle = (begin + end) / 2e6
        fontsize = _LABELS[text.isdigit()][0]
        axis.text(middle, row, text, ha="center", va="center", fontsize=fontsize, color=_TEXT, clip_on=True)


def _memory(axis: Any, report: Prediction, picture: Picture, total: int) -> None:
    base, unit = scale_of(report.memory.peak_bytes)
    times = [*(held.at_ns / 1e6 for held in picture.memory), picture.total_ns / 1e6]
    rows = {name: [held.num_bytes[name] / base for held in picture.memory] for name in report.memory.categories}
    stacked = [[*row, row[-1]] for row in rows.values()]
    axis.stackplot(times, stacked, labels=list(rows), colors=[CATEGORIES[name] for name in rows], step="post", linewidth=0)
    peak = max(picture.memory, key=lambda held: sum(held.num_bytes.values()))
    at, most = peak.at_ns / 1e6, report.memory.peak_bytes / base
    axis.plot([at], [most], "v", color=EXPOSED, markersize=6, clip_on=False)
    side = "left" if at < total / 2e6 else "right"
    axis.annotate(
        f"peak {size(report.memory.peak_bytes)} {report.memory.when}",
        (at, most),
        (8 if side == "left" else -8, 4),
        textcoords="offset points",
        ha=side,
        fontsize=9,
        color=_TEXT,
    )
    axis.set_ylim(0, most * 1.15)
    axis.set_ylabel(unit.strip())
    axis.set_xlabel("ms")
    axis.set_title("memory of a rank, predicted", loc="left", fontsize=10, color=_GREY)
    handles, names = axis.get_legend_handles_labels()
    axis.legend(handles[::-1], names[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=9, frameon=False)
    _bare(axis)


def _legend(figure: Any, pictures: Sequence[Picture]) -> None:
    from matplotlib.patches import Patch

    kinds = {span.sort: None for picture in pictures for spans in picture.groups.values() for span in spans}
    patches = [Patch(color=SORTS[kind], label=WORDS[kind]) for kind in kinds]
    patches.append(Patch(color=EXPOSED, label="exposed"))
    place = {"loc": "upper left", "bbox_to_anchor": (1.0, 1.0)}
    figure.axes[0].legend(handles=patches, fontsize=9, frameon=False, **place)


def _bare(axis: Any) -> None:
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.spines["bottom"].set_color("#c5cad3")
    axis.tick_params(colors=_GREY, length=0, labelsize=9)
    axis.yaxis.label.set_color(_GREY)
    axis.xaxis.label.set_color(_GREY)


def _extent(span: Span) -> tuple[float, float]:
    return span.begin_ns / 1e6, span.duration_ns / 1e6


def _sum(spans: Sequence[Span]) -> int:
    return sum(span.duration_ns for span in spans)
