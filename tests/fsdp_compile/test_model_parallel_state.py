"""State of a model that is sharded on top of tensor or expert parallelism: equal to FSDP2's, and exchanged with FSDP2.

Four ranks, two by two. Jobs assert on the ranks themselves.
"""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from fsdp_compile import fully_shard
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import relative_error
from tests.common.parity import (
    FullyShard,
    adamw,
    describe_values,
    next_token_loss,
    regression_batch,
    shard_units,
    squared_error,
    token_batch,
)
from tests.fsdp_compile.test_model_parallel import Decoder, sequence_parallel, uneven_parallel
from tests.fsdp_compile.test_nd import Split, reference

_SYSTEMS: dict[str, FullyShard] = {"fsdp2": torch.distributed.fsdp.fully_shard, "ours": fully_shard}


def _mesh(shape: tuple[int, ...]) -> DeviceMesh:
    return device_mesh(shape, ("dp", "tp")[: len(shape)])


def _sharded(
    model: nn.Module,
    system: str = "ours",
    shape: tuple[int, ...] = (2, 2),
    parallelize: Callable[[nn.Module, DeviceMesh], None] = sequence_parallel,
    **options: Any,
) -> Any:
    mesh = _mesh(shape)
    if len(shape) == 2:
        parallelize(model, mesh["tp"])
    shard_units(model, mesh["dp"], _SYSTEMS[system], **options)
    return model


def _decoder(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return Decoder(layers=1)


def _mlp(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return models.MLP(dim=6, hidden=7, out=3, layers=1)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    # All ranks have the same batch, in every way to split them.
    next_token_loss(model, token_batch(step, 0, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()


# --- Contents of state dicts ----------------------------------------------------------------------


def _tensors(tree: Any, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, Tensor):
            yield f"{prefix}{key}", value
        else:
            yield from _tensors(value, f"{prefix}{key}.")


_STATES: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, DeviceMesh], None], dict[str, Any]]] = {
    "decoder": (_decoder, sequence_parallel, {}),
    # No size divides, and the bias of the root is no DTensor.
    "uneven": (_mlp, uneven_parallel, {}),
    "columns": (models.MLP, uneven_parallel, {"shard_placement_fn": lambda param: Shard(1) if param.ndim == 2 else None}),
}


def state_dict_like_fsdp2(name: str) -> None:
    build, parallelize, options = _STATES[name]
    described = []
    for system in _SYSTEMS:
        torch.manual_seed(0)
        whole = build()
        values = {key: value.detach().clone() for key, value in whole.named_parameters()}
        model = _sharded(whole, system, parallelize=parallelize, **options)
        described.append({key: describe_values(tensor) for key, tensor in model.state_dict().items()})
        for key, parameter in model.named_parameters():
            assert torch.equal(parameter.full_tensor(), values[key]), key
    theirs, ours = described
    assert ours == theirs


@pytest.mark.parametrize("name", _STATES)
def test_state_dict_is_as_fsdp2s(name: str, rank_pools: RankPools) -> None:
    rank_pools[4].run(state_dict_like_fsdp2, name=name)


def optimizer_state_like_fsdp2() -> None:
    described = []
    for system in _SYSTEMS:
        model = _sharded(_decoder(), system)
        optimizer = adamw(model.parameters())
        _step(model, optimizer, 0)
        found = dict(_tensors(get_optimizer_state_dict(model, optimizer)))
        described.append(({key: describe_values(tensor).split(" local ")[0] for key, tensor in found.items()}, found))
    (layout, theirs), (other, ours) = described
    assert other == layout
    for key, tensor in ours.items():
        torch.testing.assert_close(_full(tensor), _full(theirs[key]), msg=lambda text, key=key: f"{key}: {text}")


def test_optimizer_state_is_as_fsdp2s(rank_pools: RankPools) -> None:
    rank_pools[4].run(optimizer_state_like_fsdp2)


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


# --- torch.distributed.checkpoint -----------------------------------------------------------------


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))


Trained = tuple[Any, Callable[[int], Any]]


def _tensor_parallel(system: str, shape: tuple[int, ...], seed: int = 0) -> Trained:
    """Return a model, and a function that runs forward and backward of a step and accumulates gradients."""
    model = _sharded(_decoder(seed), system, shape)
    # All ranks have the same batch, in every way to split them.
    return model, lambda step: next_token_loss(model, token_batch(step, 0, 1)).backward()


def _expert_parallel(system: str, flags: str, seed: int = 0) -> Trained:
    """Return the example's model, in which every second block has experts, and a function that runs a step."""
    example = _EXPERTS.example()
    with patch.dict(os.environ, {"WORLD_SIZE": "4"}):
        args = example.parse_args([*flags.split(), "--system", "fsdp2" if system == "fsdp2" else "fsdp-compile"])
    mesh = example.make_mesh(args)
    model = example.build(args, mesh)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(seed)
    return model, example.stepper(args, model, mesh)


