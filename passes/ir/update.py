"""Updates: the step of an optimizer over a run of flat storage, as tensor code.

:func:`updated` is the one definition of the arithmetic. :mod:`passes.transforms.gradient_sync` traces it into backward graphs,
after the reduction of a bucket. For gradients outside of the library's graphs, it runs at once.

Numbers that change from step to step (learning rate, bias corrections) are elements of a tensor, so that no graph depends on
them. The results equal those of torch's optimizers, up to rounding. For parameters in less than single precision, an update is
computed in single precision and rounded once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..collectives.divide_factors import factor_dtype


@dataclass(frozen=True)
class Update:
    """The arithmetic of an update, without its numbers.

    Attributes:
        kind: "sgd" or "adam".
        has_momentum: SGD has a momentum buffer.
        nesterov: SGD uses Nesterov momentum.
        amsgrad: Adam keeps the largest second moment.
        decoupled: Adam's weight decay is not part of the gradient (AdamW).
        maximize: go up the gradient rather than down.
    """

    kind: str
    has_momentum: bool = False
    nesterov: bool = False
    amsgrad: bool = False
    decoupled: bool = False
    maximize: bool = False

    @property
    def states(self) -> tuple[str, ...]:
        """Torch's names of the optimizer state that is kept for each element."""
        if self.kind == "sgd":
            return ("momentum_buffer",) if self.has_momentum else ()
        return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if self.amsgrad else ("exp_avg", "exp_avg_sq")

    def numbers(self, group: Mapping[str, Any], count: int) -> tuple[float, ...]:
        """Compute the numbers of the update of one step, in the order in which ``_sgd`` or ``_adam`` unpacks them.

        Args:
            group: the optimizer's settings, by torch's names.
            count: the number of earlier steps.
        """
        lr, decay = float(group["lr"]), float(group["weight_decay"])
        if self.kind == "sgd":
            # The first momentum is the gradient, without dampening.
            taken = 1.0 if count == 0 else 1 - group["dampening"]
            return decay, float(group["momentum"]), taken, -lr
        beta1, beta2 = map(float, group["betas"])
        step = count + 1
        return (
            1 - lr * decay if self.decoupled else decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**step),
            float(group["eps"]),
            -lr / (1 - beta1**step),
        )

    @property
    def num_numbers(self) -> int:
        return 4 if self.kind == "sgd" else 7


@dataclass(frozen=True)
class UpdateTarget:
    """The part of flat storage that the update of a parameter writes, and the update.

    Attributes:
        offset, numel: start and length of the padded shard in the unit's flat storage, in elements.
        update: the arithmetic.
        alike: equal for parameters of a call whose updates have the same numbers.
    """

    offset: int
    numel: int
    update: Update
    alike: int


def updated(param: Tensor, grad: Tensor, numbers: Tensor, states: Sequence[Tensor], *, update: Update) -> list[Tensor]:
    """Compute the new values of parameters and of their optimizer state.

    Args:
        param: parameters, of any shape.
        grad: gradients, in the shape of ``param``.
        numbers: the result of :meth:`Update.numbers`, as a tensor ``[k]``.
        states: the tensors named by :attr:`Update.states`, each in the shape of ``param``.
        update: the arithmetic.

    Returns:
        New tensors for the parameters and the states, in their dtypes.
    """
    compute = _sgd if update.kind == "sgd" else _adam
    # In a narrow dtype, torch would round a number before it multiplies.
    wide = torch.promote_types(param.dtype, numbers.dtype)
    direction = grad.to(wide)
    found = compute(
        param.to(wide),
        -direction if update.maximize else direction,
        [numbers.select(0, index) for index in range(update.num_numbers)],
        [state.to(wide) for state in states],
        update,
    )
    return [new.to(old.dtype) for new, old in zip(found, (param, *states), strict=True)]


def numbers_tensor(numbers: Sequence[float], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make the tensor of an update's numbers that :func:`updated` takes, for parameters of ``dtype``."""
    return torch.tensor(numbers, dtype=factor_dtype(dtype), device=device)


def _sgd(param: Tensor, grad: Tensor, numbers: list[Tensor], states: list[Tensor], update: Update) -> list[Tensor]:
    decay, momentum, taken, step = numbers
    grad = grad + decay * param
    if update.has_momentum:
        states = [momentum * states[0] + taken * grad]
        grad = grad + momentum * states[0] if update.nesterov else states[0]
    return [param + step * grad, *states]


def _adam(param: Tensor, grad: Tensor, numbers: list[Tensor], states: list[Tensor], update: Update) -> list[Tensor]:
    decay, mean_weight, beta2, square_weight, correction, eps, step = numbers
    if update.decoupled:
        param = decay * param
    else:
        grad = grad + decay * param
    mean = states[0] + mean_weight * (grad - states[0])
    square = beta2 * states[1] + square_weight * grad * grad
    largest = torch.maximum(states[2], square) if update.amsgrad else square
    param = param + step * (mean / (largest.sqrt() / correction + eps))
    return [param, mean, square, largest] if update.amsgrad else [param, mean, square]
