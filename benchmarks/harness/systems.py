"""The systems that are compared. Each is a way to train the same model on the same ranks."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from passes.models.hardware import Hardware

from .flags import names_of

BASE = "unsharded"
YARDSTICK = "fsdp2-compiled"
AUTO = "ours-auto"
RECORDED = "ours-cudagraphs"
REDUCED_OVERHEAD = "ours-reduce-overhead"
APART = "ours-apart"
ROUNDED = "ours-rounded"
UNCOMPILED = "ours-uncompiled"
ROUNDED_UNCOMPILED = "ours-rounded-uncompiled"
OFFLOADED = "ours-offloaded"
OFFLOADED_ACTIVATIONS = "ours-offloaded-activations"
# Names of torch's backends, and also values of fsdp_backend's option ``lowering``.
LOWERINGS = ("inductor", "aot_eager")

Forward = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Accumulation:
    """The way in which gradients of several microbatches become one step.

    Attributes:
        microbatches: the number of microbatches of a step.
        unsharded: if True, reduce gradients in the last microbatch only, instead of in each.
        keep_unsharded: if True, keep gathered parameters from the first microbatch to the last.
    """

    microbatches: int = 1
    unsharded: bool = False
    keep_unsharded: bool = False

    @staticmethod
    def add_flags(parser: argparse.ArgumentParser) -> None:
        group = parser.add_argument_group("microbatches")
        group.add_argument("--microbatches", type=int, default=1, metavar="N", help="of a step, each --batch; default 1")
        group.add_argument(
            "--accumulate",
            choices=["sharded", "unsharded"],
            default="sharded",
            help="reduce the gradients of every microbatch (default), or only in the last one",
        )
        group.add_argument(
            "--keep-unsharded", action="store_true", help="keep gathered parameters from one microbatch to the next"
        )

    @staticmethod
    def parse(args: argparse.Namespace) -> Accumulation:
        return Accumulation(args.microbatches, args.accumulate == "unsharded", args.keep_unsharded)


@dataclass
class System:
    """A model that can be trained.

    Attributes:
        model: has the parameters.
        forward: takes tokens and targets, and returns the loss.
        before_microbatch: called before each microbatch, with True before the last of a step.
    """

    model: nn.Module
    forward: Forward
    before_microbatch: Callable[[bool], None] = lambda last: None

    def __post_init__(self) -> None:
        # A parameter group for each mesh: an operator takes DTensors of one mesh only.
        groups: dict[Any, list[nn.Parameter]] = {}
        for param in self.model.parameters():
            groups.setdefault(getattr(param, "device_mesh", None), []).append(param)
        self.optimizer = torch.optim.SGD([{"params": params} for params in groups.values()], lr=0.05, foreach=True)

    def step(self, batches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Train one step on these microbatches. Return their mean loss, without waiting for the device."""
        losses = []
        for index, (tokens, targets) in enumerate(batches):
            self.before_microbatch(index == len(batches) - 1)
            loss = self.forward(tokens, targets) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        self.optimizer.step()
        self.optimizer.zero_grad()
        return torch.stack(losses).sum()


class Recipe(Protocol):
    """A recipe for a model whose forward takes tokens and targets, and whose ``blocks`` become units of their own."""

    def build(self, device: torch.device) -> nn.Module: ...


@dataclass(frozen=True)
class Setting:
    """The settings that a system is built with.

    Attributes:
        size: the model.
        lowering: the backend or lowering of systems that compile.
        policy: mixed precision of the systems that shard.
        hardware: the machine that ``ours-auto`` schedules for; None: the default.
        reshard_after_forward: for our systems; None: True for all units but the root.
        memory_limit: for ``ours-auto``, in bytes; None: no limit.
        options: further options of ``fsdp_backend``, for our systems.
        placement: for our systems; None: that of ``fully_shard``.
    """

    size: Recipe
    mesh: DeviceMesh
    device: torch.device
    accumulation: Accumulation = Accumulation()
    lowering: str = "inductor"
    policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    hardware: Hardware | None = None
    reshard_after_forward: bool | None = None
    memory_limit: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    placement: str | None = None


