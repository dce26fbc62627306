"""``options={"memory_budget": ...}``: the chosen step, its accounting, and equal training."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import FSDPModule, fsdp_backend, fully_shard
from fsdp_compile.compiler import memory_budget
from fsdp_compile.compiler.options import Options
from fsdp_compile.debug import Capture, capture
from fsdp_compile.explain import Report, explain
from passes.auto.memory_budget import Choice, graph_peak
from passes.auto.step_policy import RECOMPUTE_CHEAP, SAVE, StepPolicy, Trial
from passes.ir.work import Role, bucket, role
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, regression_batch, train_reference, train_sharded
from tests.common.stored_graphs import storing

_LARGE = 1 << 40
_EAGER: dict[str, Any] = {"lowering": "aot_eager"}


def few_trials(function: Callable[..., Any]) -> Callable[..., Any]:
    """Limit the search in ``function`` to the trials that it begins with."""
    return mock.patch("passes.auto.memory_budget._MOST_NODES", 0)(function)


class Block(nn.Module):
    """Parameters and activations of some tens of KiB each."""

    def __init__(self, width: int = 64):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, depth: int = 3):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])
        self.head = nn.Linear(64, 64)
        self.skipped: int | None = None

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = x if index == self.skipped else block(x)
        return self.head(x).square().mean()


def shard(model: nn.Module, mesh: DeviceMesh, flags: Mapping[str, bool | None] | None = None) -> None:
    """Shard each block and the root, with ``reshard_after_forward`` from ``flags`` by name."""
    given = flags or {}
    for index, block in enumerate(cast("Model", model).blocks):
        fully_shard(block, mesh=mesh, reshard_after_forward=given.get(f"blocks.{index}"))
    fully_shard(model, mesh=mesh, reshard_after_forward=given.get(""))


def batch() -> Tensor:
    return torch.ones(512, 64)


@few_trials
def explained(
    budget: int | str | None, flags: Mapping[str, bool | None] | None = None, model: nn.Module | None = None, **options: Any
) -> Report:
    given = {**options, **({} if budget is None else {"memory_budget": budget})}
    sharding = functools.partial(shard, flags=flags)
    return explain(model or Model(), batch(), (8,), "cpu", shard=sharding, options=given, suggest=False)


@functools.cache
def unlimited() -> Choice:
    (choice,) = explained(_LARGE).choices
    return choice


def step_ns(report: Report) -> int:
    return sum(call.total_ns for call in report.calls)


def budgets() -> list[int]:
    """Return budgets around every trial of the frontier, from the least possible to one that fits all."""
    frontier = [trial.peak_bytes for trial in unlimited().frontier()]
    return sorted({*frontier, *(peak + 1 for peak in frontier), *(peak - 1 for peak in frontier[1:]), _LARGE})


def test_the_fastest_that_fits_is_chosen() -> None:
    """For every budget at which the choice changes, it is the fastest of all trials that fit."""
    trials = unlimited().trials
    assert len({trial.peak_bytes for trial in unlimited().frontier()}) >= 4
    times = []
    for budget in budgets():
        best = min(trial.time_ns for trial in trials if trial.peak_bytes <= budget)
        chosen = Choice.of(trials, budget).chosen
        assert chosen.peak_bytes <= budget and chosen.time_ns == best
        times.append(best)
    assert times == sorted(times, reverse=True) and times[0] > times[-1]


@pytest.mark.night
def test_the_step_is_the_one_that_was_tried_and_explains_itself() -> None:
    frontier = unlimited().frontier()
    middle = next(trial for trial in frontier if trial.policy.recomputed)
    report = explained(middle.peak_bytes)
    (choice,) = report.choices
    assert choice.trials == unlimited().trials and choice.chosen == middle
    # The lowered step by the accounting of reports, which does not count inputs.
    assert report.memory.peak_bytes + batch().nbytes == middle.peak_bytes
    assert step_ns(report) == middle.time_ns
    text = str(report)
    assert "chosen" in text and "too large" in text and f"{len(middle.policy.recomputed)} of 4 regions" in text
    assert " more, the step would be " in text


def _by_hand(trial: Trial) -> Report:
    """Return the report of a trial's step, made by flags and the partitioner's own setting."""
    policy = trial.policy
    flags = {**dict.fromkeys(policy.kept, False), **dict.fromkeys(policy.resharded, True)}
    with torch._functorch.config.patch(activation_memory_budget=policy.activation_budget):
        return explained(None, flags)


@pytest.mark.parametrize("which", [1, 7, *(pytest.param(index, marks=pytest.mark.night) for index in (0, 2, 3, 4, 5, 6))])
def test_trials_are_what_flags_by_hand_give(which: int) -> None:
    by_hand = [trial for trial in unlimited().trials if not trial.policy.recomputed]
    assert {trial.policy.activation_budget for trial in by_hand} == {SAVE, RECOMPUTE_CHEAP}
    report, trial = _by_hand(by_hand[which]), by_hand[which]
    assert (report.memory.peak_bytes + batch().nbytes, step_ns(report)) == (trial.peak_bytes, trial.time_ns)


@pytest.mark.night
def test_reports_have_no_formulae_under_a_budget() -> None:
    with pytest.raises(ValueError, match=r"no formulae for a step under options\['memory_budget'\]"):
        _ = explained(_LARGE).formulae


def gathered(report: Report, call: int) -> set[str]:
    """Return the units that a graph gathers, whose gathers may be merged."""
    assert report._source is not None
    nodes = report._source.calls[call].graph.graph_module.graph.nodes
    return {unit for node in nodes if role(node) is Role.START_GATHER for unit in str(bucket(node)).split("+")}


def test_some_units_stay_gathered() -> None:
    """Units that forward reads last stay gathered; backward gathers only the others."""
    some = next(trial for trial in unlimited().frontier() if 0 < len(trial.policy.kept) < 4)
    report = explained(some.peak_bytes)
    policy = report.choices[0].chosen.policy
    assert 0 < len(policy.kept) < 4 and {*policy.kept, *policy.resharded} == {"", "blocks.2", "blocks.1", "blocks.0"}
    assert gathered(report, 0) == {"blocks.0", "blocks.1", "blocks.2", "root"}
    assert gathered(report, 1) == set(policy.resharded)


@pytest.mark.night
def test_layers_that_are_folded_are_not_compiled_twice(caplog: pytest.LogCaptureFixture) -> None:
    """A budget that is too low does not make repeated layers trace one by one."""
    with pytest.raises(ValueError, match="= 1000 bytes is too low"):
        explained(1000, dict.fromkeys(["", *(f"blocks.{index}" for index in range(8))], True), Model(8))
    assert not [record for record in caplog.records if "traced one by one" in record.message]


def test_what_is_too_little_names_the_least() -> None:
    least = unlimited().frontier()[0].peak_bytes
    with pytest.raises(ValueError, match=rf"= {least - 1} bytes is too low.*needs least needs {least} bytes on each rank"):
        explained(least - 1)


@pytest.mark.night
def test_flags_of_the_user_are_kept() -> None:
    (choice,) = explained(_LARGE, {"blocks.1": True, "blocks.2": False}).choices
    assert {frozenset(trial.policy.kept + trial.policy.resharded) for trial in choice.trials} == {frozenset(["", "blocks.0"])}
    # One unit has to be gathered again.
    assert choice.chosen.time_ns > unlimited().chosen.time_ns


@pytest.mark.night
def test_a_part_of_the_memory_of_a_gpu() -> None:
    """The budget is a part of the pretended device's memory, with an automatic schedule and replicas."""
    options = {"memory_budget": 0.5, "schedule": "auto"}
    report = explain(Model(2), batch(), (2, 4), "h100", shard=shard, options=options, suggest=False)
    (choice,) = report.choices
    assert 35 << 30 < choice.limit < 41 << 30
    assert len(choice.chosen.policy.kept) == 3 and report.memory.peak_bytes + batch().nbytes == choice.chosen.peak_bytes


