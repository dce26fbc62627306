"""``CPUOffloadPolicy``: shards, gradients and the optimizer on the host.

Training is compared with FSDP2 with the policy and, to the bit, with the library without it. On a mesh of CPUs, host and device
are one, so nothing is copied. With the engine of :mod:`tests.common.copy_engine` they are two, and graphs copy as on an
accelerator.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fsdp_compile import FSDPModule, GatherPolicy, clip_grad_norm_, comm_hooks, fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from passes.collectives.host_copies import copy_to_device
from tests.common import models, parity
from tests.common.copy_engine import copying
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import FLAVOURS, SMALL, Run, Trainee, differences, fully_shard_of
from tests.common.parity import compare, shard_units
from tests.common.subclasses import Halved
from tests.fsdp_compile.test_parity import CASES

# FSDP2 cannot pin memory on a machine without an accelerator.
_PAGEABLE = CPUOffloadPolicy(pin_memory=False)
_OFFLOADS: Mapping[str, dict[str, Any]] = {
    "none": {},
    "policy": {"offload_policy": _PAGEABLE},
    "copies": {"offload_policy": CPUOffloadPolicy()},
}


def _memory(offload: str) -> contextlib.AbstractContextManager[Any]:
    return copying(1e9) if offload == "copies" else contextlib.nullcontext()


# -------------------------------------------------------------------------------------- models


def train_case(name: str, system: str, offload: str) -> parity.Run:
    """Train a case. Runs on every rank."""
    options = {"backend": fsdp_backend, "options": {"lowering": system}}
    shard = partial(fully_shard_of(system), **_OFFLOADS[offload])
    with _memory(offload):
        return parity.train_sharded(CASES[name], shard, options if system not in ("eager", "fsdp2") else None)


# Copies depend on the storage of units, not on the model. These cases run in all systems, the others in one.
_IN_ALL_SYSTEMS = ("mlp", "scalar_parameters", "reshard_int")
_IN_ONE = {
    *("bf16_mlp", "hsdp"),
    *("uneven", "fewer_rows_than_ranks", "shard_columns", "tied_in_root", "tied_across_units", "reshard_false", "hsdp_uneven"),
    *("meta_init", "bf16_alone", "frozen_in_part", "frozen_units", "unused_parameter", "ignored_params"),
    *("shared_weight", "list_of_modules", "reads_child_unit", "graph_breaks", "two_models_in_one_graph", "dynamic_batch"),
    "evaluation_no_grad",
}
# Kinds of storage: rows, columns, scalars, and frozen parameters beside others.
_FIXED = {
    *(("mlp", system) for system in ("eager", "inductor")),
    *((name, "aot_eager") for name in ("scalar_parameters", "shard_columns", "frozen_in_part")),
    ("scalar_parameters", "eager"),
}


def _cases() -> list[Any]:
    found = []
    assert {*_IN_ALL_SYSTEMS, *_IN_ONE} <= {*CASES}
    for name in (*_IN_ALL_SYSTEMS, *sorted(_IN_ONE)):
        case = CASES[name]
        world = case.worlds[-1]
        systems = ("eager", "aot_eager", *["inductor"] * (world in case.inductor_worlds))
        for system in systems if case.name in _IN_ALL_SYSTEMS else ("aot_eager",):
            marks = () if (case.name, system) in _FIXED else pytest.mark.night
            found.append(pytest.param(case.name, world, system, marks=marks, id=f"{case.name}-{world}-{system}"))
    return found


@pytest.mark.parametrize(("name", "world", "system"), _cases())
def test_trains_as_without(name: str, world: int, system: str, rank_pools: RankPools) -> None:
    """Copies change no bit of losses, gradients and parameters."""
    expected = rank_pools[world].run(train_case, name=name, system=system, offload="none")
    compare(rank_pools[world].run(train_case, name=name, system=system, offload="copies"), expected, 0.0)


@pytest.mark.parametrize(
    ("name", "world", "system"),
    [
        ("mlp", 2, "eager"),
        *(
            pytest.param(name, world, system, marks=[] if name == "bf16_mlp" else pytest.mark.night)
            for name, world, systems in (
                ("mlp", 4, ("eager", "aot_eager", "inductor")),
                *((name, 4, ("eager", "aot_eager")) for name in ("reshard_int", "hsdp")),
                *((name, 2, ("aot_eager",)) for name in ("bf16_mlp", "meta_init")),
            )
            for system in systems
        ),
        ("adamw_foreach_clip_grad_norm", 2, "eager"),
    ],
)
def test_trains_as_fsdp2(name: str, world: int, system: str, rank_pools: RankPools) -> None:
    case = CASES[name]
    expected = rank_pools[world].run(train_case, name=name, system="fsdp2", offload="policy")
    for offload in ("policy", "copies"):
        runs = rank_pools[world].run(train_case, name=name, system=system, offload=offload)
        compare(runs, expected, case.lowered_rtol.get(system, case.fsdp2_rtol))


# -------------------------------------------------------------------------------------- microbatches


def train_flavours(
    system: str, mesh_shape: tuple[int, ...], offload: str, flavours: tuple[str, ...], policy: MixedPrecisionPolicy | None
) -> dict[str, Run]:
    """Train each flavour for two steps. Runs on every rank."""
    with _memory(offload):
        trainee = Trainee(system, mesh_shape, SMALL.build, partial(shard_units, **_OFFLOADS[offload]), policy)
        runs = {}
        for flavour in flavours:
            trainee.reset()
            runs[flavour] = trainee.train(SMALL, [FLAVOURS[flavour]] * 2, count=False)
        return runs


_FLAVOURS = {(2,): ("sharded", "unsharded", "keep_unsharded"), (2, 2): ("partial", "unsharded_then_partial", "sharded_keep")}
_BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


@pytest.mark.parametrize(
    ("mesh_shape", "system", "policy"),
    [
        pytest.param(*(shape, system, policy), marks=[] if is_fixed else pytest.mark.night)
        for shape in _FLAVOURS
        for system, policy in (("eager", None), ("aot_eager", _BF16), ("inductor", _BF16))
        for is_fixed in [shape == (2,) and system != "inductor"]
    ],
)
def test_accumulates(
    mesh_shape: tuple[int, ...], system: str, policy: MixedPrecisionPolicy | None, rank_pools: RankPools
) -> None:
    """Gradients accumulate as without copies. Hooks on parameters see the gradient of all microbatches so far."""
    pool = rank_pools[torch.Size(mesh_shape).numel()]
    given = {"mesh_shape": mesh_shape, "flavours": _FLAVOURS[mesh_shape], "policy": policy}
    found = pool.run(train_flavours, system=system, offload="copies", **given)
    expected = pool.run(train_flavours, system=system, offload="none", **given)
    theirs = pool.run(train_flavours, system="fsdp2", offload="policy", **given)
    for flavour in _FLAVOURS[mesh_shape]:
        runs = [run[flavour] for run in found]
        assert not differences(runs, [run[flavour] for run in expected], 0.0), flavour
        assert not differences(runs, [run[flavour] for run in theirs], 1e-5 if policy is None else 1e-1), flavour
        assert [run.hooks for run in runs] == [run[flavour].hooks for run in theirs], flavour


# -------------------------------------------------------------------------------------- what is copied, and when


def events_of_steps(system: str) -> list[list[str]]:
    """Return the events of a slow copy engine in each of two steps. Runs on every rank."""
    with copying(2e5) as engine:
        torch.manual_seed(0)
        model = models.MLP()
        shard_units(model, device_mesh((2,)), fully_shard, offload_policy=CPUOffloadPolicy())
        forward: Any = model
        if system != "eager":
            forward = torch.compile(model, backend=fsdp_backend, options={"lowering": system, "min_bucket_bytes": 0})
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for _ in range(2):
            begun = len(engine.events)
            forward(torch.ones(3, 8)).sum().backward()
            found.append(engine.events[begun:])
            gradients: list[Any] = [param.grad for param in model.parameters()]
            assert all(bool(gradient.to_local().isfinite().all()) for gradient in gradients)
            optimizer.step()
            optimizer.zero_grad()
        return found


@pytest.mark.parametrize("system", ["aot_eager", "eager", "inductor"])
def test_device_waits_late_and_host_once(system: str, rank_pools: RankPools) -> None:
    """Each of three gathers in forward, of two in backward, and each reduction has a copy. In graphs, a copy begins before
    the device waits for the previous one. The host waits at the end of backward."""
    begin, wait = "begin to_device", "device waits"
    to_device = [begin, wait] * 5 if system == "eager" else [begin, begin, wait, begin, wait, wait, begin, begin, wait, wait]
    for steps in rank_pools[2].run(events_of_steps, system=system):
        for events in steps:
            assert [event for event in events if event in to_device] == to_device
            assert [event for event in events if event not in to_device] == ["begin to_host"] * 3 + ["host waits"] * 3
            assert events[-3:] == ["host waits"] * 3


# -------------------------------------------------------------------------------------- the rest of the interface


def _train_two_steps(
    prepare: Callable[[Any], None], offload: str, clip: Callable[..., Any] | None, shard: Callable[..., Any] | None = None
) -> list[Tensor]:
    with _memory(offload):
        torch.manual_seed(0)
        model = models.MLP()
        shard_units(model, device_mesh((2,)), shard or fully_shard, **_OFFLOADS[offload])
        prepare(model)
        forward = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
        optimizer = torch.optim.AdamW(model.parameters())
        found = []
        for step in range(2):
            forward(torch.full((3, 8), 1.0 + step)).sum().backward()
            if clip is not None:
                found.append(clip(model.parameters(), 0.1).full_tensor())
            optimizer.step()
            optimizer.zero_grad()
        return [*found, *(param.full_tensor().detach() for param in model.parameters())]


def _hook(model: Any) -> None:
    model.register_comm_hook(comm_hooks.LowPrecisionState(torch.distributed.group.WORLD), comm_hooks.bf16_compress_hook)


def _stateful_hook(model: Any) -> None:
    state = comm_hooks.DefaultState(torch.distributed.group.WORLD)
    model.register_comm_hook(state, comm_hooks.QuantizedReduce(torch.int8))


def _prefetch(model: Any) -> None:
    model.set_modules_to_forward_prefetch([model.blocks[0], model.blocks[1]])
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def _unshard(model: Any) -> None:
    block = model.blocks[0]
    expected = block.up.weight.full_tensor()
    block.unshard()
    assert torch.equal(block.up.weight, expected)


_PREPARED: Mapping[str, tuple[Callable[[Any], None], Callable[..., Any] | None]] = {
    "torch's clip": (lambda _: None, nn.utils.clip_grad_norm_),
    "our clip": (lambda _: None, clip_grad_norm_),
    "hook": (_hook, None),
    "stateful hook": (_stateful_hook, None),
    "prefetch lists": (_prefetch, None),
    "unshard": (_unshard, None),
}


def train_prepared(names: list[str], offload: str) -> dict[str, list[Tensor]]:
    """Train with each of the preparations ``names``. Runs on every rank."""
    return {name: _train_two_steps(_PREPARED[name][0], offload, _PREPARED[name][1]) for name in names}


@pytest.mark.parametrize("names", [["our clip", "hook"], pytest.param([*_PREPARED], marks=pytest.mark.night)])
def test_trains_as_without_what_is_set(names: list[str], rank_pools: RankPools) -> None:
    found = rank_pools[2].run(train_prepared, names=names, offload="copies")
    expected = rank_pools[2].run(train_prepared, names=names, offload="none")
    for ours, theirs in zip(found, expected, strict=True):
        for name in names:
            assert all(map(torch.equal, ours[name], theirs[name])), name


def train_with_policies_of_their_own(offload: str) -> list[Tensor]:
    """Train with blocks on the host and the root on the device. Runs on every rank."""

    def shard(module: nn.Module, **options: Any) -> None:
        if isinstance(module, models.MLP):
            options.pop("offload_policy", None)
        fully_shard(module, **options)

    return _train_two_steps(lambda _: None, offload, None, shard)


def test_each_unit_has_its_own_policy(rank_pools: RankPools) -> None:
    found = rank_pools[2].run(train_with_policies_of_their_own, offload="copies")
    expected = rank_pools[2].run(train_with_policies_of_their_own, offload="none")
    assert all(all(map(torch.equal, ours, theirs)) for ours, theirs in zip(found, expected, strict=True))


def test_units_that_share_a_gather_share_a_copy(one_rank: None) -> None:
    with copying() as engine:
        model = models.MLP()
        shard_units(model, device_mesh((1,)), fully_shard, offload_policy=CPUOffloadPolicy())
        with capture() as captured:
            torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(3, 8)).sum().backward()
    assert [copy.kind for copy in engine.copies] == ["to_device", "to_device", "to_host"]
    (copied,) = captured.forward[0].graph_module.graph.find_nodes(op="call_function", target=copy_to_device)
    # The runs of two blocks and of the root. No run is joined with another on the host.
    assert [piece.name.split("_")[0] for piece in copied.args[0]] == ["run"] * 3


def test_gradients_that_autograd_returns_are_refused(one_rank: None) -> None:
    with copying():
        model = models.MLP()
        shard_units(model, device_mesh((1,)), fully_shard, offload_policy=CPUOffloadPolicy())
        model.unshard()  # type: ignore[attr-defined]
        loss = model(torch.ones(3, 8)).sum()
        with pytest.raises(NotImplementedError, match=r"the gradient of head\.weight, as pipelines .*Use backward\(\)"):
            params = dict(model.named_parameters())
            torch.autograd.grad(loss, [params["bias"], params["head.weight"]], allow_unused=True)


def save_and_go_on(path: str) -> None:
    """Check that state dicts are on the host, and that the next forward copies the loaded values. Runs on every rank."""
    with copying(1e9):

        def made(seed: int) -> tuple[Any, Any, torch.optim.Optimizer]:
            torch.manual_seed(seed)
            model = models.MLP()
            shard_units(model, device_mesh((2,)), fully_shard, offload_policy=CPUOffloadPolicy())
            compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
            return model, compiled, torch.optim.AdamW(model.parameters())

        def step(compiled: Any, optimizer: torch.optim.Optimizer) -> Tensor:
            loss = compiled(torch.ones(3, 8)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            result: Tensor = loss.detach()
            return result

        model, compiled, optimizer = made(0)
        step(compiled, optimizer)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        assert all(isinstance(value, DTensor) and value.to_local().is_cpu for value in states["model"].values())
        dcp.save(states, checkpoint_id=path)
        expected = step(compiled, optimizer)

        model, compiled, optimizer = made(1)
        assert not torch.equal(compiled(torch.ones(3, 8)).sum(), expected)
        states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
        dcp.load(states, checkpoint_id=path)
        set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
        assert torch.equal(step(compiled, optimizer), expected)


def test_checkpoint(rank_pools: RankPools, tmp_path: Any) -> None:
    rank_pools[2].run(save_and_go_on, path=str(tmp_path))


# -------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(("name", "value"), [("schedule", "auto"), ("cudagraphs", True)])
def test_options_that_know_nothing_of_copies(name: str, value: Any, one_rank: None) -> None:
    with copying():
        model = models.MLP()
        shard_units(model, device_mesh((1,)), fully_shard, offload_policy=CPUOffloadPolicy())
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", name: value})
        message = rf"options\['{name}'\] = {value!r} is not supported for blocks.0, .*Compile without the option"
        with pytest.raises(Exception, match=message):
            compiled(torch.ones(3, 8))


@pytest.mark.parametrize(
    ("prepare", "options", "message"),
    [
        (lambda model: None, {"gather_policy": GatherPolicy(torch.int8)}, r"bias .*is gathered by a gather_policy, which"),
        (lambda model: _lay_out(model.head, _as_dtensor), {}, r"head.weight .*is a DTensor, which another parallelism"),
        (lambda model: _lay_out(model.head, _as_extension), {}, r"head.weight .*is a \w+, which fsdp_pre_all_gather"),
    ],
    ids=["gather_policy", "dtensor", "extension"],
)
def test_parameters_that_are_not_copied(
    prepare: Callable[[Any], None], options: dict[str, Any], message: str, one_rank: None
) -> None:
    model: Any = models.MLP()
    prepare(model)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["dp"]
    with copying(), pytest.raises(NotImplementedError, match=message):
        fully_shard(model, mesh=mesh, offload_policy=CPUOffloadPolicy(), **options)
    assert not isinstance(model, FSDPModule)


def _lay_out(linear: nn.Linear, made_of: Callable[[Tensor], Tensor]) -> None:
    linear.weight = nn.Parameter(made_of(linear.weight.detach()))


def _as_dtensor(weight: Tensor) -> Tensor:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))["tp"]
    return distribute_tensor(weight, mesh, [Shard(0)])


def _as_extension(weight: Tensor) -> Tensor:
    return Halved(weight)


def test_without_an_engine_nothing_is_copied(one_rank: None) -> None:
    model = models.MLP()
    shard_units(model, device_mesh((1,)), fully_shard, offload_policy=CPUOffloadPolicy())
    with capture() as captured:
        torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(3, 8)).sum().backward()
    assert "fsdp_host" not in captured.forward[0].readable() + captured.backward[0].readable()


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_torch_finds_nothing_wrong_with_the_operators(lowering: str, one_rank: None) -> None:
    """AOTAutograd does not warn, in the first call, of results that share memory with arguments."""
    with copying(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*custom operator")
        model = models.MLP()
        shard_units(model, device_mesh((1,)), fully_shard, offload_policy=CPUOffloadPolicy())
        forward = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
        with torch.no_grad():
            forward(torch.ones(3, 8))
        forward(torch.ones(3, 8)).sum().backward()
