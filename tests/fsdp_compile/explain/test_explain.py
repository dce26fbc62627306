"""The report on a step: its numbers equal independent counts, and its graphs are those of a real run."""

from __future__ import annotations

import functools
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.flop_counter import FlopCounterMode

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from fsdp_compile.explain import Report, explain, explain_captured
from passes.models.hardware import Hardware, known_hardware
from passes.models.memory_model import Category
from tests.common.distributed import RankPools, device_mesh
from tests.common.models import MLP, GraphBreaks

pytestmark = pytest.mark.units_apart

DIM, HIDDEN, LAYERS, RANKS, BATCH = 64, 256, 3, 8, 16
NAMES = ("root", "blocks.0", "blocks.1", "blocks.2")
GATHERED, GRADIENTS = Category.PARAMETERS.value, Category.GRADIENTS.value


def build(checkpointed: bool = False) -> MLP:
    """Build a model whose parameters eight ranks share evenly."""
    with torch.device("meta"):
        return MLP(DIM, HIDDEN, out=8, layers=LAYERS, checkpointed=checkpointed)


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def shard_all(model: Any, mesh: Any, reshard: bool | None = None) -> None:
    for module in (*model.blocks, model):
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)


def two_microbatches(model: Any, x: Tensor) -> None:
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()


@functools.cache
def report_of(case: str) -> Report:
    """Return the report of a case."""
    options: dict[str, dict[str, Any]] = {
        "h100": {},
        "cpu": {"hardware": "cpu"},
        "hsdp": {"mesh_shape": (2, 8)},
        "microbatches": {"step": two_microbatches},
        "kept": {"step": two_microbatches, "shard": keep},
        "kept until the last": {"step": two_microbatches_of_which_the_last_frees},
        "reshard": {"shard": functools.partial(shard_all, reshard=True)},
        "stays": {"shard": functools.partial(shard_all, reshard=False)},
        "stays, microbatches": {"shard": functools.partial(shard_all, reshard=False), "step": two_microbatches},
        "auto": {"options": {"schedule": "auto"}},
    }
    given = {"mesh_shape": (RANKS,), "hardware": "h100", "suggest": False, **options[case]}
    return explain(build(), torch.empty(BATCH, DIM, device="meta"), **given)


def keep(model: Any, mesh: Any) -> None:
    shard_all(model, mesh)
    model.set_reshard_after_backward(False)


def two_microbatches_of_which_the_last_frees(model: Any, x: Tensor) -> None:
    for is_last in (False, True):
        model.set_requires_gradient_sync(is_last)
        model.set_reshard_after_backward(is_last)
        model(x).sum().backward()


