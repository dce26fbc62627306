"""Gradients of weights that ``autograd.grad`` computes apart from those of inputs, as in zero-bubble pipelines.

``tests/fsdp_compile/test_composition.py`` has whole pipelines.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from fsdp_compile import fully_shard


def _model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*model, model):
        fully_shard(module, mesh=mesh)
    return model


def _loss(model: nn.Module) -> Tensor:
    for module in model.modules():
        module.unshard()  # type: ignore[operator]
    return model(torch.arange(12.0).view(3, 4)).square().sum()


def _finish(model: nn.Module) -> None:
    """Reduce gradients as a pipeline schedule does after the last microbatch."""
    stage: Any = PipelineStage(model, 0, 1, torch.device("cpu"), group=dist.group.WORLD)
    stage.perform_reduce_grad(1)


def test_they_are_the_gradients_of_backward(one_rank: None) -> None:
    model = _model()
    params = list(model.parameters())
    found = torch.autograd.grad(_loss(model), params)
    _loss(model).backward()
    for param, gradient in zip(params, found, strict=True):
        assert gradient.placements[0].is_partial()  # type: ignore[attr-defined]
        torch.testing.assert_close(gradient.full_tensor(), param.grad.full_tensor())  # type: ignore[attr-defined, union-attr]


def test_they_add_up_with_those_of_backward(one_rank: None) -> None:
    model = _model()
    params = list(model.parameters())
    _loss(model).backward()
    expected = [2 * param.grad.full_tensor() for param in params]  # type: ignore[union-attr, operator]
    model.zero_grad()
    for param, gradient in zip(params, torch.autograd.grad(_loss(model), params), strict=True):
        param.grad = gradient
    model.set_requires_gradient_sync(False)  # type: ignore[operator]
    _loss(model).backward()
    _finish(model)
    for param, gradient in zip(params, expected, strict=True):
        assert param.grad is not None and param.grad.placements == param.placements  # type: ignore[attr-defined]
        torch.testing.assert_close(param.grad.full_tensor(), gradient)  # type: ignore[attr-defined]


def test_reduced_gradients_are_in_the_way(one_rank: None) -> None:
    model = _model()
    _loss(model).backward()
    with pytest.raises(RuntimeError, match=r"bias has a reduced gradient .* Call optimizer.zero_grad\(set_to_none=True\)"):
        torch.autograd.grad(_loss(model), list(model.parameters()))


def test_hooks_on_parameters(one_rank: None) -> None:
    model = _model()
    hooked: Any = model.get_parameter("1.weight")
    hooked.register_hook(lambda gradient: pytest.fail(f"called with {gradient}"))
    _loss(model).backward()
    assert hooked.grad is not None
    model.zero_grad()
    others = [param for param in model.parameters() if param is not hooked]
    for param, gradient in zip(others, torch.autograd.grad(_loss(model), others), strict=True):
        param.grad = gradient
    with pytest.raises(RuntimeError, match=r"1.weight: a parameter with a hook \(register_hook\) gets no gradient"):
        _finish(model)
