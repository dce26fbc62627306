"""Units whose parameters have several dtypes: gathered with one collective, and trained as whole parameters are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import expecttest
import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.func import functional_call

from fsdp_compile import flat_optimizer, fsdp_backend, fully_shard, optimizer_in_backward
from fsdp_compile.debug import Capture, capture
from tests.common.distributed import RankPools, device_mesh, fake_group
from tests.common.parity import shard_units
from tests.common.versions import NewerPolicy

_ALL_GATHER = torch.ops._c10d_functional.all_gather_into_tensor.default
_SYSTEMS = ("eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor))


class Experts(nn.Module):
    """Two layers that a router weighs. The router is in single precision, as routers of a model in bfloat16 are."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.router = nn.Linear(6, 2)
        self.experts = nn.ModuleList(nn.Linear(6, 6, dtype=dtype) for _ in range(2))
        self.norm = nn.LayerNorm(6)
        self.codes = nn.Parameter(torch.arange(6, dtype=torch.int8), requires_grad=False)
        for param in (*self.router.parameters(), *self.norm.parameters()):
            param.keeps_dtype = True  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.to(self.router.weight.dtype)).softmax(-1).to(x.dtype)
        hidden = self.norm(x.to(self.norm.weight.dtype)).to(self.experts[0].weight.dtype)
        outputs = [expert(hidden).tanh() * weights[..., number, None] for number, expert in enumerate(self.experts)]
        return x + sum(outputs) * (1 + self.codes / 8)


class Mixture(nn.Module):
    """Blocks of experts, as a model in a dtype."""

    def __init__(self, dtype: torch.dtype = torch.float64, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(*(Experts(dtype) for _ in range(layers)))
        self.head = nn.Linear(6, 3, dtype=dtype)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(x)) * self.scale


def _sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "of torch": _sgd,
    "flat": lambda params: flat_optimizer(torch.optim.SGD, params, lr=0.1, momentum=0.9),
    "in backward": lambda params: optimizer_in_backward(torch.optim.SGD, params, lr=0.1, momentum=0.9),
}


