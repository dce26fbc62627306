"""Changing sizes, where lowering decides by the sizes at hand after Dynamo has built its guards."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor import lowering
from torch._inductor.virtualized import V
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from passes.fx.size_guards import Assumptions, InputSizes
from tests.common.distributed import RankPools, device_mesh
from tests.common.parity import shard_units

pytestmark = pytest.mark.inductor


class Convolutions(nn.Module):
    """Convolutions, whose backward Inductor lowers for the sizes at hand."""

    def __init__(self, layers: Callable[[], list[nn.Module]], channels: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, channels)
        self.blocks = nn.ModuleList(layers())
        self.head = nn.Linear(channels, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).movedim(-1, 1)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x.movedim(1, -1))


KINDS: dict[str, tuple[Callable[[], list[nn.Module]], list[tuple[int, ...]]]] = {
    # A depthwise convolution after another one, as in a conformer; batch and length change.
    "in a row": (
        lambda: [nn.Conv1d(4, 4, 3, padding=1), nn.Conv1d(4, 4, 3, padding=1, groups=4)],
        [(2, 8), (3, 5), (3, 8), (2, 5)],
    ),
    "strided and transposed": (
        lambda: [nn.Conv2d(4, 4, 3, stride=2, padding=1), nn.ConvTranspose2d(4, 4, 2, stride=2)],
        [(2, 8, 4), (3, 4, 8), (3, 8, 8)],
    ),
}


def train_convolutions(kind: str, lowering: str) -> None:
    """Check that losses and gradients equal those of whole parameters, with and without sync. Runs on every rank."""
    layers, sizes = KINDS[kind]
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    alone = Convolutions(layers)
    model: Any = Convolutions(layers)
    model.load_state_dict(alone.state_dict())
    shard_units(model, device_mesh((world,)), fully_shard)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
    for number, size in enumerate(sizes * 2):
        model.set_requires_gradient_sync(number % 2 == 1)
        batches = torch.randint(11, (world, *size))
        loss = compiled(batches[rank]).square().sum()
        loss.backward()
        losses = [alone(batch).square().sum() for batch in batches]
        (sum(losses) / world).backward()  # type: ignore[union-attr]
        torch.testing.assert_close(loss, losses[rank])
        if number % 2:
            for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-5, msg=name)
            model.zero_grad()
            alone.zero_grad()


@pytest.mark.parametrize("kind", ["in a row", pytest.param("strided and transposed", marks=pytest.mark.night)])
def test_convolutions(kind: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_convolutions, kind=kind, lowering="inductor")


# An operator whose lowering decides by the size of its input.

_MANY = 6
_library = torch.library.Library("fsdp_compile_tests", "FRAGMENT")
_library.define("by_size(Tensor x, str what) -> Tensor")
_by_size = torch.ops.fsdp_compile_tests.by_size.default


def _factor(few: bool, what: str) -> int:
    return 2 if few or what != "factor" else 3


_library.impl("by_size", lambda x, what: x * _factor(x.shape[0] <= _MANY, what), "CompositeExplicitAutograd")
torch.library.register_fake("fsdp_compile_tests::by_size", lambda x, what: torch.empty_like(x), lib=_library)


@lowering.register_lowering(_by_size)
def _(x: Any, what: str) -> Any:
    sizes, size = V.graph.sizevars, x.get_size()[0]
    if what == "limit":
        sizes.check_leq(size, _MANY)
    elif what == "number":
        sizes.guard_int(size)
    elif what == "known":
        # As in Inductor's power of a symbol to -1, which the code of some convolutions has.
        int(size)
    few = what == "factor" and bool(sizes.evaluate_expr(size <= _MANY))
    return lowering.lowerings[torch.ops.aten.mul.Tensor](x, _factor(few, what))


class _BackwardBySize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, what: str) -> Tensor:
        ctx.what = what
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _by_size(grad, ctx.what), None


class BySize(nn.Module):
    """The operator in backward, and with ``in_forward`` also in forward; with ``chosen`` on chosen rows of the input."""

    def __init__(self, what: str, *, in_forward: bool = False, chosen: bool = False) -> None:
        super().__init__()
        self.what, self.in_forward, self.chosen = what, in_forward, chosen
        self.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x[x[:, 0] > 0] if self.chosen else x
        x = self.blocks[0](_by_size(x, self.what) if self.in_forward else x)
        return self.blocks[1](_BackwardBySize.apply(torch.tanh(x), self.what))


class Training:
    """A model on one rank through Inductor, and a twin with whole parameters."""

    def __init__(self, what: str, dynamic: bool | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.alone = BySize(what, **options)
        self.model: Any = BySize(what, **options)
        self.model.load_state_dict(self.alone.state_dict())
        shard_units(self.model, init_device_mesh("cpu", (1,)), fully_shard)
        self.compiled = torch.compile(self.model, backend=fsdp_backend, dynamic=dynamic)

    def step(self, size: int, *, syncs: bool = True) -> None:
        """Run a microbatch of both; check losses and, if ``syncs``, gradients, which are then cleared."""
        x = torch.randn(size, 4)
        x[:, 0].abs_()
        self.model.set_requires_gradient_sync(syncs)
        loss, expected = self.compiled(x).square().sum(), self.alone(x).square().sum()
        torch.testing.assert_close(loss, expected)
        loss.backward()
        expected.backward()
        if syncs:
            for param, other in zip(self.model.parameters(), self.alone.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), other.grad)
                param.grad = other.grad = None


@pytest.mark.parametrize("dynamic", [None, True])
def test_decisions_hold_for_the_sizes_that_they_were_made_for(dynamic: bool | None, one_rank: None) -> None:
    training = Training("factor", dynamic, in_forward=True)
    # Backward is lowered for few and for many rows, for each of its plans and in either order.
    for size in (3, 4, 9, 5, 12, 7, 3):
        training.step(size, syncs=size != 12)


def test_late_decisions_compile_backward_alone(one_rank: None) -> None:
    training = Training("factor", dynamic=True)
    with capture() as captured:
        for size in (3, 9, 4, 8):
            training.step(size)
    assert (len(captured.forward), len(captured.backward)) == (1, 2)


def test_what_inductor_compiles_for_numbers_alone(one_rank: None) -> None:
    """Forward compiles again by a guard of Dynamo's frame, backward by a guard of its own."""
    training = Training("known", dynamic=True, in_forward=True)
    with capture() as captured:
        for size in (3, 9, 3, 9):
            training.step(size)
    assert (len(captured.forward), len(captured.backward)) == (2, 2)
    training = Training("known", dynamic=True)
    with capture() as captured:
        for size in (3, 9, 3, 9):
            training.step(size)
    assert (len(captured.forward), len(captured.backward)) == (1, 2)


