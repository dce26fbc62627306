"""Say in words which rank differs from others, from the reports that ranks wrote when they failed.

FSDP_COMPILE_REPORT=reports torchrun ...
python -m fsdp_compile.diagnose reports
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .runtime.agreement import ranks_text
from .runtime.board import IN_PROGRAM

# The last collectives of a program that are shown.
_SHOWN_COLLECTIVES = 8


def diagnose(reports: Mapping[int, Mapping[str, Any]]) -> str:
    """Return what the reports of ranks tell, as text.

    Args:
        reports: the contents of the reports, by rank.
    """
    world_size = next(iter(reports.values()))["world_size"]
    missing = [rank for rank in range(world_size) if rank not in reports]
    lines = [f"Reports of {ranks_text(sorted(reports))} of {world_size}."]
    if missing:
        verb = "has written none: it" if len(missing) == 1 else "have written none: each"
        lines.append(f"{ranks_text(missing).capitalize()} {verb} was killed or stopped, raised by itself, or runs on.")
    for reason, ranks in _grouped((report["reason"], rank) for rank, report in reports.items()):
        lines += [
            "",
            f"Reason, as {ranks_text(ranks)} has it:" if len(ranks) == 1 else f"Reason, as {ranks_text(ranks)} have it:",
        ]
        lines += [f"  {line}" for line in reason.splitlines()]
    groups = _grouped(
        ((group["group"], tuple(group["ranks"])), (rank, group))
        for rank, report in reports.items()
        for group in report["groups"]
    )
    for (label, ranks), members in groups:
        lines += ["", f"Process group {label} ({ranks_text(ranks)}):"]
        lines += [f"  {line}" for line in _compare(dict(members), {rank: reports[rank]["time"] for rank, _ in members})]
    lines += ["", "Where they were:"]
    for rank, report in sorted(reports.items()):
        memory = ", ".join(f"{what} {size / 2**30:.2f} GiB" for what, size in report["memory"].items())
        lines.append(f"  rank {rank} ({report['host']}, process {report['process']}): {report['place']}; memory: {memory}")
    return "\n".join(lines)


def _compare(histories: Mapping[int, Mapping[str, Any]], times: Mapping[int, float]) -> list[str]:
    """Say where histories over one process group differ first, or who is behind.

    Args:
        histories: the history of each rank.
        times: the time of each rank's report, in seconds.
    """
    steps = {rank: {step["number"]: step for step in group["steps"]} for rank, group in histories.items()}
    common = sorted(set.intersection(*map(set, steps.values())))
    parted = next((number for number in common if len({steps[rank][number]["history"] for rank in steps}) > 1), None)
    lines = []
    if parted is not None:
        lines.append(f"The ranks differ first at program {parted}:")
        for what, ranks in _grouped((steps[rank][parted]["what"], rank) for rank in steps):
            lines.append(f"  {ranks_text(ranks)}: {what}")
    elif common:
        lines.append(f"The ranks have run the same programs, up to program {common[-1]}.")
    for rank, group in sorted(histories.items()):
        last = group["steps"][-1]
        text = (
            f"rank {rank}: program {last['number']}, begun {times[rank] - last['time']:.1f} s before the report: {last['what']}"
        )
        if group["asking"] is not None:
            text += f"; waits in a comparison of {group['asking'][1]}"
        elif group["waits"]:
            text += "; waits in the program" if group["waits"] == IN_PROGRAM else "; waits in a collective of torch"
        lines.append(text)
        collectives = group["collectives"]
        lines += [f"    {number}: {line}" for number, line in enumerate(collectives[:_SHOWN_COLLECTIVES], start=1)]
        if len(collectives) > _SHOWN_COLLECTIVES:
            lines.append(f"    and {len(collectives) - _SHOWN_COLLECTIVES} more")
    return lines


def _grouped(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[Any, list[Any]]]:
    """Return the second values of pairs, by the first."""
    found: dict[Any, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return list(found.items())


def load(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the reports in a folder, by rank.

    Raises:
        FileNotFoundError: there are none.
    """
    reports = [json.loads(path.read_text()) for path in sorted(folder.glob("rank*.json"))]
    if not reports:
        raise FileNotFoundError(f"There are no reports (rank0.json, ...) in {folder}.")
    return {report["rank"]: report for report in sorted(reports, key=lambda report: report["rank"])}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m fsdp_compile.diagnose", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="the folder that FSDP_COMPILE_REPORT named")
    args = parser.parse_args(argv)
    try:
        print(diagnose(load(args.folder)))
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
