"""Parameters that are DTensors before they are sharded: another parallelism has laid them out, on a mesh of its own.

Tensor parallelism (``parallelize_module``) and expert parallelism leave each rank a piece of a parameter. That piece is what is
sharded here, gathered, and what its gradient is reduced as: neither the operators nor the passes know the other mesh. Where a
forward reads the parameter, the gathered piece becomes a DTensor again. AOTAutograd takes it apart, so that the graphs hold the
collectives of both.

The parameter that users see is a DTensor on both meshes, laid out as FSDP2's
(torch/distributed/fsdp/_fully_shard/_fsdp_param.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from passes.collectives.layout import REPLICATED
from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.distributed import DTensorSpec, StridedShard, concatenate_meshes

from .mesh import ShardingMesh


@dataclass(frozen=True)
class ModelParallel:
    """How another parallelism lays out a parameter.

    Attributes:
        mesh: its mesh, without the ranks that gather the parameter.
        placements: the parameter's, on that mesh.
        shape, stride: of the parameter in one piece.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @staticmethod
    def of(param: Tensor) -> ModelParallel | None:
        """The layout of a DTensor; None for other tensors."""
        if not isinstance(param, DTensor):
            return None
        return ModelParallel(param.device_mesh, param.placements, tuple(param.shape), tuple(param.stride()))

    @property
    def groups(self) -> dict[str, str]:
        """The process groups of its mesh, by name, with the names of the dimensions."""
        names = self.mesh.mesh_dim_names or ()
        return {self.mesh.get_group(name).group_name: name for name in names}

    def sharded_spec(self, mesh: ShardingMesh, dim: int, param: DTensor) -> DTensorSpec:
        """The layout of the sharded parameter, on the dimensions of both meshes.

        Args:
            mesh: that the pieces are sharded on.
            dim: the dimension that they are cut along, or ``REPLICATED``.
            param: the parameter, as it was.

        Raises:
            RuntimeError: the meshes are no slices of one mesh, or share a dimension.
        """
        *replicas, shard = mesh.placements(dim)
        if dim != REPLICATED and (pieces := self._pieces_along(dim)) > 1:
            # What ranks that gather together have is one piece of this rank's share, not of the whole dimension.
            shard = StridedShard(dim, split_factor=pieces)
        # Ranks are numbers, also where the parameters are fake.
        with unset_fake_temporarily():
            both = concatenate_meshes([mesh.mesh, self.mesh])
        return DTensorSpec(both, (*replicas, shard, *self.placements), tensor_meta=param._spec.tensor_meta)

    def wrap(self, piece: Tensor) -> DTensor:
        """This rank's gathered piece as the parameter. Differentiable: the piece's gradient is laid out as it is."""
        return DTensor.from_local(
            piece,
            self.mesh,
            self.placements,
            run_check=False,
            shape=self.shape,  # type: ignore[arg-type]
            stride=self.stride,
        )

    def piece_of(self, given: Tensor) -> Tensor:
        """This rank's piece of a tensor, or of a DTensor however it is laid out. Differentiable."""
        whole = given.full_tensor() if isinstance(given, DTensor) else given
        everywhere = DTensor.from_local(whole, self.mesh, [Replicate()] * self.mesh.ndim, run_check=False)
        return everywhere.redistribute(placements=self.placements).to_local()

    def _pieces_along(self, dim: int) -> int:
        """How many pieces a dimension is in."""
        cuts = [size for size, placement in zip(self.mesh.shape, self.placements, strict=True) if _cuts(placement, dim)]
        return math.prod(cuts)


def _cuts(placement: Placement, dim: int) -> bool:
    return isinstance(placement, (Shard, StridedShard)) and placement.dim == dim
