"""Time what needs no training: ``explain``, its formulae, a memory budget's search, and ``python -m fsdp_compile.plan``.

    python benchmarks/explain_time.py                            # a 1B Llama
    python benchmarks/explain_time.py --models 1b,70b --skip plan
    python benchmarks/explain_time.py --models tiny              # to see that it runs

Each line is one call in one process with one thread, after a first call that imports what is needed. Inductor's cache is empty
at first. The columns:

    explain      without suggestions
    suggest      with suggestions
    formulae     ``report.formulae``, which traces again
    budget       ``explain`` with ``options["memory_budget"]`` at nine tenths of what the step holds
    again        the same once more: the cache has what the search found
    plan         for 8, 64 and 1,024 GPUs, with the traces of the best points
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from harness import report
from harness.flags import names_of
from harness.llama import LlamaSize
from torch._inductor.utils import fresh_cache

from fsdp_compile.explain import explain
from fsdp_compile.explain.make_report import hardware_of
from fsdp_compile.plan.policies import Policy
from fsdp_compile.plan.search import Search
from fsdp_compile.plan.winners import check_winner

_BILLION = LlamaSize(batch=4, sequence=2048)
_TINY = replace(_BILLION, layers=10, width=64, heads=4, kv_heads=2, hidden=128, vocabulary=512, sequence=64)
# Size of the model and the batch of a rank, and the number of ranks.
_MODELS = {
    "tiny": (_TINY, 8),
    "1b": (_BILLION, 8),
    "70b": (replace(_BILLION, batch=1, layers=80, width=8192, heads=64, hidden=28672, tied=False), 64),
}
_COLUMNS = ("explain", "suggest", "formulae", "budget", "again", "plan")
_GPUS, _GLOBAL_BATCH, _MEMORY = (8, 64, 1024), 2048, 72 * 2**30


def seconds(run: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call, and what it returns."""
    begin = time.perf_counter()
    result = run()
    return time.perf_counter() - begin, result


def plan(model: Any, inputs: Any) -> None:
    """Do what the command does for each number of GPUs."""
    search = Search(model, inputs, hardware_of("h100"), _GLOBAL_BATCH, _MEMORY, Policy(False, True, False))
    for gpus in _GPUS:
        for point in search.best(gpus, 1):
            check_winner(search, point)


def measure(name: str, columns: list[str]) -> dict[str, float]:
    """Return the seconds of each column for a model."""
    size, shards = _MODELS[name]
    model = size.build(torch.device("meta"))
    tokens = torch.empty(size.batch, size.sequence, dtype=torch.long, device="meta")

    def explained(**given: Any) -> Any:
        return explain(model, (tokens, tokens), (shards,), "h100", **{"suggest": False, **given})

    took: dict[str, float] = {}
    took["explain"], told = seconds(explained)
    budget = {"memory_budget": int(0.9 * told.memory.peak_bytes)}
    runs: dict[str, Callable[[], Any]] = {
        "suggest": lambda: explained(suggest=True),
        "formulae": lambda: told.formulae,
        "budget": lambda: explained(options=budget),
        "again": lambda: explained(options=budget),
        "plan": lambda: plan(model, (tokens, tokens)),
    }
    for column in columns:
        if column in runs:
            took[column], _ = seconds(runs[column])
            print(f"{name}, {column}: {took[column]:.1f} s", flush=True)
    return took


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=names_of("model", _MODELS), default=["1b"], help=", ".join(_MODELS))
    parser.add_argument("--skip", type=names_of("column", _COLUMNS), default=[], help="columns to leave out")
    report.add_flags(parser)
    args = parser.parse_args()
    torch.set_num_threads(1)
    columns = [column for column in _COLUMNS if column not in args.skip]
    measure("tiny", ["explain"])
    with fresh_cache():
        found = {name: measure(name, columns) for name in args.models}
    print(report.headline())
    rows = [[name, *(f"{took[column]:.1f}" for column in columns)] for name, took in found.items()]
    print(report.table(["seconds", *columns], rows))
    report.write_json(args.json, seconds=found)


if __name__ == "__main__":
    main()
