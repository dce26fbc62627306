"""A measured step beside a predicted one: real ranks over Gloo, and made-up traces of a GPU."""

from __future__ import annotations

import gzip
import itertools
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.profiler import ProfilerActivity, profile

from fsdp_compile import fsdp_backend
from fsdp_compile.debug import capture
from fsdp_compile.explain import Report, explain_captured
from fsdp_compile.explain.measured import Measured
from fsdp_compile.explain.tracks import COMPUTE, Kind
from passes.fx.graph import is_collective, starts_collective
from tests.common.distributed import RankPools, device_mesh
from tests.common.models import MLP
from tests.fsdp_compile.explain.test_chrome_trace import leaves, spans
from tests.fsdp_compile.explain.test_explain import report_of, shard_all

pytestmark = pytest.mark.units_apart

_DELAY_S = 0.2


class Training:
    """A model that trains. Its first step was captured and explained."""

    def __init__(self, mesh: Any, options: dict[str, Any], layers: int = 2) -> None:
        torch.manual_seed(0)
        self.model: Any = MLP(32, 64, out=8, layers=layers)
        shard_all(self.model, mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.compiled = torch.compile(self.model, backend=fsdp_backend, options=options)
        with capture(passes=False) as captured:
            self.step()
        self.report: Report = explain_captured(captured, "cpu")

    def step(self, *, delay_s: float = 0.0) -> None:
        loss = self.compiled(torch.ones(16, 32)).sum()
        time.sleep(delay_s)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def profile(self, steps: int = 1, **given: Any) -> profile:
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            for _ in range(steps):
                self.step(**given)
        return profiler


def measure_on_ranks(options: dict[str, Any], folder: str) -> dict[str, Any] | None:
    training = Training(device_mesh((2,)), options)
    training.step()
    # The second rank is late for its backward, so the first rank waits in its own.
    is_first = dist.get_rank() == 0
    profiler = training.profile(delay_s=0.0 if is_first else _DELAY_S)
    waited = sum(event.cpu_time_total for event in profiler.key_averages() if event.key == "_c10d_functional::wait_tensor")
    if not is_first:
        return None
    measured = training.report.beside(profiler)
    check(measured)
    training.report.timeline(Path(folder) / "trace.json", measured=measured)
    training.report.html(Path(folder) / "step.html", measured=measured)
    return {
        "waited_ns": waited * 1e3,
        "exposed_ns": [call.exposed_ns for call in measured.calls],
        "optimizer_ns": measured.optimizer_ns,
        "collectives": training.report.total.collectives,
        "names": sorted(span.name for track in measured.picture.groups.values() for span in track),
        "text": str(measured),
    }


def check(measured: Measured) -> None:
    """Assert that graphs, waits, collectives and times of a measured step add up."""
    picture, report = measured.picture, measured.report
    compute = [span for span in picture.tracks[COMPUTE] if span.kind is not Kind.OPTIMIZER]
    for call, graph in zip(measured.calls, picture.compute(Kind.GRAPH), strict=True):
        assert (call.begins_ns, call.total_ns) == (graph.begin_ns, graph.duration_ns)
    waits = picture.compute(Kind.WAIT)
    assert sum(span.duration_ns for span in waits) == measured.exposed_ns
    inner = leaves([(span.begin_ns, span.end_ns, f"{span.kind}") for span in compute])
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(inner))
    assert sum(len(spans) for spans in picture.groups.values()) == report.total.collectives
    parts = sum(call.total_ns for call in measured.calls) + measured.optimizer_ns + measured.outside_ns
    assert parts == measured.time_ns == picture.total_ns


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_two_ranks(lowering: str, rank_pools: RankPools, tmp_path: Path) -> None:
    found, _ = rank_pools[2].run(measure_on_ranks, options={"lowering": lowering}, folder=str(tmp_path))
    # torch counts waits in the same profile.
    assert sum(found["exposed_ns"]) == pytest.approx(found["waited_ns"], rel=1e-3, abs=1e4)
    assert found["exposed_ns"][1] > 0.9 * _DELAY_S * 1e9 > found["exposed_ns"][0]
    assert found["optimizer_ns"] > 0
    assert len(found["names"]) == found["collectives"]
    assert set(found["names"]) == {f"{what} of {unit}" for what in ("gather", "reduction") for unit in UNITS}
    assert all(row in found["text"] for row in ("0 forward", "1 backward", "optimizer", "between them", "step"))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    threads = {event["tid"] for event in events if event["pid"] == 1}
    assert len(threads) > 1
    for thread in threads:
        for track in spans([event for event in events if (event["pid"], event["tid"]) == (1, thread)]).values():
            leaves(track)
    assert "measured: " in (tmp_path / "step.html").read_text()


UNITS = ("root", "blocks.0", "blocks.1")


@pytest.fixture
def training(fake_ranks: None) -> Training:
    return Training(init_device_mesh("cpu", (8,)), {"lowering": "aot_eager"})


