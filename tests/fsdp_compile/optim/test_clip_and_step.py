"""``clip_and_step``: the results of two calls, to the bit, with one check of the gradients if nothing changes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import fsdp_compile
from fsdp_compile import clip_and_step, clip_grad_norm_, flat_optimizer, offload_optimizer
from fsdp_compile.units.gradient_buffer import KeptGradients
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

_one_buffer = functools.partial(flat_optimizer, torch.optim.AdamW, one_buffer=True)
_MAKERS: dict[str, Callable[..., Any]] = {
    "one buffer": _one_buffer,
    "fused": functools.partial(_one_buffer, fused=True),
    "flat": functools.partial(flat_optimizer, torch.optim.AdamW),
    "of torch": torch.optim.AdamW,
    "on the host": functools.partial(offload_optimizer, torch.optim.AdamW, pin_memory=False),
}


def _model(mesh: Any = None) -> nn.Module:
    torch.manual_seed(0)
    model = models.MLP(hidden=16)
    shard_units(model, mesh or init_device_mesh("cpu", (1,)), fsdp_compile.fully_shard)
    return model


def _backward(model: nn.Module, seed: int = 0) -> None:
    model.zero_grad()
    x = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed + 100 * dist.get_rank()))
    (10 * model(x).square().sum()).backward()


def _full(value: Tensor) -> Tensor:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value.detach()


def _two_calls(optimizer: torch.optim.Optimizer, *options: Any) -> Tensor:
    norm = clip_grad_norm_([param for group in optimizer.param_groups for param in group["params"]], *options)
    optimizer.step()
    return norm


class _Twins:
    """Two equal models: the first is stepped by ``clip_and_step``, the second by two calls."""

    def __init__(self, make: Callable[..., Any]):
        self.models = _model(), _model()
        self.optimizers = [make(model.parameters(), lr=0.1) for model in self.models]

    def step(self, number: int, change: Callable[[nn.Module], None] | None = None, *options: Any) -> None:
        norms = []
        for model, optimizer, way in zip(self.models, self.optimizers, (clip_and_step, _two_calls), strict=True):
            _backward(model, number)
            if change is not None:
                change(model)
            norms.append(way(optimizer, *(options or (0.5,))))
        assert type(norms[0]) is type(norms[1])
        self._compare(*norms)
        for param, other in zip(*(model.parameters() for model in self.models), strict=True):
            self._compare(param, other)
            self._compare(param.grad, other.grad)

    def _compare(self, value: Tensor | None, expected: Tensor | None) -> None:
        if value is None or expected is None:
            assert value is expected
        else:
            torch.testing.assert_close(_full(value), _full(expected), rtol=0.0, atol=0.0)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """The results of checks whether gradients are the kept ones."""
    found: list[bool] = []
    are = KeptGradients.are

    def counted(self: KeptGradients, gradients: Any) -> bool:
        found.append(are(self, gradients))
        return found[-1]

    monkeypatch.setattr(KeptGradients, "are", counted)
    return found


@pytest.mark.parametrize("options", [(0.5,), (1e6,), (0.5, 1.0), (0.5, 3.5), (0.5, math.inf), (0.5, 0.0)])
@pytest.mark.parametrize("name", _MAKERS)
def test_as_two_calls(name: str, options: tuple[float, ...], one_rank: None) -> None:
    twins = _Twins(_MAKERS[name])
    for number in range(4):
        twins.step(number, None, *options)


def test_looks_once(one_rank: None, looks: list[bool]) -> None:
    model = _model()
    optimizer = _one_buffer(model.parameters())
    for number in range(3):
        _backward(model, number)
        looks.clear()
        clip_and_step(optimizer, 0.5)
    assert looks == [True]
    _backward(model)
    looks.clear()
    _two_calls(optimizer, 0.5)
    _two_calls(optimizer, 0.5)
    assert len(looks) > 2


def _replace(model: Any) -> None:
    model.head.weight.grad = model.head.weight.grad * 3


def _drop(model: Any) -> None:
    model.head.weight.grad = None


def _swap_memory(model: Any) -> None:
    local = model.head.weight.grad._local_tensor
    local.data = torch.full_like(local, 3.0)


def _move(model: Any) -> None:
    local = model.head.weight._local_tensor
    local.data = local.clone()


@pytest.mark.parametrize("change", [_replace, _drop, _swap_memory, _move])
def test_changes_are_seen(change: Callable[[nn.Module], None], one_rank: None) -> None:
    twins = _Twins(_one_buffer)
    for number in range(6):
        twins.step(number, change if number == 3 else None)


@pytest.mark.parametrize("where", ["of the optimizer", "of all", "another step"])
def test_code_ahead_of_steps_may_change_gradients(where: str, one_rank: None) -> None:
    """Hooks and wrappers of ``step`` change gradients after clipping, as with two calls."""
    twins = _Twins(_one_buffer)
    twins.step(0)
    twins.step(1)
    handles: list[Any] = []

    def change(optimizer: Any, *_: Any) -> None:
        param = optimizer.param_groups[0]["params"][0]
        param.grad = param.grad * 2

    if where == "of all":
        handles.append(register_optimizer_step_pre_hook(change))
    for optimizer in twins.optimizers:
        if where == "of the optimizer":
            optimizer.register_step_pre_hook(change)
        elif where == "another step":
            step = optimizer.step

            def changed(optimizer: Any = optimizer, step: Any = step) -> None:
                change(optimizer)
                step()

            optimizer.step = changed
    try:
        for number in range(2, 5):
            twins.step(number)
    finally:
        for handle in handles:
            handle.remove()


def test_schedulers_are_told_and_look_no_more(one_rank: None, looks: list[bool]) -> None:
    model = _model()
    optimizer = _one_buffer(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    after: list[Any] = []
    optimizer.register_step_post_hook(lambda *args: after.append(args))
    for number in range(3):
        _backward(model, number)
        looks.clear()
        clip_and_step(optimizer, 0.5)
        scheduler.step()
    assert looks == [True] and len(after) == 3 and optimizer._opt_called
    assert optimizer.param_groups[0]["lr"] == pytest.approx(1e-6)


def test_an_error_steps_nothing(one_rank: None, looks: list[bool]) -> None:
    """An error in clipping steps nothing. The next step checks the gradients anew."""
    twins = _Twins(_one_buffer)
    for number in range(2):
        twins.step(number)
    model, optimizer = twins.models[0], twins.optimizers[0]
    before = [_full(param).clone() for param in model.parameters()]
    _backward(model)
    next(model.parameters()).grad.to_local().fill_(math.inf)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_and_step(optimizer, 0.5, error_if_nonfinite=True)
    assert all(map(torch.equal, before, map(_full, model.parameters())))
    twins.step(2, _replace)
    twins.step(3)


def test_beside_a_plain_parameter(one_rank: None) -> None:
    """A plain parameter is stepped as it is, and clipped with the others."""
    plain = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    pairs = [(_model(), param) for param in plain]
    optimizers = [_one_buffer([*model.parameters(), param], lr=0.1) for model, param in pairs]
    for number in range(3):
        for (model, param), optimizer, way in zip(pairs, optimizers, (clip_and_step, _two_calls), strict=True):
            _backward(model, number)
            param.grad = torch.full((3,), 2.0 + number)
            way(optimizer, 0.5)
    assert torch.equal(*plain) and not torch.equal(plain[0], torch.ones(3))


def test_parameters_are_no_optimizer(one_rank: None) -> None:
    parameters: Any = _model().parameters()
    with pytest.raises(TypeError, match=r"takes an optimizer, not a generator.*clip_grad_norm_"):
        clip_and_step(parameters, 0.5)


def train(one_call: bool, mesh_shape: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor]]:
    """Return the norms and the final parameters, of FSDP2 without ``one_call``. Every rank calls this."""
    mesh = device_mesh(mesh_shape)
    torch.manual_seed(0)
    model = models.MLP(hidden=15)
    shard_units(model, mesh, fsdp_compile.fully_shard if one_call else torch.distributed.fsdp.fully_shard)
    make: Any = _one_buffer if one_call else torch.optim.AdamW
    optimizer, norms = make(model.parameters(), lr=0.01), []
    for number in range(4):
        _backward(model, number)
        if one_call:
            norms.append(clip_and_step(optimizer, 0.5))
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
            optimizer.step()
    return list(map(_full, norms)), list(map(_full, model.parameters()))


@pytest.mark.parametrize(("ranks", "mesh_shape"), [(2, (2,)), (4, (2, 2))])
def test_trains_as_fsdp2(ranks: int, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    ours, theirs = (rank_pools[ranks].run(train, one_call=one_call, mesh_shape=mesh_shape) for one_call in (True, False))
    for found, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
