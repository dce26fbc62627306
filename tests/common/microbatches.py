"""Training with several microbatches per optimizer step, with counts of each microbatch's collectives.

A schedule is the microbatches of one step, each with the flags that are set before its forward and between its
forward and its backward. Flags are written as data, so that the same schedule drives torch's FSDP2 and the library, and
travels to the ranks by name or by value. ``FLAVOURS`` are the schedules that people use, and some that mix them.

Every schedule of four microbatches must give the same gradients: the sum over the microbatches of the mean over the
ranks. :func:`reference` computes them in one process in float64; a flavour decides only when they are reduced.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, distribute_tensor

from tests.common import models
from tests.common.distributed import device_mesh
from tests.common.parity import (
    Batch,
    Forward,
    FullyShard,
    adamw,
    next_token_loss,
    regression_batch,
    shard_units,
    squared_error,
    token_batch,
)

# The profiler would report every start and stop on stderr.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

# Every collective, of any caller and operator, ends in one of these. A dispatch mode would
# see more names, and torch.compile does not run under one.
_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::allgather_into_tensor_coalesced_": "all_gather",
    "fsdp_compile::all_gather": "all_gather",
    # Over Gloo, a reduction is an exchange (passes/collectives/gloo.py).
    "fsdp_compile::all_to_all": "reduce_scatter",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::reduce_scatter_": "reduce_scatter",
    "c10d::reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "fsdp_compile::all_reduce": "all_reduce",
    "c10d::allreduce_": "all_reduce",
    "c10d::allreduce_coalesced_": "all_reduce",
}
# Called by the library's own kernels over groups without channels (passes/collectives/gloo.py), so counted already.
_INSIDE = {"c10d::alltoall_base_"}


@dataclass
class Collectives:
    """The number of collectives of each kind that a rank took part in."""

    all_gather: int = 0
    reduce_scatter: int = 0
    all_reduce: int = 0


@contextmanager
def count_collectives() -> Iterator[Collectives]:
    """Count the collectives that this process issues in the block, those of compiled code included."""
    counts = Collectives()
    with torch.autograd.profiler.profile() as profile:
        yield counts
    results = profile.kineto_results
    assert results is not None
    events = Counter(event.name() for event in results.events())
    for name, number in events.items():
        if name in _COLLECTIVES:
            kind = _COLLECTIVES[name]
            setattr(counts, kind, getattr(counts, kind) + number)
        elif name not in _INSIDE:
            assert not name.startswith("c10d::"), f"{name} is a collective that this function does not know"


@dataclass(frozen=True)
class Flag:
    """A call of a flag's method: ``model.get_submodule(module).method(value)``."""

    method: str
    value: Any
    module: str = ""
    # None: not passed, as some methods have no such parameter.
    recurse: bool | None = None

    def apply(self, model: nn.Module) -> None:
        options = {} if self.recurse is None else {"recurse": self.recurse}
        getattr(model.get_submodule(self.module), self.method)(self.value, **options)

    def __repr__(self) -> str:
        """Return the call as code, for reports of failures."""
        recurse = "" if self.recurse is None else f", recurse={self.recurse}"
        return f"{self.module or 'model'}.{self.method}({self.value}{recurse})"


sync = partial(Flag, "set_requires_gradient_sync")
all_reduce = partial(Flag, "set_requires_all_reduce")
reshard_after_backward = partial(Flag, "set_reshard_after_backward")
reshard_after_forward = partial(Flag, "set_reshard_after_forward")
last_backward = partial(Flag, "set_is_last_backward")
divide_factor = partial(Flag, "set_gradient_divide_factor")
force_sum = partial(Flag, "set_force_sum_reduction_for_comms")


@dataclass(frozen=True)
class Microbatch:
    """One forward and backward.

    Attributes:
        before: flags that are set before the forward.
        between: flags that are set after the forward and before the backward.
    """

    before: tuple[Flag, ...] = ()
    between: tuple[Flag, ...] = ()


Schedule = tuple[Microbatch, ...]

