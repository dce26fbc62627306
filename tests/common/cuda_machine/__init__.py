"""A machine that runs a training step's CUDA program on CPUs, each rank in a process (docs/cuda.md).

Tensors on ``cuda`` are fake, and have values all the same (:mod:`.memory`). The library, torch's optimizers and the user's code
see them as tensors on a device. Graphs are lowered as for a GPU; Triton kernels run in Triton's interpreter (:mod:`.kernels`),
collectives among real processes (:mod:`.collectives`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch.distributed import Store


class Seat(NamedTuple):
    """This process's place among the ranks of a machine."""

    rank: int
    world_size: int
    store: Store


_seats: list[Seat] = []


def join(rank: int, world_size: int, store: Store) -> None:
    """Make this process a rank of a machine. It must have been started with ``TRITON_INTERPRET=1``."""
    _seats[:] = [Seat(rank, world_size, store)]


def seat() -> Seat:
    """Return this process's place, as :func:`join` was given it."""
    return _seats[0]
