"""What a backward asks of an optimizer that steps in it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from torch import Tensor

from passes.ir.update import Update

if TYPE_CHECKING:
    from .sharded_param import ShardedParam


class Planned(NamedTuple):
    """The next update of a parameter.

    Attributes:
        update: what it computes.
        key: equal for parameters that are updated with the same numbers.
    """

    update: Update
    key: Hashable


class Updater(Protocol):
    """Updates parameters by their gradients, and keeps what it needs for that in buffers over flat storage."""

    def planned(self, param: ShardedParam) -> Planned:
        """The next update of a parameter. What is kept for it is ready then."""

    def numbers(self, param: ShardedParam) -> Tensor:
        """The numbers of the next update."""

    def state_run(self, param: ShardedParam, numel: int, name: str) -> Tensor:
        """What is kept under a name for so many elements of flat storage, from the beginning of a parameter's shard on."""

    def updated(self, params: Sequence[ShardedParam]) -> None:
        """Note that parameters have been updated."""

    def update(self, param: ShardedParam) -> None:
        """Update a parameter by its gradient, at once, and drop the gradient."""
