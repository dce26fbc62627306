"""``options={"memory_budget": ...}`` over several nodes: nodes keep copies of units, as the network is slow."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler import memory_budget
from fsdp_compile.debug import capture
from fsdp_compile.explain import Report, explain
from fsdp_compile.units.mesh import ShardingMesh
from passes.auto.memory_budget import Choice
from passes.auto.step_policy import SAVE, OpenChoices, StepPolicy, Trial
from passes.collectives.functional import group_size
from passes.fx.graph import group_of, starts_collective
from passes.ir.work import Role, role
from passes.models.hardware import Hardware, Link, Links, known_hardware
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, regression_batch, train_reference, train_sharded
from tests.fsdp_compile.test_memory_budget import few_trials, step_ns

_LARGE = 1 << 40
_SLOW = Link(1e-6, 1e9)


def nodes_of(ranks: int) -> Hardware:
    """Return fast devices in nodes of ``ranks`` ranks, with a slow network between nodes."""
    return replace(known_hardware("cuda", "A100"), ranks_per_node=ranks, between_nodes=Links(_SLOW, _SLOW, _SLOW))


class Deep(nn.Module):
    """Layers whose parameters dominate a step's memory, and so many layers that parameters kept for all of them show."""

    def __init__(self, depth: int = 6, width: int = 128):
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])
        self.head = nn.Linear(width, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return cast(Tensor, self.head(x))


class WithLoss(Deep):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


def shard(model: nn.Module, mesh: DeviceMesh, by_hand: Mapping[str, bool | int] | None = None) -> None:
    """Shard each layer and the root, with ``reshard_after_forward`` from ``by_hand`` by name."""
    for name in (*(f"blocks.{index}" for index in range(len(cast(Deep, model).blocks))), ""):
        fully_shard(model.get_submodule(name), mesh=mesh, reshard_after_forward=(by_hand or {}).get(name))


def batch() -> Tensor:
    return torch.ones(16, 128)


def explained(sharding: Any = shard, ranks_per_node: int = 4, **options: Any) -> Report:
    given = {"min_bucket_bytes": 0, **options}
    return explain(WithLoss(), batch(), (8,), nodes_of(ranks_per_node), shard=sharding, options=given, suggest=False)


@functools.cache
@few_trials
def unlimited() -> Choice:
    (choice,) = explained(memory_budget=_LARGE).choices
    return choice


def _in_nodes(trials: Any) -> list[Trial]:
    return [trial for trial in trials if trial.policy.in_nodes]


@pytest.mark.night
@few_trials
def test_a_budget_chooses_them_and_says_so() -> None:
    """If not all units fit gathered, copies within nodes take fewer bytes, and are faster than the network."""
    trial = _in_nodes(unlimited().frontier())[-1]
    report = explained(memory_budget=trial.peak_bytes)
    (choice,) = report.choices
    assert choice.chosen == trial
    assert report.memory.peak_bytes + batch().nbytes == trial.peak_bytes and step_ns(report) == trial.time_ns
    assert f"{len(trial.policy.kept)} of 7 units, {len(trial.policy.in_nodes)} in each node" in str(report)
    others = [one for one in unlimited().trials if not one.policy.in_nodes and one.peak_bytes <= trial.peak_bytes]
    assert trial.time_ns < min((one.time_ns for one in others), default=_LARGE)


@pytest.mark.parametrize("which", [0, -1])
def test_trials_are_what_flags_by_hand_give(which: int) -> None:
    plain = [one for one in _in_nodes(unlimited().trials) if not one.policy.recomputed and one.policy.activation_budget == SAVE]
    policy, trial = plain[which].policy, plain[which]
    flags = {**dict.fromkeys(policy.kept, False), **dict.fromkeys(policy.resharded, True), **dict.fromkeys(policy.in_nodes, 4)}
    report = explained(functools.partial(shard, by_hand=flags))
    assert (report.memory.peak_bytes + batch().nbytes, step_ns(report)) == (trial.peak_bytes, trial.time_ns)


@few_trials
def test_a_single_node_keeps_no_copies() -> None:
    assert not _in_nodes(explained(ranks_per_node=8, memory_budget=_LARGE).choices[0].trials)


def test_groups_are_connected_when_they_are_chosen(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    connected: list[str] = []
    monkeypatch.setattr("fsdp_compile.units.mesh.connect", lambda name, device: connected.append(name))
    mesh = ShardingMesh.of(None)
    assert connected == [mesh.shard_group]
    tried = mesh.post_forward_group(4, connects=False)
    assert connected == [mesh.shard_group]
    assert mesh.post_forward_group(4) == tried == mesh.post_forward_group(4)
    assert connected == [mesh.shard_group, tried]


# Real ranks.

_CASE = Case(
    "deep",
    functools.partial(Deep, 3),
    batch=functools.partial(regression_batch, sizes=(16,), dim=128, out=8),
    steps=2,
)


def in_nodes_alone(choices: OpenChoices, attempt: Callable[[StepPolicy], Trial | None]) -> list[Trial]:
    """Try one policy instead of a search: nodes keep copies of all units but the root, which stays gathered."""
    trial = attempt(choices.policy(("",), (), SAVE, in_nodes=choices.in_nodes))
    assert trial is not None and len(trial.policy.in_nodes) == 3
    return [trial]


def train_in_nodes(lowering: str) -> list[Run]:
    """Train without a budget, and with one under which two nodes of two ranks keep copies; check backward's groups."""
    options = {"lowering": lowering, "min_bucket_bytes": 0}
    without = train_sharded(_CASE, fully_shard, {"backend": fsdp_backend, "options": options})
    torch._dynamo.reset()
    compiled = {"backend": fsdp_backend, "options": {**options, "memory_budget": _LARGE, "hardware": nodes_of(2)}}
    with mock.patch.object(memory_budget, "search", in_nodes_alone), capture(passes=False) as captured:
        within = train_sharded(_CASE, fully_shard, compiled)
    gathers = [node for node in captured.backward[0].graph_module.graph.nodes if role(node) is Role.START_GATHER]
    sizes = [group_size(group_of(node)) for node in gathers if starts_collective(node)]
    # Only forward reads the first layer's parameter.
    assert sizes == [2, 2]
    return [without, within]


@pytest.mark.night
@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_trains_alike(lowering: str, rank_pools: RankPools) -> None:
    by_rank = rank_pools[4].run(train_in_nodes, lowering=lowering)
    without, within = ([runs[index] for runs in by_rank] for index in range(2))
    compare(within, train_reference(_CASE, 4), rtol=1e-5)
    compare(within, without, rtol=1e-6)
