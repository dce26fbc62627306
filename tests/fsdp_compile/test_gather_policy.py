"""Units whose parameters are gathered in bytes train as one process whose parameters are rounded in the same way."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from functools import partial
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import GatherPolicy, RanksDisagree, fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, capture
from tests.common.distributed import RankPools, device_mesh, fake_group
from tests.common.microbatches import (
    FLAVOURS,
    GPT,
    SMALL,
    Microbatch,
    Run,
    Schedule,
    Task,
    differences,
    reference,
    sgd,
    train_schedules,
)
from tests.common.parity import shard_units
from tests.common.rounding import with_rounded_parameters

pytestmark = pytest.mark.units_apart

_POLICIES = {
    "int8": GatherPolicy(torch.int8, 32),
    "e4m3": GatherPolicy(torch.float8_e4m3fn, 16),
    "e5m2": GatherPolicy(torch.float8_e5m2, 128),
    "int8 rows": GatherPolicy(torch.int8, "row"),
    "e4m3 tensors": GatherPolicy(torch.float8_e4m3fn, "tensor"),
    "mxfp8": GatherPolicy("mxfp8"),
    "nvfp4": GatherPolicy("nvfp4"),
}
_SYSTEMS = ("eager", "aot_eager", "inductor")
_FLAVOURS = ("sharded", "partial_then_unsharded", "keep_unsharded")


def train(
    system: str,
    mesh_shape: tuple[int, ...],
    task: Task,
    policy: str,
    schedules: Mapping[str, list[Schedule]],
    reshard_after_forward: bool | int | None = None,
) -> dict[str, Run | str]:
    """Train by the schedules with a gather policy. Runs on every rank."""
    shard = partial(shard_units, gather_policy=_POLICIES[policy], reshard_after_forward=reshard_after_forward)
    runs, _ = train_schedules(system, mesh_shape, task, schedules, shard, optimizer=sgd, count=False)
    return runs


@pytest.mark.parametrize(
    ("policy", "mesh_shape", "system"),
    [
        # Policies differ in the format, systems in the time of rounding. A test below compares backward's values in each.
        pytest.param(policy, mesh_shape, system, marks=[] if (policy, system) == ("int8", "eager") else pytest.mark.night)
        for number, (policy, system) in enumerate(itertools.product(_POLICIES, _SYSTEMS))
        # Each policy in one kind of graph, one policy of integers and one of floats in each system. Meshes alternate.
        if system == "aot_eager" or policy in ("int8", "e4m3")
        for mesh_shape in [((2,), (2, 2))[number % 2]]
    ],
)
def test_parity(policy: str, mesh_shape: tuple[int, ...], system: str, rank_pools: RankPools) -> None:
    world, flavours = math.prod(mesh_shape), _FLAVOURS[:1] if system == "inductor" else _FLAVOURS
    schedules = {name: [FLAVOURS[name]] * 2 for name in flavours}
    results = rank_pools[world].run(train, system=system, mesh_shape=mesh_shape, task=GPT, policy=policy, schedules=schedules)
    task = with_rounded_parameters(GPT, mesh_shape[-1], _POLICIES[policy])
    expected = reference(task, world, [4, 4], sgd)
    for name in flavours:
        runs = [result[name] for result in results]
        assert all(isinstance(run, Run) for run in runs), "\n".join(map(str, runs))
        assert not differences(runs, expected, 2e-5)
    # The effect of rounding is no rounding error: a run without it differs by more.
    assert differences(runs, reference(GPT, world, [4, 4], sgd), 2e-4)


@pytest.mark.parametrize(
    "system",
    [pytest.param(system, marks=pytest.mark.night if system == "inductor" else []) for system in _SYSTEMS],
)
def test_a_smaller_group_gathers_what_was_rounded(system: str, rank_pools: RankPools) -> None:
    """Backward gathers pieces of the parameters that forward read, without rounding them again."""
    arguments = {"mesh_shape": (4,), "task": SMALL, "policy": "e4m3", "schedules": {"once": [(Microbatch(),)] * 3}}
    results = rank_pools[4].run(train, system=system, reshard_after_forward=2, **arguments)
    expected = reference(with_rounded_parameters(SMALL, 4, _POLICIES["e4m3"]), 4, [1, 1, 1], sgd)
    assert all(isinstance(result["once"], Run) for result in results), results
    assert not differences([result["once"] for result in results], expected, 2e-5)


def read_twice(system: str, policy: str, param_dtype: torch.dtype | None) -> list[Tensor]:
    """Return rows of a weight as forward and as backward read them; each two of four ranks keep a copy. Runs on every rank."""
    torch.manual_seed(0)
    model = nn.Linear(40, 50)
    nn.init.zeros_(model.bias)
    precision = MixedPrecisionPolicy(param_dtype=param_dtype)
    how: dict[str, Any] = {"mesh": device_mesh((4,)), "gather_policy": _POLICIES[policy], "mp_policy": precision}
    fully_shard(model, reshard_after_forward=2, **how)
    torch._dynamo.reset()
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    found = []
    for is_there in (False, True):
        if is_there:
            model.unshard()
        x = torch.eye(40, requires_grad=True)
        y = forward(x)
        y.backward(torch.eye(40, 50, dtype=y.dtype))
        assert x.grad is not None
        found += [y.detach().t()[:40].float(), x.grad]
    return found


@pytest.mark.parametrize(
    ("policy", "system", "param_dtype"),
    [
        pytest.param(policy, system, dtype, marks=[] if is_fixed else pytest.mark.night)
        for policy in _POLICIES
        for system in _SYSTEMS
        for dtype in (None, torch.bfloat16)
        for is_fixed in [system != "inductor" or (policy, dtype) == ("int8", None)]
        # Policies differ in the format, systems in the time of rounding: int8 runs in all systems, others in one a dtype.
        if policy == "int8" or (system == "aot_eager" if dtype is None else system == "inductor")
    ],
)
def test_backward_reads_what_forward_read(
    policy: str, system: str, param_dtype: torch.dtype | None, rank_pools: RankPools
) -> None:
    """Values are equal to the bit, as the smaller group gathers the bytes that arrived; also after ``unshard()``."""
    results = rank_pools[4].run(read_twice, system=system, policy=policy, param_dtype=param_dtype)
    for values in results:
        assert all(torch.equal(value, results[0][0]) for value in values)
    assert not torch.equal(results[0][0], exact_weight(param_dtype))


def exact_weight(dtype: torch.dtype | None) -> Tensor:
    torch.manual_seed(0)
    return nn.Linear(40, 50).weight.detach()[:40].to(dtype or torch.float32).float()


def sharded(policy: GatherPolicy | None, **options: Any) -> nn.Module:
    """Return two layers, a unit each, and a root without parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    for layer in model:
        fully_shard(layer, gather_policy=policy, **options)
    return fully_shard(model, gather_policy=policy, **options)


