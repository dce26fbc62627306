"""``torch.optim.Muon`` with owners: each matrix is orthogonalized once, on one of the ranks that shard it.

The iterations begin with a cast to bfloat16 and end in bfloat16, so that is what travels. Values are those of
``torch.optim.Muon`` on one process, to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Muon

from passes.fx.torch_internals.optim import adjusted_lr, orthogonalize, to_scalar

from .matrix_optimizer import MatrixOptimizer, MatrixShard
from .torch_step import step_as, without_hooks


class OwnedMuon(MatrixOptimizer):
    """The mixin of ``flat_optimizer(torch.optim.Muon, ...)``, which stands before the torch class among the bases."""

    sent_dtype = torch.bfloat16

    def __init__(self, params: Any, *args: Any, **options: Any):
        # Torch's own checks the settings, but refuses batches of matrices.
        settings = Muon([torch.empty(1, 1)], *args, **options).defaults
        MatrixOptimizer.__init__(self, params, settings)

    def prepare(self, shard: MatrixShard) -> Tensor:
        """Add a gradient to the momentum. Return what is orthogonalized."""
        if shard.param.is_complex():
            raise RuntimeError("Muon does not support complex parameters")
        momentum, buffer = shard.group["momentum"], shard.buffer("momentum_buffer")
        buffer.lerp_(shard.grad, 1 - momentum)
        return shard.grad.lerp(buffer, momentum) if shard.group["nesterov"] else buffer

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's, which may say ``"pieces"``.

        Raises:
            ValueError: as for every optimizer of matrices; or ``"pieces"`` does not divide the rows of a matrix.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        pieces = _pieces(group)
        for param in group["params"]:
            if type(pieces) is not int or pieces < 1 or param.shape[-2] % pieces:
                self.param_groups.pop()
                raise ValueError(
                    f'A group of {type(self).__name__} has "pieces": {pieces!r}, but a parameter of shape {list(param.shape)}. '
                    "Give the number of matrices of equal size that lie one below the other, such as 2 for gate and up."
                )

    def update(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Orthogonalize a matrix, or each of its pieces."""
        settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
        if (pieces := _pieces(group)) == 1:
            return orthogonalize(matrix, *settings)
        return torch.cat([orthogonalize(piece, *settings) for piece in matrix.chunk(pieces)])

    def apply(self, shard: MatrixShard, update: Tensor) -> None:
        """Decay the weights, and add the update."""
        group = shard.group
        lr, (rows, columns) = to_scalar(group["lr"]), shard.shape
        shard.param.mul_(1 - lr * group["weight_decay"])
        piece = torch.Size((rows // _pieces(group), columns))
        shard.param.add_(update, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], piece))

    def cost(self, shape: Sequence[int]) -> float:
        """Return the multiplications of an iteration: two products with the matrix, and one of its smaller square."""
        smaller, larger = sorted(shape)
        return float(smaller * smaller * (2 * larger + smaller))

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        if any(group["params"] and (_pieces(group) > 1 or group.get("batch_of_matrices")) for group in groups):
            super()._step_others(groups)
        # Torch's operators on DTensors take all placements.
        state: Any = vars(self)["state"]
        step_as(self, without_hooks(Muon.step), groups, state)


def _pieces(group: Mapping[str, Any]) -> Any:
    """Return the number of matrices that each matrix of a group is made of, one below the other."""
    return group.get("pieces", 1)
