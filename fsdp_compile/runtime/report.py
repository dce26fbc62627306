"""Reports: what a rank has run last, written to a folder when it fails together with others.

The environment variable ``FSDP_COMPILE_REPORT`` names the folder. ``python -m fsdp_compile.diagnose FOLDER`` reads the reports
of all ranks.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import socket
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from passes.fx.torch_internals.objects import running_frames

from .pulse import place

#: The environment variable with the folder.
REPORT_VARIABLE = "FSDP_COMPILE_REPORT"

logger = logging.getLogger(__name__)


class HasHistory(Protocol):
    """The log of a process group."""

    def history(self) -> dict[str, Any]: ...


def write_report(reason: str, logs: Iterable[HasHistory]) -> None:
    """Write the report of this rank, if the user wants reports. It replaces an earlier one.

    Args:
        reason: why the rank fails.
        logs: the logs of the process groups that fail.
    """
    folder = os.environ.get(REPORT_VARIABLE)
    if not folder:
        return
    rank = dist.get_rank()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    report = {
        "rank": rank,
        "world_size": dist.get_world_size(),
        "host": socket.gethostname(),
        "process": os.getpid(),
        "time": time.time(),
        "torch": torch.__version__,
        "reason": reason,
        "place": place(),
        "memory": _memory(),
        "groups": [log.history() for log in logs],
        "stacks": {names.get(thread, thread): traceback.format_stack(frame) for thread, frame in running_frames().items()},
    }
    path = Path(folder) / f"rank{rank}.json"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps(report, indent=1))
        part.replace(path)
    except OSError as error:
        logger.warning(f"Rank {rank} cannot write its report to {folder}: {error}")


def _memory() -> dict[str, int]:
    """Return bytes of memory, by what they are of."""
    # Linux counts in KiB.
    found = {"most of the host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    if torch.cuda.is_available():
        found |= {"device": torch.cuda.memory_allocated(), "most of the device": torch.cuda.max_memory_allocated()}
    return found
