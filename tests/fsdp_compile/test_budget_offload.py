"""``options={"memory_budget": ..., "host_budget": ...}``: activations wait on the host to keep to a memory budget."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import CPUOffloadPolicy, fsdp_backend, fully_shard
from fsdp_compile.compiler.options import Options
from fsdp_compile.debug import Capture, capture
from fsdp_compile.explain import Report, explain
from passes.auto.memory_budget import Choice
from passes.auto.step_policy import StepPolicy, Trial
from passes.models.hardware import HostLink, known_hardware
from tests.common import models
from tests.common.copy_engine import CopyEngine, copying
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, regression_batch, train_reference, train_sharded
from tests.fsdp_compile.test_memory_budget import Model, batch, few_trials, shard, step_ns

_LARGE = 1 << 40
#: A bus that carries a layer's activations while the layer is computed, and a device that computes slowly.
_FAST = replace(known_hardware("cuda", "H100"), host=HostLink(1e-6, 50e9, 50e9, 50e9), flops_per_s={"float32": 1e11})


@few_trials
def explained(budget: int | str, host_budget: int | str | None, layers: int = 3, **options: Any) -> Report:
    given = {"memory_budget": budget, "host_budget": host_budget, **options}
    return explain(Model(layers), batch(), (8,), _FAST, shard=shard, options=given, suggest=False)


@functools.cache
def choice(host_budget: int | str | None) -> Choice:
    (found,) = explained(_LARGE, host_budget).choices
    return found


def _offloads(trials: Any) -> list[Trial]:
    return [trial for trial in trials if trial.policy.offloaded]


@pytest.mark.night
def test_steps_that_copy_are_among_the_best() -> None:
    """Steps that copy take fewer bytes than others that take as long. Only they have bytes on the host."""
    without, granted = choice(None), choice(_LARGE)
    assert not _offloads(without.trials) and _offloads(granted.frontier())
    for trial in granted.trials:
        assert bool(trial.policy.offloaded) >= (trial.host_bytes > 0)
    assert set(without.frontier()) <= set(granted.trials)
    best = _offloads(granted.frontier())[-1]
    fitting = [trial.time_ns for trial in without.trials if trial.peak_bytes <= best.peak_bytes]
    assert best.time_ns < min(fitting, default=_LARGE)


@pytest.mark.night
def test_single_activations_are_among_the_best() -> None:
    """A step may offload some of the activations that a region saves. Its report says so."""
    found = explained.__wrapped__(_LARGE, _LARGE, 2).choices[0]  # type: ignore[attr-defined]
    trial = next(one for one in found.frontier() if one.policy.on_device)
    whole = [one for one in found.trials if not one.policy.on_device and one.peak_bytes <= trial.peak_bytes]
    assert trial.time_ns < min(one.time_ns for one in whole)
    assert sum(activation.nbytes for activation in trial.waiting) == trial.host_bytes
    report = explained.__wrapped__(trial.peak_bytes, _LARGE, 2)  # type: ignore[attr-defined]
    assert report.choices[0].chosen == trial
    assert (report.memory.host_bytes, step_ns(report)) == (trial.host_bytes, trial.time_ns)
    some = f"{len(trial.waiting)} of {len(trial.waiting) + len(trial.policy.on_device)} activations"
    assert f"{some} of {len(trial.policy.offloaded)} of 3 regions" in str(report)


@pytest.mark.night
def test_the_host_has_a_budget_as_well() -> None:
    most = max(trial.host_bytes for trial in choice(_LARGE).trials)
    granted = choice(most // 2)
    used = [trial.host_bytes for trial in _offloads(granted.trials)]
    assert 0 < max(used) <= most // 2
    assert not choice(0).trials[0].host_bytes and not _offloads(choice(0).trials)


@pytest.mark.night
def test_the_step_is_the_one_that_was_tried_and_says_so() -> None:
    trial = _offloads(choice(_LARGE).frontier())[-1]
    report = explained(trial.peak_bytes, "1TB")
    assert report.choices[0].chosen == trial
    assert report.memory.peak_bytes + batch().nbytes <= trial.peak_bytes
    assert (report.memory.host_bytes, step_ns(report)) == (trial.host_bytes, trial.time_ns)
    text = str(report)
    assert "wait on the host" in text and f"{len(trial.policy.offloaded)} of {trial.policy.regions} regions" in text


# Graphs are executed here, with an engine whose copies leave NaN where nothing has arrived.


def _train(options: Mapping[str, Any], rows: int = 512) -> tuple[list[Tensor], Capture]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = Model()
    shard(model, init_device_mesh("cpu", (1,)))
    compiled: Callable[..., Tensor] = torch.compile(model, backend=fsdp_backend, options=dict(options))
    with capture() as captured:
        compiled(batch()[:rows]).backward()
    found: list[Any] = [param.grad for param in model.parameters()]
    return [gradient.full_tensor() for gradient in found], captured


@pytest.mark.usefixtures("one_rank")
class TestOneProcess:
    @pytest.mark.night
    @few_trials
    def test_copies_what_the_trial_counts(self) -> None:
        """A step that copies all or some activations, and does not recompute, is equal to the bit to one without a budget."""
        options = {"lowering": "aot_eager", "hardware": _FAST, "host_budget": "1GB"}
        expected, _ = _train({"lowering": "aot_eager"})
        with copying(1e9) as engine:
            _, captured = _train({**options, "memory_budget": _LARGE})
            assert not engine.copies
            trial, partial_offloads = _chosen_to_copy(captured.choices[0]), _in_part(captured.choices[0])
            found, captured = _train({**options, "memory_budget": trial.peak_bytes})
            assert captured.choices[0].chosen == trial
            _copied(engine, trial.host_bytes)
        assert all(map(torch.equal, found, expected))
        with copying(1e9) as engine, _only(partial_offloads.policy):
            found, captured = _train({**options, "memory_budget": _LARGE})
            assert captured.choices[0].trials == (partial_offloads,)
            _copied(engine, partial_offloads.host_bytes)
        assert all(map(torch.equal, found, expected))

    @pytest.mark.night
    def test_without_memory_of_its_own_nothing_waits_elsewhere(self) -> None:
        """On CPU, device and host share a memory."""
        _, captured = _train({"lowering": "aot_eager", "memory_budget": _LARGE, "host_budget": "1GB"})
        assert not _offloads(captured.choices[0].trials)

    @pytest.mark.night
    @few_trials
    def test_larger_batches_keep_to_the_budget_of_the_host(self) -> None:
        """A graph with dynamic sizes also serves batches that fit on the host. Larger batches compile anew."""
        options = {"lowering": "aot_eager", "hardware": _FAST}
        with copying(1e9):
            _, captured = _train({**options, "memory_budget": _LARGE, "host_budget": "1GB"}, rows=256)
            trial = _chosen_to_copy(captured.choices[0])
            torch._dynamo.reset()
            model = Model()
            shard(model, init_device_mesh("cpu", (1,)))
            given = {**options, "memory_budget": 4 * trial.peak_bytes, "host_budget": trial.host_bytes}
            compiled = torch.compile(model, backend=fsdp_backend, options=given, dynamic=True)
            with capture() as captured:
                for rows in (256, 128, 512):
                    compiled(batch()[:rows]).backward()
        for one in captured.choices:
            assert one.chosen.host_bytes <= trial.host_bytes


def _chosen_to_copy(found: Choice) -> Trial:
    """Return a step that a budget chooses, and that copies but does not recompute."""
    return next(one for one in found.frontier() if one.policy.offloaded and not one.policy.recomputed)


def _in_part(found: Choice) -> Trial:
    """Return a step that only copies, and that leaves some of a region's activations on the device."""
    return next(one for one in found.trials if one.policy.on_device and one.waiting)


