"""Figures and pages of a step: they show the step's tracks, and names in them are never taken for markup."""

from __future__ import annotations

import json
import re
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile import fully_shard
from fsdp_compile.explain import Report, explain
from fsdp_compile.explain.plot import draw_memory
from fsdp_compile.explain.tracks import Kind, Span, legible, predicted
from tests.fsdp_compile.explain.test_explain import report_of

pytestmark = pytest.mark.units_apart

Attributes = dict[str, str]
_VOID = {"meta", "link"}


class Page(HTMLParser):
    """The elements and the text of a page. Parsing asserts that every element is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, Attributes]] = []
        self.text: list[tuple[str, str]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert not self._open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in _VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.text.append((self._open[-1] if self._open else "", data))

    def rects(self, kind: Kind) -> list[tuple[str, int, int]]:
        """Return name, begin (ns) and duration (ns) of the rectangles of a kind."""
        found = [about for tag, about in self.elements if tag == "rect" and about["class"] == kind.value]
        return [(about["data-name"], *map(int, about["data-ns"].split())) for about in found]  # type: ignore[misc]


def page_of(report: Report, folder: Path, **given: Any) -> tuple[Page, str]:
    report.html(folder / "step.html", **given)
    text = (folder / "step.html").read_text()
    return Page(text), text


@pytest.mark.parametrize("case", ["h100", "hsdp", "microbatches"])
def test_page_shows_the_tracks(case: str, tmp_path: Path) -> None:
    report = report_of(case)
    assert report._source is not None
    page, _ = page_of(report, tmp_path)
    picture = predicted(report, report._source)
    for kind in (Kind.GRAPH, Kind.UNIT, Kind.WAIT, Kind.OPTIMIZER, Kind.COLLECTIVE):
        told = [span for spans in picture.tracks.values() for span in spans if span.kind is kind]
        assert sorted(page.rects(kind)) == sorted((span.name, span.begin_ns, span.duration_ns) for span in told)
    assert page.rects(Kind.KERNEL) == []
    assert sum(duration for _, _, duration in page.rects(Kind.WAIT)) == report.exposed_ns
    assert len(page.rects(Kind.COLLECTIVE)) == report.total.collectives


def test_bars_are_where_their_times_are(tmp_path: Path) -> None:
    report = report_of("h100")
    page, _ = page_of(report, tmp_path)
    for tag, about in page.elements:
        if tag == "rect":
            begin, duration = map(int, about["data-ns"].split())
            assert float(about["x"]) == pytest.approx(begin / report.time_ns * 1e6, abs=0.01)
            assert float(about["width"]) == pytest.approx(duration / report.time_ns * 1e6, abs=0.01)


def test_page_holds_what_is_printed(tmp_path: Path) -> None:
    x = torch.empty(16, 64, device="meta")
    report = explain(nn.Linear(64, 64, device="meta"), x, (8,), "h100")
    page, _ = page_of(report, tmp_path)
    words = " ".join(data for _, data in page.text)
    shown = re.sub(r"\s+", " ", words)
    for line in str(report).splitlines():
        for cell in re.split(r"\s{2,}", line.removeprefix("- ").strip()):
            assert cell in shown, cell
    memory = json.loads(next(data for _, data in page.text if data.startswith('{"names"')))
    assert memory["names"] == list(report.memory.categories)
    assert max(sum(held[1:]) for held in memory["held"]) == report.memory.peak_bytes


def test_page_needs_nothing_else(tmp_path: Path) -> None:
    page, text = page_of(report_of("h100"), tmp_path)
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch\(|XMLHttpRequest", text)
    links = [(tag, about) for tag, about in page.elements if {"src", "href", "xlink:href"} & set(about)]
    assert links == [("link", {"rel": "icon", "href": "data:,"})]
    policy = next(about["content"] for tag, about in page.elements if about.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_page_escapes_names(tmp_path: Path) -> None:
    name = "</script><b>&\"'"

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleDict({name: nn.Linear(64, 64)})

        def forward(self, x: Tensor) -> Tensor:
            return self.parts[name](x)

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.parts[name], mesh=mesh)
        fully_shard(model, mesh=mesh)

    report = explain(Named(), torch.empty(4, 64), (2,), "h100", shard=shard, suggest=False)
    page, text = page_of(report, tmp_path)
    assert name not in text and "b" not in {tag for tag, _ in page.elements}
    assert f"parts.{name}" in {unit for unit, _, _ in page.rects(Kind.UNIT)}
    assert f"parts.{name}" in [data for _, data in page.text]


def test_labels_are_of_what_has_room() -> None:
    spans = [
        Span("blocks.0", Kind.UNIT, 0, 40),
        Span("blocks.1", Kind.UNIT, 40, 1),
        Span("blocks.0", Kind.UNIT, 41, 59),
        Span("blocks.1", Kind.UNIT, 100, 30),
        Span("blocks.2", Kind.UNIT, 130, 5),
    ]
    found = legible(spans, lambda text, duration: len(text) * 10 <= duration, visible_ns=2)
    assert found == [("blocks.0", 0, 100), ("1", 100, 130)]


def test_figure(tmp_path: Path) -> None:
    report = report_of("h100")
    for suffix in ("png", "svg", "pdf"):
        report.plot(tmp_path / f"step.{suffix}")
    png, svg = (tmp_path / "step.png").read_bytes(), (tmp_path / "step.svg").read_text()
    assert struct.unpack(">I", png[16:20]) == (1600,)
    # Matplotlib draws text as curves, and writes the text into comments.
    comments = set(re.findall(r"<!-- (.*?) -->", svg))
    assert {"units", "group shard", "forward 0", "backward 1", "exposed", "gather", "reduction"} <= comments
    assert {"blocks.1", *report.memory.categories} <= comments
    assert any(comment.startswith("peak ") for comment in comments)
    waits = svg[svg.index('id="waits"') :]
    group = waits[: waits.index("</g>\n   <g id=")]
    assert len(re.findall("<path|<use", group)) == len([one for one in report.exposures if one.exposed_ns])


def test_memory_of_several_steps(tmp_path: Path) -> None:
    reports = {"within much": report_of("h100"), "within little": report_of("h100")}
    draw_memory(tmp_path / "memory.svg", reports, [predicted(report, report._source) for report in reports.values()])
    comments = re.findall(r"<!-- (.*?) -->", (tmp_path / "memory.svg").read_text())
    assert {*reports, *report_of("h100").memory.categories, "ms"} <= set(comments)
    assert sum(comment.startswith("peak ") for comment in comments) == 2


def test_equal_reports_make_equal_figures(tmp_path: Path) -> None:
    for name in ("one.png", "other.png"):
        report_of("h100").plot(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


@pytest.mark.parametrize("name", ["step", "step.docx"])
def test_figure_of_no_known_kind(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name}' has no suffix that matplotlib writes: .*png"):
        report_of("h100").plot(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_figure_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("matplotlib")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match="pip install matplotlib"):
        report_of("h100").plot(tmp_path / "step.png")
    report_of("h100").html(tmp_path / "step.html")
