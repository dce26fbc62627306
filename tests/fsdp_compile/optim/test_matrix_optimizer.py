"""Optimizers of whole matrices: Muon and others give the values of one process, with one exchange in each direction."""

from __future__ import annotations

import contextlib
import copy
import math
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.optim import AdamW, Muon
from torch.optim.lr_scheduler import StepLR

import fsdp_compile
from fsdp_compile import (
    MatrixOptimizer,
    MatrixShard,
    RanksDisagree,
    clip_and_step,
    flat_optimizer,
    offload_optimizer,
    optimizer_in_backward,
)
from fsdp_compile.optim import matrix_optimizer, owners
from fsdp_compile.optim.owned_muon import OwnedMuon
from fsdp_compile.optim.owners import choose_owners
from tests.common.distributed import RankPools, device_mesh, fake_group

_MESHES = [(2,), (4,), (2, 2)]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 15), nn.Linear(15, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + cast("Tensor", self.down(self.up(x).relu()))


class Model(nn.Module):
    """Matrices of all kinds: wide, tall, with fewer rows than ranks, tied, frozen, cut along columns; and vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.narrow = nn.Linear(8, 1, bias=False)
        self.frozen = nn.Linear(8, 8, bias=False).requires_grad_(False)
        self.head = nn.Linear(8, 12, bias=False)
        cast("Block", self.blocks[1]).up.weight = cast("Block", self.blocks[0]).up.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.frozen(x) * self.narrow(x))


def columns(param: nn.Parameter) -> Shard | None:
    """Cut the embedding and the head along their columns."""
    return Shard(1) if tuple(param.shape) == (12, 8) else None


def build(fully_shard: Callable[..., Any], mesh: Any, **options: Any) -> Model:
    torch.manual_seed(0)
    model = Model()
    if mesh is None:
        return model
    # Two blocks share a parameter, so they are one unit.
    fully_shard([model.blocks[0], model.blocks[1]], mesh=mesh, **options)
    fully_shard(model.blocks[2], mesh=mesh, **options)
    fully_shard(model, mesh=mesh, shard_placement_fn=columns, **options)
    return model


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


def optimizers(model: nn.Module, make: Callable[..., torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Return an optimizer of matrices, in two groups, and AdamW for vectors."""
    first, *rest = matrices(model)
    groups = [{"params": [first], "lr": 0.05, "nesterov": False}, {"params": rest}]
    vectors = AdamW([param for param in model.parameters() if param.ndim == 1], lr=0.01)
    return [make(groups, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"), vectors]


def flat_muon(params: Any, **options: Any) -> torch.optim.Optimizer:
    return flat_optimizer(Muon, params, **options)


def local(tensor: Any) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def full(tensor: Any) -> Tensor:
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().clone()


def loss(forward: Callable[..., Tensor], step: int, rank: int) -> Tensor:
    tokens = torch.randint(0, 12, (4, 3), generator=torch.Generator().manual_seed(10 * step + rank))
    return forward(tokens).square().mean()


def train_beside_one_process(system: str, mesh_shape: tuple[int, ...], steps: int = 5) -> None:
    """Train on ranks. Give the same gradients to torch's Muon on whole matrices: all is equal to the bit. Ranks call this."""
    mesh = device_mesh(mesh_shape)
    model, whole = build(fsdp_compile.fully_shard, mesh), build(fsdp_compile.fully_shard, None)
    forward: Any = model
    if system != "eager":
        backend: Any = fsdp_compile.fsdp_backend
        forward = torch.compile(model, backend=backend, options={"lowering": system})
    own, reference = optimizers(model, flat_muon), optimizers(whole, Muon)
    schedules = [StepLR(each, 2, 0.5) for each in (*own, *reference)]
    for step in range(steps):
        loss(forward, step, dist.get_rank()).backward()
        for param, twin in zip(model.parameters(), whole.parameters(), strict=True):
            twin.grad = None if param.grad is None else full(param.grad)
        for each in (*own, *reference, *schedules):
            each.step()
        model.zero_grad()
    for (name, param), twin in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(full(param), twin), name
        kept, expected = own[0].state.get(param, {}), reference[0].state.get(twin, {})
        assert kept.keys() == expected.keys() and all(torch.equal(full(kept[key]), expected[key]) for key in kept), name


@pytest.mark.parametrize("mesh_shape", _MESHES, ids=str)
@pytest.mark.parametrize("system", ["eager", "aot_eager", pytest.param("inductor", marks=pytest.mark.inductor)])
def test_values_are_those_of_one_process(system: str, mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    rank_pools[4 if len(mesh_shape) == 2 else mesh_shape[0]].run(train_beside_one_process, system=system, mesh_shape=mesh_shape)


def write_gradients(model: nn.Module, step: int, rank: int) -> None:
    """Write gradients with singular values that are alike: iterations enlarge rounding where some are near zero."""
    for number, param in enumerate(model.parameters()):
        if param.requires_grad:
            generator = torch.Generator().manual_seed(1000 * step + 10 * number + rank)
            param.grad = torch.zeros_like(param)
            local(param.grad).copy_(torch.randn(local(param).shape, generator=generator))


def train_beside_fsdp2(mesh_shape: tuple[int, ...]) -> None:
    """Train beside FSDP2 with torch's Muon, whose operators on DTensors round otherwise. Every rank calls this."""
    mesh = device_mesh(mesh_shape)
    model, other = build(fsdp_compile.fully_shard, mesh), build(torch.distributed.fsdp.fully_shard, mesh)
    own, reference = optimizers(model, flat_muon), optimizers(other, Muon)
    for optimizer in (own[0], reference[0]):
        # torch's operators refuse to step it: "in-place operations that require placement changes are not supported".
        optimizer.param_groups[1]["params"] = [param for param in optimizer.param_groups[1]["params"] if param.shape[0] > 1]
    before = [full(param) for param in model.parameters()]
    for step in range(3):
        for each, made in ((model, own), (other, reference)):
            write_gradients(each, step, mesh.get_local_rank(mesh.ndim - 1))
            for optimizer in made:
                optimizer.step()
    for start, (name, param), twin in zip(before, model.named_parameters(), other.parameters(), strict=True):
        # bfloat16 has 8 bits.
        assert (full(param) - full(twin)).norm() <= 0.03 * (full(twin) - start).norm(), name


@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)], ids=str)
def test_trains_as_fsdp2(mesh_shape: tuple[int, ...], rank_pools: RankPools) -> None:
    rank_pools[2 * len(mesh_shape)].run(train_beside_fsdp2, mesh_shape=mesh_shape)


def train_with_tensor_parallelism() -> None:
    """Matrices that two dimensions of a mesh cut are stepped by torch, as with FSDP2. Every rank calls this."""
    mesh = device_mesh((2, 2), ("shard", "tp"))
    runs = []
    for fully_shard, make in ((fsdp_compile.fully_shard, flat_muon), (torch.distributed.fsdp.fully_shard, Muon)):
        torch.manual_seed(0)
        model = nn.ModuleDict({"up": nn.Linear(16, 64, bias=False), "down": nn.Linear(64, 16, bias=False)})
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(list(model.values()), mesh=mesh["shard"])
        optimizer = make(model.parameters(), lr=0.02)
        for step in range(2):
            write_gradients(model, step, dist.get_rank())
            optimizer.step()
        runs.append([full(param) for param in model.parameters()])
    for param, twin in zip(*runs, strict=True):
        assert torch.equal(param, twin)


def test_beside_tensor_parallelism(rank_pools: RankPools) -> None:
    rank_pools[4].run(train_with_tensor_parallelism)


class Experts(nn.Module):
    """Batches of matrices: one cut along the batch, one along rows, one along columns; and a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.by_expert = nn.Parameter(torch.randn(3, 6, 4))
        self.by_row = nn.Parameter(torch.randn(3, 8, 4))
        self.by_column = nn.Parameter(torch.randn(2, 6, 8))
        self.matrix = nn.Parameter(torch.randn(6, 4))


def train_experts(mesh_shape: tuple[int, ...], placement: str | None) -> None:
    """Step batches of matrices, beside torch's Muon of each matrix on one process: equal to the bit. Every rank calls this."""
    torch.manual_seed(0)
    model: Any = Experts()
    twins = {
        name: [matrix.detach().clone().requires_grad_() for matrix in (param if param.ndim == 3 else [param])]
        for name, param in model.named_parameters()
    }
    cuts = {(3, 8, 4): Shard(1), (2, 6, 8): Shard(2)}
    # Cuts along other dimensions than the first are even.
    place = None if placement else (lambda param: cuts.get(tuple(param.shape)))
    fsdp_compile.fully_shard(model, mesh=device_mesh(mesh_shape), placement=placement, shard_placement_fn=place)
    batches = [param for param in model.parameters() if param.ndim == 3]
    own = flat_muon([{"params": batches, "batch_of_matrices": True}, {"params": [model.matrix]}], lr=0.02, nesterov=False)
    reference = Muon([matrix for matrices in twins.values() for matrix in matrices], lr=0.02, nesterov=False)
    for step in range(3):
        for number, (name, param) in enumerate(model.named_parameters()):
            grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(10 * step + number))
            for twin, piece in zip(twins[name], grad if grad.ndim == 3 else [grad], strict=True):
                twin.grad = piece.clone()
            param.grad = distribute_tensor(grad, param.device_mesh, param.placements)
        own.step()
        reference.step()
    for name, param in model.named_parameters():
        found = full(param)
        assert torch.equal(found if found.ndim == 2 else found.flatten(0, 1), torch.cat(twins[name])), name


