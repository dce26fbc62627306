"""Options and modes of Inductor, beside options of ``fsdp_backend``."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.options import Options
from fsdp_compile.debug import Capture, capture
from tests.common.microbatches import full
from tests.common.replay import recordings_on_cpu

# An option that changes the generated code of every graph.
_NO_ASSERTS = {"size-asserts": False}


class Reused(nn.Module):
    """Two equal layers, whose segments share code."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x)).exp())).sin()


def sharded() -> Any:
    torch.manual_seed(0)
    model = Reused()
    for layer in list(model.children()):
        fully_shard(layer)
    return fully_shard(model)


def step(compiled: Callable[[Tensor], Tensor], model: Any) -> list[Tensor]:
    compiled(torch.linspace(-1, 1, 64).view(4, 16)).square().sum().backward()
    return [full(param.grad) for param in model.parameters()]


def train(**arguments: Any) -> tuple[Capture, list[Tensor]]:
    """Train two microbatches. The first reduces nothing, so that variants of the graphs are lowered late."""
    torch._dynamo.reset()
    model = sharded()
    compiled = torch.compile(model, backend=fsdp_backend, **arguments)
    with capture() as captured:
        model.set_requires_gradient_sync(False)
        compiled(torch.ones(4, 16)).square().sum().backward()
        model.set_requires_gradient_sync(True)
        grads = step(compiled, model)
    return captured, grads


@pytest.mark.inductor
def test_options_reach_every_graph(one_rank: None) -> None:
    usual, expected = train(options={"min_bucket_bytes": 0})
    options = {"min_bucket_bytes": 0, **_NO_ASSERTS}
    given = dict(options)
    captured, grads = train(options=options)
    assert options == given
    torch.testing.assert_close(grads, expected)
    assert len(captured.forward) == len(usual.forward) and len(captured.backward) == len(usual.backward) == 2
    for graph, other in zip(captured.forward + captured.backward, usual.forward + usual.backward, strict=True):
        assert "assert_size_stride(" in str(other.code) and "assert_size_stride(" not in str(graph.code)


def test_lowering_without_code_takes_them(one_rank: None) -> None:
    _, expected = train(options={"lowering": "aot_eager"})
    _, grads = train(options={"lowering": "aot_eager", **_NO_ASSERTS})
    torch.testing.assert_close(grads, expected, rtol=0, atol=0)


@pytest.mark.inductor
def test_a_pass_among_the_options_sees_the_graph(one_rank: None) -> None:
    seen = []

    class Look(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            seen.append(sum(node.target == torch.ops.aten.tanh.default for node in graph.nodes))

        def uuid(self) -> Any:
            return "look"

    train(options={"joint_custom_post_pass": Look()})
    # The pass sees every layer, as repeated layers are not folded beside it.
    assert seen == [2]


@pytest.mark.inductor
@pytest.mark.parametrize("mode", ["max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"])
def test_modes_train(mode: str, one_rank: None) -> None:
    """Gradients equal those without a mode. As with Inductor, no warning says that the CPU has no CUDA graphs."""
    _, expected = train()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cudagraphs.*")
        _, grads = train(mode=mode)
    torch.testing.assert_close(grads, expected)


def test_cuda_graphs_are_those_of_this_backend(one_rank: None) -> None:
    # On the CPU, operators are recorded.
    with recordings_on_cpu() as counts:
        assert Options.parse(None, "reduce-overhead").records_on(torch.device("cpu"))
        model = sharded()
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", "triton.cudagraphs": True})
        expected = step(compiled, model)
        for _ in range(3):
            model.zero_grad()
            torch.testing.assert_close(step(compiled, model), expected, rtol=0, atol=0)
        assert counts.take()[2] > 0


@pytest.mark.inductor
def test_cuda_graphs_of_the_configuration(one_rank: None) -> None:
    with torch._inductor.config.patch({"triton.cudagraphs": True}):
        assert Options.parse({}).records_on(torch.device("cuda")) and not Options.parse({}).records_on(torch.device("cpu"))
        assert not Options.parse({"triton.cudagraphs": False}).cudagraphs
        train()
    assert not Options.parse({}).cudagraphs


@pytest.mark.inductor
def test_models_that_are_not_sharded_have_them_too(one_rank: None) -> None:
    torch.manual_seed(0)
    model = nn.Linear(16, 16)
    expected = step(model, model)
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = step(torch.compile(model, backend=fsdp_backend, mode="reduce-overhead"), model)
    torch.testing.assert_close(found, expected)


@pytest.mark.graph
@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"max_autotne": True}, r"no option 'max_autotne'; it has: lowering.* and those of Inductor"),
        ({"max_autotune": "yes"}, r"options\['max_autotune'\] is an option of Inductor and must be of type bool, not 'yes'"),
        ({"inductor": {}}, r"no option 'inductor'"),
        ({"freezing": True}, r"options\['freezing'\] = True of Inductor contradicts fsdp_backend: parameters that are frozen"),
        ({"reorder-for-compute-comm-overlap": True}, r"contradicts fsdp_backend: fsdp_backend places and joins collectives"),
        ({"bucket_all_gathers_fx": "all"}, r"contradicts .* see options\['schedule'\]"),
        ({"cudagraphs": False, "triton.cudagraphs": True}, r"leave one out"),
        (
            {"memory_budget": 10, "triton.cudagraphs": True},
            r"'memory_budget'\] does not count the memory that CUDA graphs keep",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_bad_options(options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Options.parse(options)


@pytest.mark.graph
def test_modes_are_torchs() -> None:
    assert Options.parse({}, "max-autotune").inductor == torch._inductor.list_mode_options("max-autotune")
    with pytest.raises(ValueError, match="There is no mode='fast'; there are: default"):
        Options.parse(None, "fast")
    # The mode turns off passes over joint graphs.
    with pytest.raises(ValueError, match="'use_joint_graph_passes'] = False of Inductor contradicts"):
        Options.parse(None, "lite")
