"""Callers that do not use ``torch.compile(model, backend=fsdp_backend)`` and ``loss.backward()`` get right results or
errors."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from fsdp_compile import fsdp_backend, fully_shard
from passes.fx.torch_internals.core import top_saved_tensors_default_hooks
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import full
from tests.common.parity import (
    Case,
    Forward,
    Run,
    assert_same_gradients,
    compare,
    compiled_beside_whole,
    shard_units,
    train_reference,
    train_sharded,
)


def compile_whole(model: nn.Module, options: Any) -> Forward:
    return torch.compile(model, **options)


def aot_eager_backend(gm: Any, inputs: Any) -> Any:
    return fsdp_backend(gm, inputs, options={"lowering": "aot_eager"})


def compile_blocks(model: nn.Module, options: Any) -> Forward:
    """Compile each block, as in FSDP2's recipe."""
    for block in model.get_submodule("blocks").children():
        block.compile(**options)
    return model


def compile_in_place(model: nn.Module, options: Any) -> Forward:
    model.compile(**options)
    return model


OTHERS = Case("another backend", models.MLP, steps=2, accumulate=2)
HOW: dict[str, Callable[[nn.Module, Any], Forward]] = {
    "whole": compile_whole,
    "blocks": compile_blocks,
    "in place": compile_in_place,
}


def train(how: str, backend: Any) -> Run:
    return train_sharded(dataclasses.replace(OTHERS, compile=HOW[how]), fully_shard, {"backend": backend})


@pytest.mark.parametrize(
    ("how", "backend"),
    [
        ("whole", "aot_eager"),
        ("whole", "eager"),
        ("blocks", "aot_eager"),
        pytest.param("in place", fsdp_backend, marks=pytest.mark.inductor),
        pytest.param("blocks", fsdp_backend, marks=[pytest.mark.inductor, pytest.mark.night]),
        pytest.param("whole", "inductor", marks=pytest.mark.night),
        ("blocks", "inductor"),
    ],
)
def test_any_backend_trains(how: str, backend: Any, rank_pools: RankPools) -> None:
    compare(rank_pools[2].run(train, how=how, backend=backend), train_reference(OTHERS, 2), rtol=1e-5)


def accumulate_without_sync() -> None:
    """Check that flags mean the same with another backend as with the library's. Runs on every rank."""
    torch.manual_seed(0)
    model, reference = models.MLP(), models.MLP()
    reference.load_state_dict(model.state_dict())
    shard_units(model, device_mesh((2,)), fully_shard)
    compiled = torch.compile(model, backend="aot_eager")
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(2, 2, 3, 8, generator=generator)
    model.set_gradient_divide_factor(1.0)
    for micro, last in enumerate((False, True)):
        model.set_requires_gradient_sync(last)
        compiled(batches[micro, dist.get_rank()]).square().sum().backward()
        assert all((param.grad is not None) is last for param in model.parameters())
    reference(batches.flatten(0, 2)).square().sum().backward()
    for (name, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
        # Only the root's factor was set.
        expected = theirs.grad / (2 if name.startswith("blocks") else 1)
        torch.testing.assert_close(ours.grad.full_tensor(), expected, rtol=1e-5, atol=1e-5)


def test_flags_with_another_backend(rank_pools: RankPools) -> None:
    rank_pools[2].run(accumulate_without_sync)


def make_mlp(world: int = 1) -> Any:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, init_device_mesh("cpu", (world,)), fully_shard)
    return model


def compile_with(model: nn.Module, how: str) -> Any:
    if how == "uncompiled":
        return model
    if how in ("ours", "inductor"):
        return torch.compile(
            model, backend=fsdp_backend, options={"lowering": "inductor" if how == "inductor" else "aot_eager"}
        )
    return torch.compile(model, backend="aot_eager")


SYSTEMS = ["uncompiled", "ours", "another backend"]


@pytest.mark.parametrize("how", SYSTEMS)
def test_unfrozen_later(how: str, one_rank: None) -> None:
    """A parameter unfrozen with its module gets a gradient. One unfrozen by itself does, too, or the next call raises."""
    model = make_mlp()
    model.requires_grad_(False)
    compiled = compile_with(model, how)
    x = torch.randn(3, 8, requires_grad=True)
    compiled(x).sum().backward()
    assert all(param.grad is None for param in model.parameters())
    model.blocks[0].requires_grad_(True)
    compiled(x).sum().backward()
    assert all((param.grad is not None) is name.startswith("blocks.0") for name, param in model.named_parameters())
    model.head.weight.requires_grad_(True)
    if how == "another backend":
        with pytest.raises(RuntimeError, match=r"head\.weight was unfrozen after its forward was compiled"):
            compiled(x)
    compiled(x).sum().backward()
    assert model.head.weight.grad is not None


