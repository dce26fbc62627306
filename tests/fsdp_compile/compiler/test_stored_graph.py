"""Graphs in AOTAutograd's cache: a second compilation takes them, and trains the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler import cache_folder, prepared_graph, stored_graph
from fsdp_compile.debug import capture
from passes.transforms.repeated_layers import MIN_LAYERS
from tests.common import models
from tests.common.distributed import RankPools, fake_group
from tests.common.stored_graphs import count_loads, storing
from tests.common.stored_models import MODELS, compiled_model

pytestmark = pytest.mark.skipif(not stored_graph.can_store(), reason="this torch runs passes before it looks into its cache")


def train(build: Callable[[], nn.Module], lowering: str) -> list[Tensor]:
    """Return losses, gradients and buffers of microbatches with and without sync, and of evaluation. Runs on every rank."""
    model, compiled = compiled_model(build, lowering)
    found = []
    for step in range(4):
        model.set_requires_gradient_sync(step % 2 == 1)
        x = torch.full((4, 8), 1.0 + step + dist.get_rank(), dtype=torch.float64)
        loss = (compiled(x) * torch.arange(4.0).unsqueeze(1)).square().mean()
        loss.backward(retain_graph=step == 1)
        if step == 1:
            loss.backward()
        found.append(loss.detach())
        if step % 2:
            found += [param.grad.full_tensor().clone() for param in model.parameters()]
    with torch.no_grad():
        found.append(compiled(torch.ones(4, 8, dtype=torch.float64)))
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def train_twice(name: str, lowering: str) -> None:
    """Train in the place of two processes, the second of which finds the graphs of the first. Runs on every rank."""
    expected = train(MODELS[name], lowering)
    with storing():
        for is_second in (False, True):
            with count_loads() as loads:
                results = train(MODELS[name], lowering)
            assert all(map(torch.equal, results, expected)), "values differ"
            hits, misses = loads
            assert (hits > 0, misses > 0) == (is_second, not is_second)


@pytest.mark.parametrize("name", MODELS)
def test_trains_the_same(name: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_twice, name=name, lowering="aot_eager")


@pytest.mark.inductor
def test_trains_the_same_through_inductor(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_twice, name="mlp", lowering="inductor")


# Sizes that change.

_library = torch.library.Library("fsdp_compile_stored", "FRAGMENT")
_library.define("by_rows(Tensor x) -> Tensor")
_library.impl("by_rows", lambda x: x * (2 if x.shape[0] <= 6 else 3), "CompositeImplicitAutograd")


class ByRows(nn.Module):
    """A model that tracing decides about by the number of rows, where Dynamo does not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1](torch.ops.fsdp_compile_stored.by_rows(self.blocks[0](x)))


class Convolution(nn.Module):
    """Convolutions along rows, whose backward Inductor lowers for the sizes at hand."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Conv1d(8, 8, 3, padding=1), nn.Conv1d(8, 8, 3, padding=1)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x.T)).T
        return x


def train_sizes(build: Callable[[], nn.Module], lowering: str, sizes: Sequence[int]) -> list[Tensor]:
    """Return losses and gradients of microbatches of several sizes, with and without sync."""
    model, compiled = compiled_model(build, lowering)
    found = []
    for number, size in enumerate(sizes):
        model.set_requires_gradient_sync(number % 2 == 1)
        # Ranks have different sizes.
        rows = torch.arange(8.0 * (size + dist.get_rank()), dtype=torch.float64).view(-1, 8)
        loss = compiled(rows / 8).square().mean()
        loss.backward()
        found.append(loss.detach())
    return [*found, *(param.grad.full_tensor().clone() for param in model.parameters())]


@pytest.mark.parametrize(
    ("build", "lowering"),
    [
        (models.MLP, "aot_eager"),
        (partial(models.MLP, layers=1 + MIN_LAYERS), "aot_eager"),
        pytest.param(Convolution, "inductor", marks=[pytest.mark.inductor, pytest.mark.night]),
    ],
    ids=["mlp", "folded", "convolution"],
)
def test_takes_graphs_for_other_sizes(build: Callable[[], nn.Module], lowering: str, one_rank: None) -> None:
    """A second process finds the graph for dynamic sizes, in which the sizes of the first one are hints."""
    first, second = [2, 3, 6, 7], [2, 9, 5, 4]
    expected = train_sizes(build, lowering, second)
    with storing():
        train_sizes(build, lowering, first)
        with count_loads() as loads:
            results = train_sizes(build, lowering, second)
    assert loads[0] >= 2 and loads[1] == 0
    # Inductor's code for dynamic sizes depends on hints.
    torch.testing.assert_close(results, expected, rtol=0 if lowering == "aot_eager" else 1e-12, atol=0)


def test_takes_no_graph_that_was_traced_for_other_sizes(one_rank: None) -> None:
    """A stored graph is taken only for sizes that fulfil the conditions of its trace."""
    expected = train_sizes(ByRows, "aot_eager", [2, 9, 8, 5, 7])
    with storing():
        train_sizes(ByRows, "aot_eager", [2, 3, 6, 5])
        with count_loads() as loads:
            results = train_sizes(ByRows, "aot_eager", [2, 9, 8, 5, 7])
        assert loads == [2, 1]
    assert all(map(torch.equal, results, expected))


# Keys, and graphs that are not stored.


def compile_and_train(ranks: int = 2, size: int = 4, mp_policy: Any = None, reshard: Any = None, **options: Any) -> None:
    with fake_group(ranks):
        torch.manual_seed(0)
        model: Any = models.MLP()
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard, mp_policy=mp_policy or MixedPrecisionPolicy())
        fully_shard(model, mesh=mesh)
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager", **options})
        compiled(torch.ones(size, 8)).sum().backward()


def is_found(**changes: Any) -> bool:
    """Return whether a model that is compiled after another, in which nothing differs but ``changes``, finds its graphs."""
    with storing():
        compile_and_train()
        with count_loads() as loads:
            compile_and_train(**changes)
    return loads == [1, 0]


def test_finds_equal_graphs() -> None:
    assert is_found()
    # A plan's passes run anew.
    assert is_found(min_bucket_bytes=0)


@pytest.mark.parametrize(
    "changes",
    [
        {"ranks": 4},
        {"size": 6},
        {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        {"reshard": False},
        {"disable_passes": ["fold_layers"]},
    ],
    ids=str,
)
def test_finds_no_others(changes: dict[str, Any]) -> None:
    assert not is_found(**changes)


def test_finds_none_of_another_source() -> None:
    with storing():
        compile_and_train()
        with mock.patch("fsdp_compile.compiler.backend.configuration", lambda: "another"), count_loads() as loads:
            compile_and_train()
    assert loads == [0, 1]


def test_stores_nothing_that_is_captured() -> None:
    """Whoever looks at passes sees them run."""
    with storing():
        for _ in range(2):
            with count_loads() as loads, capture() as captured:
                compile_and_train()
            assert loads == [0, 0]
            assert "reshard_after_forward" in {each.name for each in captured.passes}


def test_stores_nothing_although_the_environment_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TORCHINDUCTOR_AUTOGRAD_CACHE=1`` turns torch's cache on for good, also where a graph must not be stored."""
    with storing():
        compile_and_train()
        monkeypatch.setattr(functorch_config._config["enable_autograd_cache"], "env_value_force", True)  # type: ignore[attr-defined]
        with count_loads() as loads, capture():
            compile_and_train()
        assert loads == [0, 0]


