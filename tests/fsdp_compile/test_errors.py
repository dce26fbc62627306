"""Errors of the library: the message names the culprit and the remedy, and nothing is half-applied.

All tests run in this process. Those that compute use a Gloo world of one rank. The others use the ``fake`` process
group, with any number of ranks.
"""

from __future__ import annotations

import contextlib
import copy
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from fsdp_compile import FSDPModule, OffloadPolicy, fsdp_backend, fully_shard
from fsdp_compile.compiler.backend import _warn_once_that_nothing_is_sharded
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.versions import NewerPolicy

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


@pytest.fixture
def warn_anew() -> None:
    """Forgotten warnings: the process has not yet warned of models without sharding."""
    _warn_once_that_nothing_is_sharded.cache_clear()


def _mesh(*shape: int) -> DeviceMesh:
    names = {1: ("shard",), 2: ("replicate", "shard"), 3: ("replicate", "shard", "tensor")}
    shape = shape or (dist.get_world_size(),)
    return init_device_mesh("cpu", shape, mesh_dim_names=names[len(shape)])


def _state(model: nn.Module) -> list[Any]:
    """Return all that sharding could have left on a model: classes, parameters, attributes, hooks."""
    found: list[Any] = []
    for name, module in model.named_modules():
        found += [name, module, type(module), sorted(module.__dict__), type(module).forward]
        found += [len(value) for key, value in sorted(module.__dict__.items()) if key.endswith("_hooks")]
        for key, parameter in module._parameters.items():
            found += [key, parameter]
            if parameter is not None:
                found += [parameter.requires_grad, parameter.shape, sorted(parameter.__dict__)]
    return found


def _same(before: list[Any], after: list[Any]) -> bool:
    # Compare objects by identity: parameters compare element by element.
    return len(before) == len(after) and all(
        one is other or (not isinstance(one, (Tensor, nn.Module)) and one == other)
        for one, other in zip(before, after, strict=True)
    )


@contextlib.contextmanager
def _refused(
    model: nn.Module, kind: type[Exception] | tuple[type[Exception], ...], match: str, shardable: bool = True
) -> Iterator[None]:
    """Check that the block raises and leaves the model as it was, and (``shardable``) that the model can still be sharded."""
    before = _state(model)
    with pytest.raises(kind, match=match):
        yield
    assert _same(before, _state(model)), "the call that failed changed the model"
    if shardable:
        fully_shard(model, mesh=_mesh())
        assert isinstance(model, FSDPModule)
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())


def _model() -> nn.Module:
    return models.MLP()


# --- Arguments of fully_shard ---------------------------------------------------------------------


