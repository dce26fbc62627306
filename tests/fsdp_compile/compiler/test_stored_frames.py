"""Stored frames: a second compilation traces nothing, trains the same, and takes no frame that differs in anything."""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.custom_graph_pass
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler import cache_folder, stored_graph, surroundings
from fsdp_compile.debug import capture
from tests.common import models
from tests.common.distributed import RankPools, fake_group
from tests.common.stored_graphs import count_traces, storing
from tests.common.stored_models import MODELS, compiled_model

pytestmark = pytest.mark.skipif(not stored_graph.can_store(), reason="this torch runs passes before it looks into its cache")

Build = Callable[[], nn.Module]


class Structured(models.MLP):
    """A model that takes and returns structures, and writes to an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        named = self._named({"x": x}, scale=2.0)
        return named["y"] * len(named)

    def _named(self, inputs: dict[str, Tensor], *, scale: float) -> dict[str, Tensor]:
        y = super().forward(inputs["x"] * scale)
        return {"y": y, "norm": y.detach().norm()}


def train(build: Build, lowering: str = "aot_eager", sizes: tuple[int, ...] = (4, 4, 4, 4)) -> list[Tensor]:
    """Return losses, gradients and buffers of microbatches with and without sync, and of evaluation. Runs on every rank."""
    model, compiled = compiled_model(build, lowering)
    found = []
    for step, size in enumerate(sizes):
        model.set_requires_gradient_sync(step % 2 == 1)
        rows = size + (dist.get_rank() if len(set(sizes)) > 1 else 0)
        loss = compiled(torch.arange(8.0 * rows, dtype=torch.float64).view(-1, 8) / 8 + step).square().mean()
        loss.backward()
        found.append(loss.detach())
    found += [param.grad.full_tensor().clone() for param in model.parameters()]
    with torch.no_grad():
        found.append(compiled(torch.ones(sizes[0], 8, dtype=torch.float64)))
    return [*found, *(buffer.clone() for buffer in model.buffers())]


def train_twice(build: Build, lowering: str, sizes: tuple[int, ...] = (4, 4, 4, 4)) -> None:
    """Train in the place of two processes, the second of which traces nothing. Runs on every rank."""
    expected = train(build, lowering, sizes)
    with storing(frames=True):
        for is_second in (False, True):
            with count_traces() as traces:
                results = train(build, lowering, sizes)
            assert (traces == [0]) == is_second
            # A frame for dynamic sizes may serve where the first process traced for one size.
            torch.testing.assert_close(results, expected, rtol=0 if lowering == "aot_eager" else 1e-12, atol=0)


@pytest.mark.parametrize("build", [*MODELS.values(), Structured], ids=[*MODELS, "structures"])
def test_trains_the_same(build: Build, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_twice, build=build, lowering="aot_eager")


@pytest.mark.parametrize("name", ["mlp", "folded"])
def test_trains_the_same_with_sizes_that_change(name: str, rank_pools: RankPools) -> None:
    rank_pools[2].run(train_twice, build=MODELS[name], lowering="aot_eager", sizes=(2, 3, 6, 7))


@pytest.mark.inductor
@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (2, 3, 6, 7)], ids=str)
def test_trains_the_same_through_inductor(sizes: tuple[int, ...], rank_pools: RankPools) -> None:
    rank_pools[2].run(train_twice, build=models.MLP, lowering="inductor", sizes=sizes)


# Frames that differ are traced.


def helper(x: Tensor) -> Tensor:
    return x * 2


FACTOR = 2.0


def decorated(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(method)
    def wrapper(*args: Any) -> Tensor:
        return method(*args)

    return wrapper


class Model(nn.Module):
    """A model that depends on many things."""

    factor = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.scale, self.factors, self.dropout = 2.0, [1.0, 2.0], nn.Dropout(0.0)
        self.function = lambda x: x + 1

    def forward(self, x: Tensor, offset: float = 1.0) -> Tensor:
        x = helper(x) * FACTOR * float(os.environ.get("FSDP_COMPILE_TEST_FACTOR", "1"))
        for block, factor in zip(self.blocks, self.factors, strict=False):
            x = self.function(self.dropout(block(x))) * factor * self.scale
        return self.finish(x) + offset

    @decorated
    def finish(self, x: Tensor) -> Tensor:
        return x * self.factor


def run(
    change: Callable[[Any], object] = lambda _: None,
    ranks: int = 2,
    rows: int = 4,
    dtype: torch.dtype = torch.float32,
    mp_policy: MixedPrecisionPolicy | None = None,
    build: Build = Model,
    arguments: tuple[Any, ...] = (),
    dynamic: bool | None = None,
    **options: Any,
) -> int:
    """Compile a model and train it. Return the number of frames that Dynamo traced."""
    torch._dynamo.reset()
    with fake_group(ranks), count_traces() as traces:
        torch.manual_seed(0)
        model: Any = build().to(dtype)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=mp_policy or MixedPrecisionPolicy())
        fully_shard(model, mesh=mesh)
        change(model)
        options = {"lowering": "aot_eager", **options}
        compiled = torch.compile(model, backend=fsdp_backend, options=options, dynamic=dynamic)
        compiled(torch.ones(rows, 8, dtype=dtype), *arguments).sum().backward()
    return traces[0]


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache folder with the frame of ``run()``."""
    with storing(frames=True):
        assert run() > 0
        return shutil.copytree(cache_dir(), tmp_path_factory.mktemp("filled") / "cache")


