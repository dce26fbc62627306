"""The table in the place of ``_parameters``: exact types of modules, and every way to read a parameter in and out of forwards.

Training in these ways is compared in tests/fsdp_compile/test_parity.py (``reads_in_other_ways``).
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.api.parameters import ShardedParameters
from passes.fx.torch_internals import patches
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import assert_same_gradients

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}
both_ways = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])


def _call(module: nn.Module, compiled: bool) -> Callable[..., Any]:
    return torch.compile(module, fullgraph=True, **_EAGER_LOWERING) if compiled else module


class _Runs(nn.Module):
    """A module whose forward returns what ``find`` reads from ``inner``."""

    def __init__(self, find: Callable[[nn.Module], Any]):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.find = find

    def forward(self) -> Any:
        return self.find(self.inner)


# --- Types ----------------------------------------------------------------------------------------


def test_initialisation_by_exact_type(one_rank: None) -> None:
    """Initialisation by exact type works after ``to_empty`` on a meta model, as in torchtitan and transformers."""

    def initialise(module: nn.Module) -> None:
        if type(module) is nn.Linear:
            nn.init.ones_(module.weight)
            nn.init.zeros_(module.bias)

    with torch.device("meta"):
        model = models.MLP()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    model.apply(initialise)
    for name, param in model.named_parameters():
        if name == "bias":
            continue  # a parameter of the model, which is no nn.Linear
        expected = torch.ones if name.endswith("weight") else torch.zeros
        torch.testing.assert_close(param.full_tensor(), expected(param.shape), msg=name)


def test_groups_of_an_optimizer_by_exact_type(fake_ranks: None) -> None:
    model = fully_shard(models.MLP(layers=2))
    decayed = [module.weight for module in model.modules() if type(module) in (nn.Linear, nn.Conv1d)]
    assert len(decayed) == 5 and all(isinstance(param, DTensor) for param in decayed)


# --- Reads in a forward ---------------------------------------------------------------------------

_WAYS: dict[str, Callable[[Any], Tensor]] = {
    "attribute": lambda inner: inner[0].weight,
    "getattr": lambda inner: getattr(inner[0], "weight"),  # noqa: B009
    "item": lambda inner: inner[0]._parameters["weight"],
    "get": lambda inner: inner[0]._parameters.get("weight"),
    "get_parameter": lambda inner: inner[0].get_parameter("weight"),
    "get_parameter_of_a_container": lambda inner: inner.get_parameter("0.weight"),
    "parameters": lambda inner: next(iter(inner.parameters())),
    "named_parameters": lambda inner: dict(inner.named_parameters())["0.weight"],
    "items": lambda inner: dict(inner[0]._parameters.items())["weight"],
    "values": lambda inner: list(inner[0]._parameters.values())[0],  # noqa: RUF015
}


@both_ways
@pytest.mark.parametrize("way", _WAYS)
def test_reads_full(way: str, compiled: bool, one_rank: None) -> None:
    """Every way gives the full parameter, as a part of the graph that gets a gradient."""
    model = _Runs(lambda inner: _WAYS[way](inner).square().sum())
    weight = model.inner[0].weight.detach().clone()
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        _call(model, compiled)().backward()
        torch.testing.assert_close(model.inner[0].weight.grad.full_tensor(), 2 * weight)
    assert isinstance(_WAYS[way](model.inner), DTensor)


@both_ways
@pytest.mark.parametrize("unit", ["", "inner", "inner.0"])
def test_penalty_over_all_parameters(unit: str, compiled: bool, one_rank: None) -> None:
    """The penalty includes parameters of other units, and a tied parameter once."""
    model = _Runs(lambda inner: sum(param.square().sum() for param in inner.parameters()))
    model.inner.append(nn.Linear(8, 8))
    model.inner[2].weight = model.inner[0].weight
    assert len(list(model.parameters())) == 3
    twin = copy.deepcopy(model)
    if unit:
        fully_shard(model.get_submodule(unit))
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        _call(model, compiled)().backward()
        twin().backward()
        for param, other in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(param.grad.full_tensor(), other.grad)  # type: ignore[union-attr]


@both_ways
def test_slices_of_a_list(compiled: bool, one_rank: None) -> None:
    """torch registers the parameters of a slice in a new list, where a full parameter would become one without gradient."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gains = nn.ParameterList(torch.randn(8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for gain in self.gains[1:]:
                x = x * gain
            return x * self.gains[::-2][0] * self.gains[-1]

    model = Scaled()
    twin = copy.deepcopy(model)
    fully_shard(model)
    x = torch.randn(2, 8)
    _call(model, compiled)(x).sum().backward()
    twin(x).sum().backward()
    assert twin.gains[0].grad is None and model.gains[0].grad is None
    for param, other in zip(model.gains[1:], twin.gains[1:], strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), other.grad)
    assert isinstance(twin.gains[1:], nn.ParameterList)


