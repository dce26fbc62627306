"""The bytes of optimizer state: counted after an optimizer's first step, assumed before, and equal on all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.two_tensor import TwoTensor

from fsdp_compile import flat_optimizer, fully_shard
from fsdp_compile.optim.device_state import device_state_bytes, on_first_steps
from fsdp_compile.units.sharded_param import ShardedParam, params_with_memory

_RANKS = 8
# Eight ranks cannot share 9 or 3 rows equally. Rank 0 has the largest shards.
_SHAPES = ((16, 4), (9, 4), (3, 4))


@pytest.fixture
def params(fake_ranks: None) -> Iterator[list[ShardedParam]]:
    model = nn.Module()
    for index, shape in enumerate(_SHAPES):
        model.register_parameter(f"p{index}", nn.Parameter(torch.ones(shape)))
    fully_shard(model, mesh=init_device_mesh("cpu", (_RANKS,)))
    known = params_with_memory()
    yield [known[id(param)] for param in model.parameters()]


def padded_elements(params: list[ShardedParam]) -> int:
    return sum(param.padded_numel for param in params)


def step(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.ones_like(param)
    optimizer.step()


def unknown(param: ShardedParam) -> float:
    raise AssertionError(f"{param.name} is known")


@pytest.mark.parametrize("make", ["torch", "flat"])
@pytest.mark.parametrize(
    ("optimizer_class", "options", "tensors"),
    [
        (torch.optim.AdamW, {}, 2),
        (torch.optim.AdamW, {"amsgrad": True}, 3),
        (torch.optim.SGD, {}, 0),
        (torch.optim.SGD, {"momentum": 0.9}, 1),
    ],
)
def test_is_what_it_keeps(
    make: str, optimizer_class: Any, options: dict[str, Any], tensors: int, params: list[ShardedParam]
) -> None:
    given = [param.param for param in params]
    optimizer = optimizer_class(given, **options) if make == "torch" else flat_optimizer(optimizer_class, given, **options)
    assert device_state_bytes(params, lambda param: 0.5 * param.padded_numel) == padded_elements(params) // 2
    step(optimizer)
    # Padding counts: bytes are those of rank 0, which has all rows of its padded shards.
    assert device_state_bytes(params, unknown) == 4 * tensors * padded_elements(params)


@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD])
def test_gradients_that_stay_count(optimizer_class: Any, params: list[ShardedParam]) -> None:
    optimizer = flat_optimizer(optimizer_class, [param.param for param in params], one_buffer=True)
    step(optimizer)
    tensors = 3 if optimizer_class is torch.optim.AdamW else 1
    assert device_state_bytes(params, unknown) == 4 * tensors * padded_elements(params)
    del optimizer
    assert device_state_bytes(params, lambda param: 0.0) == 0


def test_what_has_not_stepped_is_assumed(params: list[ShardedParam]) -> None:
    """Assumed bytes count for a parameter without a gradient so far, and for one without an optimizer."""
    first = torch.optim.SGD([param.param for param in params[:2]], momentum=0.9)
    params[0].param.grad = torch.ones_like(params[0].param)
    first.step()
    expected = 4 * params[0].padded_numel + 100 * (params[1].padded_numel + params[2].padded_numel)
    assert device_state_bytes(params, lambda param: 100 * param.padded_numel) == expected


def test_two_optimizers_of_a_parameter_both_count(params: list[ShardedParam]) -> None:
    """An optimizer that has taken the place of another counts beside it while the other still exists."""
    first, second, third = (torch.optim.SGD([param.param for param in params], momentum=momentum) for momentum in (0.9, 0.9, 0))
    for optimizer in (first, second, third):
        step(optimizer)
    assert device_state_bytes(params, unknown) == 2 * 4 * padded_elements(params)
    del first, optimizer
    assert device_state_bytes(params, unknown) == 4 * padded_elements(params)


def test_what_is_elsewhere_takes_nothing(params: list[ShardedParam]) -> None:
    optimizer = torch.optim.SGD([param.param for param in params], momentum=0.9)
    step(optimizer)
    for entry in optimizer.state.values():
        entry["momentum_buffer"]._local_tensor = entry["momentum_buffer"]._local_tensor.to("meta")
    assert device_state_bytes(params, unknown) == 0


def test_first_steps_are_told_of_once(params: list[ShardedParam]) -> None:
    called: list[str] = []
    handle = on_first_steps(lambda: called.append("called"))
    first, second = (torch.optim.SGD([params[0].param]) for _ in range(2))
    for optimizer in (first, first, second):
        step(optimizer)
    assert len(called) == 2
    handle.remove()
    step(torch.optim.SGD([params[0].param]))
    assert len(called) == 2


def test_a_subclass_counts_with_all_that_it_holds(params: list[ShardedParam]) -> None:
    """All inner tensors count, such as quantised elements and scales. Missing rows count as padding."""
    optimizer = torch.optim.SGD([params[1].param], momentum=0.9)
    step(optimizer)
    local = optimizer.state[params[1].param]["momentum_buffer"]._local_tensor
    optimizer.state[params[1].param]["momentum_buffer"]._local_tensor = TwoTensor(local, local.clone())
    assert device_state_bytes(params[1:2], unknown) == 2 * 4 * params[1].padded_numel
