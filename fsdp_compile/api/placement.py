"""Placements: over which ranks parameters, gradients and optimizer states are sharded, by one name or by mesh dimension.

Each dimension of the mesh has a *level*, ZeRO's stage: the tensors that its ranks cut among them.

=============  ===============  =============  ================
level          optimizer state  gradients      parameters
=============  ===============  =============  ================
``replicate``  whole            whole          whole
``zero1``      cut              whole          whole
``zero2``      cut              cut            whole
``zero3``      cut              cut            cut
=============  ===============  =============  ================

Whole parameters are gathered once after each step. Whole gradients are reduced in the last backward of a step only
(``set_is_last_backward``).

Source: ZeRO (arXiv 1910.02054); the placements of Megatron-FSDP, whose ``outer_dp_sharding_strategy="optim"`` is ``hybrid``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh

from passes.ir.reduction import Sync

from ..units.mesh import ShardingMesh
from ..units.unit import Unit

_LEVELS = ("replicate", "zero1", "zero2", "zero3")
#: The names, each with the levels of the mesh's dimensions.
_NAMES = {
    "ddp": ("replicate",),
    "zero1": ("zero1",),
    "zero2": ("zero2",),
    "zero3": ("zero3",),
    "hsdp": ("replicate", "zero3"),
    "hybrid": ("zero1", "zero3"),
}


@dataclass(frozen=True)
class Placement:
    """The levels of a mesh's dimensions.

    Attributes:
        name: the user's description, for messages.
        levels: the level of each dimension.
    """

    name: str
    levels: tuple[str, ...]

    @staticmethod
    def of(given: str | Mapping[str, str], mesh: DeviceMesh | None, reshard_after_forward: bool | int | None) -> Placement:
        """Check a description against the mesh, and against ``reshard_after_forward``.

        Raises:
            TypeError: ``given`` is neither a name nor a mapping.
            ValueError: it is unknown, or contradicts the mesh or ``reshard_after_forward``.
        """
        if isinstance(given, str):
            if given not in _NAMES:
                raise ValueError(
                    f"fully_shard(placement={given!r}) is no placement. Use one of {', '.join(_NAMES)}, or {_MAPPING}."
                )
            levels = _NAMES[given]
        elif isinstance(given, Mapping):
            levels = _levels(given, mesh)
        else:
            raise TypeError(f"fully_shard(placement=...) takes a name or {_MAPPING}, not {given!r}.")
        found = Placement(str(given), levels)
        found._check(mesh, reshard_after_forward)
        return found

    def _check(self, mesh: DeviceMesh | None, reshard_after_forward: bool | int | None) -> None:
        given = f"fully_shard(placement={self.name!r})"
        ndim = 1 if mesh is None else mesh.ndim
        if ndim != len(self.levels):
            needed = "a 2-D mesh (replicate, shard)" if len(self.levels) == 2 else "a 1-D mesh, such as mesh['shard']"
            raise ValueError(f"{given} needs {needed}, but mesh= is {'all ranks in one dimension' if mesh is None else mesh}.")
        if ndim == 2:
            outer, inner = self.levels
            if inner == "replicate" or outer in ("zero2", "zero3"):
                raise ValueError(
                    f"{given} is not supported: the first dimension of a mesh is that of replicas, which may have the level "
                    "'replicate' or 'zero1', and the second one shards, with the level 'zero1', 'zero2' or 'zero3'. To cut "
                    "gradients or parameters over all ranks, pass a 1-D mesh of them (mesh._flatten())."
                )
            if self.is_hybrid and (mesh is None or mesh.mesh_dim_names is None):
                raise ValueError(
                    f"{given} shards over all ranks of mesh=, whose dimensions need names for that: "
                    "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))."
                )
        keeps = self.levels[-1] != "zero3"
        if keeps and reshard_after_forward not in (None, False):
            raise ValueError(
                f"{given} keeps parameters whole between forward and backward, but reshard_after_forward="
                f"{reshard_after_forward!r}. Leave it out, or use the level 'zero3'."
            )
        if self.is_hybrid and reshard_after_forward is not None and not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"{given} keeps shards within a node already, but reshard_after_forward={reshard_after_forward!r} asks for a "
                "smaller group. Use True or False."
            )

    @property
    def is_hybrid(self) -> bool:
        """True if optimizer states are cut over replicas, too."""
        return len(self.levels) == 2 and self.levels[0] == "zero1"

    @property
    def is_replicated(self) -> bool:
        """True if nothing is cut."""
        return self.levels == ("replicate",)

    @property
    def reshard_after_forward(self) -> bool | None:
        """The default of ``reshard_after_forward``."""
        return None if self.levels[-1] == "zero3" else False

    def sharding_mesh(self, mesh: DeviceMesh | None) -> ShardingMesh:
        """Return the groups of a mesh for this placement. A collective call, as :meth:`.ShardingMesh.of`."""
        if self.is_replicated:
            return ShardingMesh.of_replicas(mesh)
        return ShardingMesh.of(mesh, is_hybrid=self.is_hybrid)

    def apply(self, unit: Unit) -> None:
        """Set the flags of a new unit."""
        unit.flags.reshard_after_backward = self.levels[-1] == "zero3"
        if self.levels[-1] == "zero1":
            unit.flags.before_last = Sync.NONE
        elif self.is_hybrid:
            unit.flags.before_last = Sync.SCATTER


_MAPPING = f"a mapping from the names of mesh's dimensions to {', '.join(map(repr, _LEVELS))}"


def _levels(given: Mapping[str, str], mesh: DeviceMesh | None) -> tuple[str, ...]:
    names = None if mesh is None else mesh.mesh_dim_names
    if names is None or set(given) != set(names):
        raise ValueError(
            f"fully_shard(placement={dict(given)!r}) must have each dimension of mesh= once, which has the names {names}."
        )
    unknown = [level for level in given.values() if level not in _LEVELS]
    if unknown:
        raise ValueError(f"fully_shard(placement={dict(given)!r}) has {unknown[0]!r}: use {', '.join(map(repr, _LEVELS))}.")
    return tuple(given[name] for name in names)