def test_a_new_container_of_full_parameters(one_rank: None) -> None:
    """A new container of full parameters raises: it would silently train copies."""
    model = fully_shard(_Runs(lambda inner: nn.ParameterDict({"weight": inner[0].weight})))
    with pytest.raises(ValueError, match="Cannot assign non-leaf Tensor"):
        model()


def test_without_dynamos_shortcut(one_rank: None) -> None:
    """Without our patch, Dynamo finds parameters and submodules by itself."""
    model = _Runs(lambda inner: inner(inner[0].weight).sum())
    twin = copy.deepcopy(model)
    fully_shard(model)
    patches.uninstall()
    _call(model, True)().backward()
    twin().backward()
    torch.testing.assert_close(model.inner[0].weight.grad.full_tensor(), twin.inner[0].weight.grad)


class _Delta(nn.Module):
    def __init__(self, delta: Tensor):
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class _Adapted(nn.Module):
    """A layer with an adapter that each forward registers as a parametrization, as peft does for ``target_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.down, self.up = nn.Parameter(torch.randn(8, 1)), nn.Parameter(torch.randn(1, 8))

    def forward(self, x: Tensor) -> Tensor:
        parametrize.register_parametrization(self.base, "weight", _Delta(self.down @ self.up), unsafe=True)
        try:
            return self.base(x)
        finally:
            parametrize.remove_parametrizations(self.base, "weight", leave_parametrized=False)


@both_ways
def test_a_parametrization_for_the_time_of_a_forward(compiled: bool, one_rank: None) -> None:
    model, reference = (nn.Sequential(_Adapted(), _Adapted()).double() for _ in range(2))
    reference.load_state_dict(model.state_dict())
    x = torch.randn(3, 8, dtype=torch.float64)
    for layer in (*model, *reference):
        layer.base.requires_grad_(False)
    fully_shard(model[0])
    fully_shard(model)
    call = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    for _ in range(2):
        call(x).square().sum().backward()
        reference(x).square().sum().backward()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    assert_same_gradients(model, reference)


_QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "is_a_parameter": lambda inner: isinstance(inner[0].weight, nn.Parameter) and torch.is_tensor(inner[0].weight),
    "is_itself": lambda inner: inner[0].weight is inner[0].weight and id(inner[0].bias) == id(inner[0].bias),
    "is_the_tied_one": lambda inner: inner[0].weight is inner[2].weight,
    "is_another": lambda inner: inner[0].bias is not inner[2].bias,
    "is_in_a_list": lambda inner: [param is inner[2].bias for param in inner.parameters()] == [False, False, True],
    "is_in_a_set": lambda inner: len({id(param) for param in inner.parameters()} | {id(inner[2].weight)}) == 3,
    "is_a_key": lambda inner: {inner[0].weight: True}.get(inner[2].weight, False),
    "all_are_parameters": lambda inner: all(isinstance(param, nn.Parameter) for _, param in inner.named_parameters()),
}


@pytest.mark.parametrize("unit", ["", "inner", "inner.0"])
@both_ways
@pytest.mark.parametrize("question", _QUESTIONS)
def test_asks_what_a_parameter_is(question: str, compiled: bool, unit: str, one_rank: None) -> None:
    def answer(inner: Any) -> Tensor:
        return inner(torch.ones(2, 8)).square().sum() * (3 if _QUESTIONS[question](inner) else 2)

    model = _Runs(answer)
    model.inner.append(nn.Linear(8, 8))
    model.inner[2].weight = model.inner[0].weight
    expected = model()
    if unit:
        fully_shard(model.get_submodule(unit))
    fully_shard(model)
    torch.testing.assert_close(_call(model, compiled)(), expected)


class _Asks(nn.Module):
    """A module that asks for parameters, of its own and of a module inside, by ``hasattr`` and ``getattr``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.scale = nn.Parameter(torch.tensor([2.0]))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        if hasattr(self, "scale"):
            y = y * getattr(self, "scale", 1.0)
        if getattr(self.inner, "bias", None) is not None or hasattr(self, "missing"):
            y = y * 3
        return y * 5 if hasattr(self.inner, "weight") else y


@pytest.mark.parametrize("is_unit", [False, True], ids=["root", "unit"])
@both_ways
def test_asks_whether_there_is_a_parameter(compiled: bool, is_unit: bool, one_rank: None) -> None:
    model, x = _Asks(), torch.randn(3, 8)
    expected = 10 * x @ model.inner.weight.detach().t()
    if is_unit:
        fully_shard(model.inner)
    fully_shard(model)
    for _ in range(2):
        torch.testing.assert_close(_call(model, compiled)(x), expected)


