from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Generator, Iterator

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import default_cache_dir

from passes.auto import small_units
from tests.common import inductor_use
from tests.common.distributed import RankPools, collect_once, fake_group
from tests.common.lost_guards import refuse_lost_guards
from tests.common.stored_graphs import store_nothing
from tests.common.wrong_layouts import refuse_wrong_layouts

refuse_lost_guards()
refuse_wrong_layouts()
store_nothing()
inductor_use.refuse_unless_allowed()
# Pytest adds its handlers to loggers that do not propagate, and torch formats each graph for a logger with handlers.
logging.getLogger("torch.__trace").propagate = True

_CACHE = "TORCHINDUCTOR_CACHE_DIR"
_pools = RankPools()
# Marks of tests that may have Inductor compile.
_WITH_INDUCTOR = ("inductor", "cuda", "example", "night")


def pytest_configure(config: pytest.Config) -> None:
    """Share one Inductor cache among all processes of a run. It starts empty, unless the environment names a folder."""
    # torch sets the variable when it is imported. Workers inherit the folder that is set here.
    if os.environ.get(_CACHE, default_cache_dir()) == default_cache_dir():
        folder = tempfile.TemporaryDirectory(prefix="inductor-")
        config.add_cleanup(folder.cleanup)
        os.environ[_CACHE] = folder.name


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests with an "inductor" parameter ``inductor``.

    Tests without another mark become ``ranks`` if they use ``rank_pools``, else ``graph``.
    """
    for item in items:
        assert isinstance(item, pytest.Function)
        if hasattr(item, "callspec") and "inductor" in item.callspec.id:
            item.add_marker("inductor")
        if not any(item.get_closest_marker(name) for name in ("parity", "ranks", *_WITH_INDUCTOR)):
            item.add_marker("ranks" if "rank_pools" in item.fixturenames else "graph")


def pytest_runtest_setup(item: pytest.Item) -> None:
    if "rank_pools" not in item.fixturenames:
        _pools.end_idle()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Apply the marks ``units_apart`` and those that allow Inductor, for the duration of a test."""
    default = small_units.MIN_BUCKET_BYTES
    if item.get_closest_marker("units_apart"):
        small_units.MIN_BUCKET_BYTES = 0
    inductor_use.is_allowed = any(item.get_closest_marker(name) for name in _WITH_INDUCTOR)
    try:
        return (yield)
    finally:
        small_units.MIN_BUCKET_BYTES = default
        collect_once()


@pytest.fixture(scope="session")
def rank_pools() -> Iterator[RankPools]:
    """Pools of ranks by world size: ``rank_pools[4].run(function, **kwargs)``."""
    yield _pools
    _pools.close()


@pytest.fixture(scope="module")
def own_rank_pools() -> Iterator[RankPools]:
    """Pools for the tests of a module alone: ranks that fail close connections, also of groups that other tests use."""
    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture
def fake_ranks() -> Iterator[None]:
    """Eight pretended ranks, of which this process is the first; collectives do nothing."""
    with fake_group():
        yield


@pytest.fixture
def one_rank() -> Iterator[None]:
    """A Gloo group of one rank, in which collectives really run."""
    torch._dynamo.reset()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()
