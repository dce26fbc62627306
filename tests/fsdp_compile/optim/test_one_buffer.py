"""``flat_optimizer(one_buffer=True)``: the tests of flat optimizers, and tests of the buffers."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile
from fsdp_compile import clip_grad_norm_, flat_optimizer
from fsdp_compile.units.gradient_buffer import GradientBuffer
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

from . import test_flat_optimizer
from .test_flat_optimizer import (  # noqa: F401
    local_of,
    rank,
    test_beside_tensor_parallelism,
    test_changes_between_steps,
    test_changes_of_gradients,
    test_copies_and_pickles,
    test_distributed_state_dict,
    test_each_parameter_is_saved_alone,
    test_gathered_parameters_are_stale_after_a_step,
    test_padding_stays_zero,
    test_parameters_that_are_not_sharded,
    test_parameters_with_extensions,
    test_same_as_torch,
    test_same_as_torch_in_other_modes,
    test_state_dicts_to_torch_and_back,
    test_work_does_not_grow_with_the_number_of_parameters,
)

_one_buffer = functools.partial(flat_optimizer, one_buffer=True)


@pytest.fixture(autouse=True)
def _everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """One buffer for all units, also in the imported tests of flat optimizers."""
    monkeypatch.setattr(test_flat_optimizer, "flat_optimizer", _one_buffer)


def _model(layers: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = models.MLP(hidden=16, layers=layers)
    shard_units(model, init_device_mesh("cpu", (1,)), fsdp_compile.fully_shard)
    return model


_WAYS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "merged": {"lowering": "aot_eager"},
    "apart": {"lowering": "aot_eager", "min_bucket_bytes": 0},
}


def _forward(model: nn.Module, way: str) -> Any:
    options = _WAYS[way]
    return model if options is None else torch.compile(model, backend=fsdp_compile.fsdp_backend, options=options)


def _batch(step: int, seed: int = 0) -> Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + seed))


# --- One tensor, and nothing to do for each parameter ---------------------------------------------


class _Sizes(TorchDispatchMode):
    """A record of operators and the number of elements of their first operand, unless it is a scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], Tensor) and args[0].dim():
            self.found.append((func.overloadpacket.__name__, args[0].numel()))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("way", _WAYS)
def test_a_model_is_one_tensor(way: str, fake_ranks: None) -> None:
    """torch's step and clipping take the model as one tensor, from the second step on."""
    torch.manual_seed(0)
    # Shards over four ranks are multiples of 16 bytes, so that no padding lies between neighbours.
    model = models.MLP(16, 32, 16, layers=3)
    shard_units(model, init_device_mesh("cpu", (2, 4)), fsdp_compile.fully_shard)
    optimizer: Any = _one_buffer(torch.optim.SGD, model.parameters(), momentum=0.9)
    forward = _forward(model, way)
    numel = sum(local_of(param).numel() for param in model.parameters())
    for step in range(3):
        forward(torch.ones(3, 16)).sum().backward()
        with _Sizes() if step else nullcontext() as sizes:
            clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
        optimizer.zero_grad()
        if step:
            assert [size for name, size in sizes.found if name in ("mul_", "add_", "linalg_vector_norm")] == [numel] * 5


@pytest.mark.parametrize("way", _WAYS)
def test_gradients_are_the_same_tensors_in_each_step(way: str, one_rank: None) -> None:
    """Gradients that nobody holds are the same objects in each step. So a backward makes one copy for each reduction."""
    model = _model()
    optimizer = _one_buffer(torch.optim.SGD, model.parameters(), lr=0.1)
    forward = _forward(model, way)
    numbers = []
    for step in range(4):
        forward(_batch(step)).sum().backward()
        optimizer.step()
        numbers.append([id(param.grad) for param in model.parameters()])
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert numbers[1:] == numbers[:-1]


# --- Nothing that somebody holds is written over --------------------------------------------------


def _whole(grad: Any) -> Any:
    return grad


def _local(grad: Any) -> Any:
    return grad._local_tensor


def _view(grad: Any) -> Any:
    return grad._local_tensor[1:]


def _detached(grad: Any) -> Any:
    return grad.detach()


def _elsewhere(grad: Any) -> Any:
    return grad._local_tensor.numpy()


