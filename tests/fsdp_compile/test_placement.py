"""Placements: what the ranks of each mesh dimension cut among them.

FSDP2 and one process are the oracles for values. Graphs are those of a small model on eight pretended ranks: two nodes of four.
"""

from __future__ import annotations

import functools
import itertools
import math
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

from fsdp_compile import (
    CPUOffloadPolicy,
    GatherPolicy,
    HookNotTraceable,
    MixedPrecisionPolicy,
    RanksDisagree,
    comm_hooks,
    flat_optimizer,
    fsdp_backend,
    fully_shard,
    optimizer_in_backward,
    replicate,
)
from fsdp_compile.debug import Capture, capture
from fsdp_compile.explain import explain
from passes.fx.graph import starts_collective
from passes.ir.work import Role, role
from passes.models.cost_model import collective_kind, traffic_bytes
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.microbatches import FLAVOURS, SMALL, Run, differences, reference, sgd, train_schedules
from tests.common.parity import FullyShard, adamw, shard_units
from tests.common.versions import needs_placements_with_a_mesh

pytestmark = pytest.mark.units_apart

AOT_EAGER = {"lowering": "aot_eager"}
_NAMES = ("replicate", "shard")


def _mesh(*shape: int) -> DeviceMesh:
    return init_device_mesh("cpu", shape, mesh_dim_names=_NAMES[-len(shape) :])


def _sharded(build: Callable[[], nn.Module], placement: Any, mesh: DeviceMesh, **options: Any) -> Any:
    model = build()
    shard_units(model, mesh, fully_shard, placement=placement, **options)
    return model


def _mesh_of(placement: str) -> DeviceMesh:
    return _mesh(2, 4) if placement in ("hsdp", "hybrid") else _mesh(8)


def _step(model: Any, microbatches: int = 1, inputs: Tensor | None = None) -> Capture:
    """Run a step of microbatches, the last of which is told to be the last."""
    compiled = torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)
    inputs = torch.ones(2, 8) if inputs is None else inputs
    with capture() as captured:
        for index in range(microbatches):
            model.set_is_last_backward(index == microbatches - 1)
            compiled(inputs).sum().backward()
    return captured


# Values


def _shard_placed(placement: str, model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard, **options: Any) -> None:
    shard_units(model, mesh, functools.partial(fully_shard, placement=placement), **options)


_SCHEDULES = ("unsharded", "partial", "unsharded_then_partial", "keep_unsharded", "sharded")


def train(system: str, placement: str, mesh_shape: tuple[int, ...], bf16: bool) -> Any:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if bf16 else None
    shard = shard_units if system == "fsdp2" else functools.partial(_shard_placed, placement)
    schedules = {name: [FLAVOURS[name]] * 2 for name in _SCHEDULES}
    return train_schedules(system, mesh_shape, SMALL, schedules, shard, policy, optimizer=sgd if bf16 else adamw)


def _runs(found: Sequence[Any], name: str) -> list[Run]:
    runs = [results[name] for results, _ in found]
    assert not isinstance(runs[0], str), runs[0]
    return runs


_CASES = [("hybrid", (2, 2)), ("zero1", (2,)), ("zero2", (2,)), ("ddp", (2,))]


@pytest.mark.parametrize(
    ("system", "placement", "mesh_shape"),
    [
        *(pytest.param("aot_eager", *case, marks=pytest.mark.parity) for case in _CASES),
        *(("eager", *case) for case in _CASES),
        *(pytest.param("inductor", *case, marks=pytest.mark.night if case[0] == "zero2" else []) for case in _CASES),
        *(
            pytest.param("aot_eager", *case, marks=pytest.mark.night)
            for case in (("zero1", (4,)), ("ddp", (4,)), ("hybrid", (4, 1)))
        ),
    ],
)
def test_microbatches(system: str, placement: str, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    """By all ways to accumulate, gradients and parameters are those of one process."""
    world = math.prod(mesh_shape)
    found = rank_pools[world].run(train, system=system, placement=placement, mesh_shape=mesh_shape, bf16=False)
    expected = reference(SMALL, world, [4, 4], adamw)
    for name in found[0][0]:
        assert differences(_runs(found, name), expected, 1e-4) == [], name
    counts = _runs(found, "sharded")[0].counts
    if placement == "hybrid" and mesh_shape == (2, 2):
        assert counts("all_reduce") == [0] * 8
    if placement == "hybrid" and mesh_shape == (2, 2) and system != "eager":
        # Each step's first forward gathers three units over nodes, too.
        assert counts("all_gather", "forward") == [6, 3, 3, 3] * 2
        # Both reduce-scatters of each microbatch, of which none is told not to be the last.
        assert counts("reduce_scatter") == [6] * 8
        assert _runs(found, "partial")[0].counts("reduce_scatter") == [3, 3, 3, 6] * 2
    if placement == "ddp":
        assert counts("all_gather", "forward") == [0] * 8
        assert (counts("reduce_scatter"), counts("all_reduce")) == ([0] * 8, [3] * 8)


@pytest.mark.parametrize("placement", ["hybrid", "ddp"])
def test_mixed_precision(placement: str, rank_pools: RankPools) -> None:
    """Values are rounded where FSDP2 rounds them."""
    shape = (2, 2)
    found = rank_pools[4].run(
        train, system="aot_eager", placement=placement, mesh_shape=shape if placement == "hybrid" else (4,), bf16=True
    )
    theirs = rank_pools[4].run(train, system="fsdp2", placement="", mesh_shape=shape, bf16=True)
    for name in ("sharded", "unsharded"):
        assert differences(_runs(found, name), _runs(theirs, name), 1e-3, order=2) == []


def _train(model: Any, optimizer: torch.optim.Optimizer, steps: Sequence[int], forward: Any = None) -> None:
    forward = forward or torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)
    rank = torch.distributed.get_rank()
    for step in steps:
        inputs = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(step))[rank]
        forward(inputs).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _full(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in model.state_dict().items()}


