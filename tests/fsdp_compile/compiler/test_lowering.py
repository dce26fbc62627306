"""A lowering that is not the library's own: when its methods are called, and where its results are used."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch._inductor import config
from torch.fx import GraphModule, Interpreter

from fsdp_compile import fully_shard
from fsdp_compile.compiler.backend import compile_with
from fsdp_compile.compiler.lowering import Lowered, Lowering
from fsdp_compile.compiler.options import LOWERINGS, Options
from fsdp_compile.debug import capture
from fsdp_compile.runtime.planned_graph import boxed
from passes.fx.size_guards import Assumptions
from passes.pass_runner import Pass
from passes.pipeline import GraphOfPlan


def mark_outputs(on: GraphOfPlan) -> None:
    on.graph.output_node().meta["marked"] = True


class Interpreted(Lowering):
    """A lowering that interprets graphs."""

    config_patches: ClassVar[Mapping[str, Any]] = {"fallback_random": True}
    final_passes = (Pass("mark_outputs", mark_outputs),)

    def __init__(self, log: list[Any]):
        self._log = log

    def prepare(self, device_types: set[str]) -> None:
        self._log.append(device_types)

    def compile_unsharded(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Any:
        self._log.append("unsharded")
        return gm.forward

    def lower(
        self, gm: GraphModule, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> Lowered:
        assert config.fallback_random and "marked" in gm.graph.output_node().meta
        self._log.append("backward" if is_backward else "forward")

        def call(args: list[Any]) -> Any:
            inputs = list(args)
            args.clear()
            return Interpreter(gm).run(*inputs)

        return Lowered(boxed(call), f"# {self._log[-1]}")


def test_a_third_lowering(one_rank: None) -> None:
    log: list[Any] = []
    model = fully_shard(nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 1)))
    x = torch.randn(3, 4)
    model(x).sum().backward()
    expected = [param.grad.clone() for param in model.parameters()]
    model.zero_grad()

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_with(Interpreted(log), gm, inputs, Options())

    compiled = torch.compile(model, backend=backend)
    with capture() as captured:
        for _ in range(2):
            compiled(x).sum().backward()
    # The second microbatch adds to existing gradients, which is another plan of the backward graph.
    assert log == [{"cpu"}, "forward", "backward", "backward"]
    assert [graph.code for graph in captured.forward + captured.backward] == ["# forward", "# backward", "# backward"]
    names = [entry.name for entry in captured.passes if entry.stage == "forward"]
    assert names[-2:] == ["schedule", "mark_outputs"]
    for param, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(param.grad, 2 * gradient)
    assert not config.fallback_random


def test_a_graph_in_which_nothing_is_sharded(one_rank: None) -> None:
    log: list[Any] = []

    def backend(gm: GraphModule, inputs: Sequence[Any]) -> Any:
        return compile_with(Interpreted(log), gm, inputs, Options())

    x = torch.randn(3)
    assert torch.equal(torch.compile(lambda x: x.sin() + 1, backend=backend)(x), x.sin() + 1)
    assert log == ["unsharded"]


@pytest.mark.parametrize("name", LOWERINGS)
def test_names_make_lowerings(name: str) -> None:
    first, second = (LOWERINGS[name]() for _ in range(2))
    assert isinstance(first, Lowering)
    # Each graph of Dynamo has a lowering of its own.
    assert first is not second
    assert Options.parse({"lowering": name}).lowering == name
