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

    def update(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        """Orthogonalize a matrix."""
        return orthogonalize(matrix, group["ns_coefficients"], group["ns_steps"], group["eps"])

    def apply(self, shard: MatrixShard, update: Tensor) -> None:
        """Decay the weights, and add the update."""
        group = shard.group
        lr = to_scalar(group["lr"])
        shard.param.mul_(1 - lr * group["weight_decay"])
        shard.param.add_(update, alpha=-adjusted_lr(lr, group["adjust_lr_fn"], shard.shape))

    def cost(self, shape: Sequence[int]) -> float:
        """Return the multiplications of an iteration: two products with the matrix, and one of its smaller square."""
        smaller, larger = sorted(shape)
        return float(smaller * smaller * (2 * larger + smaller))

    def _step_others(self, groups: list[dict[str, Any]]) -> None:
        # Torch's operators on DTensors take all placements.
        state: Any = vars(self)["state"]
        step_as(self, without_hooks(Muon.step), groups, state)
