"""``dp_mesh_dims``: parameters are DTensors on all dimensions of a mesh, and FSDP shards over some of the dimensions.

Activations are DTensors on the same mesh. Either they are sharded there, and a gradient is a sum over ranks with different
tokens. Or each rank declares its own tokens as replicated, and gradients are averaged as without DTensors. DTensor may trust
such a declaration, so only FSDP2 can be the reference for it.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compile import fully_shard
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import fully_shard_of, graphs_captured, relative_error
from tests.common.parity import describe_values, regression_batch
from tests.common.versions import needs_mesh_dims

pytestmark = needs_mesh_dims

_STEPS = 3
# Dimensions by which tensor parallelism splits the two products of a block; the rest is whole.
_CUTS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@dataclass(frozen=True)
class Split:
    """A mesh, with the dimensions to shard over and to replicate over. The other dimensions are tensor parallel."""

    sizes: dict[str, int]
    shard: str | tuple[str, ...]
    replicate: str | tuple[str, ...] | None = None

    @property
    def dims(self) -> Any:
        return torch.distributed.fsdp.DataParallelMeshDims(self.shard, self.replicate)

    @property
    def world(self) -> int:
        return math.prod(self.sizes.values())

    def is_dp(self, name: str) -> bool:
        return name in self.dims.shard_names + self.dims.replicate_names

    @property
    def batches(self) -> int:
        return math.prod(size for name, size in self.sizes.items() if self.is_dp(name))

    def mesh(self) -> DeviceMesh:
        # One mesh for all runs: FSDP2 wants the mesh of the parameters itself, not an equal one.
        return device_mesh(tuple(self.sizes.values()), tuple(self.sizes))


_SPLITS = {
    "dp, tp": Split({"dp": 2, "tp": 2}, "dp"),
    "tp, dp": Split({"tp": 2, "dp": 2}, "dp"),
    "dp": Split({"dp": 4}, "dp"),
    "replicate, shard": Split({"replicate": 2, "shard": 2}, "shard", "replicate"),
    "two to shard over": Split({"dp": 2, "cp": 2}, ("dp", "cp")),
    "two to shard over, tp": Split({"dp": 2, "cp": 2, "tp": 2}, ("dp", "cp")),
    "replicate, shard, tp": Split({"replicate": 2, "shard": 2, "tp": 2}, "shard", "replicate"),
    "replicate, two to shard over": Split({"replicate": 2, "dp": 2, "cp": 2}, ("dp", "cp"), "replicate"),
}


def _lay_out(model: nn.Module, split: Split, mesh: DeviceMesh) -> None:
    for name, param in list(model.named_parameters()):
        owner, _, own = name.rpartition(".")
        cut = _CUTS.get(".".join(name.split(".")[-2:]))
        placements = [Replicate() if split.is_dp(dim) or cut is None else Shard(cut) for dim in split.sizes]
        model.get_submodule(owner).register_parameter(own, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))


def _global_batch(step: int, split: Split) -> tuple[Tensor, ...]:
    parts = [regression_batch(step, number, split.batches, sizes=(4,)) for number in range(split.batches)]
    return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))


def _build() -> nn.Module:
    torch.manual_seed(0)
    return models.MLP(layers=2)


@dataclass
class Run:
    losses: list[float]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]
    layout: dict[str, str]
    graphs: int = 0


def train(name: str, system: str, factor: float | None, own_tokens: bool = False) -> Run:
    """Train for some steps. Runs on every rank."""
    split, model = _SPLITS[name], _build()
    mesh = split.mesh()
    _lay_out(model, split, mesh)
    shard = functools.partial(fully_shard_of(system), mesh=mesh, dp_mesh_dims=split.dims)
    for module in (*model.get_submodule("blocks").children(), model):
        unit: Any = shard(module)
        if factor is not None:
            unit.set_gradient_divide_factor(factor)
            unit.set_force_sum_reduction_for_comms(True)
    run = Run([], [], {}, {key: describe_values(param) for key, param in model.named_parameters()})
    before = graphs_captured()
    if system not in ("fsdp2", "eager"):
        model.compile(backend="fsdp", options={"lowering": system}, fullgraph=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    on_batch = [Shard(0) if split.is_dp(dim) else Replicate() for dim in split.sizes]
    everywhere = [Replicate()] * mesh.ndim
    for step in range(_STEPS):
        x, target = (distribute_tensor(tensor, mesh, on_batch) for tensor in _global_batch(step, split))
        if own_tokens:
            x, target = (DTensor.from_local(tensor.to_local(), mesh, everywhere, run_check=False) for tensor in (x, target))
        loss = (model(x) - target).square().mean().full_tensor()
        loss.backward()
        run.losses.append(loss.item())
        gradients: dict[str, Any] = {key: param.grad for key, param in model.named_parameters()}
        if step == 0:
            run.layout |= {f"{key}.grad": str(grad._spec) for key, grad in gradients.items()}
        run.gradients.append({key: grad.full_tensor() for key, grad in gradients.items()})
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {key: param.full_tensor().detach() for key, param in model.named_parameters()}  # type: ignore[attr-defined]
    run.graphs = graphs_captured() - before
    return run


@functools.cache
def reference(name: str) -> Run:
    """Return the run of one process in float64."""
    model, run = _build().double(), Run([], [], {}, {})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
    for step in range(_STEPS):
        x, target = (tensor.double() for tensor in _global_batch(step, _SPLITS[name]))
        loss = (model(x) - target).square().mean()
        loss.backward()
        run.losses.append(loss.item())
        run.gradients.append({key: param.grad.clone() for key, param in model.named_parameters()})  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
    run.parameters = {key: param.detach() for key, param in model.named_parameters()}
    return run


def _compare(run: Run, expected: Run, rtol: float) -> None:
    torch.testing.assert_close(run.losses, expected.losses, rtol=rtol, atol=0)
    for step, gradients in enumerate(run.gradients):
        for key, gradient in gradients.items():
            assert relative_error(gradient, expected.gradients[step][key]) < rtol, (step, key)
    for key, param in run.parameters.items():
        assert relative_error(param, expected.parameters[key]) < rtol, key


_UNCOMPILED = ("dp, tp",)
# The other splits are compiled only in night runs.
_COMPILED = ("two to shard over",)


@pytest.mark.parametrize(
    ("name", "system"),
    [
        *((name, "eager") for name in _UNCOMPILED),
        *(pytest.param(name, "aot_eager", marks=[] if name in _COMPILED else pytest.mark.night) for name in _SPLITS),
    ],
)
def test_parity(name: str, system: str, rank_pools: RankPools) -> None:
    pool = rank_pools[_SPLITS[name].world]
    # Gradients are sums already, so divide them by one.
    for run in pool.run(train, name=name, system=system, factor=1.0):
        _compare(run, reference(name), 2e-5)
    for own_tokens in (False, True):
        theirs = pool.run(train, name=name, system="fsdp2", factor=None, own_tokens=own_tokens)
        runs = pool.run(train, name=name, system=system, factor=None, own_tokens=own_tokens)
        for ours, other in zip(runs, theirs, strict=True):
            _compare(ours, other, 1e-5)
            assert ours.layout == other.layout
            assert ours.graphs == (system != "eager")


def _mesh(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)


def _linear(mesh: DeviceMesh, *placements: Any) -> nn.Module:
    linear = nn.Linear(8, 8, bias=False)
    linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, placements))
    return linear


def test_a_gradient_that_is_yet_to_be_reduced(fake_ranks: None) -> None:
    mesh, dims = _mesh("replicate", "tp", "dp"), torch.distributed.fsdp.DataParallelMeshDims("dp", "replicate")
    model: Any = fully_shard(_linear(mesh, Replicate(), Shard(1), Replicate()), mesh=mesh, dp_mesh_dims=dims)
    (param,) = model._fsdp_unit.params
    assert model.weight.placements == (Replicate(), Shard(1), Shard(0))
    assert param.summand_placements == [Partial(), Shard(1), Partial()]


def test_what_is_refused(fake_ranks: None) -> None:
    of = torch.distributed.fsdp.DataParallelMeshDims
    mesh, other = _mesh("a", "b", "c"), _mesh("a", "d", "c")
    whole = [Replicate()] * 3
    refused: list[tuple[nn.Module, DeviceMesh | None, Any, type[Exception], str]] = [
        (_linear(mesh, *whole), mesh, object(), TypeError, "must be a .*DataParallelMeshDims"),
        (_linear(mesh, *whole), mesh, of("d"), ValueError, "names dimensions of mesh=, which has .*'a', 'b', 'c'"),
        (_linear(mesh, *whole), None, of("a"), ValueError, "names dimensions of mesh="),
        (_linear(mesh, *whole), mesh, of(replicate="a"), NotImplementedError, "shards nothing"),
        (nn.Linear(8, 8), mesh, of("a"), ValueError, "weight is a plain tensor"),
        (_linear(other, *whole), mesh, of("a"), ValueError, "weight is one on"),
        (_linear(mesh, Shard(0), *whole[1:]), mesh, of("a"), ValueError, r"weight .* must be Replicate\(\) on a"),
    ]
    for model, given, dims, error, message in refused:
        before = dict(model.named_parameters())
        with pytest.raises(error, match=message):
            fully_shard(model, mesh=given, dp_mesh_dims=dims)
        assert type(model) is nn.Linear and dict(model.named_parameters()) == before