def train(system: str, mesh: tuple[int, ...], optimizer: str = "of torch", **options: Any) -> None:
    """Train beside the whole model, with a step of two microbatches, the first without sync. Runs on every rank."""
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = Mixture(), Mixture()
    shard_units(model, device_mesh(mesh), fully_shard, **options)
    compiled: Any = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    trainable = [param for param in model.parameters() if param.requires_grad]
    step, step_alone = OPTIMIZERS[optimizer](trainable), _sgd([param for param in alone.parameters() if param.requires_grad])
    generator = torch.Generator().manual_seed(1)
    for _ in range(2):
        for micro in range(2):
            batches = torch.randn(world, 2, 5, 6, generator=generator, dtype=torch.float64)
            model.set_requires_gradient_sync(micro == 1)
            model.set_is_last_backward(micro == 1)
            compiled(batches[rank]).square().mean().backward()
            (sum(alone(batch).square().mean() for batch in batches) / world).backward()
        step.step()
        step_alone.step()
        step.zero_grad()
        step_alone.zero_grad()
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert param.dtype == expected.dtype
        # Parts of the computation have single precision.
        torch.testing.assert_close(
            param.full_tensor(), expected, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("system", _SYSTEMS)
def test_trains_as_whole_parameters(system: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train, system=system, mesh=(2,))


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_smaller_groups_and_replicas(system: str, rank_pools: RankPools) -> None:
    rank_pools[4].run(train, system=system, mesh=(4,), reshard_after_forward=2)
    rank_pools[4].run(train, system=system, mesh=(2, 2), reshard_after_forward=False)


@pytest.mark.parametrize("optimizer", ["flat", "in backward"])
def test_optimizers(optimizer: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train, system="aot_eager", mesh=(2,), optimizer=optimizer)


def test_parameters_on_the_host(rank_pools: RankPools) -> None:
    rank_pools[2].run(train, system="aot_eager", mesh=(2,), offload_policy=CPUOffloadPolicy())


# Parameters that compute in different dtypes, as torch 2.15 lets a policy decide, and our ``param_dtypes`` with any torch.


def _keeps_own(param: nn.Parameter) -> torch.dtype | None:
    """Return the parameter's dtype for the router and the norm."""
    return param.dtype if getattr(param, "keeps_dtype", False) else None


_ALL_64 = MixedPrecisionPolicy(torch.float64, torch.float64)
#: Arguments of ``fully_shard`` that have parameters compute in the dtypes of :func:`_keeps_own`, else in double precision.
WAYS: dict[str, dict[str, Any]] = {
    "policy": {"mp_policy": NewerPolicy(torch.float64, torch.float64, param_dtype_override_fn=_keeps_own)},
    "patterns": {"mp_policy": _ALL_64, "param_dtypes": {"*.router.*": "keep", "*norm*": torch.float32, "*": torch.float64}},
    "function": {"mp_policy": _ALL_64, "param_dtypes": lambda name, param: _keeps_own(param)},
}


def train_in_other_dtypes(system: str, way: str = "policy", **options: Any) -> None:
    """Compare gradients with those of the whole model, with cast parameters. Runs on every rank."""
    torch._dynamo.reset()
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = Mixture(torch.float32), Mixture(torch.float32)
    shard_units(model, device_mesh((world,)), fully_shard, **WAYS[way], **options)
    compiled: Any = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    batches = torch.randn(world, 2, 5, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    compiled(batches[rank]).square().mean().backward()
    read = {
        name: param.to(_keeps_own(param) or torch.float64) if param.is_floating_point() else param
        for name, param in alone.named_parameters()
    }
    (sum(functional_call(alone, read, (batch,)).square().mean() for batch in batches) / world).backward()
    for (name, param), expected in zip(model.named_parameters(), alone.parameters(), strict=True):
        if param.requires_grad:
            assert param.grad.dtype == torch.float32
            torch.testing.assert_close(
                param.grad.full_tensor(), expected.grad, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("system", _SYSTEMS)
def test_a_policy_decides_for_each_parameter(system: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_in_other_dtypes, system=system)


@pytest.mark.parametrize("way", ["patterns", "function"])
def test_names_decide_for_each_parameter(way: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_in_other_dtypes, system="aot_eager", way=way)


@pytest.mark.parametrize(
    ("param_dtypes", "message"),
    [
        ({"*": torch.int8}, "has torch.int8 for '\\*': give a floating-point dtype"),
        ({"*.weight": None}, "has None for"),
        (lambda name, param: "float32", "returned 'float32' for parameter 0."),
        ([torch.float32], "takes a mapping or a function"),
    ],
)
def test_dtypes_that_are_none(param_dtypes: Any, message: str, fake_ranks: None) -> None:
    model = nn.Sequential(Experts(torch.float32))
    with pytest.raises(TypeError, match=message):
        fully_shard(model, param_dtypes=param_dtypes)
    assert not hasattr(model, "_fsdp_unit")


def test_a_policy_and_parameters_on_the_host(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_in_other_dtypes, system="eager", offload_policy=CPUOffloadPolicy())
    rank_pools[2].run(train_in_other_dtypes, system="aot_eager", offload_policy=CPUOffloadPolicy())


def test_one_gather_and_one_reduction(fake_ranks: None) -> None:
    policy = NewerPolicy(torch.bfloat16, torch.float32, param_dtype_override_fn=_keeps_own)
    graphs = captured(policy, torch.float32)
    assert gathered(graphs) == [torch.uint8]
    assert len(reduced(graphs)) == 1


def captured(policy: MixedPrecisionPolicy, dtype: torch.dtype = torch.bfloat16) -> Capture:
    model = fully_shard(nn.Sequential(Experts(dtype)), mp_policy=policy)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as graphs:
        compiled(torch.ones(4, 6)).sum().backward()
    return graphs


def gathered(graphs: Capture) -> list[torch.dtype]:
    graph = graphs.forward[0].graph_module.graph
    return [node.meta["val"].dtype for node in graph.find_nodes(op="call_function", target=_ALL_GATHER)]


def reduced(graphs: Capture) -> list[torch.dtype]:
    graph = graphs.backward[0].graph_module.graph
    target = torch.ops._c10d_functional.reduce_scatter_tensor.default
    return [node.meta["val"].dtype for node in graph.find_nodes(op="call_function", target=target)]


def test_one_gather(fake_ranks: None) -> None:
    assert gathered(captured(MixedPrecisionPolicy())) == [torch.uint8]


def test_one_reduction_for_each_dtype(fake_ranks: None) -> None:
    assert sorted(reduced(captured(MixedPrecisionPolicy())), key=str) == [torch.bfloat16, torch.float32]


class Gated(nn.Module):
    """A layer in bfloat16 with a gate in single precision."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 8)
        self.up = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(x).sigmoid() * self.up(x.bfloat16())


class TestGraph(expecttest.TestCase):
    """Runs of flat storage in each dtype are sent as bytes, together. The wide numbers come first."""

    def test_forward(self) -> None:
        with fake_group():
            model = fully_shard(nn.Sequential(Gated()), mesh=init_device_mesh("cpu", (8,), mesh_dim_names=("shard",)))
            compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
            with capture() as graphs, torch.no_grad():
                compiled(torch.ones(4, 8))
        self.assertExpectedInline(
            graphs.forward[0].readable(),
            """\
def forward(self, shard_0_gate_weight: "f32[1, 8]", shard_0_gate_bias: "f32[1]", arg2_1: "f32[4, 8]", shard_0_up_weight: "bf16[1, 8]", shard_0_up_bias: "bf16[1]", run_0_0_gate_weight: "f32[9]", run_1_0_up_weight: "bf16[9]"):
    view_dtype: "u8[36]" = aten.view.dtype(run_0_0_gate_weight, torch.uint8)
    view_dtype_1: "u8[18]" = aten.view.dtype(run_1_0_up_weight, torch.uint8)
    cat: "u8[54]" = aten.cat.default([view_dtype, view_dtype_1])
    all_gather_into_tensor: "u8[432]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "u8[432]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_8: "u8[8, 54]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_8, [32, 4, 16, 2], 1)
    getitem: "u8[8, 32]" = split_with_sizes[0]
    getitem_1: "u8[8, 4]" = split_with_sizes[1]
    getitem_2: "u8[8, 16]" = split_with_sizes[2]
    getitem_3: "u8[8, 2]" = split_with_sizes[3]
    clone: "u8[8, 32]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    view_9: "f32[8, 8]" = aten.view.dtype(clone, torch.float32)
    clone_1: "u8[8, 4]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    view_10: "f32[8, 1]" = aten.view.dtype(clone_1, torch.float32)
    clone_2: "u8[8, 16]" = aten.clone.default(getitem_2, memory_format = torch.contiguous_format)
    view_11: "bf16[8, 8]" = aten.view.dtype(clone_2, torch.bfloat16)
    clone_3: "u8[8, 2]" = aten.clone.default(getitem_3, memory_format = torch.contiguous_format)
    view_12: "bf16[8, 1]" = aten.view.dtype(clone_3, torch.bfloat16)
    view_13: "f32[8, 8]" = aten.view.default(view_9, [8, 8])
    view_14: "f32[8]" = aten.view.default(view_10, [8])
    view_15: "bf16[8, 8]" = aten.view.default(view_11, [8, 8])
    view_16: "bf16[8]" = aten.view.default(view_12, [8])
    permute: "f32[8, 8]" = aten.permute.default(view_13, [1, 0])
    addmm: "f32[4, 8]" = aten.addmm.default(view_14, arg2_1, permute)
    sigmoid: "f32[4, 8]" = aten.sigmoid.default(addmm)
    convert_element_type: "bf16[4, 8]" = prims.convert_element_type.default(arg2_1, torch.bfloat16)
    permute_1: "bf16[8, 8]" = aten.permute.default(view_15, [1, 0])
    addmm_1: "bf16[4, 8]" = aten.addmm.default(view_16, convert_element_type, permute_1)
    mul: "f32[4, 8]" = aten.mul.Tensor(sigmoid, addmm_1)
    return (mul,)
""",
        )