@pytest.mark.parametrize(
    ("mesh_shape", "placement"),
    [((2,), None), ((4,), None), ((2, 2), None), ((2, 2), "hybrid"), ((4,), "ddp")],
    ids=["2", "4", "2x2", "hybrid", "ddp"],
)
def test_batches_of_matrices(mesh_shape: tuple[int, ...], placement: str | None, rank_pools: RankPools) -> None:
    rank_pools[math.prod(mesh_shape)].run(train_experts, mesh_shape=mesh_shape, placement=placement)


def train_with_expert_parallelism(cuts_rows: bool) -> None:
    """Step experts that another dimension of the mesh cuts, too, beside torch's Muon of each. Every rank calls this."""
    mesh = device_mesh((2, 2), ("shard", "tp"))
    torch.manual_seed(0)
    weights = torch.randn(5, 6, 4)
    twins = [expert.clone().requires_grad_() for expert in weights]
    model: Any = nn.Module()
    model.experts = nn.Parameter(distribute_tensor(weights, mesh["tp"], [Shard(0)]))
    place = (lambda param: Shard(1)) if cuts_rows else None
    fsdp_compile.fully_shard(model, mesh=mesh["shard"], shard_placement_fn=place)
    optimizer = flat_muon([{"params": [model.experts], "batch_of_matrices": True}], lr=0.02, nesterov=False)
    reference = Muon(twins, lr=0.02, nesterov=False)
    for _ in range(2):
        for param in (model.experts, *twins):
            param.grad = param.detach().square()
        optimizer.step()
        reference.step()
    assert torch.equal(full(model.experts), torch.stack(twins))