def test_mesh_of_three_dimensions(fake_ranks: None) -> None:
    model = _model()
    with _refused(model, ValueError, r"1-D mesh .* 2-D mesh .* 3 dimensions.*slice"):
        fully_shard(model, mesh=_mesh(2, 2, 2))


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn], ids=str)
def test_frozen_parameters_of_other_kinds_of_dtypes(dtype: torch.dtype, one_rank: None) -> None:
    model = _model()
    model.codes = nn.Parameter(torch.ones(4, 4).to(dtype), requires_grad=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    model(torch.randn(3, 8)).sum().backward()
    assert model.codes.dtype == dtype and model.codes.grad is None
    assert all(parameter.grad is not None for parameter in model.head.parameters())


def test_uneven_columns(fake_ranks: None) -> None:
    model = models.MLP(dim=8, hidden=12)
    with _refused(
        model,
        NotImplementedError,
        r"blocks\.0\.down\.weight of shape \(8, 12\) cannot be sharded evenly as (Shard\(dim=1\)|S\(1\)) "
        r"over 8 ranks\. Only Shard\(0\) may be uneven",
    ):
        fully_shard(
            model,
            mesh=_mesh(),
            shard_placement_fn=lambda parameter: Shard(1) if parameter.ndim == 2 else None,
        )


@pytest.mark.parametrize(
    ("placement", "match"),
    [
        (Replicate(), r"must return a Shard or None, but returned Replicate\(\) for parameter weight"),
        (0, r"must return a Shard or None, but returned 0 for parameter weight"),
        (Shard(2), r"returned (Shard\(dim=2\)|S\(2\)) for parameter weight of shape \(16, 8\)"),
        (Shard(-3), r"returned (Shard\(dim=-3\)|S\(-3\)) for parameter weight of shape \(16, 8\)"),
    ],
    ids=str,
)
def test_bad_placement(placement: Any, match: str, fake_ranks: None) -> None:
    model = nn.Linear(8, 16)
    with _refused(model, ValueError, match):
        fully_shard(model, mesh=_mesh(), shard_placement_fn=lambda parameter: placement)


def test_placement_function_that_raises(fake_ranks: None) -> None:
    def placement(parameter: nn.Parameter) -> Shard | None:
        if parameter.ndim == 1:
            raise LookupError("no rule for it")
        return None

    model = _model()
    with _refused(model, LookupError, "no rule for it"):
        fully_shard(model, mesh=_mesh(), shard_placement_fn=placement)


@pytest.mark.parametrize("size", [3, 0, -2, 16, "2"])
def test_reshard_after_forward_that_does_not_divide(size: Any, fake_ranks: None) -> None:
    model = _model()
    with _refused(model, ValueError, rf"reshard_after_forward={size!r} must be a factor .* 8"):
        fully_shard(model, mesh=_mesh(), reshard_after_forward=size)


def test_sharding_twice(fake_ranks: None) -> None:
    model = _model()
    fully_shard(model.blocks[0], mesh=_mesh())
    with _refused(model, ValueError, r"FSDPBlock is sharded already\. Call fully_shard once"):
        fully_shard(model.blocks[0], mesh=_mesh())


def test_outer_before_inner(fake_ranks: None) -> None:
    model = _model()
    fully_shard(model, mesh=_mesh())
    with _refused(model, ValueError, r"up\.weight is sharded already.*inner modules first", shardable=False):
        fully_shard(model.blocks[0], mesh=_mesh())
    with _refused(model, ValueError, r"weight is sharded already.*inner modules first", shardable=False):
        fully_shard(model.head, mesh=_mesh())


def test_list_whose_modules_nest(fake_ranks: None) -> None:
    model = _model()
    with _refused(model, ValueError, r"modules nest: Linear is 'up' of Block"):
        fully_shard([model.head, model.blocks[0], model.blocks[0].up], mesh=_mesh())


def test_module_twice_in_a_list(fake_ranks: None) -> None:
    model = _model()
    with _refused(model, ValueError, r"Linear.*(twice|once)"):
        fully_shard([model.head, model.head], mesh=_mesh())


def test_empty_list(fake_ranks: None) -> None:
    with pytest.raises(ValueError, match="empty list of modules"):
        fully_shard([], mesh=_mesh())


@pytest.mark.parametrize("culprit", [torch.zeros(2), None, "head", nn.Linear], ids=lambda value: str(value)[:8])
def test_not_a_module(culprit: Any, fake_ranks: None) -> None:
    with pytest.raises(TypeError, match=rf"a module or a list of modules, but got {type(culprit).__name__}"):
        fully_shard(culprit, mesh=_mesh())
    model = _model()
    with _refused(model, TypeError, rf"but got {type(culprit).__name__}"):
        fully_shard([model.head, culprit], mesh=_mesh())


def test_ignored_params_by_name(fake_ranks: None) -> None:
    model = _model()
    culprits: Any = {model.head.bias, "head.weight"}
    with _refused(model, TypeError, r"ignored_params .* has str \('head\.weight'\)\. Pass the parameters"):
        fully_shard(model, mesh=_mesh(), ignored_params=culprits)


def test_no_process_group() -> None:
    assert not dist.is_initialized()
    model = _model()
    with _refused(model, RuntimeError, r"init_process_group\(\) first .*or pass mesh=", shardable=False):
        fully_shard(model)


def test_default_mesh_is_all_ranks(fake_ranks: None) -> None:
    weight = fully_shard(nn.Linear(8, 16)).weight
    assert isinstance(weight, DTensor)
    assert weight.device_mesh.mesh.tolist() == list(range(8))


@pytest.mark.parametrize("kind", [nn.ModuleList, nn.ModuleDict])
def test_container_without_forward(kind: type[nn.Module], fake_ranks: None) -> None:
    model = _model()
    container = model.blocks if kind is nn.ModuleList else nn.ModuleDict({"a": model.head})
    with _refused(model, ValueError, rf"cannot shard a {kind.__name__}, which has no forward\..*pass them as a list"):
        fully_shard(container, mesh=_mesh())


def test_container_with_forward(fake_ranks: None) -> None:
    class Stack(nn.ModuleList):
        def forward(self, x: Tensor) -> Tensor:
            for layer in self:
                x = layer(x)
            return x

    stack = Stack([nn.Linear(8, 8), nn.Linear(8, 8)])
    fully_shard(stack, mesh=_mesh())
    assert type(stack).__name__ == "FSDPStack"
    assert stack(torch.zeros(2, 8)).shape == (2, 8)


def test_offload_policy(fake_ranks: None) -> None:
    model = _model()
    with _refused(model, TypeError, r"takes a CPUOffloadPolicy, a PartialCPUOffloadPolicy or an OffloadPolicy, not True"):
        fully_shard(model, mesh=_mesh(), offload_policy=True)
    fully_shard(nn.Linear(8, 8), mesh=_mesh(), offload_policy=OffloadPolicy())


def test_dtype_of_single_parameters(fake_ranks: None) -> None:
    model = _model()
    policy = NewerPolicy(torch.bfloat16, param_dtype_override_fn=lambda param: torch.float16 if param.ndim == 1 else None)
    with _refused(
        model, ValueError, r"returned torch\.float16 for parameter bias.*parameter's dtype, torch\.float32;.*bfloat16"
    ):
        fully_shard(model, mesh=_mesh(), mp_policy=policy)


@pytest.mark.parametrize("mesh_of_param", ["the same mesh", "another mesh"])
def test_dtensor_on_a_mesh_that_is_no_other_slice(mesh_of_param: str, fake_ranks: None) -> None:
    model = _model()
    both = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    layout = {"the same mesh": both["dp"], "another mesh": init_device_mesh("cpu", (8,))}[mesh_of_param]
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), layout, [Shard(0)]))
    before = _state(model)
    with pytest.raises(ValueError, match=r"head\.weight is a DTensor on .* another slice of the mesh.*ignored_params"):
        fully_shard(model, mesh=both["dp"])
    assert _same(before, _state(model))
    # The remedies that the message names.
    fully_shard(model, mesh=both["dp"], ignored_params={model.head.weight})
    assert isinstance(model.head.bias, DTensor) and type(model.head) is nn.Linear
    model = _model()
    model.head.weight = nn.Parameter(distribute_tensor(model.head.weight.detach(), both["tp"], [Shard(0)]))
    fully_shard(model, mesh=both["dp"])
    assert model.head.weight.device_mesh.mesh_dim_names == ("dp", "tp")


