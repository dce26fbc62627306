from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.common.distributed import RankPools


@pytest.fixture(scope="session")
def rank_pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RankPools]:
    """Pools of ranks by world size: ``rank_pools[4].run(function, **kwargs)``."""
    pools = RankPools(tmp_path_factory.mktemp("inductor"))
    yield pools
    pools.close()
