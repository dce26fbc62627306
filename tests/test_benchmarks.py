"""The arithmetic of the benchmarks, and one cheap run of those that measure a step."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import compile_time
import gpu_check
import memory
import optimizer_step
import prediction
import published
import pytest
import step_time
import torch
from harness import allocations, device_profile, host, layer_kinds, link, parity, phases, ranks, report, rounds
from harness.gpt import Size, make_batches
from harness.layer_kinds import KINDS
from harness.systems import Setting, build
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

pytestmark = pytest.mark.example

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
TINY = ["--layers", "2", "--width", "64", "--heads", "2", "--lowering", "aot_eager"]


def run(script: str, out: Path, *flags: str) -> dict[str, Any]:
    command = [sys.executable, str(BENCHMARKS / script), *flags, "--json", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(out.read_text())


@pytest.mark.parametrize("script", ["main_job.py", "training_losses.py"])
def test_one_line_says_what_to_install(script: str) -> None:
    code = f"import runpy, sys; sys.modules['tqdm'] = None; sys.argv = [{script!r}]; sys.path.insert(0, {str(BENCHMARKS)!r}); "
    code += f"runpy.run_path({str(BENCHMARKS / script)!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stderr == f"{script} needs tqdm: pip install -c constraints.txt -e '.[examples]'\n"


def test_step_time_runs_systems_side_by_side(tmp_path: Path) -> None:
    flags = ["--systems", "unsharded,fsdp2-compiled,ours", "--batch", "1", "--sequence", "16", "--rounds", "2", "--steps", "1"]
    flags += ["--microbatches", "2", "--accumulate", "unsharded", "--keep-unsharded"]
    results = run("step_time.py", tmp_path / "out.json", *TINY, *flags)
    assert [len(rank["seconds"][name]) for rank in results["ranks"] for name in rank["seconds"]] == [2] * 6
    # The script itself compares losses with the unsharded model. Losses that fall show that it compared real training.
    losses = results["ranks"][0]["losses"]["ours"]
    assert losses[0] > losses[1] > losses[2]
    assert results["summary"]["fsdp2-compiled"]["ratio"] in (1.0, None)


@pytest.mark.night
def test_faults_end_in_errors(tmp_path: Path) -> None:
    flags = ["--systems", "fsdp2,aot_eager", "--states", "backward", "--faults", "kill"]
    runs = run("faults.py", tmp_path / "out.json", *flags)["runs"]
    runs += run("faults.py", tmp_path / "out.json", "--systems", "eager", "--states", "hook", "--faults", "caught")["runs"]
    assert [(found["system"], found["victim"], found["how"]) for found in runs] == [
        (system, victim, "error") for system in ("fsdp2", "aot_eager", "eager") for victim in (0, 1)
    ]
    # The timeout of the group is 20 s.
    assert all(found["seconds"] < 15 for found in runs)


@pytest.mark.night
def test_explain_time_measures_each_column(tmp_path: Path) -> None:
    seconds = run("explain_time.py", tmp_path / "out.json", "--models", "tiny", "--skip", "plan")["seconds"]["tiny"]
    assert seconds.keys() == {"explain", "suggest", "formulae", "budget", "again"}
    assert all(taken > 0 for taken in seconds.values())


@pytest.mark.night
def test_training_losses_compares_ways_seed_by_seed(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    flags = ["--ways", "full,int8-reductions", "--seeds", "0", "--steps", "3", "--lowering", "aot_eager"]
    results = run("training_losses.py", out, *flags)
    runs = {name: seeds["0"] for name, seeds in results["runs"].items()}
    assert [len(found["losses"]) for found in runs.values()] == [3, 3]
    # Weights and batches are equal; only gradients differ.
    assert runs["full"]["losses"][0] == runs["int8-reductions"]["losses"][0]
    assert 0 < abs(runs["full"]["losses"][2] - runs["int8-reductions"]["losses"][2]) < 0.01
    assert runs["int8-reductions"]["sent"] < runs["full"]["sent"]
    # A second run makes no run again that the file has.
    made = out.stat().st_mtime_ns
    picture = tmp_path / "losses.png"
    run("training_losses.py", out, *flags, "--picture", str(picture))
    assert out.stat().st_mtime_ns == made and picture.stat().st_size > 10_000


@pytest.mark.night
def test_memory_counts_what_the_library_accounts_for(tmp_path: Path) -> None:
    results = run("memory.py", tmp_path / "out.json", *TINY, "--systems", "ours", "--width", "256")
    found = memory.comparisons(results["ranks"])
    for comparison in found.values():
        assert abs(comparison.error) < 0.05
    # Activations are small, so a forward holds the parameters of two blocks of width 256. One of them is being copied out.
    forward = found["ours", "forward"]
    assert forward.parameters == pytest.approx(forward.accounted, rel=0.01)


@pytest.mark.night
def test_budgets_hold_in_counted_allocations(tmp_path: Path) -> None:
    """Budgets range from the least possible to one without effect. Activations are large enough to matter."""
    flags = ["--layers", "3", "--width", "128", "--batch", "8", "--sequence", "128"]
    (found,) = run("memory_budget.py", tmp_path / "out.json", *flags)["ranks"]
    assert len(found) == 3 and found[0]["budget"] < 0.6 * found[2]["budget"]
    for one in found:
        assert one["accounted"] <= one["budget"] and 0.9 * one["accounted"] < one["counted"] < 1.02 * one["budget"]
    # A larger budget buys a shorter step.
    times = [one["predicted_ns"] for one in found]
    assert times == sorted(times, reverse=True)
    # The largest budget may still recompute a region, if the cost model says that it costs nothing.
    assert found[0]["recomputed"] > found[2]["recomputed"] <= 1


@pytest.mark.night
def test_budgets_choose_the_best_of_small_graphs(tmp_path: Path) -> None:
    """Runs one graph without a host and one with; the published results are of two hundred."""
    found = run("budget_search.py", tmp_path / "out.json", "--graphs", "1")["graphs"]
    found += run("budget_search.py", tmp_path / "out.json", "--host", "--first", "2", "--graphs", "1")["graphs"]
    assert len(found) == 2
    for one in found:
        assert one["tried"]["grid"] < one["tried"]["search"] < one["tried"]["all"]
        assert one["search"]["drawn"] == 0 and max(one["search"]["every"]) <= 0.05


@pytest.mark.night
def test_prediction_compares_a_step_with_what_is_said_of_it(tmp_path: Path) -> None:
    results = run("prediction.py", tmp_path / "out.json", "--quick", "--rounds", "1")
    row = results["rows"]["quick"]
    # Memory is counted, so it is exact except for what is not a tensor; the model is tiny. Others use the machine: times vary.
    assert row["memory"]["predicted"] == pytest.approx(row["memory"]["measured"], rel=0.1)
    assert all(0 < row[what]["predicted"] < 1 and row[what]["measured"] > 0 for what in ("step", "unsharded"))


@pytest.mark.night
def test_fsdp2_tests_count_what_passes(tmp_path: Path) -> None:
    """Systems with whole parameters, sharded ones and compiled ones are told apart."""
    file = tmp_path / "test_fully_shard_example.py"
    file.write_text(
        "from torch import nn, ones\n"
        "from torch.distributed.fsdp import fully_shard\n"
        "from torch.testing._internal.common_fsdp import FSDPTest\n"
        "class TestExample(FSDPTest):\n"
        "    def test_trains(self):\n"
        "        model = fully_shard(nn.Linear(4, 4))\n"
        "        model(ones(2, 4)).sum().backward()\n"
        "        self.assertEqual(model.bias.grad.full_tensor(), 2 * ones(4))\n"
        "    def test_is_torchs(self):\n"
        "        self.assertTrue(fully_shard(nn.Linear(4, 4))._get_fsdp_state()._lazy_init)\n"
    )
    results = run("fsdp2_tests.py", tmp_path / "out.json", str(file), "--systems", "fsdp2,ours,ours-compiled")
    assert {(each["system"], each["name"]): each["result"] for each in results["outcomes"]} == {
        ("fsdp2", "test_trains"): "passed",
        ("fsdp2", "test_is_torchs"): "passed",
        ("ours", "test_trains"): "passed",
        ("ours", "test_is_torchs"): "failed",
        ("ours-compiled", "test_trains"): "passed",
        ("ours-compiled", "test_is_torchs"): "failed",
    }


@pytest.mark.night
def test_gpu_check_runs_dry(tmp_path: Path) -> None:
    results = run("gpu_check.py", tmp_path / "out.json", "--dry-run", "--checks", "time", "--rounds", "1")
    assert results["complaints"] == []
    # A gather over pretended ranks copies this rank's shard, so losses show whether all systems gather the same.
    losses = {name: found["loss"] for name, found in results["time"]["systems"].items()}
    assert losses["ours"] == pytest.approx(losses["fsdp2"], rel=1e-5) and losses["ours"] != losses["unsharded"]
    # Distance from the gradients of steps without a recording.
    assert results["time"]["graphs"]["ours-cudagraphs"]["distance"] < 1e-6
    # On a CPU, memory of the host counts as well.
    optimizers = results["time"]["optimizers"]
    assert optimizers["offload_optimizer"]["said_held"] == 0 < optimizers["flat_optimizer"]["held"]
    assert optimizers["offload_optimizer"]["said_peak"] > 0 and len(optimizers["offload_optimizer"]["times"]) == 1


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--systems", "ours,zero"], "no such system: zero"),
        (["--group", "nccl"], "--group nccl needs --device cuda"),
        (["--group", "fake", "--link", "2gbit"], "--link is for --group gloo"),
        (["--keep-unsharded"], "--keep-unsharded needs --microbatches"),
        (["--accumulate", "unsharded"], "--accumulate unsharded needs --microbatches"),
    ],
)
def test_flags_that_make_no_sense(flags: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        step_time.parse_args(flags)
    assert complaint in capsys.readouterr().err


def test_ratio_is_the_median_of_the_rounds() -> None:
    unsharded, fsdp2, ours = [1.0, 2.0, 1.0], [2.0, 6.0, 3.0], [1.5, 3.0, 1.5]
    assert step_time.overhead_ratio(ours, unsharded, fsdp2) == 0.25
    summary = step_time.summarize({"unsharded": unsharded, "fsdp2-compiled": fsdp2, "ours": ours})
    assert summary["ours"] == step_time.Summary(median=1.5, least=1.5, most=3.0, ratio=0.25)
    assert summary["unsharded"].ratio == 0 and summary["fsdp2-compiled"].ratio == 1
    assert step_time.summarize({"ours": ours})["ours"].ratio is None


def test_ratio_is_undefined_when_the_yardstick_costs_nothing() -> None:
    assert step_time.overhead_ratio([1.5, 1.5], [1.0, 1.0], [2.0, 1.0]) is None


def test_a_round_takes_as_long_as_its_slowest_rank() -> None:
    assert rounds.slowest([[1.0, 4.0], [2.0, 3.0]]) == [2.0, 4.0]


def test_losses_are_compared_with_the_model_in_one_piece() -> None:
    ranks = [{"reference_losses": [3.0, 2.0], "losses": {"unsharded": [2.5, 9.0], "ours": [2.5, 1.5]}}]
    ranks.append({"reference_losses": [3.0, 2.0], "losses": {"unsharded": [3.5, 9.0], "ours": [3.5, 2.5]}})
    step_time.check_losses(ranks)
    ranks[1]["losses"]["ours"][1] = 2.51
    with pytest.raises(RuntimeError, match=r"ours has a loss of 2.005 in step 1, but the model in one piece has 2.0"):
        step_time.check_losses(ranks)


def test_growth_is_between_the_least_and_the_largest_depth() -> None:
    assert compile_time.growth_per_layer({8: 10.0, 16: 11.0, 32: 22.0}) == 0.5
    assert compile_time.growth_per_layer({8: 10.0}) == 0.0


def test_time_belongs_to_the_innermost_phase(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    watch = phases.Stopwatch()
    script = [("start", "dynamo", 1), ("start", "bytecode_tracing", 2), ("start", "inductor_compile", 4)]
    script += [("stop", "inductor_compile", 8), ("stop", "bytecode_tracing", 16), ("stop", "dynamo", 32)]
    for method, event, seconds in script:
        now += seconds
        getattr(watch, method)(event)
    assert {phase: seconds for phase, seconds in watch.seconds.items() if seconds} == {
        "running": 1,
        "Dynamo": 2 + 4 + 16 + 32,
        "Inductor lowering": 8,
    }
    with pytest.raises(RuntimeError, match="'dynamo' ends while another is open"):
        watch.stop("dynamo")


def test_phases_of_a_compilation_sum_to_its_time() -> None:
    with phases.timed() as seconds:
        began = time.perf_counter()
        torch.compile(lambda x: x.sin().sum(), backend="aot_eager")(torch.ones(3, requires_grad=True)).backward()
        elapsed = time.perf_counter() - began
    assert sum(seconds.values()) == pytest.approx(elapsed, rel=0.05)
    assert seconds["Dynamo"] > 0 and seconds["joint trace"] > 0 and seconds["fsdp passes"] == 0


def test_link_refuses_what_it_cannot_make(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(link.LinkError, match="'2gbit' or '500mbit', not '2 Gbit/s'"), link.make_link("2 Gbit/s"):
        pass
    monkeypatch.setattr(shutil, "which", lambda program: None if program == "tc" else program)
    with pytest.raises(link.LinkError, match="a shaped link needs tc of iproute2"), link.make_link("2gbit"):
        pass
    monkeypatch.setattr(shutil, "which", lambda program: program)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(link.LinkError, match="a shaped link needs root"), link.make_link("2gbit"):
        pass


def test_link_takes_namespaces_away_also_on_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    def run(command: list[str], **kwargs: Any) -> subprocess.CompletedProcess[str]:
        commands.append(list(command))
        return subprocess.CompletedProcess(command, returncode=command[0] == "tc", stderr="no such qdisc")

    monkeypatch.setattr(link, "_check", lambda rate: None)
    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(link.LinkError, match=r"rate 2gbit .* failed: no such qdisc"), link.make_link("2gbit"):
        pass
    added = [command[3] for command in commands if command[:3] == ["ip", "netns", "add"]]
    deleted = [command[3] for command in commands if command[:3] == ["ip", "netns", "del"]]
    assert added == deleted and len(set(added)) == 2


def test_allocations_are_counted_in_all_threads(tmp_path: Path) -> None:
    program = """