# --- Reads outside of a forward -------------------------------------------------------------------


def test_reads_after_unshard(one_rank: None) -> None:
    """Reads by name give full tensors. Iteration gives the registered DTensors, for optimizers and state dicts."""
    model = fully_shard(_Runs(lambda inner: inner[0].weight.sum()))
    linear = model.inner[0]
    model.unshard()
    for way in ("attribute", "item", "get_parameter", "get_parameter_of_a_container"):
        assert not isinstance(_WAYS[way](model.inner), DTensor), way
    for way in ("parameters", "named_parameters", "items", "values"):
        assert isinstance(_WAYS[way](model.inner), DTensor), way
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.reshard()
    assert isinstance(linear.weight, DTensor)


def test_iteration_while_gathered_parameters_are_kept(one_rank: None) -> None:
    """Iteration between forward and backward gives DTensors. FSDP2 shows full tensors there."""
    model = fully_shard(_Runs(lambda inner: inner[0].weight.sum()), reshard_after_forward=False)
    loss = model()
    assert all(isinstance(param, DTensor) for param in model.parameters())
    loss.backward()


def test_as_a_mapping(fake_ranks: None) -> None:
    model = fully_shard(nn.Linear(8, 8, bias=False), ignored_params=set())
    params: Any = model._parameters
    assert isinstance(params, ShardedParameters)
    assert "weight" in params and "other" not in params and len(params) == 2 and list(params) == ["weight", "bias"]
    assert params["bias"] is None and params.get("other") is None and list(params.keys()) == ["weight", "bias"]
    with pytest.raises(KeyError):
        params["other"]
    assert set(dir(model)) >= {"weight", "bias"}


def test_deleting_a_parameter_and_putting_it_back(one_rank: None) -> None:
    model = fully_shard(_Runs(lambda inner: inner[0].bias.sum()))
    linear = model.inner[0]
    bias = linear.bias
    del linear.bias
    assert not hasattr(linear, "bias") and "bias" not in dict(linear.named_parameters())
    with pytest.raises(AttributeError, match="bias"):
        model()
    linear._parameters["bias"] = bias
    for compiled in (False, True):
        _call(model, compiled)().backward()


# --- Code that replaces parameters ----------------------------------------------------------------


@pytest.mark.parametrize("unsharded", [False, True])
def test_functional_call_puts_back_what_it_found(unsharded: bool, one_rank: None) -> None:
    model = fully_shard(nn.Linear(8, 8))
    weight, x = model.weight, torch.randn(2, 8)
    if unsharded:
        model.unshard()
    given = {"weight": torch.zeros(8, 8), "bias": torch.ones(8)}
    torch.testing.assert_close(functional_call(model, given, (x,)), torch.ones(2, 8))
    model.reshard()
    assert model.weight is weight and model._parameters["weight"] is weight
    model(x).sum().backward()
    assert weight.grad is not None


def test_functional_call_on_the_meta_device(one_rank: None) -> None:
    """``functional_call`` also puts back a parameter without memory."""
    with torch.device("meta"):
        model = fully_shard(nn.Linear(8, 8))
    weight = model.weight
    given = {"weight": torch.zeros(8, 8), "bias": torch.ones(8)}
    torch.testing.assert_close(functional_call(model, given, (torch.randn(2, 8),)), torch.ones(2, 8))
    assert model.weight is weight and model._parameters["weight"] is weight
    with pytest.raises(RuntimeError, match="meta device"):
        model(torch.randn(2, 8))


@both_ways
@pytest.mark.parametrize("is_unit", [False, True])
def test_functional_call_inside_of_a_forward(is_unit: bool, compiled: bool, one_rank: None) -> None:
    """``functional_call`` replaces a full parameter there, and puts it back. It must not outlive the forward."""
    model = _Runs(lambda inner: functional_call(inner, {"0.weight": 2 * inner[0].weight}, (torch.ones(1, 8),)).sum())
    twin = copy.deepcopy(model)
    if is_unit:
        fully_shard(model.inner)
    fully_shard(model)
    for _ in range(2):
        model.zero_grad()
        twin.zero_grad()
        loss, expected = _call(model, compiled)(), twin()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        assert isinstance(model.inner[0].weight, DTensor)
        torch.testing.assert_close(model.inner[0].weight.grad.full_tensor(), twin.inner[0].weight.grad)