@pytest.mark.parametrize("cuts_rows", [False, True])
def test_batches_beside_expert_parallelism(cuts_rows: bool, rank_pools: RankPools) -> None:
    rank_pools[4].run(train_with_expert_parallelism, cuts_rows=cuts_rows)


def train_fused() -> None:
    """Step a fused layer, and fused layers of experts, beside torch's Muon of all layers apart. Every rank calls this."""
    torch.manual_seed(0)
    model: Any = nn.Linear(5, 9, bias=False)
    model.experts = nn.Parameter(torch.randn(3, 4, 5))
    layers = [
        piece for matrix, pieces in ((model.weight, 3), *((one, 2) for one in model.experts)) for piece in matrix.chunk(pieces)
    ]
    twins = [layer.detach().clone().requires_grad_() for layer in layers]
    fsdp_compile.fully_shard(model, mesh=device_mesh((2,)))
    settings = {"lr": 0.02, "nesterov": False, "adjust_lr_fn": "match_rms_adamw"}
    experts = {"params": [model.experts], "pieces": 2, "batch_of_matrices": True}
    optimizer = flat_muon([{"params": [model.weight], "pieces": 3}, experts], **settings)
    reference = Muon(twins, **settings)
    for _ in range(3):
        for param in (model.weight, model.experts, *twins):
            param.grad = param.detach().square()
        optimizer.step()
        reference.step()
    assert torch.equal(torch.cat([full(model.weight), full(model.experts).flatten(0, 1)]), torch.cat(twins))


