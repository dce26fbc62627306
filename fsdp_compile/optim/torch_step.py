"""Steps of torch's optimizers, for other tensors than the optimizer's own."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.optim import Optimizer

# A flat optimizer has the last one, too: it tells whether others may hold the state.
_REPLACED = ("param_groups", "state", "_state_is_lent")


def without_hooks(step: Any) -> Callable[[Optimizer], Any]:
    """Return an optimizer's ``step`` without hooks, where they have run already, with the optimizer's own parameters."""
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def step_after(closure: Callable[[], Any] | None, step: Callable[[], None]) -> Any:
    """Step, uncompiled, after the closure of ``Optimizer.step``, and return the closure's loss."""
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    if torch.compiler.is_dynamo_compiling():
        torch.compiler.disable(step)()
    else:
        step()
    return loss


def step_as(
    optimizer: Optimizer, step: Callable[[Optimizer], Any], groups: list[dict[str, Any]], kept: MutableMapping[Any, Any]
) -> None:
    """Run ``step`` on ``groups`` with the state ``kept``, instead of the optimizer's own groups and state."""
    attributes = vars(optimizer)
    own = {name: attributes[name] for name in _REPLACED if name in attributes}
    attributes |= {"param_groups": groups, "state": kept}
    try:
        step(optimizer)
    finally:
        attributes |= own