def test_one_of_several_steps(training: Training, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    training.profile(3).export_chrome_trace(str(path))
    measured = training.report.beside(path)
    check(measured)
    assert measured.steps == 3 and "the step of median time of 3" in str(measured)
    (tmp_path / "trace.json.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert training.report.beside(str(tmp_path / "trace.json.gz")) == measured


def test_errors(training: Training, tmp_path: Path) -> None:
    report = training.report
    with pytest.raises(TypeError, match=r"torch\.profiler\.profile, or the path of a trace"):
        report.beside(3)
    with pytest.raises(FileNotFoundError):
        report.beside(tmp_path / "missing.json")
    (tmp_path / "no.json").write_text("{}")
    with pytest.raises(ValueError, match=r"is no trace that torch\.profiler exported"):
        report.beside(tmp_path / "no.json")
    with profile(activities=[ProfilerActivity.CPU]) as empty:
        torch.ones(3).sum()
    with pytest.raises(ValueError, match=r"has no graph in it\. Run whole steps"):
        report.beside(empty)
    with pytest.raises(ValueError, match=r"exports its trace once.* give the path"):
        report.beside(empty)
    with profile(activities=[ProfilerActivity.CPU]) as half:
        training.compiled(torch.ones(16, 32))
    with pytest.raises(ValueError, match=r"whose graphs are forward, backward, but forward\. Profile whole steps"):
        report.beside(half)


def test_a_profile_of_another_model(training: Training) -> None:
    other = Training(init_device_mesh("cpu", (8,)), {"lowering": "aot_eager"}, layers=3)
    with pytest.raises(
        ValueError, match=r"one of another step: in call 0, the report's graph has 6 collectives and waits, the"
    ):
        training.report.beside(other.profile())


# Traces of a GPU.


def trace_of_gpu(report: Report, path: Path) -> None:
    """Write a trace in which a GPU does what ``report`` predicts, at the predicted times, long after the host's launches."""
    events, correlations, host = [], itertools.count(1), 0

    def event(category: str, name: str, begin_ns: int, duration_ns: int, **args: Any) -> None:
        times = {"ts": begin_ns / 1e3, "dur": duration_ns / 1e3}
        events.append({"ph": "X", "pid": 0, "tid": 0, "cat": category, "name": name, **times, "args": args})

    def launch(name: str, host_ns: int, begin_ns: int, duration_ns: int) -> None:
        number = next(correlations)
        event("cuda_runtime", "cudaLaunchKernel", host_ns, 1, correlation=number)
        event("kernel", name, begin_ns, duration_ns, correlation=number)

    assert report._source is not None
    for figures, told in zip(report._source.figures, report.calls, strict=True):
        since, timeline, at = host, figures.timeline, DEVICE_BEGINS + told.begins_ns
        for node in figures.order:
            host += 10
            waited, _ = timeline.waits.get(node, (0, None))
            if figures.costs.compute[node]:
                launch(node.name, host + 2, at + timeline.arrives[node] + waited, figures.costs.compute[node])
            if starts_collective(node):
                launch("ncclDevKernel", host + 4, at + timeline.begins[node], figures.costs.transfer[node])
            if is_collective(node):
                event("cpu_op", f"_c10d_functional::{node.target._opname}", host, 8)  # type: ignore[union-attr]
        host += 10
        event("cpu_op", f"FSDP::{told.stage} graph", since, host - since)
    event("user_annotation", "Optimizer.step#AdamW.step", host, 100)
    launch("adamw", host + 2, DEVICE_BEGINS + report.time_ns - report.optimizer_ns, report.optimizer_ns)
    path.write_text(json.dumps({"traceEvents": events}))


DEVICE_BEGINS = 1_000_000


@pytest.mark.parametrize("case", ["h100", "hsdp", "microbatches"])
def test_gpu_that_does_what_is_predicted(case: str, tmp_path: Path) -> None:
    report = report_of(case)
    trace_of_gpu(report, tmp_path / "trace.json")
    measured = report.beside(tmp_path / "trace.json")
    check(measured)
    told = [(call.begins_ns, call.total_ns, call.exposed_ns) for call in report.calls]
    assert [(call.begins_ns, call.total_ns, call.exposed_ns) for call in measured.calls] == told
    assert (measured.time_ns, measured.optimizer_ns, measured.outside_ns) == (report.time_ns, report.optimizer_ns, 0)
    assert sum(call.in_flight_ns for call in measured.calls) == report.total.communication_ns
    assert measured.picture.groups.keys() == {f"group {role}" for role in report.mesh}


def test_gpu_whose_link_is_slow(tmp_path: Path) -> None:
    """The last collective takes longer by a known time, which no compute hides."""
    report = report_of("h100")
    trace_of_gpu(report, tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    last = max((event for event in trace["traceEvents"] if "nccl" in event["name"]), key=lambda event: event["ts"])
    over, added = last["ts"] + last["dur"], 500.0
    for event in trace["traceEvents"]:
        if event["cat"] == "kernel" and event["ts"] >= over:
            event["ts"] += added
    last["dur"] += added
    (tmp_path / "trace.json").write_text(json.dumps(trace))
    measured = report.beside(tmp_path / "trace.json")
    assert measured.exposed_ns == report.exposed_ns + added * 1e3
    assert measured.time_ns == report.time_ns + added * 1e3


def test_gpu_without_nccl(tmp_path: Path) -> None:
    report = report_of("h100")
    trace_of_gpu(report, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text.replace("ncclDevKernel", "copy"))
    with pytest.raises(ValueError, match=r"4 of 4 collectives of a graph launched no NCCL kernel, the first all_gather"):
        report.beside(tmp_path / "trace.json")


def test_gpu_that_was_not_profiled(tmp_path: Path) -> None:
    report = report_of("h100")
    trace_of_gpu(report, tmp_path / "trace.json")
    text = (tmp_path / "trace.json").read_text()
    (tmp_path / "trace.json").write_text(text.replace('"kernel"', '"other"'))
    with pytest.raises(ValueError, match=r"compute on a GPU, of which the profile has no kernel.*ProfilerActivity\.CUDA"):
        report.beside(tmp_path / "trace.json")
