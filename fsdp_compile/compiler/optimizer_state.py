"""A model of optimizers: the state that they keep and the time that a step takes, without the optimizer itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from passes.models.hardware import Hardware

from ..units.sharded_param import ShardedParam
from .calls import UnitFacts

#: The number of tensors of a shard's size and dtype that an optimizer of torch keeps for the shard.
OPTIMIZERS = {"adamw": 2, "adam": 2, "momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class Optimizer:
    """The bytes that a step of an optimizer reads and writes, and that the optimizer keeps.

    Attributes:
        name: its name in reports.
        copies: state of a shard, as a multiple of the shard's bytes.
        bytes_per_element: bytes of state for each trainable element of any dtype, in addition.
    """

    name: str
    copies: int = 0
    bytes_per_element: float = 0.0

    @staticmethod
    def of(given: str | float | None) -> Optimizer:
        """Find the optimizer that a user means.

        Args:
            given: a key of :data:`OPTIMIZERS`, bytes of state for each element of a parameter, or None for no optimizer.

        Raises:
            ValueError: ``given`` is none of these.
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
        """Return the bytes of state that units have on this rank."""
        elements, num_bytes = (sum(getattr(unit, name) for unit in units) for name in ("trainable", "trainable_bytes"))
        return round(self.state_of_shard(elements, num_bytes))

    def state_of(self, param: ShardedParam) -> float:
        """Return the bytes of a parameter's state, on the rank with the largest shard."""
        return self.state_of_shard(param.padded_numel, param.padded_numel * param.local.dtype.itemsize)

    def state_of_shard(self, numel: int, num_bytes: int) -> float:
        """Return the bytes of state of a shard with ``numel`` elements and ``num_bytes`` bytes."""
        return self.bytes_per_element * numel + self.copies * num_bytes

    def time_ns(self, units: Sequence[UnitFacts], hardware: Hardware) -> int:
        """Return the time of a step in nanoseconds, at the memory rate of the device, or of the host for units that are there.

        A step reads gradients once, and reads and writes shards and state once.
        """
        if self.name == "none":
            return 0
        seconds = 0.0
        for on_host, rate in ((False, hardware.bytes_per_s), (True, hardware.host.memory_bytes_per_s)):
            there = [unit for unit in units if unit.is_copied == on_host]
            seconds += (3 * sum(unit.trainable_bytes for unit in there) + 2 * self.state_bytes(there)) / rate
        return round(seconds * 1e9)
