"""Functions that Dynamo does not look into, and bodies of higher-order operators, which read parameters."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from fsdp_compile import fsdp_backend, fully_shard
from tests.common.parity import assert_same_gradients, compiled_beside_whole

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


def leaf(function: Callable[..., Any]) -> Any:
    decorators = pytest.importorskip("torch._dynamo.decorators")
    if not hasattr(decorators, "leaf_function"):
        pytest.skip(f"torch {torch.__version__} has no leaf_function")
    made = decorators.leaf_function(function)
    made.register_fake(lambda *args: torch.empty_like(args[-1]))
    return made


OPAQUE: dict[str, Callable[..., Any]] = {
    "nonstrict": lambda function: torch._dynamo.nonstrict_trace(function),
    "allowed": torch.compiler.allow_in_graph,
    "leaf": leaf,
    "disabled": torch.compiler.disable,
}


class Opaque(nn.Module):
    """A module whose forward calls an opaque function. The function closes over parameters, or takes them."""

    def __init__(self, reads: str, passes: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.layer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self._reads, self._passes = reads, passes

    def forward(self, x: Tensor) -> Tensor:
        x = self.layer(torch.tanh(self.inner(x)) @ self.weight)
        if self._passes:
            return self.layer(self.call(getattr(self, self._reads), x))
        return self.layer(self.call(x))

    def prepare(self, mark: Callable[..., Any]) -> None:
        """Make the function. Dynamo takes no decorated functions that are made in a forward."""
        name = self._reads

        def closure(x: Tensor) -> Tensor:
            return apply(getattr(self, name), x)

        self.call = mark(apply if self._passes else closure)


def apply(given: Any, x: Tensor) -> Tensor:
    result: Tensor = given(x) if isinstance(given, nn.Module) else x @ given
    return result


def opaque_beside_whole(kind: str, reads: str, passes: bool, options: dict[str, Any]) -> tuple[Any, Any, Any]:
    def shard(model: Any) -> Any:
        fully_shard(model.inner)
        return fully_shard(model)

    model, compiled, whole = compiled_beside_whole(lambda: Opaque(reads, passes), shard, options)
    model.prepare(OPAQUE[kind])
    whole.prepare(lambda function: function)
    return model, compiled, whole


def train_both(model: nn.Module, compiled: Any, whole: Any) -> None:
    for _ in range(2):
        for forward in (compiled, whole):
            forward(torch.ones(3, 8, dtype=torch.float64)).square().sum().backward()
        assert_same_gradients(model, whole)


@pytest.mark.parametrize("reads", ["weight", "layer", "inner"])
@pytest.mark.parametrize("kind", OPAQUE)
def test_a_function_that_dynamo_does_not_look_into_takes_parameters(kind: str, reads: str, one_rank: None) -> None:
    train_both(*opaque_beside_whole(kind, reads, True, _EAGER_LOWERING))


def test_a_disabled_function_closes_over_parameters(one_rank: None) -> None:
    """It is a part of the model that is not compiled."""
    train_both(*opaque_beside_whole("disabled", "inner", False, _EAGER_LOWERING))


@pytest.mark.parametrize("reads", ["weight", "layer", "inner"])
def test_a_nonstrict_function_that_closes_over_parameters_breaks_the_graph(reads: str, one_rank: None) -> None:
    with pytest.warns(UserWarning, match=rf"Parameter {reads}.* is read inside a function that Dynamo does not look into"):
        train_both(*opaque_beside_whole("nonstrict", reads, False, _EAGER_LOWERING))


@pytest.mark.parametrize(
    ("kind", "reads"), [("allowed", "weight"), ("allowed", "layer"), ("allowed", "inner"), ("leaf", "inner")]
)
def test_a_function_that_closes_over_parameters_is_refused(kind: str, reads: str, one_rank: None) -> None:
    model, compiled, _ = opaque_beside_whole(kind, reads, False, _EAGER_LOWERING)
    with warnings.catch_warnings(), pytest.raises(RuntimeError, match=rf"Parameter {reads}.*Pass the parameter, or the module"):
        warnings.simplefilter("ignore")
        compiled(torch.ones(3, 8, dtype=torch.float64))
    model.prepare(OPAQUE["disabled"])
    compiled(torch.ones(3, 8, dtype=torch.float64)).sum().backward()


def test_parameters_of_a_module_that_reads_other_tensors(one_rank: None) -> None:
    """A leaf function lists them, as what it is to return gradients of."""
    model = fully_shard(nn.Linear(8, 8))
    given = {"weight": torch.randn(8, 8), "bias": torch.randn(8)}
    with nn.utils.stateless._reparametrize_module(model, given):
        assert {name: id(param) for name, param in model.named_parameters()} == {
            name: id(value) for name, value in given.items()
        }
    assert all(isinstance(param, nn.Parameter) for param in model.parameters())


@torch.compiler.nested_compile_region
def region(x: Tensor, *weights: Tensor) -> Tensor:
    return torch.nn.functional.linear(x, *weights)


def nested(body: Callable[..., Tensor], x: Tensor, *operands: Tensor) -> Tensor:
    return torch.compiler.nested_compile_region(body)(x, *operands)


def cond(body: Callable[..., Tensor], x: Tensor, *operands: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > -100, body, lambda x, *_: x + 1, (x, *operands))
    return result


def mapped(body: Callable[..., Tensor], x: Tensor, *operands: Tensor) -> Tensor:
    result: Tensor = torch._higher_order_ops.map(body, x, *operands)
    return result


def direct(body: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return body(*given)


class WithBody(nn.Module):
    """A module with a unit inside, which the body of a higher-order operator calls, or whose parameters the body takes."""

    def __init__(self, call: Callable[..., Tensor], body: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.layer, self.inner = nn.Linear(8, 8), nn.Linear(8, 8)
        self._call, self._body = call, body

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.layer(x))
        if self._body is None:
            return self._call(lambda x: self.inner(x), x)
        return self._call(self._body, x, self.layer.weight, self.layer.bias)


def body_beside_whole(call: Callable[..., Tensor], body: Callable[..., Tensor] | None = None) -> tuple[Any, Any, Any]:
    def shard(model: Any) -> Any:
        fully_shard(model.inner)
        return fully_shard(model)

    return compiled_beside_whole(lambda: WithBody(call, body), shard, _EAGER_LOWERING)


@pytest.mark.parametrize(
    ("call", "is_compiled"), [(cond, False), (cond, True), (mapped, False), (mapped, True), (nested, True)]
)
def test_a_body_of_a_higher_order_operator_that_reads_parameters_is_refused(
    call: Callable[..., Tensor], is_compiled: bool, one_rank: None
) -> None:
    model, compiled, _ = body_beside_whole(call)
    with pytest.raises(RuntimeError, match=r"Parameter inner\.weight is read inside the body of .*pass it in as an operand"):
        (compiled if is_compiled else model)(torch.ones(3, 8, dtype=torch.float64))


@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
@pytest.mark.parametrize(
    ("call", "body"), [(cond, torch.nn.functional.linear), (mapped, torch.nn.functional.linear), (direct, region)]
)
def test_a_body_of_a_higher_order_operator_takes_parameters(
    call: Callable[..., Tensor], body: Callable[..., Tensor], is_compiled: bool, one_rank: None
) -> None:
    model, compiled, whole = body_beside_whole(call, body)
    train_both(model, compiled if is_compiled else model, whole)
