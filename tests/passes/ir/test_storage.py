import torch

from passes.ir.ops import Unshard, unshard, unshards
from passes.ir.storage import gaps_to_gather
from tests.passes.tracing import WORLD_SIZE, PassTestCase


class TestGaps(PassTestCase):
    def gaps(self, *shards: tuple[int, int]) -> list[int]:
        """Return the elements that are gathered along after each shard.

        Shards are given as (offset, size). A shard with offset -1 is not in flat storage.
        """

        def forward(*inputs):
            return [
                unshard(shard, str(index), [WORLD_SIZE * size], self.shard, unit="up", offset=offset)
                for index, (shard, (offset, size)) in enumerate(zip(inputs, shards, strict=True))
            ]

        gm = self.trace(forward, *(torch.zeros(size) for _, size in shards))
        return gaps_to_gather([Unshard.of(node) for node in unshards(gm.graph.nodes)])

    def test_neighbours_have_no_gap(self) -> None:
        assert self.gaps((0, 8), (8, 8)) == [0, 0]

    def test_an_eighth_is_gathered_along(self) -> None:
        assert self.gaps((0, 32), (40, 32)) == [8, 0]
        assert self.gaps((0, 32), (41, 32)) == [0, 0]

    def test_gaps_of_a_run_count_together(self) -> None:
        # 4 are an eighth of 32. The second gap would make 8 of 52, more than an eighth, so another run begins there.
        assert self.gaps((0, 16), (20, 16), (40, 16), (57, 8)) == [4, 0, 1, 0]

    def test_what_lies_nowhere_ends_a_run(self) -> None:
        assert self.gaps((0, 32), (-1, 8), (34, 32)) == [0, 0, 0]
