"""Precompiled files: another machine trains with what one has compiled, or gets an error that says what differs."""

from __future__ import annotations

import contextlib
import json
import math
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._functorch.config as functorch_config
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_compile import NotPrecompiled, fsdp_backend, fully_shard, load_precompiled, precompile, save_precompiled
from fsdp_compile.compiler.stored_graph import can_store
from fsdp_compile.dry_run import shard_layers
from passes.collectives.gloo import pretending_gloo
from tests.common.distributed import RankPool, fake_group
from tests.common.models import MLP
from tests.common.stored_graphs import count_traces, storing

pytestmark = pytest.mark.skipif(not can_store(), reason="this torch runs passes before it looks into its cache")


def build() -> Any:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = MLP()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def train(model: nn.Module, rows: int = 4, **options: Any) -> int:
    """Train a step. Return the number of frames that Dynamo traced."""
    options = {"lowering": "aot_eager", **options}
    with count_traces() as traces:
        torch.compile(model, backend=fsdp_backend, options=options)(torch.ones(rows, 8)).sum().backward()
    return traces[0]


def libraries() -> set[Path]:
    """Return the files of C++ kernels in the cache."""
    return {path for path in Path(cache_dir()).rglob("*") if path.suffix in (".so", ".cpp")}


def save(path: Path, **options: Any) -> str:
    """Save what a process has compiled."""
    with storing(frames=True), fake_group(2):
        assert train(build(), **options) > 0
        return save_precompiled(path)


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """Another machine, with an empty cache."""
    with storing(frames=True), fake_group(2):
        yield


@pytest.fixture
def single_thread() -> Iterator[None]:
    """As many threads as ranks have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A file and its digest."""
    path = tmp_path_factory.mktemp("precompiled") / "model.zip"
    return path, save(path)


def test_traces_nothing(saved: tuple[Path, str], elsewhere: None) -> None:
    path, digest = saved
    model = build()
    load_precompiled(path, model, sha256=digest)
    assert train(model) == 0
    assert all(param.grad is not None for param in model.parameters())


@pytest.mark.inductor
def test_compiles_nothing(tmp_path: Path) -> None:
    """All kernels are in the file: the model's call adds no file to the cache."""
    save(tmp_path / "model.zip", lowering="inductor")
    with storing(frames=True), fake_group(2):
        model = build()
        load_precompiled(tmp_path / "model.zip", model)

        before = libraries()
        assert train(model, lowering="inductor") == 0
        assert before and libraries() == before


@dataclass(frozen=True)
class Job:
    """A training of ranks.

    Attributes:
        mesh_shape: the numbers of ranks, or for a file a list of these.
        lowering: the option of the backend.
    """

    mesh_shape: Any
    lowering: str = "aot_eager"

    @property
    def options(self) -> dict[str, Any]:
        return {"lowering": self.lowering}

    def step(self, compiled: Any, x: Tensor) -> None:
        """Train two microbatches, then one with another size. Then the optimizer steps, and the model is evaluated."""
        optimizer = torch.optim.AdamW(compiled.parameters())
        for index, batch in enumerate((x, x, x[1:])):
            compiled.set_requires_gradient_sync(index > 0)
            compiled(batch).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            compiled(x)

    def train(self, mesh: DeviceMesh, path: Path | None) -> nn.Module:
        """Train a model with what is in a file, if there is one. Runs on every rank."""
        torch._dynamo.reset()
        torch.manual_seed(0)
        model: Any = MLP()
        shard_layers(model, mesh)
        if path is not None:
            load_precompiled(path, model)
        before = libraries()
        with count_traces() as traces:
            compiled = torch.compile(model, backend=fsdp_backend, options=self.options)
            self.step(compiled, torch.ones(4, 8) + dist.get_rank())
        if path is not None:
            assert traces == [0]
            assert libraries() == before
        return model


def compare(job: Job, path: Path) -> None:
    """Train with and without a file. Runs on every rank."""
    mesh = init_device_mesh("cpu", job.mesh_shape)
    expected = job.train(mesh, None)
    with storing(frames=True):
        found = job.train(mesh, path)
    for param, other in zip(found.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, other, rtol=0, atol=0)


def precompile_for(job: Job, path: Path) -> None:
    with torch.device("meta"):
        model = MLP()
    with functorch_config.patch(enable_autograd_cache=True):
        precompile(model, torch.zeros(4, 8), job.mesh_shape, path, step=job.step, options=job.options)
    assert all(param.is_meta for param in model.parameters())


def test_compiles_for_ranks_that_do_not_exist(tmp_path: Path, single_thread: None) -> None:
    job = Job((2, 2))
    precompile_for(job, tmp_path / "it.zip")
    for rank in (0, 3):
        with storing(frames=True), fake_group(4, rank), pretending_gloo():
            job.train(init_device_mesh("cpu", (2, 2)), tmp_path / "it.zip")


def test_one_file_serves_several_numbers_of_ranks(tmp_path: Path, single_thread: None) -> None:
    path = tmp_path / "it.zip"
    shapes = [(2,), (4,), (2, 2)]
    precompile_for(Job(shapes), path)
    for shape in shapes:
        with storing(frames=True), fake_group(math.prod(shape), 1), pretending_gloo():
            Job(shape).train(init_device_mesh("cpu", shape), path)
    with storing(frames=True), fake_group(8), pytest.raises(NotPrecompiled, match=r"number of ranks: 2 or 4; here: 8"):
        load_precompiled(path, nn.Linear(8, 8))


