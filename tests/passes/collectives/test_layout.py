import pytest
import torch
from torch.distributed.tensor import Shard

from passes.collectives.layout import REPLICATED, assemble, disassemble, padded_shard_shape


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 8])
@pytest.mark.parametrize(
    ("shape", "dim"),
    [((8, 3), 0), ((7, 3), 0), ((1, 5), 0), ((3,), 0), ((5, 24), 1), ((2, 24, 3), 1), ((0, 3), 0)],
)
def test_assemble_inverts_disassemble(shape: tuple[int, ...], dim: int, world_size: int) -> None:
    full = torch.randn(shape)
    pieces = disassemble(full, dim, world_size)
    assert pieces.shape == (world_size, torch.Size(padded_shard_shape(shape, dim, world_size)).numel())
    assert torch.equal(assemble(pieces, shape, dim), full)
    # Pieces can also be columns of a larger bucket.
    assembled = assemble(torch.cat([pieces, pieces], dim=1)[:, : pieces.size(1)], shape, dim)
    assert torch.equal(assembled, full)
    assert assembled.is_contiguous()


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("shape", [(8, 3), (7, 3), (1, 5), (9,)])
def test_rows_are_cut_as_dtensor_cuts_them(shape: tuple[int, ...], world_size: int) -> None:
    full = torch.randn(shape)
    pieces = disassemble(full, 0, world_size)
    shards, _ = Shard(0)._split_tensor(full, world_size, with_padding=False, contiguous=True)
    for piece, shard in zip(pieces, shards, strict=True):
        padded = piece.view(padded_shard_shape(shape, 0, world_size))
        assert torch.equal(padded[: shard.size(0)], shard)
        assert not padded[shard.size(0) :].any()


def test_scalars_are_whole_everywhere() -> None:
    assert padded_shard_shape((), REPLICATED, 4) == []
    pieces = disassemble(torch.tensor(2.0), REPLICATED, 4)
    assert torch.equal(pieces, torch.full((4, 1), 2.0))
    assert pieces.reshape(-1).is_contiguous()