# The defaults of the flags.
DEFAULTS = (sync(True), all_reduce(True), reshard_after_backward(True), last_backward(True))


def _first_and_last(first: Sequence[Flag], last: Sequence[Flag]) -> Schedule:
    """Return four microbatches, with flags set before the first and before the last."""
    return (Microbatch(tuple(first)), Microbatch(), Microbatch(), Microbatch(tuple(last)))


FLAVOURS: dict[str, Schedule] = {
    "sharded": (Microbatch(),) * 4,
    "unsharded": _first_and_last([sync(False)], [sync(True)]),
    "partial": _first_and_last([all_reduce(False)], [all_reduce(True)]),
    "unsharded_then_partial": (
        Microbatch((sync(False),)),
        Microbatch((sync(True), all_reduce(False))),
        Microbatch(),
        Microbatch((all_reduce(True),)),
    ),
    "partial_then_unsharded": (
        Microbatch((all_reduce(False),)),
        Microbatch((sync(False),)),
        Microbatch(),
        Microbatch((sync(True),)),
    ),
    "every_second_block_defers": _first_and_last([sync(False, "blocks.1"), sync(False, "blocks.3")], [sync(True)]),
    # The root's own parameters, without those of the blocks.
    "only_root_defers": _first_and_last([sync(False, recurse=False)], [sync(True, recurse=False)]),
    "keep_unsharded": _first_and_last([sync(False), reshard_after_backward(False)], [sync(True), reshard_after_backward(True)]),
    "sharded_keep": _first_and_last([reshard_after_backward(False)], [reshard_after_backward(True)]),
    "partial_keep_one_block": _first_and_last(
        [all_reduce(False), reshard_after_backward(False, "blocks.1"), last_backward(False)],
        [all_reduce(True), reshard_after_backward(True), last_backward(True)],
    ),
    "flags_between": (
        Microbatch(between=(sync(False), reshard_after_backward(False))),
        Microbatch(between=(sync(True), all_reduce(False), reshard_after_backward(True, "blocks.2"))),
        Microbatch(between=(sync(False, "blocks.0"),)),
        Microbatch(between=(sync(True), reshard_after_backward(True))),
    ),
}


@dataclass(frozen=True)
class Task:
    """A model and its data."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int, int], Batch]
    loss: Callable[[Forward, Batch], Tensor]


# Four blocks, and a root with embedding, norm and head, as in the counts of FSDP2's documentation.
GPT = Task(partial(models.Transformer, layers=4), token_batch, next_token_loss)
SMALL = Task(models.MLP, regression_batch, squared_error)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    # By step, before the optimizer steps; None for a parameter without a gradient.
    gradients: list[dict[str, Tensor | None]] = field(default_factory=list)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    # By microbatch.
    forward: list[Collectives] = field(default_factory=list)
    backward: list[Collectives] = field(default_factory=list)
    # By microbatch: how often a post-accumulate-grad hook was called, by parameter; see HOOKED.
    hooks: list[dict[str, int]] = field(default_factory=list)

    def counts(self, kind: str, phase: str = "") -> list[int]:
        """Return the number of collectives of a kind by microbatch, in one phase or in both."""
        phases = [getattr(self, phase)] if phase else [self.forward, self.backward]
        return [sum(getattr(counts, kind) for counts in microbatch) for microbatch in zip(*phases, strict=True)]


# Parameters with a post-accumulate-grad hook. Not all have one, so that code with and without hooks runs.
HOOKED = ("blocks.0", "head")


def full(tensor: Tensor) -> Tensor:
    """Return a copy of the unsharded tensor."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()


