"""Error feedback: the rounding error of a message is added to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.collectives.stateful_hook import HookBucket, HookParameter
from passes.collectives.traced_hook import hook_name


class ErrorFeedback:
    """A hook that adds to each gradient the rounding errors of earlier messages: ``ErrorFeedback(QuantizedReduce())``.

    Each rank keeps a residual for each parameter: the values that it wanted to send, minus the rounded values that it sent. A
    residual that is not finite (an overflow that a ``GradScaler`` is to find) becomes zero.

    Args:
        hook: ``hook(state, grad, output)``, which fills ``output`` and returns the rounded values that this rank sent, shaped
            like ``grad``: ``[ranks * n]``. Or an object with such a method ``send``, as :class:`QuantizedReduce` has.

    Attributes:
        hook: as given.

    Raises:
        TypeError: the hook has tensors of its own. :class:`PowerSGD` has them for its own error feedback.

    Memory: a residual is as large as the full gradient, on every rank. Source: Karimireddy et al. 2019, "Error Feedback Fixes
    SignSGD and other Gradient Compression Schemes".
    """

    def __init__(self, hook: Callable[..., Any]):
        if hasattr(hook, "init_tensors"):
            raise TypeError(f"ErrorFeedback takes a hook without tensors of its own, not {hook_name(hook)}.")
        self.hook = hook

    def init_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        """Make the residual of zeros: ``[ranks, n]``, in the dtype of the reduction."""
        shape = parameter.ranks, parameter.numel
        return {"residual": torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)}

    def __call__(self, state: Any, grad: Tensor, output: Tensor | None, bucket: HookBucket) -> None:
        """Reduce the sum of gradient and residual by the hook, fill ``output``, and keep the new residual.

        Args:
            state: passed to the hook.
            grad: flat gradient of this rank's batch, ``[ranks * n]``.
            output: flat shard, ``[n]``. None over replicas: the hook is called without an output, and ``grad`` gets the result.
            bucket: has the residuals.

        Raises:
            TypeError: the hook does not return the values that it sent.
        """
        wanted = grad + bucket.flat("residual")
        given = wanted.clone()
        sent = getattr(self.hook, "send", self.hook)(state, given, *(() if output is None else (output,)))
        if output is None:
            grad.copy_(given)
        if not isinstance(sent, Tensor) or sent.shape != grad.shape:
            raise TypeError(
                f"ErrorFeedback wants {hook_name(self.hook)} to return what its message says, a tensor {list(grad.shape)} like "
                f"the gradient, not {list(sent.shape) if isinstance(sent, Tensor) else sent!r}."
            )
        left_out = wanted - sent.to(wanted.dtype)
        bucket.write("residual", torch.where(left_out.isfinite(), left_out, 0))