def move_checkpoints(folder: str) -> None:
    """Save after three of five steps with each placement, and load with each other and with FSDP2."""
    meshes = {"hybrid": _mesh(2, 2), "hsdp": _mesh(2, 2)}

    def made(system: str) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        torch._dynamo.reset()
        model, mesh = models.MLP(layers=2), meshes.get(system, _mesh(4))
        shard = torch.distributed.fsdp.fully_shard if system == "fsdp2" else functools.partial(fully_shard, placement=system)
        shard_units(model, mesh, shard)
        return model, adamw(model.parameters()), model if system == "fsdp2" else None

    expected = {}
    systems = ("fsdp2", "hybrid", "zero1", "ddp")
    for system in systems:
        model, optimizer, forward = made(system)
        _train(model, optimizer, range(3), forward)
        states = get_state_dict(model, optimizer)
        dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=f"{folder}/{system}")
        _train(model, optimizer, range(3, 5), forward)
        expected[system] = _full(model)
    for source in systems:
        for target in systems:
            if source == target:
                continue
            model, optimizer, forward = made(target)
            _train(model, optimizer, [7], forward)
            states = get_state_dict(model, optimizer)
            dcp.load({"model": states[0], "optimizer": states[1]}, checkpoint_id=f"{folder}/{source}")
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
            _train(model, optimizer, range(3, 5), forward)
            torch.testing.assert_close(_full(model), expected[source], rtol=1e-4, atol=1e-6, msg=f"{source} to {target}")
    torch.testing.assert_close(expected["hybrid"], expected["fsdp2"], rtol=1e-4, atol=1e-6)


def test_checkpoints_move_between_placements_and_to_fsdp2(rank_pools: RankPools) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rank_pools[4].run(move_checkpoints, folder=folder)


def replicate_beside_ddp() -> None:
    torch.manual_seed(0)
    model, other = models.MLP(layers=2), models.MLP(layers=2)
    other.load_state_dict(model.state_dict())
    for block in model.blocks:
        replicate(block)
    replicate(model)
    optimizer, beside = adamw(model.parameters()), adamw(other.parameters())
    ddp = DistributedDataParallel(other)
    assert {param.placements for param in model.parameters()} == {(Replicate(),)}
    _train(model, optimizer, range(3))
    _train(other, beside, range(3), ddp)
    torch.testing.assert_close(_full(model), _full(other), rtol=1e-5, atol=1e-7)


def test_replicate_trains_as_ddp(rank_pools: RankPools) -> None:
    rank_pools[2].run(replicate_beside_ddp)


def change_parameters() -> None:
    """Read parameters after each way of writing them: node shards must not be stale."""
    torch.manual_seed(0)
    model = _sharded(functools.partial(models.MLP, layers=2), "hybrid", _mesh(2, 2))
    forward = torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)
    inputs = torch.ones(2, 8)

    def check() -> None:
        with torch.inference_mode():
            torch.testing.assert_close(forward(inputs).clone(), model(inputs).clone())
        with torch.no_grad():
            torch.testing.assert_close(forward(inputs), model(inputs))
        forward(inputs).sum().backward()

    check()
    with torch.no_grad():
        model.head.weight.mul_(2)
    check()
    model.load_state_dict({name: 1.5 * value for name, value in model.state_dict().items()})
    check()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    optimizer.step()
    check()
    model.double()
    inputs = inputs.double()
    check()
    optimizer_in_backward(torch.optim.SGD, model.parameters(), lr=0.1)
    check()
    check()


