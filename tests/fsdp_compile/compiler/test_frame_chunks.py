"""A function with room for its frames maps no memory for them, however deep it is called."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable

import pytest

from fsdp_compile.compiler.frame_chunks import in_large_frame_chunk

_CALLS = 300


def faults_of_calls() -> int:
    """Return the number of page faults of a loop of calls."""

    def one() -> None:
        pass

    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(_CALLS):
        one()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def most_faults(function: Callable[[], int]) -> int:
    """Return the most page faults of ``function``, over all depths of calls at which a chunk of frames may end."""

    def at(depth: int) -> int:
        return max(function(), at(depth - 1)) if depth else 0

    return at(300)


@pytest.mark.skipif(sys.implementation.name != "cpython" or sys.version_info < (3, 11), reason="frames are not in chunks")
def test_loops_do_not_map_memory() -> None:
    assert most_faults(faults_of_calls) >= _CALLS
    assert most_faults(in_large_frame_chunk(faults_of_calls)) < _CALLS / 10


def test_is_the_function() -> None:
    @in_large_frame_chunk
    def divide(dividend: int, *, divisor: int) -> float:
        """Documented."""
        return dividend / divisor

    assert divide(6, divisor=3) == 2 and divide.__name__ == "divide" and divide.__doc__ == "Documented."
    with pytest.raises(ZeroDivisionError):
        divide(6, divisor=0)
