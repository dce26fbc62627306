"""Optimizers over flat storage give the values of torch's own, to the bit, on an equal model.

Gradients are written by hand into the memory where a backward has left them. Tests run as the first or the last of eight
pretended ranks; the last has padding.
"""

from __future__ import annotations

import copy
import functools
import gc
import io
import pickle
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim.lr_scheduler import StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile
from fsdp_compile import flat_optimizer
from fsdp_compile.optim.flat_optimizer import ELEMENTWISE, FlatOptimizer
from fsdp_compile.units.own_storage import with_own_storage
from fsdp_compile.units.param_state import FlatSlice, note_slice
from tests.common import models
from tests.common.parity import shard_units
from tests.common.subclasses import Halved

_OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"weight_decay": 0.1},
    "AdamW": {},
    "SGD": {"momentum": 0.9, "lr": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


@pytest.fixture(params=[0, 7], ids=["first rank", "last rank"])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """The first or the last of eight pretended ranks; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


def _model(fully_shard: Callable[..., Any] = fsdp_compile.fully_shard, hidden: int = 15, **options: Any) -> nn.Module:
    """Make a model in which ``up`` has 15 rows for eight ranks: the last rank has one row and a row of padding."""
    torch.manual_seed(0)
    model = models.MLP(hidden=hidden)
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard, **options)
    return model


def _backward(model: nn.Module, step: int, without: tuple[str, ...] = ()) -> None:
    """Run a backward, and overwrite its gradients in place with values that depend only on the step and the parameter."""
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    for index, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        local = param.grad._local_tensor if isinstance(param.grad, DTensor) else param.grad
        local.copy_(torch.randn(local.shape, generator=generator))
        if name in without:
            param.grad = None


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two groups, the second without weight decay for vectors. So neighbours in storage are in different groups."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]


def local_of(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def _assert_same(model: nn.Module, other: nn.Module, optimizer: Any = None, other_optimizer: Any = None) -> None:
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local_of(param), local_of(twin)), name
    if optimizer is None:
        return
    state, other_state = optimizer.state_dict(), other_optimizer.state_dict()
    assert state["param_groups"] == other_state["param_groups"]
    assert state["state"].keys() == other_state["state"].keys()
    for index, kept in state["state"].items():
        assert kept.keys() == other_state["state"][index].keys()
        for name, value in kept.items():
            twin = other_state["state"][index][name]
            assert type(value) is type(twin) and value.shape == twin.shape and value.dtype == twin.dtype, (index, name)
            assert torch.equal(local_of(value), local_of(twin)), (index, name)
            if isinstance(value, DTensor):
                assert value.placements == twin.placements and value.stride() == twin.stride()


def _pair(fully_shard: Any = fsdp_compile.fully_shard) -> tuple[nn.Module, nn.Module]:
    return _model(), _model(fully_shard)


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_same_as_torch(kind: type[torch.optim.Optimizer], rank: int) -> None:
    """Values equal those of torch's optimizer on FSDP2, with groups, a schedule, and steps without some gradients."""
    model, twin = _pair(torch.distributed.fsdp.fully_shard)
    options = {"lr": 1e-2, **_OPTIONS.get(kind.__name__, {})}
    make: Any = kind
    optimizer, reference = flat_optimizer(kind, groups_of(model), **options), make(groups_of(twin), **options)
    assert isinstance(optimizer, kind)
    schedules = [StepLR(each, 2, 0.5) for each in (optimizer, reference)]
    for step in range(5):
        without = {0: ("blocks.0.down.weight",), 3: ("blocks.1.up.weight", "bias")}.get(step, ())
        for each in (model, twin):
            _backward(each, step, without)
        for each in (optimizer, reference):
            each.step()
        for schedule in schedules:
            schedule.step()
        _assert_same(model, twin, optimizer, reference)


_MODES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"foreach": True}),
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("Adam", {"fused": True, "maximize": True}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True}),
    ("SGD", {}),
    ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
]


