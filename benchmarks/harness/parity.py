"""Train with fsdp_backend and with FSDP2, and compare the gradients.

Where both compute in float32, they have to agree. In lower precision they round at different places: there, fsdp_backend must
not be much further away from FSDP2 in float32 than FSDP2 itself is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from .llama import LlamaSize
from .systems import Setting, System, build

SIZE = LlamaSize(
    layers=2, width=128, heads=4, kv_heads=2, hidden=256, vocabulary=256, batch=2, sequence=64, dtype=torch.float32
)
_STEPS = 4
# Of the norm of all gradients: systems sum in different orders.
_TOLERANCE = 1e-4
_MARGIN = 1.5


@dataclass(frozen=True)
class Precision:
    """How to train.

    Attributes:
        policy: mixed precision.
        factor: what gradients are divided by in the place of the number of ranks; None: that number.
        loss_scale: keeps gradients in the range of the dtype; they are divided by it again.
    """

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    factor: float | None = None
    loss_scale: float = 1.0


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "fp16": Precision(MixedPrecisionPolicy(torch.float16, torch.float16), loss_scale=256.0),
    # Both divisions, ahead of the reduction and behind it, are by something else than 1.
    "fp16-factor-4": Precision(MixedPrecisionPolicy(torch.float16, torch.float16), factor=4.0, loss_scale=256.0),
}


def precisions(ranks: int) -> list[str]:
    """Those that can be compared: with one rank, FSDP2 divides fp16 gradients by a given factor twice over."""
    return [name for name, precision in PRECISIONS.items() if precision.factor is None or ranks > 1]


@dataclass(frozen=True)
class Comparison:
    """Gradients of a precision on one rank, over all steps.

    Attributes:
        ours: the largest distance of fsdp_backend's gradients from FSDP2's in float32, relative to their norm.
        fsdp2: the same of FSDP2's, or of what stands in its place; of FSDP2 in float32, 0.
    """

    ours: float
    fsdp2: float

    @property
    def agrees(self) -> bool:
        """Whether fsdp_backend trains as FSDP2 does. NaN does not."""
        return self.ours <= _MARGIN * self.fsdp2 + _TOLERANCE


def compare(name: str, setting: Setting, ours: str = "ours", theirs: str = "fsdp2") -> dict[str, Any]:
    """Train three times, on each rank; gives its :class:`Comparison` and the losses of each system.

    Args:
        name: of a precision.
        setting: what to train; its policy is that of the precision.
        ours: the system that is compared with FSDP2.
        theirs: another one, in the place of FSDP2 in this precision.
    """
    precision = PRECISIONS[name]
    assert isinstance(setting.size, LlamaSize)
    batch = setting.size.make_batch(setting.mesh.get_rank(), setting.device)

    def train(system: str, precision: Precision) -> tuple[list[float], list[Tensor]]:
        # Nothing compiled is used again, and torch compiles a function a limited number of times.
        torch._dynamo.reset()
        return _train(build(system, replace(setting, policy=precision.policy)), batch, precision)

    expected_losses, expected = train("fsdp2", Precision(factor=precision.factor))
    their_losses, their = train(theirs, precision)
    our_losses, our = train(ours, precision)
    comparison = Comparison(_distance(our, expected), _distance(their, expected))
    losses = {"fsdp2 in float32": expected_losses, "fsdp2": their_losses, "ours": our_losses}
    return {**asdict(comparison), "losses": losses}


def _train(system: System, batch: tuple[Tensor, Tensor], precision: Precision) -> tuple[list[float], list[Tensor]]:
    """The losses of a few steps, and this rank's gradients in each, as one tensor of float32 on the host."""
    for module in system.model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Gloo has no averaging operator. FSDP2 asks for one on CUDA, where it expects NCCL.
            module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
            if precision.factor is not None:
                module.set_gradient_divide_factor(precision.factor)
    losses, gradients = [], []
    for _ in range(_STEPS):
        loss = system.forward(*batch)
        (loss * precision.loss_scale).backward()
        of_step = [_local_gradient(parameter).div_(precision.loss_scale) for parameter in system.model.parameters()]
        losses.append(loss.item())
        gradients.append(torch.cat([gradient.flatten().float().cpu() for gradient in of_step]))
        system.optimizer.step()
        system.optimizer.zero_grad()
    return losses, gradients


def _local_gradient(parameter: Any) -> Tensor:
    if parameter.grad is None:
        raise RuntimeError("a parameter has no gradient")
    local: Tensor = parameter.grad.to_local()
    return local


def _distance(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest of all steps, relative to the norm of what is expected."""
    of_steps = [((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True)]
    # Not max(), which passes over NaN.
    return torch.tensor(of_steps).max().item()
