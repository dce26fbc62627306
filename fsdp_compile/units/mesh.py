"""Device meshes for sharding: the process groups that gather, scatter and replicate."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes.collectives import gloo
from passes.collectives.functional import group_size, resolve_group
from passes.collectives.gloo import backend_of
from passes.collectives.group_names import name_on_mesh, share_name
from passes.collectives.layout import REPLICATED
from passes.collectives.local_groups import new_local_group
from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.objects import backend_on, flattened


@dataclass(frozen=True)
class ShardingMesh:
    """A 1-D mesh (FSDP) or a 2-D one (HSDP: replicate, shard), with its process groups by name.

    Attributes:
        mesh: the mesh that the DTensor parameters live on.
        shard_group: name of the group that a parameter is sharded over.
        shard_size: number of ranks in the shard group.
        shard_rank: this rank's index in the shard group.
        replicate_group: name of the group of replicas; empty for FSDP.
        node_group: for hybrid sharding, name of the group of a node's ranks. Then parameters are sharded over the ranks of all
            nodes, and ``replicate_group`` has one rank of each. Else empty.
        device: where parameters and communication live.
    """

    mesh: DeviceMesh
    shard_group: str
    shard_size: int
    shard_rank: int
    replicate_group: str
    device: torch.device
    node_group: str = ""

    @staticmethod
    def of(mesh: DeviceMesh | None, *, is_hybrid: bool = False) -> ShardingMesh:
        """Check a mesh, and set up communication over its groups. This is a collective call of their ranks.

        Args:
            mesh: the mesh; None: all ranks in one dimension.
            is_hybrid: shard over both dimensions of a 2-D mesh, in two steps. DTensors are on its flattened mesh.

        Raises:
            RuntimeError: ``mesh`` is None, and torch.distributed is not initialised.
            ValueError: the mesh has more than two dimensions.
        """
        if mesh is None:
            mesh = _default_mesh()
        if mesh.ndim not in (1, 2):
            raise ValueError(
                f"fully_shard takes a 1-D mesh (FSDP) or a 2-D mesh (HSDP: replicate, shard), but mesh= has {mesh.ndim} "
                f"dimensions: {mesh}. Pass a slice of it, such as mesh['dp'] or mesh['replicate', 'shard']."
            )
        all_ranks = flattened(mesh, "_".join(mesh.mesh_dim_names or ())) if is_hybrid else mesh
        shard_dim = all_ranks.ndim - 1
        has_nodes = is_hybrid and mesh.size(0) > 1
        found = ShardingMesh(
            mesh=all_ranks,
            shard_group=name_on_mesh(all_ranks, shard_dim),
            shard_size=all_ranks.size(shard_dim),
            shard_rank=all_ranks.get_local_rank(shard_dim),
            replicate_group=name_on_mesh(mesh, 0) if all_ranks.ndim == 2 or has_nodes else "",
            device=_device_of(mesh),
            node_group=name_on_mesh(mesh, 1) if has_nodes else "",
        )
        for group in found.groups:
            connect(group, found.device)
        return found

    @staticmethod
    def of_replicas(mesh: DeviceMesh | None) -> ShardingMesh:
        """As :meth:`of`, for a 1-D mesh whose ranks hold parameters whole."""
        mesh = _default_mesh() if mesh is None else mesh
        replicas, device = name_on_mesh(mesh, 0), _device_of(mesh)
        alone = _group_of((dist.get_rank(),), "fsdp_whole", f"{replicas}_of_1", device)
        connect(replicas, device)
        return ShardingMesh(mesh, alone, 1, 0, replicas, device)

    @property
    def groups(self) -> tuple[str, ...]:
        """The names of its process groups."""
        return tuple(group for group in (self.shard_group, self.replicate_group, self.node_group) if group)

    @property
    def scatter_group(self) -> str:
        """The name of the group that reduce-scatters gradients first."""
        return self.node_group or self.shard_group

    @property
    def nodes(self) -> int:
        """For hybrid sharding, the number of nodes; else 1."""
        return group_size(self.replicate_group) if self.node_group else 1

    @property
    def shard_mesh(self) -> DeviceMesh:
        """The 1-D mesh that parameters are sharded over; all of a 2-D mesh whose dimensions have no names."""
        names = self.mesh.mesh_dim_names
        return self.mesh if self.mesh.ndim == 1 or names is None else self.mesh[names[-1]]

    def placements(self, dim: int) -> tuple[Placement, ...]:
        """Return the DTensor placements of a parameter that is cut along ``dim`` (or ``REPLICATED``)."""
        shard: Placement = Replicate() if dim == REPLICATED else Shard(dim)
        return (Replicate(), shard) if self.mesh.ndim == 2 else (shard,)

    def post_forward_group(self, size: int, *, connects: bool = True) -> str:
        """Return the name of this rank's group of ``size`` neighbours, for ``reshard_after_forward=size``.

        The name is empty if ``size`` is one, or the size of the shard group.

        Args:
            size: the number of ranks.
            connects: set up communication. With False, the group only gets its name, as a search may not choose it; a later
                call sets up communication.

        Raises:
            ValueError: ``size`` does not divide the shard dimension.
        """
        if not isinstance(size, int) or size < 1 or self.shard_size % size:
            raise ValueError(
                f"reshard_after_forward={size!r} must be a factor of the shard dimension's size, {self.shard_size}; "
                "or True, False or None."
            )
        if size in (1, self.shard_size):
            return ""
        start = self.shard_rank // size * size
        ranks = dist.get_process_group_ranks(resolve_group(self.shard_group))[start : start + size]
        name = f"{self.shard_group}_of_{size}"
        return _group_of(tuple(ranks), "fsdp_post_forward", name, self.device, connects=connects)

    def reduce_scatter_group(self) -> str:
        """Return the name of a group with the ranks of ``scatter_group`` that only reduce-scatters use.

        The first call for a set of ranks makes the group, and is a collective call of these ranks.
        """
        ranks = dist.get_process_group_ranks(resolve_group(self.scatter_group))
        return _group_of(tuple(ranks), "fsdp_reduce_scatter", f"{self.scatter_group}_reduce_scatter", self.device)


def _group_of(ranks: tuple[int, ...], purpose: str, name: str, device: torch.device, *, connects: bool = True) -> str:
    """Return the name of the group for a purpose. The first call makes it, a collective call of ``ranks`` and no others.

    Args:
        ranks: the ranks of the group.
        purpose: the purpose.
        name: a name that is equal for all such groups.
        device: where the group communicates.
        connects: set up communication.
    """
    # Groups are kept, as every unit asks for the same ones.
    made = _groups.setdefault(dist.group.WORLD, {})
    key = ranks, purpose
    # Groups are real, also where parameters are fake.
    with unset_fake_temporarily():
        if key not in made:
            made[key] = _Made(share_name(new_local_group(ranks, purpose), name))
        found = made[key]
        if connects and not found.is_connected:
            connect(found.name, device)
            found.is_connected = True
    return found.name


def connect(group_name: str, device: torch.device) -> None:
    """Set up the communication of a group before its first collective. This is a collective call of its ranks.

    NCCL would otherwise make its communicator at the first collective, in the middle of a graph. The handshake would block the
    thread that starts collectives of other groups, and a CUDA graph cannot capture it. A group that has a communicator keeps
    it. Source: ``ProcessGroupNCCL::eagerConnectSingleDevice``.

    With Gloo, functional collectives get other kernels, and a group on the CPU gets channels (:mod:`passes.collectives.gloo`).
    """
    backend = backend_of(group_name, device)
    if backend == "nccl":
        _backend(group_name, device).eager_connect_single_device(device)
    elif backend == "gloo":
        gloo.connect(group_name, device.type)


def _backend(group_name: str, device: torch.device) -> Any:
    return backend_on(resolve_group(group_name), device)


@dataclass
class _Made:
    """A group that was made for a purpose."""

    name: str
    is_connected: bool = False


# Keyed by the world group that they belong to, so that they go with it.
_groups: weakref.WeakKeyDictionary[Any, dict[tuple[tuple[int, ...], str], _Made]] = weakref.WeakKeyDictionary()


def _default_mesh() -> DeviceMesh:
    if not dist.is_initialized():
        raise RuntimeError(
            "fully_shard needs a process group: call torch.distributed.init_process_group() first (torchrun sets what it "
            "reads), or pass mesh=."
        )
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return init_device_mesh(accelerator.type if accelerator else "cpu", (dist.get_world_size(),))


def _device_of(mesh: DeviceMesh) -> torch.device:
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())
