"""Optimizers with states on the host give the values of flat optimizers and of torch's own, to the bit.

Tests of values use an engine that copies in threads, and leaves NaN where nothing has arrived. Tests of the order of copies,
and of bytes on the device, use an engine that copies at once.
"""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.lr_scheduler import StepLR
from torch.profiler import ProfilerActivity, profile

import fsdp_compile
from fsdp_compile import flat_optimizer, fully_shard, offload_optimizer, optimizer_in_backward
from fsdp_compile.optim import host_runs, offload
from fsdp_compile.optim.flat_optimizer import ELEMENTWISE
from fsdp_compile.optim.offload import OffloadedOptimizer
from passes.collectives.host_copies import engine_of
from tests.common import models
from tests.common.copy_engine import CPU, copying
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units
from tests.common.streams import logged_streams
from tests.common.subclasses import Halved
from tests.fsdp_compile.optim.test_flat_optimizer import groups_of, local_of

#: Buckets of 4 KiB: 512 elements of AdamW's states.
_SMALL = 16 << 10
_OPTIONS: dict[str, dict[str, Any]] = {
    "Adam": {"amsgrad": True},
    "SGD": {"momentum": 0.9, "lr": 0.1},
    "RMSprop": {"momentum": 0.9, "centered": True},
}


def _model(shard: Callable[..., Any] = fully_shard, hidden: int = 1024, world: int = 8, **options: Any) -> nn.Module:
    """Make a model. On eight ranks, a block is a run of 2177 elements, cut into five parts, and the root a run of 17."""
    torch.manual_seed(0)
    model = models.MLP(hidden=hidden)
    shard_units(model, device_mesh((world,)) if world < 8 else init_device_mesh("cpu", (world,)), shard, **options)
    return model


def _set_gradients(model: nn.Module, step: int, without: Sequence[str] = ()) -> None:
    """Set gradients that depend only on the step, the parameter and the rank."""
    for index, (name, param) in enumerate(model.named_parameters()):
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + 100 * step + index)
        param.grad = None if name in without else torch.zeros_like(param)
        if param.grad is not None:
            local = local_of(param.grad)
            local.copy_(torch.randn(local.shape, generator=generator))


def _assert_same(model: nn.Module, other: nn.Module, optimizer: Any, other_optimizer: Any) -> None:
    for (name, param), twin in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(local_of(param), local_of(twin)), name
        kept, expected = optimizer.state.get(param, {}), other_optimizer.state.get(twin, {})
        assert kept.keys() == expected.keys(), name
        for key, value in kept.items():
            assert type(value) is type(expected[key]) and value.shape == expected[key].shape, (name, key)
            assert torch.equal(local_of(value), local_of(expected[key])), (name, key)
    state, other_state = optimizer.state_dict(), other_optimizer.state_dict()
    assert state["param_groups"] == other_state["param_groups"] and state["state"].keys() == other_state["state"].keys()


