"""Updates in backward, compared with FSDP2, and with a step of torch's optimizer after backward."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import OneCycleLR

import fsdp_compile
from fsdp_compile import fsdp_backend, fully_shard, optimizer_in_backward
from fsdp_compile.debug import capture
from fsdp_compile.runtime import gradients
from passes.ir.work import bucket, role
from passes.models.memory_model import Category, MemoryModel
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import Case, Run, compare, shard_units, train_reference, train_with
from tests.fsdp_compile.test_model_parallel import CASES as MODEL_PARALLEL
from tests.fsdp_compile.test_parity import CASES

# --- Beside FSDP2 ---------------------------------------------------------------------------------

_ADAMW = {"lr": 1e-2, "weight_decay": 0.1, "eps": 1e-3}
_OPTIONS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, _ADAMW),
    "amsgrad": (torch.optim.AdamW, {**_ADAMW, "amsgrad": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "dampening": 0.2}),
}


def _make(kind: str, in_backward: bool, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    kind_class, options = _OPTIONS[kind]
    make: Any = partial(optimizer_in_backward, kind_class) if in_backward else kind_class
    optimizer: torch.optim.Optimizer = make(params, **options)
    return optimizer


def run_case(name: str, system: str, kind: str, in_backward: bool) -> Run:
    """Train a case with ``system``. Every rank calls this."""
    run = train_with(_case(name, kind, in_backward), system)
    if in_backward:
        assert not any(run.gradients.values()) or name == "ignored_params", run.gradients
    # Updates in backward leave no gradients to compare, so the other system's are seen only in parameters.
    run.gradients, run.layout, run.local_gradients = {}, {}, {}
    return run


def _case(name: str, kind: str, in_backward: bool = False) -> Case:
    return dataclasses.replace(_ALL[name], optimizer=partial(_make, kind, in_backward))


_ALL = CASES | {f"model parallel {name}": case for name, case in MODEL_PARALLEL.items()}

# The name of a case, an optimizer, and the number of ranks.
_CASES = [
    ("mlp", "adamw", 2),
    ("mlp", "amsgrad", 2),
    ("mlp", "sgd", 2),
    ("uneven", "adamw", 4),
    ("hsdp", "adamw", 4),
    ("reshard_int", "adamw", 4),
    ("bf16_mlp", "adamw", 2),
    ("to_bfloat16", "sgd", 2),
    ("shard_columns", "adamw", 2),
    ("tied_in_root", "adamw", 2),
    ("tied_across_units", "adamw", 2),
    ("shared_weight", "adamw", 2),
    ("recurrent", "adamw", 2),
    ("reads_child_unit", "adamw", 2),
    ("frozen_in_part", "adamw", 2),
    ("unused_parameter", "adamw", 2),
    ("ignored_params", "adamw", 2),
    ("compile_each_block", "adamw", 2),
    ("graph_breaks", "adamw", 2),
    ("two_models_in_one_graph", "adamw", 2),
    ("checkpoint_around_units", "adamw", 2),
    ("checkpoint_inside_units", "adamw", 2),
    ("evaluation_no_grad", "adamw", 2),
    ("model parallel mlp", "adamw", 4),
    ("model parallel uneven", "adamw", 4),
    ("model parallel meshes", "adamw", 4),
    ("model parallel tied", "sgd", 4),
]
_UNCOMPILED = {"mlp", "uneven", "hsdp", "bf16_mlp", "shard_columns", "tied_in_root", "ignored_params"}
_INDUCTOR = {("mlp", "adamw", 2), ("mlp", "sgd", 2), ("bf16_mlp", "adamw", 2), ("hsdp", "adamw", 4)}
# A model in each system, and others with other inputs of updates: two dtypes, ignored parameters, recomputation, replicas.
_FIXED = {
    *(("mlp", "adamw", 2, system) for system in ("eager", "aot_eager", "inductor")),
    *((name, "adamw", 2, "aot_eager") for name in ("bf16_mlp", "ignored_params", "checkpoint_around_units")),
    ("hsdp", "adamw", 4, "aot_eager"),
}


def _parameters() -> list[Any]:
    found = []
    for case in _CASES:
        eager = ["eager"] * (case[0] in _UNCOMPILED and case[1] == "adamw")
        for system in (*eager, "aot_eager", *(["inductor"] if case in _INDUCTOR else [])):
            marks = () if (*case, system) in _FIXED else pytest.mark.night
            found.append(pytest.param(*case, system, marks=marks, id="-".join(map(str, (*case, system)))))
    return found


@pytest.mark.parametrize(("name", "kind", "world", "system"), _parameters())
def test_parity(name: str, kind: str, world: int, system: str, rank_pools: RankPools) -> None:
    case = _case(name, kind)
    runs = rank_pools[world].run(run_case, name=name, system=system, kind=kind, in_backward=True)
    if not case.fsdp2:
        assert case.reference_rtol is not None
        reference = train_reference(case, world // case.tensor_parallel)
        compare(runs, reference, case.reference_rtol)
        return
    theirs = rank_pools[world].run(run_case, name=name, system="fsdp2", kind=kind, in_backward=False)
    compare(runs, theirs, case.lowered_rtol.get(system, case.fsdp2_rtol))


# --- Beside torch's optimizer on an equal model ---------------------------------------------------


def _model(build: Callable[[], nn.Module] = models.MLP, ranks: int | tuple[int, ...] = 1, **options: Any) -> Any:
    torch.manual_seed(0)
    model = build()
    shape = (ranks,) if isinstance(ranks, int) else ranks
    shard_units(model, init_device_mesh("cpu", shape), fully_shard, **options)
    return model


def _compiled(model: nn.Module, lowering: str = "aot_eager", **options: Any) -> Any:
    if lowering == "eager":
        return model
    return torch.compile(model, backend=fsdp_backend, options={"lowering": lowering, **options})


def _loss(forward: Any, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(step + 100 * (dist.get_rank() if dist.get_world_size() < 8 else 0))
    return forward(torch.randn(3, 8, generator=generator)).square().sum()


def _adamw(params: Any, in_backward: bool = True, **options: Any) -> Any:
    make: Any = partial(optimizer_in_backward, torch.optim.AdamW) if in_backward else torch.optim.AdamW
    return make(params, **{**_ADAMW, **options})


def _local(value: Any) -> Tensor:
    return value._local_tensor if isinstance(value, DTensor) else value


def _assert_same(model: nn.Module, twin: nn.Module, optimizer: Any, reference: Any) -> None:
    for (name, param), other in zip(model.named_parameters(), twin.parameters(), strict=True):
        _assert_close(_local(param), _local(other), name)
        kept, expected = optimizer.state.get(param, {}), reference.state.get(other, {})
        assert kept.keys() == expected.keys(), name
        for key, value in expected.items():
            _assert_close(_local(kept[key]), _local(value), f"{key} of {name}")
            assert isinstance(value, DTensor) is isinstance(kept[key], DTensor)


def _assert_close(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.shape == expected.shape and found.dtype == expected.dtype, what
    error = torch.linalg.vector_norm(found - expected)
    assert error <= 1e-5 * torch.linalg.vector_norm(expected) + 1e-8, f"{what} differs by {error}"


#: Runs a step up to ``optimizer.step()``. Arguments: the model, its forward, and the number of the step.
Drive = Callable[[Any, Any, int], None]


def _drive(model: Any, forward: Any, step: int) -> None:
    _loss(forward, step).backward()


def _compare(
    drive: Drive = _drive,
    lowering: str = "aot_eager",
    build: Callable[[], nn.Module] = models.MLP,
    prepare: Callable[[Any], None] = lambda _: None,
    compiled: Callable[..., Any] = _compiled,
    groups: Callable[[nn.Module], Any] = nn.Module.parameters,
    steps: int = 3,
    ranks: int | tuple[int, ...] = 1,
    **options: Any,
) -> None:
    """Train two equal models, one of them with updates in backward, and compare them."""
    found = []
    for in_backward in (True, False):
        model = _model(build, ranks, **options)
        prepare(model)
        optimizer = _adamw(groups(model), in_backward)
        forward = compiled(model, lowering)
        for step in range(steps):
            drive(model, forward, step)
            if in_backward:
                assert all(param.grad is None for param in model.parameters())
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer))
    (model, optimizer), (twin, reference) = found
    _assert_same(model, twin, optimizer, reference)


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return groups with other options for vectors, so that neighbours in storage are updated apart."""
    params = list(model.parameters())
    return [
        {"params": [param for param in params if param.dim() > 1]},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0, "amsgrad": True},
    ]


