"""Python's garbage collector while graphs are compiled."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Pause the garbage collector inside of the ``with`` block.

    Passes make hundreds of thousands of nodes and fake tensors that live on. The collector would visit them over and over, for
    an eighth of the time that compiling takes.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