@pytest.mark.parametrize(("name", "options"), _MODES, ids=str)
def test_same_as_torch_in_other_modes(name: str, options: dict[str, Any], fake_ranks: None) -> None:
    """Fused kernels are only close: they round the elements after the last full vector in another way."""
    model, twin = _pair()
    kind = getattr(torch.optim, name)
    options = {"lr": 1e-2, **options}
    optimizer, reference = flat_optimizer(kind, model.parameters(), **options), kind(twin.parameters(), **options)
    for step in range(3):
        for each, other in ((model, optimizer), (twin, reference)):
            _backward(each, step)
            other.step()
        if options.get("fused"):
            for param, other in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7)
        else:
            _assert_same(model, twin, optimizer, reference)


def test_fused_where_torch_has_none_for_dtensors(fake_ranks: None) -> None:
    model, twin = _pair()
    optimizer = flat_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, momentum=0.9, fused=True)
    reference = torch.optim.SGD(twin.parameters(), lr=0.1, momentum=0.9)
    for step in range(3):
        for each, other in ((model, optimizer), (twin, reference)):
            _backward(each, step)
            other.step()
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7)


# --- How few operators ----------------------------------------------------------------------------


def _deep(layers: int, hidden: int = 16) -> nn.Module:
    torch.manual_seed(0)
    model = models.MLP(hidden=hidden, layers=layers)
    shard_units(model, init_device_mesh("cpu", (8,)), fsdp_compile.fully_shard)
    return model


def test_a_step_takes_one_tensor_for_each_unit(fake_ranks: None) -> None:
    model = _deep(4)
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters())
    seen: list[list[int]] = []
    step = torch.optim.AdamW._init_group

    def count(self: Any, group: Any, *args: Any) -> Any:
        seen.append([param.numel() for param in group["params"]])
        assert all(type(param) is Tensor for param in group["params"])
        return step(self, group, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "_init_group", count)
        for index in range(2):
            _backward(model, index)
            optimizer.step()
    shards = [sum(param._local_tensor.numel() for param in block.parameters()) for block in model.blocks]
    root = sum(param._local_tensor.numel() for param in (model.bias, *model.head.parameters()))
    assert [sorted(numels) for numels in seen] == [sorted([*shards, root])] * 2


@pytest.mark.parametrize("options", [None, {}, {"min_bucket_bytes": 0}], ids=str)
def test_gradients_in_order_are_not_copied(options: dict[str, Any] | None, fake_ranks: None) -> None:
    """A compiled backward computes the last layer's gradients first, but gradients are stored in the order of storage."""
    model = _deep(2)
    optimizer = flat_optimizer(torch.optim.SGD, model.parameters())
    forward: Any = model
    if options is not None:
        forward = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager", **options})
    for _ in range(2):
        # The second gradient is added to the first.
        forward(torch.ones(2, 8)).sum().backward()
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizer.step()
    assert not any(event.name == "aten::cat" for event in profiled.events())


def _in_buffer(flat: Tensor, offset: int, like: Tensor) -> Tensor:
    piece = FlatSlice(flat, offset, like.numel())
    found = with_own_storage(piece.tensor().view(like.shape))
    found.copy_(like)
    note_slice(found, piece)
    return found


_ORDERS = {"storage": (0, 1, 2), "reverse": (2, 1, 0), "other": (1, 2, 0)}


