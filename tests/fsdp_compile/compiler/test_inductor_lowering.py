"""Inductor's cache keeps every segment that the lowering ``inductor`` compiles."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from fsdp_compile import MixedPrecisionPolicy, fsdp_backend, fully_shard

pytestmark = pytest.mark.inductor


def _model(**options: object) -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Dropout(0.5), nn.Linear(8, 1))
    return fully_shard(model, **options)  # type: ignore[arg-type]


def _low_precision() -> nn.Module:
    return _model(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))


@pytest.mark.parametrize("make", [_model, _low_precision])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_second_compilation_finds_all_segments_in_the_cache(
    make: Callable[[], nn.Module], dynamic: bool, one_rank: None
) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        counters.clear()
        compiled = torch.compile(make(), backend=fsdp_backend, dynamic=dynamic)
        compiled(torch.randn(3, 4)).sum().backward()
    found = counters["inductor"]
    assert (found["fxgraph_cache_bypass"], found["fxgraph_cache_miss"]) == (0, 0)
    assert found["fxgraph_cache_hit"] > 0
