"""Sharding on top of tensor parallelism equals training in one process, and torch's FSDP2 on top of tensor parallelism.

Four ranks, two by two; eight with replicas. Tolerances are those of ``test_parity.py``.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from fsdp_compile import FSDPModule
from fsdp_compile.compiler.options import LOWERINGS
from tests.common import models
from tests.common.distributed import RankPools, device_mesh
from tests.common.microbatches import FLAVOURS, Task, differences, fully_shard_of, reference, train_schedules
from tests.common.parity import (
    Batch,
    Case,
    Compile,
    Forward,
    FullyShard,
    Run,
    adamw,
    compare,
    next_token_loss,
    regression_batch,
    shard_units,
    squared_error,
    token_batch,
    train_reference,
    train_with,
)
from tests.fsdp_compile import test_comm_hooks


def block_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the two products of each block and, of the root's parameters, only the head."""
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.get_submodule("head"), mesh, ColwiseParallel(output_layouts=Replicate()))


def uneven_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split products whose sizes do not divide. Between products, activations stay DTensors, which know the uneven sizes."""
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(use_local_output=False), "down": RowwiseParallel()})
    parallelize_module(model.get_submodule("head"), mesh, ColwiseParallel(output_layouts=Replicate()))


class _Block(nn.Module):
    """A block of attention and products, whose heads can be split."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.size = dim // heads
        self.norm = nn.LayerNorm(dim)
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def attention(self, x: Tensor) -> Tensor:
        q, k, v = (linear(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for linear in (self.query, self.key, self.value))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attention(self.norm(x)))
        return x + self.mlp(self.mlp_norm(x))


