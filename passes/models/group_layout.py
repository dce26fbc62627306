"""Group layout: how the ranks of a process group lie on the nodes of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class GroupLayout:
    """A process group with ranks at equal distances, like the groups of a mesh dimension.

    Attributes:
        size: the number of ranks.
        stride: the distance between neighbouring ranks.
    """

    size: int
    stride: int = 1

    @classmethod
    def of(cls, ranks: Sequence[int]) -> GroupLayout:
        """Return the layout of a group. For unequal distances, the stride is their mean, rounded up."""
        return cls(len(ranks), -((min(ranks) - max(ranks)) // max(1, len(ranks) - 1)) or 1)

    def per_node(self, ranks_per_node: int) -> int:
        """Count the ranks of the group that share a node.

        The count depends on size and stride alone, which are the same for all groups of a mesh dimension.
        """
        if (self.size - 1) * self.stride < ranks_per_node:
            return self.size
        return max(1, ranks_per_node // self.stride)

    def nodes(self, ranks_per_node: int) -> int:
        """Count the nodes that the ranks are on."""
        return -(-self.size // self.per_node(ranks_per_node))
