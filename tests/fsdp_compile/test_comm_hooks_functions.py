from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile import comm_hooks
from fsdp_compile.comm_hooks import BoundHook, DefaultState, LowPrecisionState, bind_hook
from passes.collectives.traced_hook import apply_in_place_hook, apply_reduce_hook
from tests.common.distributed import RankPools
from tests.passes.tracing import WORLD_SIZE, PassTestCase

pytestmark = pytest.mark.units_apart


class TestTracedHooks(PassTestCase):
    def graph(self, state: Any, hook: Callable[..., Any], dtype: torch.dtype = torch.float32) -> str:
        bound = bind_hook(state, hook)
        assert bound.reduce is not None
        gm = self.trace(
            lambda grad: apply_reduce_hook(bound.reduce, grad, WORLD_SIZE), torch.zeros(16, dtype=dtype), names="grad"
        )
        return self.text(gm.graph)

    def test_reduce_scatter(self) -> None:
        state = DefaultState(dist.group.WORLD)
        self.assertExpectedInline(
            self.graph(state, comm_hooks.reduce_scatter_hook),
            """\
def forward(self, grad: "f32[16]"):
    div: "f32[16]" = aten.div.Tensor(grad, 4.0)
    reduce_scatter_tensor: "f32[2]" = _c10d_functional.reduce_scatter_tensor.default(div, 'sum', 8, 'shard')
    wait_tensor: "f32[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div_1: "f32[2]" = aten.div.Tensor(wait_tensor, 2.0)
    return div_1
""",
        )

    def test_bf16(self) -> None:
        state = LowPrecisionState(dist.group.WORLD)
        self.assertExpectedInline(
            self.graph(state, comm_hooks.bf16_compress_hook),
            """\
def forward(self, grad: "f32[16]"):
    convert_element_type: "bf16[16]" = prims.convert_element_type.default(grad, torch.bfloat16)
    div: "bf16[16]" = aten.div.Tensor(convert_element_type, 4.0)
    reduce_scatter_tensor: "bf16[2]" = _c10d_functional.reduce_scatter_tensor.default(div, 'sum', 8, 'shard')
    wait_tensor: "bf16[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div_1: "bf16[2]" = aten.div.Tensor(wait_tensor, 2.0)
    convert_element_type_1: "f32[2]" = prims.convert_element_type.default(div_1, torch.float32)
    return convert_element_type_1
""",
        )

    def test_all_reduce(self) -> None:
        bound = bind_hook(DefaultState(dist.group.WORLD), default_hooks.allreduce_hook)
        gm = self.trace(lambda grad: apply_in_place_hook(bound.in_place, grad), torch.zeros(16), names="grad")
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[16]"):
    div: "f32[16]" = aten.div.Tensor(grad, 4.0)
    all_reduce: "f32[16]" = _c10d_functional.all_reduce.default(div, 'sum', 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_reduce)
    div_1: "f32[16]" = aten.div.Tensor(wait_tensor, 2.0)
    return div_1