class _AtOnce:
    """An engine that copies at once, and keeps no memory alive.

    Attributes:
        events: starts of copies and waits for them, each with the number of the copy in its direction. Tests add others.
        peak: the most bytes of copies' results and sources on the device that were alive when a copy began.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.peak = 0
        self._counts = {"fetch": 0, "return": 0}
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def _begin(self, kind: str, on_device: Sequence[Tensor]) -> _Begun:
        for value in on_device:
            storage = value.untyped_storage()
            self._alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self._alive = {key: (ref, nbytes) for key, (ref, nbytes) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(nbytes for _, nbytes in self._alive.values()))
        self._counts[kind] += 1
        self.events.append(f"{kind} {self._counts[kind]}")
        return _Begun(
            f"{kind} {self._counts[kind]}", self.events, [StorageWeakRef(each.untyped_storage()) for each in on_device]
        )

    def to_device(self, pieces: Sequence[Tensor], device: torch.device) -> tuple[Tensor, _Begun]:
        result = torch.cat(list(pieces))
        return result, self._begin("fetch", [result])

    def to_host(self, value: Tensor, *, pinned: bool, is_kept: bool = False) -> Any:
        raise AssertionError("states have a place on the host")

    def write_back(self, values: Sequence[Tensor], targets: Sequence[Tensor]) -> _Begun:
        for value, target in zip(values, targets, strict=True):
            target.copy_(value)
        return self._begin("return", values)


class _Begun:
    def __init__(self, name: str, events: list[str], held: list[StorageWeakRef]):
        self._name, self._events, self._held = name, events, held

    def wait_on_device(self) -> None:
        assert not any(ref.expired() for ref in self._held), "freed while it is being copied"
        self._events.append(f"device waits for {self._name}")

    def wait_on_host(self) -> None:
        self._events.append(f"host waits for {self._name}")


@pytest.fixture
def at_once() -> Iterator[_AtOnce]:
    engine = _AtOnce()
    with engine_of(CPU, engine):
        yield engine


# --- Values ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_same_as_torch(kind: type[torch.optim.Optimizer], fake_ranks: None) -> None:
    """Values equal those of torch's optimizer on FSDP2, with groups, a schedule, and steps without some gradients.

    State that the user holds has arrived on the host when a step returns.
    """
    model, twin = _model(), _model(torch.distributed.fsdp.fully_shard)
    options = {"lr": 1e-2, **_OPTIONS.get(kind.__name__, {})}
    make: Any = kind
    with copying(1e8) as engine:
        optimizer = offload_optimizer(kind, groups_of(model), bytes_in_flight=_SMALL, **options)
        reference = make(groups_of(twin), **options)
        assert isinstance(optimizer, kind)
        schedules = [StepLR(each, 2, 0.5) for each in (optimizer, reference)]
        for step in range(5):
            for each in (model, twin):
                _set_gradients(each, step, {0: ("blocks.0.down.weight",), 3: ("blocks.1.up.weight", "bias")}.get(step, ()))
            for each in (optimizer, reference, *schedules):
                each.step()
            assert all(copied.done.is_set() for copied in engine.copies)
            _assert_same(model, twin, optimizer, reference)
        assert len(engine.copies) > 40


_MODES: list[tuple[str, dict[str, Any]]] = [
    ("AdamW", {"fused": True, "amsgrad": True}),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True, "maximize": True}),
    ("SGD", {}),
    ("AdamW", {"lr": torch.tensor(1e-2), "fused": True}),
]


@pytest.mark.parametrize(("name", "options"), _MODES, ids=str)
def test_same_as_a_flat_optimizer(name: str, options: dict[str, Any], fake_ranks: None) -> None:
    """Values are equal also for fused kernels, although a cut run gives them other ends of tensors."""
    kind, threads = getattr(torch.optim, name), torch.get_num_threads()
    model, twin = _model(), _model()
    torch.set_num_threads(1)
    try:
        with copying(1e9):
            optimizer = offload_optimizer(kind, model.parameters(), bytes_in_flight=_SMALL, **options)
            reference = flat_optimizer(kind, twin.parameters(), **options)
            for step in range(3):
                for each, other in ((model, optimizer), (twin, reference)):
                    _set_gradients(each, step)
                    other.step()
                _assert_same(model, twin, optimizer, reference)
    finally:
        torch.set_num_threads(threads)


def train_and_save(world: int, path: str) -> None:
    """Train beside torch's AdamW on FSDP2, and load a checkpoint of each into the other. Every rank calls this."""

    def made(shard: Callable[..., Any], make: Callable[..., Any], **options: Any) -> tuple[nn.Module, Any]:
        model = _model(shard, world=world, hidden=256)
        return model, make(groups_of(model), lr=1e-2, **options)

    def saved(pair: tuple[nn.Module, Any], name: str) -> None:
        states = dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))
        dcp.save(states, checkpoint_id=f"{path}/{name}")

    def loaded(pair: tuple[nn.Module, Any], name: str) -> tuple[nn.Module, Any]:
        states = dict(zip(("model", "optimizer"), get_state_dict(*pair), strict=True))
        dcp.load(states, checkpoint_id=f"{path}/{name}")
        set_state_dict(*pair, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        return pair

    with copying(1e8):
        fsdp2 = torch.distributed.fsdp.fully_shard

        def offloaded(groups: Any, **options: Any) -> Any:
            return offload_optimizer(torch.optim.AdamW, groups, bytes_in_flight=_SMALL, **options)

        ours, theirs = made(fully_shard, offloaded), made(fsdp2, torch.optim.AdamW)
        flat = made(fully_shard, lambda groups, **options: flat_optimizer(torch.optim.AdamW, groups, **options))
        for model, optimizer in (ours, flat, theirs):
            _set_gradients(model, 0)
            optimizer.step()
        _assert_same(ours[0], theirs[0], ours[1], theirs[1])
        for model, optimizer in (ours, flat):
            model.zero_grad()
            model(torch.full((3, 8), 1.0 + dist.get_rank())).sum().backward()
            optimizer.step()
        _assert_same(ours[0], flat[0], ours[1], flat[1])
        saved(ours, "ours")
        theirs = loaded(theirs, "ours")
        for step in range(2, 4):
            for model, optimizer in (ours, theirs):
                _set_gradients(model, step)
                optimizer.step()
        _assert_same(ours[0], theirs[0], ours[1], theirs[1])
        saved(theirs, "theirs")
        again = loaded(made(fully_shard, offloaded), "theirs")
        for model, optimizer in (ours, again):
            _set_gradients(model, 4)
            optimizer.step()
        _assert_same(ours[0], again[0], ours[1], again[1])


@pytest.mark.parametrize("world", [2, 4])
def test_ranks_and_checkpoints(world: int, rank_pools: RankPools, tmp_path: Any) -> None:
    rank_pools[world].run(train_and_save, world=world, path=str(tmp_path))


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=str)
def test_grad_scaler(options: dict[str, Any], fake_ranks: None) -> None:
    """An overflow skips a step, which the count of steps of each part of a run leaves out."""
    model, twin = _model(), _model()
    with copying(1e9):
        optimizers = [
            offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL, **options),
            torch.optim.AdamW(twin.parameters(), **options),
        ]
        scalers = [torch.amp.GradScaler("cpu", init_scale=4.0) for _ in optimizers]
        for step in range(3):
            for each, optimizer, scaler in zip((model, twin), optimizers, scalers, strict=True):
                scaler.scale(torch.zeros(()))
                _set_gradients(each, step)
                if step == 1:
                    local_of(next(each.parameters()).grad).fill_(torch.inf)
                scaler.step(optimizer)
                scaler.update()
    assert scalers[0].get_scale() == scalers[1].get_scale() == 2.0
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(local_of(param), local_of(other), rtol=1e-6, atol=1e-7)
        assert optimizers[0].state[param]["step"] == 2