@pytest.fixture
def stored(filled: Path) -> Iterator[None]:
    """A copy of this folder."""
    with storing(frames=True):
        shutil.copytree(filled, cache_dir(), dirs_exist_ok=True)
        yield


def test_takes_an_equal_frame(stored: None) -> None:
    assert run() == 0
    assert run(_set("scale", 3.0)) > 0
    # Both are stored now.
    assert run(_set("scale", 3.0)) == run() == 0
    # Another object of an equal type, and options of passes that depend on no graph of Dynamo's.
    assert run(lambda model: setattr(model, "factors", [1.0, 2.0])) == 0


def _set(name: str, value: Any) -> Callable[[Any], object]:
    return lambda model: setattr(model, name, value)


@pytest.mark.parametrize(
    "changes",
    {
        "number": {"change": _set("scale", 3.0)},
        "item of a list": {"change": _set("factors", [1.0, 3.0])},
        "length of a list": {"change": _set("factors", [1.0])},
        "new attribute": {"change": _set("factor", 3.0)},
        "evaluation": {"change": lambda model: model.eval()},
        "module": {"change": _set("dropout", nn.Identity())},
        "function": {"change": _set("function", lambda x: x + 2)},
        "forward of an instance": {"change": lambda model: setattr(model.blocks[0], "forward", torch.relu)},
        "frozen parameter": {"change": lambda model: model.blocks[0].weight.requires_grad_(False)},
        "ranks": {"ranks": 4},
        "rows": {"rows": 6},
        "dtype": {"dtype": torch.float64},
        "precision": {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16)},
        "argument": {"arguments": (2.0,)},
        "option": {"disable_passes": ["fold_layers"]},
    }.items(),
    ids=lambda item: item[0],
)
def test_traces_what_differs(changes: tuple[str, dict[str, Any]], stored: None) -> None:
    assert run(**changes[1]) > 0


def test_logs_no_errors_of_frames_that_do_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    """Both models run the forward of ``nn.Sequential``. The second has no unit where the first has one."""
    with storing(frames=True), fake_group(2):
        for has_unit in (True, False):
            torch._dynamo.reset()
            model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
            if has_unit:
                fully_shard(model[0])
            fully_shard(model)
            compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
            compiled(torch.ones(2, 8)).sum().backward()
    assert [record.message for record in caplog.records if "creating guard" in record.getMessage()] == []


def _of_class(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Model, "finish", lambda self, x: x * 5)


def _of_torch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(nn.Linear, "forward", lambda self, x: x @ self.weight)