def captured(model: nn.Module) -> Capture:
    """Return the graphs of a step of a model that takes rows of 64."""
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as graphs:
        compiled(torch.ones(4, 64)).sum().backward()
    return graphs


def gathered(model: nn.Module) -> list[Tensor]:
    """Return the outputs of all gathers in a step."""
    graphs = captured(model)
    target = torch.ops._c10d_functional.all_gather_into_tensor.default
    every = (graph.graph_module.graph for graph in (*graphs.forward, *graphs.backward))
    return [node.meta["val"] for graph in every for node in graph.find_nodes(op="call_function", target=target)]


def test_a_gather_sends_about_a_quarter(fake_ranks: None) -> None:
    everything = sum(value.nbytes for value in gathered(sharded(None)))
    values = gathered(sharded(GatherPolicy()))
    assert {value.dtype for value in values} == {torch.uint8}
    assert sum(value.nbytes for value in values) <= 0.27 * everything


def test_a_smaller_group_keeps_and_sends_bytes(fake_ranks: None) -> None:
    """Four of the eight ranks together keep all eight gathered rows of bytes, two rows each."""
    graphs = captured(sharded(GatherPolicy(), reshard_after_forward=4))
    backward = graphs.backward[0].graph_module.graph
    # Backward reads only the second matrix, and no bias.
    (again,) = backward.find_nodes(op="call_function", target=torch.ops._c10d_functional.all_gather_into_tensor.default)
    assert again.meta["val"].dtype == torch.uint8 and again.args[1] == 4
    numel = 512 * 64
    assert again.meta["val"].nbytes == numel + numel // 128 * 4
    inputs = [node.meta["val"] for node in backward.find_nodes(op="placeholder")]
    kept = [value.nbytes for value in inputs if isinstance(value, Tensor) and value.dtype == torch.uint8]
    assert kept == [again.meta["val"].nbytes // 4]


def test_low_precision_is_computed_from_the_shard(fake_ranks: None) -> None:
    """Values are rounded once: from the shard's own dtype to bytes, which are decoded to the dtype that computes."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert {value.dtype for value in gathered(sharded(GatherPolicy(), mp_policy=policy))} == {torch.uint8}
    graph = captured(sharded(GatherPolicy(), mp_policy=policy)).forward[0].graph_module.graph
    (product, *_) = graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default)
    assert product.meta["val"].dtype == torch.bfloat16
    runs = [node for node in graph.find_nodes(op="placeholder") if node.name.startswith("run_")]
    assert [run.meta["val"].dtype for run in runs] == [torch.float32] * 2


def test_units_without_matrices_and_worlds_of_one_rank_send_what_they_have(one_rank: None) -> None:
    model = sharded(GatherPolicy(torch.int8, "tensor"))
    expected = nn.Sequential(nn.Linear(64, 512), nn.Linear(512, 64))
    expected.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    assert {value.dtype for value in gathered(model)} <= {torch.float32}
    assert torch.equal(model(torch.ones(4, 64)), expected(torch.ones(4, 64)))


def test_norms_alone_are_gathered_as_they_are(fake_ranks: None) -> None:
    model = fully_shard(nn.Sequential(nn.LayerNorm(64)), gather_policy=GatherPolicy())
    assert {value.dtype for value in gathered(model)} == {torch.float32}


def test_backward_gathers_a_norm_alone_from_a_smaller_group(fake_ranks: None) -> None:
    """Nobody asks for a gradient of the unit's input. So backward reads the norm's weight, which is not rounded, and no matrix."""
    model = fully_shard(
        nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)), gather_policy=GatherPolicy(), reshard_after_forward=4
    )
    assert [value.dtype for value in gathered(model)] == [torch.uint8, torch.float32]


class TestGraph(expecttest.TestCase):
    def test_forward(self) -> None:
        with fake_group():
            model = fully_shard(nn.Sequential(nn.Linear(64, 64)), gather_policy=GatherPolicy(torch.int8))
            text = captured(model).forward[0].readable()
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_0_weight: "f32[8, 64]", shard_0_bias: "f32[8]", primals_3: "f32[4, 64]", run_0_0_weight: "f32[640]"):
    view_2: "f32[5, 128]" = aten.view.default(run_0_0_weight, [5, 128])
    abs_1: "f32[5, 128]" = aten.abs.default(view_2)
    amax: "f32[5]" = aten.amax.default(abs_1, [-1])
    div: "f32[5]" = aten.div.Tensor(amax, 127.0)
    add: "f32[5]" = aten.add.Tensor(div, 1.1754943508222875e-38)
    unsqueeze: "f32[5, 1]" = aten.unsqueeze.default(add, -1)
    div_1: "f32[5, 128]" = aten.div.Tensor(view_2, unsqueeze)
    round_1: "f32[5, 128]" = aten.round.default(div_1)
    convert_element_type: "i8[5, 128]" = prims.convert_element_type.default(round_1, torch.int8)
    view_3: "f32[8]" = aten.view.default(shard_0_bias, [-1])
    view_4: "i8[640]" = aten.view.default(convert_element_type, [-1])
    view_5: "u8[640]" = aten.view.dtype(view_4, torch.uint8)
    view_6: "f32[5]" = aten.view.default(add, [-1])
    view_7: "u8[20]" = aten.view.dtype(view_6, torch.uint8)
    view_8: "f32[8]" = aten.view.default(view_3, [-1])
    view_9: "u8[32]" = aten.view.dtype(view_8, torch.uint8)
    cat_1: "u8[692]" = aten.cat.default([view_5, view_7, view_9])
    all_gather_into_tensor: "u8[5536]" = _c10d_functional.all_gather_into_tensor.default(cat_1, 8, 'shard')
    wait_tensor: "u8[5536]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_10: "u8[8, 692]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_10, [640, 20, 32], 1)
    getitem: "u8[8, 640]" = split_with_sizes[0]
    getitem_1: "u8[8, 20]" = split_with_sizes[1]
    getitem_2: "u8[8, 32]" = split_with_sizes[2]
    clone: "u8[8, 20]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    view_11: "f32[8, 5]" = aten.view.dtype(clone, torch.float32)
    split_with_sizes_1 = aten.split_with_sizes.default(view_11, [5], 1)
    getitem_3: "f32[8, 5]" = split_with_sizes_1[0]
    view_12: "i8[8, 640]" = aten.view.dtype(getitem, torch.int8)
    view_13: "i8[8, 5, 128]" = aten.view.default(view_12, [8, 5, 128])
    convert_element_type_1: "f32[8, 5, 128]" = prims.convert_element_type.default(view_13, torch.float32)
    unsqueeze_1: "f32[8, 5, 1]" = aten.unsqueeze.default(getitem_3, -1)
    mul: "f32[8, 5, 128]" = aten.mul.Tensor(convert_element_type_1, unsqueeze_1)
    view_14: "f32[8, 640]" = aten.view.default(mul, [8, 640])
    clone_1: "u8[8, 32]" = aten.clone.default(getitem_2, memory_format = torch.contiguous_format)
    view_15: "f32[8, 8]" = aten.view.dtype(clone_1, torch.float32)
    slice_1: "f32[8, 512]" = aten.slice.Tensor(view_14, 1, 0, 512)
    slice_2: "f32[8, 8]" = aten.slice.Tensor(view_15, 1, 0, 8)
    clone_2: "f32[8, 512]" = aten.clone.default(slice_1, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[64, 64]" = aten._unsafe_view.default(clone_2, [64, 64])
    view_16: "f32[64]" = aten.view.default(slice_2, [64])
    permute: "f32[64, 64]" = aten.permute.default(_unsafe_view, [1, 0])
    addmm: "f32[4, 64]" = aten.addmm.default(view_16, primals_3, permute)
    return (addmm, shard_0_weight, shard_0_bias, primals_3)
""",
        )


def test_refuses_what_is_no_policy(fake_ranks: None) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(TypeError, match=r"gather_policy=\.\.\.\) takes a GatherPolicy, not torch\.int8"):
        fully_shard(model, gather_policy=torch.int8)  # type: ignore[call-overload]
    assert type(model) is nn.Linear


def disagree() -> str:
    """Return the error of ranks that round differently. Runs on every rank."""
    model = sharded(GatherPolicy(torch.int8, 32 if dist.get_rank() else 64))
    with pytest.raises((RanksDisagree, BackendCompilerFailed)) as raised:
        torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(4, 64))
    return str(raised.value)


@pytest.mark.ranks
def test_ranks_that_round_differently_raise() -> None:
    pools = RankPools()
    try:
        for message in pools[2].run(disagree):
            assert "rank 0: all_gather_into_tensor" in message and "x uint8 over shard" in message
    finally:
        pools.close()