def step_another_model_on_one_rank() -> None:
    """Ranks go on alike: what one of them steps by itself is no parameter of theirs."""
    for placement, mesh in (("hybrid", _mesh(2, 2)), ("zero2", _mesh(4))):
        model = _sharded(functools.partial(models.MLP, layers=1), placement, mesh)
        compiled = torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)
        compiled(torch.ones(2, 8)).sum().backward()
        if torch.distributed.get_rank() == 0:
            own = nn.Linear(2, 2)
            own(torch.ones(1, 2)).sum().backward()
            torch.optim.SGD(own.parameters(), lr=0.1).step()
        compiled(torch.ones(2, 8)).sum().backward()


def test_a_step_of_another_model_on_one_rank(rank_pools: RankPools) -> None:
    rank_pools[4].run(step_another_model_on_one_rank)


def disagree() -> str:
    model = _sharded(functools.partial(models.MLP, layers=1), "hybrid", _mesh(2, 2))
    compiled = torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)
    compiled(torch.ones(2, 8)).sum().backward()
    if torch.distributed.get_rank() == 0:
        with torch.no_grad():
            model.head.weight.to_local().mul_(2)
    try:
        compiled(torch.ones(2, 8)).sum().backward()
    except RanksDisagree as error:
        return str(error)
    return ""


def test_ranks_that_change_parameters_apart(own_rank_pools: RankPools) -> None:
    """All ranks raise, also those of the other node, though they share no group of the gather with the first rank."""
    errors = own_rank_pools[4].run(disagree)
    assert all("over nodes" in error and "rank 0" in error for error in errors), errors


def test_later_forwards_read_changed_parameters(rank_pools: RankPools) -> None:
    rank_pools[4].run(change_parameters)


_WRITES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "in place": lambda model, optimizer: model.blocks[1].up.weight.add_(1.0),
    "by the local tensor": lambda model, optimizer: model.blocks[1].up.weight.to_local().add_(1.0),
    "a step": lambda model, optimizer: optimizer.step(),
    "state dict": lambda model, optimizer: model.load_state_dict({key: 2 * x for key, x in model.state_dict().items()}),
}
_STEPS = {
    "plain": functools.partial(torch.optim.AdamW, foreach=False),
    "fused": functools.partial(torch.optim.AdamW, fused=True),
    "flat": functools.partial(flat_optimizer, torch.optim.AdamW),
}


def write_between() -> None:
    """Write parameters that backward reads where they are stored, between forward and backward: it raises, as with DDP."""
    inputs = torch.ones(2, 8)

    def forward_of(model: nn.Module) -> Any:
        return torch.compile(model, backend=fsdp_backend, options=AOT_EAGER)

    for step, write in [*itertools.product(["plain"], _WRITES), ("fused", "a step"), ("flat", "a step")]:
        model = _sharded(functools.partial(models.MLP, layers=2), "ddp", _mesh(2))
        forward, optimizer = forward_of(model), _STEPS[step](model.parameters(), lr=0.1)
        forward(inputs).sum().backward()
        for outstanding in (1, 2):
            losses = [forward(inputs).sum() for _ in range(outstanding)]
            with torch.no_grad():
                _WRITES[write](model, optimizer)
            # A later forward reads the new values, which are not those of the earlier ones.
            later = [forward(inputs).sum()] if outstanding == 2 else []
            for loss in losses:
                with pytest.raises(RuntimeError, match=r"was written after a forward|modified by an inplace"):
                    loss.backward()
            for loss in later:
                loss.backward()
        optimizer.zero_grad()
        forward(inputs).sum().backward()

    # Steps of other models, and of parameters without gradients, are no writes.
    model.zero_grad()
    loss, other = forward(inputs).sum(), nn.Linear(8, 8)
    other(inputs).sum().backward()
    for each in (torch.optim.SGD(other.parameters(), lr=0.1), optimizer):
        each.step()
    loss.backward()


def write_between_uncompiled() -> None:
    """Forwards that are not compiled read copies, so that a write changes no gradient."""
    gradients = []
    for writes in (False, True):
        torch.manual_seed(0)
        model = _sharded(functools.partial(models.MLP, layers=2), "ddp", _mesh(2))
        loss = model(torch.ones(2, 8)).sum()
        with torch.no_grad():
            for param in model.parameters() if writes else ():
                param.add_(1.0)
        loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