def test_parameters_and_traffic_are_those_of_fsdp2() -> None:
    """Each of n ranks sends (n - 1) / n of the unsharded bytes.

    Backward gathers what it reads of a block: both weights, with the bias that lies between them. The input of the first block
    needs no gradient, so backward reads only its second weight.
    """
    model, report = build(), report_of("h100")
    root = bytes_of(model) - sum(map(bytes_of, model.blocks))
    wanted = {"root": root, **{f"blocks.{index}": bytes_of(block) for index, block in enumerate(model.blocks)}}
    assert {unit.name for unit in report.units} == set(wanted)
    for unit in report.units:
        whole = wanted[unit.name]
        assert (4 * unit.parameters, unit.shard_bytes) == (whole, whole // RANKS)
        again = 4 * {"root": 0, "blocks.0": DIM * HIDDEN}.get(unit.name, 2 * DIM * HIDDEN + HIDDEN)
        assert unit.gathered_bytes == (whole + again) * 7 // 8
        assert (unit.scattered_bytes, unit.all_reduced_bytes) == (whole * 7 // 8, 0)
        assert unit.collectives == (2 if unit.name == "root" else 3)
    assert report.total.collectives == sum(call.collectives for call in report.calls)


def test_replicas_all_reduce_shards() -> None:
    report = report_of("hsdp")
    assert report.mesh == {"shard": 8, "replicate": 2}
    # With two ranks, each sends as many bytes as the shard has.
    assert all(unit.all_reduced_bytes == unit.shard_bytes for unit in report.units)


def test_flops_are_those_of_the_model() -> None:
    """Flops equal torch's count for the unsharded model."""
    with FlopCounterMode(display=False) as counter:
        build()(torch.empty(BATCH, DIM, device="meta")).sum().backward()
    report = report_of("h100")
    assert report.flops == {"float32": counter.get_total_flops()}
    assert report.model_flops == counter.get_total_flops()
    assert report.mfu == pytest.approx(counter.get_total_flops() / 67e12 / (report.time_ns / 1e9))


def test_recomputed_products_are_no_work_of_the_model() -> None:
    report = explain(build(checkpointed=True), torch.empty(BATCH, DIM), (RANKS,), "h100", suggest=False)
    assert report.model_flops <= 3 * report.calls[0].flops < sum(report.flops.values())


@pytest.mark.parametrize("case", ["h100", "cpu", "hsdp", "microbatches", "kept", "auto"])
def test_times_add_up(case: str) -> None:
    check_sums(report_of(case))


def test_every_call_counts() -> None:
    """A microbatch without a reduction gathers, too, and leaves full gradients for the next one."""
    once, twice = report_of("h100"), report_of("microbatches")
    assert [call.stage for call in twice.calls] == ["forward", "backward"] * 2
    assert twice.total.gathered_bytes == 2 * once.total.gathered_bytes
    assert twice.total.scattered_bytes == once.total.scattered_bytes
    assert twice.memory.most[GRADIENTS] >= bytes_of(build())


def test_kept_parameters_are_gathered_once() -> None:
    report = report_of("kept")
    assert report.total.gathered_bytes == bytes_of(build()) * 7 // 8
    # All parameters are live at once, each of them once.
    assert bytes_of(build()) <= report.memory.most[GATHERED] < 2 * bytes_of(build())


@pytest.mark.night
def test_a_backward_that_frees_kept_parameters_holds_ever_less_of_them() -> None:
    """A backward that keeps them holds all of them until its end."""

    def gathered_in_last_backward(case: str) -> list[int]:
        source = report_of(case)._source
        assert source is not None
        last = len(source.calls) - 1
        return [source.memory.moment(last, each).held[GATHERED] for each in range(len(source.figures[last].order))]

    freed, kept = map(gathered_in_last_backward, ("kept until the last", "kept"))
    assert (min(kept), freed[0]) == (bytes_of(build()), kept[0])
    assert freed == sorted(freed, reverse=True) and freed[-1] < bytes_of(build().blocks[0])
    # Formulae give the same memory.
    report = report_of("kept until the last")
    assert report.at().memory == report.memory


def test_parameters_that_stay_live_until_backward() -> None:
    whole = bytes_of(build())
    stays, reshards = report_of("stays"), report_of("reshard")
    assert whole <= stays.memory.most[GATHERED] <= whole + 2 * bytes_of(build().blocks[0])
    assert reshards.memory.most[GATHERED] < whole
    assert stays.total.gathered_bytes == whole * 7 // 8


def check_sums(report: Report) -> None:
    total = report.total
    assert report.time_ns == sum(call.total_ns for call in report.calls) + report.optimizer_ns
    assert sum(call.total_ns for call in report.calls) == total.compute_ns + total.exposed_ns
    assert total.exposed_ns == report.exposed_ns == sum(exposure.exposed_ns for exposure in report.exposures)
    assert report.exposed_share == report.exposed_ns / report.time_ns
    assert report.memory.peak_bytes == sum(report.memory.categories.values()) == max(call.peak_bytes for call in report.calls)


def test_a_model_that_is_several_graphs() -> None:
    report = explain(GraphBreaks(), torch.empty(4, 8), (2,), "h100", suggest=False)
    assert [call.stage for call in report.calls] == ["forward"] * (len(report.calls) // 2) + ["backward"] * (
        len(report.calls) // 2
    )
    assert len(report.calls) > 2
    check_sums(report)


def test_sizes_that_change() -> None:
    """The third size is traced as a symbol, and counts with its value."""

    def step(model: Any, x: Tensor) -> None:
        for size in (4, 8, BATCH):
            model(x[:size]).sum().backward()

    report = explain(build(), torch.empty(BATCH, DIM), (RANKS,), "h100", step=step, suggest=False)
    assert len(report.calls) == 6
    check_sums(report)


def test_compute_is_of_the_unit_whose_parameters_it_reads() -> None:
    report = report_of("h100")
    root, first, middle, last = (next(unit for unit in report.units if unit.name == name) for name in NAMES)
    # Two products in forward, four in backward (three if the input needs no gradient), copies in and out, and tanh.
    assert middle.kernels == last.kernels > first.kernels > root.kernels > 2
    assert sum(unit.kernels for unit in report.units) == report.total.kernels


def test_compute_is_of_the_unit_whose_gradients_it_makes() -> None:
    """The backward of a first microbatch that keeps its gradients, with parameters from forward, works for no bucket."""
    report = report_of("stays, microbatches")
    kernels = {unit.name: unit.kernels for unit in report.units}
    assert kernels.keys() == {*NAMES}
    assert kernels["blocks.1"] == kernels["blocks.2"] > kernels["blocks.0"]


def test_products_that_inductor_would_pad() -> None:
    """Inductor measures on a GPU whether padding is worth it. ``explain`` must not, as it has no GPU."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1030, 1030), nn.ReLU(), nn.Linear(1030, 50257)).to(torch.bfloat16)
        report = explain(model, torch.empty(512, 1030, dtype=torch.bfloat16), (8,), "h100", suggest=False)
    assert report.flops["bfloat16"] > 0


def test_outputs_without_a_gradient() -> None:
    class TwoOutputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            logits = self.layer(x)
            return logits.square().sum(), logits

    def step(compiled: Any, x: Tensor) -> None:
        # The logits get no gradient, as in models that return the loss and the logits.
        compiled(x)[0].backward()

    with torch.device("meta"):
        report = explain(TwoOutputs(), torch.empty(4, 8), (8,), "h100", step=step, suggest=False)
    assert [call.stage for call in report.calls] == ["forward", "backward"]


def test_state_of_the_optimizer() -> None:
    elements = bytes_of(build()) // 4 // RANKS
    x = torch.empty(BATCH, DIM, device="meta")
    for optimizer, state in (("adamw", 8), (6, 6), (None, 0)):
        report = explain(build(), x, (RANKS,), "h100", optimizer=optimizer, suggest=False)
        assert report.memory.categories["optimizer state"] == state * elements
        moved = 0 if optimizer is None else (3 * 4 + 2 * state) * elements
        assert report.optimizer_ns == round(moved / known_hardware("cuda", "H100").bytes_per_s * 1e9)


def test_state_of_the_optimizer_has_the_dtype_of_shards() -> None:
    model = build().bfloat16()
    x = torch.empty(BATCH, DIM, device="meta", dtype=torch.bfloat16)
    report = explain(model, x, (RANKS,), "h100", suggest=False)
    assert report.memory.categories["optimizer state"] == 2 * report.memory.categories["shards"]


def test_tokens_of_integer_inputs() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.layers = nn.Embedding(32, 8), nn.ModuleList([nn.Linear(8, 8)])

        def forward(self, tokens: Tensor) -> Tensor:
            return self.layers[0](self.embed(tokens))

    tokens = torch.zeros(4, 16, dtype=torch.long)
    report = explain(Model(), tokens, (2,), "a100", suggest=False)
    assert report.tokens == 64 and report.tokens_per_s == 64 / (report.time_ns / 1e9)
    assert explain(Model(), tokens, (2,), "a100", step=two_microbatches, suggest=False).tokens is None
    assert explain(Model(), tokens, (2,), "a100", step=two_microbatches, tokens=128, suggest=False).tokens == 128


@pytest.mark.night
def test_suggestions_are_what_the_changed_step_gives() -> None:
    x = torch.empty(BATCH, DIM, device="meta")
    plain = explain(build(), x, (RANKS,), "h100")
    auto, stays = report_of("auto"), report_of("stays")
    assert [(one.time_ns, one.peak_bytes) for one in plain.suggestions] == [
        (changed.time_ns, changed.memory.peak_bytes) for changed in (auto, stays)
    ]
    for one in plain.suggestions:
        assert one.saved_ns == plain.time_ns - one.time_ns
        assert one.added_bytes == one.peak_bytes - plain.memory.peak_bytes


def test_a_suggestion_that_cannot_be_tried_says_why() -> None:
    def shard(model: Any, mesh: Any) -> None:
        shard_all(model, mesh)
        model.blocks[0].set_modules_to_forward_prefetch([model.blocks[1]])

    report = explain(build(), torch.empty(BATCH, DIM), (RANKS,), "h100", shard=shard)
    assert "set_modules_to_forward_prefetch" in report.suggestions[0].note and report.suggestions[1].time_ns


@pytest.mark.night
def test_needs_no_triton() -> None:
    code = """
import sys
sys.modules["triton"] = None
import torch
from fsdp_compile.explain import explain
print(explain(torch.nn.Linear(8, 8), torch.empty(8, 8), (8,), "b200", suggest=False).time_ns)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.returncode == 0 and int(ran.stdout) > 0, ran.stderr


def test_attention_is_fused_on_a_gpu() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(32, 96)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    length = 512
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.empty(1, length, 32, dtype=dtype)
        report = explain(Model().to(dtype), x, (2,), "h100", suggest=False)
        # The scores of two heads are never written to memory.
        assert report.memory.peak_bytes < 2 * length * length * dtype.itemsize
        assert set(report.flops) == {str(dtype).removeprefix("torch.")}


def test_checkpointed_attention_is_computed_again() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(64, 192)])

        def attend(self, x: Tensor) -> Tensor:
            q, k, v = self.layers[0](x).unflatten(-1, (3, 2, 32)).permute(2, 0, 3, 1, 4)
            return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.attend, x, use_reentrant=False)

    # torch takes attention for random, so that checkpoints replay the states of a GPU's generator.
    x = torch.empty(2, 128, 64, dtype=torch.bfloat16, device="meta")
    report = explain(Attention().to("meta", torch.bfloat16), x, (RANKS,), "h100", suggest=False)
    scores, linear = 2 * 2 * 2 * 2 * 128 * 128 * 32, 2 * 2 * 128 * 64 * 192
    # Backward computes both again, then the gradients: attention's in 2.5 times its flops, the weight's in as many.
    assert [call.flops for call in report.calls] == [scores + linear, 3.5 * scores + 2 * linear]