def test_dtensor_of_parts_of_a_sum(fake_ranks: None) -> None:
    model = _model()
    both = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    plain = model.head.weight.detach()
    model.head.weight = nn.Parameter(DTensor.from_local(plain, both["tp"], [Partial()], run_check=False))
    before = _state(model)
    with pytest.raises(ValueError, match=r"head\.weight is a DTensor whose ranks hold parts of a sum"):
        fully_shard(model, mesh=both["dp"])
    assert _same(before, _state(model))


def test_parameter_that_is_not_contiguous(fake_ranks: None) -> None:
    model = _model()
    model.head.weight = nn.Parameter(torch.zeros(8, 4).t())
    before = _state(model)
    with pytest.raises(NotImplementedError, match=r"head\.weight is not contiguous \(stride \(1, 4\)\)"):
        fully_shard(model, mesh=_mesh())
    assert _same(before, _state(model))
    model.head.weight = nn.Parameter(model.head.weight.detach().contiguous())
    fully_shard(model, mesh=_mesh())


def test_lazy_module(fake_ranks: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(4))
    with pytest.raises(ValueError, match=r"1\.weight has no shape yet, as LazyLinear is lazy\. Call the model once"):
        fully_shard(model, mesh=_mesh())
    with torch.no_grad():
        model(torch.zeros(2, 4))
    fully_shard(model, mesh=_mesh())(torch.zeros(2, 4)).sum().backward()


def test_failed_list_leaves_all_its_modules(fake_ranks: None) -> None:
    """Modules before and after the culprit in the list stay untouched."""
    model = _model()
    model.head.to("meta")
    before = _state(model)
    with pytest.raises(ValueError, match=r"all be on the meta device or none, but 1\.weight is on it and 0\.up\.weight is not"):
        fully_shard([model.blocks[0], model.head], mesh=_mesh())
    assert _same(before, _state(model))
    fully_shard(model.blocks[0], mesh=_mesh())
    fully_shard(model.head, mesh=_mesh())
    fully_shard(model, mesh=_mesh())