@pytest.mark.parametrize("writes", [write_between, write_between_uncompiled])
def test_writes_between_forward_and_backward(writes: Callable[[], None], rank_pools: RankPools) -> None:
    rank_pools[2].run(writes)


# Layouts and graphs


def test_layouts(fake_ranks: None) -> None:
    build = functools.partial(models.MLP, layers=1)
    local = {
        placement: sum(param.to_local().numel() for param in _sharded(build, placement, _mesh_of(placement)).parameters())
        for placement in ("zero3", "zero1", "hsdp", "hybrid", "ddp")
    }
    # The first rank has the rows of a padded shard.
    assert local["hybrid"] == local["zero3"] == local["zero1"] < local["hsdp"] < local["ddp"]
    weight = _sharded(build, "hybrid", _mesh(2, 4)).head.weight
    assert (weight.device_mesh.shape, weight.placements) == ((8,), (Shard(0),))
    by_axis = _sharded(build, {"shard": "zero3", "replicate": "zero1"}, _mesh(2, 4)).head.weight
    assert by_axis.device_mesh == weight.device_mesh


class _Pair(nn.Module):
    """Two layers, of which one has a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


def test_graphs_of_hybrid(fake_ranks: None) -> None:
    """Node shards are gathered in the first forward, and are inputs of the others. Gradients are reduced over nodes at last."""
    captured = _step(_sharded(_Pair, "hybrid", _mesh(2, 4)), microbatches=2)
    first, later = captured.forward
    assert_expected_inline(
        first.readable(),
        """\
def forward(self, shard_blocks_0_weight: "f32[1, 8]", shard_blocks_0_bias: "f32[1]", primals_3: "f32[2, 8]", shard_blocks_1_weight: "f32[1, 8]", run_0_blocks_0_weight: "f32[9]"):
    all_gather_into_tensor: "f32[18]" = _c10d_functional.all_gather_into_tensor.default(run_0_blocks_0_weight, 2, 'nodes')
    view_9: "f32[8]" = aten.view.default(shard_blocks_1_weight, [-1])
    all_gather_into_tensor_2: "f32[16]" = _c10d_functional.all_gather_into_tensor.default(view_9, 2, 'nodes')
    wait_tensor: "f32[18]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[2, 9]" = aten.view.default(wait_tensor, [2, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 1], 1)
    getitem: "f32[2, 8]" = split_with_sizes[0]
    getitem_1: "f32[2, 1]" = split_with_sizes[1]
    clone: "f32[2, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[16]" = aten._unsafe_view.default(clone, [16])
    view_3: "f32[2]" = aten.view.default(getitem_1, [2])
    cat_1: "f32[18]" = aten.cat.default([_unsafe_view, view_3])
    all_gather_into_tensor_1: "f32[72]" = _c10d_functional.all_gather_into_tensor.default(cat_1, 4, 'node')
    wait_tensor_2: "f32[16]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_2)
    view_10: "f32[2, 8]" = aten.view.default(wait_tensor_2, [2, -1])
    view_11: "f32[16]" = aten.view.default(view_10, [-1])
    all_gather_into_tensor_3: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view_11, 4, 'node')
    wait_tensor_1: "f32[72]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_4: "f32[4, 18]" = aten.view.default(wait_tensor_1, [4, -1])
    split_with_sizes_1 = aten.split_with_sizes.default(view_4, [16, 2], 1)
    getitem_2: "f32[4, 16]" = split_with_sizes_1[0]
    getitem_3: "f32[4, 2]" = split_with_sizes_1[1]
    view_5: "f32[4, 2, 8]" = aten.view.default(getitem_2, [4, 2, -1])
    permute_2: "f32[2, 4, 8]" = aten.permute.default(view_5, [1, 0, 2])
    view_6: "f32[4, 2, 1]" = aten.view.default(getitem_3, [4, 2, -1])
    permute_3: "f32[2, 4, 1]" = aten.permute.default(view_6, [1, 0, 2])
    clone_1: "f32[2, 4, 8]" = aten.clone.default(permute_2, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[8, 8]" = aten._unsafe_view.default(clone_1, [8, 8])
    clone_2: "f32[2, 4, 1]" = aten.clone.default(permute_3, memory_format = torch.contiguous_format)
    _unsafe_view_2: "f32[8, 1]" = aten._unsafe_view.default(clone_2, [8, 1])
    view_7: "f32[8, 8]" = aten.view.default(_unsafe_view_1, [8, 8])
    view_8: "f32[8]" = aten.view.default(_unsafe_view_2, [8])
    permute: "f32[8, 8]" = aten.permute.default(view_7, [1, 0])
    addmm: "f32[2, 8]" = aten.addmm.default(view_8, primals_3, permute)
    wait_tensor_3: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_3)
    view_12: "f32[4, 16]" = aten.view.default(wait_tensor_3, [4, -1])
    view_13: "f32[4, 2, 8]" = aten.view.default(view_12, [4, 2, -1])
    permute_4: "f32[2, 4, 8]" = aten.permute.default(view_13, [1, 0, 2])
    clone_3: "f32[2, 4, 8]" = aten.clone.default(permute_4, memory_format = torch.contiguous_format)
    _unsafe_view_3: "f32[8, 8]" = aten._unsafe_view.default(clone_3, [8, 8])
    view_14: "f32[8, 8]" = aten.view.default(_unsafe_view_3, [8, 8])
    permute_1: "f32[8, 8]" = aten.permute.default(view_14, [1, 0])
    mm: "f32[2, 8]" = aten.mm.default(addmm, permute_1)
    return (mm, shard_blocks_0_weight, shard_blocks_0_bias, primals_3, shard_blocks_1_weight, addmm, cat_1, view_11)