def capture_and_explain(reshard: bool | None = None) -> Report:
    """Capture a step in the present world, and return its report."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = MLP(DIM, HIDDEN, out=8, layers=LAYERS)
    shard_all(model, init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("shard",)), reshard)
    compiled: Any = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as captured:
        compiled(torch.ones(BATCH, DIM)).sum().backward()
    report = explain_captured(captured, "cpu")
    if reshard:
        peaks = [graph.live_bytes().peak_parameters for graph in (*captured.forward, *captured.backward)]
        assert report.memory.most[GATHERED] == max(peaks)
    return report


def capture_and_explain_as_text() -> str:
    device_mesh((2,))
    return str(replace(capture_and_explain(), suggestions=()))


@pytest.mark.night
def test_says_of_a_model_what_its_run_says(rank_pools: RankPools) -> None:
    """A prediction for two ranks equals the report of two real ranks over Gloo."""
    options = {"lowering": "aot_eager"}
    told = explain(build(), torch.empty(BATCH, DIM), (2,), "cpu", options=options, shard=shard_all, suggest=False)
    assert rank_pools[2].run(capture_and_explain_as_text) == [str(told)] * 2


def test_gathered_parameters_are_those_of_the_memory_model(fake_ranks: None) -> None:
    report = capture_and_explain(reshard=True)
    assert report.memory.most[GATHERED] > 2 * bytes_of(MLP(DIM, HIDDEN).blocks[0])


def test_suggestions_of_what_ran(fake_ranks: None) -> None:
    report = capture_and_explain()
    auto, stays = report.suggestions
    assert auto.time_ns == report.time_ns - auto.saved_ns
    assert stays.saved_ns > 0
    stayed = capture_and_explain(reshard=False)
    assert stays.time_ns == pytest.approx(stayed.time_ns, rel=1e-3)
    assert stays.peak_bytes >= stayed.memory.peak_bytes


def test_graphs_from_before_a_capture_are_not_passed_over(fake_ranks: None) -> None:
    model = MLP(DIM, HIDDEN, out=8, layers=1)
    fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
    compiled: Any = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    x = torch.ones(BATCH, DIM)
    with capture() as before:
        pass
    with pytest.raises(ValueError, match="No graph of fsdp_backend ran"):
        explain_captured(before, "h100")
    compiled(x).sum().backward()
    model.zero_grad()
    with capture() as late:
        compiled(x).sum().backward()
    with pytest.raises(ValueError, match=r"2 graphs ran .* compiled ahead of it.*torch._dynamo.reset"):
        explain_captured(late, "h100")


def disabled(model: Any, mesh: Any) -> None:
    shard_all(model, mesh)
    model.forward = torch.compiler.disable(model.forward)


NO_RATE = replace(known_hardware("cuda", "H100"), flops_per_s={"float32": 1e12})
_CASES: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no model": ({"model": 3}, TypeError, "explain takes an nn.Module, not a int"),
    "no shape of a mesh": ({"mesh_shape": (2, 2, 2)}, ValueError, r"must be \(shards,\) for FSDP or \(replicas, shards\)"),
    "a number of ranks": ({"mesh_shape": 8}, ValueError, "mesh_shape=8 must be"),
    "ranks that do not divide": (
        {"shard": lambda model, mesh: fully_shard(model, mesh=mesh, reshard_after_forward=3)},
        ValueError,
        "reshard_after_forward=3 must be a factor of the shard dimension's size, 8",
    ),
    "hardware": ({"hardware": "h1000"}, ValueError, "hardware='h1000' is not known: give 'a100'.*calibrate"),
    "a rate": (
        {"hardware": NO_RATE, "model": build().to(torch.bfloat16), "inputs": torch.empty(BATCH, DIM, dtype=torch.bfloat16)},
        ValueError,
        r"products in bfloat16, for which hardware 'H100' has no rate, only for float32. Measure it",
    ),
    "optimizer": ({"optimizer": "adamax"}, ValueError, "optimizer='adamax' is not known: give 'adamw'"),
    "inputs": ({"inputs": torch.empty(BATCH, 3)}, RuntimeError, "explain could not trace the model.*shapes and dtypes"),
    "nothing traced": ({"shard": disabled}, RuntimeError, "found nothing in the step that torch.compile traced"),
}


@pytest.mark.parametrize("case", _CASES)
def test_errors(case: str) -> None:
    given, kind, message = _CASES[case]
    arguments = {"model": build(), "inputs": torch.empty(BATCH, DIM), "mesh_shape": (8,), "hardware": "h100", **given}
    model, inputs, mesh_shape, hardware = (arguments.pop(name) for name in ("model", "inputs", "mesh_shape", "hardware"))
    excepthook = sys.excepthook
    with pytest.raises(kind, match=f"(?s){message}"):
        explain(model, inputs, mesh_shape, hardware, suggest=False, **arguments)
    assert not torch.distributed.is_initialized() and sys.excepthook is excepthook


def test_what_communicates_outside_of_graphs_is_said() -> None:
    def shard(model: Any, mesh: Any) -> None:
        shard_all(model, mesh)
        model.blocks[1].forward = torch.compiler.disable(model.blocks[1].forward)

    report = explain(build(), torch.empty(BATCH, DIM), (8,), "h100", shard=shard, suggest=False)
    assert report.outside and "Not counted:" in str(report)
    assert "Not counted:" not in str(report_of("h100"))


def test_options_that_cannot_be_kept() -> None:
    options = {"schedule": "auto", "memory_limit": 100}
    with pytest.raises(ValueError, match=r"memory_limit.* = 100 is too low"):
        explain(build(), torch.empty(BATCH, DIM), (8,), "h100", options=options, suggest=False)


def test_two_models_have_names_of_their_own() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = build(), build()

        def forward(self, x: Tensor) -> Tensor:
            return self.one(x) + self.two(x)

    def shard(model: Any, mesh: Any) -> None:
        shard_all(model.one, mesh)
        shard_all(model.two, mesh)

    report = explain(Both(), torch.empty(BATCH, DIM), (8,), "h100", shard=shard, suggest=False)
    assert len({unit.name for unit in report.units}) == 8
    assert 4 * report.total.parameters == 2 * bytes_of(build())
    check_sums(report)


def test_a_process_group_is_in_the_way(fake_ranks: None) -> None:
    with pytest.raises(RuntimeError, match="there is one already"):
        explain(build(), torch.empty(BATCH, DIM), (8,), "h100")


def test_calibration_file(tmp_path: Any) -> None:
    known_hardware("cuda", "H100").save(tmp_path / "hardware.json")
    report = explain(build(), torch.empty(BATCH, DIM), (RANKS,), tmp_path / "hardware.json", suggest=False)
    assert report == report_of("h100") and isinstance(report.hardware, Hardware)
