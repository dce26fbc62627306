"""Run a training script of which, in the first two attempts of torchrun, a rank kills itself where it hurts.

    torchrun --max-restarts 3 tests/common/killed_ranks.py examples/train_gpt.py --resume auto ...

At first rank 0, once all files of the first checkpoint are there and before it counts; then rank 1 in the middle
of its fifth step, while rank 0 waits for its part of the gradients' norm.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn


def kill_at(count: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that kills this process at the given call, and calls ``function`` before."""
    calls = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)

    return counted


where = (os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"])
if where == ("0", "0"):
    os.rename = kill_at(2, os.rename)  # The first time, torch renames the metadata, which it writes last.
elif where == ("1", "1"):
    nn.utils.clip_grad_norm_ = kill_at(5, nn.utils.clip_grad_norm_)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
