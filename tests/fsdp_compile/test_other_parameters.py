"""Ranks that read the parameters of a unit in different orders train. Ranks that read different ones of equal size raise."""

from __future__ import annotations

import itertools
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import GatherPolicy, fsdp_backend, fully_shard
from passes.auto import large_parameters
from tests.common.distributed import RankPools, device_mesh
from tests.common.rounding import rounded
from tests.common.subclasses import Halved
from tests.common.versions import needs_placements_with_a_mesh

_AOT_EAGER: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


class Pair(nn.Module):
    """Two weights of equal size, or more, and a way to use them for each rank: one or another, or all in some order."""

    def __init__(self, size: int, names: str = "ab") -> None:
        super().__init__()
        for name in names:
            self.register_parameter(name, nn.Parameter(torch.randn(size, size) / size**0.5))

    def forward(self, x: Tensor, order: str) -> Tensor:
        found = {name: x @ getattr(self, name) for name in order}
        return torch.stack([found[name] for name in sorted(order)]).prod(0)


class Model(nn.Module):
    """A layer, and two pairs."""

    def __init__(self, size: int = 8, names: str = "ab") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, size)
        self.pairs = nn.ModuleList(Pair(size, names) for _ in range(2))

    def forward(self, x: Tensor, orders: dict[int, str]) -> Tensor:
        x = self.layer(x)
        for index, order in orders.items():
            x = self.pairs[index](x, order)
        return x


# Parameters of all units in one order.

_ORDERS: dict[str, dict[str, Any]] = {
    "in storage": {},
    "in a smaller group": {"reshard_after_forward": 2},
    "rounded, in a smaller group": {"reshard_after_forward": 2, "gather_policy": GatherPolicy(torch.int8, "row")},
    "with an extension": {},
    "over two meshes": {},
    "large": {},
    "large, some share collectives": {},
}


def train_in_other_order(kind: str, compiled: bool) -> None:
    """Compare gradients with those of the whole model. Ranks alternate in the weight that they read first. Runs on every rank.

    The backward of the first of three microbatches writes gradients, and the second one, another graph, adds to them.
    """
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    options, mesh = dict(_ORDERS[kind]), device_mesh((world,))
    if "meshes" in kind:
        from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult

        elsewhere = ShardPlacementResult(None, FSDPMeshInfo(mesh, shard_mesh_dim=0))
        mesh, turns = device_mesh((2, world // 2)), itertools.cycle("ab")
        options["shard_placement_fn"] = lambda _: elsewhere if next(turns) == "a" else None
    # Parameters of 1 MiB have collectives of their own. Here, two of three share one: which ones, the first reader decides.
    size = 520 if kind == "large" else 8
    names = "abc" if "share" in kind else "ab"
    alone, model = Model(size, names), Model(size, names)
    for pair, own in zip(model.pairs, alone.pairs, strict=True):
        for name in names:
            weight = getattr(own, name).detach()
            if kind == "with an extension":
                setattr(pair, name, nn.Parameter(Halved(weight.clone())))
                weight.copy_(weight.bfloat16())
            elif "rounded" in kind:
                weight.copy_(rounded(weight, world, options["gather_policy"]))
        fully_shard(pair, mesh=mesh, **options)
    fully_shard(model, mesh=device_mesh((world,)))
    how = {"lowering": "aot_eager", **({"min_bucket_bytes": 500} if "share" in kind else {})}
    forward: Any = torch.compile(model, backend=fsdp_backend, options=how) if compiled else model
    own_bytes = 200 if "share" in kind else large_parameters.MIN_OWN_BUCKET_BYTES
    with mock.patch.object(large_parameters, "MIN_OWN_BUCKET_BYTES", own_bytes):
        for batches in torch.randn(3, world, 3, 8, generator=torch.Generator().manual_seed(1)):
            forward(batches[rank], dict.fromkeys((0, 1), (names, names[::-1])[rank % 2])).square().mean().backward()
            (sum(alone(batch, {0: names, 1: names}).square().mean() for batch in batches) / world).backward()
    for (name, param), whole in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(
            param.grad.full_tensor(), whole.grad, rtol=1e-4, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[needs_placements_with_a_mesh] if "meshes" in kind else []) for kind in _ORDERS]
)
def test_other_order(kind: str, compiled: bool, rank_pools: RankPools) -> None:
    rank_pools[4 if "smaller" in kind or "meshes" in kind else 2].run(train_in_other_order, kind=kind, compiled=compiled)


# Other parameters.


def disagree(compiled: str, units: bool, orders: list[dict[int, str]], steps: int) -> list[str]:
    """Take steps with both pairs, but the last with ``orders[rank]``. Return the errors of the last. Runs on every rank."""
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    # Ranks that disagree make a group unusable.
    mesh = DeviceMesh.from_group(dist.new_group(list(range(world))), "cpu")
    model = Model()
    for pair in model.pairs if units else ():
        fully_shard(pair, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if compiled == "whole":
        model.compile(**_AOT_EAGER)
    for pair in model.pairs if compiled == "pair by pair" else ():
        pair.compile(**_AOT_EAGER)
    for _ in range(steps - 1):
        model(torch.ones(3, 8), {0: "a", 1: "a"}).sum().backward()
    try:
        model(torch.ones(3, 8), orders[rank]).sum().backward()
    except Exception as error:
        return [str(error)]
    return []


_WEIGHTS, _PAIRS = [{0: "a"}, {0: "b"}], [{0: "a"}, {1: "a"}]


@pytest.mark.parametrize(
    ("compiled", "units", "orders", "steps"),
    [
        ("", False, _WEIGHTS, 1),
        ("", True, _WEIGHTS, 1),
        ("", False, _PAIRS, 2),
        ("whole", False, _WEIGHTS, 1),
        ("whole", True, _WEIGHTS, 1),
        ("whole", False, _PAIRS, 2),
        *(
            ("pair by pair", units, orders, steps)
            for units in (False, True)
            for orders, steps in ((_WEIGHTS, 1), (_PAIRS, 1), (_PAIRS, 2))
        ),
    ],
)
def test_other_parameters_of_equal_size(
    compiled: str, units: bool, orders: list[dict[int, str]], steps: int, own_rank_pools: RankPools
) -> None:
    wanted = [f"pairs.{index}" if units and orders is _PAIRS else name for of in orders for index, name in of.items()]
    for errors in own_rank_pools[2].run(disagree, compiled=compiled, units=units, orders=orders, steps=steps):
        (error,) = errors
        assert "RanksDisagree" in error or "run different programs" in error
        for rank, name in enumerate(wanted):
            (line,) = (line for line in error.splitlines() if line.startswith(f"  rank {rank}: "))
            assert name in line
