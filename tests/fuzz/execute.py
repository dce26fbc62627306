"""The run of a case with one system on every rank, which records losses, gradients and parameters for comparison."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._pytree import tree_map_only

import fsdp_compile
from tests.common.distributed import device_mesh
from tests.common.padded_products import padded_products
from tests.common.subclasses import Wrapper

from .blocks import VOCABULARY, Extended, Gated, Network, Ordered, Parallel, network
from .case import Call, Case, Evaluate, Event, Freeze, Micro, Model, Path, Reload, Step

_adamw = partial(torch.optim.AdamW, lr=1e-2, eps=1e-3)

#: By name: a function that makes an optimizer of parameters. All but those in :data:`OF_THE_LIBRARY` are torch's.
OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=1e-2, momentum=0.9),
    "adamw": _adamw,
    "foreach": partial(_adamw, foreach=True),
    "fused": partial(_adamw, fused=True),
    "flat": lambda params: fsdp_compile.flat_optimizer(torch.optim.AdamW, params, lr=1e-2, eps=1e-3),
    "one buffer": lambda params: fsdp_compile.flat_optimizer(torch.optim.AdamW, params, one_buffer=True, lr=1e-2, eps=1e-3),
    "in backward": lambda params: fsdp_compile.optimizer_in_backward(torch.optim.AdamW, params, lr=1e-2, eps=1e-3),
    "offloaded": lambda params: fsdp_compile.offload_optimizer(torch.optim.AdamW, params, lr=1e-2, eps=1e-3),
}
OF_THE_LIBRARY = ("flat", "one buffer", "in backward", "offloaded")


#: Features that are applied to a sharded model. Others, such as "offload" and "rounded", are options of ``fully_shard``.
FEATURES: dict[str, Callable[[Any], None]] = {
    "uneven": lambda model: model.set_reduce_scatter_unused_params(True),
    "hook": lambda model: model.register_comm_hook(
        fsdp_compile.comm_hooks.DefaultState(dist.group.WORLD), fsdp_compile.comm_hooks.reduce_scatter_hook
    ),
}


@dataclass
class EventRecord:
    """The record of one event on one rank.

    Attributes:
        event: the event.
        loss: the loss of a microbatch or an evaluation.
        norm: the norm of the gradients, if they are clipped.
        grads: full gradients by name at the end of a step; None for a parameter without a gradient.
        params: full parameters by name after the step of the optimizer.
        local: this rank's shards of gradients by name, after a microbatch.
    """

    event: Event
    loss: float | None = None
    norm: float | None = None
    grads: dict[str, Tensor | None] | None = None
    params: dict[str, Tensor] | None = None
    local: dict[str, Tensor | None] = field(default_factory=dict)


def _batch(index: int, rank: int, size: tuple[int, int], dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * index + rank)
    tokens = torch.randint(VOCABULARY, size, generator=generator)
    target = torch.randn((*size, VOCABULARY), generator=generator, dtype=torch.float64)
    return tokens.to(device), target.to(device, dtype)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _policy(spec: Model) -> MixedPrecisionPolicy | None:
    if spec.policy is None:
        return None
    return MixedPrecisionPolicy(*(None if name is None else getattr(torch, name) for name in spec.policy))


#: Features that are placements of all units.
PLACEMENTS = ("hybrid", "zero1", "zero2", "ddp")


def shard(model: Network, case: Case, fully_shard: Callable[..., Any], mesh: DeviceMesh) -> None:
    """Shard a model into the units of a case, with its options and features."""
    if "tensor parallel" in case.features:
        for layers in (module for module in model.modules() if isinstance(module, Parallel)):
            parallelize_module(layers, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        options: dict[str, Any] = {"mesh": mesh["shard"]}
    else:
        options = {"mesh": mesh}
    for module in (module for module in model.modules() if isinstance(module, Extended)):
        module.extend()
    if case.model.cut_last:
        ranks = options["mesh"].size() if "hybrid" in case.features else options["mesh"].size(-1)
        options["shard_placement_fn"] = lambda param: Shard(param.ndim - 1) if param.shape[-1] % ranks == 0 else None
    if (policy := _policy(case.model)) is not None:
        options["mp_policy"] = policy
    if "offload" in case.features:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if "rounded" in case.features:
        options["gather_policy"] = fsdp_compile.GatherPolicy(torch.int8)
    placement = next((feature for feature in case.features if feature in PLACEMENTS), None)
    if placement is not None:
        options["placement"] = placement
    blocks = list(model.blocks)
    taken: set[int] = set()
    for index, (spec, block) in enumerate(zip(case.model.blocks, blocks, strict=True)):
        if index in taken or not spec.unit:
            continue
        if spec.unit == "nested":
            inner = next((child for child in block.children() if next(child.parameters(), None) is not None), None)
            if inner is not None and type(inner) not in (nn.ParameterList, nn.ParameterDict, nn.ModuleList):
                fully_shard(inner, reshard_after_forward=spec.reshard, **options)
        modules = [block]
        if spec.unit == "with next" and index + 1 < len(blocks):
            modules.append(blocks[index + 1])
            taken.add(index + 1)
        fully_shard(modules if len(modules) > 1 else block, reshard_after_forward=spec.reshard, **options)
    fully_shard(model, reshard_after_forward=case.model.reshard, **options)
    for feature in case.features:
        if feature in FEATURES:
            FEATURES[feature](model)
    for module in model.modules():
        if case.factor is not None and hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(case.factor)
        if mesh.device_type != "cpu" and hasattr(module, "set_force_sum_reduction_for_comms"):
            # Gloo has no averages, which gradients on a GPU would get.
            module.set_force_sum_reduction_for_comms(True)


def call(model: Network, event: Call) -> None:
    """Call the method of an event."""

    def resolved(value: Any) -> Any:
        if isinstance(value, tuple):
            return [*map(resolved, value)]
        return model.get_submodule(value.path) if isinstance(value, Path) else value

    arguments = {name: resolved(value) for name, value in event.kwargs}
    getattr(model.get_submodule(event.path), event.method)(*map(resolved, event.args), **arguments)


class _Trainee:
    """A model in training: sharded, or whole on the batches of all ranks."""

    def __init__(self, case: Case, system: str, device: str):
        self.case = case
        self.system = system
        self.device = device
        self.model: Any = network(case.model).to(device)
        self.forward: Callable[[Tensor], Tensor] = self.model
        self.is_whole = system == "whole"
        if not self.is_whole:
            mesh = device_mesh(case.mesh, ("shard", "tp") if "tensor parallel" in case.features else None, device)
            shard(self.model, case, torch.distributed.fsdp.fully_shard if system == "fsdp2" else fsdp_compile.fully_shard, mesh)
            if system in ("aot_eager", "inductor"):
                options = {**dict(case.options), "lowering": system}
                compiled = self.model.blocks if "by block" in case.features else [self.model]
                for module in compiled:
                    module.compile(backend=fsdp_compile.fsdp_backend, options=options)
        name = case.optimizer
        if self.is_whole and name in OF_THE_LIBRARY:
            name = "adamw"
        self.named = dict(self.model.named_parameters())
        self.optimizer = OPTIMIZERS[name](self.named.values())
        self.updates_in_backward = name == "in backward"
        self.index = 0
        self.data_rank = dist.get_rank() * case.data_ranks // case.world

    def run(self, event: Event) -> EventRecord:
        seen = EventRecord(event)
        if isinstance(event, Micro):
            self._micro(event, seen)
        elif isinstance(event, Step):
            self._step(event, seen)
        elif isinstance(event, Evaluate):
            with torch.inference_mode() if event.inference else torch.no_grad():
                seen.loss = self._losses(event.sizes)
        elif isinstance(event, Freeze):
            self.model.get_submodule(event.path).requires_grad_(event.requires_grad)
        elif isinstance(event, Reload):
            self._reload(event.what)
        elif not self.is_whole:
            call(self.model, event)
        return seen

    def _losses(
        self, sizes: tuple[tuple[int, int], ...], forwards: int = 1, before_backward: Callable[[], None] | None = None
    ) -> float:
        """Run forwards, and return this rank's loss.

        If ``before_backward`` is given, call it and run backward as well. For a whole model, each rank's loss is divided by the
        divide factor first.
        """
        dtype = getattr(torch, self.case.model.dtype)
        self.index += 1
        losses = {}
        divisor = self.case.factor or self.case.data_ranks
        for rank in range(self.case.data_ranks) if self.is_whole else [self.data_rank]:
            if "uneven" in self.case.features:
                for gated in (module for module in self.model.modules() if isinstance(module, Gated)):
                    gated.is_open = (rank + self.index) % 2 == 0
            for ordered in (module for module in self.model.modules() if isinstance(module, Ordered)):
                # Even ranks; odd ones; all; none; and so on.
                place = self.index // 2 if rank % 2 else self.index
                ordered.is_swapped = "other order" in self.case.features and place % 2 == 1
            loss: Any = 0.0
            for number in range(forwards):
                tokens, target = _batch(10 * self.index + number, rank, sizes[rank % len(sizes)], dtype, self.device)
                loss = loss + _loss(self.forward(tokens).to(dtype), target)
            if before_backward is not None:
                before_backward()
                (loss / divisor if self.is_whole else loss).backward()
            losses[rank] = loss.item()
        return losses[self.data_rank]

    def _micro(self, event: Micro, seen: EventRecord) -> None:
        self.model.skips = event.skips

        def between() -> None:
            for one in () if self.is_whole else event.between:
                call(self.model, one)

        seen.loss = self._losses(event.sizes, event.forwards, between)
        if not self.is_whole:
            seen.local = {name: _local(param.grad) for name, param in self.named.items()}

    def _step(self, event: Step, seen: EventRecord) -> None:
        if self.is_whole and "uneven" in self.case.features:
            for param in self.named.values():
                if param.grad is None and param.requires_grad:
                    param.grad = torch.zeros_like(param)
        if not self.updates_in_backward:
            seen.grads = {name: None if param.grad is None else _full(param.grad) for name, param in self.named.items()}
            if event.clip is not None:
                norm = torch.nn.utils.clip_grad_norm_(self.named.values(), event.clip)
                seen.norm = (norm.full_tensor() if isinstance(norm, DTensor) else norm).item()
        self.optimizer.step()
        self.optimizer.zero_grad()
        seen.params = {name: _full(param) for name, param in self.named.items()}

    def _reload(self, what: str) -> None:
        # Not strict for optimizers: parameters that no gradient has reached have no state.
        options = StateDictOptions(full_state_dict=what == "full", strict=what != "optimizer")
        if what == "optimizer":
            states = get_optimizer_state_dict(self.model, self.optimizer, options=options)
            states = tree_map_only(Tensor, Tensor.clone, states)
            for state in self.optimizer.state.values():
                for value in state.values():
                    if isinstance(value, Tensor) and value.ndim:
                        value.mul_(2)
            set_optimizer_state_dict(self.model, self.optimizer, states, options=options)
            return
        full = what == "full"
        state = get_model_state_dict(self.model, options=options) if full else self.model.state_dict()
        state = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for param in self.named.values():
                param.mul_(2)
        if full:
            set_model_state_dict(self.model, state, options=options)
        else:
            self.model.load_state_dict(state)


def _local(grad: Any) -> Tensor | None:
    if grad is None:
        return None
    local = grad.to_local().detach()
    return (local.held if isinstance(local, Wrapper) else local).clone().cpu()


def _full(tensor: Any) -> Tensor:
    tensor = tensor.detach()
    if isinstance(tensor, DTensor) and isinstance(tensor._local_tensor, Wrapper):
        held = tensor._local_tensor.held
        tensor = DTensor.from_local(
            held, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
        )
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone().cpu()


@contextmanager
def _low_thresholds() -> Iterator[None]:
    own = "passes.auto.large_parameters.MIN_OWN_BUCKET_BYTES"
    with mock.patch(own, 64), mock.patch("passes.auto.small_units.MIN_BUCKET_BYTES", 256):
        yield


def execute(case: Case, system: str, device: str = "cpu") -> list[EventRecord]:
    """Run a case with a system, and return the record of each event. Every rank calls this.

    Args:
        case: the case.
        system: "fsdp2"; "eager", the library uncompiled; a lowering; or "whole", whole parameters in this process alone.
        device: the device of parameters and batches: "cpu", or "cuda", which all ranks share.
    """
    torch._dynamo.reset()
    # Not an assignment: torch.testing._internal, once imported, permits none.
    precise = torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
    # Past its limit Dynamo runs a frame eagerly, on each rank after a different call.
    limits = torch._dynamo.config.patch(fail_on_recompile_limit_hit=True, recompile_limit=64)
    padded = padded_products() if "padded" in case.features else nullcontext()
    thresholds = _low_thresholds() if "low thresholds" in case.features else nullcontext()
    with precise, padded, thresholds, limits if system in ("aot_eager", "inductor") else nullcontext():
        trainee = _Trainee(case, system, device)
        return [trainee.run(event) for event in case.events]
