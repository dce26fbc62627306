"""AOTAutograd's cache in tests: off, so that tests compile what they test, but where a test asks for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch._functorch.config as functorch_config
from torch._dynamo.utils import counters
from torch._inductor.utils import fresh_cache


def store_nothing() -> None:
    """Turn the cache off in this process."""
    functorch_config.enable_autograd_cache = False


@contextlib.contextmanager
def storing() -> Iterator[None]:
    """Turn the cache on, with an empty folder, inside of the ``with`` block."""
    with fresh_cache(), functorch_config.patch(enable_autograd_cache=True):
        yield


@contextlib.contextmanager
def count_loads() -> Iterator[list[int]]:
    """Count graphs of Dynamo that are found in the cache, and graphs that are not, into a list of two."""
    found = [0, 0]
    before = dict(counters["aot_autograd"])
    yield found
    for index, name in enumerate(("autograd_cache_hit", "autograd_cache_miss")):
        found[index] = counters["aot_autograd"][name] - before.get(name, 0)