@pytest.mark.parametrize("kind", ["whole", "in part", "gaps", "two buffers", "two that touch", "no buffer"])
@pytest.mark.parametrize("order", _ORDERS)
def test_gradients_in_any_order(order: str, kind: str, fake_ranks: None) -> None:
    """Gradients are copied unless they lie in one buffer, or a part of it, in the order of storage and without gaps."""
    model, twin = (fsdp_compile.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8, bias=False))) for _ in range(2))
    twin.load_state_dict(model.state_dict())
    optimizers = [flat_optimizer(torch.optim.SGD, model.parameters()), torch.optim.SGD(twin.parameters())]
    params = list(model.parameters())
    for each in (model, twin):
        _set_gradients(each, 0)
    locals_of = [param.grad._local_tensor for param in params]
    flats, offset, gap = [torch.zeros(100) for _ in range(2)], int(kind != "whole"), int(kind == "gaps")
    if kind == "whole":
        flats[0] = torch.zeros(sum(local.numel() for local in locals_of))
    if kind == "two that touch":
        memory, last = torch.zeros(100), offset + sum(locals_of[index].numel() for index in _ORDERS[order][:2])
        flats = [memory[:last], memory[last:]]
    for number, index in enumerate(_ORDERS[order]):
        if kind == "two that touch" and number == 2:
            params[index].grad._local_tensor = _in_buffer(flats[1], 0, locals_of[index])
        elif kind != "no buffer":
            flat = flats[number == 2 and kind == "two buffers"]
            params[index].grad._local_tensor = _in_buffer(flat, offset, locals_of[index])
        offset += locals_of[index].numel() + gap
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        optimizers[0].step()
    optimizers[1].step()
    _assert_same(model, twin)
    is_copied = any(event.name == "aten::cat" for event in profiled.events())
    assert is_copied == (order != "storage" or kind not in ("whole", "in part"))


def _compiled(layers: int) -> tuple[nn.Module, Any]:
    """Make and compile a model of one unit. ``layers`` changes only its number of parameters."""
    torch.manual_seed(0)
    model = models.MLP(hidden=16, layers=layers)
    fsdp_compile.fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    return model, torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager"})


class _Operators(TorchDispatchMode):
    """A counter of operators on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_work_does_not_grow_with_the_number_of_parameters(options: dict[str, Any], fake_ranks: None) -> None:
    """Clipping and a step take as many operators and Python calls for a large model as for a small one."""
    counts = []
    for layers in (2, 6):
        model, forward = _compiled(layers)
        optimizer, params = flat_optimizer(torch.optim.AdamW, model.parameters(), **options), list(model.parameters())
        calls = 0

        def count(frame: Any, event: str, argument: object) -> None:
            nonlocal calls
            calls += event == "call"

        for index in range(4):
            optimizer.zero_grad()
            forward(torch.ones(2, 8)).sum().backward()
            with _Operators() if index == 3 else nullcontext() as operators:
                # A collection would call what waits for objects to go.
                gc.collect()
                gc.disable()
                sys.setprofile(count if index == 2 else None)
                fsdp_compile.clip_grad_norm_(params, 1.0)
                optimizer.step()
                sys.setprofile(None)
                gc.enable()
        counts.append((calls, operators.count))
    assert counts[0] == counts[1]
    assert counts[0][0] > 10 and counts[0][1] > 5


# --- State dicts ----------------------------------------------------------------------------------


def _saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=False)
    return loaded


def test_state_dicts_to_torch_and_back(rank: int) -> None:
    """A flat optimizer's state loads into torch's on FSDP2, and torch's into a new flat one. Training goes on as before."""
    model, twin = _pair(torch.distributed.fsdp.fully_shard)
    flat: Any = flat_optimizer(torch.optim.AdamW, groups_of(model), lr=1e-2)
    plain = torch.optim.AdamW(groups_of(twin), lr=1e-2)
    for step in range(6):
        if step == 2:
            # Saved and loaded, so that the optimizers share no tensors.
            plain.load_state_dict(_saved_and_loaded(flat.state_dict()))
        if step == 4:
            flat = flat_optimizer(torch.optim.AdamW, groups_of(model), lr=1.0)
            flat.load_state_dict(_saved_and_loaded(plain.state_dict()))
        for each, optimizer in ((model, flat), (twin, plain)):
            _backward(each, step)
            optimizer.step()
        _assert_same(model, twin, flat, plain)


def test_each_parameter_is_saved_alone(fake_ranks: None) -> None:
    model = _model()
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters())
    _backward(model, 0)
    optimizer.step()
    for param in model.parameters():
        kept = optimizer.state[param]["exp_avg"]._local_tensor
        assert kept.untyped_storage().nbytes() == kept.nbytes and kept.storage_offset() == 0


