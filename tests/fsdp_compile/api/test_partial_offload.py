"""``PartialCPUOffloadPolicy``: a unit goes to the host if a limit for the device leaves no room for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

from fsdp_compile import PartialCPUOffloadPolicy, fsdp_backend, fully_shard
from fsdp_compile.units.unit import Unit
from tests.common.copy_engine import copying
from tests.common.distributed import RankPools
from tests.common.parity import FullyShard, Run, compare, shard_units, train_sharded
from tests.fsdp_compile.test_parity import CASES

_RANKS = 8
# Shards, gradients and two tensors of AdamW's state.
_COPIES = 4


def model_of(layers: int = 8) -> nn.Module:
    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Linear(16, 16, bias=False) for _ in range(layers)])
    model.head = nn.Linear(16, 3)
    return model


def shard(model: nn.Module, policy: Any) -> list[Unit]:
    shard_units(model, init_device_mesh("cpu", (_RANKS,)), fully_shard, offload_policy=policy)
    return model._fsdp_unit.scope.units  # type: ignore[union-attr]


_BLOCK = 2 * 16 * 4 * _COPIES
# A rank's padded shards of the head: a row of the weight, and an element of the bias.
_ROOT = (16 + 1) * 4 * _COPIES


@pytest.mark.parametrize(
    ("limit", "first_on_host"),
    [(0, 0), (_BLOCK - 1, 0), (_BLOCK, 1), (4 * _BLOCK + _ROOT - 1, 4), (8 * _BLOCK, 8), (8 * _BLOCK + _ROOT, 9), ("1GB", 9)],
)
def test_takes_what_does_not_fit(limit: int | str, first_on_host: int, fake_ranks: None) -> None:
    policy = PartialCPUOffloadPolicy(limit)
    with copying():
        units = shard(model_of(), policy)
    # The root is small, and fits where a block does not.
    in_order = sorted(units, key=lambda unit: unit.is_root)
    fits = policy.device_bytes - min(first_on_host, 8) * _BLOCK >= _ROOT
    assert [unit.copies for unit in in_order] == [*(index >= first_on_host for index in range(8)), not fits]
    remaining = sum(storage.nbytes for unit in units if not unit.copies for storage in unit.storages.values())
    assert policy.bytes_on_device == _COPIES * remaining <= policy.device_bytes


def test_what_is_frozen_has_no_gradient_and_no_state(fake_ranks: None) -> None:
    model = model_of()
    model.get_submodule("blocks").requires_grad_(False)
    policy = PartialCPUOffloadPolicy(8 * _BLOCK // _COPIES + _ROOT // _COPIES * 3, optimizer="momentum")
    with copying():
        units = shard(model, policy)
    assert not any(unit.copies for unit in units) and policy.bytes_on_device == policy.device_bytes


def test_a_failing_call_counts_nothing(fake_ranks: None) -> None:
    model = model_of()
    policy = PartialCPUOffloadPolicy("1MB")
    with pytest.raises(ValueError, match="reshard_after_forward=3"):
        fully_shard(model, mesh=init_device_mesh("cpu", (_RANKS,)), reshard_after_forward=3, offload_policy=policy)
    assert policy.bytes_on_device == 0


def test_rows_that_are_missing_count(fake_ranks: None) -> None:
    """Missing rows count as padding, so that all ranks decide alike. A scalar counts whole on each rank."""
    model = nn.Linear(4, 9, bias=False)
    model.scale = nn.Parameter(torch.ones(()))
    policy = PartialCPUOffloadPolicy(1000, optimizer=None)
    fully_shard(model, mesh=init_device_mesh("cpu", (_RANKS,)), offload_policy=policy)
    assert policy.bytes_on_device == 2 * 4 * (2 * 4 + 1)


@pytest.mark.parametrize("given", [-1, True, False, "20 apples", 0.5])
def test_sizes_that_are_none(given: Any) -> None:
    with pytest.raises(ValueError, match=r"PartialCPUOffloadPolicy\(device_bytes=.* takes a number of bytes"):
        PartialCPUOffloadPolicy(given)


def test_optimizers_that_are_none() -> None:
    with pytest.raises(ValueError, match="optimizer='lion' is not known"):
        PartialCPUOffloadPolicy("1GB", optimizer="lion")


# Training on real ranks.

_CASE = CASES["mlp"]


def shard_in_part(model: nn.Module, mesh: DeviceMesh, function: FullyShard) -> None:
    """Shard with room on the device for the first block."""
    num_bytes = sum(param.nbytes for param in model.get_submodule("blocks.0").parameters())
    policy = PartialCPUOffloadPolicy(num_bytes // mesh.size() * _COPIES)
    shard_units(model, mesh, function, offload_policy=policy)


def shard_by_hand(model: nn.Module, mesh: DeviceMesh, function: FullyShard) -> None:
    """Shard with FSDP2, the first block on the device. FSDP2 cannot pin memory on a machine without an accelerator."""
    offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    for name in ("blocks.0", "blocks.1", ""):
        function(model.get_submodule(name), mesh=mesh, **(offload if name != "blocks.0" else {}))


def train(system: str) -> Run:
    """Train with ``system``. Every rank calls this."""
    if system == "fsdp2":
        return train_sharded(replace(_CASE, shard=shard_by_hand), torch.distributed.fsdp.fully_shard, None)
    options = {"backend": fsdp_backend, "options": {"lowering": system}} if system != "eager" else None
    with copying(1e9) as engine:
        run = train_sharded(replace(_CASE, shard=shard_in_part), fully_shard, options)
    assert len({copy.nbytes for copy in engine.copies}) > 1
    return run


@pytest.mark.parametrize(
    ("ranks", "system"),
    [
        (2, "aot_eager"),
        (2, "eager"),
        (2, "inductor"),
        *(pytest.param(4, system, marks=pytest.mark.night) for system in ("aot_eager", "inductor")),
    ],
)
def test_trains_as_fsdp2(ranks: int, system: str, rank_pools: RankPools) -> None:
    runs, expected = (rank_pools[ranks].run(train, system=name) for name in (system, "fsdp2"))
    compare(runs, expected, _CASE.lowered_rtol.get(system, _CASE.fsdp2_rtol))
