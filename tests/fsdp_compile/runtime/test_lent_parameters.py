"""Writes of a forward to parameters: of other units, as to the averaged teacher of MoCo and BYOL, and of its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fsdp_backend, fully_shard
from tests.common.distributed import RankPools, device_mesh

_EAGER_LOWERING: dict[str, Any] = {"backend": fsdp_backend, "options": {"lowering": "aot_eager"}}


def _average_in_place(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.mul_(0.9).add_(new, alpha=0.1)


def _average_data(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data.mul_(0.9).add_(new.data, alpha=0.1)


def _replace_data(teacher: nn.Module, student: nn.Module) -> None:
    for old, new in zip(teacher.parameters(), student.parameters(), strict=True):
        old.data = 0.9 * old.data + 0.1 * new.data


def _average_lists(teacher: nn.Module, student: nn.Module) -> None:
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


def _load(teacher: nn.Module, student: nn.Module) -> None:
    teacher.load_state_dict({name: 0.9 * value for name, value in student.state_dict().items()})


def _exchange_rows(teacher: nn.Module, _student: nn.Module) -> None:
    for old in teacher.parameters():
        old.data.copy_(old.data.flip(0))


_WRITES = [_average_in_place, _average_data, _replace_data, _average_lists, _load, _exchange_rows]
Write = Callable[[nn.Module, nn.Module], None]


class _Taught(nn.Module):
    """A student, and a teacher that each forward changes ahead of its use, and again after it."""

    def __init__(self, write: Write, in_graph: bool = False):
        super().__init__()
        # One of two ranks holds no row of the last layer's parameters.
        self.student, self.teacher = (nn.Sequential(nn.Linear(8, 7), nn.Tanh(), nn.Linear(7, 1)) for _ in range(2))
        self.teacher.requires_grad_(False)
        self.write = write if in_graph else torch.compiler.disable(write)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.write(self.teacher, self.student)
            target = self.teacher(x)
            self.write(self.teacher, self.student)
        return (self.student(x) - target).square().sum()


def _train(model: Any, forward: Callable[..., Tensor], batches: Tensor) -> list[Tensor]:
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for batch in batches:
        forward(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() if hasattr(param, "full_tensor") else param.detach() for param in model.parameters()]


def train_taught(writes: list[Write], compiled: bool, reshard: bool) -> None:
    """Train taught models, as those with whole parameters."""
    for write in writes:
        torch.manual_seed(0)
        model: Any = _Taught(write).double()
        batches = torch.randn(3, 4, 8, dtype=torch.float64)
        twin = copy.deepcopy(model)
        for module in (model.student, model.teacher, model):
            fully_shard(module, mesh=device_mesh((torch.distributed.get_world_size(),)), reshard_after_forward=reshard)
        forward = torch.compile(model, **_EAGER_LOWERING) if compiled else model
        torch.testing.assert_close(_train(model, forward, batches), _train(twin, twin, batches), msg=write.__name__)
        assert not model._fsdp_unit.scope.lent


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
def test_writes_to_another_unit(compiled: bool, reshard: bool, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_taught, writes=_WRITES, compiled=compiled, reshard=reshard)


def test_a_compiled_write_to_another_unit(one_rank: None) -> None:
    for write in _WRITES[:2] + _WRITES[3:4]:
        torch._dynamo.reset()
        model = _Taught(write, in_graph=True)
        for module in (model.student, model.teacher, model):
            fully_shard(module)
        with pytest.raises(Exception, match=r"writes to parameter teacher\.0\.weight, whose unit does not run"):
            torch.compile(model, **_EAGER_LOWERING)(torch.randn(4, 8))


def test_a_write_that_is_less_precise_than_the_parameter(one_rank: None) -> None:
    model = _Taught(_average_in_place)
    for module in (model.student, model.teacher, model):
        fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    with pytest.raises(RuntimeError, match=r"wrote to parameter teacher\.\d\.\w+, whose unit was not running"):
        model(torch.randn(4, 8))


# --- To parameters of its own unit ----------------------------------------------------------------


class _Bounded(nn.Linear):
    """A layer that bounds the norms of its rows before it uses them."""

    def __init__(self, how: str):
        super().__init__(8, 8)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "replaced":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.5)
        else:
            with torch.no_grad():
                self.weight.copy_(torch.renorm(self.weight, 2, 0, 0.5))
        return super().forward(x)


@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("how", ["replaced", "copied"])
def test_a_write_to_its_own_unit(how: str, compiled: bool, reshard: bool, one_rank: None) -> None:
    """Forward and backward compute with what was written, also where backward gathers the unit again."""
    torch.manual_seed(0)
    model = nn.Sequential(_Bounded(how), nn.Tanh(), _Bounded(how)).double()
    twin, x = copy.deepcopy(model), torch.randn(4, 8, dtype=torch.float64)
    for module in (model[0], model[2], model):
        fully_shard(module, reshard_after_forward=reshard)
    loss = (torch.compile(model, **_EAGER_LOWERING) if compiled else model)(x).square().sum()
    expected = twin(x).square().sum()
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for param, whole in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


# --- A custom function that computes with parameters again ----------------------------------------


class _Adjoint(torch.autograd.Function):
    """The gradients of some steps of Euler's method by its adjoint, as of torchdiffeq."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, saves: bool, y: Tensor, *params: Tensor) -> Tensor:
        for _ in range(3):
            y = y + 0.1 * field(y)
        ctx.field, ctx.params = field, params
        ctx.save_for_backward(y, *(params if saves else ()))
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        y, *params = ctx.saved_tensors
        params = params or ctx.params
        adjoint, found = grads[0], [torch.zeros_like(param) for param in params]
        for _ in range(3):
            with torch.enable_grad():
                y = y.detach().requires_grad_()
                slope = ctx.field(y)
                change, *of_params = torch.autograd.grad(slope, (y, *params), adjoint, allow_unused=True)
            y, adjoint = y - 0.1 * slope, adjoint + 0.1 * change
            found = [total if grad is None else total + 0.1 * grad for total, grad in zip(found, of_params, strict=True)]
        return None, None, adjoint, *found