def test_distributed_state_dict(fake_ranks: None) -> None:
    """``torch.distributed.checkpoint.state_dict`` loads state into an optimizer that has made no step."""
    model, twin = _pair()
    first, second = (flat_optimizer(torch.optim.AdamW, each.parameters(), lr=1e-2) for each in (model, twin))
    _backward(model, 0)
    first.step()
    # Saved and loaded, as loading takes tensors without copying them.
    state = _saved_and_loaded(get_optimizer_state_dict(model, first))
    assert "blocks.0.up.weight" in state["state"]
    twin.load_state_dict(model.state_dict())
    set_optimizer_state_dict(twin, second, state)
    for step in range(1, 3):
        for each, optimizer in ((model, first), (twin, second)):
            _backward(each, step)
            optimizer.step()
    _assert_same(model, twin)


# --- What users do between steps ------------------------------------------------------------------


def _scale_moment(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.blocks[0].up.weight]["exp_avg"].mul_(0.5)


def _replace_moment(model: nn.Module, optimizer: Any) -> None:
    kept = optimizer.state[model.blocks[0].up.weight]
    kept["exp_avg"] = kept["exp_avg"] * 0.5


def _reset_step(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.blocks[0].up.weight]["step"].fill_(1)


def _forget(model: nn.Module, optimizer: Any) -> None:
    del optimizer.state[model.blocks[1].down.weight]


def _forget_all(model: nn.Module, optimizer: Any) -> None:
    optimizer.state.clear()


def _replace_gradient(model: nn.Module, optimizer: Any) -> None:
    weight = model.blocks[0].up.weight
    weight.grad = weight.grad * 2


def _replace_parameter(model: nn.Module, optimizer: Any) -> None:
    weight = model.blocks[0].up.weight
    weight.data = weight.data * 2


def _cast(model: nn.Module, optimizer: Any) -> None:
    model.to(torch.float64)
    optimizer.state.clear()


def _to_other_group(model: nn.Module, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


@pytest.mark.parametrize(
    "change",
    [
        _scale_moment,
        _replace_moment,
        _reset_step,
        _forget,
        _forget_all,
        _replace_gradient,
        _replace_parameter,
        _cast,
        _to_other_group,
    ],
)
def test_changes_between_steps(change: Callable[[nn.Module, Any], None], fake_ranks: None) -> None:
    model, twin = _pair()
    optimizers = [
        flat_optimizer(torch.optim.AdamW, groups_of(model), lr=1e-2),
        torch.optim.AdamW(groups_of(twin), lr=1e-2),
    ]
    for step in range(4):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            if change is not _cast:
                _backward(each, step)
            if step == 2:
                change(each, optimizer)
            if change is _cast:
                _set_gradients(each, step)
            optimizer.step()
    _assert_same(model, twin, *optimizers)


def _replace_value(entry: dict[str, Any]) -> None:
    entry["exp_avg"] = entry["exp_avg"] * 0.5


def _remove_values(entry: dict[str, Any]) -> None:
    entry.clear()


def _write_scalar(entry: dict[str, Any]) -> None:
    entry["step"].fill_(1)


@pytest.mark.parametrize("change", [_replace_value, _remove_values, _write_scalar])
@pytest.mark.parametrize("held", ["entry", "state", "state dict"])
def test_changes_by_what_was_held_for_long(held: str, change: Callable[[dict[str, Any]], None], fake_ranks: None) -> None:
    """State is changed through objects that were taken from the optimizer two steps before."""
    model, twin = _pair()
    optimizers: list[Any] = [
        flat_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2),
        torch.optim.AdamW(twin.parameters(), lr=1e-2),
    ]
    kept: list[dict[str, Any]] = []
    for step in range(6):
        for each, optimizer in zip((model, twin), optimizers, strict=True):
            _backward(each, step)
            weight = next(each.parameters())
            if step == 2:
                state = optimizer.state_dict()["state"] if held == "state dict" else optimizer.state
                kept.append(state[weight] if held == "entry" else state)
                del state
            if step == 4:
                holder = kept.pop(0)
                change(holder if held == "entry" else holder[weight if held == "state" else 0])
                del holder
            optimizer.step()
    _assert_same(model, twin, *optimizers)


