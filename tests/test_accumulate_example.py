"""The accumulation example runs as a user would run it, and docs/gradient-sync.md shows what it prints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.example, pytest.mark.night]

ROOT = Path(__file__).parent.parent
# All-gathers (forward + backward), reduce-scatters and all-reduces of each microbatch; five units, of which the root keeps its
# parameters from forward to backward.
EACH_GATHERS = "5+4 5+4 5+4 5+4"
COLLECTIVES = {
    "sharded": [EACH_GATHERS, "5 5 5 5", "5 5 5 5"],
    "partial": [EACH_GATHERS, "5 5 5 5", "0 0 0 5"],
    "unsharded": [EACH_GATHERS, "0 0 0 5", "0 0 0 5"],
    "keep_unsharded": ["5+0 0+0 0+0 0+0", "0 0 0 5", "0 0 0 5"],
    "every_second_block_defers": [EACH_GATHERS, "3 3 3 5", "3 3 3 5"],
}


def read_table(text: str) -> dict[str, list[str]]:
    """Return the cells of a Markdown table by the first cell of their row, without the two rows of the header."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {row[0]: row[1:] for row in rows[2:]}


@pytest.fixture(scope="module")
def printed() -> dict[str, list[str]]:
    command = [sys.executable, str(ROOT / "examples/accumulate_hsdp.py"), "--lowering", "aot_eager"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return read_table(done.stdout)


def test_collectives_of_each_microbatch(printed: dict[str, list[str]]) -> None:
    assert {way: cells[:3] for way, cells in printed.items()} == COLLECTIVES


def test_memory_is_what_was_predicted(printed: dict[str, list[str]]) -> None:
    for cells in printed.values():
        for cell in cells[3:5]:
            measured, predicted = cell.split()
            assert predicted == f"({measured})"


def test_page_shows_what_is_printed(printed: dict[str, list[str]]) -> None:
    page = (ROOT / "docs/gradient-sync.md").read_text()
    shown = read_table(page.partition("<!-- table -->")[2].partition("<!-- end of table -->")[0])
    assert {way: cells[:-1] for way, cells in shown.items()} == {way: cells[:-1] for way, cells in printed.items()}
    for way, cells in shown.items():
        # The last digits of the norm depend on the machine.
        assert float(cells[-1]) == pytest.approx(float(printed[way][-1]), rel=1e-3)
