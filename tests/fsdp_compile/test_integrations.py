"""Libraries that shard a model for their users, on two ranks: losses equal those with FSDP2."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.utils.data import Dataset

from fsdp_compile import FSDPModule, fsdp_backend, fully_shard, patch_fsdp2
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import adamw, regression_batch, shard_units, squared_error

pytestmark = pytest.mark.example

_WORLD = 2
_OPTIONS = {"lowering": "aot_eager"}


def _needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(module) is None, reason=f"{module} is not installed: pip install '.[integrations]'"
    )


@contextlib.contextmanager
def _launched() -> Iterator[None]:
    """Set the environment variables that torchrun gives a rank, for the duration of the block."""
    rank = str(dist.get_rank())
    world = str(dist.get_world_size())
    given = {"RANK": rank, "LOCAL_RANK": rank, "GROUP_RANK": "0", "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    given |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "OMP_NUM_THREADS": "1"}
    before = dict(os.environ)
    os.environ.update(given)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _same_on_both(train: Callable[..., list[float]], **arguments: Any) -> None:
    with _launched():
        torch.manual_seed(0)
        theirs = train(ours=False, **arguments)
        torch._dynamo.reset()
        torch.manual_seed(0)
        ours = train(ours=True, **arguments)
    assert len(theirs) > 2
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


# --- patch_fsdp2 ------------------------------------------------------------------------------


def test_replaces_every_name(one_rank: None) -> None:
    library = ModuleType("library")
    library.shard = torch.distributed.fsdp.fully_shard  # type: ignore[attr-defined]
    original = torch.distributed.fsdp.fully_shard
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyError):
        patch.setitem(sys.modules, "library", library)
        with patch_fsdp2():
            assert library.shard is torch.distributed.fsdp.fully_shard is fully_shard
            from torch.distributed._composable.fsdp import fully_shard as composable

            assert composable is fully_shard
            with pytest.raises(RuntimeError, match="in force already"), patch_fsdp2():
                pass
            assert library.shard is fully_shard
            raise KeyError
    assert library.shard is torch.distributed.fsdp.fully_shard is original
    with patch_fsdp2():
        assert isinstance(torch.distributed.fsdp.fully_shard(nn.Linear(2, 2)), FSDPModule)


# --- Accelerate -----------------------------------------------------------------------------------


def _llama(tied: bool = False) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    size: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=tied))


def _tokens(step: int) -> Tensor:
    return torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _plugin(**options: Any) -> Any:
    from accelerate import FullyShardedDataParallelPlugin

    wrap = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["LlamaDecoderLayer"]}
    return FullyShardedDataParallelPlugin(fsdp_version=2, **wrap, **options)


def _shard_on_cpu(accelerator: Any, plugin: Any) -> None:
    """Make Accelerate shard on CPU; by itself it shards only on accelerators."""
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    PartialState._shared_state["distributed_type"] = DistributedType.FSDP
    accelerator.state.distributed_type, accelerator.state.fsdp_plugin = DistributedType.FSDP, plugin


@contextlib.contextmanager
def _accelerate() -> Iterator[None]:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def accelerate(ours: bool, path: str, tied: bool) -> list[float]:
    from accelerate import Accelerator

    with _accelerate():
        plugin = _plugin(cpu_ram_efficient_loading=tied, activation_checkpointing=tied)
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        _shard_on_cpu(accelerator, plugin)
        model = _llama(tied)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)
        with patch_fsdp2() if ours else contextlib.nullcontext():
            model, optimizer = accelerator.prepare(model, optimizer)
        assert isinstance(model, FSDPModule) is ours and isinstance(model, torch.distributed.fsdp.FSDPModule)
        if ours:
            model = torch.compile(model, backend=fsdp_backend, options=_OPTIONS)
        losses = []
        for step in range(6):
            with accelerator.accumulate(model):
                loss = model(input_ids=_tokens(step), labels=_tokens(step)).loss
                accelerator.backward(loss)
                assert any(param.grad is not None for param in model.parameters()) is accelerator.sync_gradients
                if accelerator.sync_gradients:
                    losses.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).full_tensor().item())
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            if step == 3:
                accelerator.save_state(f"{path}/{ours}")
        # The loss of a step again, from the checkpoint.
        accelerator.load_state(f"{path}/{ours}")
        losses.append(model(input_ids=_tokens(4), labels=_tokens(4)).loss.item())
        assert losses[-1] == pytest.approx(losses[-4], rel=1e-5)
        return losses


@_needs("accelerate")
@pytest.mark.parametrize("tied", [False, True], ids=["plain", "tied-checkpointed"])
@pytest.mark.skipif(
    torch.__version__.startswith("2.11"),
    reason="torch.compile of 2.11 does not train a checkpointed model with a cache, sharded or not",
)
def test_accelerate(tied: bool, rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[_WORLD].run(run_accelerate, path=str(tmp_path), tied=tied)


def run_accelerate(path: str, tied: bool) -> None:
    _same_on_both(accelerate, path=path, tied=tied)


# --- The Trainer ----------------------------------------------------------------------------------


class _Texts(Dataset):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens = torch.randint(64, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def trainer(ours: bool, path: str) -> list[float]:
    from transformers import Trainer, TrainingArguments

    with _accelerate():
        model = _llama()
        if ours:
            model.compile(backend=fsdp_backend, options=_OPTIONS)
        settings: dict[str, Any] = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
        settings |= {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 2}
        arguments = TrainingArguments(path, learning_rate=1e-2, adam_epsilon=1e-3, **settings)
        trainer = Trainer(model, arguments, train_dataset=_Texts())
        _shard_on_cpu(trainer.accelerator, _plugin(cpu_ram_efficient_loading=False))
        trainer.is_fsdp_enabled = True
        with patch_fsdp2() if ours else contextlib.nullcontext():
            trainer.train()
        assert isinstance(model, FSDPModule) is ours and isinstance(model, torch.distributed.fsdp.FSDPModule)
        return [entry[key] for entry in trainer.state.log_history for key in ("loss", "grad_norm") if key in entry]


def run_trainer(path: str) -> None:
    _same_on_both(trainer, path=path)


@_needs("accelerate")
def test_trainer(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[_WORLD].run(run_trainer, path=str(tmp_path))


# --- Lightning Fabric -----------------------------------------------------------------------------


def fabric(ours: bool, path: str) -> list[float]:
    from lightning_fabric import Fabric
    from lightning_fabric.strategies import ModelParallelStrategy

    def parallelize(model: nn.Module, mesh: Any) -> nn.Module:
        shard_units(model, mesh["data_parallel"], fully_shard if ours else torch.distributed.fsdp.fully_shard)
        return torch.compile(model, backend=fsdp_backend, options=_OPTIONS) if ours else model  # type: ignore[return-value]

    strategy = ModelParallelStrategy(parallelize, data_parallel_size=_WORLD, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=_WORLD, strategy=strategy)
    fabric.launch()
    with fabric.init_module(empty_init=False):
        torch.manual_seed(0)
        model = models.MLP()
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(adamw(model.parameters()))
    losses = []
    for step in range(4):
        with fabric.no_backward_sync(model, enabled=step % 2 == 0):
            loss = squared_error(model, regression_batch(step, fabric.global_rank, _WORLD))
            fabric.backward(loss)
        losses.append(loss.item())
        assert any(param.grad is not None for param in model.parameters()) is (step % 2 == 1)
        if step % 2:
            losses.append(float(fabric.clip_gradients(model, optimizer, max_norm=0.1).full_tensor()))
            optimizer.step()
            optimizer.zero_grad()
    state = {"model": model, "optimizer": optimizer, "step": 4}
    fabric.save(f"{path}/{ours}", state)
    expected = [param.detach().full_tensor() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    fabric.load(f"{path}/{ours}", state)
    torch.testing.assert_close([param.detach().full_tensor() for param in model.parameters()], expected)
    return losses


def run_fabric(path: str) -> None:
    _same_on_both(fabric, path=path)


@_needs("lightning_fabric")
def test_fabric(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[_WORLD].run(run_fabric, path=str(tmp_path))


# --- transformers' own parallelism ----------------------------------------------------------------


def train_from_pretrained(ours: bool, folder: str, compiled: bool) -> list[float]:
    """Train on two ranks that split products by the model's plan, times two that shard."""
    from transformers import AutoModelForCausalLM
    from transformers.distributed import DistributedConfig

    with patch_fsdp2() if ours else contextlib.nullcontext():
        split = DistributedConfig(tp_size=2, fsdp_size=2)
        model = AutoModelForCausalLM.from_pretrained(folder, distributed_config=split, dtype=torch.float32)
    assert isinstance(model, FSDPModule) is ours
    assert len(model.model.layers[0].mlp.up_proj.weight.placements) == 2
    # With symbolic lengths, torch 2.13 traces a deep model of DTensors only as far as Python's recursion limit, sharded or not.
    how: dict[str, Any] = {"backend": fsdp_backend, "options": _OPTIONS, "dynamic": False}
    forward = torch.compile(model, **how) if ours and compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3, foreach=False)
    losses = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + dist.get_rank() // 2)
        # Lengths that change.
        tokens = torch.randint(64, (2, 8 + step), generator=generator)
        loss = forward(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def compare_from_pretrained(folder: str, compiled: bool) -> None:
    _same_on_both(train_from_pretrained, folder=folder, compiled=compiled)


@pytest.mark.night
@_needs("transformers")
@pytest.mark.parametrize(("compiled", "layers"), [(False, 9), (True, 3), (True, 9)])
def test_tensor_parallel_plan_of_transformers(compiled: bool, layers: int, tmp_path: Path, rank_pools: RankPools) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, **heads)
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    rank_pools[4].run(compare_from_pretrained, folder=str(tmp_path), compiled=compiled)