def test_counts_of_steps_that_were_held_follow(fake_ranks: None) -> None:
    model = _model()
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters())
    _backward(model, 0)
    optimizer.step()
    # A detached tensor shares only the memory, so no reference count shows that it is held.
    held = optimizer.state[model.bias]["step"].detach()
    for count in range(2, 5):
        _backward(model, 0)
        optimizer.step()
        assert held == count
    held.fill_(1)
    _backward(model, 0)
    optimizer.step()
    assert optimizer.state[model.bias]["step"] == 2 and optimizer.state[model.head.weight]["step"] == 5


# --- What users do to gradients, of a compiled backward -------------------------------------------


def _nothing(model: nn.Module, backward: Callable[[], None]) -> None:
    pass


def _replace(model: nn.Module, backward: Callable[[], None]) -> None:
    model.bias.grad = model.bias.grad * 2


def _replace_all(model: nn.Module, backward: Callable[[], None]) -> None:
    for param in model.parameters():
        param.grad = param.grad * 2


def _replace_local(model: nn.Module, backward: Callable[[], None]) -> None:
    grad: Any = model.blocks[0].up.weight.grad
    grad._local_tensor = grad._local_tensor * 2


def _set_local_data(model: nn.Module, backward: Callable[[], None]) -> None:
    grad: Any = model.blocks[0].up.weight.grad
    grad._local_tensor.data = grad._local_tensor * 2


def _set_data(model: nn.Module, backward: Callable[[], None]) -> None:
    model.bias.grad.data = model.bias.grad * 2


def _edit(model: nn.Module, backward: Callable[[], None]) -> None:
    model.bias.grad.mul_(2)
    model.head.weight.grad._local_tensor.fill_(0.5)


def _accumulate(model: nn.Module, backward: Callable[[], None]) -> None:
    backward()


def _accumulate_onto_a_replacement(model: nn.Module, backward: Callable[[], None]) -> None:
    model.bias.grad = model.bias.grad * 2
    backward()


def _zero(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad(set_to_none=False)
    backward()


def _drop(model: nn.Module, backward: Callable[[], None]) -> None:
    model.blocks[1].down.weight.grad = None


def _swap(model: nn.Module, backward: Callable[[], None]) -> None:
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    first.grad, second.grad = second.grad, first.grad


def _freeze(model: nn.Module, backward: Callable[[], None]) -> None:
    model.zero_grad()
    model.head.weight.requires_grad_(False)
    backward()


def _land_anew(model: nn.Module, backward: Callable[[], None]) -> None:
    held = [param.grad for param in model.parameters()]
    model.zero_grad()
    backward()
    del held


def _backward_of(forward: Callable[[Tensor], Tensor], batch: Tensor) -> None:
    forward(batch).square().sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        _nothing,
        _replace,
        _replace_all,
        _replace_local,
        _set_local_data,
        _set_data,
        _edit,
        _accumulate,
        _accumulate_onto_a_replacement,
        _zero,
        _drop,
        _swap,
        _freeze,
        _land_anew,
    ],
)
def test_changes_of_gradients(change: Callable[[nn.Module, Callable[[], None]], None], one_rank: None) -> None:
    """Gradients are changed between a compiled backward and the step, in the third step of six. Two models take turns."""
    made = []
    for flat in (True, False):
        torch.manual_seed(0)
        model = models.MLP(hidden=16)
        shard_units(model, init_device_mesh("cpu", (1,)), fsdp_compile.fully_shard)
        kind: Any = functools.partial(flat_optimizer, torch.optim.AdamW) if flat else torch.optim.AdamW
        forward = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager"})
        made.append((model, forward, kind(model.parameters(), lr=1e-2)))
    for step in range(6):
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        for model, forward, optimizer in made:
            model.zero_grad()
            backward = functools.partial(_backward_of, forward, batch)
            backward()
            if step == 2:
                change(model, backward)
            optimizer.step()
        (model, _, optimizer), (twin, _, reference) = made
        _assert_same(model, twin, optimizer, reference)


