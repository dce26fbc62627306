"""Formulae are exact: they give the numbers of other sizes that a trace with these sizes gives."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import pytest
import sympy
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp_compile
from fsdp_compile import GatherPolicy, fully_shard
from fsdp_compile.debug import capture
from fsdp_compile.explain import Report, explain, explain_captured

pytestmark = pytest.mark.units_apart

_ROWS, _WIDTH, _LENGTH = 40, 12, 64


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.mixed = nn.Linear(_WIDTH, 3 * _WIDTH)
        self.out = nn.Linear(_WIDTH, _WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unsqueeze(1) for part in self.mixed(self.norm(x)).chunk(3, -1))
        return x + self.out(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))


class Model(nn.Module):
    """A model with attention, whose cost grows with the square of the sequence, and rows that few numbers of ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(_ROWS, _WIDTH)
        self.position = nn.Parameter(torch.zeros(_LENGTH, _WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[: tokens.size(1)]
        for block in self.blocks:
            x = block(x)
        return nn.functional.cross_entropy((x @ self.embed.weight.T).flatten(0, 1), tokens.flatten())


def accumulate(compiled: Any, tokens: Tensor) -> None:
    """Run four microbatches, of which the last reduces gradients."""
    for index in range(4):
        compiled.set_requires_gradient_sync(index == 3)
        compiled(tokens).backward()


def report(
    mesh_shape: tuple[int, ...] = (8,), batch: int = 3, length: int = 16, hardware: str = "h100", **given: Any
) -> Report:
    with torch.device("meta"):
        model, tokens = Model(), torch.empty(batch, length, dtype=torch.long)
    return explain(model, tokens, mesh_shape, hardware, suggest=False, **given)


def check_report(evaluated: Report, traced: Report) -> None:
    """Assert that two reports have equal communication (bytes) and flops, and nearly equal memory and time.

    For a model this small, sizes decide what torch.compile saves, and padding decides which kernels there are.
    """
    assert evaluated.memory.peak_bytes == pytest.approx(traced.memory.peak_bytes, rel=5e-2)
    assert evaluated.flops == traced.flops
    for one, other in zip(evaluated.units, traced.units, strict=True):
        for name in ("name", "shard_bytes", "gathered_bytes", "scattered_bytes", "all_reduced_bytes", "collectives"):
            assert getattr(one, name) == getattr(other, name), (one.name, name)
    assert evaluated.time_ns == pytest.approx(traced.time_ns, rel=1e-2)
    assert evaluated.exposed_ns == pytest.approx(traced.exposed_ns, rel=5e-2, abs=5000)


def check_formulae(explained: Report, traced: Report, values: dict[str, int]) -> None:
    """Assert that evaluated expressions equal the numbers of a traced report."""
    formulae = explained.formulae
    numbers = {**formulae.values, **{symbol: values[symbol.name] for symbol in formulae.values if symbol.name in values}}

    def number(expression: sympy.Expr) -> float:
        return float(expression.subs(numbers))

    assert [unit.name for unit in formulae.units] == [unit.name for unit in traced.units]
    for unit, counted in zip(formulae.units, traced.units, strict=True):
        assert number(unit.shard_bytes) == counted.shard_bytes
        for name in ("gathered_bytes", "scattered_bytes", "all_reduced_bytes"):
            # The report rounds so that sums are exact.
            assert number(getattr(unit, name)) == pytest.approx(getattr(counted, name), abs=1), (unit.name, name)
    assert number(formulae.total.flops) == sum(traced.flops.values())


@pytest.fixture(scope="module")
def explained() -> Report:
    return report()


def test_evaluates_to_what_a_trace_says(explained: Report) -> None:
    sizes = {"S": 7, "B": 5, "T": 24}
    traced = report((7,), batch=5, length=24)
    assert str(explained.at(**sizes)) == str(traced)
    check_formulae(explained, traced, sizes)


class Stack(nn.Module):
    """A model of layers, without parameters of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 40), nn.Linear(40, 12))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x).square().mean()


def shard_layers(model: nn.Module, mesh: DeviceMesh, **options: Any) -> None:
    for layer in model.get_submodule("layers").children():
        fully_shard(layer, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)


def explain_stack(ranks: int, **options: Any) -> Report:
    with torch.device("meta"):
        model, x = Stack(), torch.empty(4, 12)
    return explain(model, x, (ranks,), "h100", shard=partial(shard_layers, **options), suggest=False)


@pytest.mark.night
@pytest.mark.parametrize(
    "options", [pytest.param({}, id="plain"), pytest.param({"gather_policy": GatherPolicy(torch.int8, 16)}, id="rounded")]
)
def test_a_root_without_parameters_of_its_own(options: dict[str, Any]) -> None:
    explained, traced = explain_stack(8, **options), explain_stack(6, **options)
    check_formulae(explained, traced, {"S": 6})
    assert explained.at(S=6).memory.peak_bytes == pytest.approx(traced.memory.peak_bytes, rel=5e-2)
    assert "layers.0\n" in str(explained.formulae) and "root" not in str(explained.formulae)


def test_says_the_same_of_its_own_sizes(explained: Report) -> None:
    assert str(explained.at()) == str(explained)
    formulae = explained.formulae
    assert float(formulae.step_s.subs(formulae.values)) * 1e9 == pytest.approx(explained.time_ns, rel=1e-4)
    assert formulae.peak_bytes.subs(formulae.values) == explained.memory.peak_bytes
    memory = {name: int(value.subs(formulae.values)) for name, value in formulae.memory.items()}
    assert memory == {name: held for name, held in explained.memory.categories.items() if held}


def test_equal_sizes_are_no_exception(explained: Report) -> None:
    """A batch may equal the sequence, and their product a width: no gradient that is broadcast back compares them."""
    for sizes in ({"B": 5, "T": 5}, {"B": 3, "T": _WIDTH // 3}, {"B": 4, "T": 3 * _WIDTH // 4}):
        assert explained.at(**sizes).time_ns > 0


def test_says_what_dominates_at_other_sizes(explained: Report) -> None:
    there = explained.at(S=512)
    formulae = there.formulae
    assert float(formulae.step_s.subs(formulae.values)) * 1e9 == pytest.approx(there.time_ns, rel=1e-3)
    # With 512 ranks, most of the time is the startup of gathers and reductions, which grows with the number of ranks.
    terms = [line for line in str(formulae).splitlines() if line.strip().endswith("ms")]
    assert "L_(gather,S)" in terms[0]
    assert there.at(S=8).time_ns == explained.time_ns


@pytest.mark.night
def test_replicas_and_microbatches() -> None:
    explained = report((2, 4), step=accumulate)

    def accumulate_six(compiled: Any, tokens: Tensor) -> None:
        for index in range(6):
            compiled.set_requires_gradient_sync(index == 5)
            compiled(tokens).backward()

    sizes = {"S": 8, "R": 3, "M": 6}
    traced = report((3, 8), step=accumulate_six)
    assert str(explained.at(**sizes)) == str(traced)
    check_formulae(explained, traced, sizes)
    with pytest.raises(ValueError, match=r"M=1 is too few: .* with 4 microbatches, of which 2 do the same. Give at least 2"):
        explained.at(M=1)


@pytest.mark.night
@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@settings(max_examples=5, deadline=None, derandomize=True, phases=[Phase.generate], suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_evaluates_to_what_a_trace_says_anywhere(hardware: str, data: st.DataObject) -> None:
    if not hasattr(test_evaluates_to_what_a_trace_says_anywhere, hardware):
        setattr(test_evaluates_to_what_a_trace_says_anywhere, hardware, report((2, 4), hardware=hardware))
    explained: Report = getattr(test_evaluates_to_what_a_trace_says_anywhere, hardware)
    sizes = {
        "S": data.draw(st.integers(2, 24)),
        "R": data.draw(st.integers(2, 4)),
        # Not one, which is a constant to torch.compile: for a batch of one, it may save a byte or two less.
        "B": data.draw(st.integers(2, 9)),
        "T": data.draw(st.integers(2, _LENGTH)),
    }
    traced = report((sizes["R"], sizes["S"]), sizes["B"], sizes["T"], hardware)
    check_report(explained.at(**sizes), traced)
    check_formulae(explained, traced, sizes)


@pytest.mark.night
@pytest.mark.parametrize("options", [{"schedule": "auto"}, {"lowering": "aot_eager"}], ids=["auto", "aot_eager"])
def test_evaluates_other_schedules(options: dict[str, Any]) -> None:
    # Only the sequence differs. At sizes this small, the automatic schedule decides the same.
    assert str(report(options=options).at(T=20)) == str(report(length=20, options=options))


def test_graphs_depend_on_ranks_through_numbers_alone() -> None:
    with torch.device("meta"):
        tokens = torch.empty(3, 16, dtype=torch.long)
    texts = []
    for ranks in (2, 4):
        with torch.device("meta"):
            model = Model()
        explained = explain(model, tokens, (ranks,), "h100", suggest=False)
        assert explained._source is not None
        texts.append([re.sub(r"\d+", "#", call.graph.readable()) for call in explained._source.calls])
    assert texts[0] == texts[1]


def test_is_readable(explained: Report) -> None:
    text = str(explained.formulae)
    assert re.search(r"^total\n  shards +[0-9.]+ KiB/S\n  gathers send +[0-9.]+ KiB\*\(S-1\)/S$", text, re.MULTILINE)
    assert re.search(r"^  flops +504\*B\*T\^2 \+ 1.325e\+04\*B\*T$", text, re.MULTILINE)
    # S divides all rows, so nothing is padded.
    assert "//" not in text
    assert "Max" not in text
    assert re.search(r"^  S +8 +ranks that a parameter is sharded over$", text, re.MULTILINE)
    latex = explained.formulae.latex()
    assert latex.startswith(r"\begin{align*}")
    assert r"\frac" in latex


def test_refuses_what_it_does_not_depend_on(explained: Report) -> None:
    with pytest.raises(ValueError, match=r"R=2: the step depends on S .*, B .*, T .*, and on no R"):
        explained.at(R=2)
    with pytest.raises(ValueError, match="S=1 must be a whole number, at least 2"):
        explained.at(S=1)
    # The table of positions is too short for 65 tokens.
    with pytest.raises(ValueError, match=r"At B=3, T=65 the model does something else than it did when it was traced"):
        explained.at(T=65)


@pytest.mark.night
def test_refuses_a_model_that_has_changed() -> None:
    with torch.device("meta"):
        model, tokens = Model(), torch.empty(3, 16, dtype=torch.long)
    explained = explain(model, tokens, (8,), "h100", suggest=False)
    del model.blocks[2]
    with pytest.raises(RuntimeError, match="has changed since it was explained"):
        explained.at(S=4)


@pytest.mark.night
def test_a_model_of_one_length_has_no_formulae_in_it() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Embedding(_ROWS, 8), nn.Flatten(), nn.Linear(8 * 16, 4))
        tokens = torch.empty(3, 16, dtype=torch.long)
    explained = explain(model, tokens, (8,), "h100", suggest=False)
    with pytest.raises(ValueError, match="and on no T"):
        explained.at(T=8)
    assert explained.at(B=6).tokens == 6 * 16


@pytest.mark.night
def test_refuses_shard_groups_of_different_sizes() -> None:
    with torch.device("meta"):
        model, tokens = Model(), torch.empty(3, 16, dtype=torch.long)

    def shard(model: nn.Module, mesh: Any) -> None:
        fully_shard(model.blocks[0], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["replicate"])

    explained = explain(model, tokens, (2, 4), "h100", shard=shard, suggest=False)
    with pytest.raises(ValueError, match="sharded over groups of different sizes"):
        explained.formulae  # noqa: B018


def test_warns_where_symbols_change_the_graph() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.layer(x)
            return wide.sum() if x.size(0) == 1 else self.layer(wide).sum()

    with torch.device("meta"):
        # A batch of one is traced as a batch of two, as torch.compile takes one for a constant.
        explained = explain(Branches(), torch.empty(1, 8), (8,), "h100", suggest=False)
    with pytest.warns(UserWarning, match="torch.compile makes other graphs of it"):
        explained.at()


def test_captures_have_none(one_rank: None) -> None:
    torch.compiler.reset()
    model = nn.Linear(4, 4)
    fully_shard(model)
    compiled = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as captured:
        compiled(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="not for a capture"):
        explain_captured(captured, "cpu").formulae  # noqa: B018