def test_hooks_and_closure(fake_ranks: None, at_once: _AtOnce) -> None:
    """Hooks and the closure are called once for a step of many buckets."""
    model = _model()
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    called: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: called.append("before"))
    optimizer.register_step_post_hook(lambda each, *_: called.append(f"after, {len(each.state)} states"))

    def closure() -> str:
        _set_gradients(model, 0)
        return "loss"

    step: Any = optimizer.step
    assert step(closure) == "loss"
    assert called == ["before", f"after, {len(list(model.parameters()))} states"]


# --- What is copied, and when ---------------------------------------------------------------------


def test_a_bucket_is_fetched_while_the_one_before_is_stepped(
    fake_ranks: None, at_once: _AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket has one copy in each direction, of all of its state.

    The device waits for a fetch before the bucket's step, and for a return before the second fetch after it. The host waits
    only at the end.
    """
    step = torch.optim.AdamW._init_group

    def noted(self: Any, group: Any, *args: Any) -> Any:
        at_once.events.append("step")
        return step(self, group, *args)

    monkeypatch.setattr(torch.optim.AdamW, "_init_group", noted)
    model: Any = _model(hidden=480)
    optimizer = offload_optimizer(torch.optim.AdamW, model.blocks.parameters(), bytes_in_flight=_SMALL)
    _set_gradients(model, 0)
    optimizer.step()
    # A block has 1021 elements: one bucket of 512, and one of the rest.
    assert [event for event in at_once.events if event.startswith("fetch")] == []
    assert at_once.events.count("step") == 4
    at_once.events.clear()
    _set_gradients(model, 1)
    optimizer.step()
    assert at_once.events == [
        *("fetch 1", "fetch 2", "device waits for fetch 1", "step", "return 5"),
        *("fetch 3", "device waits for fetch 2", "step", "return 6", "device waits for return 5"),
        *("fetch 4", "device waits for fetch 3", "step", "return 7", "device waits for return 6"),
        *("device waits for fetch 4", "step", "return 8", "device waits for return 7"),
        *(f"host waits for return {number}" for number in range(5, 9)),
    ]


def test_what_is_on_the_device_is_bounded(fake_ranks: None, at_once: _AtOnce) -> None:
    """The bound holds for states of many times that size, in the first step, which makes them, and in later ones."""
    model = _model(hidden=4096)
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    kept = sum(2 * local_of(param).nbytes for param in model.parameters())
    assert optimizer.step_bytes == _SMALL < kept / 8
    for step in range(3):
        _set_gradients(model, step)
        optimizer.step()
        # The other quarter is for gradients. The first step fetches nothing.
        assert at_once.peak == _SMALL // 4 * (3 if step else 2)
        assert all(param.grad is not None for param in model.parameters())
        at_once.peak = 0


@pytest.mark.parametrize("hidden", [240, 4096], ids=["whole runs", "parts"])
def test_gradients_in_order_of_a_bucket_alone(
    hidden: int, fake_ranks: None, at_once: _AtOnce, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = _model(hidden=hidden)
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    made: list[tuple[StorageWeakRef, int]] = []
    join = torch.cat

    def noted(pieces: Any, *args: Any) -> Tensor:
        result = join(pieces, *args)
        made.append((StorageWeakRef(result.untyped_storage()), result.nbytes))
        assert sum(nbytes for ref, nbytes in made if not ref.expired()) <= _SMALL // 4
        return result

    monkeypatch.setattr(torch, "cat", noted)
    _set_gradients(model, 0)
    optimizer.step()
    assert sum(nbytes for _, nbytes in made) == sum(local_of(param).nbytes for param in model.parameters())


@pytest.mark.parametrize("hidden", [240, 4096], ids=["whole runs", "parts"])
def test_gradients_that_lie_in_order_are_not_copied(hidden: int, fake_ranks: None, at_once: _AtOnce) -> None:
    """Gradients of an uncompiled backward lie in order. If one is replaced, those of its bucket are copied."""
    model, twin = _model(hidden=hidden), _model(hidden=hidden)
    optimizers = [
        offload_optimizer(torch.optim.SGD, model.parameters(), lr=0.1, bytes_in_flight=_SMALL),
        flat_optimizer(torch.optim.SGD, twin.parameters(), lr=0.1),
    ]
    for replaced in (False, True):
        for each in (model, twin):
            each.zero_grad()
            each(torch.ones(2, 8)).sum().backward()
            weight: Any = each.get_parameter("blocks.0.down.weight")
            weight.grad = weight.grad * 2 if replaced else weight.grad
        with profile(activities=[ProfilerActivity.CPU]) as profiled:
            optimizers[0].step()
        assert any(event.name == "aten::cat" for event in profiled.events()) == replaced
        optimizers[1].step()
        _assert_same(model, twin, *optimizers)


def test_streams(fake_ranks: None) -> None:
    """On a device with streams, a fetch waits for the memory of a returned bucket. The host waits only at the end."""
    with logged_streams() as log:
        model: Any = _model(hidden=480)
        optimizer = offload_optimizer(torch.optim.AdamW, model.blocks.parameters(), bytes_in_flight=_SMALL)
        for step in range(2):
            _set_gradients(model, step)
            log.clear()
            optimizer.step()
    waits = [event for event in log if "wait" in event]
    fetch, give_back = "in waits for main", "out waits for main"
    arrived, gone = "main waits for event of in", "main waits for event of out"
    assert waits == [
        *(fetch, fetch, arrived, give_back),
        *(fetch, arrived, give_back, gone),
        *(fetch, arrived, give_back, gone),
        *(arrived, give_back, gone),
        *["host waits"] * 4,
    ]
    assert not any(event.startswith("keep for") for event in log)


def test_without_memory_of_its_own_nothing_is_copied(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model, twin = _model(), _model()
    monkeypatch.setattr(host_runs, "engine", None)
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    reference = flat_optimizer(torch.optim.AdamW, twin.parameters())
    kept = sum(2 * local_of(param).nbytes for param in model.parameters())
    assert (optimizer.device_state_bytes, optimizer.step_bytes) == (kept, 0)
    for step in range(2):
        for each, other in ((model, optimizer), (twin, reference)):
            _set_gradients(each, step)
            other.step()
        _assert_same(model, twin, optimizer, reference)


def test_a_step_that_fails(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails leaves no copy in flight. A run that it has not stepped whole keeps no incomplete state."""
    models_ = _model(), _model()
    model, twin = (each.get_submodule("blocks") for each in models_)
    step, calls = torch.optim.AdamW._init_group, []

    def failing(self: Any, *args: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("no more")
        return step(self, *args)

    with copying(1e7) as engine:
        optimizers = [
            offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL),
            torch.optim.AdamW(twin.parameters()),
        ]
        before = [local_of(param).clone() for param in model.parameters()]
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no more"):
            patch.setattr(torch.optim.AdamW, "_init_group", failing)
            _set_gradients(model, 0)
            optimizers[0].step()
        assert all(copied.done.is_set() for copied in engine.copies)
        assert not any(optimizers[0].state.values())
        with torch.no_grad():
            for param, value in zip(model.parameters(), before, strict=True):
                local_of(param).copy_(value)
        for number in range(2):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                _set_gradients(each, number)
                optimizer.step()
        _assert_same(model, twin, *optimizers)


def test_what_a_step_that_fails_has_fetched(fake_ranks: None, at_once: _AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device waits for buckets that were fetched early, so that their memory is free when the step raises."""
    model = _model()
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    _set_gradients(model, 0)
    optimizer.step()
    at_once.events.clear()
    monkeypatch.setattr(torch.optim.AdamW, "_init_group", None)
    with pytest.raises(TypeError):
        optimizer.step()
    assert at_once.events == ["fetch 1", "fetch 2", "device waits for fetch 1", "device waits for fetch 2"]


@pytest.mark.parametrize("pin_memory", [True, False])
def test_memory_that_is_pinned(pin_memory: bool, fake_ranks: None, at_once: _AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of two runs, two tensors each, are pinned when they are made or loaded, and then keep their memory."""
    model: Any = _model()
    optimizer = offload_optimizer(torch.optim.AdamW, model.blocks.parameters(), pin_memory=pin_memory)
    asked: list[bool] = []
    made: list[Tensor] = []
    empty = torch.empty

    def noted(*size: int, pin_memory: bool, **options: Any) -> Tensor:
        asked.append(pin_memory)
        made.append(empty(*size, **options))
        return made[-1]

    _set_gradients(model, 0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", noted)
        patch.setattr(torch.accelerator, "is_available", lambda: True)
        patch.setattr(Tensor, "is_pinned", lambda self: any(self.data_ptr() == each.data_ptr() for each in made))
        optimizer.step()
        assert asked == [pin_memory] * 4
        optimizer.step()
        assert len(asked) == 4
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.step()
        assert asked == [pin_memory] * (8 if pin_memory else 4)


# --- What users do between steps ------------------------------------------------------------------


def _scale(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.get_parameter("blocks.0.up.weight")]["exp_avg"].mul_(0.5)


def _replace(model: nn.Module, optimizer: Any) -> None:
    kept = optimizer.state[model.get_parameter("blocks.0.up.weight")]
    kept["exp_avg"] = kept["exp_avg"] * 0.5


def _count_anew(model: nn.Module, optimizer: Any) -> None:
    optimizer.state[model.get_parameter("blocks.0.up.weight")]["step"].fill_(1)


def _forget(model: nn.Module, optimizer: Any) -> None:
    del optimizer.state[model.get_parameter("blocks.1.down.weight")]


def _move(model: nn.Module, optimizer: Any) -> None:
    weight: Any = model.get_parameter("blocks.0.up.weight")
    weight.data = weight.data * 2


def _to_other_group(model: nn.Module, optimizer: Any) -> None:
    first, second = optimizer.param_groups
    second["params"].append(first["params"].pop(0))


@pytest.mark.parametrize("change", [_scale, _replace, _count_anew, _forget, _move, _to_other_group])
def test_changes_between_steps(change: Callable[[nn.Module, Any], None], fake_ranks: None) -> None:
    model, twin = _model(), _model()
    with copying(1e9):
        optimizers = [
            offload_optimizer(torch.optim.AdamW, groups_of(model), bytes_in_flight=_SMALL),
            torch.optim.AdamW(groups_of(twin)),
        ]
        for step in range(4):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                _set_gradients(each, step)
                if step == 2:
                    change(each, optimizer)
                optimizer.step()
            _assert_same(model, twin, *optimizers)


# --- State dicts ----------------------------------------------------------------------------------


def _saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    loaded: dict[str, Any] = torch.load(buffer, weights_only=False)
    return loaded


def test_state_dicts_to_torch_and_back(fake_ranks: None) -> None:
    model, twin = _model(), _model(torch.distributed.fsdp.fully_shard)
    with copying(1e9):
        ours: Any = offload_optimizer(torch.optim.AdamW, groups_of(model), lr=1e-2, bytes_in_flight=_SMALL)
        theirs = torch.optim.AdamW(groups_of(twin), lr=1e-2)
        seen: list[Any] = []
        for step in range(6):
            if step == 2:
                theirs.load_state_dict(_saved_and_loaded(ours.state_dict()))
            if step == 4:
                ours = offload_optimizer(torch.optim.AdamW, groups_of(model), lr=1.0, bytes_in_flight=_SMALL)
                ours.register_load_state_dict_pre_hook(lambda _, state: seen.extend(map(dict, state["state"].values())))
                ours.register_load_state_dict_post_hook(lambda loaded: seen.extend(map(dict, loaded.state.values())))
                ours.load_state_dict(_saved_and_loaded(theirs.state_dict()))
            for each, optimizer in ((model, ours), (twin, theirs)):
                _set_gradients(each, step)
                optimizer.step()
            _assert_same(model, twin, ours, theirs)
    # Hooks of users see DTensors.
    assert len(seen) == 2 * len(list(model.parameters()))
    assert all(isinstance(entry["exp_avg"], DTensor) for entry in seen)


def test_what_is_loaded_is_put_on_the_host(fake_ranks: None, at_once: _AtOnce, monkeypatch: pytest.MonkeyPatch) -> None:
    """State goes to the host, here meta, and not to its parameter's device. It gets its parameter's dtype, as with torch."""
    model = _model(ignored_params=set())
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters())
    _set_gradients(model, 0)
    optimizer.step()
    state = _saved_and_loaded(optimizer.state_dict())
    for entry in state["state"].values():
        entry["exp_avg"] = entry["exp_avg"].double()
    monkeypatch.setattr(offload, "HOST", torch.device("meta"))
    optimizer.load_state_dict(state)
    for entry in optimizer.state.values():
        assert entry["exp_avg"].device.type == local_of(entry["exp_avg"]).device.type == "meta"
        assert entry["exp_avg"].dtype == torch.float32 and entry["step"].device.type == "cpu"
    adagrad = offload_optimizer(torch.optim.Adagrad, model.parameters())
    assert all(entry["sum"].device.type == "meta" and entry["step"] == 0 for entry in adagrad.state.values())


def test_a_state_dict_that_is_refused(fake_ranks: None) -> None:
    model = _model()
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters())
    with pytest.raises(ValueError, match="different number of parameter groups"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert not optimizer.state and not optimizer._optimizer_load_state_dict_pre_hooks  # type: ignore[attr-defined]


def test_copies_and_pickles(fake_ranks: None) -> None:
    params = [nn.Parameter(torch.randn(3)) for _ in range(2)]
    optimizer = offload_optimizer(torch.optim.AdamW, params, pin_memory=False, bytes_in_flight=_SMALL)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(copied, OffloadedOptimizer) and isinstance(copied, torch.optim.AdamW)
        assert (copied._pin_memory, copied._bytes_in_flight) == (False, _SMALL)
        (group,) = copied.param_groups
        before = group["params"][0].clone()
        group["params"][0].grad = torch.ones(3)
        copied.step()
        assert not torch.equal(before, group["params"][0])


# --- Bytes ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_bytes_are_known_ahead(kind: type[torch.optim.Optimizer], fake_ranks: None, at_once: _AtOnce) -> None:
    """Bytes are known before the first step, here of a model in one bucket, with an ignored and a frozen parameter."""
    torch.manual_seed(0)
    model: Any = models.MLP(hidden=15)
    model.blocks[0].up.bias.requires_grad_(False)
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard, ignored_params={model.bias})
    optimizer = offload_optimizer(kind, model.parameters(), **_OPTIONS.get(kind.__name__, {}))
    device, step = optimizer.device_state_bytes, optimizer.step_bytes
    _set_gradients(model, 0, ["blocks.0.up.bias"])
    optimizer.step()
    kept = {
        name: sum(local_of(value).nbytes for value in optimizer.state[param].values() if value.dim())
        for name, param in model.named_parameters()
        if name != "blocks.0.up.bias"
    }
    assert (device, step) == (optimizer.device_state_bytes, optimizer.step_bytes)
    assert device == kept.pop("bias") > 0
    assert at_once.peak == sum(kept.values())
    assert step == at_once.peak + sum(local_of(model.get_parameter(name)).nbytes for name in kept)


# --- Parameters in no run -------------------------------------------------------------------------


def test_parameters_that_are_not_sharded(fake_ranks: None) -> None:
    alone = models.MLP(hidden=15)
    made = []
    for shard, make in ((fully_shard, offload_optimizer), (fully_shard, flat_optimizer)):
        model = copy.deepcopy(alone)
        shard_units(model, init_device_mesh("cpu", (8,)), shard, ignored_params={model.bias})
        made.append((model, make(torch.optim.AdamW, model.parameters())))
    with copying(1e9) as engine:
        for step in range(3):
            for model, optimizer in made:
                _set_gradients(model, step)
                optimizer.step()
        nbytes = {copied.nbytes for copied in engine.copies}
    (model, optimizer), (twin, reference) = made
    _assert_same(model, twin, optimizer, reference)
    assert not torch.equal(model.bias, alone.bias)  # type: ignore[arg-type]
    assert nbytes == {sum(2 * local_of(param).nbytes for param in model.parameters() if isinstance(param, DTensor))}


def test_parameters_with_extensions(fake_ranks: None) -> None:
    made = []
    for make in (offload_optimizer, flat_optimizer):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(16, 16))
        model[0].weight = nn.Parameter(Halved(torch.randn(16, 16)))
        fully_shard(model)
        made.append((model, make(torch.optim.SGD, model.parameters(), lr=0.1)))
    weight = made[0][0][0].weight
    with copying(1e9):
        assert offload_optimizer(torch.optim.AdamW, [weight]).device_state_bytes == 2 * weight._local_tensor.nbytes
        for step in range(2):
            for model, optimizer in made:
                model.zero_grad()
                model(torch.ones(2, 16)).sum().backward()
                for index, param in enumerate(model.parameters()):
                    local_of(param.grad).copy_(torch.full(local_of(param.grad).shape, step + index + 1.0))
                optimizer.step()
    (model, _), (twin, _) = made
    assert torch.equal(model[0].weight._local_tensor.held, twin[0].weight._local_tensor.held)
    assert torch.equal(model[0].bias._local_tensor, twin[0].bias._local_tensor)