def test_groups(one_rank: None) -> None:
    _compare(groups=_groups)


def test_settings_are_inputs_of_the_graph(one_rank: None) -> None:
    """The schedule changes learning rate and momentum in each step, without lowering another graph."""
    found = []
    for in_backward in (True, False):
        model = _model()
        optimizer = _adamw(model.parameters(), in_backward)
        schedule = OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
        forward = _compiled(model)
        with capture(passes=False) as captured:
            for step in range(5):
                _loss(forward, step).backward()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
        assert len(captured.backward) == 1
        found.append((model, optimizer))
    (model, optimizer), (twin, reference) = found
    assert optimizer.param_groups[0]["lr"] != _ADAMW["lr"]
    _assert_same(model, twin, optimizer, reference)


def test_state_dicts_go_to_and_from_torch(one_rank: None) -> None:
    """State dicts load in the middle of training, in both directions. Later, state is written to, replaced and deleted."""
    model, twin = _model(), _model()
    optimizer, reference = _adamw(model.parameters()), _adamw(twin.parameters(), in_backward=False)
    forward, other = _compiled(model), _compiled(twin)

    def train(steps: Iterable[int]) -> None:
        for step in steps:
            for each, both in ((optimizer, forward), (reference, other)):
                _loss(both, step).backward()
                each.step()
                each.zero_grad()

    train(range(2))
    saved = copy.deepcopy(reference.state_dict())
    train(range(2, 3))
    optimizer.load_state_dict(saved)
    reference.load_state_dict(optimizer.state_dict())
    assert all(state["step"].item() == 2 for state in reference.state.values())
    train(range(3, 5))
    _assert_same(model, twin, optimizer, reference)
    for each, its in ((optimizer, model), (reference, twin)):
        param = its.head.weight
        with torch.no_grad():
            each.state[param]["exp_avg"].mul_(2)
            each.state[param]["step"].fill_(7)
        each.state[its.head.bias]["exp_avg_sq"] = each.state[its.head.bias]["exp_avg_sq"] * 3
        del each.state[its.bias]
    train(range(5, 7))
    _assert_same(model, twin, optimizer, reference)