@pytest.mark.parametrize("held", [_whole, _local, _view, _detached, _elsewhere])
@pytest.mark.parametrize("way", ["eager", "apart"])
def test_gradients_that_are_held_stay(way: str, held: Callable[[Any], Any], one_rank: None) -> None:
    """A gradient that the user holds is not overwritten, as when gradients of several losses are combined later."""
    model, twin = _model(), _model()
    optimizer: Any = _one_buffer(torch.optim.SGD, model.parameters(), lr=1e-3)
    reference = torch.optim.SGD(twin.parameters(), lr=1e-3)
    kept: list[Any] = []
    for step in range(5):
        for each, other in ((model, optimizer), (twin, reference)):
            forward = _forward(each, way) if each is model else each
            forward(_batch(step)).square().sum().backward()
            if step == 2:
                weight = each.blocks[1].down.weight
                kept.append(held(weight.grad))
                kept.append(local_of(weight.grad).clone())
            other.step()
            other.zero_grad()
        if step == 3:
            found = torch.as_tensor(local_of(kept[0]))
            assert torch.equal(found, kept[1][1:] if held is _view else kept[1])
            kept.clear()
            del found
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7)
    # The gradient is held no more.
    assert model.blocks[1].down.weight.grad is None
    model(_batch(0)).sum().backward()
    (buffer,) = optimizer._buffers
    assert all(param.param.grad is gradient for param, gradient in zip(buffer.params, buffer.gradients, strict=True))


def test_a_gradient_that_autograd_has_saved_is_not_taken_for_what_it_was(one_rank: None) -> None:
    model = _model()
    optimizer = _one_buffer(torch.optim.SGD, model.parameters(), lr=1e-3)
    for step in range(3):
        optimizer.zero_grad()
        model(_batch(step)).square().sum().backward()
        optimizer.step()
    before = local_of(model.bias.grad).clone()
    weight = torch.ones_like(model.bias.grad).requires_grad_()
    product = (weight * model.bias.grad).sum()
    optimizer.zero_grad()
    model(_batch(3)).square().sum().backward()
    assert not torch.equal(local_of(model.bias.grad), before)
    try:
        product.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)
    else:
        assert torch.equal(local_of(weight.grad), before)


# --- Memory ---------------------------------------------------------------------------------------


def test_buffers_go_with_the_optimizer(one_rank: None) -> None:
    model = _model()
    optimizer: Any = _one_buffer(torch.optim.AdamW, model.parameters())
    model(_batch(0)).sum().backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    clip_grad_norm_(model.parameters(), 1.0)
    (buffer,) = map(weakref.ref, optimizer._buffers)
    assert isinstance(buffer(), GradientBuffer)
    model.zero_grad()
    del optimizer
    gc.collect()
    assert buffer() is None
    # Gradients are stored as they are without the optimizer.
    model(_batch(1)).sum().backward()
    assert model.bias.grad is not None


def test_each_gradient_and_shard_has_a_storage_of_its_own(one_rank: None) -> None:
    """torch saves and copies the whole storage of a tensor, so each has one of its own."""
    model = _model()
    optimizer = _one_buffer(torch.optim.AdamW, model.parameters())
    for step in range(2):
        optimizer.zero_grad()
        model(_batch(step)).sum().backward()
        optimizer.step()
    for param in model.parameters():
        for local in (param._local_tensor, param.grad._local_tensor):
            assert local.storage_offset() == 0 and local.untyped_storage().nbytes() == local.nbytes


# --- What changes ---------------------------------------------------------------------------------


def _twins(way: str) -> Iterator[tuple[nn.Module, Any, Any]]:
    for kind in (_one_buffer, None):
        model = _model()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        if kind is not None:
            optimizer = kind(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-3)
        yield model, _forward(model, way), optimizer


def _assert_close(model: nn.Module, twin: nn.Module) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7, msg=name)


@pytest.mark.parametrize("way", ["eager", "merged"])
def test_microbatches(way: str, one_rank: None) -> None:
    """Each microbatch is reduced, or the last alone. Gradients are added to those of earlier microbatches."""
    made = list(_twins(way))
    for step in range(4):
        for model, forward, optimizer in made:
            for microbatch in range(3):
                model.set_requires_gradient_sync(step % 2 == 0 or microbatch == 2)
                forward(_batch(3 * step + microbatch)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=step != 1)
        _assert_close(made[0][0], made[1][0])


