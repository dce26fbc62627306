"""Tables for people, JSON for programs."""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all raw numbers there")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table. Columns are as wide as their widest entry; the first is aligned left, the others right."""
    widths = [max(len(row[column]) for row in (header, *rows)) for column in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def environment() -> dict[str, Any]:
    """Return the command, machine and versions that a figure depends on."""
    machine: dict[str, Any] = {"cpu": _cpu(), "cores": os.cpu_count()}
    if torch.cuda.is_available():
        machine["gpu"] = torch.cuda.get_device_name(0)
    return {
        "command": " ".join(["python", f"benchmarks/{Path(sys.argv[0]).name}", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "machine": machine,
    }


def _cpu() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    for line in cpuinfo.read_text().splitlines() if cpuinfo.exists() else []:
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def headline() -> str:
    """Return the environment in a line."""
    now = environment()
    gpu = f", {now['machine']['gpu']}" if "gpu" in now["machine"] else ""
    return f"torch {now['torch']}, {now['machine']['cores']} cores of {now['machine']['cpu']}{gpu}, {now['date']}"


def write_json(path: Path | None, **results: Any) -> None:
    """Write results with the environment that they were measured in. Write nothing without a path."""
    if path is not None:
        path.write_text(json.dumps({**environment(), **results}, indent=1) + "\n")