def test_step_steps_what_has_a_gradient(one_rank: None) -> None:
    """``step`` updates parameters with a gradient: torch.distributed.checkpoint makes states by a step on zeros."""
    model, twin = _model(), _model()
    optimizer, reference = _adamw(model.parameters()), _adamw(twin.parameters(), in_backward=False)
    forward, other = _compiled(model), _compiled(twin)
    for step in range(4):
        for each, its, both in ((optimizer, model, forward), (reference, twin, other)):
            if step % 2:
                its.head.weight.grad = torch.ones_like(its.head.weight)
                its.bias.grad = torch.ones_like(its.bias)
            else:
                _loss(both, step).backward()
            each.step()
            each.zero_grad()
    _assert_same(model, twin, optimizer, reference)


# --- Several backwards, and several forwards ------------------------------------------------------


def _without_sync(model: Any, forward: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro == 2)
        before = [param.to_local().clone() for param in model.parameters()]
        _loss(forward, 10 * step + micro).backward()
        is_same = [torch.equal(param.to_local(), old) for param, old in zip(model.parameters(), before, strict=True)]
        assert all(is_same) or micro == 2


def _not_the_last(model: Any, forward: Any, step: int) -> None:
    for micro in range(3):
        model.set_is_last_backward(micro == 2)
        _loss(forward, 10 * step + micro).backward()
        assert micro == 2 or all(param.grad is not None for param in model.parameters())