# --- The state of a sharded model -----------------------------------------------------------------


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_meta_parameter_in_forward(compiled: bool, one_rank: None, warn_anew: None) -> None:
    with torch.device("meta"):
        model = _model()
    for block in model.blocks:
        fully_shard(block, mesh=_mesh())
    fully_shard(model, mesh=_mesh())
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight is on the meta device.*to_empty"):
        forward(torch.zeros(2, 8))
    # After the remedy, the same model works, compiled or not.
    model.to_empty(device="cpu")
    twin = _model()
    with torch.no_grad():
        for parameter, other in zip(model.parameters(), twin.parameters(), strict=True):
            parameter.fill_(0.1)
            other.fill_(0.1)
    with _warnings_of_the_backend() as messages, capture() as captured:
        torch.testing.assert_close(forward(torch.zeros(2, 8)), twin(torch.zeros(2, 8)))
    assert not messages
    # Dynamo compiles the model's frames, not the eager kernels of the library's operators.
    for graph in captured.forward:
        assert "shard_" in graph.readable(), graph.readable()


def test_meta_parameter_of_the_root_only(one_rank: None) -> None:
    """The error names the parameter at any depth of the model."""
    model = _model()
    model.head.to("meta")
    for part in (*model.blocks, model.head):
        fully_shard(part, mesh=_mesh())
    with pytest.raises(RuntimeError, match=r"weight is on the meta device"):
        model(torch.zeros(2, 8))
    fully_shard(model, mesh=_mesh())
    with pytest.raises(RuntimeError, match=r"head\.weight is on the meta device"):
        model(torch.zeros(2, 8))


def test_partly_meta_unit(one_rank: None) -> None:
    """A unit cannot be partly on the meta device. The error names a parameter that differs from the others."""
    model = _model()
    model.head.to("meta")
    with _refused(model, ValueError, r"(head\.(weight|bias).*meta|meta.*head\.(weight|bias))", shardable=False):
        fully_shard(model, mesh=_mesh())


def test_deepcopy(fake_ranks: None) -> None:
    model = _model()
    fully_shard(model.blocks[0], mesh=_mesh())
    # A unit, a module that owns shards without being a unit, and a model that is not sharded itself.
    for culprit, name in (
        (model.blocks[0], "FSDPBlock holds"),
        (model.blocks[0].up, "up.weight, up.bias: a module that holds"),
        (model, "FSDPBlock holds"),
    ):
        with _refused(model, NotImplementedError, rf"{name} sharded parameters.*before sharding", shardable=False):
            copy.deepcopy(culprit)


def _shard_all(model: nn.Module) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, mesh=_mesh())
    return fully_shard(model, mesh=_mesh())


def test_assigning_a_full_state_dict(one_rank: None) -> None:
    model = _shard_all(_model())
    full = _model().state_dict()
    inputs = torch.randn(2, 8)
    expected = model(inputs)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    with _refused(model, (ValueError, RuntimeError), r"weight is sharded (.|\n)*set_model_state_dict", shardable=False):
        model.load_state_dict(full, assign=True)
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor), name
        assert torch.equal(parameter.to_local(), values[name].to_local()), name
    torch.testing.assert_close(model(inputs), expected, rtol=0, atol=0)
    # A valid load works afterwards.
    model.load_state_dict({name: value + 1 for name, value in values.items()}, assign=True)
    assert torch.equal(model.head.bias.to_local(), values["head.bias"].to_local() + 1)


def test_assigning_other_placements(fake_ranks: None) -> None:
    model = fully_shard(nn.Linear(8, 16), mesh=_mesh())
    other = fully_shard(nn.Linear(8, 16), mesh=_mesh(), shard_placement_fn=lambda p: Shard(p.ndim - 1))
    with _refused(model, (ValueError, RuntimeError), r"weight is sharded(.|\n)*not sharded alike", shardable=False):
        model.load_state_dict({"weight": other.weight, "bias": model.bias}, assign=True)


def test_copying_a_full_state_dict(one_rank: None) -> None:
    """torch refuses to copy plain tensors into DTensors, correctly; the model keeps its values."""
    model = _shard_all(_model())
    before = _state(model)
    with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
        model.load_state_dict(_model().state_dict())
    assert _same(before, _state(model))