class Trainee:
    """A model, sharded by a system and ready to train, any number of times from the same initial parameters.

    Compiling takes most of a test's time, so one compiled model serves several schedules.

    Args:
        system: "fsdp2", "eager" (the library, not compiled), a lowering of the library's, or "recorded" (with recordings of
            CUDA graphs, see :mod:`tests.common.replay`).
        mesh_shape: one dimension for FSDP, (replicate, shard) for HSDP.
        build: makes the model.
        shard: applies ``fully_shard`` to it.
        policy: its mixed-precision policy.

    Attributes:
        model: the sharded model, which has the flags.
        forward: the model or its compiled wrapper.
        names: names of the parameters, in the order of ``model.parameters()``.
    """

    def __init__(
        self,
        system: str,
        mesh_shape: tuple[int, ...],
        build: Callable[[], nn.Module],
        shard: Callable[..., None] = shard_units,
        policy: MixedPrecisionPolicy | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.system = system
        self.model = build()
        self._initial = {name: value.detach().clone() for name, value in self.model.named_parameters()}
        self.names = tuple(self._initial)
        shard(self.model, device_mesh(mesh_shape), fully_shard_of(system), **({} if policy is None else {"mp_policy": policy}))
        self.forward: Forward = self.model
        if system not in ("fsdp2", "eager"):
            from fsdp_compile import fsdp_backend

            options = {"lowering": "aot_eager", "cudagraphs": True} if system == "recorded" else {"lowering": system}
            self.forward = torch.compile(self.model, backend=fsdp_backend, options=options)

    def reset(self) -> None:
        """Restore the initial parameters and the defaults of flags, and drop gradients."""
        for flag in DEFAULTS:
            flag.apply(self.model)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                assert isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(self._initial[name], parameter.device_mesh, parameter.placements))
                parameter.grad = None

    def train(
        self,
        task: Task,
        steps: Sequence[Schedule],
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
        count: bool = True,
    ) -> Run:
        """Train on this rank's batches. Every rank calls this; only rank 0 returns gradients.

        Args:
            task: the data and the loss; the model of the task is not used.
            steps: a schedule for each optimizer step.
            optimizer: makes the optimizer.
            count: whether to count collectives.
        """
        rank, world = dist.get_rank(), dist.get_world_size()
        run = Run()
        optim = optimizer(self.model.parameters())
        called: Counter[str] = Counter()

        def note(name: str, parameter: Tensor) -> None:
            assert parameter.grad is not None
            called[name] += 1

        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        hooked = {name: parameter for name, parameter in trained.items() if name.startswith(HOOKED)}
        handles = [parameter.register_post_accumulate_grad_hook(partial(note, name)) for name, parameter in hooked.items()]
        index = 0
        # Past its limit of recompilations Dynamo runs a frame eagerly, which would test nothing.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for schedule in steps:
                for microbatch in schedule:
                    batch = task.batch(index, rank, world)
                    index += 1
                    called.clear()
                    for flag in microbatch.before:
                        flag.apply(self.model)
                    with _counting(count) as in_forward:
                        loss = task.loss(self.forward, batch)
                    for flag in microbatch.between:
                        flag.apply(self.model)
                    with _counting(count) as in_backward:
                        loss.backward()
                    run.losses.append(loss.item())
                    run.forward.append(in_forward)
                    run.backward.append(in_backward)
                    run.hooks.append({name: called[name] for name in hooked})
                run.gradients.append(
                    {name: None if p.grad is None else full(p.grad) for name, p in self.model.named_parameters()}
                )
                optim.step()
                optim.zero_grad(set_to_none=True)
        run.parameters = {name: full(parameter) for name, parameter in self.model.named_parameters()}
        for handle in handles:
            handle.remove()
        if rank != 0:
            run.gradients = []
        return run


@contextmanager
def _counting(count: bool) -> Iterator[Collectives]:
    if count:
        with count_collectives() as counts:
            yield counts
    else:
        yield Collectives()


def fully_shard_of(system: str) -> FullyShard:
    """Return the ``fully_shard`` of a system."""
    if system == "fsdp2":
        return torch.distributed.fsdp.fully_shard
    import fsdp_compile

    return fsdp_compile.fully_shard


