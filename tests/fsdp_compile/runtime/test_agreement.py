"""Ranks that disagree raise, all of them and soon. Threads stand for ranks, except in the last tests."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import RanksDisagree, comm_hooks, fsdp_backend, fully_shard
from fsdp_compile.runtime.agreement import Agreement, Program
from tests.common.distributed import RankPools, device_mesh

pytestmark = pytest.mark.units_apart


def _graph(*lines: str, title: str = "backward graph") -> Program:
    return Program(title, lines, lines)


_GATHER, _SCATTER, _REDUCE = (
    "all_gather_into_tensor 8 x float32",
    "reduce_scatter_tensor(sum) 16 x float32",
    "all_reduce(sum) 8",
)


class Ranks:
    """Threads that stand for ranks, each with its own view of the store."""

    def __init__(self, stores: Sequence[dist.Store], timeout_s: float = 20.0, warn_after_s: float = 20.0):
        ranks = range(len(stores))
        self.ballots = [
            Agreement(store, ranks, rank, label="shard", timeout_s=timeout_s, warn_after_s=warn_after_s)
            for rank, store in enumerate(stores)
        ]

    def each(self, jobs: Sequence[Callable[[Agreement], None] | None]) -> list[str]:
        """Run each rank's job. Return the error of each rank, or an empty string if it has none, or no job."""
        with ThreadPoolExecutor(len(jobs)) as pool:
            return list(pool.map(self._outcome, self.ballots, jobs))

    def agree(self, *graphs: Program | None) -> list[str]:
        return self.each([None if graph is None else functools.partial(Agreement.agree, program=graph) for graph in graphs])

    @staticmethod
    def _outcome(agreement: Agreement, job: Callable[[Agreement], None] | None) -> str:
        try:
            if job is not None:
                job(agreement)
        except RanksDisagree as error:
            return str(error)
        return ""


@pytest.fixture
def store() -> dist.HashStore:
    return dist.HashStore()


def _stores(kind: str, number: int, folder: Path) -> list[dist.Store]:
    if kind == "hash":
        return [dist.HashStore()] * number
    if kind == "file":
        return [dist.FileStore(str(folder / "store"), number) for _ in range(number)]
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    return [server, *(dist.TCPStore("localhost", server.port, wait_for_workers=False) for _ in range(number - 1))]


@pytest.mark.parametrize("kind", ["hash", "file", "tcp"])
def test_ranks_that_agree_and_then_do_not(kind: str, tmp_path: Path) -> None:
    ranks = Ranks(_stores(kind, 3, tmp_path))
    for number in range(4):
        assert ranks.agree(*[_graph(*[_GATHER] * number)] * 3) == ["", "", ""]
    errors = ranks.agree(_graph(_SCATTER), _graph(_SCATTER), _graph(_REDUCE))
    assert errors[0] and len(set(errors)) == 1


def _error(ranks: Ranks, *graphs: Program) -> str:
    """Return the error, which all ranks must raise alike within seconds."""
    start = time.monotonic()
    errors = ranks.agree(*graphs)
    assert time.monotonic() - start < 5
    assert len(set(errors)) == 1
    return errors[0]


def test_other_size(store: dist.Store) -> None:
    larger = _graph(_GATHER, _SCATTER.replace("16", "32"), _GATHER)
    error = _error(Ranks([store] * 4), *[_graph(_GATHER, _SCATTER, _GATHER)] * 2, larger, _graph(_GATHER, _SCATTER, _GATHER))
    assert "process group shard" in error
    assert "The first difference is at collective 2:" in error
    assert "\n  ranks 0-1, 3: reduce_scatter_tensor(sum) 16 x float32 (in a backward graph; collectives: 3)\n" in error
    assert "\n  rank 2: reduce_scatter_tensor(sum) 32 x float32 (in a backward graph; collectives: 3)\n" in error
    assert "set_requires_gradient_sync" in error


def test_other_order(store: dist.Store) -> None:
    error = _error(Ranks([store] * 2), _graph(_GATHER, _SCATTER), _graph(_SCATTER, _GATHER))
    assert "at collective 1:\n  rank 0: all_gather" in error
    assert "\n  rank 1: reduce_scatter" in error


