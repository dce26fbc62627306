"""A policy that keeps on the host what a limit for the device leaves no room for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from passes.collectives.layout import padded_shard_numel

from ..compiler.byte_sizes import bytes_of, is_size
from ..compiler.optimizer_state import Optimizer


class Piece(NamedTuple):
    """A parameter ahead of sharding.

    Attributes:
        shape: its shape; beside another parallelism, that of what is this rank's.
        dtype: its dtype.
        dim: along which it is cut.
        ranks: how many share it.
        is_trained: whether it will have a gradient and a state.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int
    ranks: int
    is_trained: bool


class PartialCPUOffloadPolicy(OffloadPolicy):
    """For ``fully_shard(..., offload_policy=...)``: units stay on the device as long as they fit there, and the others have a
    ``CPUOffloadPolicy``.

    What a unit keeps on the device all the time are this rank's shards, and of those that are trained the reduced gradients and
    what the optimizer has. Pass one policy to every ``fully_shard`` of a model, units that forward reads first ahead of others:
    so the first gathers of forward wait for no copy, and the last gradients of backward for none. Padding counts, so that all
    ranks decide alike.

    Args:
        device_bytes: the most bytes, for each rank, that all units with this policy keep on the device: an int, or text such as
            "20GB"; 0: all are on the host.
        optimizer: whose state counts: "adamw", "momentum", "sgd", its bytes for each element of a parameter, or None.
        pin_memory: as for ``CPUOffloadPolicy``.

    Attributes:
        bytes_on_device: what the units that stayed there so far count with.

    Raises:
        ValueError: ``device_bytes`` is no size, or ``optimizer`` is not known.
    """

    def __init__(self, device_bytes: int | str, *, optimizer: str | float | None = "adamw", pin_memory: bool = True):
        is_nothing = device_bytes == 0 and not isinstance(device_bytes, bool)
        if not is_nothing and not is_size(device_bytes):
            raise ValueError(
                f"PartialCPUOffloadPolicy(device_bytes={device_bytes!r}) takes a number of bytes (an int) or text such as "
                "'20GB' or '18.5GiB'; 0 keeps all units on the host."
            )
        self.device_bytes = bytes_of(device_bytes)
        self.bytes_on_device = 0
        self._optimizer = Optimizer.of(optimizer)
        self._on_host = CPUOffloadPolicy(pin_memory=pin_memory)

    def __repr__(self) -> str:
        pin_memory = self._on_host.pin_memory
        return f"{type(self).__name__}({self.device_bytes}, optimizer={self._optimizer.name!r}, pin_memory={pin_memory})"

    def decide(self, pieces: Iterable[Piece]) -> tuple[CPUOffloadPolicy | None, int]:
        """What to do with a unit of these parameters: its policy, and what it adds to :attr:`bytes_on_device`."""
        size = sum(map(self._size, pieces))
        return (None, size) if self.bytes_on_device + size <= self.device_bytes else (self._on_host, 0)

    def _size(self, piece: Piece) -> int:
        numel = padded_shard_numel(piece.shape, piece.dim, piece.ranks)
        num_bytes = numel * piece.dtype.itemsize
        return num_bytes + (num_bytes + round(self._optimizer.state_of_shard(numel, num_bytes)) if piece.is_trained else 0)
