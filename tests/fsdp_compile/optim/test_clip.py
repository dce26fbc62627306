"""Clipping over flat gradients, compared with torch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode

import fsdp_compile
from fsdp_compile import clip_grad_norm_, flat_optimizer
from fsdp_compile.optim import clip
from fsdp_compile.units.own_storage import with_own_storage
from fsdp_compile.units.param_state import FlatSlice, note_slice
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units


def _model(mesh: Any, fully_shard: Callable[..., Any] = fsdp_compile.fully_shard) -> nn.Module:
    torch.manual_seed(0)
    model = models.MLP(hidden=15)
    shard_units(model, mesh, fully_shard)
    return model


def _backward(model: nn.Module, seed: int = 0) -> None:
    model(torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))).square().sum().backward()


def _full(norm: Tensor) -> Tensor:
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.5, math.inf, 0.0])
@pytest.mark.parametrize("foreach", [None, True])
def test_same_as_torch(norm_type: float, foreach: bool | None, one_rank: None) -> None:
    model, twin = (_model(init_device_mesh("cpu", (1,))) for _ in range(2))
    for each in (model, twin):
        _backward(each)
        each.bias.grad = None
    norm = clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
    expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.5, norm_type, foreach=foreach)
    assert type(norm) is type(expected) and norm.shape == expected.shape and norm.dtype == expected.dtype
    torch.testing.assert_close(_full(norm), _full(expected), rtol=1e-6, atol=0)
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        if other.grad is None:
            assert param.grad is None
        else:
            torch.testing.assert_close(param.grad.to_local(), other.grad.to_local(), rtol=2e-6, atol=0)


def test_gradients_below_the_norm_stay(one_rank: None) -> None:
    model = _model(init_device_mesh("cpu", (1,)))
    _backward(model)
    before = [param.grad.to_local().clone() for param in model.parameters()]
    clip_grad_norm_(list(model.parameters()), 1e6)
    assert all(torch.equal(param.grad.to_local(), was) for param, was in zip(model.parameters(), before, strict=True))


def test_few_tensors_and_one_message(fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm takes one tensor for each buffer of gradients, and one all-reduce over the group of shards."""
    model = _model(init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard")))
    _backward(model)
    tensors, messages = [], []
    norm_of, reduce = clip._norm, dist.all_reduce

    def count(found: list[Tensor], *args: Any) -> Tensor:
        tensors.extend(found)
        return norm_of(found, *args)

    def note(tensor: Tensor, *args: Any, group: Any) -> None:
        messages.append((tensor.numel(), group))
        reduce(tensor, *args, group=group)

    monkeypatch.setattr(clip, "_norm", count)
    monkeypatch.setattr(dist, "all_reduce", note)
    norm = clip_grad_norm_(model.parameters(), 1.0)
    # On the first rank, only parameters of ``head`` have padding.
    assert 0 < len(tensors) <= 4 and all(type(tensor) is Tensor for tensor in tensors)
    mesh = model.bias.device_mesh
    assert messages == [(1, mesh.get_group("shard"))]
    assert isinstance(norm, DTensor) and norm.device_mesh == mesh and norm.placements == (Replicate(), Replicate())


class _Operators(TorchDispatchMode):
    """A counter of operators on tensors."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_as_many_operators_for_any_number_of_parameters(fake_ranks: None) -> None:
    counts = []
    for layers in (2, 6):
        model = models.MLP(hidden=16, layers=layers)
        fsdp_compile.fully_shard(model, mesh=init_device_mesh("cpu", (8,)))
        forward = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager"})
        forward(torch.ones(2, 8)).sum().backward()
        params = list(model.parameters())
        with _Operators() as operators:
            clip_grad_norm_(params, 1.0)
        counts.append(operators.count)
    assert counts[0] == counts[1] < 15


def _in_buffer(flat: Tensor, offset: int, numel: int) -> Tensor:
    piece = FlatSlice(flat, offset, numel)
    tensor = with_own_storage(piece.tensor())
    note_slice(tensor, piece)
    return tensor


def test_neighbours_are_one_tensor() -> None:
    """Neighbours in a buffer are merged in any order. Gaps, other buffers or dtypes, and tensors in no buffer stay apart."""
    values, others = torch.arange(12.0), torch.arange(4.0)
    pieces = [_in_buffer(values, offset, 2) for offset in (2, 0, 4, 8)]
    whole = [_in_buffer(others, offset, 2) for offset in (2, 0)]
    as_numbers = pieces[2].view(torch.int32)
    alone, strided, empty = torch.ones(3), torch.arange(6.0).view(3, 2).t(), torch.ones(0)
    tensors = [*pieces[:2], as_numbers, pieces[3], *whole, alone, strided, empty]
    merged = list(clip._merged(tensors))
    found = sorted((tensor.flatten().tolist() for tensor in merged if tensor.is_floating_point()), key=str)
    assert found == sorted(
        [[0.0, 1.0, 2.0, 3.0], [8.0, 9.0], [0.0, 1.0, 2.0, 3.0], [1.0] * 3, strided.flatten().tolist()], key=str
    )
    assert [tensor.data_ptr() for tensor in merged if tensor.dtype == torch.int32] == [as_numbers.data_ptr()]
    assert any(tensor is others for tensor in merged)


def test_buffers_that_touch_stay_apart() -> None:
    memory = torch.arange(8.0)
    first, second = memory[:4], memory[4:]
    tensors = [_in_buffer(flat, offset, 2) for flat in (first, second) for offset in (0, 2)]
    assert [tensor.data_ptr() for tensor in clip._merged(tensors)] == [first.data_ptr(), second.data_ptr()]


def _replace_local(grad: Any) -> None:
    grad._local_tensor = grad._local_tensor * 2


def _set_data(grad: Any) -> None:
    grad._local_tensor.data = grad._local_tensor * 2


def _in_place(grad: Any) -> None:
    grad._local_tensor.mul_(2)


def _transpose(grad: Any) -> None:
    grad._local_tensor.t_()


@pytest.mark.parametrize("change", [_replace_local, _set_data, _in_place, _transpose])
def test_gradients_that_were_changed(change: Callable[[Any], None], one_rank: None) -> None:
    """Clipping reads and writes the present local tensor of a gradient, and nothing else."""
    model, twin = (_model(init_device_mesh("cpu", (1,))) for _ in range(2))
    for each in (model, twin):
        _backward(each)
        clip_grad_norm_(each.parameters(), 1e9)
        change(each.blocks[0].up.weight.grad)
    stored = [param.grad._local_tensor for param in model.parameters()]
    norm = clip_grad_norm_(model.parameters(), 0.5)
    locals_of_twin = [param.grad._local_tensor for param in twin.parameters()]
    expected = torch.linalg.vector_norm(torch.cat([local.flatten() for local in locals_of_twin]))
    for local in locals_of_twin:
        local.mul_(0.5 / (expected + 1e-6))
    torch.testing.assert_close(_full(norm), expected, rtol=1e-6, atol=0)
    assert all(param.grad._local_tensor is local for param, local in zip(model.parameters(), stored, strict=True))
    for param, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad._local_tensor, other.grad._local_tensor, rtol=2e-6, atol=0)


def test_padding_does_not_count() -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=7, world_size=8)
    try:
        model = _model(init_device_mesh("cpu", (8,)))
        _backward(model)
        for param in model.parameters():
            lies_in = fsdp_compile.units.param_state.grad_slice(param)
            assert lies_in is not None
            lies_in.tensor().fill_(torch.inf)
            param.grad.to_local().fill_(1.0)
        count = sum(param.grad.to_local().numel() for param in model.parameters())
        torch.testing.assert_close(_full(clip_grad_norm_(model.parameters(), 1e9)), torch.tensor(count**0.5))
        # The last rank has no rows of the head.
        assert not model.head.weight.grad.to_local().numel()
        assert _full(clip_grad_norm_(model.head.parameters(), 1.0)) == 0
        assert _full(clip_grad_norm_(model.head.parameters(), 1.0, math.inf)) == 0
    finally:
        dist.destroy_process_group()


def test_plain_tensors_and_half_precision(one_rank: None) -> None:
    """Plain tensors are clipped together with DTensors. The square of a norm of 300 overflows in float16."""
    mesh = init_device_mesh("cpu", (1,))
    sharded = fsdp_compile.fully_shard(nn.Linear(2, 2, bias=False, dtype=torch.float16), mesh=mesh)
    plain = nn.Parameter(torch.zeros(4, dtype=torch.float16))
    plain.grad = torch.full_like(plain, 150.0)
    sharded.weight.grad = torch.full_like(sharded.weight, 200.0)
    norm = clip_grad_norm_([plain, sharded.weight], 5.0)
    assert type(norm) is Tensor and norm.dtype == torch.float16 and norm.item() == 500.0
    torch.testing.assert_close(plain.grad, torch.full_like(plain, 1.5))
    torch.testing.assert_close(sharded.weight.grad.to_local(), torch.full((2, 2), 2.0, dtype=torch.float16))


def test_nothing_to_clip() -> None:
    assert clip_grad_norm_([nn.Parameter(torch.ones(2))], 1.0) == 0
    assert clip_grad_norm_([], 1.0) == 0


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_norm_that_is_not_finite(value: float, one_rank: None) -> None:
    model = _model(init_device_mesh("cpu", (1,)))
    _backward(model)
    model.bias.grad.to_local()[0] = value
    with pytest.raises(RuntimeError, match=r"total norm of order 2\.0 .* is non-finite"):
        clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not _full(clip_grad_norm_(model.parameters(), 1.0)).isfinite()


def test_one_parameter_twice(one_rank: None) -> None:
    """A parameter that is given twice counts twice and is scaled twice, as with torch's function."""
    model, twin = (_model(init_device_mesh("cpu", (1,))) for _ in range(2))
    for each in (model, twin):
        _backward(each)
    norm = clip_grad_norm_([model.bias, model.bias], 0.5)
    expected = torch.nn.utils.clip_grad_norm_([twin.bias, twin.bias], 0.5)
    torch.testing.assert_close(_full(norm), _full(expected))
    torch.testing.assert_close(model.bias.grad.to_local(), twin.bias.grad.to_local())


# --- On ranks -------------------------------------------------------------------------------------


def train() -> None:
    """Compare flat steps and clipping with torch's on FSDP2, then clip gradients on two meshes. Every rank calls this."""
    mesh = device_mesh((2,))
    model, twin = _model(mesh), _model(mesh, torch.distributed.fsdp.fully_shard)
    compiled = torch.compile(model, backend=fsdp_compile.fsdp_backend, options={"lowering": "aot_eager"})
    optimizer = flat_optimizer(torch.optim.AdamW, model.parameters(), lr=1e-2, eps=1e-3)
    reference = torch.optim.AdamW(twin.parameters(), lr=1e-2, eps=1e-3)
    for step in range(3):
        batch = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        norms = []
        for forward, each, other, clips in (
            (compiled, model, optimizer, clip_grad_norm_),
            (twin, twin, reference, torch.nn.utils.clip_grad_norm_),
        ):
            forward(batch).square().sum().backward()
            norms.append(_full(clips(each.parameters(), 0.5)))
            other.step()
            other.zero_grad()
        torch.testing.assert_close(*norms, rtol=1e-6, atol=0)
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.to_local(), other.to_local(), rtol=1e-5, atol=1e-7)
    # A Partial gradient, a shard on another mesh, and a plain tensor that is equal on all ranks.
    values = torch.arange(4.0)
    summand, shard, plain = (nn.Parameter(torch.zeros(4)) for _ in range(3))
    whole = functools.partial(DTensor.from_local, device_mesh=mesh, run_check=False)
    summand = nn.Parameter(whole(torch.zeros(4), placements=[Replicate()]))
    summand.grad = whole(values + dist.get_rank(), placements=[Partial()])
    other_mesh = device_mesh((1, 2))
    local = values[2 * dist.get_rank() :][:2].clone()
    shard = nn.Parameter(DTensor.from_local(torch.zeros(2), other_mesh, [Replicate(), Shard(0)], run_check=False))
    shard.grad = DTensor.from_local(local.clone(), other_mesh, [Replicate(), Shard(0)], run_check=False)
    plain.grad = values.clone()
    expected = torch.cat([2 * values + 1, values, values]).norm()
    torch.testing.assert_close(clip_grad_norm_([summand, shard, plain], 1.0), expected)
    torch.testing.assert_close(summand.grad.full_tensor(), (2 * values + 1) / (expected + 1e-6))
    torch.testing.assert_close(shard.grad.to_local(), local / (expected + 1e-6))
    torch.testing.assert_close(plain.grad, values / (expected + 1e-6))


def test_training_as_fsdp2(rank_pools: RankPools) -> None:
    rank_pools[2].run(train)