def _gradients_there(model: Any, forward: Any, step: int) -> None:
    for param in model.head.parameters():
        param.grad = torch.ones_like(param)
    _loss(forward, step).backward()


def _two_forwards(model: Any, forward: Any, step: int) -> None:
    (_loss(forward, 2 * step) + _loss(forward, 2 * step + 1)).backward()


def _forward_in_vain(model: Any, forward: Any, step: int) -> None:
    _loss(forward, 100)
    _loss(forward, step).backward()


def _asks_for_inputs_first(model: Any, forward: Any, step: int) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).requires_grad_()
    loss = forward(x).square().sum()
    torch.autograd.grad(loss, x, retain_graph=True)
    loss.backward()


def _finalized_by_hand(model: Any, forward: Any, step: int) -> None:
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    for micro in range(2):
        _loss(forward, 10 * step + micro).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()


def _without_all_reduce(model: Any, forward: Any, step: int) -> None:
    for micro in range(3):
        model.set_requires_gradient_sync(micro > 0)
        model.set_requires_all_reduce(micro == 2)
        _loss(forward, 10 * step + micro).backward()


_DRIVES = [
    _finalized_by_hand,
    _without_sync,
    _not_the_last,
    _gradients_there,
    _two_forwards,
    _forward_in_vain,
    _asks_for_inputs_first,
]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("drive", _DRIVES, ids=lambda drive: drive.__name__[1:])
def test_course_of_a_step(drive: Drive, lowering: str, one_rank: None) -> None:
    _compare(drive, lowering)


def test_a_backward_that_needs_old_values_raises(one_rank: None) -> None:
    model = _model()
    _adamw(model.parameters())
    forward = _compiled(model)
    loss = _loss(forward)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"was updated in an earlier backward .* set_is_last_backward\(False\)"):
        loss.backward()
    first, second = _loss(forward, 1), _loss(forward, 2)
    first.backward()
    with pytest.raises(RuntimeError, match="was updated in an earlier backward"):
        second.backward()
    _loss(forward).backward()


class _CallsTwice(nn.Module):
    """A model that calls a block twice, with another in between, and reads a parameter of that block directly."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(8, 16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        shared, other = self.blocks
        return shared(other(shared(x))) + shared.down.bias.sum()


def _compile_blocks(model: Any, lowering: str) -> Any:
    for block in model.blocks:
        block.compile(backend=fsdp_backend, options={"lowering": lowering})
    return model


@pytest.mark.parametrize("checkpointed", [False, True])
def test_graphs_that_share_parameters(checkpointed: bool, one_rank: None) -> None:
    def drive(model: Any, forward: Any, step: int) -> None:
        x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step))
        around = partial(torch.utils.checkpoint.checkpoint, use_reentrant=False) if checkpointed else lambda f, x: f(x)
        shared, other = forward.blocks
        x = around(shared, x)
        x = around(other, x)
        (around(shared, x).square().sum()).backward()

    _compare(drive, build=_CallsTwice, compiled=_compile_blocks)


class _Target(nn.Module):
    """A layer that reads its parameters first without gradients, then with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.layer(x)
        return torch.tanh(self.layer(x)) * target


class _Targets(nn.Module):
    """Two units. If ``checkpointed``, a checkpoint inside each recomputes its layer."""

    def __init__(self, checkpointed: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(_Target()) for _ in range(2)])
        self.checkpointed = checkpointed
        for block in self.blocks if checkpointed else ():
            block.forward = partial(torch.utils.checkpoint.checkpoint, block[0], use_reentrant=False)  # type: ignore[index]

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](x))


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_first_read_that_needs_no_gradients(checkpointed: bool, lowering: str, one_rank: None) -> None:
    _compare(_two_forwards, lowering, partial(_Targets, checkpointed))