@pytest.mark.parametrize(
    "change",
    {
        "global": lambda patch: patch.setattr(sys.modules[__name__], "FACTOR", 3.0),
        "helper": lambda patch: patch.setattr(sys.modules[__name__], "helper", lambda x: x * 3),
        "method": _of_class,
        "decorated method": lambda patch: patch.setattr(Model, "finish", decorated(lambda self, x: x * 5)),
        "method of torch": _of_torch,
        "attribute of a class": lambda patch: patch.setattr(Model, "factor", 3.0),
        "default": lambda patch: patch.setattr(Model.forward, "__defaults__", (2.0,)),
        "environment": lambda patch: patch.setenv("FSDP_COMPILE_TEST_FACTOR", "3"),
        "version": lambda patch: patch.setattr(torch, "__version__", torch.__version__ + ".other"),
        "library": lambda patch: patch.setattr(surroundings, "configuration", lambda: "other"),
        "attention": lambda patch: patch.setattr(torch.backends.cuda, "math_sdp_enabled", lambda: False),
        "default dtype": lambda patch: torch.set_default_dtype(torch.float64),
        "threads": lambda patch: torch.set_num_threads(torch.get_num_threads() + 1),
    }.items(),
    ids=lambda item: item[0],
)
def test_traces_when_what_is_around_differs(
    change: tuple[str, Callable[[pytest.MonkeyPatch], None]], stored: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dtype, threads = torch.get_default_dtype(), torch.get_num_threads()
    try:
        change[1](monkeypatch)
        assert run() > 0
    finally:
        torch.set_default_dtype(dtype)
        torch.set_num_threads(threads)


class Asks(Model):
    """Calls a method that modules may have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + getattr(self, "offset_of_a_library", float)()


def test_methods_that_libraries_add_to_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as ``smart_apply`` of transformers, which a model gets that is not built on the meta device."""
    with storing(frames=True):
        assert run() > 0
        assert run(build=Asks) > 0
        monkeypatch.setattr(nn.Module, "offset_of_a_library", lambda self: 2.0, raising=False)
        assert run() == 0
        assert run(build=Asks) > 0
        monkeypatch.setattr(nn.Module, "offset_of_a_library", lambda self: 3.0)
        assert run(build=Asks) > 0
        # A method that a module has of itself.
        monkeypatch.setattr(nn.Module, "extra_repr", lambda self: "other")
        assert run() > 0


def test_traces_with_a_hook(stored: None) -> None:
    assert run(lambda model: model.dropout.register_forward_hook(lambda *_: None)) > 0
    assert run() == 0


def test_traces_in_another_context(stored: None) -> None:
    for config, name in [
        (torch._dynamo.config, "automatic_dynamic_shapes"),
        (torch._inductor.config, "fallback_random"),
        (torch._functorch.config, "view_replay_for_aliased_outputs"),
    ]:
        with config.patch(name, not getattr(config, name)):
            assert run() > 0
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert run() > 0
    for _ in range(2):
        with torch.device("cpu"):
            assert run() > 0
    # torch.compile, too, calls hooks at run time.
    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
        assert run() == 0


def _module(path: Path, text: str) -> Any:
    (path / "model_of_a_user.py").write_text(textwrap.dedent(text))
    sys.modules.pop("model_of_a_user", None)
    vars(sys.modules["fsdp_compile.api.module"]).pop("__import_model_of_a_user", None)
    return importlib.import_module("model_of_a_user")


SOURCE = """
    import torch
    from torch import nn

    def helper(x):
        return x * 2

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

        def forward(self, x):
            for block in self.blocks:
                x = helper(block(x))
            return x
"""


def test_traces_an_edited_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    with storing(frames=True):
        assert run(build=_module(tmp_path, SOURCE).Model) > 0
        assert run(build=_module(tmp_path, SOURCE).Model) == 0
        assert run(build=_module(tmp_path, SOURCE.replace("x * 2", "x * 3")).Model) > 0
        # Names and code of all functions are equal, but the file is not.
        assert run(build=_module(tmp_path, SOURCE + "\n    LIMIT = 3\n").Model) > 0


# Frames that cannot be stored are traced each time.


class OfRank(Model):
    def finish(self, x: Tensor) -> Tensor:
        return x * (1 + dist.get_rank())


who_am_i = dist.get_rank


class OfRankByAnotherName(Model):
    def finish(self, x: Tensor) -> Tensor:
        return x * (1 + who_am_i())


@torch.compiler.assume_constant_result
def _constant() -> float:
    return FACTOR


class Constant(Model):
    def finish(self, x: Tensor) -> Tensor:
        return x * _constant()


class Breaks(Model):
    def finish(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


@torch.compiler.allow_in_graph
def _opaque(x: Tensor) -> Tensor:
    return x * FACTOR


class Opaque(Model):
    def finish(self, x: Tensor) -> Tensor:
        return _opaque(x)


class OfIdentity(Model):
    def finish(self, x: Tensor) -> Tensor:
        return x * (id(self.dropout) % 7)


class OfEnvironment(Model):
    def finish(self, x: Tensor) -> Tensor:
        return x * float(os.environ.get(f"FSDP_COMPILE_{'TEST'}_FACTOR", "1"))


SAVED = [torch.ops.aten.mm.default]


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in SAVED else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Model):
    """A model whose checkpoint asks a function of the user, which Dynamo does not look into."""

    def finish(self, x: Tensor) -> Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        return checkpoint(torch.sin, x, use_reentrant=False, context_fn=contexts)


@pytest.mark.parametrize("build", [Selective, OfEnvironment, OfRank, OfRankByAnotherName, Constant, Breaks, Opaque, OfIdentity])
def test_traces_what_may_be_another_each_time(build: Build) -> None:
    with storing(frames=True):
        assert run(build=build) > 0
        assert run(build=build) > 0


def test_traces_what_is_captured() -> None:
    with storing(frames=True):
        run()
        with capture() as captured:
            assert run() > 0
        assert captured.forward


def test_traces_if_files_are_damaged(stored: None) -> None:
    for path in Path(cache_dir(), "fsdp_compile", "frames").rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes()[:1000])
    assert run() > 0
    assert run() == 0