import sys, threading, torch
sys.path.append(sys.argv[1])
from harness import allocations

kept = []
def keep(): kept.append(torch.empty(3_000_000, dtype=torch.uint8))
def use(): torch.empty(2_000_000, dtype=torch.uint8)
def in_thread(function): thread = threading.Thread(target=function); thread.start(); thread.join()
print(*allocations.peaks([keep, use, lambda: in_thread(keep), lambda: in_thread(kept.clear)], torch.device("cpu")))
"""
    environment = {**os.environ, **allocations.preload(tmp_path)}
    command = [sys.executable, "-c", program, str(BENCHMARKS)]
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    assert [int(peak) / 1e6 for peak in printed.split()] == pytest.approx([3, 5, 6, 6], rel=0.01)


def test_predictions_are_compared_with_the_slower_rank() -> None:
    said = {"step": 2.2, "unsharded": 1.0, "memory": 90}
    ranks = [
        {"configurations": {"a": {"predicted": said, "memory": memory, "seconds": {"ours": ours, "unsharded": alone}}}}
        for memory, ours, alone in ((100, [2.0, 2.0, 9.0], [1.0, 1.0, 1.0]), (80, [1.0, 2.1, 1.0], [0.5, 1.5, 0.5]))
    ]
    row = prediction.comparisons(ranks)["a"]
    assert row["step"] == prediction.Comparison(2.1, 2.2) and row["unsharded"] == prediction.Comparison(1.0, 1.0)
    # The median of the rounds: 1, 0.6, 8.
    assert row["added"].measured == pytest.approx(1.0) and row["added"].error == pytest.approx(0.2)
    assert row["memory"].error == pytest.approx(-0.1)


def test_goals_count_configurations() -> None:
    rows = {str(index): {"step": prediction.Comparison(1.0, 1.05 if index < 5 else 1.15)} for index in range(6)}
    assert prediction.Goal("step", 0.1, 10).met(rows) == (5, True)
    assert prediction.Goal("step", 0.1, 11).met(rows) == (5, False)
    assert prediction.Goal("step", 0.2, 12).met(rows) == (6, True)


def test_configurations_are_selected() -> None:
    assert len(prediction.parse_args([]).configurations) >= 12
    assert list(prediction.parse_args(["--only", "thin,1gbit"]).configurations) == ["thin", "1gbit"]
    assert {one.link for one in prediction.parse_args(["--link", "4gbit"]).configurations.values()} == {"4gbit"}
    assert list(prediction.parse_args(["--quick"]).configurations) == ["quick"]


def device_event(category: str, correlation: int, begin: float, end: float) -> dict[str, Any]:
    return {"ph": "X", "cat": category, "ts": begin, "dur": end - begin, "args": {"correlation": correlation}}


def test_activity_counts_time_on_the_device_once() -> None:
    events = [
        # Two streams side by side, then a graph of two kernels, each after a pause.
        device_event("kernel", 1, 0, 1000),
        device_event("kernel", 2, 500, 2000),
        device_event("gpu_memset", 3, 700, 800),
        device_event("gpu_memcpy", 4, 1000, 5000),
        device_event("kernel", 5, 6000, 7000),
        device_event("kernel", 5, 8000, 9000),
        # Not counted: the call on the host, the profiler's annotation, an event without a duration.
        device_event("cuda_runtime", 1, 0, 10),
        device_event("gpu_user_annotation", 0, 0, 9000),
        {"ph": "i", "cat": "kernel", "ts": 0},
    ]
    found = device_profile.read_trace(events, runs=2)
    assert found == device_profile.Activity(kernel_ms=2.0, copy_ms=2.0, kernels=2.5, copies=0.5, launches=2.5)


def test_first_difference_of_code() -> None:
    assert gpu_check.first_difference([["a", "b"]], [["a", "b"]]) is None
    assert gpu_check.first_difference([["a"]], []) == "1 graphs, but 0 without a GPU"
    assert "different at 1 in graph 0:\n  here:          b\n  without a GPU: c" in str(
        gpu_check.first_difference([["a", "b"]], [["a", "c"]])
    )
    assert "here:          nothing" in str(gpu_check.first_difference([["a"]], [["a", "b"]]))


def test_parity_tolerates_rounding_alone() -> None:
    assert parity.Comparison(ours=1e-6, fsdp2=0.0).agrees and not parity.Comparison(ours=1e-3, fsdp2=0.0).agrees
    assert parity.Comparison(ours=2e-2, fsdp2=2e-2).agrees and not parity.Comparison(ours=0.5, fsdp2=2e-2).agrees
    assert not parity.Comparison(ours=math.nan, fsdp2=0.0).agrees


def time_of_systems(**ours: float) -> dict[str, Any]:
    activity = {"kernel_ms": 10.0, "copy_ms": 0.0, "kernels": 5.0, "copies": 0.0, "launches": 5.0}
    system = {"loss": 1.0, "times": [{"wall": 12.0, "host": 1.0}], "activity": activity, "held": 100, "peak": 50}
    mine = {**system, "loss": ours.get("loss", 1.0), "activity": {**activity, "kernel_ms": ours.get("kernel_ms", 10.4)}}
    mine |= {"times": [{"wall": wall, "host": 1.0} for wall in (11.0, 10.0, 30.0)], "peak": 49}
    systems = {"unsharded": system, "fsdp2-compiled": system, "fsdp2": system, "ours": mine}
    said = {"said_held": 0, "said_peak": 1 << 20}
    optimizers = {"flat_optimizer": system, "offload_optimizer": {**system, **said, "peak": ours.get("step", 1 << 20)}}
    return {"device": "cuda", "systems": systems, "optimizers": optimizers, "graphs": {}}


def test_goals_of_a_gpu() -> None:
    met = {what: reached for what, _, _, reached in gpu_check.goals(gpu_check.summarize(time_of_systems()))}
    assert met == {"device ms": True, "wall": True, "launches": False, "peak": True}
    assert not gpu_check.goals(gpu_check.summarize(time_of_systems(kernel_ms=10.6)))[0][3]


def test_gpu_check_complains_of_worthless_figures() -> None:
    assert gpu_check.time_complaints(time_of_systems()) == []
    assert [text[:26] for text in gpu_check.time_complaints(time_of_systems(loss=1.2))] == [
        "time: the loss of fsdp2-co",
        "time: the loss of fsdp2 is",
    ]
    assert "time: the loss of ours is nan" in gpu_check.time_complaints(time_of_systems(loss=math.nan))[-1]
    (complaint,) = gpu_check.time_complaints(time_of_systems(step=1 << 26))
    assert complaint == "time: offload_optimizer: peak 67108864 bytes, said 1048576"
    result = time_of_systems() | {"graphs": {"ours": {"error": "cannot"}}}
    assert gpu_check.time_complaints(result) == ["time: ours: no CUDA graph"]
    result["systems"]["unsharded"]["activity"]["kernels"] = 0.0
    assert "the profiler saw no kernel" in gpu_check.time_complaints(result)[-1]


@pytest.fixture
def small_setting(one_rank: None) -> Setting:
    size = replace(parity.SIZE, layers=1, width=64, hidden=64, sequence=16, attention=False)
    return Setting(size, init_device_mesh("cpu", (1,)), torch.device("cpu"), lowering="aot_eager")


def test_updates_on_the_host_are_compared(small_setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """States on the host give equal updates, and different ones if a copy is lost."""
    assert host.optimizer_parity(small_setting) == {"ours": 0.0, "fsdp2": 0.0}
    monkeypatch.setattr(host._AtOnce, "write_back", lambda self, values, targets: host._Done())
    assert not parity.Comparison(**host.optimizer_parity(small_setting)).agrees


def test_states_that_are_not_on_the_host_are_noticed(small_setting: Setting) -> None:
    model = build("ours", small_setting).model
    optimizers = host.Optimizers.of([*model.parameters()], [*model.parameters()])
    for param in optimizers.twins:
        optimizers.offloaded.state[param]["exp_avg"] = DTensor(
            torch.empty(param.shape, device="meta"), param._spec, requires_grad=False
        )
    with pytest.raises(RuntimeError, match="states are on meta"):
        optimizers.check_host()


def test_activations_on_the_host_are_compared(small_setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients agree, and a graph without copies raises, as it would compare nothing."""
    assert parity.Comparison(*map(host.policy_parity(small_setting).get, ("ours", "fsdp2"))).agrees
    monkeypatch.setattr(host, "OFFLOADED_ACTIVATIONS", "ours")
    with pytest.raises(RuntimeError, match="nothing was copied to the host"):
        host.policy_parity(small_setting)


