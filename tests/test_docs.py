"""The pages that are written by programs say what the code does now."""

import importlib.util
from pathlib import Path

import pytest
import torch

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13"), reason="docs/passes.md shows the graphs of torch 2.13; names differ in others"
)
def test_passes_page_is_up_to_date() -> None:
    spec = importlib.util.spec_from_file_location("render_passes", DOCS / "render_passes.py")
    assert spec is not None and spec.loader is not None
    render_passes = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(render_passes)
    assert render_passes.PAGE.read_text() == render_passes.render(), "run: python docs/render_passes.py"