def _only(policy: StepPolicy) -> AbstractContextManager[Any]:
    """Replace the search, in the block, by a trial of ``policy`` alone."""
    return mock.patch("fsdp_compile.compiler.memory_budget.search", lambda choices, attempt: [attempt(policy)])


def _copied(engine: CopyEngine, nbytes: int) -> None:
    for kind in ("to_host", "to_device"):
        copies = [copy for copy in engine.copies if copy.kind == kind]
        assert len(copies) > 1 and sum(copy.nbytes for copy in copies) == nbytes


# Shards on the host


def shard_on_host(model: nn.Module, mesh: DeviceMesh, on_host: Collection[str] = ("blocks.0", "blocks.2")) -> None:
    for name in ("blocks.0", "blocks.1", "blocks.2", ""):
        offload = {"offload_policy": CPUOffloadPolicy()} if name in on_host else {}
        fully_shard(model.get_submodule(name), mesh=mesh, **offload)


def _explained_on_host(budget: int, on_host: Collection[str]) -> Report:
    sharding = functools.partial(shard_on_host, on_host=on_host)
    with copying():
        # Units on the host and on the device share no collectives.
        options = {"memory_budget": budget, "min_bucket_bytes": 0}
        return explain(Model(), batch(), (8,), _FAST, shard=sharding, options=options, suggest=False)


@pytest.mark.night
@few_trials
def test_shards_on_the_host_leave_room() -> None:
    """Shards, gradients and optimizer state of units on the host do not count. Copies count while they are on the device."""
    ((all_on_device,), (found,)) = (_explained_on_host(_LARGE, names).choices for names in ((), ("blocks.0", "blocks.2")))
    # A block has two weights, three vectors of the width and one of four times the width. On the device, each of the two units
    # holds four tensors: shards, gradients and two of AdamW. Up to two fewer are saved: a copy of the shard is on the device
    # before each gather, and gradients are until they are copied.
    shards = (2 * 4 * 64 * 64 + 3 * 64 + 4 * 64) * 4 // 8
    before = {trial.policy: trial for trial in all_on_device.trials}
    for trial in found.trials:
        assert 2 * 3 * shards - 2 * shards <= before[trial.policy].peak_bytes - trial.peak_bytes <= 2 * 4 * shards
    least = found.frontier()[0]
    report = _explained_on_host(least.peak_bytes, ("blocks.0", "blocks.2"))
    assert report.choices[0].chosen == least
    assert report.memory.peak_bytes + batch().nbytes == least.peak_bytes and step_ns(report) == least.time_ns


