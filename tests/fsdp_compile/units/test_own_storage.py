"""Tensors that a sharded model shows to users have storages of their own, over the memory that the model works with.

So such a tensor can be saved, copied and compiled, and exactly its own elements are.
"""

from __future__ import annotations

import copy
import gc
import io
import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
import torch._dynamo
import torch._functorch.config
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.units.own_storage import with_own_storage
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import Forward, FullyShard, adamw, regression_batch, shard_units

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


# --- The function ---------------------------------------------------------------------------------


_DTYPES = [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.uint16, torch.int64]
_DTYPES += [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.int4, torch.uint2]


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_any_dtype(dtype: torch.dtype) -> None:
    flat = torch.arange(24 * dtype.itemsize, dtype=torch.uint8).view(dtype)
    view = flat.narrow(0, 5, 12).view(3, 4)
    alias = with_own_storage(view)
    assert alias.dtype is dtype and alias.shape == view.shape and alias.stride() == view.stride()
    assert alias.storage_offset() == 0 and alias.untyped_storage().nbytes() == view.nbytes
    assert alias.data_ptr() == view.data_ptr()
    assert torch.equal(alias.view(torch.uint8), view.view(torch.uint8))


@pytest.mark.parametrize(
    "cut",
    [lambda flat: flat.view(4, 6)[:, :5], lambda flat: flat.view(4, 6)[1:3].t(), lambda flat: flat[7], lambda flat: flat[3:3]],
    ids=["columns", "transposed", "scalar", "empty"],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.int4], ids=str)
def test_any_strides(dtype: torch.dtype, cut: Callable[[Tensor], Tensor]) -> None:
    view = cut(torch.zeros(24, dtype=dtype))
    alias = with_own_storage(view)
    assert alias.shape == view.shape and alias.storage_offset() == 0
    span = sum((size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)) + 1
    assert alias.untyped_storage().nbytes() == (span * dtype.itemsize if view.numel() else 0)
    if view.numel():
        assert alias.stride() == view.stride() and alias.data_ptr() == view.data_ptr()


def test_memory_lives_as_long_as_an_alias() -> None:
    flat = torch.arange(6.0)
    seen = weakref.ref(flat.untyped_storage())
    aliases = [with_own_storage(flat[start : start + 2]) for start in (0, 2, 4)]
    del flat
    for start, alias in zip((0, 2, 4), aliases, strict=True):
        assert alias.tolist() == [start, start + 1]
    kept = aliases.pop()[1:]
    del aliases, alias
    assert seen() is not None and kept.tolist() == [5]
    del kept
    assert seen() is None


def test_writes_are_shared_and_counted_apart() -> None:
    flat = torch.zeros(4)
    first, second = with_own_storage(flat[:2]), with_own_storage(flat[2:])
    first.add_(1)
    flat.add_(1)
    assert first.tolist() == [2, 2] and second.tolist() == [1, 1]
    assert (first._version, second._version, flat._version) == (1, 0, 1)
    assert first._base is None


def test_without_memory() -> None:
    def check(flat: Tensor) -> None:
        view = flat.narrow(0, 2, 6).view(3, 2).t()
        alias = with_own_storage(view)
        assert alias.device == flat.device and type(alias) is type(view)
        assert (alias.shape, alias.stride(), alias.dtype) == (view.shape, view.stride(), view.dtype)
        assert alias.storage_offset() == 0 and alias.untyped_storage().nbytes() == view.nbytes

    check(torch.zeros(10, device="meta"))
    with FakeTensorMode():
        fake = torch.zeros(10, dtype=torch.bfloat16)
        check(fake)
    check(fake)


def test_shared_memory_is_refused() -> None:
    flat = torch.zeros(4)
    alias = with_own_storage(flat[2:])
    with pytest.raises(RuntimeError, match=r"cannot move to shared memory.*Share a copy"):
        alias.detach().share_memory_()
    for strategy in ("_share_fd_cpu_", "_share_filename_cpu_"):
        with pytest.raises(RuntimeError, match="cannot move to shared memory"):
            getattr(alias.view(2, 1).untyped_storage(), strategy)()
    alias.clone().share_memory_().fill_(1)
    alias.fill_(2)
    assert flat.tolist() == [0, 0, 2, 2]