def test_pieces_of_fused_layers(rank_pools: RankPools) -> None:
    rank_pools[2].run(train_fused)


def count_updates(mesh_shape: tuple[int, ...], placement: str | None) -> tuple[int, int]:
    """Return how many matrices this rank updates in a step, and the number of its collectives."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(8)))
    fsdp_compile.fully_shard(model, mesh=device_mesh(mesh_shape), placement=placement)
    optimizer = flat_muon(model.parameters(), lr=0.02)
    write_gradients(model, 0, 0)
    with (
        mock.patch.object(OwnedMuon, "update", autospec=True, side_effect=OwnedMuon.update) as update,
        mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange,
        mock.patch.object(owners, "all_gather", wraps=owners.all_gather) as gather,
    ):
        optimizer.step()
    return update.call_count, exchange.call_count + gather.call_count


@pytest.mark.parametrize(("mesh_shape", "placement"), [((2, 2), None), ((4,), "ddp")], ids=["2x2", "ddp"])
def test_replicas_own_different_matrices(mesh_shape: tuple[int, ...], placement: str | None, rank_pools: RankPools) -> None:
    # There, back, and to the other replicas.
    collectives = 1 if placement else 3
    assert rank_pools[4].run(count_updates, mesh_shape=mesh_shape, placement=placement) == [(2, collectives)] * 4


# --- State ----------------------------------------------------------------------------------------


def save_and_load(path: Path, is_ours: bool, makes: bool) -> list[Tensor]:
    """Train two steps and save, or load. Return the parameters, and their momentum. Every rank calls this."""
    mesh = device_mesh((dist.get_world_size(),))
    fully_shard: Any = fsdp_compile.fully_shard if is_ours else torch.distributed.fsdp.fully_shard
    model = build(fully_shard, mesh)
    # torch's operators on DTensors refuse to step a matrix with fewer rows than ranks.
    params = [param for param in matrices(model) if param.shape[0] > 1 and param.requires_grad]
    optimizer = (flat_muon if is_ours else Muon)(params, lr=0.02)
    state: dict[str, Any] = {"model": model.state_dict()}
    if makes:
        for step in range(2):
            write_gradients(model, step, dist.get_rank())
            optimizer.step()
        state |= {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    else:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    found = [full(param) for param in model.parameters()]
    return [*found, *(full(optimizer.state[param]["momentum_buffer"]) for param in params)]


@pytest.mark.parametrize(("by", "to", "ranks"), [("ours", "fsdp2", 4), ("fsdp2", "ours", 4), ("ours", "ours", 2)])
def test_checkpoints_are_torchs(by: str, to: str, ranks: int, rank_pools: RankPools, tmp_path: Path) -> None:
    """FSDP2 with torch's Muon loads a checkpoint, and the other way round, on as many ranks or more, before any step."""
    (saved, *_) = rank_pools[2].run(save_and_load, path=tmp_path, is_ours=by == "ours", makes=True)
    (loaded, *_) = rank_pools[ranks].run(save_and_load, path=tmp_path, is_ours=to == "ours", makes=False)
    torch.testing.assert_close(loaded, saved, rtol=0, atol=0)


# --- Owners ---------------------------------------------------------------------------------------


def drop_gradients(which: slice) -> str:
    """Step with gradients that one rank has dropped, after a step in which ranks had all of them."""
    model = build(fsdp_compile.fully_shard, device_mesh((2,)))
    optimizer, _ = optimizers(model, flat_muon)
    for step in range(2):
        loss(model, step, dist.get_rank()).backward()
        if step == 1 and dist.get_rank() == 1:
            for param in matrices(model)[which]:
                param.grad = None
        try:
            optimizer.step()
            loss(model, step, dist.get_rank())
        except RanksDisagree as error:
            return str(error)
    return ""


