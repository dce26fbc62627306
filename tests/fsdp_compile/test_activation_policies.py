"""Policies of ``create_selective_checkpoint_contexts``, in compiled graphs of sharded models, with and without a memory budget.

Operators are counted in the forward and backward graphs, which both lowerings share. Values equal FSDP2's with the same policy.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, capture
from passes.fx.graph import memory_of
from passes.ir.work import MAKES_PARAMETERS, Role, role
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, regression_batch, shard_units, train_sharded, train_with

_aten = torch.ops.aten
_LARGE = 1 << 40
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)
#: The decision for each listed operator, and the decision for all others.
Policy: TypeAlias = tuple[Mapping[Any, CheckpointPolicy], CheckpointPolicy]
POLICIES: Mapping[str, Policy] = {
    "save products": (dict.fromkeys(_PRODUCTS, CheckpointPolicy.MUST_SAVE), CheckpointPolicy.PREFER_RECOMPUTE),
    "save tanh": ({_aten.tanh.default: CheckpointPolicy.MUST_SAVE}, CheckpointPolicy.MUST_RECOMPUTE),
    "recompute tanh": ({_aten.tanh.default: CheckpointPolicy.MUST_RECOMPUTE}, CheckpointPolicy.PREFER_SAVE),
    "save all": ({}, CheckpointPolicy.MUST_SAVE),
    "recompute all": ({}, CheckpointPolicy.MUST_RECOMPUTE),
}


def checkpointed(policy: Policy, function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Call ``function`` in a checkpoint with ``policy``."""
    of_operator, of_others = policy

    def decide(_context: Any, called: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        return of_operator.get(called, of_others)

    contexts = functools.partial(create_selective_checkpoint_contexts, decide)
    return checkpoint(function, x, use_reentrant=False, context_fn=contexts)


class Block(nn.Module):
    """Three products. Backward reads the first through a tanh; the gradients of the last product's weight read the second."""

    def __init__(self, policy: str, dim: int, hidden: int):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)
        self.last = nn.Linear(dim, dim)
        self.policy = POLICIES.get(policy)

    def compute(self, x: Tensor) -> Tensor:
        return x + self.last(self.down(torch.tanh(self.up(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(x) if self.policy is None else checkpointed(self.policy, self.compute, x)


class Model(nn.Module):
    """A block for each policy by name. A block has no policy if the name is unknown."""

    def __init__(self, *policies: str, dim: int = 8, hidden: int = 16):
        super().__init__()
        self.blocks = nn.ModuleList([Block(policy, dim, hidden) for policy in policies])
        self.head = nn.Linear(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


# Graphs


def train(model: nn.Module, budget: int | None, reshard: bool | None = None) -> Capture:
    torch._dynamo.reset()
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard, reshard_after_forward=reshard)
    options: dict[str, Any] = {"lowering": "aot_eager", "memory_budget": budget}
    with capture() as captured:
        torch.compile(model, backend=fsdp_backend, options=options)(torch.ones(256, 8)).sum().backward()
    return captured


def counted(graph: Graph, *operators: Any) -> int:
    return sum(node.target in operators for node in graph.nodes)


def saved(captured: Capture) -> Counter[Any]:
    """Count by operator the results that backward reads, directly or as views."""
    forward, backward = (graphs[0].graph_module.graph for graphs in (captured.forward, captured.backward))
    outputs = {node.name: node for node in forward.output_node().args[0] if isinstance(node, Node)}  # type: ignore[union-attr]
    read = [node.name for node in backward.find_nodes(op="placeholder") if node.users]
    return Counter(memory_of(outputs[name]).target for name in read if name in outputs)


# Counts for ``Model("none", policy)``: products and tanhs that backward computes again, then products and tanhs that it reads.
# Backward needs the result of the last block, which takes no more than the last product and an addition.
_COUNTED: Mapping[str, tuple[int, int, int, int]] = {
    "save products": (0, 1, 4, 1),
    "save tanh": (2, 0, 1, 2),
    "recompute tanh": (0, 1, 3, 1),
    "save all": (0, 0, 2, 2),
    "recompute all": (3, 1, 1, 1),
}
# ``_BLOCK``: changes if the block without a policy is recomputed. ``_RESULT`` and ``_NOT_SAVED``: changes if the result of the
# last block is saved, because it enters a recomputed region. Then nothing needs the last product.
_BLOCK = (2, 1, -1, -1)
_RESULT = {"save products": (0, 0, -1, 0)}
_NOT_SAVED = (-1, 0, 0, 0)


@pytest.mark.night
@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize("policy", POLICIES)
def test_what_a_policy_says_is_done(policy: str) -> None:
    """Policies hold with and without a memory budget. To keep to the budget, the block without a policy is recomputed."""

    def count(captured: Capture) -> tuple[int, ...]:
        backward, kept = captured.backward[0].graph_module.graph, saved(captured)
        again = [counted(backward, _aten.addmm.default), counted(backward, _aten.tanh.default)]
        return (*again, kept[_aten.addmm.default], kept[_aten.tanh.default])

    def expected(*changes: tuple[int, ...]) -> list[tuple[int, ...]]:
        found = tuple(map(sum, zip(_COUNTED[policy], *changes, strict=True)))
        return [found, tuple(map(operator.add, found, _RESULT.get(policy, _NOT_SAVED)))]

    assert count(train(Model("none", policy), None)) == _COUNTED[policy]
    unlimited = train(Model("none", policy), _LARGE)
    assert count(unlimited) in expected()
    least = train(Model("none", policy), unlimited.choices[0].frontier()[0].peak_bytes)
    assert count(least) in expected(_BLOCK)


@pytest.mark.usefixtures("fake_ranks")
@pytest.mark.parametrize(("policy", "reshard"), [("save all", True), ("recompute all", False)])
def test_parameters_are_not_a_policy_s_to_save(policy: str, reshard: bool) -> None:
    """Operators that gather do what ``reshard_after_forward`` says, although the policy is asked about them, too."""
    captured = train(Model(policy, policy), None, reshard)
    roles = [{role(node) for node in graphs[0].graph_module.graph.nodes} for graphs in (captured.forward, captured.backward)]
    assert [Role.START_GATHER in found for found in roles] == [True, reshard]
    outputs: Any = captured.forward[0].graph_module.graph.output_node().args[0]
    kept = [node for node in outputs if isinstance(node, Node) and role(memory_of(node)) in MAKES_PARAMETERS]
    assert bool(kept) == (not reshard)


# Values


def train_within_budgets(lowering: str, policy: str) -> list[Run]:
    """Train without a budget, with one that is no constraint, and with the least possible one. Runs on every rank."""
    found: list[Run] = []
    budget = None
    for _ in range(3):
        torch._dynamo.reset()
        options = {"lowering": lowering, "memory_budget": budget}
        with capture(passes=False) as captured:
            found.append(train_sharded(_case(policy), fully_shard, {"backend": fsdp_backend, "options": options}))
        budget = captured.choices[0].frontier()[0].peak_bytes if captured.choices else _LARGE
    return found


def train_fsdp2(policy: str) -> Run:
    """Train with FSDP2. Runs on every rank."""
    return train_with(_case(policy), "fsdp2")


def _case(policy: str) -> Case:
    return Case(
        policy, functools.partial(Model, "none", policy), batch=functools.partial(regression_batch, sizes=(256,)), steps=2
    )


@pytest.mark.night
@pytest.mark.parametrize(
    ("policy", "lowering"),
    [("save products", "aot_eager"), ("save tanh", "inductor")],
)
def test_values_are_those_of_fsdp2_with_the_policy(policy: str, lowering: str, rank_pools: RankPools) -> None:
    expected = rank_pools[2].run(train_fsdp2, policy=policy)
    by_rank = rank_pools[2].run(train_within_budgets, lowering=lowering, policy=policy)
    for index in range(3):
        compare([found[index] for found in by_rank], expected, rtol=1e-5)