class Decoder(nn.Module):
    def __init__(self, vocab: int = 16, dim: int = 8, heads: int = 2, layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(_Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def sequence_parallel(model: nn.Module, mesh: DeviceMesh, head: ParallelStyle | None = None) -> None:
    """Lay out a decoder as torchtitan does: activations between the products are sharded along the sequence."""
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": head or ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    gathered = {"input_layouts": Shard(1)}
    for block in model.get_submodule("blocks").children():
        plan = {
            "norm": SequenceParallel(),
            "mlp_norm": SequenceParallel(),
            "query": ColwiseParallel(**gathered),
            "key": ColwiseParallel(**gathered),
            "value": ColwiseParallel(**gathered),
            "out": RowwiseParallel(output_layouts=Shard(1)),
            "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "mlp.0": ColwiseParallel(),
            "mlp.2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, mesh, plan)


def _attention_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Split the products of each block. Activations between them are whole."""
    for block in model.get_submodule("blocks").children():
        columns = {name: ColwiseParallel() for name in ("query", "key", "value", "mlp.0")}
        parallelize_module(block, mesh, {**columns, "out": RowwiseParallel(), "mlp.2": RowwiseParallel()})


def _tied(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay out a decoder, then tie its weights: layouts give modules new parameters, so users tie them afterwards."""
    sequence_parallel(model, mesh)
    model.get_submodule("head").weight = model.get_submodule("embedding").weight


def _tied_decoder(**sizes: int) -> nn.Module:
    model = Decoder(**sizes)
    model.head.weight = model.embedding.weight
    return model


def _loss_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay out a decoder whose logits, and the values that the loss computes from them, are sharded along the vocabulary."""
    sequence_parallel(
        model, mesh, head=ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    )


class _Adapted(nn.Module):
    """A frozen layer with a trained adapter of low rank."""

    def __init__(self, dim: int, out: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(dim, out)
        self.base.requires_grad_(False)
        self.a = nn.Linear(dim, rank, bias=False)
        self.b = nn.Linear(rank, out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class _Adapters(nn.Module):
    def __init__(self, dim: int = 8, layers: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(_Adapted(dim, 2 * dim), nn.Tanh(), _Adapted(2 * dim, dim)) for _ in range(layers)
        )
        self.head = _Adapted(dim, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def _adapters_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    """Lay out adapters as peft does: of a column-parallel layer only B is split, of a row-parallel layer only A."""
    columns = {"base": ColwiseParallel(), "b": ColwiseParallel()}
    rows = {"base": RowwiseParallel(), "a": RowwiseParallel()}
    for block in model.get_submodule("blocks").children():
        parallelize_module(block, mesh, {f"0.{name}": style for name, style in columns.items()})
        parallelize_module(block, mesh, {f"2.{name}": style for name, style in rows.items()})


def _frozen_in_part(**sizes: int) -> nn.Module:
    model = models.MLP(**sizes)
    for name in ("blocks.0.up.weight", "blocks.0.down.bias", "head.weight"):
        model.get_parameter(name).requires_grad_(False)
    return model


def _breaks_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model.get_submodule("blocks.0"), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_module(model.get_submodule("blocks.1"), mesh, ColwiseParallel(output_layouts=Replicate()))


def _shard_columns(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    """Shard columns. Of a row-parallel product, both parallelisms then split the same dimension."""
    shard_units(model, mesh, fully_shard, shard_placement_fn=lambda param: Shard(1) if param.ndim == 2 else None)


def _first_block_parallel(model: nn.Module, mesh: DeviceMesh) -> None:
    parallelize_module(model.get_submodule("blocks.0"), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def _shard_rest_over_all(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    """Shard the tensor parallel block over its own ranks, and the rest over all ranks."""
    root = mesh._get_root_mesh()
    fully_shard(model.get_submodule("blocks.0"), mesh=mesh)
    everyone = root._flatten("everyone")
    fully_shard(model.get_submodule("blocks.1"), mesh=everyone)
    fully_shard(model, mesh=everyone)


def _compile_each_block(model: nn.Module, options: Compile) -> Forward:
    for block in model.get_submodule("blocks").children():
        block.compile(**options)
    return model


def _shard_bf16(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))


def _change_lengths(batch_of: Callable[..., Batch], index: int, rank: int, world: int) -> Batch:
    return batch_of(index, rank, world, length=(4, 8, 6, 10, 12)[index % 5])


_mlp = partial(Case, build=models.MLP, parallelize=block_parallel, tensor_parallel=2, worlds=(4,))
_decoder = partial(
    Case,
    build=Decoder,
    parallelize=sequence_parallel,
    batch=token_batch,
    loss=next_token_loss,
    tensor_parallel=2,
    worlds=(4,),
)
_one_block = partial(models.MLP, layers=1)
_lengths = partial(_decoder, batch=partial(_change_lengths, token_batch))
_TABLE = [
    _mlp("mlp"),
    _decoder("decoder", clip_norm=0.1, inductor_worlds=(4,)),
    # torch's own compilers fail for symbolic lengths (fsdp_compile/compiler/traced_sizes.py).
    _lengths("lengths", build=partial(Decoder, layers=9), parallelize=_attention_parallel, inductor_worlds=(4,)),
    _lengths("sequence_lengths", inductor_worlds=(4,)),
    # No size divides by two: ranks of the tensor parallel mesh have other sizes, and run other graphs.
    _mlp(
        "uneven",
        build=partial(models.MLP, dim=5, hidden=7, out=3, layers=1),
        parallelize=uneven_parallel,
        batch=partial(regression_batch, dim=5, out=3),
    ),
    _mlp("shard_columns", build=_one_block, shard=_shard_columns),
    _mlp("reshard_true", shard=partial(shard_units, reshard_after_forward=True)),
    _mlp("reshard_false", shard=partial(shard_units, reshard_after_forward=False)),
    # FSDP2 makes its smaller groups of all ranks at once, from other ranks on each rank, and hangs.
    _mlp("reshard_int", shard=partial(shard_units, reshard_after_forward=2), worlds=(8,), fsdp2=False),
    _mlp("hsdp", worlds=(8,), replicas=2),
    _mlp("frozen_in_part", build=_frozen_in_part),
    _mlp("hsdp_frozen_in_part", build=_frozen_in_part, worlds=(8,), replicas=2),
    _mlp("adapters", build=_Adapters, parallelize=_adapters_parallel),
    _mlp("hsdp_adapters", build=_Adapters, parallelize=_adapters_parallel, worlds=(8,), replicas=2),
    _mlp("bf16", shard=_shard_bf16, reference_rtol=1e-1, fsdp2_rtol=1e-3),
    _mlp("meta", build=_one_block, meta=True),
    _mlp("checkpoint", build=partial(models.MLP, checkpointed=True)),
    _mlp("graph_breaks", build=models.GraphBreaks, parallelize=_breaks_parallel),
    _mlp("compile_each_block", compile=_compile_each_block),
    _mlp("accumulate", build=_one_block, accumulate=2),
    _mlp("meshes", parallelize=_first_block_parallel, shard=_shard_rest_over_all),
    _decoder("tied", build=partial(_tied_decoder, layers=1), parallelize=_tied),
    _decoder("foreach", build=partial(Decoder, layers=1), optimizer=partial(adamw, foreach=True)),
    _decoder("fused", build=partial(Decoder, layers=1), optimizer=partial(adamw, fused=True)),
    _decoder("loss_parallel", build=partial(Decoder, layers=1), parallelize=_loss_parallel),
    _decoder("evaluation", build=partial(Decoder, layers=1), evaluation=torch.no_grad),
]
CASES = {case.name: case for case in _TABLE}


def run_case(name: str, system: str) -> Run:
    """Train a case. Runs on every rank."""
    with loss_parallel() if name == "loss_parallel" else contextlib.nullcontext():
        return train_with(CASES[name], system)


@functools.cache
def _reference(name: str, world: int) -> Run:
    return train_reference(CASES[name], world)


@pytest.fixture(scope="session")
def fsdp2_runs(rank_pools: RankPools) -> Callable[[str, int], list[Run]]:
    return functools.cache(lambda name, world: rank_pools[world].run(run_case, name=name, system="fsdp2"))


# Cases whose graphs differ between 1-D and 2-D meshes.
_COMPILED = {"mlp", "uneven"}
# test_model_parallel_graphs.py traces lengths that change.
_AT_NIGHT = {"lengths", "sequence_lengths"}


def _parameters() -> list[Any]:
    parameters = []
    for case in _TABLE:
        for world in case.worlds:
            systems = ["fsdp2"] * case.fsdp2 + ["eager", "aot_eager"] + ["inductor"] * (world in case.inductor_worlds)
            for system in systems:
                # test_nd_example.py trains a tensor parallel decoder through Inductor.
                is_fixed = case.name in _COMPILED if system == "aot_eager" else system != "inductor"
                marks = () if is_fixed and world == 4 and case.name not in _AT_NIGHT else pytest.mark.night
                parameters.append(pytest.param(case, world, system, marks=marks, id=f"{case.name}-{world}-{system}"))
    return parameters


@pytest.mark.parametrize(("case", "world", "system"), _parameters())
def test_parity(
    case: Case, world: int, system: str, rank_pools: RankPools, fsdp2_runs: Callable[[str, int], list[Run]]
) -> None:
    ours = system != "fsdp2"
    runs = rank_pools[world].run(run_case, name=case.name, system=system) if ours else fsdp2_runs(case.name, world)
    if system in LOWERINGS:
        assert all(run.graphs > 0 for run in runs)
    if case.reference_rtol is not None:
        compare(runs, _reference(case.name, world // case.tensor_parallel), case.reference_rtol)
    if case.fsdp2 and ours:
        compare(runs, fsdp2_runs(case.name, world), case.lowered_rtol.get(system, case.fsdp2_rtol))


# --- Microbatches, hooks ---------------------------------------------------------------------------


def shard_beside(
    model: nn.Module,
    mesh: DeviceMesh,
    fully_shard: FullyShard,
    parallelize: Callable[[nn.Module, DeviceMesh], None] = block_parallel,
) -> None:
    """Shard over all dimensions of a mesh but the last, on top of tensor parallelism over the last."""
    *names, last = mesh.mesh_dim_names or ()
    parallelize(model, mesh[last])
    shard_units(model, mesh[tuple(names)], fully_shard)


def _batch_of_pair(index: int, rank: int, world: int) -> Batch:
    """Return a batch that two ranks share."""
    return regression_batch(index, rank // 2, world // 2)


_TASK = Task(models.MLP, _batch_of_pair, squared_error)


@pytest.mark.parametrize("system", [*(pytest.param(name, marks=pytest.mark.night) for name in ("fsdp2", "eager")), "aot_eager"])
def test_microbatches(system: str, rank_pools: RankPools) -> None:
    schedules = {name: [FLAVOURS[name]] * 2 for name in ("sharded", "unsharded", "keep_unsharded", "sharded_keep")}
    found = rank_pools[4].run(
        train_schedules, system=system, mesh_shape=(2, 2), task=_TASK, schedules=schedules, shard=shard_beside
    )
    expected = reference(_TASK, 4, [4, 4])
    for name in schedules:
        runs = [results[name] for results, _ in found]
        assert not isinstance(runs[0], str), runs[0]
        assert differences(runs, expected, 1e-4) == []
        if name in ("unsharded", "keep_unsharded"):
            # Only the last of four microbatches reduces over the data parallel ranks.
            assert [number > 0 for number in runs[0].counts("reduce_scatter")] == [False, False, False, True] * 2


# Models for runs with replicas, frozen parameters and adapters included. They have four blocks, which flavours name.
_WITH_REPLICAS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, DeviceMesh], None]]] = {
    "frozen_in_part": (partial(_frozen_in_part, layers=4), block_parallel),
    "adapters": (partial(_Adapters, layers=4), _adapters_parallel),
}


@pytest.mark.parametrize(
    ("system", "name", "flavours"),
    [
        pytest.param("aot_eager", "adapters", ("unsharded_then_partial", "partial_keep_one_block"), marks=pytest.mark.night),
        *(
            pytest.param(system, name, tuple(FLAVOURS), marks=pytest.mark.night)
            for system, name in [("fsdp2", "adapters"), *itertools.product(("eager", "aot_eager"), _WITH_REPLICAS)]
        ),
    ],
)
def test_microbatches_with_replicas(system: str, name: str, flavours: tuple[str, ...], rank_pools: RankPools) -> None:
    build, parallelize = _WITH_REPLICAS[name]
    task, schedules = Task(build, _batch_of_pair, squared_error), {flavour: [FLAVOURS[flavour]] * 2 for flavour in flavours}
    shard = partial(shard_beside, parallelize=parallelize)
    found = rank_pools[8].run(
        train_schedules, system=system, mesh_shape=(2, 2, 2), task=task, schedules=schedules, shard=shard, count=False
    )
    expected = reference(task, 8, [4, 4])
    for flavour in schedules:
        runs = [results[flavour] for results, _ in found]
        assert not isinstance(runs[0], str), runs[0]
        assert differences(runs, expected, 1e-4) == [], flavour


def hooked_gradients(system: str, hook: str, shape: tuple[int, ...] = (2, 2)) -> dict[str, Tensor]:
    torch.manual_seed(0)
    mesh = device_mesh(shape)
    model: Any = models.MLP(layers=1)
    shard_beside(model, mesh, fully_shard_of("ours"))
    if hook == "adds_one":
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_all_reduce_hook(test_comm_hooks.adds_one)
    elif hook:
        model.register_comm_hook(mesh.get_group(len(shape) - 2), getattr(test_comm_hooks, hook))
    forward = model
    if system != "eager":
        from fsdp_compile import fsdp_backend

        forward = torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    squared_error(forward, _batch_of_pair(0, dist.get_rank(), math.prod(shape))).backward()
    return {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("shape", [(2, 2), pytest.param((2, 2, 2), marks=pytest.mark.night)], ids=str)
@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_communication_hooks(system: str, shape: tuple[int, ...], rank_pools: RankPools) -> None:
    """Hooks are called with the pieces of parameters, and reduce over the data parallel ranks."""
    pool = rank_pools[math.prod(shape)]
    expected = pool.run(hooked_gradients, system="eager", hook="", shape=shape)[0]
    wanted: dict[str, Callable[[Tensor], Tensor]] = {
        "averages": lambda gradient: gradient,
        "doubles": lambda gradient: 2 * gradient,
        # Added before the division.
        "adds_one": lambda gradient: gradient + 2 / math.prod(shape),
    }
    for hook, function in wanted.items():
        actual = pool.run(hooked_gradients, system=system, hook=hook, shape=shape)[0]
        for name, gradient in expected.items():
            torch.testing.assert_close(actual[name], function(gradient), msg=lambda text, what=(hook, name): f"{what}: {text}")


# --- Parameters on different meshes ----------------------------------------------------------------


_ON_MIXED_MESHES: dict[str, Callable[[list[nn.Parameter]], Any]] = {
    "clip_grad_norm_": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1),
    "clip_grad_norm_, foreach": lambda parameters: nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True),
    "AdamW": lambda parameters: adamw(parameters).step(),
    "AdamW, foreach": lambda parameters: adamw(parameters, foreach=True).step(),
    "AdamW, fused": lambda parameters: adamw(parameters, fused=True).step(),
}


def on_mixed_meshes(system: str) -> dict[str, list[Tensor] | str]:
    """Clip or step a model in which some parameters are not tensor parallel; return values and gradients, or the error.

    Runs on every rank.
    """
    found: dict[str, list[Tensor] | str] = {}
    for name, apply in _ON_MIXED_MESHES.items():
        torch.manual_seed(0)
        model = models.MLP(layers=1)
        shard_beside(model, device_mesh((2, 2)), fully_shard_of(system))
        squared_error(model, _batch_of_pair(0, dist.get_rank(), 4)).backward()
        parameters: list[Any] = list(model.parameters())
        assert {parameter.device_mesh.ndim for parameter in parameters} == {1, 2}
        try:
            apply(parameters)
        except Exception as error:
            found[name] = type(error).__name__
        else:
            found[name] = [tensor.full_tensor() for p in parameters for tensor in (p.detach(), p.grad)]
    return found


def test_mixed_meshes_are_as_with_fsdp2(rank_pools: RankPools) -> None:
    theirs, ours = (rank_pools[4].run(on_mixed_meshes, system=system)[0] for system in ("fsdp2", "ours"))
    for name, expected in theirs.items():
        if isinstance(expected, str):
            assert ours[name] == expected, name
        else:
            torch.testing.assert_close(ours[name], expected, msg=lambda text, name=name: f"{name}: {text}")
    # torch computes no norm over tensors of several meshes: users take a norm for each mesh, and combine the norms.
    assert {name for name, found in theirs.items() if isinstance(found, str)} == {"clip_grad_norm_", "clip_grad_norm_, foreach"}


class _Piece(nn.Linear):
    """A layer of which a rank has two or three rows. The results of its forward may differ between ranks."""

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.to_local().t()).sum(-1, keepdim=True)  # type: ignore[operator]


class _Pieces(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense, self.cut = nn.Linear(8, 8), _Piece(8, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.dense(x) + self.cut(x)


def gradients_of_pieces(system: str) -> list[Tensor]:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("own", "cut"))
    model: Any = _Pieces()
    model.cut.weight = nn.Parameter(distribute_tensor(model.cut.weight.detach(), mesh["cut"], [Shard(0)]))
    fully_shard = fully_shard_of(system)
    fully_shard(model.cut, mesh=mesh["own"])
    fully_shard(model, mesh=mesh._flatten("all"))
    if system == "aot_eager":
        model.compile(backend="fsdp", options={"lowering": system})
    model(regression_batch(0, dist.get_rank(), 4)[0]).square().sum().backward()
    return [parameter.grad.full_tensor() for parameter in model.parameters()]


@pytest.mark.parametrize("system", ["eager", "aot_eager"])
def test_ranks_that_shard_one_layer_together_may_have_other_sizes_of_another(system: str, rank_pools: RankPools) -> None:
    theirs = rank_pools[4].run(gradients_of_pieces, system="fsdp2")[0]
    torch.testing.assert_close(rank_pools[4].run(gradients_of_pieces, system=system)[0], theirs)
