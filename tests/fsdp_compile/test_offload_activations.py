"""Activations that wait on the host by ``MUST_CPU_OFFLOAD``.

The engine of :mod:`tests.common.copy_engine` copies in threads and leaves NaN where nothing has arrived. Without it, host and
device are one.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.fx import Graph
from torch.utils.checkpoint import CheckpointPolicy

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.backend import _check_activation_offload
from fsdp_compile.compiler.options import Options
from fsdp_compile.debug import Capture, capture
from fsdp_compile.explain import Report, explain
from fsdp_compile.explain.suggestions import with_suggestions
from passes.collectives import host_copies
from passes.collectives.host_copies import fetch, offload, wait_copy, wait_offload
from passes.ir.work import role
from passes.models.hardware import HostLink, known_hardware
from passes.models.memory_model import Category, MemoryModel
from tests.common import models
from tests.common.copy_engine import copying
from tests.common.distributed import RankPools, device_mesh
from tests.common.executed_memory import executed
from tests.common.parity import Case, Run, compare, next_token_loss, regression_batch, shard_units, token_batch, train_sharded
from tests.fsdp_compile.test_activation_policies import Policy, checkpointed

_aten = torch.ops.aten
_OFFLOAD, _RECOMPUTE = CheckpointPolicy.MUST_CPU_OFFLOAD, CheckpointPolicy.PREFER_RECOMPUTE
POLICIES: Mapping[str, Policy] = {
    "tanh": ({_aten.tanh.default: _OFFLOAD}, _RECOMPUTE),
    "preferably tanh": ({_aten.tanh.default: CheckpointPolicy.PREFER_CPU_OFFLOAD}, CheckpointPolicy.MUST_SAVE),
    "saved": ({_aten.tanh.default: CheckpointPolicy.MUST_SAVE}, _RECOMPUTE),
    "products": (dict.fromkeys((_aten.mm.default, _aten.addmm.default), _OFFLOAD), _RECOMPUTE),
    # Includes views, casts and parameters.
    "all": ({}, _OFFLOAD),
}


class Checkpointed(nn.Module):
    """A module in a checkpoint."""

    def __init__(self, module: nn.Module, policy: str):
        super().__init__()
        self.module = module
        self.policy = POLICIES[policy]

    def forward(self, x: Tensor) -> Tensor:
        return checkpointed(self.policy, self.module, x)


def build(kind: Callable[..., nn.Module], policy: str) -> nn.Module:
    """Return a model in which each block is in a checkpoint."""
    model: Any = kind()
    model.blocks = nn.ModuleList([Checkpointed(block, policy) for block in model.blocks])
    return model


_MLP = functools.partial(models.MLP, layers=3)
_LENGTHS = functools.partial(regression_batch, sizes=(3, 5, 4))


def _case(name: str, policy: str) -> Case:
    if name == "mlp":
        return Case(name, functools.partial(build, _MLP, policy), steps=2)
    if name == "lengths":
        # Each step has another length, which is dynamic from the second step on.
        return Case(name, functools.partial(build, _MLP, policy), batch=_LENGTHS, steps=3)
    return Case(name, functools.partial(build, models.Transformer, policy), batch=token_batch, loss=next_token_loss, steps=2)


def train_case(name: str, policy: str, lowering: str, copies: bool, params: bool = False) -> Run:
    """Train a case, and check that activations are copied if ``copies``. Runs on every rank."""
    torch._dynamo.reset()
    options: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": lowering}}
    with _memory(copies) as engine:
        shard = functools.partial(fully_shard, **({"offload_policy": CPUOffloadPolicy()} if params else {}))
        run = train_sharded(_case(name, policy), shard, options)
        assert (engine is not None) == bool(engine and engine.copies)
    return run


def _memory(copies: bool) -> contextlib.AbstractContextManager[Any]:
    return copying(1e7) if copies else contextlib.nullcontext()


@pytest.mark.parametrize(
    ("name", "policy", "lowering", "params"),
    [
        ("mlp", "tanh", "aot_eager", False),
        pytest.param("lengths", "products", "inductor", False, marks=pytest.mark.night),
        pytest.param("lengths", "preferably tanh", "aot_eager", True, marks=pytest.mark.night),
        *(
            pytest.param("transformer", "all", *case, marks=pytest.mark.night)
            for case in [("aot_eager", False), ("inductor", True)]
        ),
    ],
)
def test_trains_as_without(name: str, policy: str, lowering: str, params: bool, rank_pools: RankPools) -> None:
    """Copies change no bit, even beside shards on the host."""
    given = {"name": name, "policy": policy, "lowering": lowering, "params": params}
    expected = rank_pools[2].run(train_case, copies=False, **given)
    compare(rank_pools[2].run(train_case, copies=True, **given), expected, 0.0)


# One process


def step(policy: str = "tanh", lowering: str = "aot_eager", **options: Any) -> tuple[Any, Callable[..., Tensor]]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = build(_MLP, policy)
    shard_units(model, device_mesh((1,)), fully_shard)
    return model, torch.compile(model, backend=fsdp_backend, options={"lowering": lowering, "min_bucket_bytes": 0, **options})


def gradients(model: nn.Module) -> list[Tensor]:
    found: list[Any] = [param.grad for param in model.parameters()]
    return [gradient.full_tensor() for gradient in found]


def _input(value: float = 1.0, rows: int = 3) -> Tensor:
    return torch.full((rows, 8), value)


def _computed(graph: Graph) -> list[Any]:
    """List the operations of a graph that compute and copy, in order."""
    return [node.target for node in graph.nodes if node.op == "call_function" and role(node) is None]


def one_step(policy: str = "tanh", lowering: str = "aot_eager", rows: int = 3, **options: Any) -> tuple[list[Tensor], Capture]:
    model, forward = step(policy, lowering, **options)
    with capture() as captured:
        forward(_input(rows=rows)).sum().backward()
    return gradients(model), captured


@pytest.mark.usefixtures("one_rank")
class TestOneProcess:
    def test_copies_are_prefetched_and_few_at_once(self) -> None:
        """A layer's copy to the device begins at the wait for the previous one. At most two layers' copies are in flight."""
        with copying(2e5) as engine:
            found, _ = one_step()
        begin_out, begin_in, wait = "begin to_host", "begin to_device", "device waits"
        out = [begin_out, begin_out, wait, begin_out, wait, wait]
        assert engine.events == [*out, begin_in, begin_in, wait, begin_in, wait, wait]
        assert [copy.nbytes for copy in engine.copies] == [3 * 16 * 4] * 6
        assert all(copy.pinned for copy in engine.copies if copy.kind == "to_host")
        expected, _ = one_step()
        assert all(map(torch.equal, found, expected))

    @pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
    def test_several_forwards_and_no_backward(self, lowering: str) -> None:
        """Three forwards: one is dropped, and two run backward in another order, one of them twice on a retained graph."""

        def train() -> list[Tensor]:
            model, forward = step("tanh", lowering)
            losses = [forward(_input(value)).sum() for value in (0.1, 0.2, 0.3)]
            del losses[0]
            losses[1].backward(retain_graph=True)
            losses[0].backward()
            losses[1].backward()
            return gradients(model)

        expected = train()
        with copying(2e6):
            found = train()
        assert all(map(torch.equal, found, expected))
        assert not host_copies._begun

    @pytest.mark.parametrize("which", ["reads", "save_on_cpu"])
    def test_hooks_on_saved_tensors_find_what_has_arrived(self, which: str) -> None:
        expected, _ = one_step()
        seen: list[bool] = []

        def pack(value: Tensor) -> Tensor:
            seen.append(bool(value.isfinite().all()))
            return value.clone() if value.requires_grad is False and value.dim() == 2 else value

        hooks: Any = torch.autograd.graph.save_on_cpu() if which == "save_on_cpu" else None
        with copying(2e5) as engine:
            model, forward = step()
            with hooks or torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
                loss = forward(_input()).sum()
            assert engine.events.count("host waits") == 3
            loss.backward()
            found = gradients(model)
        assert all(seen) and all(map(torch.equal, found, expected))

    def test_memory_is_counted_until_the_copy_is_waited_for(self) -> None:
        with copying():
            _, captured = one_step()
        forward, backward = (graphs[0].graph_module.graph for graphs in (captured.forward, captured.backward))
        order = list(forward.nodes)
        lives = {lifetime.first: lifetime for lifetime in MemoryModel(forward).lifetimes(order)}
        for node in forward.find_nodes(op="call_function", target=wait_offload):
            lifetime = lives[order.index(node.args[1])]
            assert (lifetime.num_bytes, lifetime.last) == (3 * 16 * 4, order.index(node))
            assert not lifetime.is_given_out and not lives[order.index(node.args[0])].num_bytes
        copied = {node.name for node in backward.find_nodes(op="placeholder") if any(u.target == fetch for u in node.users)}
        assert len(copied) == 3
        order = list(backward.nodes)
        begins = {lifetime.first: lifetime for lifetime in MemoryModel(backward).lifetimes(order) if lifetime.num_bytes}
        for node in backward.find_nodes(op="call_function", target=fetch):
            assert begins[order.index(node)].num_bytes == 3 * 16 * 4
        assert not any("freed" in node.meta for node in backward.find_nodes(op="placeholder") if node.name in copied)

    def test_without_an_engine_nothing_is_copied(self) -> None:
        """Host and device are one memory, so the activation is saved."""
        _, captured = one_step()
        assert "fsdp_host" not in captured.forward[0].readable() + captured.backward[0].readable()
        assert "aten.tanh" not in captured.backward[0].readable()

    def test_parameters_inputs_and_outputs_stay(self) -> None:
        with copying():
            _, captured = one_step("all")
        graph = captured.forward[0].graph_module.graph
        copied = [node.args[0].target for node in graph.find_nodes(op="call_function", target=offload)]
        # The next block reads a block's output, and the root reads the last block's.
        assert set(copied) == {_aten.tanh.default, _aten.add.Tensor}
        waits = captured.backward[0].graph_module.graph.find_nodes(op="call_function", target=wait_copy)
        assert len(waits) == len(copied)

    @pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
    def test_the_automatic_schedule_leaves_copies_where_they_are(self, lowering: str) -> None:
        expected, _ = one_step("tanh", lowering, schedule="auto")
        with copying(1e6) as engine:
            found, placed = one_step("tanh", lowering, schedule="auto")
        assert all(map(torch.equal, found, expected))
        assert [copy.kind for copy in engine.copies] == ["to_host"] * 3 + ["to_device"] * 3
        with copying():
            _, default = one_step("tanh", lowering)
        for with_auto, without in ((placed.forward, default.forward), (placed.backward, default.backward)):
            orders = [_computed(graphs[0].graph_module.graph) for graphs in (with_auto, without)]
            assert orders[0] == orders[1] and {offload, fetch} & set(orders[0])

    @pytest.mark.night
    def test_a_budget_counts_what_an_execution_holds(self) -> None:
        """The least budget equals the bytes that an execution of the graphs holds, for policies that save and that offload."""
        least, rows = {}, 256
        for policy in ("saved", "tanh"):
            with copying():
                _, captured = one_step(policy, rows=rows, memory_budget=1 << 40, optimizer=None)
                (choice,) = captured.choices
                least[policy] = min(trial.peak_bytes for trial in choice.trials)
                found, captured = one_step(policy, rows=rows, memory_budget=least[policy], optimizer=None)
            (choice,) = captured.choices
            assert choice.chosen.peak_bytes == choice.limit == least[policy]
            graphs = [graphs[0].graph_module.graph for graphs in (captured.forward, captured.backward)]
            forward, backward = (max(live for _, live in executed(graph)) for graph in graphs)
            # In backward the caller may still hold the output of forward.
            inside = max(forward, backward + rows * 4 * 4)
            resident = (
                sum(unit.shard_bytes for unit in captured.census.units) + captured.census.other_bytes + _input(rows=rows).nbytes
            )
            # An execution of one rank does not keep the inputs of collectives.
            assert 0 <= choice.chosen.peak_bytes - resident - inside <= 0.02 * choice.chosen.peak_bytes
            expected, _ = one_step(policy, rows=rows)
            assert all(map(torch.equal, found, expected))
        # At most two layers' values are on the device, as their copies are in flight.
        assert least["saved"] - least["tanh"] == rows * 16 * 4


def test_cuda_graphs_are_refused() -> None:
    with pytest.raises(ValueError, match=r"options\['cudagraphs'\] = True is not supported for a model with activations"):
        _check_activation_offload(Options(cudagraphs=True))


def report_on(policy: str, shard: Any = fully_shard, **given: Any) -> Report:
    hardware = replace(known_hardware("cuda", "H100"), host=HostLink(1e-6, 2e6, 5e6, 1e9))
    return explain(
        build(_MLP, policy),
        _input(),
        (8,),
        hardware,
        shard=lambda model, mesh: shard_units(model, mesh, shard),
        **{"options": {"min_bucket_bytes": 0}, "suggest": False, **given},
    )


class TestReport:
    def test_copies_have_bytes_streams_and_exposed_time(self, tmp_path: Path) -> None:
        report = report_on("tanh")
        value = 3 * 16 * 4
        by_unit = {unit.name: (unit.to_device_bytes, unit.to_host_bytes) for unit in report.units}
        assert by_unit == {"root": (0, 0)} | {f"blocks.{index}": (value, value) for index in range(3)}
        # Forward ends when the last value is on the host. Backward begins with the copies that it has to wait for.
        copy_ns = {"to_host": 1000 + 200 * value, "to_device": 1000 + 500 * value}
        waited = {(one.kind, one.stage): one for one in report.exposures if one.kind in copy_ns}
        assert set(waited) == {("to_host", "forward"), ("to_device", "backward")}
        assert all(one.transfer_ns == copy_ns[kind] for (kind, _), one in waited.items())
        assert all(0 < one.exposed_ns <= 2 * one.transfer_ns for one in waited.values())
        assert report.memory.host_bytes == 3 * value
        text = str(report)
        assert "to device  to host" in text and "On the host are 576 B at most." in text
        assert "the copy to the host of blocks." in text and "the copy to the device of blocks." in text
        tracks = report._pictures(None)[0].tracks
        names = ["copy to the host of blocks.0", "copy to the host of blocks.1", "copy to the host of blocks.2"]
        assert [span.name for span in tracks["device to host"]] == names
        assert [span.duration_ns for span in tracks["host to device"]] == [copy_ns["to_device"]] * 3
        assert [span.name[-8:] for span in tracks["host to device"]] == ["blocks.2", "blocks.1", "blocks.0"]
        assert report.total.collectives == sum(call.collectives for call in report.calls)
        report.html(tmp_path / "report.html")
        report.timeline(tmp_path / "trace.json")
        assert "copy to the host" in (tmp_path / "report.html").read_text()

    def test_memory_is_freed_meanwhile(self) -> None:
        """Between forward and backward, activations that would be saved are on the host."""
        saved, copied = (report_on(policy)._source for policy in ("saved", "tanh"))
        assert saved is not None and copied is not None
        held = [max(of.figures[0].memory.given_out[category] for category in [Category.ACTIVATIONS]) for of in (saved, copied)]
        assert held[0] - held[1] == 3 * 3 * 16 * 4
        assert [of.memory.on_host for of in (saved, copied)] == [[0, 0], [3 * 3 * 16 * 4] * 2]

    def test_shards_on_the_host(self) -> None:
        report = report_on("saved", functools.partial(fully_shard, offload_policy=CPUOffloadPolicy()), optimizer="adamw")
        shards = report.total.shard_bytes
        # The optimizer reads gradients, and reads and writes shards and two moments, at the rate of the host's memory.
        trainable = round(report.optimizer_ns / 1e9 * report.hardware.host.memory_bytes_per_s / (3 + 2 * 2))
        assert 0 < trainable <= shards
        assert report.memory.host_bytes == shards + 3 * trainable
        assert report.memory.categories["shards"] == report.memory.categories["optimizer state"] == 0
        # Averaged gradients are copied once, shards for each gather. Backward copies only shards that it reads.
        assert {unit.name: unit.to_host_bytes - unit.shard_bytes for unit in report.units} == dict.fromkeys(
            ("root", "blocks.0", "blocks.1", "blocks.2"), 0
        )
        assert all(unit.shard_bytes <= unit.to_device_bytes <= 2 * unit.shard_bytes for unit in report.units)
        assert report.total.to_device_bytes > shards
        # The step ends when the gradients are on the host.
        last = report.exposures[-1]
        assert (last.kind, last.stage, last.exposed_ns > 0) == ("to_host", "backward", True)
        assert "not possible here: it does not know of copies of shards" in str(with_suggestions(report))

    @pytest.mark.night
    def test_there_are_no_formulae_and_no_profiles(self) -> None:
        report = report_on("tanh")
        with pytest.raises(NotImplementedError, match="no formulae for a step with copies between device and host"):
            _ = report.formulae
        with pytest.raises(NotImplementedError, match="copies are not read from profiles"):
            report.beside("trace.json")
