"""Draw docs/memory_budgets.png: the memory of a step over time, under three budgets.

PYTHONPATH=benchmarks python docs/render_budgets.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness.llama import LlamaSize

from fsdp_compile.explain import Report, explain
from fsdp_compile.explain.plot import draw_memory
from fsdp_compile.explain.render import size
from fsdp_compile.explain.tracks import predicted

PICTURE = Path(__file__).parent / "memory_budgets.png"
_UNLIMITED = 1 << 50


def explained(budget: int) -> Report:
    model_size = LlamaSize(batch=4, sequence=2048)
    tokens = torch.empty(model_size.batch, model_size.sequence, dtype=torch.long, device="meta")
    options: dict[str, Any] = {"memory_budget": budget}
    model = model_size.build(torch.device("meta"))
    return explain(model, (tokens, tokens), mesh_shape=(8,), hardware="h100", options=options, suggest=False)


def main() -> None:
    (choice,) = explained(_UNLIMITED).choices
    frontier = choice.frontier()
    least, most = frontier[0].peak_bytes, frontier[-1].peak_bytes
    reports = {}
    for budget in (most, (least + most) // 2, least):
        report = explained(budget)
        print(report)
        reports[f"memory of a rank within {size(budget)}: {report.time_ns / 1e6:.0f} ms"] = report
    draw_memory(PICTURE, reports, [predicted(report, report._source) for report in reports.values()])


if __name__ == "__main__":
    main()