_EXPERTS = Split(4, "")
_BUILD: dict[str, Callable[..., Trained]] = {"tensor parallel": _tensor_parallel, "experts": _expert_parallel}


def exchange(path: str, build: str, saves: tuple[str, Any], loads: list[tuple[str, Any]]) -> None:
    """Save one system's model after two steps; resume it with others, on other meshes, for one more. Runs on every rank."""
    model, step = _BUILD[build](*saves)
    optimizer = adamw(model.parameters())
    for number in range(2):
        _update(optimizer, step, number)
    dcp.save(_state(model, optimizer), checkpoint_id=path)
    saved = {key: _full(tensor).clone() for key, tensor in _tensors(_state(model, optimizer))}
    _update(optimizer, step, 2)
    expected = {key: _full(tensor).clone() for key, tensor in _tensors(_state(model, optimizer))}
    for system, split in loads:
        _resume(path, system, split, _BUILD[build](system, split, seed=1), saved, expected)


def _update(optimizer: torch.optim.Optimizer, step: Callable[[int], Any], number: int) -> None:
    step(number)
    optimizer.step()
    optimizer.zero_grad()


def _resume(path: str, system: str, split: Any, built: Trained, saved: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    model, step = built
    optimizer = adamw(model.parameters())
    state = _state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    loaded = dict(_tensors(_state(model, optimizer)))
    assert loaded.keys() == saved.keys()
    for key, tensor in loaded.items():
        assert torch.equal(_full(tensor), saved[key]), f"{system} {split}: {key}"
    _update(optimizer, step, 2)
    for key, tensor in _tensors(_state(model, optimizer)):
        torch.testing.assert_close(
            _full(tensor), expected[key], rtol=1e-4, atol=1e-6, msg=lambda text, key=key: f"{system} {split}: {key}: {text}"
        )


_EXCHANGES: dict[str, tuple[str, tuple[str, Any], list[tuple[str, Any]]]] = {
    "from FSDP2": ("tensor parallel", ("fsdp2", (2, 2)), [("ours", (2, 2)), ("ours", (4, 1)), ("ours", (4,))]),
    "to FSDP2": ("tensor parallel", ("ours", (2, 2)), [("fsdp2", (2, 2)), ("fsdp2", (4,)), ("ours", (4, 1))]),
    "experts from FSDP2": ("experts", ("fsdp2", "--dp 4 --ep 2"), [("ours", "--dp 4 --ep 2"), ("ours", "--dp 4")]),
    "experts to FSDP2": ("experts", ("ours", "--dp 4 --ep 2"), [("fsdp2", "--dp 4 --ep 2"), ("fsdp2", "--dp 4")]),
    "experts to other meshes": (
        "experts",
        ("ours", "--dp 4 --ep 2"),
        [("ours", f"--dp {split}") for split in ("4 --ep 4", "2 --ep 2 --tp 2", "2 --ep 2 --cp 2", "2 --tp 2")],
    ),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "to FSDP2" else pytest.mark.night) for name in _EXCHANGES],
)
def test_checkpoints_are_exchanged(name: str, rank_pools: RankPools, tmp_path: Path) -> None:
    build, saves, loads = _EXCHANGES[name]
    rank_pools[4].run(exchange, path=str(tmp_path / "checkpoint"), build=build, saves=saves, loads=loads)


def clipped(system: str) -> dict[str, Tensor]:
    """Return gradients clipped by the norm over all meshes, which users combine from a norm for each mesh."""
    model, step = _expert_parallel(system, "--dp 4 --ep 2")
    step(0)
    by_mesh: dict[DeviceMesh, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    assert {mesh.mesh_dim_names for mesh in by_mesh} == {("dense",), ("sparse", "ep")}
    norms = [nn.utils.get_total_norm([parameter.grad for parameter in some]).full_tensor() for some in by_mesh.values()]
    norm = torch.stack(norms).norm()
    for some in by_mesh.values():
        nn.utils.clip_grads_with_norm_(some, 0.1, norm)
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("system", _SYSTEMS)
def test_norms_of_experts_and_the_rest_are_clipped(system: str, rank_pools: RankPools) -> None:
    expected = reference(_EXPERTS).gradients[0]
    norm = torch.stack([gradient.norm() for gradient in expected.values()]).norm()
    assert norm > 0.2
    for name, gradient in rank_pools[4].run(clipped, system=system)[0].items():
        assert relative_error(gradient, expected[name] * 0.1 / norm, 2) < 1e-5, name


def full_state_of_first_rank() -> None:
    """Check that rank 0's full state dict of model and optimizer loads into a model with other state. Runs on every rank."""
    source = _sharded(_decoder())
    optimizer = adamw(source.parameters())
    _step(source, optimizer, 0)
    options = StateDictOptions(full_state_dict=True)
    expected = dict(_tensors(get_model_state_dict(source, options=options)))
    # A copy, as rank 0's optimizers would share the counts of steps.
    moments = copy.deepcopy(get_optimizer_state_dict(source, optimizer, options=options))
    for key, tensor in _tensors(source.state_dict()):
        assert torch.equal(expected[key], _full(tensor)), key

    first = dist.get_rank() == 0
    model = _sharded(_decoder(seed=1))
    other = adamw(model.parameters())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, dict(expected) if first else {}, options=options)
    set_optimizer_state_dict(model, other, moments if first else {}, options=options)
    for key, tensor in _tensors(_state(model, other)["model"]):
        assert torch.equal(_full(tensor), expected[key]), key
    _step(source, optimizer, 1)
    _step(model, other, 1)
    for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
        torch.testing.assert_close(_full(ours), _full(theirs))