@pytest.mark.parametrize("is_unit", [False, True])
def test_parametrizations_are_merged(is_unit: bool, one_rank: None) -> None:
    """Parametrizations can be merged after ``unshard()``, as FSDP2's users do for inference."""
    model = nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4))
    x = torch.randn(2, 8)
    expected = model(x).detach()
    if is_unit:
        fully_shard(model[1])
    fully_shard(model)
    model.unshard()
    parametrize.remove_parametrizations(model[0], "weight", leave_parametrized=True)
    model.reshard()
    assert type(model[0]) is nn.Linear and not parametrize.is_parametrized(model)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected)


# --- Beside FSDP2 ---------------------------------------------------------------------------------


class Penalised(nn.Module):
    """A block whose forward reads its parameters by attribute, by name, by iteration and by slices."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)
        self.gains = nn.ParameterList(torch.empty(dim) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(torch.tanh(self.up(x)), self.down._parameters["weight"], self.get_parameter("down.bias"))
        for gain in self.gains[1:]:
            y = y * gain
        return x + y + self.gains[0] + sum(param.square().mean() for param in self.parameters())


def _initialise(module: nn.Module) -> None:
    """Initialise the modules of exactly the types that are named, as torchtitan and transformers do."""
    if type(module) in (nn.Linear, nn.ParameterList):
        for param in module.parameters(recurse=False):
            full = torch.sin(torch.arange(param.numel(), dtype=param.dtype)).view(param.shape)
            assert isinstance(param, DTensor)
            with torch.no_grad():
                param.copy_(distribute_tensor(full, param.device_mesh, param.placements))


def train_by_exact_types(mesh_shape: tuple[int, ...], options: dict[str, str] | None) -> None:
    """Train a model that comes from the meta device, with groups of the optimizer by exact type, as FSDP2."""
    mesh, generator = device_mesh(mesh_shape), torch.Generator().manual_seed(dist.get_rank())
    results = []
    batches = torch.randn(3, 5, 8, generator=generator, dtype=torch.float64)
    for shard in (fully_shard, torch.distributed.fsdp.fully_shard):
        with torch.device("meta"):
            model = nn.Sequential(*(Penalised(8) for _ in range(3)), nn.Linear(8, 4)).double()
        for block in (*model[:3], model):
            shard(block, mesh=mesh)
        model.to_empty(device="cpu")
        model.apply(_initialise)
        decayed = [param for module in model.modules() if type(module) is nn.Linear for param in module.parameters()]
        others = [param for module in model.modules() if type(module) is nn.ParameterList for param in module.parameters()]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        # This eps is explained in tests/common/parity.py.
        optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        is_ours = shard is fully_shard
        forward = torch.compile(model, backend=fsdp_backend, options=options) if options and is_ours else model
        for batch in batches:
            forward(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.full_tensor() for param in model.parameters()])
    torch.testing.assert_close(*results, rtol=1e-9, atol=1e-12)


def merge_parametrizations(mesh_shape: tuple[int, ...], options: dict[str, str] | None) -> None:
    """Merge parametrizations after ``unshard()`` and after a step, as those of whole parameters."""
    torch.manual_seed(0)
    model: Any
    model, twin = (nn.Sequential(parametrizations.weight_norm(nn.Linear(8, 8)), nn.Linear(8, 4)).double() for _ in range(2))
    twin.load_state_dict(model.state_dict())
    for module in (model[1], model):
        fully_shard(module, mesh=device_mesh(mesh_shape))
    x = torch.randn(2, 8, dtype=torch.float64)
    for each in (torch.compile(model, backend=fsdp_backend, options=options) if options else model, twin):
        each(x).square().mean().backward()
    for each in (model, twin):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    model.unshard()
    for each in (model, twin):
        parametrize.remove_parametrizations(each[0], "weight", leave_parametrized=True)
    model.reshard()
    compiled = torch.compile(model, backend=fsdp_backend, options=options) if options else model
    with torch.no_grad():
        torch.testing.assert_close(compiled(x), twin(x))


@pytest.mark.parametrize("job", [train_by_exact_types, merge_parametrizations])
@pytest.mark.parametrize("mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.night)], ids=["fsdp", "hsdp"])
@pytest.mark.parametrize("lowering", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_on_ranks(job: Any, mesh_shape: tuple[int, ...], lowering: str | None, rank_pools: RankPools) -> None:
    options = None if lowering is None else {"lowering": lowering}
    rank_pools[torch.Size(mesh_shape).numel()].run(job, mesh_shape=mesh_shape, options=options)


# --- Copies ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [copy.deepcopy, pickle.dumps], ids=["deepcopy", "pickle"])
def test_copies_are_refused(copies: Callable[[Any], Any], fake_ranks: None) -> None:
    model = fully_shard(models.MLP())
    with pytest.raises(NotImplementedError, match=r"head\.weight, head\.bias: .* cannot be copied or pickled"):
        copies(model.head)