@pytest.mark.parametrize("way", ["eager", "merged"])
def test_cast_frozen_and_thawed(way: str, one_rank: None) -> None:
    made = list(_twins(way))
    for step in range(8):
        for model, forward, optimizer in made:
            if step == 2:
                model.blocks[1].up.weight.requires_grad_(False)
            if step == 4:
                model.blocks[1].up.weight.requires_grad_(True)
            if step == 5:
                model.double()
                optimizer.state.clear()
            if step == 7:
                model.float()
                optimizer.state.clear()
            forward(_batch(step).to(model.bias.dtype)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        _assert_close(made[0][0], made[1][0])


def test_a_model_without_memory_yet(one_rank: None) -> None:
    """The optimizer is made before the parameters have memory."""
    with torch.device("meta"):
        model = models.MLP(hidden=16)
    shard_units(model, init_device_mesh("cpu", (1,)), fsdp_compile.fully_shard)
    optimizer: Any = _one_buffer(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-3)
    twin = _model(layers=2)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    model.to_empty(device="cpu")
    model.load_state_dict(twin.state_dict())
    for step in range(3):
        for each, other in ((model, optimizer), (twin, reference)):
            each(_batch(step)).square().sum().backward()
            other.step()
            other.zero_grad()
    _assert_close(model, twin)
    assert len(optimizer._plan.runs) == 1


def test_two_optimizers_share_units(one_rank: None) -> None:
    """One optimizer has weights, the other biases: neighbours in storage, whose gradients are reduced together."""
    made = []
    for kind in (_one_buffer, None):
        model = _model()
        kinds = [[param for param in model.parameters() if (param.dim() > 1) == first] for first in (True, False)]
        make: Any = functools.partial(kind, torch.optim.SGD) if kind is not None else torch.optim.SGD
        made.append((model, [make(params, lr=0.1, momentum=0.9) for params in kinds]))
    for step in range(3):
        for model, optimizers in made:
            model(_batch(step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        _assert_close(made[0][0], made[1][0])


def test_two_optimizers_have_one_unit_in_common(one_rank: None) -> None:
    """The unit stays where the first optimizer has moved it, so that neither has to cut runs anew in each step."""
    made = []
    for kind in (_one_buffer, None):
        model = _model()
        make: Any = functools.partial(kind, torch.optim.SGD) if kind is not None else torch.optim.SGD
        weights = [block.up.weight for block in model.blocks]
        kinds = [[*weights[:2]], [model.blocks[1].up.bias, weights[2], model.bias]]
        made.append((model, [make(params, lr=1e-2) for params in kinds]))
    plans = []
    for step in range(3):
        for model, optimizers in made:
            model(_batch(step)).square().sum().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        plans.append([optimizer._plan for optimizer in made[0][1]])
        _assert_close(made[0][0], made[1][0])
    assert plans[0] == plans[2]


# --- On ranks -------------------------------------------------------------------------------------


def train(shape: tuple[int, ...], lowering: str | None, **options: Any) -> None:
    """Train with clipping and microbatches, beside FSDP2 with torch's optimizer and clipping. Every rank calls this."""
    mesh = device_mesh(shape)
    made = []
    for fully_shard in (fsdp_compile.fully_shard, torch.distributed.fsdp.fully_shard):
        torch.manual_seed(0)
        # Ranks do not divide the 15 rows.
        model = models.MLP(hidden=15, layers=8)
        shard_units(model, mesh, fully_shard, **options)
        made.append(model)
    model, twin = made
    forward: Any = model
    if lowering is not None:
        forward = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": lowering})
    optimizer = _one_buffer(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-3)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    for step in range(4):
        norms = []
        for run, each, other, clips in (
            (forward, model, optimizer, clip_grad_norm_),
            (twin, twin, reference, torch.nn.utils.clip_grad_norm_),
        ):
            for microbatch in range(1 + step % 2):
                run(_batch(2 * step + microbatch, dist.get_rank())).square().sum().backward()
            norm: Any = clips(each.parameters(), 0.5)
            norms.append(norm.full_tensor())
            other.step()
            other.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-5, atol=0)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.to_local(), other.to_local(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("lowering", [None, "aot_eager", "inductor"])
def test_trains_as_fsdp2(lowering: str | None, rank_pools: RankPools) -> None:
    rank_pools[2].run(train, shape=(2,), lowering=lowering)


@pytest.mark.night
@pytest.mark.parametrize("shape", [(4,), (2, 2)], ids=str)
def test_trains_as_fsdp2_on_four_ranks(shape: tuple[int, ...], rank_pools: RankPools) -> None:
    rank_pools[4].run(train, shape=shape, lowering="aot_eager", reshard_after_forward=False)