class _Picky(models.MLP):
    """A model that refuses its input before, inside or after a unit, as ``where`` says."""

    where = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "before":
            raise ValueError("refused before")
        x = self.blocks[0](x)
        if self.where == "after":
            raise ValueError("refused after")
        return self.head(self.blocks[1](x) + self.bias)


class _PickyBlock(models.Block):
    where = ""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(x)
        if self.where == "inside":
            raise ValueError("refused inside")
        return x + self.down(torch.tanh(hidden))


def _picky() -> nn.Module:
    torch.manual_seed(0)
    model = _Picky()
    torch.manual_seed(0)
    model.blocks[0] = _PickyBlock(8, 16)
    return model


@pytest.mark.parametrize("where", ["before", "inside", "after"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_forward_that_raises_leaves_the_model_usable(compiled: bool, where: str, one_rank: None) -> None:
    plain = _picky()
    model = _shard_all(copy.deepcopy(plain))
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    inputs = torch.randn(2, 8)

    def set_where(value: str) -> None:
        model.where = value
        model.blocks[0].where = value

    for warm in (False, True):
        set_where(where)
        with pytest.raises(ValueError, match=f"refused {where}"):
            forward(inputs)
        # Parameters are shards outside of a forward, and full tensors in the next one.
        assert isinstance(model.head.weight, DTensor) and isinstance(model.blocks[0].up.weight, DTensor)
        set_where("")
        if not warm:
            plain.zero_grad()
            model.zero_grad()
        output, expected = forward(inputs), plain(inputs)
        torch.testing.assert_close(output, expected)
        output.sum().backward()
        expected.sum().backward()
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert isinstance(ours.grad, DTensor)
            torch.testing.assert_close(ours.grad.to_local(), theirs.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_wrong_input_leaves_the_model_usable(compiled: bool, one_rank: None) -> None:
    model = _shard_all(_model())
    forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
    with pytest.raises(RuntimeError, match=r"2, 7|2x7"):
        forward(torch.zeros(2, 7))
    assert isinstance(model.head.weight, DTensor)
    assert forward(torch.zeros(2, 8)).shape == (2, 4)


def test_unregistered_forward_method(fake_ranks: None) -> None:
    from fsdp_compile import register_fsdp_forward_method

    model = fully_shard(_model(), mesh=_mesh())
    with pytest.raises(AttributeError, match="FSDPMLP has no method 'generate' to register"):
        register_fsdp_forward_method(model, "generate")


# --- The backend ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"options": {"lowring": "inductor"}}, r"no option 'lowring'; it has: lowering"),
        (
            {"options": {"lowering": "tvm"}},
            r"options\['lowering'\] must be one of .*inductor.*aot_eager.*'tvm'",
        ),
        (
            {"options": {"disable_passes": ["bucket"]}},
            r"options\['disable_passes'\] must be a list of passes .*fold_layers, schedule, not \['bucket'\]",
        ),
        ({"options": {"disable_passes": "schedule"}}, r"must be a list of passes .*not 'schedule'"),
        ({"options": {"cudagraphs": 1}}, r"options\['cudagraphs'\] must be True or False, not 1"),
        ({"mode": "fastest"}, r"There is no mode='fastest'; there are: default"),
    ],
    ids=["option", "lowering", "required pass", "no list of passes", "cudagraphs", "mode"],
)
@pytest.mark.parametrize("sharded", [True, False], ids=["sharded", "plain"])
def test_bad_arguments_of_compile(arguments: dict[str, Any], match: str, sharded: bool, one_rank: None) -> None:
    model = _shard_all(_model()) if sharded else _model()
    compiled = torch.compile(model, backend=fsdp_backend, **arguments)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=match):
        compiled(torch.zeros(2, 8))
    valid = torch.compile(model, **_EAGER_LOWERING)
    assert valid(torch.zeros(2, 8)).shape == (2, 4)


@contextlib.contextmanager
def _warnings_of_the_backend() -> Iterator[list[str]]:
    messages: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield messages
    messages += [str(entry.message) for entry in caught if "fsdp_backend" in str(entry.message)]


