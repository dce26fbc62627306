"""A deleted model leaves nothing behind: neither tensors nor the objects that were made to train it."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_compile
from fsdp_compile import GatherPolicy, comm_hooks, fsdp_backend, fully_shard
from tests.common import models

# Objects that torch never frees, by type and number: for each compiler that it was given, and for the source of each graph that
# it wrote. New hooks make it write new sources.
_OF_A_COMPILER = {"_TorchCompileWrapper": 1, "dict": 2}
_OF_A_SOURCE = ("tuple", "method", "partial")


def _whole(model: nn.Module) -> Any:
    return torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})


def _block_by_block(model: nn.Module) -> Any:
    for block in model.get_submodule("blocks").children():
        block.compile(backend=fsdp_backend, options={"lowering": "aot_eager"})
    return model


def _with_hooks(model: Any) -> Any:
    model.register_comm_hook(
        comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.ErrorFeedback(comm_hooks.QuantizedReduce(torch.int8))
    )
    return _whole(model)


_WAYS: dict[str, tuple[Callable[[nn.Module], Any], dict[str, Any]]] = {
    "whole": (_whole, {}),
    "block by block": (_block_by_block, {}),
    "uncompiled": (lambda model: model, {}),
    "resharded to a smaller group": (_whole, {"reshard_after_forward": 4}),
    "hooks of its own": (_with_hooks, {"gather_policy": GatherPolicy(torch.int8)}),
}


def _train(way: str) -> None:
    apply, options = _WAYS[way]
    model, mesh = models.MLP(layers=9), init_device_mesh("cpu", (8,))
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh)
    forward = apply(model)
    optimizer = fsdp_compile.flat_optimizer(torch.optim.AdamW, model.parameters())
    for _ in range(2):
        forward(torch.randn(2, 8)).sum().backward()
        fsdp_compile.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _living() -> Counter[str]:
    """Count living objects by the names of their types."""
    for _ in range(3):
        gc.collect()
    return Counter(
        "weakref" if issubclass(type(each), weakref.ref) else type(each).__name__
        for each in gc.get_objects()
        if type(each) is not Counter
    )


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=[] if way in ("block by block", "uncompiled") else pytest.mark.night) for way in _WAYS]
)
def test_nothing_is_left(way: str, fake_ranks: None) -> None:
    # The first models fill caches of torch and Python. Compiled code is kept for the next model of the same classes.
    for _ in range(3):
        _train(way)
        before, sources = _living(), len(linecache.cache)
    for _ in range(3):
        _train(way)
    now = _living()
    compilers = {"uncompiled": 0, "block by block": 9}.get(way, 1)
    allowed = Counter({name: 3 * compilers * number for name, number in _OF_A_COMPILER.items()})
    allowed.update(dict.fromkeys(_OF_A_SOURCE, len(linecache.cache) - sources))
    # An object that each model leaves is there three times.
    assert not {name: number for name, number in (now - before - allowed).items() if number >= 3}