def _set_gradients(model: nn.Module, step: int) -> None:
    for index, param in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + index)
        param.grad = torch.zeros_like(param)
        param.grad._local_tensor.copy_(torch.randn(param._local_tensor.shape, generator=generator))


def test_parameters_that_are_not_sharded(fake_ranks: None) -> None:
    """An ignored parameter is a plain tensor, which torch's foreach functions do not take beside DTensors."""
    torch.manual_seed(0)
    alone = models.MLP()
    model, twin = copy.deepcopy(alone), copy.deepcopy(alone)
    for each in (model, twin):
        shard_units(each, init_device_mesh("cpu", (8,)), fsdp_compile.fully_shard, ignored_params={each.bias})
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters(), foreach=True)
    reference = torch.optim.AdamW(twin.parameters(), foreach=False)
    for step in range(3):
        for each, other in ((model, optimizer), (twin, reference)):
            _backward(each, step)
            other.step()
    assert type(model.bias) is nn.Parameter and not torch.equal(model.bias, alone.bias)
    torch.testing.assert_close(model.bias, twin.bias)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_of(param), local_of(other))


def test_parameters_with_extensions(fake_ranks: None) -> None:
    """Parameters whose local tensors are subclasses are stepped as they are. The others of the unit are a run."""
    made = []
    for flat in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        model[0].weight = nn.Parameter(Halved(torch.randn(16, 16)))
        fsdp_compile.fully_shard(model)
        kind: Any = functools.partial(flat_optimizer, torch.optim.SGD) if flat else torch.optim.SGD
        made.append((model, kind(model.parameters(), lr=0.1)))
    before = made[0][0][0].weight._local_tensor.held.clone()
    for step in range(2):
        for model, optimizer in made:
            model.zero_grad()
            model(torch.ones(2, 16)).sum().backward()
            for index, param in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(10 * step + index)
                param.grad._local_tensor.copy_(torch.randn(param.grad._local_tensor.shape, generator=generator))
            optimizer.step()
    (model, optimizer), (twin, _) = made
    assert [id(param) for param in optimizer._plan.rest] == [id(model[0].weight)] and len(optimizer._plan.runs) == 1
    assert not torch.equal(before, model[0].weight._local_tensor.held)
    assert torch.equal(model[0].weight._local_tensor.held, twin[0].weight._local_tensor.held)
    assert torch.equal(model[0].bias._local_tensor, twin[0].bias._local_tensor)


def test_beside_tensor_parallelism(fake_ranks: None) -> None:
    """Parameters on two dimensions of a mesh are in runs, also those that tensor parallelism replicates."""
    made = []
    for flat in (True, False):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8))
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fsdp_compile.fully_shard(model, mesh=mesh["dp"])
        kind: Any = functools.partial(flat_optimizer, torch.optim.AdamW) if flat else torch.optim.AdamW
        made.append((model, kind(model.parameters(), lr=1e-2)))
    for step in range(3):
        for model, optimizer in made:
            _backward(model, step)
            optimizer.step()
    (model, optimizer), (twin, reference) = made
    assert not optimizer._plan.rest and len(optimizer._plan.runs) == 1
    _assert_same(model, twin, optimizer, reference)


def test_padding_stays_zero() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    try:
        model = _model()
        optimizer = flat_optimizer(torch.optim.AdamW, model.parameters(), weight_decay=0.1)
        for step in range(2):
            _backward(model, step)
            for param in model.parameters():
                lies_in = fsdp_compile.units.param_state.grad_slice(param)
                assert lies_in is not None
                lies_in.tensor()[param._local_tensor.numel() :] = torch.inf
            optimizer.step()
        for block in model.blocks:
            shard = block.up._parameters._fsdp_shard_weight[0]
            assert shard.shape[0] == 2 and not shard[1].any() and shard[0].isfinite().all()
    finally:
        dist.destroy_process_group()


