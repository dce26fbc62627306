"""The arithmetic of updates, compared with torch's optimizers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from passes.ir.update import Update, numbers_tensor, updated

_CASES: list[tuple[str, Update, dict[str, Any]]] = [
    ("SGD", Update("sgd"), {}),
    ("SGD", Update("sgd", has_momentum=True), {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (
        "SGD",
        Update("sgd", has_momentum=True, nesterov=True, maximize=True),
        {"momentum": 0.9, "nesterov": True, "maximize": True},
    ),
    ("Adam", Update("adam"), {"weight_decay": 0.1}),
    ("Adam", Update("adam", amsgrad=True, maximize=True), {"amsgrad": True, "maximize": True}),
    ("AdamW", Update("adam", decoupled=True), {"weight_decay": 0.1, "betas": (0.8, 0.95)}),
]


@pytest.mark.parametrize(("name", "update", "options"), _CASES, ids=lambda value: str(value) if isinstance(value, str) else "")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_same_as_torch(name: str, update: Update, options: dict[str, Any], dtype: torch.dtype) -> None:
    """The learning rate changes, and gradients shrink, so that ``amsgrad`` makes a difference."""
    torch.manual_seed(0)
    theirs = torch.randn(64, dtype=dtype)
    ours = [theirs.clone(), *(torch.zeros(64, dtype=dtype) for _ in update.states)]
    optimizer = getattr(torch.optim, name)([theirs], lr=0.1, **options)
    for step in range(5):
        theirs.grad = torch.randn(64, dtype=dtype) * 0.5**step
        group = optimizer.param_groups[0]
        group["lr"] = 0.1 / (step + 1)
        numbers = numbers_tensor(update.numbers(group, step), dtype, theirs.device)
        assert numbers.shape == (update.num_numbers,)
        ours = updated(ours[0], theirs.grad, numbers, ours[1:], update=update)
        optimizer.step()
    assert all(value.dtype == dtype for value in ours)
    rtol = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(ours[0], theirs, rtol=rtol, atol=rtol)
    for kept, state in zip(update.states, ours[1:], strict=True):
        torch.testing.assert_close(state, optimizer.state[theirs][kept], rtol=rtol, atol=rtol)


def test_narrow_parameters_are_rounded_once() -> None:
    """The learning rate keeps its precision; only the result is rounded to the parameter's dtype."""
    param, grad = torch.ones(1, dtype=torch.bfloat16), torch.full((1,), 100.0, dtype=torch.bfloat16)
    numbers = numbers_tensor((0.0, 0.0, 1.0, -0.10007), torch.bfloat16, param.device)
    (found,) = updated(param, grad, numbers, [], update=Update("sgd"))
    assert found.item() == torch.tensor(1 - 10.007).bfloat16().item()
