"""What an optimizer keeps for the parameters that it steps, and what its step takes, as far as that is known without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.models.hardware import Hardware

from ..units.sharded_param import ShardedParam
from .calls import UnitFacts

#: Tensors of a shard's size and dtype that optimizers of torch keep for it.
OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class Optimizer:
    """What a step of an optimizer reads, writes and keeps.

    Attributes:
        name: how the report calls it.
        copies: its state for a shard, as a multiple of the shard's bytes.
        bytes_per_element: the same, for each trainable element, whatever its dtype.
    """

    name: str
    copies: int = 0
    bytes_per_element: float = 0.0

    @staticmethod
    def of(given: str | float | None) -> Optimizer:
        """The optimizer that a user means: a name of :data:`OPTIMIZERS`, the bytes of its state, or None for none.

        Raises:
            ValueError: it is none of these.
        """
        if given is None:
            return Optimizer("none")
        if isinstance(given, str) and given.lower() in OPTIMIZERS:
            return Optimizer(given.lower(), OPTIMIZERS[given.lower()])
        if isinstance(given, (int, float)) and not isinstance(given, bool) and given >= 0:
            return Optimizer(f"{given:g} bytes for each element", bytes_per_element=given)
        raise ValueError(
            f"optimizer={given!r} is not known: give {', '.join(map(repr, OPTIMIZERS))}, the bytes of state that it keeps for "
            "each element of a parameter, or None for a step without one."
        )

    def state_bytes(self, units: Sequence[UnitFacts]) -> int:
        """The bytes of its state on this rank."""
        elements, num_bytes = (sum(getattr(unit, name) for unit in units) for name in ("trainable", "trainable_bytes"))
        return round(self.state_of_shard(elements, num_bytes))

    def state_of(self, param: ShardedParam) -> float:
        """The bytes of its state for a parameter, on the rank with the largest shard."""
        return self.state_of_shard(param.padded_numel, param.padded_numel * param.local.dtype.itemsize)

    def state_of_shard(self, numel: int, num_bytes: int) -> float:
        """The bytes of its state for so many elements, that take so many bytes."""
        return self.bytes_per_element * numel + self.copies * num_bytes

    def time_ns(self, units: Sequence[UnitFacts], hardware: Hardware) -> int:
        """The time of a step that reads gradients, and reads and writes shards and state, once each, where they are."""
        if self.name == "none":
            return 0
        seconds = 0.0
        for on_host, rate in ((False, hardware.bytes_per_s), (True, hardware.host.memory_bytes_per_s)):
            there = [unit for unit in units if unit.is_copied == on_host]
            seconds += (3 * sum(unit.trainable_bytes for unit in there) + 2 * self.state_bytes(there)) / rate
        return round(seconds * 1e9)
