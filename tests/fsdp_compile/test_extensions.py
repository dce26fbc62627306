"""All-gather extensions: parameters that are tensor subclasses with their own gathers train as with torch's FSDP2."""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import expecttest
import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import fsdp_compile
import passes.pipeline
from fsdp_compile import GatherPolicy, fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from fsdp_compile.explain import explain
from passes.transforms.repeated_layers import fold_layers
from tests.common.distributed import RankPools, device_mesh, fake_group
from tests.common.graphs import kinds, operations
from tests.common.subclasses import Halved, Scaled, Wrapper


class Reader(Halved):
    """An extension that reads the module, so that equal modules have different gathers."""

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.held * module.gain,), None


class Careless(Halved):
    """An extension whose ``__tensor_unflatten__``, which FSDP2 never calls, is wrong, as in FSDP2's own tests."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], size: Any, stride: Any) -> Tensor:  # type: ignore[override]
        return inner["held"]


def in_bfloat16(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return (getattr(self, "held", self).bfloat16(),), None


def from_bfloat16(self: Any, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
    return Halved.fsdp_post_all_gather(self, gathered, metadata, param_dtype, out=out)


def give_functions(param: Any, before: Any = in_bfloat16, after: Any = from_bfloat16) -> None:
    """Set the functions of an extension on a parameter's local tensor."""
    local = param._local_tensor
    local.fsdp_pre_all_gather, local.fsdp_post_all_gather = before.__get__(local), after.__get__(local)


KINDS: dict[str, Any] = {"halved": Halved, "scaled": Scaled, "reader": Reader, "careless": Careless}
#: Their local tensors get the functions after ``fully_shard``.
KINDS_WITHOUT = {"plain": Tensor, "wrapped": Wrapper}
KINDS |= KINDS_WITHOUT


@dataclass(frozen=True)
class Case:
    """A model of linear layers with these ``sizes``, and the arguments of :func:`torch.distributed.fsdp.fully_shard`."""

    kind: str = "halved"
    system: str = "aot_eager"
    sizes: tuple[int, ...] = (8, 6, 8)
    mesh: tuple[int, ...] = (2,)
    reshard: bool | None = None
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    microbatches: int = 1
    tied: bool = False
    units: bool = True
    checkpointed: bool = False

    def __str__(self) -> str:
        given = [field for field in fields(self) if getattr(self, field.name) != field.default]
        return " ".join([self.kind, self.system, *(f"{field.name}={getattr(self, field.name)}" for field in given)])


class Layer(nn.Linear):
    """A linear layer with enough operations that equal layers fold, and an attribute that an extension may read."""

    gain = 1.0

    def forward(self, value: Tensor) -> Tensor:
        linear = super().forward(value)
        return torch.tanh(linear) + torch.sin(linear) * torch.cos(linear)


class Net(nn.Module):
    """Linear layers, one after another."""

    def __init__(self, case: Case):
        super().__init__()
        self.layers = nn.ModuleList([Layer(*pair) for pair in itertools.pairwise(case.sizes)])
        self.checkpointed = case.checkpointed
        for index, layer in enumerate(self.layers):
            layer.gain = 1.0 + index / 8
            layer.weight = nn.Parameter(KINDS[case.kind](layer.weight.detach()))
        if case.tied:
            self.layers[-1].weight = self.layers[0].weight

    def forward(self, value: Tensor) -> Tensor:
        for layer in self.layers:
            value = checkpoint(layer, value, use_reentrant=False) if self.checkpointed else layer(value)
        return value


def build(case: Case, fully_shard: Callable[..., Any]) -> nn.Module:
    torch.manual_seed(0)
    model = Net(case)
    options: dict[str, Any] = {"mesh": device_mesh(case.mesh)}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=case.param_dtype, reduce_dtype=case.reduce_dtype)
    if case.units and not case.tied:
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=case.reshard, **options)
    fully_shard(model, reshard_after_forward=case.reshard, **options)
    for layer in model.layers if case.kind in KINDS_WITHOUT else ():
        give_functions(layer.weight)
    return model