def test_other_number(store: dist.Store) -> None:
    error = _error(Ranks([store] * 2), _graph(_GATHER, _SCATTER), _graph(_GATHER))
    assert "at collective 2:\n  rank 0: reduce_scatter" in error
    assert "\n  rank 1: none (in a backward graph; collectives: 1)" in error


def test_every_rank_another_graph(store: dist.Store) -> None:
    error = _error(Ranks([store] * 3), _graph(_GATHER), _graph(_SCATTER), _graph(_REDUCE))
    assert [line.split()[1] for line in error.splitlines() if line.startswith("  rank")] == ["0:", "1:", "2:"]


def test_forward_meets_backward(store: dist.Store) -> None:
    error = _error(Ranks([store] * 2), _graph(_GATHER, title="forward graph"), _graph(_GATHER))
    assert "programs of different kinds:\n  rank 0: forward graph" in error


def test_names_that_may_differ_are_not_the_first_difference(store: dist.Store) -> None:
    third = Program("forward graph", ["gather 8, bucket blocks.3", "reduce 8"], ["gather 8", "reduce 8"])
    fifth = Program("forward graph", ["gather 8, bucket blocks.5", "reduce 8"], ["gather 8", "reduce 8"])
    longer = Program("forward graph", ["gather 8, bucket blocks.5", "reduce 9"], ["gather 8", "reduce 9"])
    assert Ranks([store] * 2).agree(third, fifth) == ["", ""]
    error = _error(Ranks([store] * 2), third, longer)
    assert "at collective 2:\n  rank 0: reduce 8" in error


def test_ranks_may_compile_alone_what_is_known(store: dist.Store) -> None:
    ranks = Ranks([store] * 2)
    assert ranks.agree(*[_graph(_GATHER)] * 2) == ["", ""]
    assert ranks.agree(None, _graph(_GATHER)) == ["", ""]
    assert ranks.agree(*[_graph(_SCATTER)] * 2) == ["", ""]


@pytest.mark.parametrize("missing", [0, 2])
def test_missing_rank(store: dist.Store, missing: int) -> None:
    ranks = Ranks([store] * 3, timeout_s=0.3, warn_after_s=0.05)
    graphs = [None if rank == missing else _graph(_GATHER, _SCATTER) for rank in range(3)]
    with pytest.warns(RuntimeWarning) as warned:
        errors = ranks.agree(*graphs)
    assert [bool(error) for error in errors] == [rank != missing for rank in range(3)]
    for text in [*filter(None, errors), *(str(warning.message) for warning in warned)]:
        assert f"waits for rank {missing} (process group shard)" in text
        assert f"a backward graph that begins with 1: {_GATHER}; 2: {_SCATTER}" in text
    assert all("within 0.3 s" in error for error in errors if error)


def test_rank_that_comes_too_late_raises_as_well(store: dist.Store) -> None:
    ranks = Ranks([store] * 2, timeout_s=0.1)
    error = ranks.agree(_graph(_GATHER), None)[0]
    assert ranks.agree(None, _graph(_GATHER)) == ["", error]
    # From then on, the ranks are in step.
    assert ranks.agree(*[_graph(_GATHER)] * 2) == ["", ""]


def test_rank_that_is_slow_only_warns(store: dist.Store) -> None:
    ranks = Ranks([store] * 2, warn_after_s=0.05)

    def late(agreement: Agreement) -> None:
        time.sleep(0.3)
        agreement.agree(_graph(_GATHER))

    with pytest.warns(RuntimeWarning, match="waits for rank 1"):
        assert ranks.each([functools.partial(Agreement.agree, program=_graph(_GATHER)), late]) == ["", ""]


@pytest.mark.parametrize("failing", [0, 1])
def test_failure_elsewhere(store: dist.Store, failing: int) -> None:
    jobs: list[Any] = [functools.partial(Agreement.agree, program=_graph(_GATHER))] * 3
    jobs[failing] = functools.partial(Agreement.fail, reason="Ranks of another group differ.")
    outcome = Ranks([store] * 3).each(jobs)
    assert outcome == ["" if rank == failing else "Ranks of another group differ." for rank in range(3)]


