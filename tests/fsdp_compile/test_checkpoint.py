"""State of a sharded model: the next forward uses the values that were loaded, cast, frozen or stepped.

Most jobs train a sharded model beside a *twin*: the same model, not sharded, that every rank trains on the
batches of all ranks. Everything is in float64, in which the two differ by rounding only. Whatever a job does to
one model it does to the other, and they must stay equal. Jobs assert on the ranks themselves: a failure comes
back as the ranks' tracebacks.

Compiled models use the ``aot_eager`` lowering: the inputs that a graph takes from the model's state do not depend
on how its operators are lowered.
"""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import fsdp_backend, fully_shard, sync_module_states
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import Forward, FullyShard, adamw, describe_values, regression_batch, shard_units

# Batches in the global batch. The number of ranks does not change it, so that two worlds can train on the same data.
_PIECES = 4


# No size divides by two or four: on four ranks the last one holds no row of ``down.bias`` and of the head.
def _build(seed: int = 0, layers: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return models.MLP(dim=5, hidden=7, out=3, layers=layers).double()


def _mesh() -> DeviceMesh:
    return device_mesh((dist.get_world_size(),))


def _sharded(model: nn.Module) -> nn.Module:
    shard_units(model, _mesh(), fully_shard)
    return model


def _compile(model: nn.Module, compiled: bool) -> Forward:
    return torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) if compiled else model


def _batch(step: int, pieces: Iterable[int]) -> tuple[Tensor, Tensor]:
    batches = [regression_batch(step, piece, _PIECES, dim=5, out=3) for piece in pieces]
    inputs, targets = zip(*batches, strict=True)
    return torch.cat(inputs).double(), torch.cat(targets).double()


def _own_pieces() -> range:
    count = _PIECES // dist.get_world_size()
    return range(dist.get_rank() * count, (dist.get_rank() + 1) * count)


def _backward(forward: Forward, step: int, pieces: Iterable[int], dtype: torch.dtype = torch.float64) -> None:
    inputs, targets = _batch(step, pieces)
    F.mse_loss(forward(inputs.to(dtype)), targets.to(dtype)).backward()


class _Pair:
    """A sharded model and its twin, each with an optimizer."""

    def __init__(
        self,
        compiled: bool,
        build: Callable[[], nn.Module] = _build,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    ) -> None:
        self.twin = build()
        self.model = _sharded(copy.deepcopy(self.twin))
        self.forward = _compile(self.model, compiled)
        self.new_optimizer = optimizer
        self.reset_optimizers()

    def reset_optimizers(self) -> None:
        self.optimizer = self.new_optimizer(self.model.parameters())
        self.twin_optimizer = self.new_optimizer(self.twin.parameters())

    def backward(self, step: int, dtype: torch.dtype = torch.float64) -> None:
        _backward(self.forward, step, _own_pieces(), dtype)
        _backward(self.twin, step, range(_PIECES), dtype)

    def step(self) -> None:
        for optimizer in (self.optimizer, self.twin_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: Iterable[int], dtype: torch.dtype = torch.float64, rtol: float = 1e-9) -> None:
        for step in steps:
            self.backward(step, dtype)
            self.check(f"step {step}", rtol)
            self.step()
        self.check("after the steps", rtol)

    def check(self, when: str, rtol: float = 1e-9) -> None:
        _assert_equal(self.model, self.twin, when, rtol)


def _full(tensor: Tensor) -> Tensor:
    assert isinstance(tensor, DTensor)
    return tensor.detach().full_tensor()


def _assert_equal(model: nn.Module, twin: nn.Module, when: str = "", rtol: float = 1e-9) -> None:
    """Assert that parameters and gradients of a sharded model equal those of its twin."""
    expected = dict(twin.named_parameters())
    actual = dict(model.named_parameters())
    assert list(actual) == list(expected)
    for name, parameter in actual.items():
        tensors = {"value": (parameter, expected[name]), "gradient": (parameter.grad, expected[name].grad)}
        for what, (ours, theirs) in tensors.items():
            assert (ours is None) == (theirs is None), f"{when}: {what} of {name}: {ours}, expected {theirs}"
            if ours is not None and theirs is not None:
                torch.testing.assert_close(
                    _full(ours),
                    theirs.detach(),
                    rtol=rtol,
                    atol=rtol,
                    msg=lambda text, what=what, name=name: f"{when}: {what} of {name}: {text}",
                )


