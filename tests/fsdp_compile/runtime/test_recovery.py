"""Ranks go on after an exception that one of them met: to the bit as if all ranks had skipped that step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import RankFailed, fsdp_backend, fully_shard, optimizer_in_backward
from fsdp_compile.runtime.recovery import _obstacle
from tests.common.distributed import RankPools, mesh_of_new_groups

_STEPS = 6
# By step, the rank that fails. Two in a row, and the first step after them.
_FAILURES = {1: 1, 2: 0, 3: 1}


class _Raises:
    """Where this rank fails: "forward", "backward", "hook" or nowhere."""

    told = ""


def _raise_if_told(where: str) -> None:
    if _Raises.told == where:
        raise torch.OutOfMemoryError(f"in {where}")


def _copying(where: str) -> Any:
    """Return an operator that copies a tensor, and fails if the rank is told to fail there."""

    @torch.library.custom_op(f"test_recovery::{where}", mutates_args=())
    def copy(x: Tensor) -> Tensor:
        _raise_if_told(where)
        return x.clone()

    copy.register_fake(torch.empty_like)
    return copy


_copy, _copy_back = _copying("forward"), _copying("backward")
_copy.register_autograd(lambda _ctx, grad: _copy_back(grad))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(_copy(self.up(x)).relu())


def _build(mesh: DeviceMesh) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    for block in model:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _batch(step: int) -> Tensor:
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))


def _train(mesh_shape: tuple[int, ...], is_compiled: bool, where: str, microbatches: int) -> tuple[list[str], list[Tensor]]:
    """Train. In some steps a rank fails. Every rank calls this.

    Return the errors that this rank has caught, and its rows of parameters: those of this run less those of a run without the
    steps.
    """
    mesh = mesh_of_new_groups(mesh_shape)
    caught = []

    def run(fails: bool) -> list[Tensor]:
        model = _build(mesh)
        call = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}) if is_compiled else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for step in range(_STEPS):
            if step in _FAILURES and not fails:
                continue
            try:
                for microbatch in range(microbatches):
                    is_last = microbatch == microbatches - 1
                    model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                    _Raises.told = where if _FAILURES.get(step) == dist.get_rank() and is_last else ""
                    call(_batch(step)).square().sum().backward()
            except torch.OutOfMemoryError as error:
                caught.append(type(error).__name__)
                _Raises.told = ""
                model.reset_iter_state()  # type: ignore[operator]
                assert all(param.grad is None for param in model.parameters())
                continue
            optimizer.step()
            optimizer.zero_grad()
        return [param.to_local().detach().clone() for param in model.parameters()]  # type: ignore[attr-defined]

    failed, skipped = run(fails=True), run(fails=False)
    return caught, [one - other for one, other in zip(failed, skipped, strict=True)]


@pytest.mark.parametrize("microbatches", [1, pytest.param(2, marks=pytest.mark.night)])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.night)])
def test_as_if_all_had_skipped_the_step(
    own_rank_pools: RankPools, mesh_shape: tuple[int, ...], is_compiled: bool, where: str, microbatches: int
) -> None:
    results = own_rank_pools[2 if len(mesh_shape) == 1 else 4].run(
        _train, mesh_shape=mesh_shape, is_compiled=is_compiled, where=where, microbatches=microbatches
    )
    for rank, (caught, differences) in enumerate(results):
        assert caught == ["OutOfMemoryError" if failing == rank else "RankFailed" for failing in _FAILURES.values()]
        assert all(not difference.any() for difference in differences)


def _fail_once(how: str) -> str:
    """Fail on rank 1. Return this rank's error in recovering. Every rank calls this."""
    mesh = mesh_of_new_groups((2,))
    model = _build(mesh)
    if how == "update in backward":
        optimizer_in_backward(torch.optim.SGD, model.parameters(), lr=0.1)
    elif how == "step":
        # Rank 0 has all gradients, and steps.
        next(model.parameters()).register_post_accumulate_grad_hook(lambda _: _raise_if_told("hook"))
    _Raises.told = "hook" if how == "step" else "forward"
    if dist.get_rank() == 0:
        _Raises.told = ""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        for _ in range(2):
            model(_batch(0)).sum().backward()
            optimizer.step()
            _Raises.told = ""
    except torch.OutOfMemoryError:
        _Raises.told = ""
        try:
            model.reset_iter_state()  # type: ignore[operator]
        except RankFailed as error:
            return str(error)
    return ""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("step", "since the last program that all have run, optimizers have stepped (rank 0: 1, rank 1: 0)"),
        ("update in backward", "an optimizer in backward may have updated parameters on some of them"),
    ],
    ids=["a step", "an update in backward"],
)
def test_parameters_would_differ(own_rank_pools: RankPools, how: str, reason: str) -> None:
    for error in own_rank_pools[2].run(_fail_once, how=how):
        assert reason in error


def test_what_ranks_have_to_agree_about() -> None:
    steps = [[1, 11, 5], [2, 22, 6], [3, 33, 6]]
    assert _obstacle({0: {"steps": steps, "updates": 6}, 1: {"steps": steps[:2], "updates": 6}}) == ""
    # One has another optimizer besides.
    other = [[number, mixed, updates + 3] for number, mixed, updates in steps]
    assert _obstacle({0: {"steps": steps, "updates": 6}, 1: {"steps": other, "updates": 9}}) == ""
    assert "(rank 0: 1, rank 1: 0)" in _obstacle({0: {"steps": steps, "updates": 7}, 1: {"steps": steps, "updates": 6}})
    assert "have not run the same program" in _obstacle({0: {"steps": steps, "updates": 6}, 1: {"steps": [], "updates": 6}})


def test_an_exception_of_something_else_is_handled(one_rank: None) -> None:
    model = _build(init_device_mesh("cpu", (1,)))
    try:
        raise ValueError
    except ValueError:
        model.reset_iter_state()  # type: ignore[operator]
    model(torch.ones(2, 8)).sum().backward()