def test_what_is_over_leaves_only_the_last_verdict(store: dist.Store) -> None:
    ranks = Ranks([store] * 2)
    keys = store.num_keys()
    for number in range(3):
        ranks.agree(*[_graph(*[_GATHER] * number)] * 2)
    assert store.num_keys() == keys + 1


def test_process_group_made_anew_with_the_same_store(store: dist.Store) -> None:
    first = Ranks([store] * 2)
    assert first.agree(*[_graph(_GATHER)] * 2) == ["", ""]
    # The verdict in the first process group says nothing about the second.
    error = _error(Ranks([store] * 2), _graph(_GATHER), _graph(_SCATTER))
    assert "at collective 1:" in error


def _seconds_to(raise_error: Callable[[], Any]) -> tuple[str, float]:
    """Return the error, or an empty string, and the seconds that the call took."""
    start = time.monotonic()
    try:
        raise_error()
    except Exception as error:
        return str(error), time.monotonic() - start
    return "", time.monotonic() - start


def _disagree(mesh_shape: tuple[int, ...]) -> list[tuple[str, float]]:
    """Return the outcomes of three calls. Every rank calls this.

    In a forward and in a backward, the last rank differs from the others. In the last backward, no rank does.
    """
    mesh = device_mesh(mesh_shape)
    is_odd = dist.get_rank() == dist.get_world_size() - 1

    def trainee(width: int) -> tuple[Any, Any]:
        model = nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        return model, torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})

    # Ranks agree on other graphs first, also on one without communication over replicas. They must disagree all the same.
    _, compiled = trainee(width=12)
    compiled(torch.ones(2, 4)).sum().backward()
    _, compiled = trainee(width=16 if is_odd else 8)
    outcomes = [_seconds_to(lambda: compiled(torch.ones(2, 4)))]
    model, compiled = trainee(width=8)
    model[2].set_requires_gradient_sync(not is_odd)
    loss = compiled(torch.ones(2, 4)).sum()
    outcomes.append(_seconds_to(loss.backward))
    model[2].set_requires_gradient_sync(True)
    outcomes.append(_seconds_to(compiled(torch.ones(2, 4)).sum().backward))
    return outcomes


def _disagree_beside_tensor_parallel() -> tuple[str, float]:
    """Return the outcome if rank 3 differs from rank 1, with which it shards, but not from its neighbour in ``tp``.

    Every rank calls this.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh["dp"])
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
    # The input's gradient is summed over the ranks of tp, in backward.
    x = torch.ones(2, 4, requires_grad=True)
    compiled(x).sum().backward()
    if dist.get_rank() == 3:
        model[2].register_comm_hook(comm_hooks.DefaultState(mesh["dp"].get_group()), comm_hooks.QuantizedReduce(block=4))
    return _seconds_to(lambda: compiled(x).sum().backward())


@pytest.mark.night
def test_ranks_that_share_tensors_with_those_at_odds_raise() -> None:
    pools = RankPools()
    try:
        for message, seconds in pools[4].run(_disagree_beside_tensor_parallel):
            assert "run different programs" in message
            assert seconds < 30
    finally:
        pools.close()


@pytest.mark.parametrize("mesh_shape", [(2,), pytest.param((2, 2), marks=pytest.mark.night)], ids=["fsdp", "hsdp"])
def test_real_ranks(mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    world = 2 * len(mesh_shape)
    others = "rank 0" if world == 2 else "rank 2"
    for size, flag, recovered in rank_pools[world].run(_disagree, mesh_shape=mesh_shape):
        # With replicas, rank 0 shares no group with the odd rank, and rank 1 only the group of replicas.
        assert f"{others}: all_gather_into_tensor 20 x float32 over shard, bucket 0" in size[0]
        assert f"rank {world - 1}: all_gather_into_tensor 40 x float32 over shard, bucket 0" in size[0]
        assert f"{others}: all_to_all_single 36 x float32 over shard, bucket 2" in flag[0]
        assert f"rank {world - 1}: " in flag[0]
        assert max(size[1], flag[1]) < 30
        assert recovered[0] == ""
