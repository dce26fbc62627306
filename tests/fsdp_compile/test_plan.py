"""Planning: estimates equal reports, the search finds a plan that fits, printed lines shard as planned, the command names
errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fsdp_compile.explain import explain
from fsdp_compile.explain.depth import Cuts, GraphWork, NodeWork, NotPeriodicError, _Chain
from fsdp_compile.explain.make_report import hardware_of
from fsdp_compile.explain.predict import symbolic_steps
from fsdp_compile.plan.__main__ import build, main
from fsdp_compile.plan.estimate import Estimate, GraphTables, StepTable
from fsdp_compile.plan.policies import ACCUMULATIONS, Policy, path_of_layers
from fsdp_compile.plan.search import Point, Search
from fsdp_compile.plan.winners import check_winner
from passes.models.cost_model import Demand
from tests.common.models import Block

_SCRIPT = """
import torch
from tests.fsdp_compile.test_plan import Model


def model():
    return Model(), torch.empty(2, 8, dtype=torch.long)


def number():
    return 3


not_callable = 1
"""


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Block(32, 64) for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


class Residual(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Deep(nn.Module):
    """A model of equal layers; ``reads_again`` adds to one in the middle the input of the first."""

    def __init__(self, depth: int, *, reads_again: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(Residual(32, 64) for _ in range(depth))
        self.reads_again = reads_again

    def forward(self, tokens: Tensor) -> Tensor:
        x = first = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x + first if self.reads_again and index == 5 else x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def given() -> tuple[nn.Module, Tensor]:
    with torch.device("meta"):
        return Model(), torch.empty(2, 8, dtype=torch.long)


@pytest.fixture
def script(tmp_path: Path) -> Iterator[str]:
    path = tmp_path / "planned_model.py"
    path.write_text(_SCRIPT)
    yield str(path)
    sys.modules.pop(path.stem, None)


@pytest.mark.units_apart
@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(Policy(False, True, False), marks=pytest.mark.night),
        pytest.param(Policy(True, 8, True, "kept", param_dtype=torch.bfloat16), marks=pytest.mark.night),
        Policy(True, False, False, "each"),
        pytest.param(Policy(False, True, True, "last"), marks=pytest.mark.night),
    ],
    ids=str,
)
def test_estimates_what_a_report_says(policy: Policy) -> None:
    model, tokens = given()
    hardware = hardware_of("h100")
    mesh_shape = (2, 16) if policy.has_replicas else (16,)
    explained = explain(model, tokens, mesh_shape, hardware, shard=policy.shard, step=policy.step, suggest=False)
    table = StepTable(explained._derivation()._step, hardware, "adamw", GraphTables())
    for sizes in ({}, {"S": 32, "B": 6}, {"S": 48, "T": 5}, {"M": 9} if policy.accumulation != "none" else {}):
        report, estimate = explained.at(**sizes), table.at(sizes)
        # A kernel that only pads is rounded together with another one.
        assert estimate.time_s * 1e9 == pytest.approx(report.time_ns, rel=1e-3)
        assert sum(estimate.exposed_s.values()) * 1e9 == pytest.approx(report.exposed_ns, rel=1e-3, abs=10)
        assert estimate.peak_bytes == pytest.approx(report.memory.peak_bytes, rel=1e-3)


def tables(policies: Sequence[Policy], model: nn.Module, cuts: Cuts | None) -> list[StepTable]:
    """Trace policies that differ in the way to accumulate."""
    hardware, first = hardware_of("h100"), policies[0]
    tokens = torch.empty(2, 8, dtype=torch.long, device="meta")
    mesh_shape = (2, 16) if first.has_replicas else (16,)
    each = [policy.step for policy in policies]
    steps = symbolic_steps(model, tokens, mesh_shape, hardware, each, shard=first.shard, cuts=cuts)
    graphs = GraphTables(cuts)
    return [StepTable(step, hardware, "adamw", graphs) for step in steps]


@pytest.mark.units_apart
@pytest.mark.parametrize(
    ("policy", "accumulations"),
    [
        (Policy(True, True, False), ["last"]),
        pytest.param(Policy(True, True, True), ACCUMULATIONS, marks=pytest.mark.night),
        pytest.param(Policy(False, True, False), ACCUMULATIONS, marks=pytest.mark.night),
        pytest.param(Policy(False, False, True), ACCUMULATIONS, marks=pytest.mark.night),
        pytest.param(Policy(True, 8, False), ACCUMULATIONS, marks=pytest.mark.night),
    ],
    ids=str,
)
def test_layers_left_out_count(policy: Policy, accumulations: Sequence[str]) -> None:
    """A trace of eight layers gives the estimates of ten to the last digit: times, waits and memory."""
    with torch.device("meta"):
        model = Deep(10)
    policies = [replace(policy, accumulation=accumulation) for accumulation in accumulations]
    cuts = Cuts()
    for whole, cut in zip(tables(policies, model, None), tables(policies, model, cuts), strict=True):
        for sizes in ({}, {"S": 48, "B": 6}, {"S": 2, "T": 5}, {"M": 9} if "M" in whole.own else {}):
            assert cut.at(sizes) == whole.at(sizes)
    assert cuts.copies == {"blocks.4": 2}


@pytest.mark.units_apart
def test_traces_all_layers_where_some_differ() -> None:
    cuts = Cuts()
    with torch.device("meta"):
        models = [Deep(8), Deep(10, reads_again=True)]
    for model in models:
        tables([Policy(False, True, False)], model, cuts)
    assert cuts.copies == {}


def test_layers_that_share_a_bucket_tell_nothing_of_others() -> None:
    with torch.device("meta"):
        model = Deep(9)
    with pytest.raises(NotPeriodicError):
        tables([Policy(False, True, False)], model, Cuts())


@pytest.mark.night
def test_traces_all_layers_that_share_a_bucket() -> None:
    with torch.device("meta"):
        model = Deep(9)
    policies = [Policy(False, True, False)]
    told: list[str] = []
    tokens = torch.empty(2, 8, dtype=torch.long, device="meta")
    search = Search(model, tokens, hardware_of("h100"), 64, 1e9, policies[0], tell=told.append)
    table = search._table(policies[0])
    assert table is not None
    assert table.at({}) == tables(policies, model, None)[0].at({})
    assert told[-2] == "equal layers share buckets or differ in their place: all of them are traced"


def test_refuses_layers_that_do_different_work() -> None:
    """The work of layers that are left out is not known if no two of the others do the same."""
    work = [NodeWork(Demand(launches=1, moved_bytes=size), f"blocks.{index}", None, ()) for index, size in enumerate(range(8))]
    cuts = Cuts()
    cuts._chains.append(_Chain(frozenset(f"blocks.{index}" for index in range(8)), 8, 3))
    with pytest.raises(NotPeriodicError):
        cuts.whole(GraphWork(work, []), {f"blocks.{index}": f"blocks.{index}" for index in range(8)})


@pytest.mark.night
def test_finds_the_fastest_that_fits() -> None:
    model, tokens = given()
    search = Search(model, tokens, hardware_of("h100"), 64, 1e9, Policy(False, True, False))
    # Leave only one policy, so that little is traced.
    search._first = lambda: iter([search.base])  # type: ignore[method-assign]
    search._neighbours = lambda policy: iter([policy])  # type: ignore[method-assign]
    (best,) = search.best(8, 1)
    assert (best.shards, best.replicas, best.batch, best.microbatches) == (8, 1, 8, 1)
    search.memory_bytes = best.estimate.peak_bytes - 1
    assert search.best(8) == []
    least = search.least_memory(8)
    assert least is not None
    assert least.estimate.peak_bytes == best.estimate.peak_bytes


@pytest.mark.parametrize("accumulation", ["last", pytest.param("kept", marks=pytest.mark.night)])
def test_winners_repeat_microbatches_that_do_the_same(accumulation: str) -> None:
    model, tokens = given()
    policy = Policy(False, True, False, accumulation)
    search = Search(model, tokens, hardware_of("h100"), 8 * 2 * 7, 1e9, policy)
    point = Point(policy, 8, 1, 2, 7, Estimate(1.0, {}, 0.0, 0))
    winner = check_winner(search, point)
    step = partial(policy.accumulate, 7)
    reports = [
        explain(model, tokens, (8,), "h100", shard=policy.shard, step=step, options={"schedule": schedule}, suggest=False)
        for schedule in ("default", "auto")
    ]
    assert {str(report) for report in (winner.report, winner.other)} == {str(report) for report in reports}


def test_lines() -> None:
    lines = Policy(True, 8, True, "kept", "auto", torch.bfloat16, torch.float32).lines(16, 4, 6, "model.blocks")
    assert lines == [
        'mesh = init_device_mesh("cuda", (4, 16), mesh_dim_names=("replicate", "shard"))',
        "precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)",
        "for block in model.blocks:",
        "    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)",
        "    fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=8)",
        "fully_shard(model, mesh=mesh, mp_policy=precision)",
        'compiled = torch.compile(model, backend=fsdp_backend, options={"schedule": "auto"})',
        "for index in range(6):",
        "    model.set_requires_gradient_sync(index == 5)",
        "    model.set_reshard_after_backward(index == 5)",
        "    compiled(*microbatch(index)).backward()",
    ]


@pytest.mark.inductor
def test_lines_shard_as_the_plan_does(one_rank: None) -> None:
    policy = Policy(False, False, True, "last", "auto", torch.bfloat16)
    model = Model()
    assert path_of_layers(model) == "model.blocks"
    text = "\n".join(policy.lines(1, 1, 4, path_of_layers(model)))
    names = (
        "import functools\nimport torch\nfrom torch.distributed.device_mesh import init_device_mesh\n"
        "from torch.distributed.fsdp import MixedPrecisionPolicy\nfrom torch.utils.checkpoint import checkpoint\n"
        "from fsdp_compile import fsdp_backend, fully_shard\n"
    )
    tokens = torch.zeros(2, 8, dtype=torch.long)
    seen: list[int] = []

    def microbatch(index: int) -> tuple[Tensor]:
        seen.append(index)
        return (tokens,)

    torch.compiler.reset()
    scope: dict[str, Any] = {"model": model, "microbatch": microbatch}
    exec(names + text.replace('"cuda"', '"cpu"'), scope)
    assert seen == [0, 1, 2, 3]
    assert all(param.grad is not None for param in model.parameters())
    assert all(block._fsdp_unit.mp_policy.param_dtype is torch.bfloat16 for block in model.blocks)  # type: ignore[union-attr]


def test_builds_what_a_function_gives(script: str) -> None:
    model, tokens = build(f"{script}:model")
    assert type(model) is Model
    assert tokens.is_meta
    for target, message in (
        (script, "names no function"),
        (f"{script}:absent", "has no function absent"),
        (f"{script}:not_callable", "has no function not_callable"),
        (f"{script}:number", "has to return a model .* and its inputs, not int"),
        ("absent.py:model", "There is no file absent.py"),
        ("absent_module:model", "There is no module absent_module"),
    ):
        with pytest.raises(ValueError, match=message):
            build(target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--hardware", "abacus"], "'abacus' is not known"),
        (["--gpus", "1"], "at least two GPUs"),
        (["--param-dtype", "bfloat15"], "no dtype of torch"),
        (["--hardware", "cpu"], "--memory has to be given for cpu"),
    ],
)
def test_says_what_is_wrong(script: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([f"{script}:model", "--global-batch", "64", *arguments])
    assert message in capsys.readouterr().err


@pytest.mark.night
def test_plans(script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "plan.png"
    main([f"{script}:model", "--gpus", "8,16,24", "--global-batch", "64", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert printed.count("Traced: ") == 2
    assert "24 GPUs: nothing fits in 72 GiB. 24 GPUs do not divide a global batch of 64." in printed
    assert "fully_shard(block, mesh=mesh, reshard_after_forward=" in printed
    assert picture.stat().st_size > 1000
