"""Parameters that are DTensors before they are sharded: another parallelism has laid them out, on a mesh of its own.

Tensor parallelism (``parallelize_module``) and expert parallelism leave each rank a piece of a parameter. The piece is sharded
and gathered, and its gradient reduced, like a plain parameter: operators and passes do not know the other mesh. Where a forward
reads the parameter, the gathered piece becomes a DTensor again. AOTAutograd takes the DTensor apart, so graphs hold the
collectives of both parallelisms.

The parameter that users see is a DTensor on both meshes, laid out as FSDP2's
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py).

With ``dp_mesh_dims``, a parameter is a DTensor on the ranks that shard it, too. It must be replicated there before sharding.
Its gradient there is Partial or replicated, and is reduced as it is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes.collectives.layout import REPLICATED
from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.distributed import DTensorSpec, StridedShard, TensorMeta, concatenate_meshes
from passes.fx.torch_internals.objects import local_tensor, spec_of

from .mesh import ShardingMesh


def _unused(piece: Tensor) -> DTensor:
    raise AssertionError("the parameter is on no rank that gathers it")


@dataclass(frozen=True)
class ModelParallel:
    """The layout of a parameter by another parallelism.

    Attributes:
        mesh: the mesh of the DTensor. Only its dimensions ``shard`` and ``replicate`` are those of ``fully_shard``.
        placements: placements of the parameter on ``mesh``.
        shape, stride: shape and stride of the parameter in one piece.
        shard, replicate: names of the dimensions of ``mesh`` to shard over, and to have replicas on; empty without
            ``dp_mesh_dims``.
        on_own_mesh: makes a DTensor on ``mesh`` of a gathered piece; used with ``shard``.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    shard: tuple[str, ...] = ()
    replicate: tuple[str, ...] = ()
    on_own_mesh: Callable[[Tensor], DTensor] = field(default=_unused, compare=False, repr=False)

    @staticmethod
    def of(param: Tensor, dp_mesh_dims: Any = None) -> ModelParallel | None:
        """Return the layout of a DTensor; None for other tensors.

        Args:
            param: the tensor.
            dp_mesh_dims: torch's ``DataParallelMeshDims``, if the mesh of ``param`` has the dimensions to shard over.
        """
        if not isinstance(param, DTensor):
            return None
        shard, replicate = (dp_mesh_dims.shard_names, dp_mesh_dims.replicate_names) if dp_mesh_dims else ((), ())
        layout = ModelParallel(
            param.device_mesh, param.placements, tuple(param.shape), tuple(param.stride()), tuple(shard), tuple(replicate)
        )
        return replace(layout, on_own_mesh=_on_own_mesh(layout)) if shard else layout

    @property
    def groups(self) -> dict[str, str]:
        """The other parallelism's process groups, by name, with the names of their mesh dimensions."""
        names = [name for name in self.mesh.mesh_dim_names or () if name not in self.shard + self.replicate]
        return {self.mesh.get_group(name).group_name: name for name in names}

    def sharded_spec(self, mesh: ShardingMesh, dim: int, param: DTensor) -> DTensorSpec:
        """Return the layout of the sharded parameter, on the dimensions of both meshes.

        Args:
            mesh: the mesh that the pieces are sharded on.
            dim: the dimension that the pieces are cut along, or ``REPLICATED``.
            param: the parameter before it is sharded.

        Raises:
            RuntimeError: the meshes are not slices of one mesh, or share a dimension.
        """
        if self.shard:
            return self._spec_on_own_mesh(mesh, dim, param)
        *replicas, shard = mesh.placements(dim)
        if dim != REPLICATED and (pieces := self._pieces_along(dim)) > 1:
            # The other parallelism has cut the dimension before: ranks that gather together share one of its pieces.
            shard = StridedShard(dim, split_factor=pieces)
        # A mesh is a tensor of ranks. It must be real, also where parameters are fake.
        with unset_fake_temporarily():
            both = concatenate_meshes([mesh.mesh, self.mesh])
        return DTensorSpec(both, (*replicas, shard, *self.placements), tensor_meta=spec_of(param).tensor_meta)

    def _spec_on_own_mesh(self, mesh: ShardingMesh, dim: int, param: DTensor) -> DTensorSpec:
        names, placements = self.mesh.mesh_dim_names or (), list(self.placements)
        first = names.index(self.shard[0])
        if dim != REPLICATED:
            # DTensor cuts from left to right. Only cuts of later dimensions, made before this one, interleave.
            pieces = self._pieces_along(dim, after=first)
            placements[first] = StridedShard(dim, split_factor=pieces) if pieces > 1 else Shard(dim)
        if len(self.shard) == 1:
            return DTensorSpec(self.mesh, tuple(placements), tensor_meta=spec_of(param).tensor_meta)
        # The dimensions to shard over become one.
        meshes, kept = [], []
        for name, placement in zip(names, placements, strict=True):
            if name == self.shard[0]:
                meshes.append(mesh.mesh)
                kept += [*([Replicate()] * (mesh.mesh.ndim - 1)), placement]
            elif name not in self.shard + self.replicate:
                meshes.append(self.mesh[name])
                kept.append(placement)
        with unset_fake_temporarily():
            return DTensorSpec(concatenate_meshes(meshes), tuple(kept), tensor_meta=spec_of(param).tensor_meta)

    def wrap(self, piece: Tensor) -> DTensor:
        """Make the parameter, a DTensor, of this rank's gathered piece. Differentiable: the gradient has the piece's layout."""
        if self.shard:
            return self.on_own_mesh(piece)
        return DTensor.from_local(
            piece,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,  # type: ignore[arg-type]
            stride=self.stride,
        )

    def piece_of(self, given: Tensor) -> Tensor:
        """Cut this rank's piece out of a full tensor, or a DTensor of any layout. Differentiable."""
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        everywhere = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=self.placements).to_local()

    def _pieces_along(self, dim: int, after: int = -1) -> int:
        """Return the number of pieces that mesh dimensions later than ``after`` cut ``dim`` into."""
        sizes = zip(self.mesh.shape[after + 1 :], self.placements[after + 1 :], strict=True)
        return math.prod(size for size, placement in sizes if _cuts(placement, dim))