def test_full_state_of_first_rank_loads(rank_pools: RankPools) -> None:
    rank_pools[4].run(full_state_of_first_rank)


# --- Loading, saving, reading ---------------------------------------------------------------------


def load(assign: bool, meta: bool) -> None:
    expected = _sharded(_mlp(), parallelize=uneven_parallel)
    with torch.device("meta" if meta else "cpu"):
        model = _mlp(seed=1)
    _sharded(model, parallelize=uneven_parallel)
    before = dict(model.named_parameters())
    state = {key: value.detach().clone() for key, value in expected.state_dict().items()}
    model.load_state_dict(state, assign=assign)
    for key, parameter in model.named_parameters():
        assert (parameter is before[key]) is not assign
        assert torch.equal(_full(parameter), _full(state[key])), key
    # Forwards read the loaded values, too, not only the parameters that the model shows.
    batch = regression_batch(0, 0, 1, dim=6, out=3)
    for either in (model, expected):
        squared_error(either, batch).backward()
    for (key, ours), theirs in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(_full(ours.grad), _full(theirs.grad)), key


@pytest.mark.parametrize(("assign", "meta"), [(False, False), (True, False), (True, True)])
def test_load_state_dict(assign: bool, meta: bool, rank_pools: RankPools) -> None:
    rank_pools[4].run(load, assign=assign, meta=meta)


def save_a_shard() -> None:
    model = _sharded(_decoder())
    next_token_loss(model, token_batch(0, 0, 1)).backward()
    for key, parameter in model.named_parameters():
        for tensor in (parameter.detach(), parameter.grad):
            buffer = io.BytesIO()
            torch.save(tensor.to_local(), buffer)
            # Only the shard is saved, not the flat buffer that holds it.
            assert buffer.tell() < 2000 + tensor.to_local().nbytes
            assert torch.equal(torch.load(io.BytesIO(buffer.getvalue())), tensor.to_local()), key
            buffer = io.BytesIO()
            torch.save(tensor, buffer)
            loaded = torch.load(io.BytesIO(buffer.getvalue()), weights_only=False)
            assert loaded.placements == tensor.placements and torch.equal(loaded.to_local(), tensor.to_local()), key


def test_shards_are_saved(rank_pools: RankPools) -> None:
    rank_pools[4].run(save_a_shard)


def unshard() -> None:
    values = dict(_decoder().named_parameters())
    model = _sharded(_decoder())
    block = model.blocks[0]
    tp = _mesh((2, 2))["tp"]
    model.unshard()
    block.unshard()
    for name, parameter in model.named_parameters():
        shown = getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2])
        assert isinstance(shown, DTensor) and shown.device_mesh == tp, name
        assert shown.placements == parameter.placements[1:], name
        assert torch.equal(shown.full_tensor(), values[name]), name
    model.reshard()
    block.reshard()
    for name, parameter in model.named_parameters():
        assert model.get_parameter(name) is parameter
        assert getattr(model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) is parameter


def test_unshard_shows_the_tensor_parallel_parameters(rank_pools: RankPools) -> None:
    rank_pools[4].run(unshard)


def functional_call(given: str) -> None:
    """Check that forward computes with given tensors, whole or in any layout, and gives them gradients. Runs on every rank."""
    twin = _mlp(seed=3)
    model = _sharded(_mlp(), parallelize=uneven_parallel)
    source = _sharded(_mlp(seed=3), parallelize=uneven_parallel)
    if given == "plain":
        tensors = {name: value.detach().clone() for name, value in twin.named_parameters()}
    else:
        tensors = {name: value.detach().clone() for name, value in source.named_parameters()}
    for tensor in tensors.values():
        tensor.requires_grad_()
    batch = regression_batch(0, 0, 1, dim=6, out=3)
    loss = squared_error(lambda x: torch.func.functional_call(model, tensors, (x,)), batch)
    expected = squared_error(twin, batch)
    torch.testing.assert_close(loss, expected)
    loss.backward()
    expected.backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for name, parameter in twin.named_parameters():
        torch.testing.assert_close(_full(tensors[name].grad), parameter.grad, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("given", ["plain", "sharded"])
def test_functional_call(given: str, rank_pools: RankPools) -> None:
    rank_pools[4].run(functional_call, given=given)