# --- What a model shows ---------------------------------------------------------------------------


def _locals(model: nn.Module) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the name, the local tensor and the DTensor of each parameter and of each gradient."""
    for name, parameter in model.named_parameters():
        yield name, parameter._local_tensor, parameter
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad._local_tensor, parameter.grad


def _assert_own_storages(model: nn.Module, when: str) -> None:
    for name, local, tensor in _locals(model):
        offsets = local.storage_offset(), tensor.storage_offset(), tensor.detach().storage_offset()
        assert offsets == (0, 0, 0), f"{when}: {name}"
        assert local.is_contiguous() and local.untyped_storage().nbytes() == local.nbytes, f"{when}: {name}"


def _assert_in_flat_memory(model: Any) -> None:
    """Assert that parameters lie in their unit's storages, so that their memory exists once."""
    units = {module._fsdp_unit for module in model.modules() if hasattr(module, "_fsdp_unit")}
    for unit in units:
        for sharded in unit.params:
            start = unit.storages[sharded.shard.dtype][sharded.offset :].data_ptr()
            assert sharded.local.numel() == 0 or sharded.local.data_ptr() == sharded.shard.data_ptr() == start
            assert sharded.is_bound()


def _scalars() -> nn.Module:
    torch.manual_seed(0)
    return models.ScalarParameters()


def _narrow() -> nn.Module:
    torch.manual_seed(0)
    return models.Narrow()


def _shard_columns(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    shard_units(model, mesh, fully_shard, shard_placement_fn=lambda parameter: Shard(parameter.ndim - 1))


_SHARDINGS: dict[str, tuple[Callable[[], nn.Module], Callable[..., None], tuple[int, ...]]] = {
    "empty": (_narrow, shard_units, (4,)),
    "scalars": (_scalars, shard_units, (2,)),
    "columns": (models.MLP, _shard_columns, (2,)),
    "replicas": (_narrow, shard_units, (2, 2)),
}


def _view_at_an_offset(tensor: DTensor) -> DTensor:
    local = torch.cat([torch.zeros(3, dtype=tensor.dtype), tensor.to_local().flatten()])[3:].view(tensor.to_local().shape)
    return DTensor.from_local(local, tensor.device_mesh, tensor.placements, shape=tensor.shape, stride=tensor.stride())


def shows_own_storages(name: str, compiled: bool) -> None:
    build, shard, shape = _SHARDINGS[name]
    model = build()
    shard(model, device_mesh(shape), fully_shard)
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    out = forward(torch.zeros(1, 8)).size(1)

    def check(when: str) -> None:
        _assert_in_flat_memory(model)
        _assert_own_storages(model, when)

    def backward() -> None:
        forward(regression_batch(0, dist.get_rank(), 4, out=out)[0].to(next(model.parameters()).dtype)).sum().backward()

    check("sharded")
    for when in ("a backward", "a backward that adds"):
        backward()
        check(when)
    first = next(model.parameters())
    first.grad = _view_at_an_offset(first.grad)
    backward()
    check("a gradient of the user's")
    model.zero_grad()
    model.to(torch.float64)
    check("cast")
    backward()
    check("cast, with gradients")
    model.zero_grad()
    model.load_state_dict({key: _view_at_an_offset(value) for key, value in model.state_dict().items()}, assign=True)
    check("assigned")
    backward()
    check("assigned, with gradients")
    model.zero_grad()
    model.to_empty(device="cpu")
    check("emptied")


_COMPILED = ("columns", "replicas")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(name, compiled, marks=[] if not compiled or name in _COMPILED else pytest.mark.night)
        for name, compiled in itertools.product(_SHARDINGS, (False, True))
    ],
)
def test_model_shows_own_storages(name: str, compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[math.prod(_SHARDINGS[name][2])].run(shows_own_storages, name=name, compiled=compiled)


def _mesh_of_one() -> DeviceMesh:
    return init_device_mesh("cpu", (1,))


def test_meta_model_shows_own_storages(one_rank: None) -> None:
    with torch.device("meta"):
        model = models.MLP()
    shard_units(model, _mesh_of_one(), fully_shard)
    _assert_own_storages(model, "meta")
    assert not any(value.is_meta is False for value in copy.deepcopy(model.state_dict()).values())
    model.to_empty(device="cpu")
    _assert_own_storages(model, "emptied")
    _assert_in_flat_memory(model)


def test_state_dict_outlives_the_model(one_rank: None) -> None:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, _mesh_of_one(), fully_shard)
    expected = [parameter.full_tensor().detach().clone() for parameter in model.parameters()]
    storages = [weakref.ref(storage) for module in model.modules() for storage in _storages_of(module)]
    state = model.state_dict()
    del model
    gc.collect()
    # These tensors would take the memory of shards if it were free.
    others = [torch.full_like(value, 7.0) for value in expected for _ in range(8)]
    for value, wanted in zip(state.values(), expected, strict=True):
        assert torch.equal(value.to_local(), wanted)
    assert len(others) == 8 * len(expected)
    assert all(ref() is not None for ref in storages)
    del state, value
    gc.collect()
    assert all(ref() is None for ref in storages)


