"""The garbage collector rests while graphs are compiled, and only then."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from fsdp_compile.compiler.collector import collector_paused


@pytest.fixture
def collector() -> Iterator[None]:
    was_enabled = gc.isenabled()
    yield
    (gc.enable if was_enabled else gc.disable)()


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_left_as_it_was(enabled: bool, collector: None) -> None:
    (gc.enable if enabled else gc.disable)()
    with collector_paused():
        assert not gc.isenabled()
        with collector_paused():
            pass
        assert not gc.isenabled()
    assert gc.isenabled() is enabled
    with pytest.raises(LookupError), collector_paused():
        raise LookupError
    assert gc.isenabled() is enabled