def test_a_gradient_that_is_laid_out_otherwise(fake_ranks: None) -> None:
    """The gradient's parameter leaves its run, with its state, and comes back."""
    model, twin = _model(hidden=15), _model(hidden=15)
    with copying(1e9):
        optimizers = [offload_optimizer(torch.optim.AdamW, model.parameters()), torch.optim.AdamW(twin.parameters())]
        for step in range(4):
            for each, optimizer in zip((model, twin), optimizers, strict=True):
                _set_gradients(each, step)
                weight: Any = each.get_parameter("blocks.0.down.weight")
                if step == 2:
                    whole = torch.ones(weight.shape)
                    weight.grad = DTensor.from_local(whole, weight.device_mesh, [Replicate()], run_check=False)
                optimizer.step()
            plan: Any = optimizers[0]._plan  # type: ignore[attr-defined]
            assert [id(param) for param in plan.rest] == [id(model.get_parameter("blocks.0.down.weight"))] * (step == 2)
            _assert_same(model, twin, *optimizers)


def test_states_of_a_parameter_that_leaves_its_run() -> None:
    """States move to the parameter's device, where torch steps it: here from the CPU to meta, which stands for a device."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        param = DTensor.from_local(torch.empty(2, device="meta"), mesh, [Shard(0)], run_check=False)
        entry = {"step": torch.ones(()), "exp_avg": DTensor.from_local(torch.ones(2), mesh, [Shard(0)], run_check=False)}
        found = offload._on_device_of(param, entry)
        assert found is entry and entry["exp_avg"].device.type == "meta" and entry["step"].device.type == "cpu"
    finally:
        dist.destroy_process_group()


# --- What is refused, and what is left ------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "reason"), [(torch.optim.Adafactor, "rows and columns"), (torch.optim.Muon, "each matrix as a whole")]
)
def test_other_optimizers_are_refused(kind: type[torch.optim.Optimizer], reason: str) -> None:
    with pytest.raises(TypeError, match=f"offload_optimizer cannot step {kind.__name__}: .*{reason}"):
        offload_optimizer(kind, [nn.Parameter(torch.ones(2))])


def test_options_that_are_refused() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match=r"differentiable=True .*offload_optimizer\(AdamW\).* Use torch\.optim\.AdamW"):
        offload_optimizer(torch.optim.AdamW, params, differentiable=True)
    with pytest.raises(ValueError, match="bytes_in_flight=16383 is room for less than 64 elements"):
        offload_optimizer(torch.optim.AdamW, params, bytes_in_flight=_SMALL - 1)


def test_parameters_that_are_refused(fake_ranks: None) -> None:
    """A group with a refused parameter is not added."""
    on_host, updated = _model(hidden=15, offload_policy=CPUOffloadPolicy()), _model(hidden=15)
    optimizer_in_backward(torch.optim.AdamW, updated.parameters())
    optimizer = offload_optimizer(torch.optim.AdamW, _model(hidden=15).parameters())
    for model, message in (
        (on_host, r"bias: its shard is on the host .*flat_optimizer"),
        (updated, r"bias: .*Call remove\(\)"),
    ):
        with pytest.raises(ValueError, match=f"offload_optimizer cannot step parameter {message}"):
            optimizer.add_param_group({"params": list(model.parameters())})
        with pytest.raises(ValueError, match="cannot step parameter"):
            offload_optimizer(torch.optim.AdamW, model.parameters())
    assert len(optimizer.param_groups) == 1


def test_parameters_that_are_refused_once_they_have_memory(fake_ranks: None) -> None:
    with torch.device("meta"):
        model = models.MLP(hidden=16)
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard, offload_policy=CPUOffloadPolicy())
    optimizer = offload_optimizer(torch.optim.AdamW, model.parameters())
    model.to_empty(device="cpu")
    for param in model.parameters():
        # Empty memory may hold NaN, which equals nothing.
        local_of(param).detach().fill_(1.0)
    before = [local_of(param).clone() for param in model.parameters()]
    _set_gradients(model, 0)
    with pytest.raises(ValueError, match="its shard is on the host"):
        optimizer.step()
    assert all(torch.equal(local_of(param), value) for param, value in zip(model.parameters(), before, strict=True))


def test_buffers_go_with_the_optimizer(fake_ranks: None, at_once: _AtOnce) -> None:
    model = _model()
    optimizer: Any = offload_optimizer(torch.optim.AdamW, model.parameters(), bytes_in_flight=_SMALL)
    _set_gradients(model, 0)
    optimizer.step()
    kept = [StorageWeakRef(value.untyped_storage()) for run in optimizer._plan.runs for value in run.state.values()]
    assert len(kept) == 9 and not any(ref.expired() for ref in kept)
    del optimizer
    gc.collect()
    assert all(ref.expired() for ref in kept)


def test_it_is_exported() -> None:
    assert fsdp_compile.offload_optimizer is offload_optimizer
