"""Memory for Python's frames while graphs are compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_P = ParamSpec("_P")
_T = TypeVar("_T")

#: Stack size of a frame, in words: half a MiB. CPython allocates a chunk of one MiB for it, half of which is left for calls.
_WORDS = 1 << 16


def in_large_frame_chunk(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorate a function so that calls inside of it take their frames from one large chunk of memory.

    Since CPython 3.11, frames lie in chunks of 16 KiB. A chunk is mapped when a call needs it, and unmapped when that call
    returns. If the stack happens to be at the end of a chunk, a loop maps and unmaps memory with every call. The depth of the
    stack depends on Dynamo and on the user. As compiling makes millions of calls, it can take more than twice the time.
    """

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        return function(*args, **kwargs)

    call.__code__ = call.__code__.replace(co_stacksize=_WORDS)
    return functools.wraps(function)(call)
