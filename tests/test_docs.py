"""Generated pages are up to date, and the names, files and links on all pages exist."""

from __future__ import annotations

import importlib.util
import pkgutil
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md")), *sorted((ROOT / "benchmarks").rglob("*.md"))]
FOLDERS = ["passes", "fsdp_compile", "tests", "docs", "benchmarks", "examples", ".ci"]
FILES: dict[str, list[Path]] = defaultdict(list)
for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*"))]:
    FILES[path.name].append(path)


@pytest.mark.inductor
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="docs/passes.md shows the graphs of torch 2.13; names differ in others"
)
def test_passes_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("render_passes", DOCS / "render_passes.py")
    assert spec is not None and spec.loader is not None
    render_passes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render_passes)
    assert render_passes.PAGE.read_text() == render_passes.render(), "run: python docs/render_passes.py"


def prose(page: Path) -> str:
    """Return the text of a page without its listings."""
    return re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def code_spans(page: Path) -> list[str]:
    return re.findall(r"`([^`]+)`", prose(page))


def named_files(page: Path) -> Iterator[tuple[str, str]]:
    """Yield the files of the repository that a page names, each with the test that it names in the file.

    Paths count anywhere, bare names in code spans alone.
    """
    yield from re.findall(rf"(?<![\w./-])((?:{'|'.join(map(re.escape, FOLDERS))})/[\w./-]*\w)(?:::(\w+))?", page.read_text())
    for span in code_spans(page):
        # Names with these prefixes are files of torch's tests.
        yield from re.findall(r"(?<![\w./-])((?!_|test_fully_shard)\w+\.(?:py|md|toml|txt))\b(?:::(\w+))?", span)


def anchors(page: Path) -> set[str]:
    """Return the ids of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_that_are_named_exist(page: Path) -> None:
    for path, test in named_files(page):
        found = [ROOT / path] if "/" in path else FILES.get(path, [])
        assert any(file.exists() for file in found), path
        assert not test or any(f"def {test}(" in file.read_text() for file in found), f"{path}::{test}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_are_short(page: Path) -> None:
    """Lines of prose have at most 128 characters; tables and listings may have more."""
    assert not [line for line in prose(page).splitlines() if len(line) > 128 and not line.startswith("|")]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_that_are_named_exist(page: Path) -> None:
    named = {name for span in code_spans(page) for name in re.findall(r"(?<![\w./])test_\w+(?!\.py|\w)", span)}
    assert named <= {
        name for file in (ROOT / "tests").rglob("*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if "://" not in path:
            linked = page.parent / path if path else page
            assert linked.exists(), target
            assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_names_of_python_exist(page: Path) -> None:
    for name in re.findall(r"\b(?:passes|fsdp_compile)(?:\.\w+)+", "\n".join(code_spans(page))):
        if not name.endswith((".py", ".md")):
            pkgutil.resolve_name(name)