def test_a_graph_waits_for_the_others(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its notes about other graphs, a graph updates too early, and ``test_graphs_that_share_parameters`` fails."""
    monkeypatch.setattr(gradients, "note_forward", lambda params: None)
    monkeypatch.setattr("fsdp_compile.runtime.planned_graph.note_forward", lambda params: None)
    monkeypatch.setattr("fsdp_compile.runtime.planned_graph.note_backward", lambda params: None)
    with pytest.raises(AssertionError):
        test_graphs_that_share_parameters(False, None)


def test_no_reentrant_checkpoint(one_rank: None) -> None:
    model = _model(_CallsTwice)
    _adamw(model.parameters())
    _compile_blocks(model, "aot_eager")
    x = torch.randn(3, 8, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(model.blocks[0], x, use_reentrant=True).sum()
    with pytest.raises(RuntimeError, match="use_reentrant=False"):
        loss.backward()


# --- With other features --------------------------------------------------------------------------


def _keeps_gathered(model: Any) -> None:
    model.set_reshard_after_backward(False)


def _scaled(reduced: Tensor) -> None:
    reduced.mul_(0.5)


def _hook_on_reduced(model: Any) -> None:
    model.blocks[0].set_all_reduce_hook(_scaled)


def _hook_on_parameters(model: Any) -> None:
    def hook(param: Any) -> None:
        assert param.grad is not None
        param.grad.mul_(0.5)

    model.head.weight.register_post_accumulate_grad_hook(hook)


def _freezes(model: Any, forward: Any, step: int) -> None:
    model.head.bias.requires_grad_(step != 1)
    _loss(forward, step).backward()


_PREPARE = [_keeps_gathered, _hook_on_reduced, _hook_on_parameters]


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
@pytest.mark.parametrize("prepare", _PREPARE, ids=lambda prepare: prepare.__name__[1:])
def test_beside(prepare: Callable[[Any], None], lowering: str, one_rank: None) -> None:
    _compare(lowering=lowering, prepare=prepare)


def test_a_parameter_that_is_frozen_for_a_step(one_rank: None) -> None:
    """The parameter's count of steps differs from then on."""
    _compare(_freezes, steps=4)


@pytest.mark.parametrize("lowering", ["eager", "aot_eager"])
def test_an_optimizer_of_some_parameters(lowering: str, one_rank: None) -> None:
    """A unit of which the optimizer has only some parameters is updated when backward ends."""
    found = []
    for in_backward in (True, False):
        model = _model()
        updated = [*model.head.parameters(), *model.blocks[0].parameters()]
        rest = [model.bias, *model.blocks[1].parameters()]
        optimizer, other = _adamw(updated, in_backward), torch.optim.SGD(rest, lr=0.1)
        forward = _compiled(model, lowering)
        for step in range(3):
            _loss(forward, step).backward()
            assert all((param.grad is None) is in_backward for param in updated)
            assert all(param.grad is not None for param in rest)
            for each in (optimizer, other):
                each.step()
                each.zero_grad()
        found.append((model, optimizer))
    (model, optimizer), (twin, reference) = found
    _assert_same(model, twin, optimizer, reference)


def test_a_model_that_is_cast_and_a_group_that_is_added(one_rank: None) -> None:
    found = []
    for in_backward in (True, False):
        model = _model()
        optimizer = _adamw([model.bias, *model.blocks.parameters()], in_backward)
        for step in range(2):
            _loss(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
        model.double()
        for state in optimizer.state.values():
            state.update({name: value.double() for name, value in state.items() if name != "step"})
        optimizer.add_param_group({"params": list(model.head.parameters())})
        forward = _compiled(model)
        for step in range(2):
            x = torch.randn(3, 8, generator=torch.Generator().manual_seed(step)).double()
            forward(x).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append((model, optimizer))
    (model, optimizer), (twin, reference) = found
    _assert_same(model, twin, optimizer, reference)


def test_remove(one_rank: None) -> None:
    model = _model()
    optimizer = _adamw(model.parameters())
    forward = _compiled(model)
    _loss(forward).backward()
    optimizer.remove()
    _loss(forward).backward()
    assert all(param.grad is not None for param in model.parameters())
    _adamw(model.parameters())


def _large() -> nn.Module:
    return models.MLP(dim=8, hidden=40000, layers=1)


def _lists(model: Any) -> None:
    model.blocks[1].set_modules_to_backward_prefetch([model.blocks[0]])


def on_ranks(what: str) -> None:
    if what == "large parameters":
        # A large parameter is reduced, and so updated, by itself.
        _compare(build=_large, ranks=2, steps=2)
    elif what == "rounded gathers":
        # Rounding pads shards, so flat storage has padding between them.
        _compare(ranks=2, gather_policy=fsdp_compile.GatherPolicy())
    elif what == "prefetch lists":
        _compare(ranks=2, prepare=_lists)
    else:
        _compare(_without_all_reduce, ranks=(2, 2))


@pytest.mark.parametrize(
    ("what", "world"),
    [
        ("large parameters", 2),
        ("rounded gathers", 2),
        ("prefetch lists", 2),
        pytest.param("partial results", 4, marks=pytest.mark.night),
    ],
)
def test_on_ranks(what: str, world: int, rank_pools: RankPools) -> None:
    rank_pools[world].run(on_ranks, what=what)


def save_and_resume(path: str) -> None:
    """Compare four steps with two steps, a checkpoint, and two steps of a model that loads it. Every rank calls this."""
    straight, resumed = (_model(ranks=dist.get_world_size()) for _ in range(2))
    for model, saves in ((straight, False), (resumed, True)):
        optimizer = _adamw(model.parameters())
        forward = _compiled(model)
        for step in range(2):
            _loss(forward, step).backward()
        if saves:
            states = get_state_dict(model, optimizer)
            dcp.save({"model": states[0], "optimizer": states[1]}, checkpoint_id=path)
            model = resumed = _model(ranks=dist.get_world_size())
            optimizer = _adamw(model.parameters())
            forward = _compiled(model)
            states = get_state_dict(model, optimizer)
            loaded = {"model": states[0], "optimizer": states[1]}
            dcp.load(loaded, checkpoint_id=path)
            set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        for step in range(2, 4):
            _loss(forward, step).backward()
    for (name, param), other in zip(resumed.named_parameters(), straight.named_parameters(), strict=True):
        assert torch.equal(_local(param), _local(other[1])), name


def test_checkpoint(rank_pools: RankPools, tmp_path: Path) -> None:
    rank_pools[2].run(save_and_resume, path=str(tmp_path / "checkpoint"))


# --- What graphs do -------------------------------------------------------------------------------


def _captured(in_backward: bool, layers: int = 3, lowering: str = "aot_eager") -> Any:
    torch._dynamo.reset()
    model = _model(partial(models.MLP, layers=layers), ranks=8)
    _adamw(model.parameters(), in_backward)
    with capture(passes=False) as captured:
        _loss(_compiled(model, lowering, min_bucket_bytes=0)).backward()
    return captured


def test_updates_are_behind_reductions(fake_ranks: None) -> None:
    """Each unit has one update, as soon as its reduction is waited for."""
    lines: list[str] = []
    for node in _captured(True).backward[0].graph_module.graph.nodes:
        line = f"{role(node)} {bucket(node)}"
        if role(node) and "gather" not in line and line not in lines[-1:]:
            lines.append(line)
    units = ["root", "blocks.2", "blocks.1", "blocks.0"]
    expected = []
    for index, unit in enumerate(units):
        if index >= 2:
            expected += [f"finish_reduce {units[index - 2]}", f"update {units[index - 2]}"]
        expected.append(f"start_reduce {unit}")
    for unit in units[2:]:
        expected += [f"finish_reduce {unit}", f"update {unit}"]
    assert lines == expected


@pytest.mark.inductor
def test_an_update_is_one_kernel(fake_ranks: None) -> None:
    """The kernel includes the division of the reduction, so no reduced gradient is written."""
    code = _captured(True, lowering="inductor").backward[0].code
    program = code.split("\n\n")[0].splitlines()
    waits = [
        index for index, line in enumerate(program) if "torch.ops._c10d_functional.wait_tensor.default(reduce_scatter" in line
    ]
    assert len(waits) == 4
    for index in waits:
        call = next(line for line in program[index:] if "segment_" in line)
        # The call returns nothing.
        assert call.strip().startswith("segment_")


def test_gradients_never_exist_all_at_once(fake_ranks: None) -> None:
    """While a backward of six equal layers runs, gradients (full and reduced) never need more bytes than 1.5 layers."""
    peaks, given_out, totals = {}, {}, {}
    for in_backward in (True, False):
        captured = _captured(in_backward, layers=6).backward[0]
        graph = captured.graph_module.graph
        breakdown = MemoryModel(graph).breakdown(list(graph.nodes))
        peaks[in_backward] = max(breakdown.timeline[Category.GRADIENTS])
        given_out[in_backward] = breakdown.given_out[Category.GRADIENTS]
        totals[in_backward] = max(total for total, _ in captured.live_bytes().timeline)
    # A layer of 280 elements, which eight ranks divide.
    layer = 280 * 4
    assert given_out[True] == 0 and given_out[False] >= 6 * layer / 8
    assert peaks[True] < 1.5 * layer
    assert peaks[False] >= peaks[True] + 3 * layer / 8
    assert totals[True] < totals[False]


# --- What is refused ------------------------------------------------------------------------------


def test_refused_classes_and_options(one_rank: None) -> None:
    model = _model()
    with pytest.raises(TypeError, match=r"cannot compile the update of RMSprop\. It knows, of torch\.optim: SGD, Adam, AdamW"):
        optimizer_in_backward(torch.optim.RMSprop, model.parameters())
    for name in ("fused", "foreach", "capturable", "differentiable"):
        with pytest.raises(ValueError, match=rf"{name}=True\): the update is compiled into the backward"):
            _adamw(model.parameters(), **{name: True})
    _adamw(model.parameters())


def test_refused_parameters(one_rank: None) -> None:
    model = _model()
    first = _adamw(model.parameters())
    with pytest.raises(ValueError, match=r"cannot update parameter bias: another optimizer does already. Call remove\(\)"):
        _adamw(model.parameters())
    _loss(_compiled(model)).backward()
    assert len(first.state) == len(list(model.parameters()))
    with pytest.raises(ValueError, match="its shard is on the host"):
        _adamw(_model(offload_policy=CPUOffloadPolicy()).parameters())
    with torch.device("meta"):
        meta = models.MLP()
    shard_units(meta, init_device_mesh("cpu", (1,)), fully_shard)
    with pytest.raises(ValueError, match="is on the meta device"):
        _adamw(meta.parameters())
    scalars = models.ScalarParameters()
    shard_units(scalars, init_device_mesh("cpu", (1,)), fully_shard)
    with pytest.raises(ValueError, match="it is a scalar"):
        _adamw(scalars.parameters())


def test_a_replaced_parameter_is_noticed(one_rank: None) -> None:
    model = _model()
    _adamw(model.parameters())
    forward = _compiled(model)
    state = {name: value.detach().clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="has been replaced since optimizer_in_backward"):
        _loss(forward).backward()


@pytest.mark.parametrize(
    ("options", "made_first"), [({"schedule": "auto"}, True), ({"schedule": "auto"}, False), ({"memory_budget": "1GB"}, False)]
)
def test_refused_options_of_compile(options: dict[str, Any], made_first: bool, one_rank: None) -> None:
    model = _model()
    if made_first:
        _adamw(model.parameters())
    forward = _compiled(model, **options)
    with pytest.raises(Exception, match="does not know of updates in backward"):
        loss = _loss(forward)
        if not made_first:
            _adamw(model.parameters())
        loss.backward()


def test_no_clipping_and_no_scaling(one_rank: None) -> None:
    model = _model()
    optimizer = _adamw(model.parameters())
    _loss(model).backward()
    with pytest.raises(RuntimeError, match="would find no gradient of bias, which is updated in backward"):
        fsdp_compile.clip_grad_norm_(model.parameters(), 1.0)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(_loss(model)).backward()
    with pytest.raises(RuntimeError, match="GradScaler has scaled"):
        scaler.step(optimizer)
