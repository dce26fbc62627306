"""Group layout: how the ranks of a process group lie on the nodes of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupLayout:
    """Ranks at equal distances, as the groups of a mesh dimension have them.

    Attributes:
        size: the number of ranks.
        stride: the distance of each to the next.
    """

    size: int
    stride: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int]) -> GroupLayout:
        """The layout of a group. Ranks at unequal distances count with the mean of these, rounded up."""
        return cls(len(ranks), -((min(ranks) - max(ranks)) // max(1, len(ranks) - 1)) or 1)

    def per_node(self, ranks_per_node: int) -> int:
        """How many of its ranks share a node. The span decides, which is the same for all groups of a mesh dimension."""
        if (self.size - 1) * self.stride < ranks_per_node:
            return self.size
        return max(1, ranks_per_node // self.stride)

    def nodes(self, ranks_per_node: int) -> int:
        """How many nodes its ranks are on."""
        return -(-self.size // self.per_node(ranks_per_node))
