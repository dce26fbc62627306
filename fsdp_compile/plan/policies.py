"""Policies: the ways to shard and to accumulate that a plan chooses from. Each can run, and gives code to paste."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

from ..api.sharding import fully_shard
from ..dry_run import outermost_layers, train

#: Ways to accumulate gradients of microbatches; see :class:`Policy`.
ACCUMULATIONS = ("none", "each", "last", "kept")
#: The microbatches of a traced step: the first, two that do the same, the last.
TRACED_MICROBATCHES = 4


@dataclass(frozen=True)
class Policy:
    """The settings that determine the graphs of a step.

    Attributes:
        has_replicas: whether shards are replicated (HSDP).
        reshard_after_forward: as for :func:`~fsdp_compile.fully_shard`; a number is the ranks of a node.
        checkpoints: whether backward recomputes each block.
        accumulation: "none": one microbatch. "each": reduce gradients after each microbatch. "last": reduce them after the last
            one. "kept": as "last", with parameters that stay gathered between microbatches.
        schedule: the option ``schedule`` of the backend.
        param_dtype, reduce_dtype: fields of the mixed-precision policy; None: the dtypes of the parameters.
    """

    has_replicas: bool
    reshard_after_forward: bool | int
    checkpoints: bool
    accumulation: str = "none"
    schedule: str = "default"
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None

    def shard(self, model: Any, device_mesh: DeviceMesh) -> None:
        """Shard a model, with a unit for each of the outermost layers and one for the rest. Add checkpoints if chosen."""
        precision = MixedPrecisionPolicy(param_dtype=self.param_dtype, reduce_dtype=self.reduce_dtype)
        layers = list(outermost_layers(model))
        for layer in layers:
            if self.checkpoints:
                layer.forward = functools.partial(checkpoint, layer.forward, use_reentrant=False)  # type: ignore[method-assign]
            fully_shard(layer, mesh=device_mesh, reshard_after_forward=self.reshard_after_forward, mp_policy=precision)
        fully_shard(model, mesh=device_mesh, mp_policy=precision)

    @property
    def step(self) -> Callable[..., Any]:
        """A function that runs one step, with enough microbatches to derive a step with more of them."""
        return train if self.accumulation == "none" else functools.partial(self.accumulate, TRACED_MICROBATCHES)

    def accumulate(self, microbatches: int, compiled: Any, *args: Any, **kwargs: Any) -> None:
        """Run one step of ``microbatches`` microbatches."""
        for index in range(microbatches):
            is_last = index == microbatches - 1
            if self.accumulation != "each":
                compiled.set_requires_gradient_sync(is_last)
            if self.accumulation == "kept":
                compiled.set_reshard_after_backward(is_last)
            train(compiled, *args, **kwargs)

    def lines(self, shards: int, replicas: int, microbatches: int, layers: str) -> list[str]:
        """Return the lines of Python that apply the policy.

        Args:
            shards, replicas, microbatches: the numbers in the lines.
            layers: an expression for the list of blocks.
        """
        shape = f"({replicas}, {shards})" if self.has_replicas else f"({shards},)"
        names = '("replicate", "shard")' if self.has_replicas else '("shard",)'
        lines = [f'mesh = init_device_mesh("cuda", {shape}, mesh_dim_names={names})']
        given = "mesh=mesh"
        if self.param_dtype is not None or self.reduce_dtype is not None:
            lines.append(f"precision = MixedPrecisionPolicy(param_dtype={self.param_dtype}, reduce_dtype={self.reduce_dtype})")
            given += ", mp_policy=precision"
        lines.append(f"for block in {layers}:")
        if self.checkpoints:
            lines.append("    block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)")
        lines.append(f"    fully_shard(block, {given}, reshard_after_forward={self.reshard_after_forward})")
        lines.append(f"fully_shard(model, {given})")
        options = "" if self.schedule == "default" else f', options={{"schedule": "{self.schedule}"}}'
        lines.append(f"compiled = torch.compile(model, backend=fsdp_backend{options})")
        if self.accumulation in ("last", "kept"):
            lines.append(f"for index in range({microbatches}):")
            lines.append(f"    model.set_requires_gradient_sync(index == {microbatches - 1})")
            if self.accumulation == "kept":
                lines.append(f"    model.set_reshard_after_backward(index == {microbatches - 1})")
            lines.append("    compiled(*microbatch(index)).backward()")
        return lines

    def __str__(self) -> str:
        kept = {True: "reshard", False: "keep"}.get(self.reshard_after_forward, "reshard to a node")  # type: ignore[arg-type]
        parts = [kept, *(["checkpoints"] if self.checkpoints else [])]
        parts += {"none": [], "each": ["reduce each"], "last": ["reduce last"], "kept": ["reduce last, keep gathered"]}[
            self.accumulation
        ]
        return ", ".join([*parts, *([self.schedule] if self.schedule != "default" else [])])


def path_of_layers(model: nn.Module) -> str:
    """Return a Python expression for the blocks of a model, which are in its outermost module lists."""
    paths = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    outer = [path for path in paths if not any(path.startswith(f"{other}.") for other in paths)]
    found = [f"model.{path}" for path in outer]
    return " + ".join(f"list({path})" for path in found) if len(found) > 1 else (found or ["[]"])[0]
