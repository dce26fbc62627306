"""Bytes of rounded gathers: they decode to the rounded values, and are no more than needed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from passes.collectives.block_formats import LARGEST, NAMED
from passes.collectives.rounded_gather import GatherPolicy
from tests.common.rounding import rounded

_DTYPES = st.sampled_from(list(LARGEST))
_NAMES = st.sampled_from(list(NAMED))
_SCALES = st.sampled_from([1, 3, 8, 128, "row", "tensor"])
_SHAPES = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=3), min_size=1, max_size=5).filter(
    lambda shapes: any(len(shape) > 1 for shape in shapes)
)


def travel(shards: Sequence[Tensor], policy: GatherPolicy, dtype: torch.dtype, ranks: int = 2) -> tuple[list[Tensor], int]:
    """Send equal shards from all ranks. Return the shards that arrive from the last rank, and the bytes of each rank."""
    numels = [shard.numel() for shard in shards]
    paddings = policy.paddings(numels)
    flat = torch.cat([torch.nn.functional.pad(shard.flatten(), (0, gap)) for shard, gap in zip(shards, paddings, strict=True)])
    starts = [sum(numels[:index]) + sum(paddings[:index]) for index in range(len(shards))]
    row = policy.encode(shards, flat, dtype, starts)
    assert row.dtype == torch.uint8
    arrived = policy.decode(row.expand(ranks, -1), [shard.shape for shard in shards], starts, flat.numel(), dtype)
    return [piece[-1].view(shard.shape) for piece, shard in zip(arrived, shards, strict=True)], row.numel()


@settings(max_examples=60, deadline=None)
@given(dtype=_DTYPES, scale=_SCALES, shapes=_SHAPES, seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_arrives_as_rounded_in_plain_torch(
    dtype: torch.dtype, scale: int | str, shapes: list[list[int]], seed: int, exponent: int
) -> None:
    policy, generator = GatherPolicy(dtype, scale), torch.Generator().manual_seed(seed)
    shards = [torch.randn(shape, generator=generator) * 10.0**exponent for shape in shapes]
    arrived, _ = travel(shards, policy, torch.float32)
    for shard, piece in zip(shards, arrived, strict=True):
        assert torch.equal(piece, rounded(shard, 1, policy))


@settings(max_examples=60, deadline=None)
@given(name=_NAMES, shapes=_SHAPES, seed=st.integers(0, 1000), exponent=st.integers(-30, 30))
def test_formats_of_blocks_arrive_as_rounded_one_by_one(name: str, shapes: list[list[int]], seed: int, exponent: int) -> None:
    policy, generator = GatherPolicy(name), torch.Generator().manual_seed(seed)
    shards = [torch.randn(shape, generator=generator) * 10.0**exponent for shape in shapes]
    arrived, _ = travel(shards, policy, torch.float32)
    for shard, piece in zip(shards, arrived, strict=True):
        assert torch.equal(piece, rounded(shard, 1, policy))


def test_numbers_of_four_bits() -> None:
    """All of them arrive, and what lies in the middle of two becomes the even one."""
    exact = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 0.0]).view(2, 8)
    (arrived,), _ = travel([exact * 448], GatherPolicy("nvfp4"), torch.float32)
    assert torch.equal(arrived, exact * 448)
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 6, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5, -6]).view(2, 8)
    (arrived,), _ = travel([ties * 448], GatherPolicy("nvfp4"), torch.float32)
    even = torch.tensor([0, 1, 1, 2, 2, 4, 4, 6])
    assert torch.equal(arrived / 448, torch.stack([even, -even]))


def test_bytes_of_formats_of_blocks() -> None:
    shard = torch.ones(64, 96)
    for name, size in (("mxfp8", 64 * 96 * 33 // 32), ("nvfp4", 64 * 96 * 9 // 16 + 4)):
        _, sent = travel([shard], GatherPolicy(name), torch.float32)
        assert sent == GatherPolicy(name).encoded_numel(shard.shape) == size


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_overflow_arrives_in_formats_of_blocks(name: str, value: float) -> None:
    shard, other = torch.arange(64.0).view(2, 32), torch.ones(1, 32)
    shard[0, 3] = value
    (arrived, apart), _ = travel([shard, other], GatherPolicy(name), torch.float32)
    assert arrived[0].isnan().all()
    assert arrived[1].isnan().all() == (name == "nvfp4")
    assert torch.equal(apart, rounded(other, 1, GatherPolicy(name)))


def test_blocks_that_a_format_does_not_have() -> None:
    assert GatherPolicy.parse(str(GatherPolicy("nvfp4"))) == GatherPolicy("nvfp4", 16)
    with pytest.raises(ValueError, match="leave out scale=64"):
        GatherPolicy("mxfp8", 64)
    with pytest.raises(ValueError, match="'mxfp8', 'nvfp4', not 'fp4'"):
        GatherPolicy("fp4")


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.float64])
def test_what_has_one_dimension_arrives_as_it_is(dtype: torch.dtype, kept: torch.dtype) -> None:
    bias = torch.tensor([0.1, -3e38, torch.inf, torch.nan, 1e-40], dtype=kept)
    (_, arrived), _ = travel([torch.ones(2, 2, dtype=kept), bias], GatherPolicy(dtype), kept)
    assert arrived.dtype == kept
    assert torch.equal(arrived.view(torch.uint8), bias.view(torch.uint8))


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_overflow_arrives(dtype: torch.dtype, value: float) -> None:
    """An overflow makes its whole group NaN, and no other group."""
    shard = torch.arange(16.0).view(2, 8)
    shard[0, 3] = value
    (arrived,), _ = travel([shard], GatherPolicy(dtype, 8), torch.float32)
    assert arrived[0].isnan().all()
    assert torch.equal(arrived[1], rounded(shard[1:], 1, GatherPolicy(dtype, 8))[0])


@pytest.mark.parametrize("dtype", LARGEST)
@pytest.mark.parametrize("scale", [4, "row", "tensor"])
def test_zeros_and_values_that_are_hardly_any(dtype: torch.dtype, scale: int | str) -> None:
    """Shards can be all padding, and the largest value of a group can be subnormal."""
    zeros, denormal = torch.zeros(2, 4), torch.full((2, 4), 1e-40)
    arrived, _ = travel([zeros, denormal], GatherPolicy(dtype, scale), torch.float32)
    assert torch.equal(arrived[0], zeros)
    assert (arrived[1] - denormal).abs().max() <= torch.finfo(torch.float32).tiny


def test_a_quarter_of_the_bytes() -> None:
    matrices = [torch.randn(256, 512), torch.randn(512, 256)]
    everything = sum(shard.numel() * 4 for shard in matrices)
    for scale, most in ((128, 0.2579), ("row", 0.2531), ("tensor", 0.2501)):
        _, num_bytes = travel(matrices, GatherPolicy(torch.int8, scale), torch.float32)
        assert num_bytes <= most * everything
    _, num_bytes = travel([*matrices, torch.randn(512)], GatherPolicy(torch.int8), torch.float32)
    assert num_bytes == math.ceil(0.2578125 * everything) + 4 * 512 + 512 + 4 * 4


def test_text_and_back() -> None:
    for dtype in LARGEST:
        for scale in (1, 128, "row", "tensor"):
            policy = GatherPolicy(dtype, scale)
            assert GatherPolicy.parse(str(policy)) == policy
    assert GatherPolicy.parse("") is None


def test_refuses_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"one of torch\.int8, .*, not torch\.float16"):
        GatherPolicy(torch.float16)
    for scale in (0, -1, True, 2.5, "block"):
        with pytest.raises(ValueError, match="share a scale, 'row' or 'tensor', not"):
            GatherPolicy(torch.int8, scale)  # type: ignore[arg-type]
