"""The job that a rank is in: the world's process group, from its creation to ``destroy_process_group()``."""

from __future__ import annotations

import weakref

import torch.distributed as dist


class Job:
    """The job that this rank is in now. It does not keep the world's process group alive."""

    def __init__(self) -> None:
        world = dist.group.WORLD
        self._world = weakref.ref(world) if world is not None else lambda: None

    def is_over(self) -> bool:
        """Return whether the rank has left the job. Groups of its next job may have the same names."""
        return dist.group.WORLD is not self._world()

    def check(self) -> None:
        """Raise RuntimeError if the rank has left the job. The store may be gone."""
        if self.is_over():
            raise RuntimeError("The rank has left the job.")
