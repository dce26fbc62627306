"""A step as one page of HTML: timeline and memory as inline SVG, and the tables of the printed report.

The page fetches nothing, and may run no script but its own, which zooms and shows details under the pointer. Without scripts,
the page shows the whole step. Bars are drawn by unit, not by kernel.

Horizontal positions within a chart are millionths of the step, and a zoom sets another view box. Nanoseconds would not do, as
browsers cut off such large numbers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape

from .colours import CATEGORIES, EXPOSED, SORTS, colour
from .exposure import WORDS, milliseconds
from .measured import Measured
from .page import PAGE
from .prediction import Prediction
from .render import Table, headline, size, tables, verdict
from .tracks import Kind, Picture, Span, lanes, legible

_LEFT, _WIDTH, _ROW, _GAP, _MEMORY, _HEAD = 120, 1260, 30, 6, 220, 26
_ACROSS = 1_000_000
#: The height of the memory chart's view box, large enough for paths of whole numbers.
_LEVELS = 4000
_CHARACTER = 6.6


def page(report: Prediction, pictures: Sequence[Picture], measured: Measured | None) -> str:
    """Return the page as text.

    Args:
        report: the predicted step.
        pictures: pictures of the step, the predicted one first.
        measured: the measured step; None: the page shows only the prediction.
    """
    title, *lines = filter(None, headline(report).splitlines())
    shown = [*tables(report)] if measured is None else [measured.table, *tables(report)]
    return PAGE.substitute(
        title=escape(title),
        lines="".join(f"<p>{escape(line)}</p>\n" for line in lines),
        chart=_chart(report, pictures),
        legend=_legend(report, pictures),
        verdict=_verdict(verdict(report)),
        tables="\n".join(map(_table, shown)),
        data=_data(report, pictures[0]),
    )


def _chart(report: Prediction, pictures: Sequence[Picture]) -> str:
    total = max(picture.total_ns for picture in pictures)
    parts, top = list[str](), 0
    for picture in pictures:
        waited = sum(span.duration_ns for span in picture.compute(Kind.WAIT))
        text = f"{picture.title}: {milliseconds(picture.total_ns)}, of which {milliseconds(waited)} exposed"
        parts.append(f'<text class="head" x="{_LEFT}" y="{top + 17}">{escape(text)}</text>')
        top += _HEAD
        for name, rows in _rows(picture):
            middle = top + _ROW / 2
            parts.append(f'<text class="row" x="{_LEFT - 10}" y="{middle}">{escape(name)}</text>')
            parts.append(_view(top, _ROW, _ROW, "track", "".join(_bars(rows, total))))
            # Bars of groups are too short for names.
            if name in ("graphs", "units"):
                parts.append(f'<g class="labels" data-y="{middle}">{"".join(_labels(rows[0], total, middle))}</g>')
            top += _ROW + _GAP
    parts.append(f'<text class="head" x="{_LEFT}" y="{top + 17}">memory of a rank, predicted</text>')
    top += _HEAD
    parts.append(_view(top, _MEMORY, _LEVELS, "memory", "".join(_areas(report, pictures[0], total))))
    parts += _memory_axis(report, top)
    top += _MEMORY
    parts.append(f'<g id="axis" data-y="{top}">{"".join(_time_axis(total, top))}</g>')
    height = top + 24
    numbers = {"left": _LEFT, "width": _WIDTH, "total": total, "across": _ACROSS, "character": _CHARACTER}
    data = " ".join(f'data-{name}="{number}"' for name, number in numbers.items())
    content = "\n".join(parts)
    return f'<svg id="chart" viewBox="0 0 {_LEFT + _WIDTH + 20} {height}" role="img" {data}>\n{content}\n</svg>'


def _view(top: int, height: int, levels: int, kind: str, content: str) -> str:
    """Return a part of the chart that has coordinates of its own."""
    place = f'x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{height}"'
    box = f'viewBox="0 0 {_ACROSS} {levels}" preserveAspectRatio="none"'
    return f'<svg class="view {kind}" {place} {box}>{content}</svg>'


def _rows(picture: Picture) -> Iterator[tuple[str, list[list[Span]]]]:
    """Yield the rows of a picture by name. Spans of a row nest, or lie in several lanes where they overlap."""
    yield "graphs", [picture.compute(Kind.GRAPH, Kind.OPTIMIZER)]
    yield "units", [[*picture.compute(Kind.UNIT), *picture.compute(Kind.WAIT)]]
    for name, spans in picture.groups.items():
        yield name, lanes(spans)


def _bars(rows: Sequence[Sequence[Span]], total: int) -> Iterator[str]:
    height = _ROW / len(rows)
    for lane, spans in enumerate(rows):
        for span in spans:
            across = f'x="{_across(span.begin_ns, total)}" width="{_across(span.duration_ns, total)}"'
            place = f'{across} y="{lane * height:g}" height="{height:g}" fill="{colour(span)}" stroke="{colour(span)}"'
            about = f'data-name="{escape(span.name)}" data-ns="{span.begin_ns} {span.duration_ns}"'
            yield f'<rect class="{span.kind.value}" {place} {about}><title>{escape(_tip(span))}</title></rect>'


def _across(ns: int, total: int) -> str:
    return f"{ns / total * _ACROSS:.2f}".rstrip("0").rstrip(".")


def _tip(span: Span) -> str:
    lines = [span.name, f"{milliseconds(span.duration_ns)}, from {_at(span.begin_ns)} to {_at(span.end_ns)}"]
    lines += [] if span.sent_bytes is None else [f"sends {size(span.sent_bytes)}"]
    lines += [f"because {span.note}"] if span.note else []
    return "\n".join(lines)


def _at(ns: int) -> str:
    return f"{ns / 1e6:,.3f} ms"


def _labels(spans: Sequence[Span], total: int, middle: float) -> Iterator[str]:
    """Draw labels that fit; the script redraws them after a zoom."""

    def fits(text: str, duration: int) -> bool:
        return len(text) * _CHARACTER + 6 < duration / total * _WIDTH

    named = [span for span in spans if span.kind is not Kind.WAIT]
    for text, begin, end in legible(named, fits, visible_ns=2 * total / _WIDTH):
        yield f'<text x="{_LEFT + (begin + end) / 2 / total * _WIDTH:.1f}" y="{middle}">{escape(text)}</text>'


def _areas(report: Prediction, picture: Picture, total: int) -> Iterator[str]:
    """Draw each category as an area from the ground to its top in the stack. Lower areas are drawn later, over upper ones."""
    scale = _LEVELS / (1.1 * report.memory.peak_bytes)
    stacked = [0] * len(picture.memory)
    paths = []
    for name in report.memory.categories:
        stacked = [below + held.num_bytes[name] for below, held in zip(stacked, picture.memory, strict=True)]
        heights = [_LEVELS - round(value * scale) for value in stacked]
        paths.append(f'<path d="{_steps(picture, heights, total)}" fill="{CATEGORIES[name]}"/>')
    yield from reversed(paths)


def _steps(picture: Picture, heights: Sequence[int], total: int) -> str:
    parts, level = [f"M{_across(picture.memory[0].at_ns, total)} {_LEVELS}"], _LEVELS
    for held, height in zip(picture.memory, heights, strict=True):
        if height != level:
            parts.append(f"H{_across(held.at_ns, total)}V{height}")
            level = height
    return "".join([*parts, f"H{_across(picture.total_ns, total)}V{_LEVELS}Z"])


def _memory_axis(report: Prediction, top: int) -> Iterator[str]:
    peak = report.memory.peak_bytes
    for part in (0.0, 0.5, 1.0):
        y = top + _MEMORY * (1 - part / 1.1)
        yield f'<line class="level" x1="{_LEFT}" x2="{_LEFT + _WIDTH}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="row" x="{_LEFT - 10}" y="{y:.1f}">{escape(size(round(peak * part)))}</text>'


def _time_axis(total: int, top: int) -> Iterator[str]:
    step = _round(total / 8)
    for index in range(int(total / step) + 1):
        x = _LEFT + index * step / total * _WIDTH
        yield f'<text x="{x:.1f}" y="{top + 16}">{index * step / 1e6:g} ms</text>'


def _round(value: float) -> float:
    """Round up to 1, 2 or 5 times a power of ten."""
    power = 10.0 ** (len(str(int(value))) - 1)
    return next(number * power for number in (1, 2, 5, 10) if number * power >= value)


def _legend(report: Prediction, pictures: Sequence[Picture]) -> str:
    kinds = dict.fromkeys(span.sort for picture in pictures for spans in picture.groups.values() for span in spans)
    entries = [("exposed", EXPOSED), *((WORDS[kind], SORTS[kind]) for kind in kinds)]
    entries += [(name, CATEGORIES[name]) for name in report.memory.categories]
    return "".join(f'<span><i style="background:{colour}"></i>{escape(name)}</span>\n' for name, colour in entries)


def _verdict(text: str) -> str:
    parts = []
    for line in filter(None, text.splitlines()):
        parts.append(f"<li>{escape(line[2:])}</li>" if line.startswith("- ") else f"</ul><p>{escape(line)}</p><ul>")
    joined = f"<ul>{''.join(parts)}</ul>"
    return joined.replace("<ul></ul>", "")


def _table(table: Table) -> str:
    head, *rows = table.rows
    first = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    note = f"<p class='note'>{escape(table.note)}</p>" if table.note else ""
    return f"<div class='table'><table><thead><tr>{first}</tr></thead><tbody>\n{body}\n</tbody></table>{note}</div>"


def _data(report: Prediction, picture: Picture) -> str:
    """Return memory over time for the script, as JSON without a character that could end its element."""
    names = list(report.memory.categories)
    held = [[held.at_ns, *(held.num_bytes[name] for name in names)] for held in picture.memory]
    return json.dumps({"names": names, "held": held}, separators=(",", ":")).replace("<", "\\u003c")