def _storages_of(module: Any) -> list[torch.UntypedStorage]:
    unit = module.__dict__.get("_fsdp_unit")
    return [] if unit is None else [storage.untyped_storage() for storage in unit.storages.values()]


def test_unsharded_parameters_have_own_storages(one_rank: None) -> None:
    model = models.MLP()
    fully_shard(model, mesh=_mesh_of_one())
    expected = {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        model.unshard()
        full = model.head.weight
        assert full is model.head.weight and torch.equal(full, expected["head.weight"])
        assert full.storage_offset() == 0 and full.untyped_storage().nbytes() == full.nbytes
        assert len(_saved(full)) < full.nbytes + 2000
        model.reshard()
        assert isinstance(model.head.weight, DTensor)
        with torch.no_grad():
            model.head.weight.add_(1)
        expected["head.weight"] += 1


def test_gradients_are_saved_alone(one_rank: None) -> None:
    model = models.MLP()
    shard_units(model, _mesh_of_one(), fully_shard)
    model(torch.ones(1, 8)).sum().backward()
    for parameter in model.parameters():
        grad = parameter.grad
        assert isinstance(grad, DTensor)
        loaded = _loaded(_saved(grad))
        copied = copy.deepcopy(grad)
        assert torch.equal(loaded.to_local(), grad.to_local()) and torch.equal(copied.to_local(), grad.to_local())
        assert loaded.to_local().untyped_storage().nbytes() == grad.to_local().nbytes


def test_graph_that_writes_what_it_reads_is_refused(one_rank: None) -> None:
    model = models.MLP()
    shard_units(model, _mesh_of_one(), fully_shard)

    def scale_and_run(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        return model(x)

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"writes to parameter head\.weight .* in one graph"):
        torch.compile(scale_and_run, **_EAGER_LOWERING)(torch.ones(1, 8))

    def scale_then_run(x: Tensor) -> Tensor:
        with torch.no_grad():
            model.head.weight.mul_(0.5)
        torch._dynamo.graph_break()
        return model(x)

    before = model.head.weight.full_tensor().detach().clone()
    actual = torch.compile(scale_then_run, **_EAGER_LOWERING)(torch.ones(1, 8))
    assert torch.equal(model.head.weight.full_tensor(), before * 0.5)
    torch.testing.assert_close(actual, model(torch.ones(1, 8)))


def test_graph_that_reads_both_is_right(one_rank: None) -> None:
    """A graph may read a parameter and its shard if it writes neither. This one writes statistics of a normalisation."""
    torch.manual_seed(0)
    model = models.Buffers()
    fully_shard(model, mesh=_mesh_of_one())
    parameter = next(model.parameters())

    def function(x: Tensor) -> Tensor:
        return model(x) + parameter.detach().pow(2).sum().full_tensor()

    state = copy.deepcopy(model.state_dict())
    expected = function(torch.ones(3, 8))
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, state[name])]
    assert changed
    model.load_state_dict(state)
    torch.testing.assert_close(torch.compile(function, **_EAGER_LOWERING)(torch.ones(3, 8)), expected)