def graphs_captured() -> int:
    """Return the number of graphs that Dynamo has captured in this process since its last reset."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def reference(
    task: Task,
    world: int,
    microbatches: Sequence[int],
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    scales: Sequence[float] | None = None,
) -> Run:
    """Train in this process alone, in float64, on the batches of all ranks concatenated.

    Args:
        task: model and data.
        world: number of ranks.
        microbatches: the number of microbatches in each step.
        optimizer: makes the optimizer.
        scales: factors of the gradients, one for each step.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = task.build().double()
    run = Run()
    optim = optimizer(model.parameters())
    index = 0
    for step, number in enumerate(microbatches):
        for _ in range(number):
            parts = [task.batch(index, rank, world) for rank in range(world)]
            index += 1
            inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
            if inputs.is_floating_point():
                inputs, targets = inputs.double(), targets.double()
            loss = task.loss(model, (inputs, targets))
            loss.backward()
            run.losses.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None and scales is not None:
                parameter.grad.mul_(scales[step])
        run.gradients.append({name: None if p.grad is None else full(p.grad) for name, p in model.named_parameters()})
        optim.step()
        optim.zero_grad(set_to_none=True)
    run.parameters = {name: full(parameter) for name, parameter in model.named_parameters()}
    return run


def relative_error(actual: Tensor, expected: Tensor, order: float = torch.inf) -> float:
    """Return the norm of the difference divided by the norm of ``expected``; infinity if the shapes differ."""
    if actual.shape != expected.shape:
        return torch.inf
    actual, expected = actual.double(), expected.double()
    norm = torch.linalg.vector_norm(expected, order).item()
    error = torch.linalg.vector_norm(actual - expected, order).item()
    return error if norm == 0 else error / norm


def differences(actual: Sequence[Run], expected: Sequence[Run] | Run, rtol: float, order: float = torch.inf) -> list[str]:
    """Describe how the ranks' runs differ from a reference, or from the ranks' runs of another system."""
    others = [expected] if isinstance(expected, Run) else expected
    found: list[str] = []

    def check(what: str, ours: Tensor | None, theirs: Tensor | None) -> None:
        if ours is None or theirs is None:
            if ours is not theirs:
                found.append(f"{what} is {'missing' if ours is None else 'there'}, and should not be")
            return
        error = relative_error(ours, theirs, order)
        # Negated, so that a NaN is a difference.
        if not error <= rtol:
            found.append(f"{what} has relative error {error:.1e} (limit {rtol:.0e})")

    def losses(runs: Sequence[Run]) -> Tensor:
        return torch.tensor([run.losses for run in runs], dtype=torch.float64).mean(0)

    check("losses", losses(actual), losses(others))
    run, other = actual[0], others[0]
    if len(run.gradients) != len(other.gradients):
        found.append(f"{len(run.gradients)} steps, expected {len(other.gradients)}")
    for step, (gradients, expected_gradients) in enumerate(zip(run.gradients, other.gradients, strict=False)):
        assert gradients.keys() == expected_gradients.keys()
        for name, gradient in gradients.items():
            check(f"step {step}: gradient of {name}", gradient, expected_gradients[name])
    for rank, of_rank in enumerate(actual):
        for name, parameter in other.parameters.items():
            check(f"rank {rank}: final {name}", of_rank.parameters.get(name), parameter)
    return found


def train_schedules(
    system: str,
    mesh_shape: tuple[int, ...],
    task: Task,
    schedules: Mapping[str, Sequence[Schedule]],
    shard: Callable[..., None] = shard_units,
    policy: MixedPrecisionPolicy | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
    count: bool = True,
) -> tuple[dict[str, Run | str], int]:
    """Train by each of the schedules, all on one compiled model; a job for ranks.

    Returns:
        The run of each schedule by name, or its traceback if it failed; and the number of graphs that Dynamo captured.
    """
    before = graphs_captured()
    results: dict[str, Run | str] = {}
    trainee = None
    for name, steps in schedules.items():
        trainee = trainee or Trainee(system, mesh_shape, task.build, shard, policy)
        try:
            trainee.reset()
            results[name] = trainee.train(task, steps, optimizer, count)
        except Exception:
            results[name] = traceback.format_exc()
            # The next schedule gets a new model, without the state that this one left.
            trainee = None
    return results, graphs_captured() - before
