"""Threads of a rank: two train two models, each over a process group of its own. Over one group they would mix up data."""

from __future__ import annotations

import contextlib
import threading
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.runtime import checked_program
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.parity import shard_units


def make_model(mesh: DeviceMesh) -> Any:
    torch.manual_seed(0)
    model = models.MLP()
    shard_units(model, mesh, fully_shard)
    return model


def share_a_group() -> None:
    """Run a forward in a second thread while the first holds the group, so that both communicate at once deterministically."""
    model = make_model(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu"))
    group = model._fsdp_unit.mesh.shard_group
    run = checked_program.eager_run("something", (1,), (group,))
    errors: list[BaseException] = []

    def forward() -> None:
        try:
            model(torch.randn(3, 8))
        except RuntimeError as error:
            errors.append(error)

    run.begin()
    with run:
        thread = threading.Thread(target=forward)
        thread.start()
        thread.join()
    (error,) = errors
    with pytest.raises(RuntimeError, match="Two threads communicate over the process group shard at once"):
        raise error


def test_a_group_serves_one_thread_at_a_time(rank_pools: RankPools) -> None:
    rank_pools[2].run(share_a_group)


def train(model: Any, seed: int, losses: list[float], *, has_begun: threading.Event | None = None, options: Any = None) -> None:
    """Train for a few steps, with another batch size in each. Say when the first step or its compilation begins."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def compile_graph(gm: Any, inputs: Any) -> Any:
        if has_begun is not None:
            has_begun.set()
        return fsdp_backend(gm, inputs, options=options)

    forward = model if options is None else torch.compile(model, backend=compile_graph)
    if has_begun is not None and options is None:
        has_begun.set()
    for step in range(4):
        generator = torch.Generator().manual_seed(100 * seed + 10 * step + dist.get_rank())
        loss = forward(torch.randn(3 + step % 3, 8, generator=generator, dtype=torch.float64)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())


def train_two_models(options: dict[str, str] | None) -> None:
    """Train two models, one after the other, then at once. Ranks start the threads in opposite orders."""

    def make_models() -> list[Any]:
        return [make_model(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")).double() for _ in range(2)]

    expected: list[list[float]] = [[], []]
    for seed, model in enumerate(make_models()):
        train(model, seed, expected[seed], options=options)
    # The threads compile anew.
    torch._dynamo.reset()
    losses: list[list[float]] = [[], []]
    has_begun = threading.Event()
    threads = [
        threading.Thread(target=train, args=(model, seed, losses[seed]), kwargs={"options": options, "has_begun": has_begun})
        for seed, model in enumerate(make_models())
    ]
    for thread in threads if dist.get_rank() == 0 else reversed(threads):
        thread.daemon = True
        thread.start()
        # The second thread waits for Dynamo's lock, which the first holds.
        assert has_begun.wait(timeout=60)
    for thread in threads:
        thread.join(timeout=60)
        assert not thread.is_alive(), "the threads wait for each other"
    torch.testing.assert_close(losses, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    "lowering",
    [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)],
    ids=["uncompiled", "aot_eager", "inductor"],
)
def test_two_threads_train_two_models(rank_pools: RankPools, lowering: str | None) -> None:
    options = None if lowering is None else {"lowering": lowering}
    rank_pools[2].run(train_two_models, options=options)


def train_beside_a_compilation() -> None:
    """Train an uncompiled model while another thread compiles a function: torch says that all threads do."""
    compiles, trained = threading.Event(), threading.Event()

    def wait(gm: Any, inputs: Any) -> Any:
        compiles.set()
        assert trained.wait(timeout=60)
        return gm

    def train_and_list() -> tuple[list[float], list[str]]:
        losses: list[float] = []
        collectives: list[str] = []
        with mock.patch.object(checked_program, "eager_observers", [collectives.append]):
            train(make_model(DeviceMesh.from_group(dist.new_group([0, 1]), "cpu")).double(), 0, losses)
        return losses, collectives

    expected = train_and_list()
    thread = threading.Thread(target=lambda: torch.compile(torch.sin, backend=wait)(torch.ones(3)), daemon=True)
    thread.start()
    try:
        assert compiles.wait(timeout=60)
        actual = train_and_list()
    finally:
        trained.set()
        thread.join(timeout=60)
    assert actual == expected


def test_another_thread_may_compile(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_beside_a_compilation)


class Outer(torch.nn.Module):
    """A unit with a unit inside, in a root that is not compiled."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x).relu())


def compile_on_one_rank() -> None:
    """Train a compiled block under an uncompiled root, in whose second step one rank compiles another size."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = torch.nn.Sequential(Outer())
    fully_shard(model[0].inner)
    fully_shard(model[0])
    fully_shard(model)
    model[0].compile(backend=fsdp_backend, options={"lowering": "aot_eager"}, dynamic=False)
    collectives: list[str] = []
    sizes = (2, 3) if dist.get_rank() == 0 else (2, 2)
    # torch 2.11 has no such context.
    without = (
        mock.patch.object(torch.compiler, "_compile_session_context", contextlib.nullcontext)
        if hasattr(torch.compiler, "_compile_session_context")
        else contextlib.nullcontext()
    )
    with without, mock.patch.object(checked_program, "eager_observers", [collectives.append]):
        for size in sizes:
            model(torch.ones(size, 8)).sum().backward()
    assert collectives == []


def test_compilation_reads_no_parameters(rank_pools: RankPools) -> None:
    rank_pools[2].run(compile_on_one_rank)