# Real ranks.

_CASE = Case("mlp", functools.partial(models.MLP, layers=2), batch=functools.partial(regression_batch, sizes=(2048,)), steps=2)
#: Copies that take almost no time.
_INSTANT = replace(_FAST, kernel_s=1e-9, host=HostLink(1e-9, 1e15, 1e15, 1e15))


@few_trials
def train_with_copies(lowering: str) -> list[Run]:
    """Train without a budget, with one for which regions wait on the host, and with only some of their activations there."""
    without, _, copied = _train_case({"lowering": lowering})
    assert not copied
    given = {"lowering": lowering, "hardware": _INSTANT, "host_budget": "1GB"}
    _, captured, copied = _train_case({**given, "memory_budget": _LARGE})
    assert not copied
    trial, partial_offloads = _chosen_to_copy(captured.choices[0]), _in_part(captured.choices[0])
    within, captured, copied = _train_case({**given, "memory_budget": trial.peak_bytes})
    assert captured.choices[0].chosen == trial and copied
    with _only(partial_offloads.policy):
        partly, captured, copied = _train_case({**given, "memory_budget": _LARGE})
    assert captured.choices[0].chosen == partial_offloads and copied
    return [without, within, partly]


def _train_case(options: Mapping[str, Any]) -> tuple[Run, Capture, bool]:
    torch._dynamo.reset()
    with copying(1e9) as engine, capture(passes=False) as captured:
        run = train_sharded(_CASE, fully_shard, {"backend": fsdp_backend, "options": dict(options)})
    return run, captured, bool(engine.copies)


@pytest.mark.parametrize(
    ("ranks", "lowering"),
    [
        (2, "aot_eager"),
        *(pytest.param(*setting, marks=pytest.mark.night) for setting in [(2, "inductor"), (4, "aot_eager"), (4, "inductor")]),
    ],
)
def test_trains_alike(ranks: int, lowering: str, rank_pools: RankPools) -> None:
    by_rank = rank_pools[ranks].run(train_with_copies, lowering=lowering)
    without, *within = ([runs[index] for runs in by_rank] for index in range(3))
    for copied in within:
        compare(copied, train_reference(_CASE, ranks), rtol=1e-5)
        compare(copied, without, rtol=1e-6)


@few_trials
def train_on_host(lowering: str) -> list[Run]:
    """Train with shards on the host: without a budget, with one that is no constraint, and with the least possible one."""
    runs, budgets = [], [None, _LARGE]
    shards = functools.partial(fully_shard, offload_policy=CPUOffloadPolicy())
    for budget in budgets:
        torch._dynamo.reset()
        compiled = {"backend": fsdp_backend, "options": {"lowering": lowering, "memory_budget": budget}}
        with copying(1e9) as engine, capture(passes=False) as captured:
            runs.append(train_sharded(_CASE, shards, compiled))
        assert engine.copies
        if budget == _LARGE:
            budgets.append(captured.choices[0].frontier()[0].peak_bytes)
    assert len(runs) == 3 and captured.choices[0].chosen.policy.recomputed
    return runs


def train_fsdp2() -> Run:
    offload = CPUOffloadPolicy(pin_memory=False)
    return train_sharded(_CASE, functools.partial(torch.distributed.fsdp.fully_shard, offload_policy=offload), None)


@pytest.mark.night
@pytest.mark.parametrize(("ranks", "lowering"), [(4, "aot_eager"), (2, "aot_eager"), (4, "inductor")])
def test_trains_alike_with_shards_on_the_host(ranks: int, lowering: str, rank_pools: RankPools) -> None:
    by_rank = rank_pools[ranks].run(train_on_host, lowering=lowering)
    without, unlimited, least = ([runs[index] for runs in by_rank] for index in range(3))
    compare(least, rank_pools[ranks].run(train_fsdp2), rtol=1e-5)
    for runs in (unlimited, least):
        compare(runs, without, rtol=1e-6)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_budget": "1GB"}, r"options\['host_budget'\] means something only with options\['memory_budget'\]"),
        ({"memory_budget": 10, "host_budget": -1}, r"options\['host_budget'\] must be .* not -1"),
        ({"memory_budget": 10, "host_budget": 0.5}, r"options\['host_budget'\] must be .* not 0.5"),
        ({"memory_budget": 10, "host_budget": "much"}, r"options\['host_budget'\] must be .* not 'much'"),
    ],
)
def test_options_that_mean_nothing(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Options.parse(options)


@pytest.mark.parametrize(("given", "expected"), [(None, 0), (0, 0), (7, 7), ("2KiB", 2048)])
def test_sizes(given: Any, expected: int) -> None:
    assert Options.parse({"memory_budget": 10, "host_budget": given}).host_budget_bytes == expected