def test_gathered_parameters_are_stale_after_a_step(one_rank: None) -> None:
    torch.manual_seed(0)
    model = fsdp_compile.fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (1,)))
    optimizer = flat_optimizer(torch.optim.SGD, model.parameters(), lr=0.1)
    model.unshard()
    x = torch.ones(1, 4)
    model.set_reshard_after_backward(False)
    before = model(x)
    before.sum().backward()
    optimizer.step()
    weight, bias = (param.full_tensor() for param in model.parameters())
    torch.testing.assert_close(model(x), x @ weight.T + bias)


# --- Torch's interface ----------------------------------------------------------------------------


def test_hooks_and_closure(fake_ranks: None) -> None:
    model = _model()
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters())
    called: list[str] = []
    own = [optimizer.register_step_pre_hook(lambda *_: called.append("before"))]
    own += [optimizer.register_step_post_hook(lambda *_: called.append("after"))]
    everywhere = register_optimizer_step_post_hook(lambda each, *_: called.append(type(each).__name__))

    def closure() -> str:
        _backward(model, 0)
        return "loss"

    try:
        step: Any = optimizer.step
        assert step(closure) == "loss"
    finally:
        everywhere.remove()
    assert called == ["before", "after", "FlatAdamW"]
    assert all(param.grad is not None and param in optimizer.state for param in model.parameters())


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_grad_scaler(options: dict[str, Any], fake_ranks: None) -> None:
    """An overflow skips a step, which the count of steps leaves out."""
    model, twin = _pair()
    optimizers = [
        flat_optimizer(torch.optim.AdamW, model.parameters(), **options),
        torch.optim.AdamW(twin.parameters(), **options),
    ]
    scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in optimizers]
    for step in range(3):
        for each, optimizer, scaler in zip((model, twin), optimizers, scalers, strict=True):
            scaler.scale(torch.zeros(()))
            _backward(each, step)
            if step == 1:
                next(each.parameters()).grad._local_tensor.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7)
        assert optimizers[0].state[param]["step"] == 2


def test_compiled_step(fake_ranks: None) -> None:
    model, twin = _pair()
    optimizers = [flat_optimizer(torch.optim.AdamW, model.parameters()), torch.optim.AdamW(twin.parameters())]
    steps = [torch.compile(optimizers[0].step, backend="eager"), optimizers[1].step]
    for step in range(2):
        for each, run in zip((model, twin), steps, strict=True):
            _backward(each, step)
            run()
    _assert_same(model, twin, *optimizers)


def test_copies_and_pickles(fake_ranks: None) -> None:
    """A copy of an optimizer of plain parameters has copies of the parameters."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = flat_optimizer(torch.optim.AdamW, params)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(copied, FlatOptimizer) and isinstance(copied, torch.optim.AdamW)
        (group,) = copied.param_groups
        before = group["params"][0].clone()
        group["params"][0].grad = torch.ones(3)
        copied.step()
        assert not torch.equal(before, group["params"][0])


class _Own(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (torch.optim.Adafactor, "rows and columns"),
        (torch.optim.LBFGS, "inner products"),
        (torch.optim.SparseAdam, "sparse gradients"),
        (torch.optim.Rprop, "no DTensors"),
        (_Own, "not known to be elementwise"),
    ],
)
def test_other_optimizers_are_refused(kind: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(TypeError, match=f"cannot step {kind.__name__}: .*{reason}"):
        flat_optimizer(kind, [nn.Parameter(torch.ones(2))])


def test_differentiable_is_refused() -> None:
    with pytest.raises(ValueError, match=r"differentiable=True .* Use torch\.optim\.AdamW"):
        flat_optimizer(torch.optim.AdamW, [nn.Parameter(torch.ones(2))], differentiable=True)


def test_a_group_that_is_refused_is_not_added() -> None:
    optimizer = flat_optimizer(torch.optim.AdamW, [nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="differentiable=True"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))], "differentiable": True})
    assert len(optimizer.param_groups) == 1
