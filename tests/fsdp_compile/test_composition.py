"""Features that people use together with FSDP2: a job runs with FSDP2 and with this library, and gives the same numbers.

A job gets a :class:`System` that shards and compiles: FSDP2 with compiled blocks, or this library with the whole model. It
returns a tree of tensors and numbers, which must agree. docs/compatibility.md names these tests, and tests in other files.
"""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.pipelining as pipelining
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, IterableDataset

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankFailure, RankPools, device_mesh
from tests.common.parity import Forward, adamw, regression_batch, shard_units, squared_error

pytestmark = pytest.mark.units_apart

Numbers = dict[str, Any]
_WORLD = 2
_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


@dataclass(frozen=True)
class System:
    """``ours``: this library, with the model compiled whole; otherwise FSDP2 with compiled blocks, torch's recipe."""

    ours: bool

    def shard(self, model: nn.Module, **options: Any) -> nn.Module:
        shard_units(model, device_mesh((_WORLD,)), fully_shard if self.ours else torch.distributed.fsdp.fully_shard, **options)
        return model

    def compile(self, model: nn.Module, **options: Any) -> Forward:
        if self.ours:
            return torch.compile(model, **_EAGER_LOWERING, **options)
        for block in model.get_submodule("blocks").children():
            block.compile(backend="aot_eager", **options)
        return model


def _mlp(**options: Any) -> nn.Module:
    torch.manual_seed(0)
    return models.MLP(**options)


def _full(value: Any) -> Any:
    return value.detach().full_tensor() if isinstance(value, DTensor) else value


def _numbers(model: nn.Module, **others: Any) -> Numbers:
    return pytree.tree_map(_full, {"parameters": dict(model.named_parameters()), **others})


def _batch(step: int) -> tuple[Tensor, Tensor]:
    return regression_batch(step, dist.get_rank(), _WORLD)