def test_keeps_the_newest_files(stored: None) -> None:
    folder = Path(cache_dir(), "fsdp_compile", "frames")
    (first,) = [path for path in folder.rglob("*") if path.is_file()]
    for number in range(10):
        shutil.copy(first, first.with_name(str(number)))
    assert run(_set("scale", 3.0)) > 0
    assert len([path for path in folder.rglob("*") if path.is_file()]) == 8
    assert run(_set("scale", 3.0)) == 0


class Pass(torch._inductor.custom_graph_pass.CustomGraphPass):
    """A pass of the user, with a key for caches."""

    def __call__(self, graph: torch.fx.Graph) -> None: ...

    def uuid(self) -> str:
        return "1"


def test_traces_with_a_pass_of_the_user() -> None:
    with storing(frames=True), torch._inductor.config.patch(joint_custom_post_pass=Pass()):
        assert run() > 0
        assert run() > 0


# Calls after a frame was taken.


def freeze_and_unfreeze(taken: bool) -> list[Tensor]:
    model, compiled = compiled_model(models.MLP, "aot_eager")
    found = []
    with count_traces() as traces:
        compiled(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
        assert (traces == [0]) or not taken
    for requires_grad in (False, True):
        model.zero_grad()
        # The DTensor alone, as whoever has a list of parameters does.
        next(iter(model.parameters())).requires_grad_(requires_grad)
        for _ in range(2):
            compiled(torch.ones(4, 8, dtype=torch.float64)).sum().backward()
        found += [torch.zeros(1) if param.grad is None else param.grad.full_tensor() for param in model.parameters()]
    return found


def compare_frozen() -> None:
    expected = freeze_and_unfreeze(taken=False)
    with storing(frames=True):
        assert all(map(torch.equal, freeze_and_unfreeze(taken=False), expected))
        assert all(map(torch.equal, freeze_and_unfreeze(taken=True), expected))


def test_freezes_parameters(rank_pools: RankPools) -> None:
    rank_pools[2].run(compare_frozen)


def take_on_one_rank() -> None:
    """A rank whose files are lost traces, while the other one takes a frame."""
    expected = train(models.MLP)
    with storing(frames=True):
        train(models.MLP)
        if dist.get_rank() == 1:
            for path in Path(cache_dir(), "fsdp_compile", "frames").rglob("*"):
                if path.is_file():
                    path.unlink()
        with count_traces() as traces:
            results = train(models.MLP)
        assert (traces == [0]) == (dist.get_rank() == 0)
    assert all(map(torch.equal, results, expected))


def test_takes_a_frame_on_one_rank_alone(rank_pools: RankPools) -> None:
    rank_pools[2].run(take_on_one_rank)


@pytest.mark.parametrize("reshard_after_forward", [True, 2])
def test_takes_a_frame_of_another_rank(reshard_after_forward: bool | int) -> None:
    """Ranks in other groups of a mesh have equal graphs."""

    def traces_of(rank: int) -> int:
        with fake_group(8, rank), count_traces() as traces:
            torch.manual_seed(0)
            model: Any = models.MLP()
            mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh, reshard_after_forward=reshard_after_forward)
            torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})(torch.ones(4, 8)).sum().backward()
        return traces[0]

    with storing(frames=True):
        assert traces_of(0) > 0
        assert [traces_of(rank) for rank in (1, 6, 7)] == [0, 0, 0]


PROCESS = """
    import sys
    import torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from fsdp_compile import fsdp_backend, fully_shard
    from tests.common.distributed import fake_group
    from tests.common.stored_graphs import count_traces
    from tests.common.models import MLP

    torch.manual_seed(0)
    with fake_group(2), count_traces() as traces:
        model = MLP()
        for block in model.blocks:
            fully_shard(block, mesh=init_device_mesh("cpu", (2,)))
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"})
        compiled(torch.ones(4, 8)).sum().backward()
    print(traces[0])
"""


@pytest.mark.ranks
def test_takes_a_frame_of_another_process(tmp_path: Path) -> None:
    """Addresses, and the order of sets, are others there."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", textwrap.dedent(PROCESS)]
    outputs = [
        subprocess.run(command, env={**environment, "PYTHONHASHSEED": seed}, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]
    first, second = (int(output.split()[-1]) for output in outputs)
    assert first > 0 and second == 0


def test_trains_where_nothing_can_be_stored() -> None:
    with storing(frames=True), mock.patch.object(cache_folder.tempfile, "mkstemp", side_effect=OSError("No space left")):
        assert run() > 0
        assert run() > 0