@pytest.mark.parametrize("which", [slice(1, 2), slice(None)], ids=["one", "all"])
def test_ranks_with_other_gradients_raise(which: slice) -> None:
    with contextlib.closing(RankPools()) as own_pools:
        errors = own_pools[2].run(drop_gradients, which=which)
    assert all("step of FlatMuon" in error for error in errors), errors
    assert which.start is None or all("rank 1" in error and "blocks.0.up.weight" in error for error in errors), errors


def test_ranks_own_what_costs_alike() -> None:
    assert choose_owners([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    # The most costly first, each for the rank with the least to do.
    assert choose_owners([3, 5, 2, 2], 2) == [1, 0, 1, 0]
    assert choose_owners([4.0], 3) == [0]
    assert choose_owners([], 3) == []


class Spectral(MatrixOptimizer):
    """Steps along the nearest orthogonal matrix, without momentum; float32 travels."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def prepare(self, shard: MatrixShard) -> Tensor:
        return shard.grad

    def update(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        return u @ v

    def apply(self, shard: MatrixShard, update: Tensor) -> None:
        shard.param.add_(update, alpha=-shard.group["lr"])


class MuonOfHeads(OwnedMuon, Muon):
    """Muon that orthogonalizes each half of the rows by itself, as for the heads of attention."""

    def update(self, matrix: Tensor, group: Mapping[str, Any]) -> Tensor:
        return torch.cat([super(MuonOfHeads, self).update(half, group) for half in matrix.chunk(2)])


_OTHERS: Sequence[Callable[..., torch.optim.Optimizer]] = (Spectral, MuonOfHeads)


def train_others(which: int, sharded: bool) -> list[Tensor]:
    """Train with another optimizer of matrices, on shards or on whole matrices. Every rank calls this."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10, bias=False), nn.Linear(10, 6, bias=False))
    if sharded:
        fsdp_compile.fully_shard(model, mesh=device_mesh((2,)))
    optimizer = _OTHERS[which](model.parameters(), lr=0.1)
    for step in range(3):
        model(torch.randn(3, 6, generator=torch.Generator().manual_seed(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(map(full, model.parameters()))


@pytest.mark.parametrize("which", [0, 1], ids=["spectral", "heads"])
def test_other_optimizers_of_matrices(which: int, rank_pools: RankPools) -> None:
    (found, *_) = rank_pools[2].run(train_others, which=which, sharded=True)
    torch.testing.assert_close(found, train_others(which, sharded=False), rtol=1e-4, atol=1e-5)


# --- One process ----------------------------------------------------------------------------------


@pytest.fixture
def ranks() -> Iterator[None]:
    with fake_group(4):
        yield


def sharded() -> tuple[Model, torch.optim.Optimizer]:
    model = build(fsdp_compile.fully_shard, init_device_mesh("cpu", (4,)))
    loss(model, 0, 0).backward()
    for param in model.parameters():
        if param.grad is not None:
            local(param.grad).fill_(0.5)
    return model, flat_muon(matrices(model), lr=0.02)


def exchanges(optimizer: torch.optim.Optimizer) -> int:
    with mock.patch.object(dist, "all_to_all_single", wraps=dist.all_to_all_single) as exchange:
        optimizer.step()
    return exchange.call_count


def test_two_messages_for_all_matrices(ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    _, optimizer = sharded()
    assert exchanges(optimizer) == 2
    # A shard of the largest matrix has 30 elements of 2 bytes: each matrix is a bucket.
    monkeypatch.setattr(matrix_optimizer, "_BUCKET_BYTES", 1)
    trained = sum(param.grad is not None for param in optimizer.param_groups[0]["params"])
    assert exchanges(optimizer) == 2 * trained
    monkeypatch.setattr(matrix_optimizer, "_BUCKET_BYTES", 120)
    assert 2 < exchanges(optimizer) < 2 * trained


def test_what_nobody_shards(ranks: None) -> None:
    """Plain matrices, and replicated ones, are stepped without messages."""
    torch.manual_seed(0)
    plain = nn.Parameter(torch.randn(4, 3))
    twin = copy.deepcopy(plain)
    replicated = nn.Parameter(distribute_tensor(plain.detach().clone(), init_device_mesh("cpu", (4,))))
    own, reference = flat_muon([plain, replicated], lr=0.1), Muon([twin], lr=0.1)
    for _ in range(2):
        twin.grad = torch.randn(4, 3)
        plain.grad = twin.grad.clone()
        replicated.grad = distribute_tensor(twin.grad, init_device_mesh("cpu", (4,)))
        assert exchanges(own) == 0
        reference.step()
    assert torch.equal(plain, twin) and torch.equal(local(replicated), twin)


def test_other_placements(ranks: None) -> None:
    """Partial gradients are reduced. A matrix that two dimensions of a mesh cut is refused, with its placements."""
    model, _ = sharded()
    param: Any = model.narrow.weight
    param.grad = DTensor.from_local(torch.ones(1, 8), param.device_mesh, [Partial()], run_check=False)
    assert exchanges(flat_muon([param], lr=0.1)) == 2
    mesh = init_device_mesh("cpu", (2, 2))
    twice = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)]))
    twice.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Shard(1)])
    with pytest.raises(ValueError, match=r"Spectral cannot step a parameter, a \w+ with placements .*Shard\(dim=1\)"):
        Spectral([twice], lr=0.1).step()
    # Torch's step, which takes such a matrix, knows of no pieces.
    with pytest.raises(ValueError, match="FlatMuon cannot step a parameter"):
        flat_muon([{"params": [twice], "pieces": 2}], lr=0.1).step()