def _train(model: nn.Module, forward: Forward, optimizer: torch.optim.Optimizer | None = None, steps: int = 3) -> Numbers:
    optimizer = adamw(model.parameters()) if optimizer is None else optimizer
    losses = []
    for step in range(steps):
        loss = squared_error(forward, _batch(step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return _numbers(model, losses=losses)


def _plain(system: System, **options: Any) -> Numbers:
    model = system.shard(_mlp(), **options)
    return _train(model, system.compile(model))


# --- Saved for backward ---------------------------------------------------------------------------


def _policy(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE


class _Selective(models.MLP):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            context = partial(create_selective_checkpoint_contexts, _policy)
            x = checkpoint(block, x, use_reentrant=False, context_fn=context)
        return self.head(x + self.bias)


def selective_checkpoint(system: System) -> Numbers:
    torch.manual_seed(0)
    model = system.shard(_Selective())
    return _train(model, system.compile(model))


def memory_budget(system: System) -> Numbers:
    with torch._functorch.config.patch(activation_memory_budget=0.3):
        return _plain(system)


def count_operators(how: str) -> Counter[str]:
    """Count the operators of a backward graph by name."""
    torch._dynamo.reset()  # An equal model would run the graph that is there.
    torch.manual_seed(0)
    model = _Selective() if how == "selective checkpoint" else models.MLP()
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard)
    budget = 0.0 if how == "memory budget" else 1.0
    with torch._functorch.config.patch(activation_memory_budget=budget), capture() as captured:
        torch.compile(model, **_EAGER_LOWERING)(torch.randn(3, 8)).sum().backward()
    nodes = captured.backward[0].graph_module.graph.nodes
    return Counter(
        str(node.target).split(".")[1] for node in nodes if node.op == "call_function" and "aten" in str(node.target)
    )


def test_what_is_recomputed(fake_ranks: None) -> None:
    plain, selective, budget = (count_operators(how) for how in ("plain", "selective checkpoint", "memory budget"))
    # A policy keeps products and recomputes the rest. Without memory for activations, products are computed again, too.
    assert plain["tanh"] == 0 and selective["tanh"] == 2
    products = [counted["mm"] + counted["addmm"] for counted in (plain, selective, budget)]
    assert products[0] == products[1] < products[2]


# --- Precision ------------------------------------------------------------------------------------


def autocast(system: System) -> Numbers:
    model = system.shard(_mlp())
    forward = system.compile(model)

    def lowered(x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            y = forward(x)
        assert y.dtype is torch.bfloat16
        return y

    return _train(model, lowered)


def scaler(system: System) -> Numbers:
    """Overflow one gradient entry of one rank in the second step, and check that no rank steps then."""
    model = system.shard(_mlp())
    forward, optimizer = system.compile(model), adamw(model.parameters())
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    scales, moved = [], []
    for step in range(4):
        scaler.scale(squared_error(forward, _batch(step))).backward()
        if step == 1 and dist.get_rank() == 1:
            model.head.bias.grad.to_local()[0] = float("inf")
        before = [param.detach().to_local().clone() for param in model.parameters()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
        moved.append(
            sum(not torch.equal(new.detach().to_local(), old) for new, old in zip(model.parameters(), before, strict=True))
        )
    assert moved[1] == 0 and all(moved[:1] + moved[2:])
    return _numbers(model, scales=scales, moved=moved)


# --- Optimizers -----------------------------------------------------------------------------------


def adamw_kind(system: System, **kind: bool) -> Numbers:
    model = system.shard(_mlp())
    return _train(model, system.compile(model), adamw(model.parameters(), **kind))


def muon(system: System) -> Numbers:
    model = system.shard(_mlp())
    matrices = [param for param in model.parameters() if param.ndim == 2]
    return _train(model, system.compile(model), torch.optim.Muon(matrices, lr=1e-2))


def lbfgs(system: System) -> Numbers:
    model = system.shard(_mlp())
    forward = system.compile(model)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = squared_error(forward, _batch(0))
        loss.backward()
        dist.all_reduce(mean := loss.detach() / _WORLD)
        losses.append(mean.item())
        return mean

    for _ in range(2):
        optimizer.step(closure)
    return _numbers(model, losses=losses)


def step_in_backward(system: System) -> Numbers:
    model = system.shard(_mlp())
    own = {param: adamw([param]) for param in model.parameters()}

    def step(param: Tensor) -> None:
        own[param].step()  # type: ignore[index]
        own[param].zero_grad()  # type: ignore[index]

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    return _train(model, system.compile(model), torch.optim.SGD(model.parameters(), lr=1.0))


# --- Data and models ------------------------------------------------------------------------------


class _Batches(IterableDataset):
    """Batches that the worker computes with torch."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for step in range(3):
            yield regression_batch(step, self.rank, _WORLD)


@contextlib.contextmanager
def _may_have_children() -> Iterator[None]:
    """Allow child processes in the block: the multiprocessing module allows none to daemons, as the ranks of a pool are."""
    config = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["daemon"] = False
    try:
        yield
    finally:
        config["daemon"] = True


def forked_workers(system: System) -> Numbers:
    """Fork data workers after the first step, when collectives and their threads exist."""
    model = system.shard(_mlp())
    forward, optimizer = system.compile(model), adamw(model.parameters())
    _train(model, forward, optimizer, steps=1)
    losses = []
    for _ in range(2):
        batches: Iterable[Any] = DataLoader(
            _Batches(dist.get_rank()), batch_size=None, num_workers=1, multiprocessing_context="fork"
        )
        with _may_have_children():
            batches = iter(batches)
        for batch in batches:
            loss = squared_error(forward, batch)
            loss.backward()
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
    return _numbers(model, losses=losses)


def two_models(system: System) -> Numbers:
    """Train a generator and a critic in one step, compiled apart, each with its own loss and optimizer."""
    torch.manual_seed(0)
    pair = models.TwoModels()
    parts = [system.shard(pair.generator), system.shard(pair.critic)]
    generator, critic = (system.compile(part) for part in parts)
    optimizers = [adamw(part.parameters()) for part in parts]
    losses = []
    for step in range(3):
        x, target = regression_batch(step, dist.get_rank(), _WORLD, out=6)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (critic(generator(x).detach()).mean() - critic(target).mean()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
        loss = -critic(generator(x)).mean()
        loss.backward()
        optimizers[0].step()
        losses.append(loss.item())
    return _numbers(pair, losses=losses)


def teacher(system: System) -> Numbers:
    """Train a student on a frozen teacher, which is a moving average of the student."""
    student, teacher = system.shard(_mlp()), system.shard(_mlp())
    teacher.requires_grad_(False)
    teacher.eval()
    forward, target, optimizer = system.compile(student), system.compile(teacher), adamw(student.parameters())
    losses = []
    for step in range(3):
        x, _ = _batch(step)
        with torch.no_grad():
            wanted = target(x + 1)
        teacher.reshard()  # FSDP2's root stays unsharded.
        loss = F.mse_loss(forward(x), wanted)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for theirs, ours in zip(teacher.parameters(), student.parameters(), strict=True):
                theirs.lerp_(ours, 0.5)
    return _numbers(nn.ModuleList([student, teacher]), losses=losses)


def lengths(system: System) -> Numbers:
    """Train with another length in each step, none marked as dynamic: Dynamo makes the size dynamic at the second step."""
    torch.manual_seed(0)
    model = system.shard(models.Transformer())
    forward, optimizer = system.compile(model), adamw(model.parameters())
    losses, compiled = [], []
    for step, length in enumerate((6, 9, 5, 12, 7, 8)):
        tokens = torch.randint(16, (2, length + 1), generator=torch.Generator().manual_seed(10 * step + dist.get_rank()))
        loss = F.cross_entropy(forward(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        compiled.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert compiled[1] == compiled[-1]
    return _numbers(model, losses=losses)


def fullgraph(system: System) -> Numbers:
    model = system.shard(_mlp())
    return _train(model, system.compile(model, fullgraph=True))


def each_block(system: System) -> Numbers:
    model = system.shard(_mlp())
    for block in model.get_submodule("blocks").children():
        block.compile(**(_EAGER_LOWERING if system.ours else {"backend": "aot_eager"}))
    return _train(model, model)


Job = Callable[[System], Numbers]
_JOBS: dict[str, Job] = {
    "selective checkpoint": selective_checkpoint,
    "memory budget": memory_budget,
    "autocast": autocast,
    "GradScaler": scaler,
    "fused AdamW": partial(adamw_kind, fused=True),
    "foreach AdamW": partial(adamw_kind, foreach=True),
    "Muon": muon,
    "LBFGS": lbfgs,
    "optimizer in backward": step_in_backward,
    "forked workers": forked_workers,
    "two models": two_models,
    "teacher and student": teacher,
    "lengths that change": lengths,
    "fullgraph": fullgraph,
    "each block": each_block,
}
# Kernels differ in where they round to bfloat16.
_RTOL = {"autocast": 2e-2}


def compare(name: str) -> None:
    theirs = _JOBS[name](System(ours=False))
    torch._dynamo.reset()
    ours = _JOBS[name](System(ours=True))
    rtol = _RTOL.get(name, 1e-5)
    torch.testing.assert_close(ours, theirs, rtol=rtol, atol=rtol / 10)


# These jobs differ from others only in optimizer, model or batch.
_AT_NIGHT = ("two models", "Muon", "LBFGS", "fused AdamW", "lengths that change")


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.night if name in _AT_NIGHT else []) for name in _JOBS])
def test_same_as_fsdp2(name: str, rank_pools: RankPools) -> None:
    rank_pools[_WORLD].run(compare, name=name)


# --- Pipelines ------------------------------------------------------------------------------------

# By name: the class of the schedule, and the number of stages of a rank.
_PIPELINES: dict[str, tuple[Any, int]] = {
    "GPipe": (pipelining.ScheduleGPipe, 1),
    "1F1B": (pipelining.Schedule1F1B, 1),
    "Interleaved1F1B": (pipelining.ScheduleInterleaved1F1B, 2),
    "LoopedBFS": (pipelining.ScheduleLoopedBFS, 2),
    "InterleavedZeroBubble": (pipelining.ScheduleInterleavedZeroBubble, 2),
    "ZBVZeroBubble": (pipelining.ScheduleZBVZeroBubble, 2),
    "DualPipeV": (pipelining.ScheduleDualPipeV, 2),
}
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# These schedules split backward: they compute gradients of inputs first, those of weights later.
_ZERO_BUBBLES = ("InterleavedZeroBubble", *_V_SHAPED)


@functools.cache
def _pipeline_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pipeline", "shard"))


def _stage(index: int, system: System, compiles: str, **options: Any) -> nn.Module:
    torch.manual_seed(index)
    stage = nn.Sequential(models.Block(8, 16), models.Block(8, 16))
    for module in (*stage, stage):
        (fully_shard if system.ours else torch.distributed.fsdp.fully_shard)(module, mesh=_pipeline_mesh()["shard"], **options)
    if compiles:
        stage.get_submodule({"all": "", "second block": "1"}[compiles]).compile(**_EAGER_LOWERING)
    return stage


def pipeline(system: System, name: str, compiles: str, whole_backward: bool = False, **options: Any) -> Numbers:
    mesh, (schedule_class, count) = _pipeline_mesh(), _PIPELINES[name]
    rank, group = mesh["pipeline"].get_local_rank(), mesh["pipeline"].get_group()
    # In a V, the first rank has the first stage and the last.
    indices = [rank, 3 - rank][:count] if name in _V_SHAPED else [rank, rank + 2][:count]
    modules = [_stage(index, system, compiles, **options) for index in indices]
    builder = {"dw_builder": lambda: lambda: None} if whole_backward else {}
    stages = [
        pipelining.PipelineStage(module, index, 2 * count, torch.device("cpu"), group=group, **builder)
        for module, index in zip(modules, indices, strict=True)
    ]
    schedule = schedule_class(stages if count > 1 else stages[0], n_microbatches=4, loss_fn=F.mse_loss)
    params = [param for module in modules for param in module.parameters()]
    optimizer, losses, gradients = adamw(params), [], []
    for step in range(2):
        x, target = regression_batch(step, mesh["shard"].get_local_rank(), 2, sizes=(8,), out=8)
        inputs = [x] if 0 in indices else []
        schedule.step(*inputs, **({"target": target, "losses": losses} if 2 * count - 1 in indices else {}))
        gradients.append([_full(param.grad) for param in params])
        optimizer.step()
        optimizer.zero_grad()
    return _numbers(nn.ModuleList(modules), losses=losses, gradients=gradients)


def compare_pipelines(name: str, compiles: str = "all", **options: Any) -> None:
    # With zero bubbles, FSDP2 loses gradients of parameters that it resharded after forward.
    theirs = pipeline(System(ours=False), name, compiles="", reshard_after_forward=name not in _ZERO_BUBBLES)
    torch._dynamo.reset()
    torch.testing.assert_close(pipeline(System(ours=True), name, compiles, **options), theirs, rtol=1e-5, atol=1e-6)


_PIPELINE = "Interleaved1F1B"


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name == _PIPELINE else pytest.mark.night)
        for name in ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
    ],
)
def test_pipeline(name: str, rank_pools: RankPools) -> None:
    rank_pools[4].run(compare_pipelines, name=name)


def _check_version(name: str) -> None:
    if name in _V_SHAPED and torch.__version__ < "2.12":
        pytest.skip("between the ranks of a V, torch 2.11 sends what Gloo refuses, also with FSDP2")


@pytest.mark.parametrize("reshards", [True, False], ids=["reshards", "keeps"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.night if name in _V_SHAPED else []) for name in _ZERO_BUBBLES]
)
def test_zero_bubbles(name: str, reshards: bool, rank_pools: RankPools) -> None:
    _check_version(name)
    rank_pools[4].run(compare_pipelines, name=name, compiles="", reshard_after_forward=reshards)


@pytest.mark.night
@pytest.mark.parametrize("name", _ZERO_BUBBLES)
def test_zero_bubbles_of_compiled_stages(name: str, rank_pools: RankPools) -> None:
    _check_version(name)
    rank_pools[4].run(compare_pipelines, name=name, whole_backward=True)


@pytest.mark.parametrize(
    ("name", "compiles"),
    [
        ("InterleavedZeroBubble", "all"),
        pytest.param("InterleavedZeroBubble", "second block", marks=pytest.mark.night),
        pytest.param("DualPipeV", "all", marks=pytest.mark.night),
    ],
)
def test_pipelines_without_gradients_are_refused(name: str, compiles: str, rank_pools: RankPools) -> None:
    _check_version(name)
    with pytest.raises(RankFailure, match="Pass dw_builder=lambda: lambda: None"):
        rank_pools[4].run(pipeline, system=System(ours=True), name=name, compiles=compiles)


# --- State dicts ----------------------------------------------------------------------------------


def state_dicts(system: System, strict: bool = True, **options: Any) -> Numbers:
    """Train, set the state into another model and optimizer, and train these. Some parameters are frozen."""

    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = models.MLP()
        model.head.bias.requires_grad_(False)
        system.shard(model)
        return model, adamw([param for param in model.parameters() if param.requires_grad])

    model, optimizer = build(0)
    _train(model, system.compile(model), optimizer, steps=2)
    getting = {name: value for name, value in options.items() if name != "broadcast_from_rank0"}
    state = get_state_dict(model, optimizer, options=StateDictOptions(**getting))
    described = pytree.tree_map(lambda leaf: _full(leaf).clone() if isinstance(leaf, Tensor) else str(leaf), state)
    plain = [not isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(state[0])]
    if dist.get_rank() and options.get("broadcast_from_rank0"):
        state = {}, {}
    model, optimizer = build(1)
    set_options = StateDictOptions(strict=strict, **options)
    # Not set_state_dict(), which takes a rank without model state for one that loads only the optimizer's state.
    keys = set_model_state_dict(model, state[0], options=set_options)
    set_optimizer_state_dict(model, optimizer, state[1], options=set_options)
    after = _train(model, system.compile(model), optimizer, steps=2)
    return {"keys": [*keys.missing_keys, *keys.unexpected_keys], "plain": plain, "state": described, "after": after}


_STATE_OPTIONS: dict[str, dict[str, bool]] = {
    "sharded": {},
    "cpu_offload": {"cpu_offload": True},
    "flattened": {"flatten_optimizer_state_dict": True},
    "without frozen": {"ignore_frozen_params": True, "strict": False},
    "full": {"full_state_dict": True},
    "full, broadcast": {"full_state_dict": True, "cpu_offload": True, "broadcast_from_rank0": True},
}


def compare_state_dicts(name: str) -> None:
    theirs, ours = (state_dicts(System(which), **_STATE_OPTIONS[name]) for which in (False, True))
    for what in ("keys", "plain"):
        assert ours.pop(what) == theirs.pop(what)
    leaves, expected = pytree.tree_flatten(ours), pytree.tree_flatten(theirs)
    assert leaves[1] == expected[1]
    for leaf, other in zip(leaves[0], expected[0], strict=True):
        if isinstance(leaf, str):
            assert leaf == other
        else:
            torch.testing.assert_close(leaf, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name.startswith("full") else pytest.mark.night) for name in _STATE_OPTIONS]
)
def test_state_dict_options(name: str, rank_pools: RankPools) -> None:
    rank_pools[_WORLD].run(compare_state_dicts, name=name)


# --- Profiles -------------------------------------------------------------------------------------


@pytest.mark.parametrize("compiled", [pytest.param(True, marks=pytest.mark.inductor), False], ids=["compiled", "eager"])
def test_profile_names_buckets(compiled: bool, fake_ranks: None) -> None:
    model = _mlp()
    shard_units(model, init_device_mesh("cpu", (8,)), fully_shard)
    forward = torch.compile(model, backend=fsdp_backend) if compiled else model
    forward(torch.randn(3, 8)).sum().backward()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        forward(torch.randn(3, 8)).sum().backward()
    names = [event.name for event in profile.events() if event.name.startswith("FSDP::")]
    if not compiled:
        assert names[:4] == ["FSDP::unshard of the root"] * 2 + ["FSDP::unshard of blocks.0"] * 2
        assert any("reduc" in name and "blocks.0" in name for name in names), names
        return
    gathered = [name for name in names if name.startswith("FSDP::all_gather_into_tensor (")]
    assert [name for name in names if name.endswith(" graph")] == ["FSDP::forward graph", "FSDP::backward graph"]
    # Forward gathers all units, and backward the blocks.
    assert gathered == [
        f"FSDP::all_gather_into_tensor ({name})" for name in ("blocks.0", "blocks.1", "root", "blocks.1", "blocks.0")
    ]
    for unit in ("root", "blocks.1", "blocks.0"):
        started, waited = (names.index(f"FSDP::reduce_scatter_tensor{what} ({unit})") for what in ("", " wait"))
        assert started < waited
