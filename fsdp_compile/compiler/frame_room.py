"""Room for Python's frames while graphs are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: What a frame asks for, in words: half a MiB, so that it is given a MiB of its own, of which the other half is left.
_WORDS = 1 << 16


def with_room_for_frames(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let calls below a function take their frames from one large piece of memory.

    Since CPython 3.11 frames lie in chunks of 16 KiB, each of which is mapped when a call needs it and unmapped when that call
    returns. Where the stack happens to be at the end of a chunk, a loop maps and unmaps memory with every call. Depth is
    Dynamo's and the user's, and compiling makes millions of calls: they can come to take more than twice the time.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return functools.wraps(function)(call)
