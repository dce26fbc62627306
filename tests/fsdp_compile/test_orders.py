"""Ways to call forward and backward: other orders, parts alone, structured activations, unused outputs.

Models train on two ranks in float64, beside a twin that is not sharded and sees the batches of both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import FSDPModule, fsdp_backend, fully_shard
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}
_systems = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def _sharded(model: nn.Module, compiled: bool) -> Any:
    shard_units(model, device_mesh((dist.get_world_size(),)), fully_shard)
    if compiled:
        model.compile(**_EAGER_LOWERING)
    return model


def _assert_gradients(model: nn.Module, twin: nn.Module) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        assert (ours.grad is None) is (theirs.grad is None), name
        if theirs.grad is not None:
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


# --- Orders ---------------------------------------------------------------------------------------


def _two_forwards_one_loss(model: Any, x: Tensor) -> None:
    # As preference optimisation does.
    (model(x).sum() - model(x * 2).square().sum()).tanh().backward()


def _last_forward_first(model: Any, x: Tensor) -> None:
    losses = [model(x * factor).square().sum() for factor in (1, 2, 3)]
    for loss in reversed(losses):
        loss.backward()


def _one_forward_one_backward(model: Any, x: Tensor) -> None:
    """Run as a stage of a pipeline: a forward before each backward, and gradients reduced in the last."""
    steps, pending = 4, []
    for step in range(steps + 1):
        if step < steps:
            pending.append(model(x * (step + 1)).square().sum())
        if step > 0:
            is_last = step == steps
            if isinstance(model, FSDPModule):
                model.set_is_last_backward(is_last)
                model.set_requires_gradient_sync(is_last)
                model.set_reshard_after_backward(is_last)
            pending.pop(0).backward()


def _root_then_a_part(model: Any, x: Tensor) -> None:
    model(x).square().sum().backward()
    model.blocks[0](x).square().sum().backward()


_ORDERS: dict[str, Callable[[Any, Tensor], None]] = {
    order.__name__[1:]: order
    for order in (_two_forwards_one_loss, _last_forward_first, _one_forward_one_backward, _root_then_a_part)
}


def train_in_order(order: str, compiled: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin = models.MLP().double()
    model = models.MLP().double()
    model.load_state_dict(twin.state_dict())
    _sharded(model, compiled)
    optimizers = [torch.optim.SGD(either.parameters(), lr=0.1, momentum=0.9) for either in (model, twin)]
    for step in range(2):
        torch.manual_seed(step)
        batches = torch.randn(world, 3, 8, dtype=torch.float64) / 4
        _ORDERS[order](model, batches[rank])
        for batch in batches:
            _ORDERS[order](twin, batch)
        for parameter in twin.parameters():
            parameter.grad /= world
        _assert_gradients(model, twin)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@_systems
@pytest.mark.parametrize("order", _ORDERS)
def test_order_of_forwards_and_backwards(order: str, compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_in_order, order=order, compiled=compiled)


# --- Activations ----------------------------------------------------------------------------------


@dataclass
class Pair:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    pair: Pair
    more: dict[str, list[Tensor]]


class Structured(nn.Module):
    """Units that pass tensors to each other in a dataclass, in a dict of lists, and in a named tuple."""

    class Part(models.Block):
        def forward(self, inputs: Named) -> Named:  # type: ignore[override]
            def through(x: Tensor) -> Tensor:
                return F.linear(torch.tanh(self.up(x)), self.down.weight)

            more = {key: [through(tensor) for tensor in tensors] for key, tensors in inputs.more.items()}
            return Named(Pair(through(inputs.pair.x), through(inputs.pair.y)), more)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Part(8, 7) for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        state = Named(Pair(x, x + 1), {"more": [x - 1, x * 2]})
        for block in self.blocks:
            state = block(state)
        return self.head(state.pair.x + state.pair.y + sum(state.more["more"]))


def structured_activations(compiled: bool) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin, model = Structured().double(), Structured().double()
    model.load_state_dict(twin.state_dict())
    _sharded(model, compiled)
    batches = torch.randn(world, 3, 8, dtype=torch.float64)
    model(batches[rank]).square().mean().backward()
    twin(batches.flatten(0, 1)).square().mean().backward()
    # Nothing reads down.bias.
    _assert_gradients(model, twin)


@_systems
def test_structured_activations(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(structured_activations, compiled=compiled)


class WithoutInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self) -> Tensor:
        return self.weight @ self.weight


@_systems
def test_a_forward_without_inputs(compiled: bool, one_rank: None) -> None:
    model = fully_shard(WithoutInputs(), mesh=device_mesh_of_one())
    if compiled:
        model.compile(**_EAGER_LOWERING)
    model().sum().backward()
    grad: Any = model.weight.grad
    torch.testing.assert_close(grad.full_tensor(), torch.full((4, 4), 2.0))


# --- Outputs --------------------------------------------------------------------------------------


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.used(x), self.unused(x)


@_systems
def test_an_unused_output_is_as_with_plain_torch_compile(compiled: bool, one_rank: None) -> None:
    """Parameters that only the unused output needs have no gradient uncompiled, and zeros compiled, sharded or not."""
    plain, model = TwoOutputs(), fully_shard(TwoOutputs(), mesh=device_mesh_of_one())
    if compiled:
        plain.compile(backend="aot_eager")
        model.compile(**_EAGER_LOWERING)
    for either in (plain, model):
        either(torch.ones(2, 8))[0].sum().backward()
        grad: Any = either.unused.weight.grad
        assert (grad.abs().sum() == 0) if compiled else grad is None
        assert either.used.weight.grad is not None


def device_mesh_of_one() -> Any:
    return torch.distributed.device_mesh.init_device_mesh("cpu", (1,))


# --- Beside DistributedDataParallel ---------------------------------------------------------------


class InnerAndOuter(nn.Module):
    """A sharded module with a replicated module around it and a replicated one inside."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(8, 7)])
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(self.blocks[0](x))


