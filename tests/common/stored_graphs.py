"""AOTAutograd's cache in tests: off, so that tests compile what they test, but where a test asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch._functorch.config as functorch_config
from torch._dynamo import convert_frame
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache

from fsdp_compile.compiler import frame_cache


def store_nothing() -> None:
    """Turn the cache off in this process."""
    functorch_config.enable_autograd_cache = False


@contextlib.contextmanager
def storing(*, frames: bool = False) -> Iterator[None]:
    """Turn the cache on, with an empty folder, inside of the ``with`` block.

    Args:
        frames: also store frames. Else Dynamo traces, and graphs are looked up.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(fresh_cache())
        stack.enter_context(functorch_config.patch(enable_autograd_cache=True))
        if not frames:
            stack.enter_context(mock.patch.object(frame_cache, "can_store", lambda: False))
        yield


@contextlib.contextmanager
def count_traces() -> Iterator[list[int]]:
    """Count the frames that Dynamo traces, into a list of one."""
    found = [0]
    with mock.patch.object(convert_frame, "trace_frame", wraps=convert_frame.trace_frame) as trace:
        yield found
    found[0] = trace.call_count


@contextlib.contextmanager
def count_loads() -> Iterator[list[int]]:
    """Count graphs of Dynamo that are found in the cache, and graphs that are not, into a list of two."""
    found = [0, 0]
    before = dict(counters["aot_autograd"])
    yield found
    for index, name in enumerate(("autograd_cache_hit", "autograd_cache_miss")):
        found[index] = counters["aot_autograd"][name] - before.get(name, 0)