class _Flow(nn.Module):
    def __init__(self, saves: bool, solve: Callable[..., Tensor]):
        super().__init__()
        self.field = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.saves, self.solve = saves, solve

    def forward(self, x: Tensor) -> Tensor:
        x = self.solve(self.field, self.saves, x, *self.field.parameters())
        return self.solve(self.field, self.saves, x, *self.field.parameters())


def _sharded_flow(
    units: str, reshard: bool = True, saves: bool = True, solve: Callable[..., Tensor] = _Adjoint.apply
) -> tuple[Any, _Flow]:
    torch.manual_seed(0)
    model = _Flow(saves, solve).double()
    twin = copy.deepcopy(model)
    chosen = {"root": [], "field": [model.field], "layers": [model.field[0], model.field[2]]}[units]
    for module in (*chosen, model):
        fully_shard(module, reshard_after_forward=reshard)
    return model, twin


@pytest.mark.parametrize("saves", [True, False], ids=["saved", "referenced"])
@pytest.mark.parametrize("reshard", [True, False], ids=["reshard", "keep"])
@pytest.mark.parametrize("units", ["root", "field", "layers"])
def test_a_function_that_computes_with_parameters_again(units: str, reshard: bool, saves: bool, one_rank: None) -> None:
    """Two calls in one graph, and a second graph that waits for its backward, find their own gradients."""
    model, twin = _sharded_flow(units, reshard, saves)
    batches = torch.randn(2, 4, 8, dtype=torch.float64)
    for each in (model, twin):
        losses = [each(batch).square().sum() for batch in batches]
        for loss in losses:
            loss.backward()
    for param, whole in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), whole.grad)


@pytest.mark.parametrize("units", ["root", "field"])
def test_a_function_that_computes_with_parameters_of_a_graph_again(units: str, one_rank: None) -> None:
    model, _ = _sharded_flow(units)
    loss = torch.compile(model, **_EAGER_LOWERING)(torch.randn(4, 8, dtype=torch.float64)).square().sum()
    with pytest.raises(NotImplementedError, match=r"_AdjointBackward computes with parameter field\.0\.weight again"):
        loss.backward()