# Lowered graphs.


def count_passes() -> Any:
    """Return a context whose ``call_count`` is the number of times that passes ran over a graph for a plan."""
    return mock.patch.object(prepared_graph, "run_passes", wraps=prepared_graph.run_passes)


def scheduled(**options: Any) -> int:
    """Compile a model through Inductor and train it; return how many graphs passes ran over."""
    with count_passes() as passes:
        compile_and_train(**{"lowering": "inductor", **options})
    return passes.call_count


@pytest.mark.inductor
def test_takes_lowered_graphs() -> None:
    with storing():
        assert [scheduled(), scheduled()] == [2, 0]
        # Other options lower other graphs, of the same stored ones.
        assert [scheduled(min_bucket_bytes=0), scheduled(min_bucket_bytes=0)] == [2, 0]


def train_other_sizes(build: Callable[[], nn.Module], serves_all: bool) -> None:
    """Train in the place of processes with several sizes. Runs on every rank."""
    sizes = [2, 9, 6]
    expected = train_sizes(build, "aot_eager", sizes)
    with storing():
        train_sizes(build, "inductor", [2, 3, 6])
        for is_known in (serves_all, True):
            with count_passes() as passes:
                results = train_sizes(build, "inductor", sizes)
            assert (passes.call_count == 0) == is_known
            torch.testing.assert_close(results, expected, rtol=1e-12, atol=0)


@pytest.mark.inductor
def test_takes_lowered_graphs_for_other_sizes(one_rank: None) -> None:
    train_other_sizes(models.MLP, serves_all=True)


@pytest.mark.inductor
def test_takes_lowered_graphs_for_sizes_that_fulfil_conditions(one_rank: None) -> None:
    """Backward is lowered for the sizes at hand alone."""
    train_other_sizes(Convolution, serves_all=False)


@pytest.mark.inductor
@pytest.mark.night
def test_ranks_take_lowered_graphs_for_their_sizes(rank_pools: RankPools) -> None:
    """One rank may find a graph for its sizes, and the other one lower it."""
    rank_pools[2].run(train_other_sizes, build=Convolution, serves_all=False)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the graphs and kernels of a model."""
    with storing():
        assert scheduled() == 2
        return shutil.copytree(cache_dir(), tmp_path_factory.mktemp("filled") / "cache")


def _damage(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:20])


@pytest.mark.inductor
@pytest.mark.parametrize("folder", ["fsdp_compile", "fxgraph", "aotautograd"])
@pytest.mark.parametrize("spoil", [_damage, shutil.rmtree], ids=["damaged", "missing"])
def test_lowers_again_what_is_lost(spoil: Callable[[Path], None], folder: str, filled: Path) -> None:
    with storing():
        shutil.copytree(filled, cache_dir(), dirs_exist_ok=True)
        spoil(Path(cache_dir()) / folder)
        # A graph that is traced again may be lowered already.
        assert scheduled() == (0 if folder == "aotautograd" else 2)
        assert scheduled() == 0


@pytest.mark.inductor
def test_programs_that_were_cut_short_are_written_anew(filled: Path) -> None:
    with storing():
        shutil.copytree(filled, cache_dir(), dirs_exist_ok=True)
        programs = list(Path(cache_dir()).glob("??/*.py"))
        for path in programs:
            path.write_text(path.read_text()[: path.stat().st_size // 2])
        with pytest.warns(UserWarning, match=r"\.py, a program in Inductor's cache, was damaged") as warned:
            assert scheduled() == 0
        assert len([each for each in warned if "was damaged" in str(each.message)]) == len(programs) > 0


@pytest.mark.inductor
def test_trains_where_nothing_can_be_stored() -> None:
    with storing(), mock.patch.object(cache_folder.tempfile, "mkstemp", side_effect=OSError("No space left on device")):
        assert [scheduled(), scheduled()] == [2, 2]
