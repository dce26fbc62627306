"""Communication hooks on sharded models: registered, traced into the backward graph, and correct."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

import fsdp_compile
from fsdp_compile import comm_hooks, fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

pytestmark = pytest.mark.units_apart


def _group(shape: tuple[int, ...]) -> Any:
    mesh = device_mesh(shape)
    return mesh.get_group(mesh.ndim - 1)


def averages(state: Any, grad: Tensor, output: Tensor) -> None:
    """Reduce as without a hook."""
    dist.reduce_scatter_tensor(output, grad, group=state)
    output.div_(dist.get_world_size(state))


def doubles(state: Any, grad: Tensor, output: Tensor) -> None:
    averages(state, grad * 2, output)


def all_reduces(state: Any, grad: Tensor) -> None:
    for group in state:
        dist.all_reduce(grad, group=group)
        grad.div_(dist.get_world_size(group))


def adds_one(reduced: Tensor) -> None:
    reduced.add_(1)


def gradients(shape: tuple[int, ...], system: str, hook: str, microbatches: int = 1, flag: str = "") -> dict[str, Tensor]:
    """Return the full gradients of a small model after some microbatches. Runs on every rank."""
    torch.manual_seed(0)
    model = models.MLP(dim=8, hidden=8, layers=1)
    shard_units(model, device_mesh(shape), fully_shard)
    group = _group(shape)
    if hook in ("averages", "doubles"):
        model.register_comm_hook(group, globals()[hook])
    elif hook == "torch":
        model.register_comm_hook(default_hooks.DefaultState(group), default_hooks.reduce_scatter_hook)
    elif hook in ("bf16", "torch_bf16"):
        function = comm_hooks.bf16_compress_hook if hook == "bf16" else default_hooks.bf16_compress_hook
        model.register_comm_hook(comm_hooks.LowPrecisionState(group), function)
    elif hook == "all_reduces":
        mesh = device_mesh(shape)
        model.register_comm_hook([mesh.get_group(dim) for dim in range(mesh.ndim)], all_reduces)
    elif hook == "both":
        model.register_comm_hook(group, averages)
        model.register_comm_hook([device_mesh(shape).get_group("replicate")], all_reduces, over="replicas")
    elif hook == "adds_one":
        for module in model.modules():
            if isinstance(module, fsdp_compile.FSDPModule):
                module.set_all_reduce_hook(adds_one)
    compiled = model
    if system != "eager":
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    for microbatch in range(microbatches):
        if flag:
            getattr(model, flag)(microbatch == microbatches - 1)
        generator = torch.Generator().manual_seed(100 * microbatch + dist.get_rank())
        compiled(torch.randn(4, 8, generator=generator)).square().mean().backward()
    return {name: param.grad.full_tensor() for name, param in model.named_parameters()}  # type: ignore[union-attr]


def _assert_close(actual: dict[str, Tensor], expected: dict[str, Tensor], rtol: float) -> None:
    for name, grad in expected.items():
        assert (actual[name] - grad).abs().max() <= rtol * grad.abs().max(), name


@pytest.mark.parametrize(
    ("shape", "flag"),
    [
        ((2,), ""),
        pytest.param((2, 2), "", marks=pytest.mark.night),
        *(
            pytest.param(shape, flag, marks=pytest.mark.night)
            for shape in ((2,), (2, 2))
            for flag in ("set_requires_gradient_sync", "set_requires_all_reduce")
        ),
    ],
)
def test_a_hook_that_averages_changes_nothing(shape: tuple[int, ...], flag: str, rank_pools: RankPools) -> None:
    pool = rank_pools[2 if shape == (2,) else 4]
    options = {"shape": shape, "microbatches": 3 if flag else 1, "flag": flag}
    expected = pool.run(gradients, system="aot_eager", hook="", **options)[0]
    for system in ("aot_eager", "eager"):
        for hook in ("averages", "torch"):
            _assert_close(pool.run(gradients, system=system, hook=hook, **options)[0], expected, 1e-6)
    doubled = pool.run(gradients, system="aot_eager", hook="doubles", **options)[0]
    _assert_close(doubled, {name: 2 * grad for name, grad in expected.items()}, 1e-6)


@pytest.mark.inductor
def test_a_hook_that_averages_lowers_to_kernels(rank_pools: RankPools) -> None:
    expected = rank_pools[2].run(gradients, shape=(2,), system="aot_eager", hook="")[0]
    _assert_close(rank_pools[2].run(gradients, shape=(2,), system="inductor", hook="averages")[0], expected, 1e-6)


def test_compression_rounds(rank_pools: RankPools) -> None:
    expected = rank_pools[2].run(gradients, shape=(2,), system="aot_eager", hook="")[0]
    ours = rank_pools[2].run(gradients, shape=(2,), system="aot_eager", hook="bf16")[0]
    # bfloat16 has 8 bits of precision. Gradients are rounded before the sum, and the sum is rounded, too.
    _assert_close(ours, expected, 2**-7)
    assert any(not torch.equal(ours[name], expected[name]) for name in expected)
    # torch's function is replaced by the library's.
    theirs = rank_pools[2].run(gradients, shape=(2,), system="aot_eager", hook="torch_bf16")[0]
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("flag", ["", "set_requires_gradient_sync", "set_requires_all_reduce"])
def test_in_place_hook_where_parameters_are_whole(flag: str, rank_pools: RankPools) -> None:
    """With two replicas and one shard, as in DistributedDataParallel, parameters are whole."""
    options = {"shape": (2, 1), "microbatches": 3 if flag else 1, "flag": flag}
    expected = rank_pools[2].run(gradients, system="aot_eager", hook="", **options)[0]
    for system in ("aot_eager", "eager"):
        _assert_close(rank_pools[2].run(gradients, system=system, hook="all_reduces", **options)[0], expected, 1e-6)


@pytest.mark.parametrize("flag", ["set_requires_all_reduce", ""])
def test_hooks_over_shards_and_over_replicas(flag: str, rank_pools: RankPools) -> None:
    options = {"shape": (2, 2), "microbatches": 3 if flag else 1, "flag": flag}
    expected = rank_pools[4].run(gradients, system="aot_eager", hook="", **options)[0]
    for system in ("aot_eager", "eager"):
        _assert_close(rank_pools[4].run(gradients, system=system, hook="both", **options)[0], expected, 1e-6)


@pytest.mark.parametrize("shape", [(2,), (2, 2)], ids=str)
def test_all_reduce_hook_runs_ahead_of_the_division(shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = 2 if shape == (2,) else 4
    expected = rank_pools[world].run(gradients, shape=shape, system="aot_eager", hook="")[0]
    for system in ("aot_eager", "eager"):
        shifted = rank_pools[world].run(gradients, shape=shape, system=system, hook="adds_one")[0]
        _assert_close(shifted, {name: grad + 1 / world for name, grad in expected.items()}, 1e-6)


def _sharded_model(**policy: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (8,), mesh_dim_names=("shard",))
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    fully_shard(model[0], mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
    return fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))


def test_the_hook_is_in_the_graph_once_for_each_bucket(fake_ranks: None) -> None:
    model = _sharded_model()
    model.register_comm_hook(comm_hooks.LowPrecisionState(dist.group.WORLD), comm_hooks.bf16_compress_hook)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as captured:
        compiled(torch.ones(2, 8)).sum().backward()
    text = captured.backward[0].readable()
    reductions = [line for line in text.splitlines() if "reduce_scatter_tensor.default" in line]
    assert len(reductions) == 2 and all('"bf16[' in line for line in reductions)
    # The second reduction starts before the first is waited for: operations after a hook's collective move with its wait.
    lines = text.splitlines()
    first_wait = next(index for index, line in enumerate(lines) if "wait_tensor" in line and "reduce_scatter" in line)
    assert lines.index(reductions[1]) < first_wait


def _reads_values(state: Any, grad: Tensor, output: Tensor) -> None:
    if grad.abs().max() > 1:
        output.zero_()


def test_refusals_leave_nothing_registered(fake_ranks: None) -> None:
    model = _sharded_model()
    with pytest.raises(RuntimeError, match="_reads_values"):
        model.register_comm_hook(None, _reads_values)
    with pytest.raises(ValueError, match=r"all_reduces\(state, grad\) reduces in place, but .* sharded over 8 ranks"):
        model.register_comm_hook(None, all_reduces)
    with pytest.raises(TypeError):
        model.register_comm_hook(None, lambda grad: None)
    units = [module for module in model.modules() if isinstance(module, fsdp_compile.FSDPModule)]
    assert all(unit._fsdp_unit.flags.comm_hook is None for unit in units)
    model[0].register_comm_hook(dist.group.WORLD, averages)
    with pytest.raises(ValueError, match="0 has a communication hook already"):
        model.register_comm_hook(dist.group.WORLD, averages)
    assert model._fsdp_unit.flags.comm_hook is None
    with pytest.raises(NotImplementedError, match="stream"):
        model.set_all_reduce_hook(adds_one, stream=object())
    with pytest.raises(RuntimeError, match="asks for values of a tensor"):
        model.set_all_reduce_hook(lambda reduced: reduced.div_(reduced.max().item()))
    for refused in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(NotImplementedError, match="compiled graph"):
            refused(object())
