"""The modules of ``torch.nn`` train as with whole parameters, on the inputs of torch's own tests."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.common_modules import module_db

from fsdp_compile import fsdp_backend, fully_shard
from passes.fx.torch_internals.core import pytree
from tests.common.distributed import RankPools, device_mesh

#: Inputs of each module.
_MOST = 3
_INFOS = {info.name: info for info in module_db if not issubclass(info.module_cls, nn.modules.lazy.LazyModuleMixin)}


class Scaled(nn.Module):
    """A module whose inputs are scaled by a parameter: so each has one, and a unit inside if it has parameters of its own."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def scaled(value: Any) -> Any:
            return value * self.scale if isinstance(value, Tensor) and value.requires_grad else value

        args, kwargs = pytree.tree_map(scaled, (args, kwargs))
        return self.inner(*args, **kwargs)


def _step(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    """Call a function of tensors, and differentiate a sum of its results in which every element counts differently."""

    def copied(value: Any) -> Any:
        return value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value

    torch.manual_seed(1)
    args, kwargs = pytree.tree_map(copied, (args, kwargs))
    outputs = pytree.tree_leaves(function(*args, **kwargs))
    found = [out for out in outputs if isinstance(out, Tensor) and out.requires_grad]
    sum((out * torch.arange(out.numel()).view(out.shape).cos()).sum() for out in found).backward()  # type: ignore[union-attr]
    return found


def train(name: str) -> int:
    """Compare outputs and gradients of a module for several inputs. Return how many. Runs on every rank."""
    info, count = _INFOS[name], 0
    for sample in info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=True):
        torch.manual_seed(0)
        constructor, inputs = sample.constructor_input, sample.forward_input
        module = info.module_cls(*constructor.args, **constructor.kwargs).double()
        if count == _MOST:
            break
        if inputs is None:
            continue
        alone, model = Scaled(copy.deepcopy(module)), Scaled(module)
        if any(True for _ in module.parameters()):
            fully_shard(model.inner, mesh=device_mesh((dist.get_world_size(),)))
        fully_shard(model, mesh=device_mesh((dist.get_world_size(),)))
        torch._dynamo.reset()
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
        for _ in range(2):
            model.zero_grad()
            alone.zero_grad()
            outputs, expected = (_step(function, inputs.args, inputs.kwargs) for function in (compiled, alone))
            for out, other in zip(outputs, expected, strict=True):
                torch.testing.assert_close(out, other, equal_nan=True)
                assert out.stride() == other.stride()
            for (path, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                grad = None if param.grad is None else param.grad.full_tensor()  # type: ignore[attr-defined]
                torch.testing.assert_close(grad, other.grad, equal_nan=True, msg=lambda text, path=path: f"{path}: {text}")
        count += 1
    return count


@pytest.mark.night
@pytest.mark.parametrize("name", _INFOS)
def test_train(name: str, rank_pools: RankPools) -> None:
    assert rank_pools[2].run(train, name=name)[0], "torch has no input for it"