def test_hooks_run_once_and_scalers_skip(ranks: None) -> None:
    _, optimizer = sharded()
    calls: list[int] = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    assert optimizer.step(lambda: torch.tensor(2.0)) == 2.0  # type: ignore[arg-type, return-value]
    clip_and_step(optimizer, 1.0)
    assert calls == [1, 1]


def test_copies_and_pickles() -> None:
    torch.manual_seed(0)
    optimizer = flat_muon([nn.Parameter(torch.randn(3, 3))], lr=0.1)
    for copied in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert isinstance(copied, Muon) and isinstance(copied, MatrixOptimizer)
        (param,) = copied.param_groups[0]["params"]
        before = param.clone()
        param.grad = torch.ones(3, 3)
        copied.step()
        assert not torch.equal(before, param)


def test_bad_input_names_the_parameter(ranks: None) -> None:
    model, optimizer = sharded()
    with pytest.raises(ValueError, match=r"FlatMuon steps matrices, but parameter blocks\.0\.up\.bias has shape \[15\]"):
        flat_muon(model.parameters(), lr=0.1)
    experts = nn.Parameter(torch.ones(2, 2, 2))
    with pytest.raises(ValueError, match=r'has shape \[2, 2, 2\].* give its group "batch_of_matrices": True'):
        flat_muon([experts])
    with pytest.raises(ValueError, match=r"steps batches of matrices, but parameter 1 of its group has shape \[2, 2\]"):
        flat_muon([{"params": [experts, nn.Parameter(torch.ones(2, 2))], "batch_of_matrices": True}])
    with pytest.raises(ValueError, match=r'"pieces": 3, but a parameter of shape \[2, 2\]'):
        flat_muon([{"params": [nn.Parameter(torch.ones(2, 2))], "pieces": 3}])
    with pytest.raises(ValueError, match=r"parameter second has shape \[2\]"):
        flat_muon([("first", nn.Parameter(torch.ones(2, 2))), ("second", nn.Parameter(torch.ones(2)))])
    with pytest.raises(ValueError, match=r"parameter 1 of its group has shape \[2\]"):
        flat_muon([nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))])
    with pytest.raises(ValueError, match="blocks"):
        optimizer.add_param_group({"params": [param for param in model.parameters() if param.ndim == 1]})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="leave out one_buffer=True"):
        flat_muon(matrices(model), one_buffer=True)
    for make in (offload_optimizer, optimizer_in_backward):
        with pytest.raises((TypeError, ValueError), match="Muon"):
            make(Muon, matrices(model), lr=0.1)