def beside_ddp() -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin, model = InnerAndOuter().double(), InnerAndOuter().double()
    model.load_state_dict(twin.state_dict())
    block = model.blocks[0]
    fully_shard(block, mesh=device_mesh((world,)), ignored_params=set(block.down.parameters()))
    left = [name for name, parameter in model.named_parameters() if isinstance(parameter, DTensor)]
    assert left == ["blocks.0.up.weight", "blocks.0.up.bias"]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left)
    replicated = DistributedDataParallel(model, broadcast_buffers=False)
    batches = torch.randn(world, 3, 8, dtype=torch.float64)
    replicated(batches[rank]).square().mean().backward()
    twin(batches.flatten(0, 1)).square().mean().backward()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        grad = ours.grad.full_tensor() if isinstance(ours.grad, DTensor) else ours.grad
        torch.testing.assert_close(grad, theirs.grad, rtol=1e-9, atol=1e-12, msg=name)


def test_beside_ddp(rank_pools: RankPools) -> None:
    rank_pools[2].run(beside_ddp)


# --- Parameters of other dtypes -------------------------------------------------------------------


class Spectral(nn.Module):
    """A module with a complex weight, as in spectral layers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 5, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.view_as_real(x.to(torch.complex64) @ self.weight)


def train_complex(options: Any) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    twin, model = Spectral(), Spectral()
    model.load_state_dict(twin.state_dict())
    fully_shard(model, mesh=device_mesh((world,)))
    if options is not None:
        model.compile(**options)
    batches = torch.randn(world, 4, 3)
    model(batches[rank]).square().mean().backward()
    twin(batches).square().mean().backward()
    assert isinstance(model.weight.grad, DTensor) and twin.weight.grad is not None
    torch.testing.assert_close(model.weight.grad.full_tensor(), twin.weight.grad)


@_systems
def test_complex_parameters(compiled: bool, rank_pools: RankPools) -> None:
    """FSDP2 trains complex parameters over NCCL, but has no collective for them over Gloo."""
    rank_pools[2].run(train_complex, options=_EAGER_LOWERING if compiled else None)


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_complex_parameters_of_one_rank(lowering: str, one_rank: None) -> None:
    train_complex({"backend": fsdp_backend, "options": {"lowering": lowering}})