def steps(model: Any, case: Case, between: Callable[[nn.Module, int], None] = lambda *_: None, count: int = 3) -> list[Tensor]:
    """Train; return losses, the gradients of the last step, and the final parameters."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses = []
    run = model
    if case.system != "eager" and isinstance(model, fsdp_compile.FSDPModule):
        run = torch.compile(model, backend=fsdp_backend, options={"lowering": case.system})
    for step in range(count):
        for microbatch in range(case.microbatches):
            model.set_requires_gradient_sync(microbatch == case.microbatches - 1)
            loss = run(torch.randn(4, case.sizes[0], generator=generator)).square().sum()
            loss.backward()
            losses.append(loss.detach())
        grads = [param.grad.to_local().clone() for param in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        between(model, step)
    return [*losses, *grads, *(getattr(param.to_local(), "held", param.to_local()).detach() for param in model.parameters())]


def both(case: Case) -> tuple[list[Tensor], list[Tensor], list[str]]:
    """Return the results of FSDP2 and of the library, and the classes of the library's local tensors. Runs on every rank."""
    torch._dynamo.reset()
    expected = steps(build(case, torch.distributed.fsdp.fully_shard), case)
    model = build(case, fsdp_compile.fully_shard)
    found = steps(model, case)
    return expected, found, [type(param.to_local()).__name__ for param in model.parameters()]


def tolerance(case: Case) -> dict[str, float]:
    """Return the tolerances of a case. Fused kernels round sums differently, which can tip a rounding to few bits."""
    if len(case.sizes) > 5:
        return {"rtol": 1e-3, "atol": 1e-3}
    if case.param_dtype and case.system == "inductor":
        # Fused kernels round to bfloat16 less often than FSDP2's operators.
        return {"rtol": 1e-1, "atol": 5e-2}
    return {"rtol": 2e-2, "atol": 2e-2} if case.param_dtype else {"rtol": 2e-5, "atol": 2e-6}


def check(case: Case, rank_pools: RankPools) -> None:
    ranks = 4 if case.mesh == (2, 2) else 2
    for expected, found, classes in rank_pools[ranks].run(both, case=case):
        assert len(found) == len(expected)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, **tolerance(case))
        assert classes.count(KINDS[case.kind].__name__) >= 1


_MIXED = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
_FIXED = [
    Case(system="eager"),
    Case(),
    Case(kind="scaled"),
    Case(system="eager", reshard=False, microbatches=2),
    Case(sizes=(8, 7, 8, 1), system="eager"),
    Case(sizes=(8, 7, 8, 1), microbatches=2),
    Case(mesh=(2, 2)),
    Case(kind="reader", sizes=(8,) * 10),
    Case(kind="scaled", system="eager"),
    Case(reshard=False, microbatches=2),
    Case(reshard=True),
    *(Case(kind="careless", system=system, microbatches=2) for system in ("eager", "aot_eager")),
    *(Case(kind=kind, system=system) for kind in KINDS_WITHOUT for system in ("eager", "aot_eager")),
    Case(kind="scaled", system="inductor", microbatches=2),
    *(Case(system=system, **_MIXED) for system in ("eager", "aot_eager")),  # type: ignore[arg-type]
    *(Case(system=system, sizes=(8, 8, 8, 8), tied=True) for system in ("eager", "aot_eager")),
    *(Case(system=system, units=False) for system in ("eager", "aot_eager")),
    *(Case(system=system, checkpointed=True) for system in ("eager", "aot_eager")),
]
_AT_NIGHT = [
    Case(system="inductor"),
    *(Case(kind=kind, system="inductor") for kind in ("careless", *KINDS_WITHOUT)),
    Case(kind="plain", mesh=(2, 2)),
    Case(system="inductor", **_MIXED),  # type: ignore[arg-type]
    Case(system="inductor", checkpointed=True),
    *(Case(mesh=(2, 2), system=system) for system in ("eager", "inductor")),
    *(Case(kind="scaled", system=system, sizes=(8,) * 10) for system in ("aot_eager", "inductor")),
]


@pytest.mark.parametrize("case", [*_FIXED, *(pytest.param(case, marks=pytest.mark.night) for case in _AT_NIGHT)], ids=str)
def test_equals_fsdp2(case: Case, rank_pools: RankPools) -> None:
    check(case, rank_pools)


