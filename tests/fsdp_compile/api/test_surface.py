"""The API matches FSDP2 of the installed torch, and torch's own code accepts our modules as FSDP2's."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import FSDPModule, fsdp_backend, fully_shard
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import Case, Forward, FullyShard, compare, shard_units, train_reference, train_sharded

#: Names of FSDP1, which this library does not replace.
_FSDP1 = {
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
}


def test_no_name_of_fsdp2_is_missing() -> None:
    missing = [name for name in fsdp2.__all__ if name not in _FSDP1 and name not in fsdp_compile.__all__]
    assert not missing


def _parameters(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: param.default for name, param in inspect.signature(inspect.unwrap(function)).parameters.items()}


def test_no_method_or_parameter_of_fsdp2_is_missing() -> None:
    theirs = {name: value for name, value in vars(fsdp2.FSDPModule).items() if not name.startswith("_")}
    theirs["_set_unshard_async_op"] = fsdp2.FSDPModule._set_unshard_async_op
    for name, method in theirs.items():
        ours = getattr(FSDPModule, name, None)
        assert ours is not None, name
        assert _parameters(method).items() <= _parameters(ours).items(), name
    for name in ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx"):
        assert set(_parameters(getattr(fsdp2, name))) <= set(_parameters(getattr(fsdp_compile, name))), name


def mesh() -> Any:
    return init_device_mesh("cpu", (1,))


def test_torch_takes_a_module_for_one_of_fsdp2(one_rank: None) -> None:
    model: Any = models.MLP()
    assert fully_shard.state(model) is None
    shard_units(model, mesh(), fully_shard)
    for module in (model, model.blocks[0]):
        assert isinstance(module, fsdp2.FSDPModule)
        assert fully_shard.state(module) is fsdp2.fully_shard.state(module) is not None
    assert not isinstance(model.head, fsdp2.FSDPModule)
    # torch's FSDPModule shadows no method of nn.Module.
    assert model.to(torch.float64).head.weight.dtype is torch.float64
    fsdp2.share_comm_ctx([model, model.blocks[0]])
    fsdp_compile.share_comm_ctx([model, model.blocks[0]])
    with pytest.raises(ValueError, match="share_comm_ctx takes modules that fully_shard has sharded"):
        fsdp_compile.share_comm_ctx([model.head])


def test_one_of_the_two_shards_a_model(one_rank: None) -> None:
    model = models.MLP()
    fsdp2.fully_shard(model.blocks[0], mesh=mesh())
    with pytest.raises(ValueError, match=r"blocks\.0 is sharded by torch's own fully_shard"):
        fully_shard(model, mesh=mesh())
    model = models.MLP()
    fully_shard(model, mesh=mesh())
    with pytest.raises(AssertionError, match="can only be applied to a"):
        fsdp2.fully_shard(model, mesh=mesh())


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def generate(self, x: Tensor) -> Tensor:
        assert not isinstance(self.layer.weight, torch.distributed.tensor.DTensor)
        return self.layer(x) + x.dtype.itemsize


@pytest.mark.parametrize("register", [fsdp2.register_fsdp_forward_method, fsdp_compile.register_fsdp_forward_method])
def test_either_registers_a_forward_method(register: Callable[..., None], one_rank: None) -> None:
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = Generator()
    x = torch.randn(2, 4)
    expected = model.to(torch.bfloat16).generate(x.to(torch.bfloat16)).float()
    fully_shard(model.float(), mesh=mesh(), mp_policy=policy)
    register(model, "generate")
    torch.testing.assert_close(model.generate(x), expected)
    assert isinstance(model.layer.weight, torch.distributed.tensor.DTensor)


def replicate_around() -> None:
    """Wrap a model with a sharded block in DDP, and compare gradients with an unsharded model's."""
    torch.manual_seed(0)
    model, alone = models.MLP(), models.MLP()
    alone.load_state_dict(model.state_dict())
    fully_shard(model.blocks[0], mesh=device_mesh((2,)))
    replicate(model)
    batches = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(1))
    model(batches[dist.get_rank()]).square().sum().backward()
    alone(batches.flatten(0, 1)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        gradient = ours.grad.full_tensor() if name.startswith("blocks.0") else ours.grad
        torch.testing.assert_close(gradient, theirs.grad / 2, rtol=1e-5, atol=1e-5)


def test_replicate_around_a_sharded_module(rank_pools: RankPools) -> None:
    rank_pools[2].run(replicate_around)


# Modules that torch.compile has wrapped before they are sharded.


def _replace_blocks(model: nn.Module, mesh: Any, shard: FullyShard) -> None:
    """Put the compiled module in the place of each block, then shard it, as torchtitan does."""
    blocks: Any = model.get_submodule("blocks")
    for name, block in list(blocks.named_children()):
        blocks.register_module(name, torch.compile(block, backend="aot_eager"))
        shard(getattr(blocks, name), mesh=mesh)
    shard(model, mesh=mesh)


def _as_it_is(model: nn.Module, _: Any) -> Forward:
    return model


WRAPPED = Case("compiled blocks, then sharded", models.MLP, shard=_replace_blocks, compile=_as_it_is, steps=2)


def _drop_prefix(run: Any) -> Any:
    run.parameters = {name.replace("_orig_mod.", ""): value for name, value in run.parameters.items()}
    run.gradients = {name.replace("_orig_mod.", ""): value for name, value in run.gradients.items()}
    return run


def train_wrapped() -> Any:
    return _drop_prefix(train_sharded(WRAPPED, fully_shard, {}))


def test_compiled_blocks_are_sharded(rank_pools: RankPools) -> None:
    compare(rank_pools[2].run(train_wrapped), train_reference(WRAPPED, 2), rtol=1e-5)


def test_a_compiled_model_is_sharded(one_rank: None) -> None:
    model = models.MLP()
    x = torch.randn(3, 8)
    expected = model(x)
    compiled: Any = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    assert fully_shard(compiled, mesh=mesh()) is compiled
    for module in (compiled, model):
        assert isinstance(module, FSDPModule) and isinstance(module, fsdp2.FSDPModule)
        assert fully_shard.state(module) is not None
    compiled.set_requires_gradient_sync(True)
    torch.testing.assert_close(compiled(x), expected)
    compiled(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    with pytest.raises(ValueError, match="sharded already"):
        fully_shard(compiled, mesh=mesh())


# Backward that is finalised by hand.


def finalize(system: str, mesh_shape: tuple[int, ...]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return gradients of two microbatches without synchronisation, after ``finalize_backward``, and those of one process."""
    torch.manual_seed(0)
    model: Any = models.MLP()
    alone = models.MLP()
    alone.load_state_dict(model.state_dict())
    shard_units(model, device_mesh(mesh_shape), fully_shard)
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    with pytest.raises(RuntimeError, match="wants set_manual_backward_finalization"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="must be called on the root"):
        model.blocks[0].set_manual_backward_finalization(True)
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    world = dist.get_world_size()
    for batches in torch.randn(2, world, 3, 8, generator=torch.Generator().manual_seed(1)):
        forward(batches[dist.get_rank()]).square().sum().backward()
        alone(batches.flatten(0, 1)).square().sum().div(world).backward()
        assert all(param.grad is None for param in model.parameters())
    if len(mesh_shape) == 2:
        model.set_requires_gradient_sync(True)
        model.set_requires_all_reduce(False)
        with pytest.raises(RuntimeError, match=r"set_requires_all_reduce\(True\)"):
            model.finalize_backward()
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    model.finalize_backward()
    gradients = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    return gradients, {name: param.grad for name, param in alone.named_parameters()}


@pytest.mark.parametrize(("system", "mesh_shape"), [("eager", (2,)), ("aot_eager", (2,)), ("aot_eager", (2, 2))])
def test_backward_is_finalized_by_hand(system: str, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = 2 if mesh_shape == (2,) else 4
    for found, expected in rank_pools[world].run(finalize, system=system, mesh_shape=mesh_shape):
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_storage_is_not_kept(one_rank: None) -> None:
    model: Any = fully_shard(nn.Linear(4, 4), mesh=mesh())
    model.set_keep_unsharded_storage(False)
    with pytest.raises(NotImplementedError, match="set_keep_unsharded_storage"):
        model.set_keep_unsharded_storage(True)
