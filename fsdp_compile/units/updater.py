"""The interface of an optimizer that steps in backward."""

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
        update: the arithmetic of the update.
        key: equal for parameters that are updated with the same numbers (learning rate, bias corrections, ...).
    """

    update: Update
    key: Hashable


class Updater(Protocol):
    """An optimizer that updates parameters by their gradients. Its state buffers have the order of flat storage."""

    def planned(self, param: ShardedParam) -> Planned:
        """Return the next update of a parameter, and make its state ready."""

    def numbers(self, param: ShardedParam) -> Tensor:
        """Return the numbers of a parameter's next update, ``[update.num_numbers]``, on the device of its shard."""

    def state_run(self, param: ShardedParam, numel: int, name: str) -> Tensor:
        """Return ``[numel]`` elements of the state buffer ``name``, from the beginning of the parameter's shard on."""

    def updated(self, params: Sequence[ShardedParam]) -> None:
        """Record that parameters have been updated."""

    def update(self, param: ShardedParam) -> None:
        """Update a parameter at once by ``param.grad``, and drop the gradient."""