def _unsharded(setting: Setting) -> System:
    model = setting.size.build(setting.device)
    return System(model, torch.compile(model, backend=setting.lowering))


def _ddp(setting: Setting) -> System:
    model = DistributedDataParallel(setting.size.build(setting.device), process_group=setting.mesh.get_group())

    def before_microbatch(last: bool) -> None:
        # DDP.no_sync() sets the same flag.
        model.require_backward_grad_sync = last or not setting.accumulation.unsharded

    return System(model, torch.compile(model, backend=setting.lowering), before_microbatch)


def shard_blocks(model: Any, fully_shard: Callable[..., Any], **how: Any) -> None:
    """Make each block a unit, and the rest of the model another."""
    for block in model.blocks:
        fully_shard(block, **how)
    fully_shard(model, **how)


def _fsdp2(setting: Setting, *, compiled: bool = False, async_op: bool = False) -> System:
    from torch.distributed.fsdp import fully_shard

    model: Any = setting.size.build(setting.device)
    # A unit that FSDP2 reshards after forward is gathered again in each backward, even if it is kept after backward.
    reshard_after_forward = False if setting.accumulation.keep_unsharded else None
    sharding = {"mesh": setting.mesh, "mp_policy": setting.policy, "reshard_after_forward": reshard_after_forward}
    for block in model.blocks if compiled else ():
        block.compile(backend=setting.lowering)
    shard_blocks(model, fully_shard, **sharding)
    if async_op:
        model._set_unshard_async_op(True)
    return System(model, model, _sync_flags(model, setting.accumulation))


def _ours(
    setting: Setting, wrap: Callable[[nn.Module], nn.Module] = lambda block: block, *, compiled: bool = True, **options: Any
) -> System:
    from fsdp_compile import fsdp_backend, fully_shard

    model: Any = setting.size.build(setting.device)
    model.blocks = nn.ModuleList(map(wrap, model.blocks))
    sharding = {"mesh": setting.mesh, "mp_policy": setting.policy, "reshard_after_forward": setting.reshard_after_forward}
    shard_blocks(model, fully_shard, **sharding, placement=setting.placement)
    options = {"lowering": setting.lowering, **setting.options, **options}
    forward = torch.compile(model, backend=fsdp_backend, options=options) if compiled else model
    return System(model, forward, _sync_flags(model, setting.accumulation))


def _ours_by_mode(setting: Setting, mode: str) -> System:
    from fsdp_compile import fsdp_backend

    system = _ours(setting, compiled=False)
    system.forward = torch.compile(system.model, backend=fsdp_backend, mode=mode)
    return system


def _ours_rounded(setting: Setting, compiled: bool = True) -> System:
    from fsdp_compile import GatherPolicy, comm_hooks, fsdp_backend, fully_shard

    model: Any = setting.size.build(setting.device)
    shard_blocks(model, fully_shard, mesh=setting.mesh, gather_policy=GatherPolicy(torch.float8_e4m3fn, 128))
    hook = comm_hooks.QuantizedReduce(torch.int8, block=128)
    model.register_comm_hook(comm_hooks.DefaultState(setting.mesh.get_group()), hook)
    options = {"lowering": setting.lowering}
    forward = torch.compile(model, backend=fsdp_backend, options=options) if compiled else model
    return System(model, forward, _sync_flags(model, setting.accumulation))


def _ours_offloaded(setting: Setting) -> System:
    from fsdp_compile import CPUOffloadPolicy, fsdp_backend, fully_shard

    model: Any = setting.size.build(setting.device)
    shard_blocks(model, fully_shard, mesh=setting.mesh, mp_policy=setting.policy, offload_policy=CPUOffloadPolicy())
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": setting.lowering})
    return System(model, compiled, _sync_flags(model, setting.accumulation))