class _PieceToDTensor(torch.autograd.Function):
    """An autograd function: from a gathered piece to a DTensor on a mesh that has the ranks that gathered it, too."""

    @staticmethod
    def forward(ctx: Any, piece: Tensor, layout: ModelParallel) -> DTensor:
        ctx.layout = layout
        meta = TensorMeta(torch.Size(layout.shape), layout.stride, piece.dtype)
        spec = DTensorSpec(layout.mesh, layout.placements, tensor_meta=meta)
        return DTensor(piece.view_as(piece), spec, requires_grad=piece.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: DTensor) -> tuple[Tensor, None]:
        layout: ModelParallel = ctx.layout
        own, names = layout.shard + layout.replicate, layout.mesh.mesh_dim_names or ()
        found = zip(names, grad.placements, layout.placements, strict=True)
        # The reduction takes a Partial or a replicated gradient, but no shards.
        wanted = [have if name in own and not isinstance(have, (Shard, StridedShard)) else want for name, have, want in found]
        return local_tensor(grad.redistribute(placements=wanted)), None


@functools.cache
def _on_own_mesh(layout: ModelParallel) -> Callable[[Tensor], DTensor]:
    """Return the ``on_own_mesh`` function that all parameters of a layout share.

    Dynamo does not trace into it, as it cannot know the layout of a gradient.
    """

    def on_own_mesh(piece: Tensor) -> DTensor:
        return _PieceToDTensor.apply(piece, layout)  # type: ignore[no-untyped-call, no-any-return]

    return torch.compiler.allow_in_graph(on_own_mesh)  # type: ignore[no-any-return]


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, StridedShard)) and placement.dim == dim
