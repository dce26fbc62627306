"""A policy that keeps units on the host if a limit for the device leaves no room for them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy

from passes.collectives.layout import padded_shard_numel

from ..compiler.byte_sizes import bytes_of, is_size
from ..compiler.optimizer_state import Optimizer


class UnshardedParam(NamedTuple):
    """A parameter before sharding.

    Attributes:
        shape: its shape; with another parallelism, the shape of this rank's piece.
        dtype: its dtype.
        dim: the dimension that it is cut along.
        ranks: the number of ranks that it is sharded over.
        is_trained: whether it will have a gradient and optimizer state.
    """

    shape: torch.Size
    dtype: torch.dtype
    dim: int
    ranks: int
    is_trained: bool


class PartialCPUOffloadPolicy(OffloadPolicy):
    """An ``offload_policy`` of ``fully_shard``: units stay on the device while they fit; others get a ``CPUOffloadPolicy``.

    A unit on the device counts with this rank's shards, and for trained parameters also with reduced gradients and optimizer
    state. Padding counts, so that all ranks decide alike.

    Pass one policy to every ``fully_shard`` call of a model, and shard units that forward reads first before others. Then the
    first gathers of forward, and the last gradients of backward, wait for no copy.

    Args:
        device_bytes: the most bytes, for each rank, that all units with this policy keep on the device: an int, or text such as
            "20GB"; 0: all are on the host.
        optimizer: the optimizer whose state counts: "adamw", "momentum", "sgd", its bytes for each element of a parameter, or
            None.
        pin_memory: as for ``CPUOffloadPolicy``.

    Attributes:
        bytes_on_device: the bytes that units on the device count with so far.

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

    def decide(self, pieces: Iterable[UnshardedParam]) -> tuple[CPUOffloadPolicy | None, int]:
        """Return the policy of a unit with these parameters, and the bytes that it adds to :attr:`bytes_on_device`."""
        size = sum(map(self._size, pieces))
        return (None, size) if self.bytes_on_device + size <= self.device_bytes else (self._on_host, 0)

    def _size(self, piece: UnshardedParam) -> int:
        numel = padded_shard_numel(piece.shape, piece.dim, piece.ranks)
        num_bytes = numel * piece.dtype.itemsize
        return num_bytes + (num_bytes + round(self._optimizer.state_of_shard(numel, num_bytes)) if piece.is_trained else 0)