@pytest.mark.night
def test_a_budget_sends_activations_to_the_host(small_setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    """The budget is found for the model whose gradients are compared."""
    found: list[Setting] = []
    monkeypatch.setattr(host.parity, "compare", lambda _, setting: found.append(setting))
    with pytest.raises(RuntimeError, match="nothing was copied to the host"):
        host.budget_parity(small_setting)
    (setting,) = found
    assert setting.size.sequence == 128 and 1e6 < setting.options["memory_budget"] < 1e8


def test_ranks_have_a_deadline() -> None:
    args = step_time.parse_args(["--group", "fake"])
    with pytest.raises(RuntimeError, match="rank 0 has not ended after 0 s"):
        ranks.run_ranks(["-c", "import time; time.sleep(60)"], args, timeout_s=0)


@pytest.mark.night
def test_a_rank_that_hangs_shows_where() -> None:
    args = step_time.parse_args(["--group", "fake"])
    hangs = "import sys; sys.path.insert(0, sys.argv[1]); import time, harness.ranks as ranks\n"
    hangs += "def wait_for_ever(args, mesh): time.sleep(60)\n"
    hangs += "import argparse; ranks.served(argparse.Namespace(device='cpu', group='fake'), wait_for_ever)"
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 has not ended after 15 s.*in wait_for_ever"):
        ranks.run_ranks(["-c", hangs, str(Path(ranks.__file__).parents[1])], args, timeout_s=15)


def test_table_aligns_its_columns() -> None:
    lines = report.table(["system", "ms"], [["a", "1.0"], ["long name", "100.0"]]).splitlines()
    assert lines == ["system        ms", "a            1.0", "long name  100.0"]


def test_published_runs_are_predicted_with_what_is_outside_of_graphs() -> None:
    size = replace(published.RUNS[0].size, layers=2, width=64, heads=2, kv_heads=1, hidden=128, vocabulary=1024, sequence=256)
    run = replace(published.RUNS[0], size=size)
    found = published.predict(run, published.MACHINES[run.machine])
    # The eager loss makes the logits in float32, their logarithms and both gradients; three of the four live at once.
    logits = size.batch * size.sequence * size.vocabulary
    assert 3 * 4 * logits < found.memory_gib * published.GIB < found.reserved_gib * published.GIB
    assert found.outside_s > 12 * logits * 4 / published.MACHINES[run.machine].bytes_per_s
    inside = published.predict(replace(run, eager_loss=False), published.MACHINES[run.machine])
    assert inside.outside_s == 0 and inside.memory_gib < found.memory_gib
    assert published.table([(run, found)]).count("\n") == 2


# --- Optimizer steps ------------------------------------------------------------------------------


def test_table_of_optimizer_steps() -> None:
    """A ratio is the median of the rounds' ratios between systems with the same kernels."""
    taken = optimizer_step.Seconds
    seconds = {
        "fsdp2 fused": [taken(0.3, 0.01, 0.03), taken(0.2, 0.01, 0.01), taken(0.1, 0.1, 0.1)],
        "ours-flat fused": [taken(0.1, 0.001, 0.003), taken(0.1, 0.004, 0.006), taken(0.1, 0.005, 0.005)],
    }
    _, first, second = optimizer_step.render(seconds).splitlines()
    assert first.split() == ["fsdp2", "fused", "200.00", "ms", "10.00", "ms", "30.00", "ms", "40.00", "ms", "1.00"]
    assert second.split() == ["ours-flat", "fused", "100.00", "ms", "4.00", "ms", "5.00", "ms", "10.00", "ms", "0.10"]


def test_optimizer_step_times_all_systems(fake_ranks: None) -> None:
    seconds = optimizer_step.measure(Size(layers=1, width=32, batch=1, sequence=16), 1)
    systems = ("fsdp2", "ours", "ours-flat", "ours-one-buffer", "ours-one-call")
    assert {name: len(rounds) for name, rounds in seconds.items()} == {
        f"{system} {kernels}": 1 for kernels in ("foreach", "fused") for system in systems
    }


@pytest.mark.parametrize("kind", KINDS)
def test_layers_of_each_kind_train(kind: str) -> None:
    size = Size(layers=2, width=16, heads=2, batch=1, sequence=4)
    model = layer_kinds.Model(size, kind).build(torch.device("cpu"))
    (tokens, targets), *_ = make_batches(size, 0, 1, torch.device("cpu"))
    model(tokens, targets).backward()
    assert all((param.grad is not None) == param.requires_grad for param in model.parameters())
    assert all(param.requires_grad for param in model.parameters()) == (kind not in ("frozen", "adapters"))
