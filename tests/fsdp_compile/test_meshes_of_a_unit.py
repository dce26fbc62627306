"""Parameters of one unit that ``shard_placement_fn`` gives different meshes.

A linear layer's weights have replicas, its biases are sharded over all ranks: gradients of both are averages over all ranks.
``test_nd.py`` has experts and dense parameters in one unit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.microbatches import (
    FLAVOURS,
    Task,
    differences,
    reference,
    train_schedules,
)
from tests.common.parity import FullyShard, regression_batch, squared_error
from tests.common.versions import needs_placements_with_a_mesh

pytestmark = [pytest.mark.units_apart, needs_placements_with_a_mesh]

_FLAVOURS = ("unsharded", "partial_then_unsharded", "sharded", "partial", "unsharded_then_partial", "keep_unsharded")
_TWO_FLAVOURS = _FLAVOURS[:2]
_TASK = Task(functools.partial(models.MLP, layers=1), regression_batch, squared_error)


def biases_elsewhere(elsewhere: DeviceMesh) -> Callable[[nn.Parameter], Any]:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    result = ShardPlacementResult(None, FSDPMeshInfo(elsewhere, shard_mesh_dim=0))
    return lambda param: result if param.ndim == 1 else None


def _shard(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard, **options: Any) -> None:
    own = biases_elsewhere(init_device_mesh("cpu", (mesh.size(),), mesh_dim_names=("all",)))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, shard_placement_fn=own, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=own, **options)


_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "reshard_after_forward=2": {"reshard_after_forward": 2},
    "bf16": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=True)},
}


def train(system: str, flavours: Sequence[str], options: str) -> Any:
    schedules = {name: [FLAVOURS[name]] * 2 for name in flavours}
    return train_schedules(system, (2, 2), _TASK, schedules, functools.partial(_shard, **_OPTIONS[options]))


@pytest.mark.parametrize(
    ("system", "flavours", "options"),
    [
        ("aot_eager", _TWO_FLAVOURS, ""),
        *(
            pytest.param(
                *(system, _TWO_FLAVOURS if system == "inductor" else _FLAVOURS, options),
                marks=pytest.mark.night,
            )
            for system in ("fsdp2", "eager", "aot_eager", "inductor")
            for options in _OPTIONS
            # FSDP2 makes its smaller groups from other ranks on each rank, and hangs.
            if system != "fsdp2" or options != "reshard_after_forward=2"
        ),
    ],
)
def test_microbatches(system: str, flavours: Sequence[str], options: str, rank_pools: RankPools) -> None:
    found = rank_pools[4].run(train, system=system, flavours=flavours, options=options)
    expected = reference(_TASK, 4, [4, 4])
    for name in flavours:
        runs = [results[name] for results, _ in found]
        assert not isinstance(runs[0], str), runs[0]
        assert differences(runs, expected, 5e-2 if options == "bf16" else 1e-4) == [], name
        if name == "unsharded":
            # Only the last microbatch reduces. Each of two units reduces its weights, with replicas, and its biases.
            assert runs[0].counts("reduce_scatter") == [0, 0, 0, 4] * 2
            if system != "fsdp2":
                assert runs[0].counts("all_reduce") == [0, 0, 0, 2] * 2


def test_layout_and_graph(fake_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    everyone = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
    model: Any = fully_shard(
        nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh, shard_placement_fn=biases_elsewhere(everyone)
    )
    for layer in model:
        assert layer.weight.device_mesh == mesh and layer.weight.placements == (Replicate(), Shard(0))
        assert layer.bias.device_mesh == everyone and layer.bias.placements == (Shard(0),)
        assert layer.weight.to_local().shape == (2, 8) and layer.bias.to_local().shape == (1,)
    with capture() as captured:
        torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(1, 8)).sum().backward()
    (forward,), (backward,) = captured.forward, captured.backward
    # Each gather has two parameters, without a copy before it: they are neighbours in flat storage.
    assert forward.readable().count("all_gather_into_tensor.default(") == 2
    assert "cat" not in forward.readable()
    assert backward.readable().count("reduce_scatter_tensor.default(") == 2
    assert backward.readable().count("all_reduce.default(") == 1


def test_a_mesh_that_shards_another_dimension_is_refused(fake_ranks: None) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
    for dim in (0, 1):
        result = ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=dim))
        model = nn.Linear(8, 8)
        with pytest.raises(ValueError, match="Its mesh must have the dimension to shard over last"):
            fully_shard(model, mesh=mesh["a"], shard_placement_fn=lambda _, result=result: result)
        assert type(model) is nn.Linear and type(model.weight) is nn.Parameter


def test_a_size_that_divides_only_one_mesh_is_refused(fake_ranks: None) -> None:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
    pair = init_device_mesh("cpu", (4, 2), mesh_dim_names=("pairs", "pair"))["pair"]
    model = nn.Linear(8, 8)
    with pytest.raises(ValueError, match="reshard_after_forward=4 must be a factor of the shard dimension's size, 2"):
        fully_shard(model, mesh=mesh, shard_placement_fn=biases_elsewhere(pair), reshard_after_forward=4)
    assert type(model) is nn.Linear