class _ProductsOnHost(nn.Module):
    """A block whose matrix products wait for backward on the host. Backward recomputes everything else."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, *args: Any) -> Any:
        contexts = functools.partial(create_selective_checkpoint_contexts, _products_on_host)
        return checkpoint(self.block, *args, use_reentrant=False, context_fn=contexts)


def _products_on_host(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = operator in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_CPU_OFFLOAD if is_product else CheckpointPolicy.PREFER_RECOMPUTE


def _sync_flags(model: Any, accumulation: Accumulation) -> Callable[[bool], None]:
    """Return a ``before_microbatch`` for FSDP2 and for this library, which have the same methods."""

    def before_microbatch(last: bool) -> None:
        if accumulation.unsharded:
            model.set_requires_gradient_sync(last)
        if accumulation.keep_unsharded:
            model.set_reshard_after_backward(last)

    return before_microbatch


_BUILDERS: dict[str, Callable[[Setting], System]] = {
    BASE: _unsharded,
    "ddp": _ddp,
    "fsdp2": _fsdp2,
    YARDSTICK: lambda setting: _fsdp2(setting, compiled=True),
    "fsdp2-async": lambda setting: _fsdp2(setting, compiled=True, async_op=True),
    "ours": _ours,
    AUTO: lambda setting: _ours(setting, schedule="auto", hardware=setting.hardware, memory_limit=setting.memory_limit),
    RECORDED: lambda setting: _ours(setting, cudagraphs=True),
    REDUCED_OVERHEAD: lambda setting: _ours_by_mode(setting, "reduce-overhead"),
    APART: lambda setting: _ours(setting, min_bucket_bytes=0),
    ROUNDED: _ours_rounded,
    UNCOMPILED: lambda setting: _ours(setting, compiled=False),
    ROUNDED_UNCOMPILED: lambda setting: _ours_rounded(setting, compiled=False),
    OFFLOADED: _ours_offloaded,
    OFFLOADED_ACTIVATIONS: lambda setting: _ours(setting, _ProductsOnHost),
}

SYSTEMS = {
    BASE: "torch.compile, no communication: each rank trains alone",
    "ddp": "DistributedDataParallel, compiled",
    "fsdp2": "FSDP2, eager",
    YARDSTICK: "FSDP2, each block compiled",
    "fsdp2-async": "the same, with _set_unshard_async_op(True)",
    "ours": "fsdp_backend",
    AUTO: 'fsdp_backend, with options={"schedule": "auto"}',
    RECORDED: 'fsdp_backend, with options={"cudagraphs": True}; on CUDA, without Gloo',
    REDUCED_OVERHEAD: 'fsdp_backend, with mode="reduce-overhead"; on CUDA, if asked for',
    APART: 'fsdp_backend, with options={"min_bucket_bytes": 0}; if asked for',
    ROUNDED: "fsdp_backend, with gathers in float8 and reductions in int8; if asked for",
    UNCOMPILED: "not compiled; if asked for",
    ROUNDED_UNCOMPILED: "ours-rounded, not compiled; if asked for",
    OFFLOADED: "fsdp_backend, with shards, gradients and optimizer on the host; if asked for",
    OFFLOADED_ACTIVATIONS: "fsdp_backend, with matrix products that wait on the host for backward; if asked for",
}


def build(name: str, setting: Setting) -> System:
    """Build a system by its name in ``SYSTEMS``."""
    return _BUILDERS[name](setting)


def default_systems(group: str, device: str) -> list[str]:
    """Return the systems to compare by default, with this kind of process group on this kind of device."""
    left_out = {APART, ROUNDED, UNCOMPILED, ROUNDED_UNCOMPILED, OFFLOADED, OFFLOADED_ACTIVATIONS, REDUCED_OVERHEAD}
    if group == "fake":
        # The reducer of DDP fails with collectives that do nothing.
        left_out.add("ddp")
    if device != "cuda" or group == "gloo":
        left_out.add(RECORDED)
    return [name for name in SYSTEMS if name not in left_out]


#: An argparse type: names of systems, separated by commas.
parse_systems = names_of("system", SYSTEMS)