def test_sizes_that_come_from_data(one_rank: None) -> None:
    """Lowering again cannot decide a condition on a size from data. A call that does not fulfil it raises."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        training = Training("limit", chosen=True)
        for size in (4, 2, _MANY):
            training.step(size)
        with pytest.raises(RuntimeError, match=r"A backward graph can be compiled only for sizes with \(u0 <= 6\)"):
            training.step(_MANY + 1)


def test_many_sets_of_sizes_are_warned_of(one_rank: None, caplog: pytest.LogCaptureFixture) -> None:
    training = Training("number", dynamic=True)
    with caplog.at_level(logging.WARNING):
        for size in range(2, 10):
            assert not caplog.text
            training.step(size)
    assert "A backward graph has been compiled for 8 sets of sizes, and goes on so: its code is for (s" in caplog.text


def test_every_guard_is_checked(one_rank: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A variant checks as many conditions as lowering decides after the frame's guards are built."""
    added: list[Any] = []
    checked: list[Any] = []
    frozen: list[ShapeEnv] = []
    log_guard, freeze, unchecked = ShapeEnv._log_guard, ShapeEnv.freeze, Assumptions.unchecked

    def note_guard(self: ShapeEnv, prefix: str, guard: Any, forcing_spec: bool) -> None:
        added.extend([guard] if any(self is env for env in frozen) else [])
        log_guard(self, prefix, guard, forcing_spec)

    def note_frozen(self: ShapeEnv) -> None:
        frozen.append(self)
        freeze(self)

    def note_checked(self: Assumptions, sizes: InputSizes) -> list[Any]:
        found = unchecked(self, sizes)
        checked.extend(found)
        return found

    monkeypatch.setattr(ShapeEnv, "_log_guard", note_guard)
    monkeypatch.setattr(ShapeEnv, "freeze", note_frozen)
    monkeypatch.setattr(Assumptions, "unchecked", note_checked)
    training = Training("factor", dynamic=True)
    for size in (3, 9, 4):
        training.step(size)
    assert len(frozen) == 1 and len(added) == len(checked) >= 2
