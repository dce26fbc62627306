"""Run a training script in which a rank kills itself at a bad moment, in each of torchrun's first two attempts.

    torchrun --max-restarts 3 tests/common/killed_ranks.py examples/train_gpt.py --resume auto ...

In the first attempt it is rank 0, when all files of the first checkpoint exist and it is not complete yet. In the second it is
rank 1, in the middle of its fifth step, while rank 0 waits for its part of the gradients' norm.
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
    """Wrap ``function`` so that call number ``count`` kills this process instead."""
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
    os.rename = kill_at(2, os.rename)  # The first rename is torch's: of the metadata, which it writes last.
elif where == ("1", "1"):
    nn.utils.clip_grad_norm_ = kill_at(5, nn.utils.clip_grad_norm_)
sys.argv = sys.argv[1:]
sys.path[0] = str(Path(sys.argv[0]).parent)
runpy.run_path(sys.argv[0], run_name="__main__")
