"""Error feedback: what a rounded message leaves out is added to the next one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from passes.collectives.stateful_hook import HookBucket, HookParameter
from passes.collectives.traced_hook import hook_name


class ErrorFeedback:
    """A hook that adds to each gradient what the messages before have left out: ``ErrorFeedback(QuantizedReduce())``.

    Each rank keeps a residual for each parameter: what it wanted to send, less what its message says. Where that is not finite
    (an overflow that a ``GradScaler`` is to find), the residual becomes zero.

    Args:
        hook: ``hook(state, grad, output)``, which fills ``output`` and returns what this rank's message says of ``grad``, in
            its shape, ``[ranks * n]``; or an object with a method ``send`` that does, as :class:`QuantizedReduce` has.

    Attributes:
        hook: as given.

    Raises:
        TypeError: the hook has tensors of its own, which :class:`PowerSGD` uses for feedback of its own.

    Memory: a residual is as large as the full gradient, on every rank. Source: Karimireddy et al. 2019, "Error Feedback Fixes
    SignSGD and other Gradient Compression Schemes".
    """

    def __init__(self, hook: Callable[..., Any]):
        if hasattr(hook, "init_tensors"):
            raise TypeError(f"ErrorFeedback takes a hook without tensors of its own, not {hook_name(hook)}.")
        self.hook = hook

    def init_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        """The residual: ``[ranks, n]``, in the dtype of the reduction."""
        shape = parameter.ranks, parameter.numel
        return {"residual": torch.zeros(shape, dtype=parameter.dtype, device=parameter.device)}

    def __call__(self, state: Any, grad: Tensor, output: Tensor | None, bucket: HookBucket) -> None:
        """Fill ``output`` with what the hook makes of gradient and residual, and keep the new residual.

        Args:
            state: passed to the hook.
            grad: flat gradient of this rank's batch, ``[ranks * n]``.
            output: flat shard, ``[n]``; None over replicas: the hook is called without one, and reduces in place.
            bucket: the residuals.

        Raises:
            TypeError: the hook does not return what its message says.
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
