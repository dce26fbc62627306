"""Steps of bfloat16 parameters that are rounded by chance: none is lost, and replicas stay equal."""

from __future__ import annotations

import copy
import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.tensor import DTensor

from fsdp_compile import flat_optimizer, fully_shard
from tests.common.distributed import RankPools, device_mesh

_SIZE = 64


class _Mixed(nn.Module):
    """Parameters in bfloat16, one of them a scalar, and a gain in float32."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(_SIZE, _SIZE, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones((), dtype=torch.bfloat16))
        self.gain = nn.Parameter(torch.ones(_SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x.bfloat16()) * self.scale).float() * self.gain


def _model(mesh: tuple[int, ...]) -> Any:
    model = _Mixed()
    fully_shard(model.layer, mesh=device_mesh(mesh))
    fully_shard(model, mesh=device_mesh(mesh))
    return model


def _set_gradients(model: nn.Module, value: float) -> None:
    for param in model.parameters():
        param.grad = torch.full_like(param, value)


def _step(model: Any, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        inputs = torch.randn(4, _SIZE, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        model(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _locals(model: nn.Module) -> dict[str, Tensor]:
    return {name: param.to_local().clone() for name, param in model.named_parameters() if isinstance(param, DTensor)}


def keep_small_steps() -> None:
    model, other = _model((2,)), _model((2,))
    with torch.no_grad():
        for param in (*model.parameters(), *other.parameters()):
            param.fill_(1)
    rounded = flat_optimizer(torch.optim.SGD, model.parameters(), lr=1e-4, stochastic_rounding=3)
    nearest = flat_optimizer(torch.optim.SGD, other.parameters(), lr=1e-4)
    for _ in range(500):
        for each, optimizer in ((model, rounded), (other, nearest)):
            _set_gradients(each, 1.0)
            optimizer.step()
    # 500 steps of 1e-4. A weight walks by steps of 2**-8, with a deviation of about (0.05 * 2**-8)**0.5 = 0.014; their mean over
    # 2048 elements, by 3e-4.
    mean = model.layer.weight.to_local().float().mean().item()
    assert abs(mean - 0.95) < 2e-3, mean
    assert torch.equal(other.layer.weight.to_local(), torch.ones_like(other.layer.weight.to_local()))
    torch.testing.assert_close(model.gain.to_local(), other.gain.to_local(), rtol=0, atol=0)


def test_small_steps_are_not_lost(rank_pools: RankPools) -> None:
    rank_pools[2].run(keep_small_steps)


def round_to_neighbours() -> None:
    """Each result is one of the two neighbours of what float32 gives, and both occur."""
    model, wide = _model((2,)), _model((2,))
    wide.float()
    options: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
    rounded = flat_optimizer(torch.optim.AdamW, model.parameters(), stochastic_rounding=0, **options)
    _set_gradients(model, 0.25)
    _set_gradients(wide, 0.25)
    rounded.step()
    torch.optim.AdamW(wide.parameters(), **options).step()
    exact, found = wide.layer.weight.to_local(), model.layer.weight.to_local().float()
    step = exact.abs().log2().floor().exp2() * 2**-7
    assert ((found - exact).abs() < step).all()
    share = (found.abs() > exact.abs()).float().mean().item()
    assert 0.4 < share < 0.6, share
    state = rounded.state[model.layer.weight]
    assert state["exp_avg"].dtype == state["exp_avg"].to_local().dtype == torch.float32


def test_results_are_neighbours_of_those_in_float32(rank_pools: RankPools) -> None:
    rank_pools[2].run(round_to_neighbours)


def train_on(mesh: tuple[int, ...]) -> dict[str, Tensor]:
    model = _model(mesh)
    # Ranks with random numbers of their own.
    torch.manual_seed(dist.get_rank())
    _step(model, flat_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, stochastic_rounding=1), range(4))
    return _locals(model)


def test_replicas_stay_equal(rank_pools: RankPools) -> None:
    ranks = rank_pools[4].run(train_on, mesh=(2, 2))
    for name, value in ranks[0].items():
        assert torch.equal(value, ranks[2][name]), name
        assert torch.equal(ranks[1][name], ranks[3][name]), name
    assert not torch.equal(ranks[0]["layer.weight"], ranks[1]["layer.weight"])
    assert len({ranks[rank]["scale"].item() for rank in range(4)}) == 1


def go_on(folder: str, optimizer_class: Any) -> None:
    """Train six steps, and four and two with a checkpoint between them."""

    def made() -> tuple[Any, torch.optim.Optimizer]:
        model = _model((2,))
        return model, flat_optimizer(optimizer_class, model.parameters(), lr=1e-2, stochastic_rounding=5)

    whole, optimizer = made()
    _step(whole, optimizer, range(4))
    values = copy.deepcopy(whole.state_dict())
    states = get_optimizer_state_dict(whole, optimizer)
    dcp.save(states, checkpoint_id=folder)
    plain = copy.deepcopy(optimizer.state_dict())
    _step(whole, optimizer, range(4, 6))
    for load in ("dcp", "plain"):
        model, again = made()
        model.load_state_dict(values)
        if load == "dcp":
            states = get_optimizer_state_dict(model, again)
            dcp.load(states, checkpoint_id=folder)
            set_optimizer_state_dict(model, again, states)
        else:
            again.load_state_dict(plain)
        _step(model, again, range(4, 6))
        for name, value in _locals(whole).items():
            assert torch.equal(value, _locals(model)[name]), (load, name)


def test_a_restart_is_exact(rank_pools: RankPools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rank_pools[2].run(go_on, folder=folder, optimizer_class=torch.optim.AdamW)


def load_from_torch() -> None:
    model, other = _model((2,)), _model((2,))
    theirs = torch.optim.AdamW(other.parameters(), lr=1e-2)
    _step(other, theirs, range(2))
    ours = flat_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, stochastic_rounding=0)
    ours.load_state_dict(theirs.state_dict())
    _step(model, ours, range(2, 4))
    assert ours.state[model.layer.weight]["exp_avg_sq"].dtype == torch.float32
    theirs.load_state_dict(ours.state_dict())
    assert theirs.state[other.layer.weight]["exp_avg_sq"].dtype == torch.bfloat16
    _step(other, theirs, range(4, 5))


def test_state_dicts_of_torch(rank_pools: RankPools) -> None:
    rank_pools[2].run(load_from_torch)


def test_what_cannot_be_rounded(fake_ranks: None) -> None:
    half = fully_shard(nn.Linear(8, 8, dtype=torch.float16))
    optimizer = flat_optimizer(torch.optim.SGD, half.parameters(), lr=0.1, stochastic_rounding=0)
    _set_gradients(half, 1.0)
    with pytest.raises(RuntimeError, match=r"float16.* cannot be rounded by chance"):
        optimizer.step()
    plain = nn.Linear(8, 8, dtype=torch.bfloat16)
    optimizer = flat_optimizer(torch.optim.SGD, plain.parameters(), lr=0.1, stochastic_rounding=0)
    _set_gradients(plain, 1.0)
    with pytest.raises(RuntimeError, match="that fully_shard has sharded"):
        optimizer.step()
    with pytest.raises(TypeError, match="takes a seed"):
        flat_optimizer(torch.optim.SGD, half.parameters(), lr=0.1, stochastic_rounding=True)
    with pytest.raises(ValueError, match="leave out"):
        flat_optimizer(torch.optim.Muon, half.parameters(), stochastic_rounding=0)