""",
    )
    assert_expected_inline(
        later.readable(),
        """\
def forward(self, shard_blocks_0_weight: "f32[1, 8]", shard_blocks_0_bias: "f32[1]", primals_3: "f32[2, 8]", shard_blocks_1_weight: "f32[1, 8]", node_blocks_0: "f32[18]", node_blocks_1: "f32[16]"):
    all_gather_into_tensor: "f32[72]" = _c10d_functional.all_gather_into_tensor.default(node_blocks_0, 4, 'node')
    all_gather_into_tensor_1: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(node_blocks_1, 4, 'node')
    wait_tensor: "f32[72]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view: "f32[4, 18]" = aten.view.default(wait_tensor, [4, -1])
    split_with_sizes = aten.split_with_sizes.default(view, [16, 2], 1)
    getitem: "f32[4, 16]" = split_with_sizes[0]
    getitem_1: "f32[4, 2]" = split_with_sizes[1]
    view_1: "f32[4, 2, 8]" = aten.view.default(getitem, [4, 2, -1])
    permute_2: "f32[2, 4, 8]" = aten.permute.default(view_1, [1, 0, 2])
    view_2: "f32[4, 2, 1]" = aten.view.default(getitem_1, [4, 2, -1])
    permute_3: "f32[2, 4, 1]" = aten.permute.default(view_2, [1, 0, 2])
    clone: "f32[2, 4, 8]" = aten.clone.default(permute_2, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[8, 8]" = aten._unsafe_view.default(clone, [8, 8])
    clone_1: "f32[2, 4, 1]" = aten.clone.default(permute_3, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[8, 1]" = aten._unsafe_view.default(clone_1, [8, 1])
    view_3: "f32[8, 8]" = aten.view.default(_unsafe_view, [8, 8])
    view_4: "f32[8]" = aten.view.default(_unsafe_view_1, [8])
    permute: "f32[8, 8]" = aten.permute.default(view_3, [1, 0])
    addmm: "f32[2, 8]" = aten.addmm.default(view_4, primals_3, permute)
    wait_tensor_1: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_5: "f32[4, 16]" = aten.view.default(wait_tensor_1, [4, -1])
    view_6: "f32[4, 2, 8]" = aten.view.default(view_5, [4, 2, -1])
    permute_4: "f32[2, 4, 8]" = aten.permute.default(view_6, [1, 0, 2])
    clone_2: "f32[2, 4, 8]" = aten.clone.default(permute_4, memory_format = torch.contiguous_format)
    _unsafe_view_2: "f32[8, 8]" = aten._unsafe_view.default(clone_2, [8, 8])
    view_7: "f32[8, 8]" = aten.view.default(_unsafe_view_2, [8, 8])
    permute_1: "f32[8, 8]" = aten.permute.default(view_7, [1, 0])
    mm: "f32[2, 8]" = aten.mm.default(addmm, permute_1)
    return (mm, shard_blocks_0_weight, shard_blocks_0_bias, primals_3, shard_blocks_1_weight, addmm)
""",
    )
    assert_expected_inline(
        captured.backward[-1].readable(),
        """\
def forward(self, shard_blocks_0_weight: "f32[1, 8]", shard_blocks_0_bias: "f32[1]", primals_3: "f32[2, 8]", shard_blocks_1_weight: "f32[1, 8]", addmm: "f32[2, 8]", tangents_1: "f32[2, 8]", node_blocks_1: "f32[16]", partial_blocks_1: "f32[16]", factor_blocks_1: "f32[]", partial_blocks_0: "f32[18]", factor_blocks_0: "f32[]"):
    all_gather_into_tensor: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(node_blocks_1, 4, 'node')
    permute_2: "f32[8, 2]" = aten.permute.default(tangents_1, [1, 0])
    mm_1: "f32[8, 8]" = aten.mm.default(permute_2, addmm)
    view_4: "f32[8, 8]" = aten.view.default(mm_1, [8, -1])
    view_5: "f32[2, 4, 8]" = aten.view.default(view_4, [2, 4, -1])
    permute_7: "f32[4, 2, 8]" = aten.permute.default(view_5, [1, 0, 2])
    clone_1: "f32[4, 2, 8]" = aten.clone.default(permute_7, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[4, 16]" = aten._unsafe_view.default(clone_1, [4, 16])
    view_6: "f32[64]" = aten.view.default(_unsafe_view_1, [-1])
    reduce_scatter_tensor: "f32[16]" = _c10d_functional.reduce_scatter_tensor.default(view_6, 'sum', 4, 'node')
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_1: "f32[4, 16]" = aten.view.default(wait_tensor, [4, -1])
    view_2: "f32[4, 2, 8]" = aten.view.default(view_1, [4, 2, -1])
    permute: "f32[2, 4, 8]" = aten.permute.default(view_2, [1, 0, 2])
    clone: "f32[2, 4, 8]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[8, 8]" = aten._unsafe_view.default(clone, [8, 8])
    view_3: "f32[8, 8]" = aten.view.default(_unsafe_view, [8, 8])
    permute_1: "f32[8, 8]" = aten.permute.default(view_3, [1, 0])
    permute_4: "f32[8, 8]" = aten.permute.default(permute_1, [1, 0])
    mm_2: "f32[2, 8]" = aten.mm.default(tangents_1, permute_4)
    permute_6: "f32[8, 2]" = aten.permute.default(mm_2, [1, 0])
    mm_3: "f32[8, 8]" = aten.mm.default(permute_6, primals_3)
    sum_1: "f32[1, 8]" = aten.sum.dim_IntList(mm_2, [0], True)
    view: "f32[8]" = aten.view.default(sum_1, [8])
    wait_tensor_1: "f32[16]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    add: "f32[16]" = aten.add.Tensor(partial_blocks_1, wait_tensor_1)
    split_with_sizes = aten.split_with_sizes.default(add, [16])
    getitem: "f32[16]" = split_with_sizes[0]
    view_7: "f32[2, 8]" = aten.view.default(getitem, [2, -1])
    view_8: "f32[16]" = aten.view.default(view_7, [-1])
    reduce_scatter_tensor_1: "f32[8]" = _c10d_functional.reduce_scatter_tensor.default(view_8, 'sum', 2, 'nodes')
    view_9: "f32[8, 8]" = aten.view.default(mm_3, [8, -1])
    view_10: "f32[8, 1]" = aten.view.default(view, [8, -1])
    view_11: "f32[2, 4, 8]" = aten.view.default(view_9, [2, 4, -1])
    permute_8: "f32[4, 2, 8]" = aten.permute.default(view_11, [1, 0, 2])
    clone_2: "f32[4, 2, 8]" = aten.clone.default(permute_8, memory_format = torch.contiguous_format)
    _unsafe_view_2: "f32[4, 16]" = aten._unsafe_view.default(clone_2, [4, 16])
    view_12: "f32[2, 4, 1]" = aten.view.default(view_10, [2, 4, -1])
    permute_9: "f32[4, 2, 1]" = aten.permute.default(view_12, [1, 0, 2])
    view_13: "f32[4, 2]" = aten.view.default(permute_9, [4, 2])
    cat: "f32[4, 18]" = aten.cat.default([_unsafe_view_2, view_13], 1)
    view_14: "f32[72]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor_2: "f32[18]" = _c10d_functional.reduce_scatter_tensor.default(view_14, 'sum', 4, 'node')
    wait_tensor_2: "f32[8]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_1)
    div: "f32[8]" = aten.div.Tensor(wait_tensor_2, factor_blocks_1)
    wait_tensor_3: "f32[18]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_2)
    add_1: "f32[18]" = aten.add.Tensor(partial_blocks_0, wait_tensor_3)
    split_with_sizes_1 = aten.split_with_sizes.default(add_1, [16, 2])
    getitem_1: "f32[16]" = split_with_sizes_1[0]
    getitem_2: "f32[2]" = split_with_sizes_1[1]
    view_15: "f32[2, 8]" = aten.view.default(getitem_1, [2, -1])
    view_16: "f32[2, 1]" = aten.view.default(getitem_2, [2, -1])
    cat_1: "f32[2, 9]" = aten.cat.default([view_15, view_16], 1)
    view_17: "f32[18]" = aten.view.default(cat_1, [-1])
    reduce_scatter_tensor_3: "f32[9]" = _c10d_functional.reduce_scatter_tensor.default(view_17, 'sum', 2, 'nodes')
    wait_tensor_4: "f32[9]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor_3)
    div_1: "f32[9]" = aten.div.Tensor(wait_tensor_4, factor_blocks_0)
    return (None, None, None, None, div, div_1)
""",
    )


def _sent(captured: Capture) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for call in captured.calls:
        for node in call.graph.graph_module.graph.nodes:
            if starts_collective(node):
                over = "nodes" if call.graph.group_names[node.args[-1]] in ("replicate", "nodes") else "ranks"
                found[f"{collective_kind(node)} over {over}"] += traffic_bytes(node)
    return dict(found)


# Bytes that a rank sends for P bytes of parameters and of gradients, on n ranks, or r nodes of s ranks, in m microbatches.
_FORMULAE: dict[str, Callable[..., dict[str, float]]] = {
    "zero3": lambda P, n, m, **_: {
        "all_gather over ranks": 2 * m * P * (n - 1) / n,
        "reduce_scatter over ranks": m * P * (n - 1) / n,
    },
    "zero2": lambda P, n, m, **_: {"all_gather over ranks": P * (n - 1) / n, "reduce_scatter over ranks": m * P * (n - 1) / n},
    "zero1": lambda P, n, m, **_: {"all_gather over ranks": P * (n - 1) / n, "reduce_scatter over ranks": P * (n - 1) / n},
    "ddp": lambda P, n, m, **_: {"all_reduce over nodes": 2 * m * P * (n - 1) / n},
    "hsdp": lambda P, r, s, m, **_: {
        "all_gather over ranks": 2 * m * P * (s - 1) / s,
        "reduce_scatter over ranks": m * P * (s - 1) / s,
        "all_reduce over nodes": 2 * m * P / s * (r - 1) / r,
    },
    "hybrid": lambda P, r, s, m, **_: {
        "all_gather over nodes": P / s * (r - 1) / r,
        "all_gather over ranks": 2 * m * P * (s - 1) / s,
        "reduce_scatter over ranks": m * P * (s - 1) / s,
        "reduce_scatter over nodes": P / s * (r - 1) / r,
    },
}


@pytest.mark.parametrize("placement", _FORMULAE)
@pytest.mark.parametrize("microbatches", [1, 3])
def test_bytes(placement: str, microbatches: int, fake_ranks: None) -> None:
    """A step sends the bytes of the formulae in docs/placement.md."""
    layers = [nn.Linear(16, 16, bias=False) for _ in range(3)]
    model: Any = nn.Sequential(*layers)
    mesh = _mesh_of(placement)
    for layer in layers:
        fully_shard(layer, mesh=mesh, placement=placement)
    # The root, which is read first, has no parameters: all units are gathered in backward, too.
    fully_shard(model, mesh=mesh, placement=placement)
    # The first layer's backward reads no weight, unless its input needs a gradient.
    captured = _step(model, microbatches, torch.ones(2, 16, requires_grad=True))
    expected = _FORMULAE[placement](P=4 * 3 * 256, n=8, r=2, s=4, m=microbatches)
    assert _sent(captured) == pytest.approx(expected)


def test_node_gathers_run_ahead(fake_ranks: None) -> None:
    """While a unit computes, the next one is gathered within the node, and the one after it over nodes."""
    model = _sharded(functools.partial(models.MLP, layers=4), "hybrid", _mesh(2, 4))
    (forward,) = _step(model).forward
    order = [
        "over nodes" if role(node) is Role.GATHER_NODE else "within the node"
        for node in forward.graph_module.graph.nodes
        if starts_collective(node)
    ]
    assert order == ["over nodes", *["over nodes", "within the node"] * 4, "within the node"]


def test_explain_knows_placements() -> None:
    def report(placement: str, shape: tuple[int, ...]) -> Any:
        def shard(model: Any, mesh: DeviceMesh) -> None:
            shard_units(model, mesh, fully_shard, placement=placement)

        return explain(models.MLP(16, 64, 16, layers=2), torch.ones(2, 16), shape, "cpu", shard=shard, suggest=False)

    hsdp, hybrid, ddp = report("hsdp", (2, 4)), report("hybrid", (2, 4)), report("ddp", (8,))
    (half, whole, all_of_it) = (each.memory.categories["optimizer state"] for each in (hybrid, hsdp, ddp))
    assert half < 0.6 * whole and all_of_it > 3 * whole
    assert hybrid.mesh == {"nodes": 2, "node": 4}
    # The number of ranks is a symbol, and a shard of one rank has none.
    assert "R" in str(ddp.formulae)
    with pytest.raises(ValueError, match="placement 'hybrid'"):
        _ = hybrid.formulae


# Bad input

_BUILD = functools.partial(models.MLP, layers=1)


@pytest.mark.parametrize(
    ("placement", "mesh_shape", "options", "error", "message"),
    [
        ("zero4", (8,), {}, ValueError, "placement='zero4'.* no placement. Use one of ddp, zero1"),
        (3, (8,), {}, TypeError, "takes a name or a mapping"),
        ("hybrid", (8,), {}, ValueError, "placement='hybrid'.* needs a 2-D mesh"),
        ("zero3", (2, 4), {}, ValueError, "placement='zero3'.* needs a 1-D mesh"),
        ("zero2", (8,), {"reshard_after_forward": True}, ValueError, "keeps parameters whole.*reshard_after_forward=True"),
        ("hybrid", (2, 4), {"reshard_after_forward": 2}, ValueError, "reshard_after_forward=2 asks for a smaller group"),
        ({"replicate": "zero3", "shard": "zero3"}, (2, 4), {}, ValueError, "pass a 1-D mesh"),
        ({"replicate": "zero1", "shard": "replicate"}, (2, 4), {}, ValueError, "is not supported"),
        ({"shard": "zero3"}, (2, 4), {}, ValueError, "each dimension of mesh= once"),
        ({"shard": "all"}, (8,), {}, ValueError, "has 'all': use 'replicate'"),
        ("hybrid", (2, 4), {"gather_policy": GatherPolicy()}, NotImplementedError, "Parameter up.weight .*gather_policy"),
        ("hybrid", (2, 4), {"offload_policy": CPUOffloadPolicy()}, NotImplementedError, "Parameter up.weight .*on the host"),
    ],
)
def test_bad_placements(
    placement: Any, mesh_shape: tuple[int, ...], options: Any, error: type[Exception], message: str, fake_ranks: None
) -> None:
    model = _BUILD()
    with pytest.raises(error, match=message):
        fully_shard(model.blocks[0], mesh=_mesh(*mesh_shape), placement=placement, **options)
    assert not any(isinstance(param, DTensor) for param in model.parameters())


@needs_placements_with_a_mesh
@pytest.mark.parametrize("placement", ["hybrid", "ddp"])
def test_a_mesh_for_each_parameter_beside_a_placement(placement: str, fake_ranks: None) -> None:
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

    elsewhere = ShardPlacementResult(None, FSDPMeshInfo(init_device_mesh("cpu", (8,)), shard_mesh_dim=0))
    with pytest.raises(NotImplementedError, match=r"shard_placement_fn returned a mesh for parameter up.weight"):
        fully_shard(
            _BUILD().blocks[0], mesh=_mesh_of(placement), placement=placement, shard_placement_fn=lambda param: elsewhere
        )


def test_a_mesh_for_hybrid_needs_names(fake_ranks: None) -> None:
    with pytest.raises(ValueError, match="dimensions need names"):
        fully_shard(_BUILD(), mesh=init_device_mesh("cpu", (2, 4)), placement="hybrid")


def test_hooks_that_hybrid_refuses(fake_ranks: None) -> None:
    mesh = _mesh(2, 4)
    model = _sharded(_BUILD, "hybrid", mesh)
    state = comm_hooks.DefaultState(mesh.get_group("shard"))
    with pytest.raises(NotImplementedError, match="placement='hybrid'"):
        model.register_comm_hook(state, comm_hooks.PowerSGD(1))
    with pytest.raises(NotImplementedError, match="placement='hybrid'"):
        model.register_comm_hook(state, comm_hooks.allreduce_hook, over="replicas")


def test_a_hook_with_an_output_beside_ddp(fake_ranks: None) -> None:
    model, state = replicate(_BUILD()), comm_hooks.DefaultState(torch.distributed.group.WORLD)
    with pytest.raises(HookNotTraceable, match=r"the root are whole on every rank \(placement='ddp'.*\(state, grad\)"):
        model.register_comm_hook(state, comm_hooks.reduce_scatter_hook)
    model.register_comm_hook(state, comm_hooks.allreduce_hook)


def test_an_optimizer_in_backward_refuses_whole_parameters(fake_ranks: None) -> None:
    model = replicate(_BUILD())
    with pytest.raises(ValueError, match="placement='ddp'"):
        optimizer_in_backward(torch.optim.SGD, model.parameters(), lr=0.1)