""",
        )

    def test_torchs_own_hook_is_traced_as_ours(self) -> None:
        state = LowPrecisionState(dist.group.WORLD, torch.bfloat16)
        assert self.graph(state, default_hooks.fp16_compress_hook) == self.graph(state, comm_hooks.fp16_compress_hook)


@pytest.mark.parametrize("name", ["allreduce_hook", "reduce_scatter_hook", "fp16_compress_hook", "bf16_compress_hook"])
def test_torchs_hooks_are_replaced(name: str) -> None:
    state = object()
    bound = bind_hook(state, getattr(default_hooks, name))
    for function in (bound.reduce, bound.in_place):
        if function is not None:
            assert isinstance(function, functools.partial)
            assert function.func is getattr(comm_hooks, name) and function.args == (state,)
    assert bound.name == name
    assert (bound.reduce is None) == (name == "allreduce_hook")
    assert (bound.in_place is None) == (name == "reduce_scatter_hook")


class _Hooks:
    def method(self, state: Any, grad: Tensor, output: Tensor) -> None: ...

    def __call__(self, state: Any, grad: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("hook", "name", "takes"),
    [
        (lambda state, grad, output: None, "<lambda>", "output"),
        (lambda state, grad: None, "<lambda>", "grad"),
        (lambda state, grad, output=None: None, "<lambda>", "both"),
        (lambda state, grad, scale=2.0: None, "<lambda>", "grad"),
        (lambda state, grad, output, *, scale=2.0: None, "<lambda>", "output"),
        (lambda *arguments: None, "<lambda>", "both"),
        (_Hooks().method, "method", "output"),
        (_Hooks(), "_Hooks", "grad"),
        (functools.partial(comm_hooks.default_hooks._low_precision_hook, torch.bfloat16), "_low_precision_hook", "output"),
    ],
)
def test_parameters_say_what_a_hook_does(hook: Callable[..., Any], name: str, takes: str) -> None:
    bound = bind_hook(None, hook)
    assert bound.name == name
    assert (bound.reduce is not None) == (takes in ("output", "both"))
    assert (bound.in_place is not None) == (takes in ("grad", "both"))


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("allreduce", "is a function, not 'allreduce'"),
        (lambda grad: None, r"'<lambda>' takes neither .*its parameters are \(grad\)"),
        (lambda state, grad, output, extra: None, "takes neither"),
        (lambda state, grad, *, scale: None, "takes neither"),
    ],
)
def test_refuses_what_is_no_hook(hook: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        bind_hook(None, hook)


def test_a_bound_hook_equals_itself_only() -> None:
    bound, other = (bind_hook(None, comm_hooks.allreduce_hook) for _ in range(2))
    assert bound == bound and bound != other
    assert len({bound, other}) == 2


def _gradient(rank: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(6, generator=torch.Generator().manual_seed(rank)).to(dtype)


def _run(function: Callable[[Tensor], Tensor], flat: Tensor) -> Tensor:
    """Return the result of ``function``, after checking that its traced graph computes the same."""
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(flat)
    value = function(flat)
    traced = make_fx(function)(fake)(flat)
    assert value.dtype == flat.dtype and torch.equal(value, traced)
    return value


def _run_hook(name: str, dtype: torch.dtype, parameter_type: torch.dtype) -> dict[str, Tensor]:
    """Return the hook's results as "reduce" and as "in_place", and torch's own as "torch" if its hook runs on a CPU."""
    state = LowPrecisionState(dist.group.WORLD, parameter_type)
    # With the factors of two ranks, there would be no division before the reduction.
    state.gradient_predivide_factor, state.gradient_postdivide_factor = 4.0, 3.0
    flat = _gradient(dist.get_rank(), dtype)
    bound: BoundHook = bind_hook(state, getattr(comm_hooks, name))
    results = {}
    if bound.reduce is not None:
        results["reduce"] = _run(functools.partial(_reduce, bound.reduce), flat)
    if bound.in_place is not None:
        results["in_place"] = _run(functools.partial(apply_in_place_hook, bound.in_place), flat)
    if name == "allreduce_hook":
        results["torch"] = flat.clone()
        default_hooks.allreduce_hook(state, results["torch"])
    if name == "reduce_scatter_hook":
        results["torch"] = flat.new_empty(3)
        default_hooks.reduce_scatter_hook(state, flat.clone(), results["torch"])
    return results


def _reduce(hook: Callable[[Tensor, Tensor], None], flat: Tensor) -> Tensor:
    return apply_reduce_hook(hook, flat, 2)


@pytest.mark.parametrize("parameter_type", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "reduced_in"),
    [
        ("allreduce_hook", torch.float32, torch.float32),
        ("allreduce_hook", torch.bfloat16, torch.bfloat16),
        ("reduce_scatter_hook", torch.float32, torch.float32),
        ("reduce_scatter_hook", torch.bfloat16, torch.bfloat16),
        ("fp16_compress_hook", torch.float32, torch.float16),
        ("bf16_compress_hook", torch.float32, torch.bfloat16),
        ("bf16_compress_hook", torch.bfloat16, torch.bfloat16),
    ],
)
def test_values(
    rank_pools: RankPools, name: str, dtype: torch.dtype, reduced_in: torch.dtype, parameter_type: torch.dtype
) -> None:
    results = rank_pools[2].run(_run_hook, name=name, dtype=dtype, parameter_type=parameter_type)
    summed = sum(_gradient(rank, dtype).to(reduced_in) / 4 for rank in range(2))
    expected = summed / 3
    if "compress" in name:
        expected = expected.to(parameter_type).to(dtype)
    for rank, values in enumerate(results):
        for way, value in values.items():
            shard = expected if value.numel() == 6 else expected.chunk(2)[rank]
            assert torch.equal(value, shard), (way, value, shard)