class Pair(TwoTensor):
    """Two tensors, as in torch's tests. The gathered parameter stays a subclass, and forward computes with both tensors."""

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Pair:
        return Pair(inner["a"], inner["b"])

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.a, self.b), None

    def fsdp_post_all_gather(self, gathered: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        return None if out is not None else (TwoTensor(*gathered), gathered)


KINDS["pair"] = lambda weight: Pair(weight, weight.clone())


def first_of_pairs(case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Return losses and gradients of FSDP2 and of the library; gathered parameters are subclasses, too. Runs on every rank."""
    torch._dynamo.reset()
    results = []
    for library in (torch.distributed.fsdp, fsdp_compile):
        model: Any = build(case, library.fully_shard)
        run = model
        if library is fsdp_compile and case.system != "eager":
            run = torch.compile(model, backend=fsdp_backend, options={"lowering": case.system})
        found = []
        for step in range(2):
            loss = run(torch.full((4, 8), float(step + torch.distributed.get_rank()))).square().sum()
            loss.backward()
            found += [loss.detach().a, *(param.grad.to_local().clone() for param in model.parameters())]
            for param in model.parameters():
                assert type(param.grad.to_local()) is Tensor
            with torch.no_grad():
                for param in model.parameters():
                    param.sub_(param.grad, alpha=0.05)
            model.zero_grad()
        results.append(found)
    return results[0], results[1]


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_parameters_that_stay_subclasses(system: str, rank_pools: RankPools) -> None:
    for expected, found in rank_pools[2].run(first_of_pairs, case=Case("pair", system)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)


def test_subclasses_are_freed_after_forward(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward gathers the parameters again, and finds in them the tensors that autograd saved."""
    gathered: list[weakref.ref[Tensor]] = []

    def post(self: Any, tensors: Any, metadata: Any, param_dtype: Any, *, out: Any = None) -> Any:
        gathered.extend(map(weakref.ref, tensors))
        return TwoTensor(*tensors), tensors

    monkeypatch.setattr(Pair, "fsdp_post_all_gather", post)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for layer in model:
        layer.weight = nn.Parameter(Pair(layer.weight.detach(), layer.weight.detach().clone()))
        fully_shard(layer)
    value = torch.ones(2, 8, requires_grad=True)
    loss = fully_shard(model)(value).sum()
    gc.collect()
    assert len(gathered) == 4 and not any(tensor() is not None for tensor in gathered)
    loss.backward()
    assert len(gathered) == 8


def set_bounds(model: nn.Module, step: int) -> None:
    for param in model.parameters():
        local = param.to_local() if not isinstance(param, DTensor) else param._local_tensor
        if isinstance(local, Scaled):
            local.bound = torch.tensor(0.2 / (1 + step))


def bounded(case: Case) -> tuple[list[Tensor], list[Tensor], int]:
    """Return results with a bound that changes each step, and the library's graph count. Runs on every rank."""
    torch._dynamo.reset()
    expected = steps(build(case, torch.distributed.fsdp.fully_shard), case, set_bounds, count=5)
    torch._dynamo.utils.counters.clear()
    found = steps(build(case, fsdp_compile.fully_shard), case, set_bounds, count=5)
    return expected, found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_tensors_of_a_shard_are_read_anew_in_each_step(system: str, rank_pools: RankPools) -> None:
    for expected, found, compiled in rank_pools[2].run(bounded, case=Case("scaled", system)):
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        assert compiled == (0 if system == "eager" else 2)


def checkpointed(path: str) -> bool:
    """Return whether a model whose weights are subclasses trains on equally after a checkpoint. Runs on every rank."""
    torch._dynamo.reset()
    case = Case("scaled")
    straight: Any = build(case, fsdp_compile.fully_shard)
    steps(straight, case, count=2)
    dcp.save(straight.state_dict(), checkpoint_id=path)
    resumed: Any = build(case, fsdp_compile.fully_shard)
    with torch.no_grad():
        for param in resumed.parameters():
            param.zero_()
    state = resumed.state_dict()
    dcp.load(state, checkpoint_id=path)
    resumed.load_state_dict(state)
    assigned: Any = build(case, fsdp_compile.fully_shard)
    assigned.load_state_dict(copy.deepcopy(straight.state_dict()), assign=True)
    expected, found, other = (steps(model, case, count=2) for model in (straight, resumed, assigned))
    classes = {type(model.layers[0].weight.to_local()) for model in (straight, resumed, assigned)}
    assert classes == {Scaled}, classes
    return all(torch.equal(one, two) for one, two in zip(expected * 2, found + other, strict=True))


def test_checkpoints(rank_pools: RankPools, tmp_path: Path) -> None:
    assert rank_pools[2].run(checkpointed, path=str(tmp_path)) == [True, True]


def sharded(weight: Tensor, **options: Any) -> Any:
    model = nn.Sequential(nn.Linear(16, 16, device=weight.device))
    model[0].weight = nn.Parameter(weight)
    return fully_shard(model, **options)


def compiled_call(model: nn.Module) -> None:
    torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(2, 16)).sum().backward()


class Branching(Halved):
    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
        return (self.held * self.held.abs().max().item(),), None


def test_what_cannot_be_traced_is_refused(fake_ranks: None) -> None:
    with pytest.raises(
        Exception, match=r"fsdp_pre_all_gather of parameter 0?\.?weight, a Branching, failed.*values of tensors"
    ):
        compiled_call(sharded(Branching(torch.randn(16, 16))))


def test_constants_of_a_shard_may_not_change(fake_ranks: None) -> None:
    model = sharded(Scaled(torch.randn(16, 16)))
    compiled_call(model)
    model[0].weight._local_tensor.levels = 7.0
    for call in (compiled_call, lambda model: model(torch.ones(2, 16))):
        with pytest.raises(RuntimeError, match=r"Attribute levels of .* parameter 0\.weight, a Scaled, was 127.0"):
            call(model)


def old_generation(self: Any, mesh: Any) -> Any:
    return (self.held.bfloat16(),), None


def doubled(self: Any, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> Any:
    return ((2 * self.held).bfloat16(),), None


@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
def test_a_class_gets_other_functions(is_compiled: bool, one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models call the new functions, with either signature. A graph that has the old ones raises, once."""
    weight, value = torch.randn(16, 16), torch.randn(2, 16)
    usual = Halved.fsdp_pre_all_gather
    for function, scale in ((old_generation, 1), (usual, 1), (doubled, 2), (old_generation, 1)):
        monkeypatch.setattr(Halved, "fsdp_pre_all_gather", function)
        torch._dynamo.reset()
        model = sharded(Halved(weight.clone()))
        run = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) if is_compiled else model
        expected = nn.functional.linear(value, (scale * weight).bfloat16().float(), model[0].bias.to_local())
        torch.testing.assert_close(run(value), expected)
    monkeypatch.setattr(Halved, "fsdp_pre_all_gather", usual)
    if is_compiled:
        with pytest.raises(RuntimeError, match=r"parameter 0\.weight was set, replaced or deleted after .* compiles anew"):
            run(value)
    torch.testing.assert_close(run(value), expected)


@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
def test_a_plain_tensor_gets_and_loses_functions(is_compiled: bool, one_rank: None) -> None:
    """Without functions, the parameter lies in flat storage again."""
    weight, value = torch.randn(16, 16), torch.randn(2, 16)
    model = sharded(weight.clone())
    run = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) if is_compiled else model
    local = model[0].weight._local_tensor

    def check(used: Tensor) -> None:
        model.zero_grad()
        result = run(value)
        result.sum().backward()
        torch.testing.assert_close(result, nn.functional.linear(value, used, model[0].bias.to_local()))
        torch.testing.assert_close(model[0].weight.grad.to_local(), value.sum(0).expand(16, 16))

    check(weight)
    for change, used in (
        (lambda: give_functions(model[0].weight), weight.bfloat16().float()),
        (lambda: [delattr(local, name) for name in ("fsdp_pre_all_gather", "fsdp_post_all_gather")], weight),
    ):
        change()
        if is_compiled:
            with pytest.raises(RuntimeError, match=r"parameter 0\.weight was set, replaced or deleted after .* compiles anew"):
                run(value)
        check(used)
    assert model[0].weight._local_tensor.untyped_storage().nbytes() == weight.nbytes
    torch.testing.assert_close(model[0].weight.to_local(), weight)


@pytest.mark.parametrize(
    ("options", "change", "error", "message"),
    [
        ({}, lambda local: delattr(local, "fsdp_post_all_gather"), TypeError, "no fsdp_post_all_gather"),
        (
            {},
            lambda local: setattr(local, "scale", torch.ones(())),
            NotImplementedError,
            r"attributes that are tensors \(scale\)",
        ),
        ({"shard_placement_fn": lambda param: Shard(param.dim() - 1)}, None, NotImplementedError, "another dimension than 0"),
        ({"reshard_after_forward": 2}, None, NotImplementedError, "a smaller group"),
    ],
)
def test_refuses_functions_on_a_plain_tensor(
    options: dict[str, Any], change: Any, error: Any, message: str, fake_ranks: None
) -> None:
    model = sharded(torch.randn(16, 16), **options)
    give_functions(model[0].weight)
    if change is not None:
        change(model[0].weight._local_tensor)
    for call in (lambda: model(torch.ones(2, 16)), lambda: model.load_state_dict(model.state_dict())):
        with pytest.raises(error, match=rf"[Pp]arameter 0\.weight.*{message}"):
            call()


@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
def test_a_subclass_without_functions_is_not_gathered(is_compiled: bool, one_rank: None) -> None:
    model = sharded(Wrapper(torch.randn(16, 16)))
    with pytest.raises(Exception, match=r"weight is a Wrapper, a tensor subclass .* cannot be gathered. .*ignored_params"):
        (compiled_call if is_compiled else lambda model: model(torch.ones(2, 16)))(model)


class Uncut(Wrapper):
    """A subclass that does not support what cuts parameters."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        if func is torch.ops.aten.new_zeros.default:
            raise NotImplementedError("no new_zeros")
        return super().__torch_dispatch__(func, types, args, kwargs)


class Half(Wrapper):
    def fsdp_pre_all_gather(self, mesh: Any) -> Any:
        return (self.held,), None


class Opaque(torch.Tensor):
    fsdp_pre_all_gather, fsdp_post_all_gather = Halved.fsdp_pre_all_gather, Halved.fsdp_post_all_gather


class Strange(Halved):
    def fsdp_pre_all_gather(self, mesh: Any, module: Any) -> Any:  # type: ignore[override]
        return (self.held,), None


@pytest.mark.parametrize(
    ("kind", "options", "error", "message"),
    [
        (Half, {}, TypeError, r"0\.weight is a Half.*no fsdp_post_all_gather"),
        (Opaque, {}, TypeError, r"0\.weight is a Opaque.*without __tensor_flatten__"),
        (Strange, {}, ValueError, r"0\.weight is a Strange.*\(mesh, outer_size, outer_stride, module, mp_policy\)"),
        (Uncut, {}, NotImplementedError, r"0\.weight is a Uncut, a tensor subclass that cannot be cut.*no new_zeros"),
        (
            Halved,
            {"shard_placement_fn": lambda param: Shard(param.dim() - 1)},
            NotImplementedError,
            r"weight is a Halved.*dimension 0 only",
        ),
        (Halved, {"reshard_after_forward": 2}, NotImplementedError, r"0\.weight is a Halved.*smaller group"),
    ],
)
def test_refuses(kind: Any, options: dict[str, Any], error: Any, message: str, fake_ranks: None) -> None:
    with pytest.raises(error, match=message):
        sharded(torch.randn(16, 16).as_subclass(kind) if kind is Opaque else kind(torch.randn(16, 16)), **options)


@pytest.mark.parametrize(("kind", "number"), [pytest.param("scaled", 8, marks=pytest.mark.night), ("reader", 0)])
def test_equal_layers_fold(kind: str, number: int, fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    case, folded, texts = Case(kind, sizes=(8,) * 10), [], []

    def fold_and_count(gm: torch.fx.GraphModule) -> bool:
        found = fold_layers(gm)
        folded.extend(node for node in gm.graph.nodes if getattr(node.target, "__name__", "") == "call_layer")
        return found

    model = Net(case)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    for fold in (fold_and_count, lambda gm: False):
        monkeypatch.setattr(passes.pipeline, "fold_layers", fold)
        torch._dynamo.reset()
        model.zero_grad()
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
        with capture() as graphs:
            compiled(torch.ones(2, 8)).sum().backward()
        (forward,), (backward,) = graphs.forward, graphs.backward
        # Saved tensors may come in another order: leave out forward's output, and compare backward's operations by number.
        every = Counter(map(str, kinds(backward.graph_module.graph)))
        texts.append((operations(forward.graph_module.graph)[:-1], every))
    assert len(folded) == number
    assert texts[0] == texts[1]


def variants() -> tuple[bool, list[Tensor], list[Tensor], int]:
    """Train with a gather policy beside extensions, and with each layer compiled by itself. Runs on every rank.

    Returns:
        Whether the policy changes nothing; the steps of FSDP2; those of the library; and the number of graphs.
    """
    torch._dynamo.reset()
    case = Case("scaled", sizes=(8,) * 5)
    plain = steps(build(case, fsdp_compile.fully_shard), case)
    # Only biases are left to be rounded, and biases are not.
    rounded = steps(build(case, functools.partial(fsdp_compile.fully_shard, gather_policy=GatherPolicy())), case)
    is_same = all(map(torch.equal, plain, rounded))
    torch._dynamo.reset()
    eager = replace(case, system="eager")
    expected = steps(build(eager, torch.distributed.fsdp.fully_shard), eager)
    model: Any = build(eager, fsdp_compile.fully_shard)
    for layer in model.layers:
        layer.compile(backend=fsdp_backend, options={"lowering": "aot_eager"}, fullgraph=True)
    torch._dynamo.utils.counters.clear()
    found = steps(model, eager)
    return is_same, expected, found, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_beside_a_gather_policy_and_compiled_by_block(rank_pools: RankPools) -> None:
    for is_same, expected, found, graphs in rank_pools[2].run(variants):
        assert is_same
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-6)
        # Two graphs, as the first layer's input needs no gradient.
        assert graphs == 2


def unshard_by_hand(system: str) -> list[bool]:
    """Return whether forward after ``unshard()`` computes the same, shows full parameters, and reshards. Runs on every rank."""
    torch._dynamo.reset()
    case = Case(system=system)
    model: Any = build(case, fsdp_compile.fully_shard)
    run = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    value = torch.ones(2, 8)
    expected = run(value)
    layer = model.layers[0]
    layer.unshard()
    shown, same = layer.weight, torch.equal(run(value), expected)
    with torch.no_grad():
        without_gradients = torch.equal(run(value), expected)
    return [shown.shape == (6, 8), not isinstance(shown, DTensor), same, without_gradients, isinstance(layer.weight, DTensor)]


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_unshard_by_hand(system: str, rank_pools: RankPools) -> None:
    assert rank_pools[2].run(unshard_by_hand, system=system) == [[True] * 5] * 2


@pytest.mark.parametrize("backend", [None, fsdp_backend, "aot_eager"], ids=["none", "fsdp", "aot_eager"])
def test_a_world_of_one_rank_encodes_too(backend: Any, one_rank: None) -> None:
    weight, value = torch.randn(16, 16), torch.randn(2, 16)
    model = sharded(Halved(weight.clone()))
    options = {"options": {"lowering": "aot_eager"}} if backend is fsdp_backend else {}
    run = model if backend is None else torch.compile(model, backend=backend, **options)
    result = run(value)
    result.square().sum().backward()
    expected = nn.functional.linear(value, weight.bfloat16().float(), model[0].bias.to_local())
    torch.testing.assert_close(result, expected)
    torch.testing.assert_close(model[0].weight.grad.to_local(), (2 * expected).T @ value)


def test_from_the_meta_device_and_to_other_dtypes(one_rank: None) -> None:
    model = sharded(Halved(torch.randn(16, 16, device="meta")), mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(RuntimeError, match="is on the meta device"):
        compiled_call(model.to("meta"))
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    torch.testing.assert_close(model(torch.ones(2, 16)), torch.full((2, 16), 0.1 + 16 * float(torch.tensor(0.1).bfloat16())))
    model.to(torch.float64)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    assert compiled(torch.ones(2, 16, dtype=torch.float64)).dtype == torch.float64
    assert type(model[0].weight.to_local()) is Halved


def test_explain_counts_what_is_sent() -> None:
    def report(kind: Any) -> Any:
        model = nn.Sequential(nn.Linear(512, 512, bias=False))
        if kind is not None:
            model[0].weight = nn.Parameter(kind(model[0].weight.detach()))
        return explain(model, torch.ones(4, 512), (8,), "h100", suggest=False)

    plain, scaled = report(None), report(Scaled)
    assert scaled.units[0].gathered_bytes <= 0.27 * plain.units[0].gathered_bytes
    assert scaled.units[0].shard_bytes == plain.units[0].shard_bytes
    with pytest.raises(ValueError, match=r"0\.weight is gathered by an extension.*no formulae"):
        _ = scaled.formulae


class TestGraph(expecttest.TestCase):
    def test_forward(self) -> None:
        with fake_group():
            model = sharded(Scaled(torch.randn(16, 16)))
            with capture() as graphs:
                compiled_call(model)
        self.assertExpectedInline(
            graphs.forward[0].readable(),
            """\
def forward(self, primals_1: "f32[2, 16]", shard_0_weight: "f32[2, 16]", shard_0_bias: "f32[2]", primals_4: "f32[2, 16]"):
    abs_1: "f32[2, 16]" = aten.abs.default(primals_1)
    amax: "f32[2, 1]" = aten.amax.default(abs_1, [1], True)
    clamp_min: "f32[2, 1]" = aten.clamp_min.default(amax, 1e-12)
    div: "f32[2, 1]" = aten.div.Tensor(clamp_min, 127.0)
    div_1: "f32[2, 16]" = aten.div.Tensor(primals_1, div)
    round_1: "f32[2, 16]" = aten.round.default(div_1)
    convert_element_type: "i8[2, 16]" = prims.convert_element_type.default(round_1, torch.int8)
    view: "f32[2]" = aten.view.default(div, [-1])
    view_1: "u8[8]" = aten.view.dtype(view, torch.uint8)
    view_2: "f32[2]" = aten.view.default(shard_0_bias, [-1])
    view_3: "u8[8]" = aten.view.dtype(view_2, torch.uint8)
    view_4: "i8[32]" = aten.view.default(convert_element_type, [-1])
    view_5: "u8[32]" = aten.view.dtype(view_4, torch.uint8)
    cat: "u8[48]" = aten.cat.default([view_1, view_3, view_5])
    all_gather_into_tensor: "u8[384]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "u8[384]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_6: "u8[8, 48]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_6, [8, 8, 32], 1)
    getitem: "u8[8, 8]" = split_with_sizes[0]
    getitem_1: "u8[8, 8]" = split_with_sizes[1]
    getitem_2: "u8[8, 32]" = split_with_sizes[2]
    clone: "u8[8, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    view_7: "f32[8, 2]" = aten.view.dtype(clone, torch.float32)
    clone_1: "u8[8, 8]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    view_8: "f32[8, 2]" = aten.view.dtype(clone_1, torch.float32)
    clone_2: "u8[8, 32]" = aten.clone.default(getitem_2, memory_format = torch.contiguous_format)
    view_9: "i8[8, 32]" = aten.view.dtype(clone_2, torch.int8)
    view_10: "f32[16, 1]" = aten.view.default(view_7, [16, 1])
    view_11: "f32[16]" = aten.view.default(view_8, [16])
    view_12: "i8[16, 16]" = aten.view.default(view_9, [16, 16])
    convert_element_type_1: "f32[16, 16]" = prims.convert_element_type.default(view_12, torch.float32)
    mul: "f32[16, 16]" = aten.mul.Tensor(convert_element_type_1, view_10)
    permute: "f32[16, 16]" = aten.permute.default(mul, [1, 0])
    addmm: "f32[2, 16]" = aten.addmm.default(view_11, primals_4, permute)
    return (addmm, shard_0_weight, shard_0_bias, primals_4)
""",
        )