# --- Contents of state dicts ----------------------------------------------------------------------


def _tied() -> nn.Module:
    torch.manual_seed(0)
    return models.Transformer(vocab=13, dim=6, heads=3, hidden=7, layers=1, tied=True)


def _shard_columns(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    shard_units(model, mesh, fully_shard, shard_placement_fn=placement)


_STATES: dict[str, tuple[Callable[[], nn.Module], Callable[..., None]]] = {
    "uneven": (_build, shard_units),
    "tied": (_tied, shard_units),
    "buffers": (models.Buffers, shard_units),
    "containers": (models.Containers, shard_units),
    "columns": (models.MLP, _shard_columns),
}


def state_dict_like_fsdp2(name: str, shape: tuple[int, ...]) -> None:
    build, shard = _STATES[name]
    described = []
    for system in (torch.distributed.fsdp.fully_shard, fully_shard):
        torch.manual_seed(0)
        model = build()
        shard(model, device_mesh(shape), system)
        # Names and the tensors that they name, in order. The tensors of parameters() must equal those of the state dict.
        state = {key: describe_values(tensor) for key, tensor in model.state_dict().items()}
        parameters = {key: describe_values(parameter) for key, parameter in model.named_parameters()}
        described.append((list(state.items()), list(parameters.items())))
    theirs, ours = described
    assert ours == theirs


@pytest.mark.parametrize("shape", [(2,), (4,), (2, 2)], ids=str)
@pytest.mark.parametrize("name", _STATES)
def test_state_dict_is_as_fsdp2s(name: str, shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    rank_pools[world].run(state_dict_like_fsdp2, name=name, shape=shape)


def state_dict_taken_once(compiled: bool) -> None:
    pair = _Pair(compiled)
    state = pair.model.state_dict()
    pair.train(range(2))
    for name, parameter in pair.model.named_parameters():
        assert state[name].to_local().untyped_storage().data_ptr() == parameter.to_local().untyped_storage().data_ptr()
        torch.testing.assert_close(_full(state[name]), _full(parameter), rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_a_state_dict_taken_once_follows_the_steps(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(state_dict_taken_once, compiled=compiled)


class _Twice(nn.Module):
    """One module under two names; forward calls both names."""

    def __init__(self) -> None:
        super().__init__()
        self.first = models.Block(5, 7)
        self.blocks = nn.ModuleList([self.first, nn.Linear(5, 5)])
        self.again = self.first
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.again(self.blocks[1](self.first(x))))


def _twice() -> nn.Module:
    torch.manual_seed(0)
    return _Twice().double()


def module_shared_in_the_tree(compiled: bool) -> None:
    pair = _Pair(compiled, _twice)
    assert [name for name, _ in pair.model.named_parameters()] == [name for name, _ in pair.twin.named_parameters()]
    assert list(pair.model.state_dict()) == list(pair.twin.state_dict())
    assert pair.model.get_submodule("again") is pair.model.get_submodule("first")
    pair.train(range(2))
    # There is one parameter, so it does not matter under which name a value comes.
    pair.model.load_state_dict(_sharded_state(_twice()))
    pair.twin.load_state_dict(_twice().state_dict())
    pair.train(range(2))


@pytest.mark.parametrize("compiled", [False, True])
def test_module_shared_in_the_tree(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(module_shared_in_the_tree, compiled=compiled)


# --- Loading --------------------------------------------------------------------------------------


def _sharded_state(model: nn.Module) -> dict[str, Any]:
    """Return the state dict of ``model`` after sharding it, in memory of its own."""
    return {name: value.detach().clone() for name, value in _sharded(model).state_dict().items()}


def load_between_steps(compiled: bool, assign: bool) -> None:
    pair = _Pair(compiled)
    pair.train(range(2))
    state = _sharded_state(_build(seed=1))
    before = dict(pair.model.named_parameters())
    loaded = pair.model.load_state_dict(state, assign=assign)
    assert not loaded.missing_keys and not loaded.unexpected_keys
    pair.twin.load_state_dict(_build(seed=1).state_dict())
    if assign:
        # As with any module, an optimizer knows the parameters that it was given, not their successors.
        pair.reset_optimizers()
    else:
        for name, parameter in pair.model.named_parameters():
            assert parameter is before[name]
    pair.check("loaded")
    pair.train(range(2, 5))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize(
    ("world", "compiled"),
    [(4, False), (2, True), pytest.param(4, True, marks=pytest.mark.night)],
    ids=["4-eager", "2-compiled", "4-compiled"],
)
def test_load_state_dict_between_steps(world: int, compiled: bool, assign: bool, rank_pools: RankPools) -> None:
    rank_pools[world].run(load_between_steps, compiled=compiled, assign=assign)


def load_one_parameter(assign: bool) -> None:
    """Check that a partial state dict replaces the parameters that it names, and no others."""
    pair = _Pair(compiled=True)
    pair.train(range(1))
    name = "blocks.0.down.weight"
    state = _sharded_state(_build(seed=1))
    pair.model.load_state_dict({name: state[name]}, strict=False, assign=assign)
    pair.twin.load_state_dict({name: _build(seed=1).state_dict()[name]}, strict=False)
    pair.reset_optimizers()
    pair.train(range(1, 3))


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_one_parameter(assign: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(load_one_parameter, assign=assign)


def load_into_tied(assign: bool) -> None:
    """Check that parameters stay tied, even if the state dict has different tensors for the two names."""
    torch.manual_seed(0)
    model = models.Transformer(vocab=13, layers=1, tied=True)
    fully_shard(model.head, mesh=_mesh())
    shard_units(model, _mesh(), fully_shard)
    state = {name: (value.detach() + 1).clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    assert model.head.weight is model.embedding.weight
    torch.testing.assert_close(_full(model.head.weight), _full(state["head.weight"]))
    tokens = torch.arange(6).view(1, 6)
    model(tokens).sum().backward()
    assert model.embedding.weight.grad is not None


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_load_into_tied_parameters(assign: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(load_into_tied, assign=assign)


def _on_meta() -> nn.Module:
    with torch.device("meta"):
        model = _build()
    return _sharded(model)


def load_onto_meta(compiled: bool) -> None:
    model = _on_meta()
    model.load_state_dict(_sharded_state(_build(seed=1)), assign=True)
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())
    _train_on_from(model, _build(seed=1), compiled)


def _train_on_from(model: nn.Module, twin: nn.Module, compiled: bool) -> None:
    """Check that ``model`` has the values of ``twin``, and train both in step."""
    pair = _Pair.__new__(_Pair)
    pair.model, pair.twin, pair.new_optimizer = model, twin, adamw
    pair.forward = _compile(model, compiled)
    pair.reset_optimizers()
    pair.check("initially")
    pair.train(range(3))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_load_state_dict_onto_meta(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[4].run(load_onto_meta, compiled=compiled)


def init_on_meta() -> None:
    """Check that forward computes with the values that init functions wrote into the shards."""
    model = _on_meta()
    assert all(parameter.is_meta and isinstance(parameter, DTensor) for parameter in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    twin = _build()
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.copy_(_full(parameter))
    _train_on_from(model, twin, compiled=True)


def test_meta_device_initialisation(rank_pools: RankPools) -> None:
    rank_pools[4].run(init_on_meta)


def init_on_meta_module_by_module() -> None:
    """Initialise as code for large models does: give each module memory, then values, by itself."""
    model = _on_meta()
    for module in model.modules():
        if next(module.parameters(recurse=False), None) is not None:
            module.to_empty(device="cpu", recurse=False)
            with torch.no_grad():
                for parameter in module.parameters(recurse=False):
                    nn.init.uniform_(parameter, -0.5, 0.5)
    twin = _build()
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            other.copy_(_full(parameter))
    _train_on_from(model, twin, compiled=True)


def test_meta_device_initialisation_module_by_module(rank_pools: RankPools) -> None:
    rank_pools[2].run(init_on_meta_module_by_module)


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def save_checkpoint(path: str, steps: int, compiled: bool) -> None:
    model = _sharded(_build())
    optimizer = adamw(model.parameters())
    forward = _compile(model, compiled)
    for step in range(steps):
        _backward(forward, step, _own_pieces())
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=path)


def resume_checkpoint(path: str, steps: int, compiled: bool, running: bool, meta: bool = False) -> None:
    """Load a checkpoint into a new model, or (``running``) one that has trained on other data, and train on."""
    twin = _build()
    twin_optimizer = adamw(twin.parameters())
    for step in range(steps):
        _backward(twin, step, range(_PIECES))
        twin_optimizer.step()
        twin_optimizer.zero_grad()

    if meta:
        model = _on_meta()
        model.to_empty(device="cpu")
    else:
        model = _sharded(_build(seed=7))
    optimizer = adamw(model.parameters())
    forward = _compile(model, compiled)
    if running:
        _backward(forward, 100, _own_pieces())
        optimizer.step()
        optimizer.zero_grad()
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optimizer": optimizer_state}
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    _assert_equal(model, twin, "loaded")

    for step in range(steps, steps + 3):
        _backward(forward, step, _own_pieces())
        _backward(twin, step, range(_PIECES))
        _assert_equal(model, twin, f"step {step}")
        for either in (optimizer, twin_optimizer):
            either.step()
            either.zero_grad()
    _assert_equal(model, twin, "finally")


@pytest.mark.parametrize(("compiled", "running"), [(False, False), (True, True)], ids=["eager", "compiled-running"])
def test_checkpoint_from_four_ranks_resumes_on_two(
    compiled: bool, running: bool, rank_pools: RankPools, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    rank_pools[4].run(save_checkpoint, path=path, steps=3, compiled=compiled)
    rank_pools[2].run(resume_checkpoint, path=path, steps=3, compiled=compiled, running=running)


def test_checkpoint_resumes_from_meta(rank_pools: RankPools, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    rank_pools[2].run(save_checkpoint, path=path, steps=2, compiled=False)
    rank_pools[4].run(resume_checkpoint, path=path, steps=2, compiled=True, running=False, meta=True)


def load_full_from_first_rank(compiled: bool, start: str) -> None:
    first = dist.get_rank() == 0
    state = _build(seed=1).state_dict() if first else {}
    model = _on_meta() if start == "meta" else _sharded(_build(seed=2))
    forward = _compile(model, compiled)
    if start == "running":
        _backward(forward, 0, _own_pieces())
        model.zero_grad()
    if start == "meta":
        model.to_empty(device="cpu")
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    twin = _build(seed=1)
    _assert_equal(model, twin, "loaded")
    optimizers = [adamw(model.parameters()), adamw(twin.parameters())]
    for step in range(2):
        _backward(forward, step, _own_pieces())
        _backward(twin, step, range(_PIECES))
        _assert_equal(model, twin, f"step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("start", ["new", "meta", "running"])
def test_full_state_dict_of_first_rank_loads(start: str, rank_pools: RankPools) -> None:
    rank_pools[4].run(load_full_from_first_rank, compiled=True, start=start)


def full_state_dict() -> None:
    pair = _Pair(compiled=True)
    pair.train(range(2))
    expected = pair.twin.state_dict()
    state = get_model_state_dict(pair.model, options=StateDictOptions(full_state_dict=True))
    assert list(state) == list(expected)
    for name, value in state.items():
        assert not isinstance(value, DTensor)
        torch.testing.assert_close(value, expected[name], rtol=1e-9, atol=1e-9)
    on_first = get_model_state_dict(pair.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    assert list(on_first) == (list(expected) if dist.get_rank() == 0 else [])
    # The names have no prefix of a wrapper, even for the compiled module.
    assert isinstance(pair.forward, nn.Module)
    assert list(get_model_state_dict(pair.forward)) == list(expected)


def test_full_state_dict(rank_pools: RankPools) -> None:
    rank_pools[4].run(full_state_dict)


# --- Casts ----------------------------------------------------------------------------------------


def cast(compiled: bool, steps_before: int) -> None:
    pair = _Pair(compiled)
    pair.train(range(steps_before))
    for model in (pair.model, pair.twin):
        model.to(torch.float32)
    assert {parameter.dtype for parameter in pair.model.parameters()} == {torch.float32}
    pair.reset_optimizers()
    pair.train(range(steps_before, steps_before + 2), torch.float32, rtol=1e-5)
    for model in (pair.model, pair.twin):
        model.double()
    pair.reset_optimizers()
    # Differences in rounding from the float32 steps remain.
    pair.train(range(4, 6), rtol=1e-5)


@pytest.mark.parametrize(
    ("compiled", "steps_before"),
    [(False, 1), (True, 0), (True, 1)],
    ids=["eager", "compiled-first", "compiled-later"],
)
def test_cast_after_sharding(compiled: bool, steps_before: int, rank_pools: RankPools) -> None:
    rank_pools[2].run(cast, compiled=compiled, steps_before=steps_before)


# --- Gradients and optimizers ---------------------------------------------------------------------


def freeze_and_unfreeze(compiled: bool, names: list[str]) -> None:
    pair = _Pair(compiled)
    pair.train(range(2))
    for requires_grad in (False, True, False):
        for model in (pair.model, pair.twin):
            for name in names:
                model.get_parameter(name).requires_grad_(requires_grad)
        for step in range(2):
            pair.backward(step)
            pair.check(f"requires_grad={requires_grad}, step {step}")
            for name in names:
                assert (pair.model.get_parameter(name).grad is not None) == requires_grad
            pair.step()
    pair.check("finally")


@pytest.mark.parametrize(
    "names",
    [
        ["head.weight"],
        ["bias", "blocks.0.up.weight"],
        [f"blocks.0.{name}" for name in ("up.weight", "up.bias", "down.weight", "down.bias")],
    ],
    ids=["head", "scattered", "unit"],
)
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_freeze_and_unfreeze(compiled: bool, names: list[str], rank_pools: RankPools) -> None:
    rank_pools[2].run(freeze_and_unfreeze, compiled=compiled, names=names)


class _TwoLayers(nn.Module):
    def __init__(self, breaks: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)
        self.breaks = breaks

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x).relu()
        if self.breaks:
            torch._dynamo.graph_break()
        return self.down(x)


def freeze_where_one_rank_compiles_anew(breaks: bool, evaluates: bool) -> None:
    """Freeze and thaw parameters ahead of a step whose batches have a known size on one rank and a new size on the other."""
    torch.manual_seed(0)
    twin = _TwoLayers(breaks).double()
    model = copy.deepcopy(twin)
    fully_shard(model, mesh=_mesh())
    forward = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}, dynamic=False)
    steps = [(True, (2, 2)), (False, (2, 3)), (True, (4, 3)), (False, (4, 5)), (False, (4, 5))]
    for step, (requires_grad, sizes) in enumerate(steps):
        batches = [torch.randn(size, 3, dtype=torch.float64) for size in sizes]
        for each in (model, twin):
            for name in ("up.bias", "down.weight"):
                each.get_parameter(name).requires_grad_(requires_grad)
        if evaluates:
            with torch.no_grad():
                forward(batches[dist.get_rank()])
        forward(batches[dist.get_rank()]).square().sum().backward()
        sum(twin(batch).square().sum() for batch in batches).div(2).backward()
        _assert_equal(model, twin, f"step {step}")
        for each in (model, twin):
            each.zero_grad()


@pytest.mark.parametrize(
    ("breaks", "evaluates"), [(False, False), (True, False), (False, True)], ids=["whole", "breaks", "evaluates"]
)
def test_freeze_where_one_rank_compiles_anew(breaks: bool, evaluates: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(freeze_where_one_rank_compiles_anew, breaks=breaks, evaluates=evaluates)


def frozen_at_first(compiled: bool) -> None:
    """Train with a body that is frozen before sharding, then thaw it, the usual order of fine-tuning."""

    def build() -> nn.Module:
        model = _build()
        model.blocks.requires_grad_(False)
        return model

    pair = _Pair(compiled, build)
    pair.train(range(2))
    for model in (pair.model, pair.twin):
        model.requires_grad_(True)
    pair.train(range(2, 5))


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_thaw_what_was_frozen_at_sharding(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(frozen_at_first, compiled=compiled)


def clip(compiled: bool, norm_type: float, foreach: bool) -> None:
    pair = _Pair(compiled)
    for step in range(2):
        pair.backward(step)
        options: dict[str, Any] = {"max_norm": 0.05, "norm_type": norm_type, "foreach": foreach}
        norm = nn.utils.clip_grad_norm_(pair.model.parameters(), **options)
        expected = nn.utils.clip_grad_norm_(pair.twin.parameters(), **options)
        torch.testing.assert_close(_full(norm), expected, rtol=1e-9, atol=0)
        pair.check(f"clipped at step {step}")
        pair.step()
    pair.check("finally")


@pytest.mark.parametrize(
    # On four ranks, some shards are empty. torch takes no infinity norm of an empty shard.
    ("world", "norm_type", "foreach"),
    [(4, 2.0, True), (4, 1.0, False), (2, float("inf"), True)],
)
def test_clip_grad_norm(world: int, norm_type: float, foreach: bool, rank_pools: RankPools) -> None:
    rank_pools[world].run(clip, compiled=True, norm_type=norm_type, foreach=foreach)


_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adamw_foreach": partial(adamw, foreach=True),
    "adamw_fused": partial(adamw, fused=True),
    "adam_amsgrad": partial(torch.optim.Adam, lr=1e-2, eps=1e-3, amsgrad=True),
    "sgd_foreach": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.1),
}


def optimize(compiled: bool, name: str) -> None:
    _Pair(compiled, optimizer=_OPTIMIZERS[name]).train(range(4))


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizer_steps_reach_the_compiled_graph(name: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(optimize, compiled=True, name=name)


def optimizer_step_compiles_nothing() -> None:
    pair = _Pair(compiled=True)
    pair.train(range(2))
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    pair.train(range(2, 5))
    state = _sharded_state(_build(seed=1))
    pair.model.load_state_dict(state)
    pair.twin.load_state_dict(_build(seed=1).state_dict())
    pair.train(range(5, 7))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_new_values_compile_nothing(rank_pools: RankPools) -> None:
    rank_pools[2].run(optimizer_step_compiles_nothing)


def accumulate_into_zeros(compiled: bool) -> None:
    pair = _Pair(compiled)
    pair.backward(0)
    kept = {name: parameter.grad for name, parameter in pair.model.named_parameters()}
    for step in range(1, 4):
        for model in (pair.model, pair.twin):
            model.zero_grad(set_to_none=False)
        assert all(not _full(parameter.grad).any() for parameter in pair.model.parameters())
        pair.backward(step)
        pair.check(f"step {step}")
        for name, parameter in pair.model.named_parameters():
            # The gradient is written in place, as by autograd: references to it see the new values.
            assert parameter.grad is kept[name]
        for optimizer in (pair.optimizer, pair.twin_optimizer):
            optimizer.step()
    pair.check("finally")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_zero_grad_in_place(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(accumulate_into_zeros, compiled=compiled)


def kept_gradients_stay(compiled: bool) -> None:
    """Check that later steps do not write to a gradient that the user keeps: it is no buffer of a graph."""
    pair = _Pair(compiled)
    pair.backward(0)
    kept = {name: parameter.grad for name, parameter in pair.model.named_parameters()}
    values = {name: _full(gradient).clone() for name, gradient in kept.items()}
    pair.step()
    pair.train(range(1, 3))
    for name, gradient in kept.items():
        torch.testing.assert_close(_full(gradient), values[name], rtol=0, atol=0)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_kept_gradients_stay(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(kept_gradients_stay, compiled=compiled)


class _BothSides(nn.Module):
    """A parameter that is used before and after a graph break, so that two graphs add to its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5) / 5)
        self.blocks = nn.ModuleList([models.Block(5, 7)])
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](torch.tanh(x @ self.weight))
        torch._dynamo.graph_break()
        return self.head(torch.tanh(x @ self.weight.t()))


def _both_sides() -> nn.Module:
    torch.manual_seed(0)
    return _BothSides().double()


def hooks(compiled: bool, build: Callable[[], nn.Module]) -> None:
    pair = _Pair(compiled, build)
    calls: Counter[str] = Counter()
    seen: dict[str, Tensor] = {}

    def hook(name: str, parameter: Tensor) -> None:
        calls[name] += 1
        assert parameter is pair.model.get_parameter(name)
        assert isinstance(parameter.grad, DTensor)
        seen[name] = parameter.grad.to_local().clone()

    handles = [
        parameter.register_post_accumulate_grad_hook(partial(hook, name)) for name, parameter in pair.model.named_parameters()
    ]
    names = [name for name, _ in pair.model.named_parameters()]
    for step in range(3):
        # There are two microbatches in a step: a hook sees the sum so far.
        for micro in range(2):
            calls.clear()
            pair.backward(2 * step + micro)
            assert dict(calls) == dict.fromkeys(names, 1)
            pair.check(f"step {step}, microbatch {micro}")
            for name, parameter in pair.model.named_parameters():
                assert torch.equal(seen[name], parameter.grad.to_local()), f"{name} changed after its hook"
        pair.step()
    for handle in handles:
        handle.remove()
    calls.clear()
    pair.backward(10)
    assert not calls


@pytest.mark.parametrize("build", [_build, _both_sides, _twice])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_hooks_run_once_with_the_whole_gradient(compiled: bool, build: Callable[[], nn.Module], rank_pools: RankPools) -> None:
    rank_pools[2].run(hooks, compiled=compiled, build=build)


def optimizer_in_backward(compiled: bool) -> None:
    """Step each parameter in its hook during backward, and free its gradient: the common use of such hooks."""
    pair = _Pair(compiled)
    own = {parameter: adamw([parameter]) for parameter in pair.model.parameters()}

    def hook(parameter: Tensor) -> None:
        assert isinstance(parameter, nn.Parameter)
        own[parameter].step()
        own[parameter].zero_grad()

    for parameter in pair.model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)
    for step in range(3):
        pair.backward(step)
        pair.twin_optimizer.step()
        pair.twin_optimizer.zero_grad()
        pair.check(f"step {step}")


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_optimizer_in_backward(compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(optimizer_in_backward, compiled=compiled)


# --- The same start on all ranks ------------------------------------------------------------------


def sync_states(shape: tuple[int, ...], default_mesh: bool) -> None:
    def build(rank: int) -> nn.Module:
        torch.manual_seed(rank)
        model = models.Buffers(dim=5).double()
        model.register_buffer("flag", torch.tensor(rank))
        model.steps += rank
        model.mean += rank
        return model

    model = build(dist.get_rank())
    parameters = dict(model.named_parameters())
    sync_module_states(model, None if default_mesh else device_mesh(shape))
    expected = build(0)
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        theirs = dict(itertools.chain(expected.named_parameters(), expected.named_buffers()))[name]
        assert torch.equal(tensor, theirs), name
    for name, parameter in model.named_parameters():
        assert parameter is parameters[name] and parameter.requires_grad and parameter.is_leaf
    shard_units(model, device_mesh(shape), fully_shard)
    _assert_equal(model, expected, "sharded")


@pytest.mark.parametrize(("shape", "default_mesh"), [((2,), False), ((4,), True), ((2, 2), False)], ids=["2", "default", "2x2"])
def test_sync_module_states(shape: tuple[int, ...], default_mesh: bool, rank_pools: RankPools) -> None:
    world = shape[0] if len(shape) == 1 else shape[0] * shape[1]
    rank_pools[world].run(sync_states, shape=shape, default_mesh=default_mesh)


def sync_refuses() -> None:
    model = _sharded(_build())
    with pytest.raises(ValueError, match="must come before fully_shard, but bias is sharded already"):
        sync_module_states(model, _mesh())
    with torch.device("meta"):
        model = _build()
    with pytest.raises(ValueError, match="bias is on the meta device"):
        sync_module_states(model, _mesh())


def test_sync_module_states_refuses(rank_pools: RankPools) -> None:
    rank_pools[2].run(sync_refuses)


def distributed_values_reach_the_graph() -> None:
    """Check that the compiled graph computes with values that are written into parameters in place."""
    pair = _Pair(compiled=True)
    pair.train(range(1))
    with torch.no_grad():
        for model in (pair.model, pair.twin):
            torch.manual_seed(5)
            for parameter in model.parameters():
                value = torch.randn(parameter.shape, dtype=torch.float64)
                if isinstance(parameter, DTensor):
                    value = distribute_tensor(value, parameter.device_mesh, parameter.placements)
                parameter.copy_(value)
            model.head.weight.mul_(0.5)
            model.head.bias.zero_()
    pair.train(range(1, 3))


def test_values_written_outside_reach_the_graph(rank_pools: RankPools) -> None:
    rank_pools[2].run(distributed_values_reach_the_graph)
