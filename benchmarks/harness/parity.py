"""Train with fsdp_backend and with FSDP2, and compare the gradients.

In float32, gradients have to agree. In lower precision, the two round at different places: there, fsdp_backend must not be much
further away from FSDP2 in float32 than FSDP2 in the same precision is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import pad_mm
from torch.distributed.fsdp import MixedPrecisionPolicy

from .llama import LlamaSize
from .systems import Setting, System, build

SIZE = LlamaSize(
    layers=2, width=128, heads=4, kv_heads=2, hidden=256, vocabulary=256, batch=2, sequence=64, dtype=torch.float32
)
_STEPS = 4
# The library traces one of eight or more equal layers.
_FOLDED_LAYERS = 9
# Relative to the norm of all gradients; systems sum in different orders.
_TOLERANCE = 1e-4
_MARGIN = 1.5


@dataclass(frozen=True)
class Precision:
    """The precision of a training run.

    Attributes:
        policy: mixed precision.
        factor: the gradient divide factor; None: the number of ranks.
        loss_scale: multiplies the loss, to keep gradients in the range of the dtype. Gradients are divided by it afterwards.
    """

    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    factor: float | None = None
    loss_scale: float = 1.0


PRECISIONS = {
    "fp32": Precision(),
    "bf16": Precision(MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "fp16": Precision(MixedPrecisionPolicy(torch.float16, torch.float16), loss_scale=256.0),
    # A factor of 4 divides by 2 before the reduction, and by 2 after it: neither division is trivial.
    "fp16-factor-4": Precision(MixedPrecisionPolicy(torch.float16, torch.float16), factor=4.0, loss_scale=256.0),
}


def precisions(ranks: int) -> list[str]:
    """Return the names of the precisions that can be compared.

    With one rank, those with a factor are left out: FSDP2 divides fp16 gradients by it twice.
    """
    return [name for name, precision in PRECISIONS.items() if precision.factor is None or ranks > 1]


@dataclass(frozen=True)
class Comparison:
    """Distances between the gradients of one rank: the largest over all steps.

    Attributes:
        ours: distance of fsdp_backend's gradients from those of FSDP2 in float32, relative to the norm of the latter.
        fsdp2: the same distance of FSDP2's gradients in this precision, or of those of the system in its place. It is 0 for
            FSDP2 in float32.
    """

    ours: float
    fsdp2: float

    @property
    def agrees(self) -> bool:
        """True if fsdp_backend trains as FSDP2 does. False if a distance is NaN."""
        return self.ours <= _MARGIN * self.fsdp2 + _TOLERANCE


def compare(
    name: str, setting: Setting, ours: str = "ours", theirs: str = "fsdp2", lengths: Sequence[int] = ()
) -> dict[str, Any]:
    """Train with FSDP2 in float32, with ``theirs`` and with ``ours``, and compare the gradients of this rank.

    Args:
        name: a key of ``PRECISIONS``.
        setting: the model and its mesh; the precision replaces its policy.
        ours: the system that is compared with FSDP2.
        theirs: FSDP2 in this precision, or another system in its place.
        lengths: tokens of a sequence, for each step; default: those of the setting's size, in every step.

    Returns:
        The fields of a :class:`Comparison`, and "losses" of each system.
    """
    precision = PRECISIONS[name]
    assert isinstance(setting.size, LlamaSize)
    batches = [
        replace(setting.size, sequence=length).make_batch(setting.mesh.get_rank(), setting.device)
        for length in lengths or [setting.size.sequence] * _STEPS
    ]

    def train(system: str, precision: Precision) -> tuple[list[float], list[Tensor]]:
        # No compiled code is used again, and torch limits how often a function is recompiled.
        torch._dynamo.reset()
        return _train(build(system, replace(setting, policy=precision.policy)), batches, precision)

    expected_losses, expected = train("fsdp2", Precision(factor=precision.factor))
    their_losses, their = train(theirs, precision)
    our_losses, our = train(ours, precision)
    comparison = Comparison(_distance(our, expected), _distance(their, expected))
    losses = {"fsdp2 in float32": expected_losses, "fsdp2": their_losses, "ours": our_losses}
    return {**asdict(comparison), "losses": losses}


def compare_lengths(setting: Setting) -> dict[str, Any]:
    """Compare gradients in float32 where layers fold and each step has sequences of another length, as :func:`compare` does."""
    assert isinstance(setting.size, LlamaSize)
    deep = replace(setting.size, layers=_FOLDED_LAYERS)
    return compare("fp32", replace(setting, size=deep), lengths=[deep.sequence - 8 * step for step in range(_STEPS)])


def compare_padded(setting: Setting) -> dict[str, Any]:
    """Compare gradients in float32 where Inductor pads every matrix product that it can, as :func:`compare` does.

    Raises:
        RuntimeError: no product was padded.
    """
    assert isinstance(setting.size, LlamaSize)
    # Rows of an odd length are not aligned.
    odd = replace(setting.size, vocabulary=setting.size.vocabulary + 1)
    answers: list[bool] = []
    asked = pad_mm.should_pad

    def should_pad(*args: Any) -> bool:
        answers.append(asked(*args))
        return answers[-1]

    with mock.patch.object(pad_mm, "should_pad", should_pad), inductor_config.patch(force_shape_pad=True):
        result = compare("fp32", replace(setting, size=odd))
    if not any(answers):
        raise RuntimeError(f"Inductor padded none of the {len(answers)} matrix products that it looked at")
    return {**result, "padded": sum(answers)}


def _train(system: System, batches: Sequence[tuple[Tensor, Tensor]], precision: Precision) -> tuple[list[float], list[Tensor]]:
    """Train a step on each batch. Return their losses, and this rank's gradients of each as one float32 tensor on the host."""
    for module in system.model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # Gloo has no averaging operator. FSDP2 asks for one on CUDA, where it expects NCCL.
            module.set_force_sum_reduction_for_comms(dist.get_backend() == "gloo")
            if precision.factor is not None:
                module.set_gradient_divide_factor(precision.factor)
    losses, gradients = [], []
    for batch in batches:
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
    """Return the largest distance of all steps, relative to the norm of the expected gradients."""
    of_steps = [((a - e).norm() / e.norm()).item() for a, e in zip(actual, expected, strict=True)]
    # Python's max() may pass over NaN.
    return torch.tensor(of_steps).max().item()