@pytest.mark.ranks
@pytest.mark.parametrize(
    "job", [Job((2, 2)), pytest.param(Job((2,), "inductor"), marks=pytest.mark.inductor)], ids=["2x2", "inductor"]
)
def test_trains_as_without_the_file(job: Job, tmp_path: Path, single_thread: None) -> None:
    precompile_for(job, tmp_path / "it.zip")
    # Ranks without other meshes, which groups would be numbered after.
    with contextlib.closing(RankPool(math.prod(job.mesh_shape))) as ranks:
        ranks.run(compare, job=job, path=tmp_path / "it.zip")


def test_precompile_needs_a_model_and_a_mesh(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"precompile cannot tell which dimensions of mesh_shape=\{'dp': 2\} shard: give shard="
    ):
        precompile(MLP(), torch.ones(4, 8), {"dp": 2}, tmp_path / "it.zip")
    with fake_group(2), pytest.raises(RuntimeError, match="there is one already"):
        precompile(MLP(), torch.ones(4, 8), (2,), tmp_path / "it.zip")
    assert not list(tmp_path.iterdir())


def test_says_what_is_in_the_file(saved: tuple[Path, str]) -> None:
    with zipfile.ZipFile(saved[0]) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    (forward,) = manifest["forwards"]
    assert (forward["name"], forward["symbolic"]) == ("unit_MLP_forward", False)
    assert manifest["surroundings"]["number of ranks"] == "2"
    assert {name.partition("/")[0] for name in manifest["files"]} >= {"fsdp_compile", "aotautograd"}


def test_says_what_differs_in_a_call(saved: tuple[Path, str], elsewhere: None) -> None:
    model = build()
    load_precompiled(saved[0], model)
    with pytest.raises(NotPrecompiled, match=r"unit_MLP_forward would be compiled(.|\n)*size mismatch(.|\n)*strict=False"):
        train(model, rows=6)
    with pytest.raises(NotPrecompiled, match="nothing is stored for this code and these options"):
        train(model, disable_passes=["fold_layers"])
    # Another model, for which nothing was loaded.
    assert train(build(), rows=6) > 0


def test_compiles_what_is_missing(saved: tuple[Path, str], elsewhere: None) -> None:
    model = build()
    load_precompiled(saved[0], model, strict=False)
    assert train(model) == 0
    assert train(model, rows=6) > 0


def test_an_option_names_the_file(saved: tuple[Path, str], elsewhere: None) -> None:
    model = build()
    assert train(model, precompiled=saved[0]) == 0
    with pytest.raises(NotPrecompiled, match=r"unit_MLP_forward would be compiled(.|\n)*size mismatch"):
        train(model, rows=6, precompiled=str(saved[0]))
    # Without the option, other calls compile.
    assert train(model, rows=6) > 0


def test_an_option_never_leads_to_a_compilation(saved: tuple[Path, str], elsewhere: None) -> None:
    model = build()
    with functorch_config.patch(enable_autograd_cache=False), pytest.raises(NotPrecompiled, match="with the caches off"):
        train(model, precompiled=saved[0])
    with torch.device("cpu"), pytest.raises(NotPrecompiled, match="a torch function mode"):
        train(model, precompiled=saved[0])
    with pytest.raises(NotPrecompiled, match=r"cannot be read: .*No such file"):
        train(model, precompiled=saved[0].parent / "no.zip")
    with pytest.raises(BackendCompilerFailed, match=r"options\['precompiled'\] must be the path of a file"):
        train(model, precompiled=True)


def test_says_what_is_around(saved: tuple[Path, str], elsewhere: None, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build()
    monkeypatch.setattr(torch, "__version__", "3.0")
    with pytest.raises(NotPrecompiled, match=r"another version of torch: 2.*; here: 3.0 .*Save it again"):
        load_precompiled(saved[0], model)
    with pytest.warns(UserWarning, match="another version of torch"):
        load_precompiled(saved[0], model, strict=False)
    assert train(model) > 0


def test_refuses_other_numbers_of_ranks(saved: tuple[Path, str]) -> None:
    with storing(frames=True), fake_group(4), pytest.raises(NotPrecompiled, match="another number of ranks: 2; here: 4"):
        load_precompiled(saved[0], nn.Linear(8, 8))


def test_refuses_damaged_files(saved: tuple[Path, str], tmp_path: Path, elsewhere: None) -> None:
    content, damaged = saved[0].read_bytes(), tmp_path / "damaged.zip"
    damaged.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match="is damaged, or not a file of save_precompiled"):
        load_precompiled(damaged, build())
    with pytest.raises(ValueError, match="SHA-256"):
        load_precompiled(damaged, build(), sha256=saved[1])
    with zipfile.ZipFile(saved[0]) as archive, zipfile.ZipFile(damaged, "w") as changed:
        for name in archive.namelist():
            changed.writestr(name, archive.read(name) + b" " * (name != "manifest.json"))
    with pytest.raises(ValueError, match="is not as it was saved"):
        load_precompiled(damaged, build())


def test_needs_something_to_save(elsewhere: None, tmp_path: Path) -> None:
    with pytest.raises(NotPrecompiled, match="has no stored forward of a sharded model"):
        save_precompiled(tmp_path / "model.zip")
    assert not list(tmp_path.iterdir())