@pytest.mark.parametrize("lowering", ["inductor", "aot_eager"])
def test_plain_model_warns_once(lowering: str, one_rank: None, warn_anew: None) -> None:
    """Without ``fully_shard``, the backend warns once, and compiles the model as Inductor does."""
    model, inputs = nn.Linear(8, 4), torch.randn(2, 8)
    expected = torch.autograd.grad(model(inputs).sum(), list(model.parameters()))
    with _warnings_of_the_backend() as messages:
        for plain in (nn.Linear(8, 4, bias=False), model):
            compiled = torch.compile(plain, backend=fsdp_backend, options={"lowering": lowering})
            compiled(inputs).sum().backward()
            with torch.no_grad():
                compiled(inputs)
    assert len(messages) == 1, messages
    assert "Call fully_shard on the model" in messages[0]
    for parameter, gradient in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.inductor
def test_plain_model_compiles_as_with_inductor(one_rank: None) -> None:
    """The generated code is Inductor's. Nothing is captured, as the graph has no part of the library."""
    model, inputs = nn.Linear(8, 4), torch.randn(2, 8)
    with capture() as captured:
        _, by_fsdp = run_and_get_code(torch.compile(model, backend=fsdp_backend), inputs)
    torch._dynamo.reset()
    _, by_inductor = run_and_get_code(torch.compile(model), inputs)
    assert [_body(code) for code in by_fsdp] == [_body(code) for code in by_inductor]
    assert not captured.forward


def _body(code: str) -> str:
    """Return generated code without comments, as these say where it came from."""
    return "\n".join(line for line in code.splitlines() if not line.lstrip().startswith("#"))


class _ComputesBetween(nn.Module):
    """A model whose graph between the breaks has no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([models.Block(8, 16)])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        torch._dynamo.graph_break()
        x = torch.tanh(x) * 2
        torch._dynamo.graph_break()
        return self.head(x)


def test_piece_without_parameters_does_not_warn(one_rank: None, warn_anew: None) -> None:
    model = _shard_all(_ComputesBetween())
    compiled = torch.compile(model, **_EAGER_LOWERING)
    with _warnings_of_the_backend() as messages:
        compiled(torch.randn(2, 8)).sum().backward()
    assert not messages


def test_piece_with_ignored_parameters_does_not_warn(one_rank: None, warn_anew: None) -> None:
    """A graph of a sharded model may have no parameters except ignored ones."""
    model = _ComputesBetween()
    fully_shard(model.blocks[0], mesh=_mesh())
    fully_shard(model, mesh=_mesh(), ignored_params=set(model.head.parameters()))
    compiled = torch.compile(model, **_EAGER_LOWERING)
    with _warnings_of_the_backend() as messages:
        compiled(torch.randn(2, 8)).sum().backward()
    assert not messages


def test_backend_has_a_name() -> None:
    assert "fsdp" in torch._dynamo.list_backends()
    assert torch._dynamo.lookup_backend("fsdp") is fsdp_backend


@pytest.mark.inductor
def test_backend_by_name() -> None:
    """The name is found by entry point, in a process that has not imported the backend."""
    program = """
        import torch, torch.distributed as dist
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        from fsdp_compile import fully_shard
        assert "fsdp" in torch._dynamo.list_backends()
        model = fully_shard(torch.nn.Linear(4, 4))
        compiled = torch.compile(model, backend="fsdp", options={"lowering": "aot_eager"})
        compiled(torch.ones(2, 4)).sum().backward()
        assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
        print(type(model.weight.grad).__name__)
        dist.destroy_process_group()
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "DTensor"


def test_a_parameter_is_set_to_none(one_rank: None) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model, mesh=_mesh())
    removals: list[Callable[[], None]] = [
        lambda: setattr(model[1], "bias", None),
        lambda: model[1].register_parameter("bias", None),
        lambda: model[1]._parameters.__setitem__("bias", None),
    ]
    for remove in removals:
        with pytest.raises(ValueError, match=r"Parameter 1\.bias is sharded and cannot be removed.*before fully_shard"):
            remove()
    model(torch.ones(3, 4)).sum().backward()
    assert isinstance(model[1].bias.grad, DTensor)


@pytest.mark.parametrize("options", [None, _EAGER_LOWERING, {"backend": "aot_eager"}], ids=["eager", "ours", "another backend"])
def test_sparse_gradients(options: dict[str, Any] | None, one_rank: None) -> None:
    model = fully_shard(nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)), mesh=_mesh())
    forward = model if options is None else torch.compile(model, **options)
    # Compiled, the error is one of the backend's, in forward.
    with pytest.raises(Exception, match=r"The gradient of parameter 0\.weight is sparse.*sparse=False"):
        forward(torch.tensor([1, 2, 2])).sum().backward()