def ask_for_input_gradients(how: str) -> None:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, device_mesh((2,)), fully_shard)
    compiled = compile_with(model, how)
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(3, 8, requires_grad=True, generator=generator)
    first, second = torch.randn(2, 3, 8, generator=generator)
    reference = models.MLP()
    reference.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})

    model.set_requires_gradient_sync(False)
    compiled(first).square().sum().backward()
    # Neither call accumulates, even in the middle of microbatches.
    hooked = []
    model.head.weight.register_post_accumulate_grad_hook(hooked.append)
    (gradient,) = torch.autograd.grad(compiled(x).square().sum(), x)
    compiled(x).square().sum().backward(inputs=[x])
    assert not hooked
    (expected,) = torch.autograd.grad(reference(x).square().sum(), x)
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad, expected, rtol=1e-5, atol=1e-6)
    assert all(param.grad is None for param in model.parameters())
    model.set_requires_gradient_sync(True)
    compiled(second).square().sum().backward()
    assert len(hooked) == 1

    for batch in (first, second):
        reference(batch).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(theirs.grad)
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad / 2, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("how", SYSTEMS)
def test_what_nobody_asked_for_is_not_accumulated(how: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(ask_for_input_gradients, how=how)


@pytest.mark.parametrize("how", ["ours", "inductor"])
def test_a_graph_that_is_kept_runs_backward_again(how: str, one_rank: None) -> None:
    model, reference = make_mlp(), models.MLP()
    reference.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    compiled, x = compile_with(model, how), torch.randn(3, 8)
    for system in (compiled, reference):
        loss = system(x).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("how", SYSTEMS)
def test_gradients_of_parameters_are_refused_by_autograd(how: str, one_rank: None) -> None:
    """As with FSDP2, parameters outside of a forward are no tensors of the graph."""
    model = make_mlp()
    with pytest.raises(RuntimeError, match="not have been used in the graph"):
        torch.autograd.grad(compile_with(model, how)(torch.randn(3, 8)).sum(), list(model.parameters()))


@pytest.mark.parametrize("how", SYSTEMS)
def test_a_swapped_parameter_is_read(how: str, one_rank: None) -> None:
    model, x = make_mlp(), torch.randn(3, 8)
    plain = models.MLP()
    full = {name: param.full_tensor() for name, param in model.named_parameters()}
    compiled = compile_with(model, how)
    plain_output = functional_call(plain, full, (x,))
    torch.testing.assert_close(compiled(x), plain_output)
    for given in (
        {name: (2 * value).detach().requires_grad_() for name, value in full.items()},
        {name: 2 * param.detach() for name, param in model.named_parameters()},
    ):
        expected = functional_call(plain, {name: 2 * value for name, value in full.items()}, (x,))
        prefix = "" if how == "uncompiled" else "_orig_mod."
        renamed = {prefix + name: value for name, value in given.items()}
        for _ in range(2):
            torch.testing.assert_close(functional_call(compiled, renamed, (x,)), expected)
            torch.testing.assert_close(compiled(x), plain_output)
    given = {name: (2 * value).requires_grad_() for name, value in full.items()}
    if how != "uncompiled":
        backend = fsdp_backend if how == "ours" else "aot_eager"
        options = {"lowering": "aot_eager"} if how == "ours" else None
        traced = torch.compile(lambda values: functional_call(model, values, (x,)), backend=backend, options=options)
        torch.testing.assert_close(traced(given), expected)
        torch.autograd.backward(traced(given).sum(), inputs=list(given.values()))
        assert all(value.grad is not None for value in given.values())
        assert all(param.grad is None for param in model.parameters())
    weight = model.head.weight
    model.head._parameters["weight"] = given["head.weight"]
    torch.testing.assert_close(compiled(x), functional_call(plain, full | {"head.weight": given["head.weight"]}, (x,)))
    model.head._parameters["weight"] = weight
    torch.testing.assert_close(compiled(x), plain_output)


def saved_on_the_cpu(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return model(x)


def copied(model: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda packed: packed + 0):
        return model(x)


def checkpointed(model: Any, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)


@pytest.mark.parametrize("hook", [saved_on_the_cpu, copied, checkpointed])
@pytest.mark.parametrize("how", ["uncompiled", "ours", "ours, folded"])
def test_saved_tensor_hooks(how: str, hook: Callable[[Any, Tensor], Tensor], one_rank: None) -> None:
    """Backward gets another tensor than the shard that forward saved, and still finds the parameter."""
    torch.manual_seed(0)
    layers = 8 if how == "ours, folded" else 2
    model, reference = models.MLP(layers=layers), models.MLP(layers=layers)
    reference.load_state_dict(model.state_dict())
    shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)
    compiled = compile_with(model, how.partition(",")[0])
    for _ in range(2):
        x = torch.randn(3, 8)
        hook(compiled, x).square().sum().backward()
        reference(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


class CheckpointedBlocks(nn.Module):
    """Blocks that are checkpointed by their parent and compiled one by one, as in diffusers and accelerate."""

    def __init__(self, layers: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(models.Block(8, 16) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


def compile_wrapped(model: nn.Module, options: Any) -> None:
    blocks: Any = model.blocks
    for index, block in enumerate(blocks):
        blocks[index] = torch.compile(block, **options)


_LENGTHS = ((2, 4), (2, 4), (2, 5), (3, 7), (2, 4))


def train_lengths(model: nn.Module) -> tuple[list[Tensor], int]:
    """Return the gradients of all steps, and the number of compiled graphs."""
    torch._dynamo.utils.counters.clear()
    for batch, length in _LENGTHS:
        model(torch.linspace(-1, 1, batch * length * 8).view(batch, length, 8)).square().sum().backward()
    params: Any = model.parameters()
    grads = [full(param.grad) for param in params]
    return grads, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    ("how", "lowering"),
    [
        *((how, "aot_eager") for how in ("in place", "in place, before sharding", "wrapped")),
        ("in place", "inductor"),
        *(pytest.param(how, "inductor", marks=pytest.mark.night) for how in ("in place, before sharding", "wrapped")),
    ],
)
def test_blocks_that_are_compiled_inside_of_checkpoints(how: str, lowering: str, one_rank: None) -> None:
    """A recomputation runs the graphs of its forward: as many as with plain torch.compile, within Dynamo's limit of 8."""
    torch.manual_seed(0)
    model, reference = CheckpointedBlocks(), CheckpointedBlocks()
    reference.load_state_dict(model.state_dict())
    compile_blocks(reference, {"backend": "aot_eager"})
    expected, number = train_lengths(reference)
    torch._dynamo.reset()
    options = {"backend": fsdp_backend, "options": {"lowering": lowering}}
    if how == "wrapped":
        compile_wrapped(model, options)
    elif "before" in how:
        compile_blocks(model, options)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if how == "in place":
        compile_blocks(model, options)
    grads, ours = train_lengths(model)
    torch.testing.assert_close(grads, expected, rtol=1e-5, atol=1e-5)
    assert ours == number == 6


@pytest.mark.parametrize("how", ["in place", "wrapped", "composable"])
def test_blocks_in_checkpoints_are_frozen_after_sharding(how: str, one_rank: None) -> None:
    """Forward and recomputation run the same code: the flag reaches the shards before the first block runs, in any step."""
    torch.manual_seed(0)
    make = functools.partial(models.MLP, layers=3) if how == "composable" else functools.partial(CheckpointedBlocks, layers=3)
    model, reference = make(), make()
    reference.load_state_dict(model.state_dict())
    options = {"backend": aot_eager_backend}
    if how == "composable":
        for block in model.blocks:
            composable_checkpoint(block)
    if how == "wrapped":
        compile_wrapped(model, options)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    if how != "wrapped":
        compile_blocks(model, options)
    for trained in ("bias", "", "up"):
        for each in (model, reference):
            each.zero_grad()
            for name, param in each.named_parameters():
                param.requires_grad_(trained in name)
        for _ in range(2):
            x = torch.randn(3, 8, requires_grad=True)
            for each in (model, reference):
                each(x).square().sum().backward()
        for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) is (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("in_place", [True, False])
def test_frozen_after_sharding_compiles_once(in_place: bool, one_rank: None) -> None:
    model = make_mlp()
    for name, param in model.named_parameters():
        param.requires_grad_("bias" in name)
    options: Any = {"backend": aot_eager_backend}
    if in_place:
        model.compile(**options)
    torch._dynamo.utils.counters.clear()
    forward = model if in_place else torch.compile(model, **options)
    for _ in range(2):
        forward(torch.randn(3, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert {name for name, param in model.named_parameters() if param.grad is not None} == {
        name for name, _ in model.named_parameters() if "bias" in name
    }


def test_units_of_many_classes_that_are_compiled_one_by_one(one_rank: None) -> None:
    """Dynamo compiles a function at most eight times, so each class has a function of its own."""
    model = nn.Sequential(*[type(f"Linear{index}", (nn.Linear,), {})(8, 8) for index in range(9)])
    for layer in model:
        fully_shard(layer)
        layer.compile(backend=fsdp_backend, options={"lowering": "aot_eager"})
    fully_shard(model)
    torch._dynamo.utils.counters.clear()
    model(torch.ones(2, 8)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 9


def freeze(module: nn.Module, names: Sequence[str]) -> None:
    for name in names:
        module.get_parameter(name).requires_grad_(False)


_PARAMS_OF_BLOCK = [name for name, _ in models.Block(8, 16).named_parameters()]


@pytest.mark.parametrize("frozen", [[], _PARAMS_OF_BLOCK[:1], _PARAMS_OF_BLOCK[1:]], ids=["none", "one", "all but one"])
@pytest.mark.parametrize("hook", [saved_on_the_cpu, copied])
@pytest.mark.parametrize("backend", [pytest.param(fsdp_backend, marks=pytest.mark.inductor), aot_eager_backend])
def test_saved_tensor_hooks_around_blocks_that_share_a_graph(
    backend: Any, hook: Callable[[Any, Tensor], Tensor], frozen: list[str], one_rank: None
) -> None:
    """A copy of a shard is that of the unit to which autograd passes gradients."""
    torch.manual_seed(0)
    model, reference = models.MLP(layers=4), models.MLP(layers=4)
    reference.load_state_dict(model.state_dict())
    for block in (*model.blocks, *reference.blocks):
        freeze(block, frozen)
    shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)
    torch._dynamo.utils.counters.clear()
    compile_blocks(model, {"backend": backend})
    for _ in range(2):
        x = torch.randn(3, 8, requires_grad=True)
        hook(model, x).square().sum().backward()
        reference(x).square().sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert ours.grad is None
        else:
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("backend", "frozen", "says"),
    [(aot_eager_backend, _PARAMS_OF_BLOCK, "frozen modules share"), ("aot_eager", [], "could not be told")],
    ids=["frozen", "another backend"],
)
def test_saved_tensor_hooks_that_hide_whose_parameter_it_is(backend: Any, frozen: list[str], says: str, one_rank: None) -> None:
    model = make_mlp()
    for block in model.blocks:
        freeze(block, frozen)
        block.compile(backend=backend)
    # A call that finds parameters frozen since sharding runs without compiled code.
    copied(model, torch.randn(3, 8, requires_grad=True))
    loss = copied(model, torch.randn(3, 8, requires_grad=True)).sum()
    with pytest.raises(RuntimeError, match=says):
        loss.backward()


def refuse(_grad: Tensor) -> None:
    raise ArithmeticError


@pytest.mark.parametrize("then", ["backward", "nothing", "an error"])
@pytest.mark.parametrize("how", SYSTEMS)
def test_a_deleted_model_is_gone(how: str, then: str, one_rank: None) -> None:
    def train() -> Any:
        model = make_mlp()
        x = torch.randn(3, 8, requires_grad=True)
        loss = compile_with(model, how)(x).sum()
        if then == "an error":
            x.register_hook(refuse)
            with pytest.raises(ArithmeticError):
                loss.backward()
        elif then == "backward":
            loss.backward()
        return weakref.ref(model)

    model = train()
    # After an error, torch keeps what it has not run until the thread's next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    assert model() is None


class Doubled(nn.Module):
    """A hook of the forward's own doubles a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x)
        x.register_hook(lambda grad: 2 * grad)
        return self.down(torch.tanh(x))


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_a_forward_registers_a_hook_on_a_tensor(lowering: str, one_rank: None) -> None:
    options = {"backend": fsdp_backend, "options": {"lowering": lowering}}
    model, compiled, whole = compiled_beside_whole(Doubled, fully_shard, options)
    for _ in range(2):
        for forward in (compiled, whole):
            forward(torch.ones(3, 8, dtype=torch.float64)).square().sum().backward()
        assert all(isinstance(param, DTensor) for param in model.parameters())
        assert_same_gradients(model, whole)


class Dropout(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.5)).sum()


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_a_checkpoint_draws_the_same_numbers_again(lowering: str, one_rank: None) -> None:
    """Forward and recomputation draw the same mask if the loss is the weight times its gradient, plus biases."""
    torch.manual_seed(0)
    model: Any = Dropout()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))

    def forward(x: Tensor, weight: Tensor) -> Tensor:
        return checkpoint(model, x, use_reentrant=False) * weight

    compiled = torch.compile(forward, backend=fsdp_backend, options={"lowering": lowering})
    loss = compiled(torch.randn(4, 64), torch.ones(()))
    loss.backward()
    # For one mask, loss = sum(down.weight * its gradient) + sum of biases.
    bias = 4 * model.down.bias.full_tensor().sum()
    product = (model.down.weight.full_tensor() * model.down.weight.grad.full_tensor()).sum()
    torch.testing.assert_close(loss, product + bias, rtol=1e-4, atol=1e-4)


class WithAttributes(nn.Parameter):
    """A subclass of ``nn.Parameter``, as users write for attributes of their own."""


class WithOperators(Tensor):
    """A subclass that computes in its own way, and has no tensors inside."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return super().__torch_function__(func, types, args, kwargs or {})


def test_subclasses(one_rank: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = nn.Parameter(torch.randn(4, 4).as_subclass(WithOperators))
    attributes = {name: set(module.__dict__) for name, module in model.named_modules()}
    with pytest.raises(NotImplementedError, match=r"1\.weight is a WithOperators.*ignored_params"):
        fully_shard(model, mesh=mesh)
    assert {name: set(module.__dict__) for name, module in model.named_modules()} == attributes
    fully_shard(model, mesh=mesh, ignored_params={model[1].weight})
    assert isinstance(model[1].weight, WithOperators)

    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = WithAttributes(model[0].weight.detach())
    assert isinstance(fully_shard(model, mesh=mesh)[0].weight, DTensor)


def test_nothing_changes_where_sharding_fails(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.MLP()
    before = {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}
    params = dict(model.named_parameters())

    def fail(self: Any) -> None:
        raise MemoryError("no memory for shards")

    monkeypatch.setattr("fsdp_compile.units.unit.Unit.allocate", fail)
    with pytest.raises(MemoryError):
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    monkeypatch.undo()
    after = {name: (type(module), dict(module.__dict__)) for name, module in model.named_modules()}
    assert after == before
    assert dict(model.named_parameters()).items() == params.items()
    x = torch.randn(3, 8)
    expected = model(x)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    torch.testing.assert_close(model(x), expected)


def test_a_tied_parameter_is_not_taken_where_sharding_fails(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = models.Transformer(tied=True)
    mesh = init_device_mesh("cpu", (1,))
    fully_shard(model.embedding, mesh=mesh)
    with monkeypatch.context() as patches, pytest.raises(MemoryError):
        patches.setattr("fsdp_compile.units.unit.Unit.allocate", MagicMock(side_effect=MemoryError))
        fully_shard(model, mesh=mesh)
    # The embedding's unit looks at all modules that register the parameter.
    model.embedding.to(torch.float64)
    assert not isinstance(model.head.weight, DTensor)


def test_a_rank_alone_does_not_communicate(one_rank: None) -> None:
    model, reference = make_mlp(), models.MLP()
    reference.load_state_dict({name: param.full_tensor() for name, param in model.state_dict().items()})
    x = torch.randn(3, 8)
    for _ in range(2):
        with CommDebugMode() as counted:
            model.blocks[0].unshard()
            model(x).square().sum().backward()
        assert counted.get_total_counts() == 0
    for _ in range(2):
        reference(x).square().sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def sharded_layers(is_unit: bool) -> Any:
    layers: Any = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for layer in layers if is_unit else ():
        fully_shard(layer)
    return fully_shard(layers)


@pytest.mark.parametrize("is_unit", [False, True], ids=["root", "units"])
def test_parameters_are_not_tied_or_exchanged_after_sharding(is_unit: bool, one_rank: None) -> None:
    model, other = sharded_layers(is_unit), sharded_layers(is_unit)
    weights = [layer.weight for layer in model]
    for theirs, name in ((weights[0], "0.weight"), (other[1].weight, "1.weight")):
        with pytest.raises(ValueError, match=rf"Parameter 2.weight cannot be replaced by {name}, which is sharded already"):
            model[2].weight = theirs
    assert [layer.weight for layer in model] == weights
    model[2].weight = weights[2]
    model(torch.randn(3, 8)).sum().backward()


def tie_without_rows() -> None:
    """Tie parameters of one row to those of another model. Runs on every rank; the second has no row."""
    model, other = (fully_shard(nn.Linear(8, 1, bias=False), mesh=device_mesh((2,))) for _ in range(2))
    with pytest.raises(ValueError, match="Parameter weight cannot be replaced by weight, which is sharded already"):
        model.weight = other.weight


def test_ranks_without_rows_refuse_a_tie(rank_pools: RankPools) -> None:
    rank_pools[2].run(tie_without_rows)


@pytest.mark.parametrize("is_unit", [False, True], ids=["root", "units"])
def test_a_layer_that_takes_the_place_of_another(is_unit: bool, one_rank: None) -> None:
    """A graph that was traced with two layers does not run with one, which would get only one of two gradients."""
    model, reference = models.MLP(layers=3).double(), models.MLP(layers=3).double()
    reference.load_state_dict(model.state_dict())
    for block in model.blocks if is_unit else ():
        fully_shard(block)
    fully_shard(model)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    x = torch.randn(3, 8, dtype=torch.float64)
    compiled(x).sum().backward()
    model.zero_grad()
    model.blocks[2], reference.blocks[2] = model.blocks[0], reference.blocks[0]
    if is_unit:
        with pytest.raises(RuntimeError, match=r"Parameters blocks.0.up.weight and blocks.2.up.weight were two .*\.reset\(\)"):
            compiled(x)
        torch._dynamo.reset()
    compiled(x).sum().backward()
    reference(x).sum().backward()
    assert_same_gradients(model, reference)


TRANSFORMS: dict[str, Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]] = {
    "grad": lambda f, x: torch.func.grad(lambda x: f(x).square().sum())(x),
    "vjp": lambda f, x: torch.func.vjp(f, x)[1](torch.ones_like(x))[0],
    "jacrev": lambda f, x: torch.func.jacrev(lambda x: f(x).sum(0))(x).sum(0),
    "hessian": lambda f, x: torch.func.hessian(lambda x: f(x).square().sum())(x).sum((0, 1)),
    "vmap": lambda f, x: torch.func.vmap(torch.func.grad(lambda x: f(x).square().sum()))(x),
}


class Transformed(nn.Module):
    """A module whose forward transforms a function of its own parameters and those of a unit inside."""

    def __init__(self, transform: str) -> None:
        super().__init__()
        self.own, self.inner, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self._transform = TRANSFORMS[transform]

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.inner(x))
        return self.head(self._transform(lambda x: self.inner(torch.tanh(self.own(x))), x))


def train_transformed(transform: str, how: str) -> None:
    torch.manual_seed(0)
    model, whole = Transformed(transform).double(), Transformed(transform).double()
    whole.load_state_dict(model.state_dict())
    mesh = device_mesh((dist.get_world_size(),))
    fully_shard(model.inner, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    compiled = compile_with(model, how)
    for step in range(2):
        x = torch.linspace(-1, 1, 12, dtype=torch.float64).view(3, 4) + step
        for forward in (compiled, whole):
            forward(x).square().sum().backward()
        assert top_saved_tensors_default_hooks(False) is None
        assert_same_gradients(model, whole)


@pytest.mark.parametrize("how", ["uncompiled", "ours"])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_forward_transforms_a_function_of_parameters(transform: str, how: str, one_rank: None) -> None:
    """Transforms that compute gradients refuse saved-tensor hooks, which units that reshard after forward have."""
    train_transformed(transform, how)


def test_ranks_transform_a_function_of_parameters(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_transformed, transform="jacrev", how="uncompiled")


def test_a_transform_still_refuses_hooks_of_the_user(one_rank: None) -> None:
    model: Any = fully_shard(Transformed("grad"), mesh=init_device_mesh("cpu", (1,)))
    x = torch.randn(3, 4)
    with pytest.raises(RuntimeError, match="don't yet support saved tensor hooks"), torch.autograd.graph.save_on_cpu():
        model(x)
    model(x).sum().backward()