# --- Saved, copied, compiled ----------------------------------------------------------------------


def _build(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.MLP(dim=64, hidden=129, out=3).double()


def _sharded(seed: int = 0, system: FullyShard = fully_shard) -> nn.Module:
    model = _build(seed)
    shard_units(model, device_mesh((2,)), system)
    return model


def _backward(forward: Forward, step: int, microbatches: int = 2) -> None:
    for micro in range(microbatches):
        inputs, targets = regression_batch(microbatches * step + micro, dist.get_rank(), 2, dim=64, out=3)
        nn.functional.mse_loss(forward(inputs.double()), targets.double()).backward()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, compiled: bool, steps: Iterable[int]) -> None:
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    for step in steps:
        _backward(forward, step)
        optimizer.step()
        optimizer.zero_grad()


def _saved(what: Any) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def _loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.detach().to_local() if isinstance(tensor, DTensor) else tensor


def _assert_equal_locals(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in actual.items():
        assert torch.equal(_local(value), _local(expected[name])), name


def save_and_load(compiled: bool) -> None:
    model = _sharded()
    optimizer = adamw(model.parameters())
    _train(model, optimizer, compiled, range(3))
    state = model.state_dict()
    data, optimizer_data = _saved(state), _saved(optimizer.state_dict())
    # An archive adds some 700 bytes for each tensor. Two more tensors are metadata of DTensors.
    local_bytes = sum(_local(value).nbytes for value in state.values())
    assert local_bytes > 2 * 1300 * len(state)
    assert local_bytes < len(data) < local_bytes + 1300 * len(state)
    for name, value in state.items():
        assert len(_saved(value)) < _local(value).nbytes + 4000, name

    copied = copy.deepcopy(state)
    _assert_equal_locals(copied, state)
    _assert_equal_locals(_loaded(data), state)
    for system in (fully_shard, torch.distributed.fsdp.fully_shard):
        other = _sharded(1, system)
        other.load_state_dict(_loaded(data))
        _assert_equal_locals(other.state_dict(), state)
        other_optimizer = adamw(other.parameters())
        other_optimizer.load_state_dict(_loaded(optimizer_data))
        _backward(other, 3)
        _backward(model, 3)
        other_optimizer.step()
        optimizer.step()
        for (name, ours), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(_local(ours), _local(theirs), msg=lambda text, name=name: f"{name}: {text}")
        model.load_state_dict(copied)
        optimizer.load_state_dict(_loaded(optimizer_data))
        model.zero_grad()
    # The copy shares no memory with the model.
    before = {name: _local(value).clone() for name, value in copied.items()}
    _train(model, optimizer, compiled, range(4, 5))
    _assert_equal_locals(copied, before)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_torch_save(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(save_and_load, compiled=compiled)


def save_to_safetensors(path: str) -> None:
    model = _sharded()
    _train(model, adamw(model.parameters()), False, range(1))
    file = f"{path}/{dist.get_rank()}.safetensors"
    expected = {name: _local(value) for name, value in model.state_dict().items()}
    # safetensors refuses tensors that share a storage, and storages that hold more than the tensor.
    safetensors.torch.save_file(expected, file)
    _assert_equal_locals(safetensors.torch.load_file(file), dict(sorted(expected.items())))
    assert Path(file).stat().st_size < sum(value.nbytes for value in expected.values()) + 200 * len(expected)


def test_safetensors(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[2].run(save_to_safetensors, path=str(tmp_path))


def checkpoint(path: str, compiled: bool, saves: str, loads: str) -> None:
    """Save in the background while the model trains on. Loading gives the values at the call. Every rank calls this."""
    systems: dict[str, FullyShard] = {"ours": fully_shard, "fsdp2": torch.distributed.fsdp.fully_shard}
    model = _sharded(0, systems[saves])
    optimizer = adamw(model.parameters())
    _train(model, optimizer, compiled and saves == "ours", range(2))
    states = get_state_dict(model, optimizer)
    expected = copy.deepcopy(states)
    future = dcp.async_save(dict(zip(("model", "optimizer"), states, strict=True)), checkpoint_id=path)
    getattr(future, "staging_completion", future).result()
    _train(model, optimizer, compiled and saves == "ours", range(2, 3))
    future.result()

    other = _sharded(1, systems[loads])
    other_optimizer = adamw(other.parameters())
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(other, other_optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    model_state, optimizer_state = get_state_dict(other, other_optimizer)
    _assert_equal_locals(model_state, expected[0])
    for name, values in expected[1]["state"].items():
        _assert_equal_locals(optimizer_state["state"][name], values)


@pytest.mark.parametrize(
    ("compiled", "saves", "loads"),
    [(False, "ours", "ours"), (True, "ours", "fsdp2"), (True, "fsdp2", "ours")],
    ids=["eager", "to-fsdp2", "from-fsdp2"],
)
def test_asynchronous_checkpoint(compiled: bool, saves: str, loads: str, rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[2].run(checkpoint, path=str(tmp_path / "checkpoint"), compiled=compiled, saves=saves, loads=loads)


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": partial(adamw, foreach=True),
    "adamw_single": partial(adamw, foreach=False),
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


# torch's cache of graphs tells DTensors apart by full shapes, so a rank could get the graph of a rank with fewer rows.
@torch._functorch.config.patch(enable_autograd_cache=False)
def compiled_step(compiled: bool, name: str, backend: str) -> None:
    """Train with clipping and the optimizer compiled, and the model if ``compiled``, beside a run without a compiler."""
    models = [_sharded(), _sharded()]
    optimizers = [_OPTIMIZERS[name](model.parameters()) for model in models]
    forwards = [torch.compile(models[0], **_EAGER_LOWERING) if compiled else models[0], models[1]]
    clips = [torch.compile(nn.utils.clip_grad_norm_, backend=backend), nn.utils.clip_grad_norm_]
    steps = [torch.compile(optimizers[0].step, backend=backend), optimizers[1].step]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for index in range(3):
        norms = []
        for model, forward, clip, step, optimizer in zip(models, forwards, clips, steps, optimizers, strict=True):
            _backward(forward, index)
            norms.append(clip(model.parameters(), 0.05))
            step()
            optimizer.zero_grad()
        # A compiled Adam keeps its count of steps, and computes with it, in single precision.
        torch.testing.assert_close(norms[0].full_tensor(), norms[1].full_tensor(), rtol=1e-5, atol=0)
        for ours, theirs in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(_local(ours), _local(theirs), rtol=1e-5, atol=1e-6)
        _assert_own_storages(models[0], f"step {index}")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > graphs


_FIXED_STEPS = [(True, "adamw", "aot_eager"), (True, "adamw", "inductor")]
_STEPS = [
    pytest.param(*step, marks=[] if step in _FIXED_STEPS else pytest.mark.night)
    for step in itertools.product((False, True), _OPTIMIZERS, ("aot_eager", "inductor"))
]


@pytest.mark.parametrize(("compiled", "name", "backend"), _STEPS)
def test_compiled_optimizer_step_and_clipping(compiled: bool, name: str, backend: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(compiled_step, compiled=compiled, name=name, backend=backend)