# Graphs that are lowered and run, over pretended ranks


def sharded(depth: int = 3, flags: Mapping[str, bool | None] | None = None) -> Model:
    model = Model(depth)
    shard(model, init_device_mesh("cpu", (8,), mesh_dim_names=("shard",)), flags)
    return model


def train(model: nn.Module, budget: Any, x: Tensor | None = None) -> tuple[Callable[..., Tensor], Capture]:
    compiled = torch.compile(model, backend=fsdp_backend, options={**_EAGER, "memory_budget": budget})
    with capture() as captured:
        compiled(batch() if x is None else x).backward()
    return compiled, captured


class Attention(Block):
    """Attention with dropout: the partitioner saves the generator's state for a recomputation."""

    def forward(self, x: Tensor) -> Tensor:
        heads = x.view(1, -1, 4, 16).transpose(1, 2)
        attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads, dropout_p=0.1)
        return super().forward(x + attended.transpose(1, 2).reshape(x.shape))


@pytest.mark.usefixtures("fake_ranks")
class TestOneProcess:
    def test_attention_in_a_checkpoint(self) -> None:
        model = Model(1)
        model.blocks[0] = checkpoint_wrapper(Attention())
        shard(model, init_device_mesh("cpu", (8,), mesh_dim_names=("shard",)))
        _, captured = train(model, "1TB")
        assert any("rng_state" in node.name for node in captured.backward[0].graph_module.graph.nodes)
        assert len(captured.choices[0].trials) > 1

    def test_the_next_process_does_not_search(self) -> None:
        def compiled(budget: int = _LARGE, flags: Any = None) -> tuple[int, Choice, list[str]]:
            """Return the number of policies that were tried, the choice, and the code of the graphs."""
            torch._dynamo.reset()
            with mock.patch.object(memory_budget, "graph_peak", wraps=graph_peak) as counted:
                _, captured = train(sharded(1, flags), budget)
            code = [graph.graph_module.code for graph in (*captured.forward, *captured.backward)]
            return counted.call_count // 2, captured.choices[0], code

        with storing():
            tried, choice, code = compiled()
            again = compiled()
            assert again == (again[0], choice, code) and again[0] < tried / 2
            # Trials do not depend on the budget.
            lower = min(trial.peak_bytes for trial in choice.trials)
            count, other, _ = compiled(lower)
            assert count < tried / 2 and other.chosen.peak_bytes == lower and other.trials == choice.trials
            assert compiled(flags={"blocks.0": True})[0] > 2 * again[0]
            for path in Path(cache_dir()).glob("fsdp_compile/trials/*"):
                path.write_bytes(b"damaged")
            assert compiled() == (tried, choice, code)
        assert compiled() == (tried, choice, code)

    @pytest.mark.night
    def test_a_large_budget_keeps_all_and_recomputes_nothing(self) -> None:
        _, captured = train(sharded(), "1TB")
        roles = {role(node) for node in captured.backward[0].graph_module.graph.nodes}
        assert Role.START_GATHER not in roles and Role.START_REDUCE in roles
        assert captured.choices[0].chosen.policy.activation_budget == SAVE

    @pytest.mark.night
    @pytest.mark.units_apart
    @few_trials
    def test_later_plans_are_held_to_the_budget(self) -> None:
        """Full gradients that wait for the second microbatch take more memory than the choice has counted."""
        few = torch.ones(8, 64)
        resharded = {"": True, **{f"blocks.{index}": True for index in range(6)}}
        _, captured = train(sharded(6, resharded), _LARGE, few)
        least = captured.choices[0].frontier()[0].peak_bytes
        for budget in (2 * least, least):
            torch._dynamo.reset()
            model = sharded(6, resharded)
            compiled, _ = train(model, budget, few)
            cast(FSDPModule, model).set_requires_gradient_sync(False)
            model.zero_grad()
            if budget > least:
                compiled(few).backward()
                compiled(few).backward()
            else:
                with pytest.raises(ValueError, match="too low for a backward with the flags that it is called with"):
                    compiled(few).backward()

    @pytest.mark.night
    @few_trials
    def test_larger_batches_are_compiled_anew_where_the_choice_does_not_fit(self) -> None:
        _, captured = train(sharded(), _LARGE)
        budget = captured.choices[0].chosen.peak_bytes
        torch._dynamo.reset()
        compiled = torch.compile(sharded(), backend=fsdp_backend, options={**_EAGER, "memory_budget": budget})

        def choices(rows: int, **maximum: int) -> list[Choice]:
            x = torch.ones(rows, 64)
            torch._dynamo.mark_dynamic(x, 0, **maximum)
            with capture(passes=False) as captured:
                compiled(x).backward()
            return captured.choices

        (first,) = choices(400)
        # The budget is just enough for a batch of this size.
        fitting = batch().size(0)
        assert not choices(200) and not choices(int(0.98 * fitting))
        (second,) = choices(3 * fitting // 2)
        assert second.chosen.policy.recomputed and not first.chosen.policy.recomputed
        assert not choices(fitting + 10)
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=f"= {budget} bytes is too low"):
            choices(100 * fitting)
        torch._dynamo.reset()
        (known,) = choices(16, min=2, max=3 * fitting // 2)
        assert known.chosen.policy == second.chosen.policy and known.chosen.peak_bytes > 0.9 * budget
        assert not choices(3 * fitting // 2)

    def test_larger_batches_for_inference(self) -> None:
        model = sharded()
        compiled = torch.compile(model, backend=fsdp_backend, options={**_EAGER, "memory_budget": 1000})
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as raised:
            compiled(torch.ones(400, 64))
        (needed,) = re.findall(r"which needs (\d+) bytes", str(raised.value))
        torch._dynamo.reset()
        options = {**_EAGER, "memory_budget": int(needed)}
        compiled = torch.compile(model, backend=fsdp_backend, options=options, dynamic=True)
        with torch.no_grad():
            compiled(torch.ones(16, 64))
            compiled(torch.ones(390, 64))
            # The graph is scheduled for 16 rows, so it fits somewhat more than 400 rows, too.
            with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="too low for a forward"):
                compiled(torch.ones(500, 64))

    def test_inference_is_held_to_the_budget(self) -> None:
        compiled = torch.compile(sharded(), backend=fsdp_backend, options={**_EAGER, "memory_budget": 1000})
        with torch.no_grad(), pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="= 1000 bytes is too low"):
            compiled(batch())

    @pytest.mark.parametrize(
        ("assumed", "optimizer_class", "fits"),
        [("adamw", torch.optim.SGD, True), pytest.param("sgd", torch.optim.AdamW, False, marks=pytest.mark.night)],
    )
    def test_the_first_step_tells_what_the_optimizer_keeps(
        self, assumed: str, optimizer_class: Callable[..., torch.optim.Optimizer], fits: bool
    ) -> None:
        """The second step has its own choice: a faster step if there is more room, one with fewer bytes if there is less."""
        states = {"sgd": 0, "adamw": 2 * sum(param.numel() * 4 // 8 for param in Model(1).parameters())}
        _, captured = train(sharded(1), _LARGE)
        torch._dynamo.reset()
        frontier = captured.choices[0].frontier()
        # The fastest step lacks a byte with the assumed state and has room with the real one, or the other way round.
        budget = frontier[-1].peak_bytes - 1 if fits else frontier[-1].peak_bytes - states["adamw"]
        model = sharded(1)
        optimizer = optimizer_class(model.parameters(), lr=0.1)
        options = {**_EAGER, "memory_budget": budget, "optimizer": assumed}
        compiled = torch.compile(model, backend=fsdp_backend, options=options)
        chosen = []
        for _ in range(4):
            with capture(passes=False) as captured:
                compiled(batch()).backward()
            chosen.append([choice.chosen for choice in captured.choices])
            optimizer.step()
            optimizer.zero_grad()
        (first,), (second,), *later = chosen
        assert later == [[], []]
        assert (first.policy == frontier[-1].policy) != fits and (second.policy == frontier[-1].policy) == fits
        assert (second.time_ns < first.time_ns) == fits and second.peak_bytes <= budget
        real = 0 if fits else states["adamw"]
        (as_tried,) = (trial for trial in frontier if trial.policy == second.policy)
        assert second.peak_bytes == as_tried.peak_bytes - states["adamw"] + real

    @pytest.mark.night
    def test_optimizers_are_added_up(self) -> None:
        """Optimizers of parts of the model add up, each from its first step on. One for the whole model replaces them."""
        model = sharded(1)
        _, captured = train(model, _LARGE)
        torch._dynamo.reset()
        names = dict(model.named_parameters())
        shards = {name: param.numel() * 4 // 8 for name, param in names.items()}
        # Room for the momentum of either half, but not for both.
        halves = [[name for name in names if ("up" in name) == is_up] for is_up in (True, False)]
        most = max(sum(map(shards.__getitem__, half)) for half in halves)
        fastest = captured.choices[0].frontier()[-1].peak_bytes - 2 * sum(shards.values())
        options = {**_EAGER, "memory_budget": fastest + most, "optimizer": "sgd"}
        model = sharded(1)
        compiled = torch.compile(model, backend=fsdp_backend, options=options)
        names = dict(model.named_parameters())
        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.SGD([names[name] for name in half], lr=0.1, momentum=0.9) for half in halves
        ]

        def step(stepped: Sequence[torch.optim.Optimizer]) -> list[Choice]:
            with capture(passes=False) as captured:
                compiled(batch()).backward()
            for optimizer in stepped:
                optimizer.step()
            model.zero_grad()
            return captured.choices

        assert len(step(optimizers[:1])) == 1 and not step(optimizers)
        (smaller,) = step(optimizers)
        assert smaller.chosen.peak_bytes <= smaller.limit < smaller.frontier()[-1].peak_bytes
        assert not step(optimizers)
        # Without momentum, there is room for the fastest step again.
        optimizers[:] = [torch.optim.SGD(model.parameters(), lr=0.1)]
        assert not step(optimizers)
        (faster,) = step(optimizers)
        assert faster.chosen == faster.frontier()[-1] and not step(optimizers)

    def test_a_first_step_as_assumed_changes_nothing(self) -> None:
        model = sharded(1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {**_EAGER, "memory_budget": _LARGE, "optimizer": "sgd"}
        compiled = torch.compile(model, backend=fsdp_backend, options=options)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for _ in range(3):
                compiled(batch()).backward()
                optimizer.step()

    @few_trials
    def test_a_forward_may_leave_units_out(self) -> None:
        """Units that a forward leaves out count: shards, gradients from other microbatches, any optimizer state."""
        skipping = sharded(2)
        compiled, of_all = train(skipping, _LARGE)
        skipping.skipped = 1
        with capture() as without:
            compiled(batch()).backward()
        _, smaller = train(sharded(1), _LARGE)
        shard_bytes = sum(storage.nbytes for storage in cast(FSDPModule, skipping.blocks[1])._fsdp_unit.storages.values())
        (choice,), (other,) = without.choices, smaller.choices
        # AdamW's state, which is assumed, takes two more shards.
        expected = [trial.peak_bytes + (2 + 2) * shard_bytes for trial in other.trials]
        assert [trial.peak_bytes for trial in choice.trials] == expected
        assert len(of_all.choices) == 1

    @pytest.mark.parametrize("how", ["block", "graph break", "part with units left out", "nothing sharded"])
    def test_parts_of_a_step_are_refused(self, how: str) -> None:
        model: Any = sharded() if how != "nothing sharded" else Model()
        function: Callable[..., Any] = {"block": lambda x: model.blocks[0](x), "nothing sharded": model}.get(how, model)
        if how == "part with units left out":
            model.skipped = 2
            model.blocks[0].register_forward_hook(lambda *_: torch._dynamo.graph_break())
        if how == "graph break":
            first = model.blocks[0]
            model.blocks[0] = nn.Identity()

            def function(x: Tensor) -> Any:
                x = first(x)
                torch._dynamo.graph_break()
                return model(x)

        message = "no sharded parameter" if how == "nothing sharded" else "uses no parameter of .*without graph breaks"
        compiled = torch.compile(function, backend=fsdp_backend, options={**_EAGER, "memory_budget": _LARGE})
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=message):
            compiled(batch())

    def test_a_part_of_the_memory_of_a_cpu_is_refused(self) -> None:
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=r"= 0\.5 is a part of the.* give bytes"):
            train(sharded(), 0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"memory_budget": 0}, "must be a number of bytes.*not 0"),
        ({"memory_budget": True}, "must be a number of bytes.*not True"),
        ({"memory_budget": 1.5}, "must be a number of bytes.*not 1.5"),
        ({"memory_budget": "80 apples"}, "must be a number of bytes.*not '80 apples'"),
        ({"memory_budget": "0GB"}, "must be a number of bytes.*not '0GB'"),
        ({"memory_budget": 10, "optimizer": "lion"}, "optimizer='lion' is not known"),
        ({"optimizer": "sgd"}, r"options\['optimizer'\] means something only with options\['memory_budget'\]"),
        ({"memory_budget": 10, "cudagraphs": True}, "does not count the memory that CUDA graphs keep"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse(options)


@pytest.mark.parametrize(
    ("given", "expected"),
    [(80, 80), ("80GB", 80 * 10**9), ("1.5 GiB", 3 << 29), ("512kb", 512_000), ("7B", 7)],
)
def test_sizes(given: int | str, expected: int) -> None:
    assert Options.parse({"memory_budget": given}).budget_bytes(torch.device("cpu")) == expected


# Real ranks.

_CASE = Case("mlp", models.MLP, batch=functools.partial(regression_batch, sizes=(256,)), steps=2)


@few_trials
def train_within_budgets(lowering: str) -> list[tuple[Run, StepPolicy | None]]:
    """Train without a budget, with one that is no constraint, and with the least possible one; return runs and policies."""
    found: list[tuple[Run, StepPolicy | None]] = []
    budget = None
    for _ in range(3):
        torch._dynamo.reset()
        options = {"lowering": lowering, "memory_budget": budget}
        with capture(passes=False) as captured:
            run = train_sharded(_CASE, fully_shard, {"backend": fsdp_backend, "options": options})
        found.append((run, captured.choices[0].chosen.policy if captured.choices else None))
        budget = captured.choices[0].frontier()[0].peak_bytes if captured.choices else _LARGE
    return found


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.night)])
def test_budgets_train_alike(lowering: str, rank_pools: RankPools) -> None:
    """Training is as in one process, and as without a budget. All ranks choose the same policies."""
    by_rank = rank_pools[2].run(train_within_budgets, lowering=lowering)
    without, large, least = ([found[index][0] for found in by_rank] for index in range(3))
    for runs in (large, least):
        compare(runs, train_reference(_CASE, 2), rtol=1e-5)
        compare(runs, without, rtol=1e-6)
    policies = [[policy for _, policy in found] for found in by_rank]
    assert policies[0] == policies[1]
    assert [policy and bool(policy.recomputed) for policy in policies[0]] == [None, False, True]
