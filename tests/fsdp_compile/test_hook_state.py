"""Hooks with their own tensors compute, step by step, the same as plain torch with state for each rank and parameter."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import HookNotTraceable, fsdp_backend, fully_shard
from fsdp_compile.comm_hooks import (
    DefaultState,
    ErrorFeedback,
    HookBucket,
    HookParameter,
    HookTensors,
    PowerSGD,
    QuantizedReduce,
)
from tests.common.distributed import RankPools, device_mesh
from tests.common.rounding import rounded_group

_GRID, _BLOCK = 0.25, 8


def on_a_grid(state: DefaultState, grad: Tensor, output: Tensor) -> Tensor:
    """Reduce values that are rounded to a coarse grid, as a user's hook may; return the values that were sent."""
    sent = (grad / _GRID).round() * _GRID
    dist.reduce_scatter_tensor(output, sent, group=state.process_group)
    output.div_(state.world_size)
    return sent


class Momentum:
    """A user's hook that keeps a moving average of this rank's shard."""

    def init_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        return {"average": torch.zeros(1, parameter.numel, dtype=parameter.dtype, device=parameter.device)}

    def __call__(self, state: DefaultState, grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
        dist.reduce_scatter_tensor(output, grad, group=state.process_group)
        output.div_(state.world_size)
        runs = output.split([parameter.numel for parameter in bucket.parameters])
        for own, run in zip(bucket.tensors, runs, strict=True):
            own["average"].mul_(0.5).add_(run)
        output.copy_(torch.cat([own["average"].view(-1) for own in bucket.tensors]))


def on_a_grid_in_place(state: DefaultState, grad: Tensor) -> Tensor:
    sent = (grad / _GRID).round() * _GRID
    grad.copy_(sent)
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(state.world_size)
    return sent


HOOKS: dict[str, Callable[[], Any]] = {
    "grid": lambda: ErrorFeedback(on_a_grid),
    "int8": lambda: ErrorFeedback(QuantizedReduce(torch.int8, _BLOCK)),
    "power_sgd": lambda: PowerSGD(rank=2, min_compression_rate=0.5),
    "momentum": Momentum,
    "stochastic": lambda: ErrorFeedback(QuantizedReduce(torch.int8, _BLOCK, stochastic_rounding=True)),
}


# No width divides by two. A unit has one parameter, as rounding blocks depend on the rest of the bucket. One parameter is too
# small for PowerSGD.
_WIDTHS = (9, 17, 11, 3)


def build(widths: tuple[int, ...] = _WIDTHS) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(*pair, bias=False) for pair in itertools.pairwise(widths)]
    return nn.Sequential(layers[0], nn.Tanh(), *layers[1:]).double()


def batch(step: int, rank: int) -> Tensor:
    return torch.randn(4, _WIDTHS[0], generator=torch.Generator().manual_seed(100 * step + rank)).double()


def shard(shape: tuple[int, ...], hook: str, system: str) -> tuple[nn.Module, Any]:
    model, mesh = build(), device_mesh(shape)
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model.register_comm_hook(DefaultState(mesh.get_group(mesh.ndim - 1)), HOOKS[hook]())
    compiled = model
    if system != "eager":
        compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    return model, compiled


def values(model: nn.Module) -> list[Tensor]:
    return [param.detach().full_tensor().clone() for param in model.parameters()]  # type: ignore[attr-defined]


def train(
    shape: tuple[int, ...], hook: str, system: str, steps: int = 3, microbatches: int = 1, flag: str = ""
) -> list[list[Tensor]]:
    """Return the parameters after each step. Runs on every rank."""
    model, compiled = shard(shape, hook, system)
    found = []
    for step in range(steps):
        run_step(model, compiled, step, microbatches, flag)
        found.append(values(model))
    return found


def run_step(model: nn.Module, forward: Any, step: int, microbatches: int = 1, flag: str = "") -> None:
    for microbatch in range(microbatches):
        if flag:
            getattr(model, flag)(microbatch == microbatches - 1)
        forward(batch(step * microbatches + microbatch, dist.get_rank())).square().sum().backward()
    with torch.no_grad():
        for param in model.parameters():
            assert param.grad is not None
            param -= 0.01 * param.grad
            param.grad = None


class Emulated:
    """The reduction of one parameter's gradients over a group of ranks, with its state, in plain torch."""

    def __init__(self, hook: str, ranks: int):
        self.hook, self.ranks = hook, ranks
        self.residuals: list[Any] = [0.0] * ranks
        self.factor: Tensor | None = None

    def reduce(self, grads: list[Tensor]) -> Tensor:
        rows = grads[0].size(0)
        padded = [torch.cat([grad, grad.new_zeros(-rows % self.ranks, grad.size(1))]) for grad in grads]
        wanted = [grad + residual for grad, residual in zip(padded, self.residuals, strict=True)]
        if self.hook == "momentum":
            self.residuals[0] = 0.5 * self.residuals[0] + sum(padded) / self.ranks
            return self.residuals[0][:rows]
        if self.hook == "power_sgd" and sum(wanted[0].shape) < wanted[0].numel():
            said = self._project(wanted)
        elif self.hook == "power_sgd":
            return sum(grads) / self.ranks
        else:
            said = [self._round(tensor) for tensor in wanted]
        self.residuals = [tensor - message for tensor, message in zip(wanted, said, strict=True)]
        return (sum(said) / self.ranks)[:rows]

    def _round(self, wanted: Tensor) -> Tensor:
        if self.hook == "grid":
            return (wanted / _GRID).round() * _GRID
        pieces = wanted.float().view(self.ranks, -1)
        rounded = [torch.cat([rounded_group(block, torch.int8) for block in piece.split(_BLOCK)]) for piece in pieces]
        return torch.stack(rounded).view(wanted.shape).double()

    def _project(self, wanted: list[Tensor]) -> list[Tensor]:
        if self.factor is None:
            self.factor = torch.randn(wanted[0].size(1), 2, generator=torch.Generator().manual_seed(0)).double()
        basis = torch.linalg.qr(sum(wanted) @ self.factor / self.ranks).Q
        self.factor = sum(wanted).t() @ basis / self.ranks
        return [basis @ (basis.t() @ tensor) for tensor in wanted]


def emulate(
    shape: tuple[int, ...],
    hook: str,
    steps: int = 3,
    microbatches: int = 1,
    flag: str = "",
    model: nn.Module | None = None,
) -> list[list[Tensor]]:
    replicas, ranks = (1, *shape)[-2:]
    model = model or build()
    params = list(model.parameters())
    groups = [[Emulated(hook, ranks) for _ in params] for _ in range(replicas)]
    found = []
    for step in range(steps):
        grads: dict[int, list[Tensor]] = {}
        total = [torch.zeros_like(param) for param in params]
        for microbatch in range(microbatches):
            for rank in range(replicas * ranks):
                loss = model(batch(step * microbatches + microbatch, rank)).square().sum()
                new = torch.autograd.grad(loss, params)
                grads[rank] = [old + grad for old, grad in zip(grads.get(rank, total), new, strict=True)]
            if microbatch == microbatches - 1 or flag == "set_requires_all_reduce":
                for replica, group in enumerate(groups):
                    members = [grads[replica * ranks + rank] for rank in range(ranks)]
                    reduced = [of.reduce([grad[index] for grad in members]) for index, of in enumerate(group)]
                    total = [old + grad / replicas for old, grad in zip(total, reduced, strict=True)]
                grads = {rank: [torch.zeros_like(param) for param in params] for rank in grads}
        with torch.no_grad():
            for param, grad in zip(params, total, strict=True):
                param -= 0.01 * grad
        found.append([param.detach().clone() for param in params])
    return found


def assert_equal(found: list[list[Tensor]], expected: list[list[Tensor]], rtol: float = 1e-9) -> None:
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for place, (actual, wanted) in enumerate(zip(ours, theirs, strict=True)):
            torch.testing.assert_close(actual, wanted, rtol=rtol, atol=rtol, msg=lambda text, at=(step, place): f"{at}: {text}")


#: Tolerances. PowerSGD and scales are in float32.
_RTOL = {"grid": 1e-9, "momentum": 1e-9, "int8": 1e-6, "power_sgd": 1e-5}


@pytest.mark.parametrize(
    ("hook", "system"),
    [
        pytest.param(hook, system, marks=pytest.mark.night if system == "inductor" and hook != "int8" else [])
        for hook in _RTOL
        for system in ("aot_eager", "eager", "inductor")
    ],
)
def test_steps(rank_pools: RankPools, hook: str, system: str) -> None:
    found = rank_pools[2].run(train, shape=(2,), hook=hook, system=system)
    assert_equal(found[0], emulate((2,), hook), _RTOL[hook])


def train_in_turns(hook: str) -> list[list[Tensor]]:
    """Return the parameters of one unit after each step, compiled and uncompiled in turns. Runs on every rank."""
    model = fully_shard(build(), mesh=device_mesh((2,)))
    model.register_comm_hook(DefaultState(device_mesh((2,)).get_group()), HOOKS[hook]())
    compiled, found = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}), []
    for step in range(4):
        run_step(model, model if step % 2 else compiled, step)
        found.append(values(model))
    return found


_EVEN = (9, 16, 4)


def train_with_tensor_parallelism(system: str, path: str) -> list[list[Tensor]]:
    """Return the parameters after each step, with matrices that are split in two before sharding. Runs on every rank.

    Also check that a checkpoint restores the hook's tensors.
    """
    mesh = device_mesh((2, 2), ("dp", "tp"))
    model = parallelize_module(build(_EVEN), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh["dp"])
    model.register_comm_hook(DefaultState(mesh.get_group("dp")), HOOKS["grid"]())
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    found = []
    for step in range(3):
        forward(batch(step, mesh.get_local_rank("dp"))).square().sum().backward()
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.01 * param.grad
                param.grad = None
        found.append(values(model))
    tensors = HookTensors(model)
    kept = {key: value.to_local().clone() for key, value in tensors.state_dict().items()}  # type: ignore[attr-defined]
    dcp.save({"comm_hooks": tensors}, checkpoint_id=path)
    model.reset_iter_state()
    dcp.load({"comm_hooks": tensors}, checkpoint_id=path)
    for key, value in tensors.state_dict().items():
        assert value.shape == (4, 2, kept[key].numel() // 2)
        assert kept[key].any() and torch.equal(value.to_local(), kept[key])  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("system", ["aot_eager", "eager"])
def test_tensors_of_parameters_that_another_parallelism_has_laid_out(
    rank_pools: RankPools, system: str, tmp_path: Path
) -> None:
    found = rank_pools[4].run(train_with_tensor_parallelism, system=system, path=str(tmp_path))[0]
    assert_equal(found, emulate((2,), "grid", model=build(_EVEN)))


@pytest.mark.parametrize("hook", ["grid", "power_sgd"])
def test_any_bucket_finds_the_tensors_of_its_parameters(rank_pools: RankPools, hook: str) -> None:
    """Graphs and uncompiled code reduce gradients in different orders, but find the same tensors."""
    assert_equal(rank_pools[2].run(train_in_turns, hook=hook)[0], emulate((2,), hook, steps=4), _RTOL[hook])


@pytest.mark.parametrize(
    ("shape", "flag"),
    [
        ((2,), "set_requires_gradient_sync"),
        ((2, 2), "set_requires_all_reduce"),
        *(pytest.param((2, 2), flag, marks=pytest.mark.night) for flag in ("set_requires_gradient_sync", "")),
    ],
)
def test_tensors_move_on_when_something_is_reduced(rank_pools: RankPools, shape: tuple[int, ...], flag: str) -> None:
    options = {"shape": shape, "hook": "grid", "microbatches": 3, "flag": flag}
    expected = emulate(**options)  # type: ignore[arg-type]
    for system in ("aot_eager", "eager"):
        assert_equal(rank_pools[2 * len(shape)].run(train, system=system, **options)[0], expected)


def train_over_replicas(system: str, flag: str) -> list[list[Tensor]]:
    """Return the parameters after each step of two microbatches, with a checkpoint between steps. Runs on every rank."""
    model, mesh = build(), device_mesh((2, 2))
    fully_shard(model, mesh=mesh)
    model.register_comm_hook(DefaultState(mesh.get_group("replicate")), ErrorFeedback(on_a_grid_in_place), over="replicas")
    model.register_comm_hook(DefaultState(mesh.get_group("shard")), HOOKS["momentum"]())
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    found = []
    for step in range(3):
        run_step(model, forward, step, 2, flag)
        found.append(values(model))
        tensors = HookTensors(model)
        saved = {key: value.clone() for key, value in tensors.state_dict().items()}
        assert {key.split(".", 2)[2] for key in saved} == {"average", "replicas.residual"}
        model.reset_iter_state()
        tensors.load_state_dict(saved)
    return found


def emulate_over_replicas(flag: str) -> list[list[Tensor]]:
    model, found = build(), []
    params = list(model.parameters())
    # ``within``: the reductions in the shard group of each replica. ``between``: the reductions over replicas.
    within = [[Emulated("momentum", 2) for _ in params] for _ in range(2)]
    between = [Emulated("grid", 2) for _ in params]
    for step in range(3):
        total = [[torch.zeros_like(param) for param in params] for _ in range(2)]
        kept: dict[int, list[Tensor]] = {}
        for microbatch in range(2):
            for rank in range(4):
                new = torch.autograd.grad(model(batch(2 * step + microbatch, rank)).square().sum(), params)
                kept[rank] = [old + grad for old, grad in zip(kept.get(rank, [0.0] * len(new)), new, strict=True)]
            if microbatch == 1 or flag == "set_requires_all_reduce":
                for replica in range(2):
                    pairs = zip(kept[2 * replica], kept[2 * replica + 1], strict=True)
                    reduced = [of.reduce(list(pair)) for of, pair in zip(within[replica], pairs, strict=True)]
                    total[replica] = [old + grad for old, grad in zip(total[replica], reduced, strict=True)]
                kept = {}
        with torch.no_grad():
            for param, of, *pair in zip(params, between, *total, strict=True):
                param -= 0.01 * of.reduce(pair)
        found.append([param.detach().clone() for param in params])
    return found


@pytest.mark.parametrize(
    ("system", "flag"),
    [
        ("aot_eager", "set_requires_all_reduce"),
        ("eager", "set_requires_all_reduce"),
        pytest.param("inductor", "set_requires_gradient_sync", marks=pytest.mark.night),
        ("eager", "set_requires_gradient_sync"),
    ],
)
def test_tensors_over_replicas(rank_pools: RankPools, system: str, flag: str) -> None:
    assert_equal(rank_pools[4].run(train_over_replicas, system=system, flag=flag)[0], emulate_over_replicas(flag))


def resume(hook: str, system: str, path: str) -> None:
    """Check that a model that resumes from a checkpoint computes the same as the one that saved it. Runs on every rank."""
    model, compiled = shard((2,), hook, system)
    for step in range(2):
        run_step(model, compiled, step)
    dcp.save({"model": get_model_state_dict(model), "comm_hooks": HookTensors(model)}, checkpoint_id=path)
    for step in range(2, 4):
        run_step(model, compiled, step)
    other, compiled = shard((2,), hook, system)
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    # The step makes hook tensors, which the checkpoint replaces.
    run_step(other, compiled, 7)
    state = {"model": get_model_state_dict(other), "comm_hooks": HookTensors(other)}
    dcp.load(state, checkpoint_id=path)
    set_model_state_dict(other, state["model"])
    for step in range(2, 4):
        run_step(other, compiled, step)
    for ours, theirs in zip(values(other), values(model), strict=True):
        assert torch.equal(ours, theirs)
    if dist.get_rank() == 0:
        return
    kept, saved = HookTensors(model).state_dict(), HookTensors(other).state_dict()
    assert kept and all(torch.equal(kept[key].to_local(), saved[key].to_local()) for key in kept)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("hook", "system"), [pytest.param("stochastic", "aot_eager", marks=pytest.mark.night), ("power_sgd", "eager")]
)
def test_a_checkpoint_goes_on_to_the_bit(rank_pools: RankPools, hook: str, system: str, tmp_path: Path) -> None:
    rank_pools[2].run(resume, hook=hook, system=system, path=str(tmp_path))
    with pytest.raises(Exception, match=r"comm_hooks\.0\.weight\.|[Ss]ize mismatch"):
        rank_pools[4].run(load_elsewhere, hook=hook, path=str(tmp_path))


def load_elsewhere(hook: str, path: str) -> None:
    """Load a checkpoint on another number of ranks than saved it. Runs on every rank."""
    model, _ = shard((4,), hook, "eager")
    dcp.load({"comm_hooks": HookTensors(model)}, checkpoint_id=path)


def reset_and_refuse() -> None:
    """Check what resetting does, and which states cannot be loaded. Runs on every rank."""
    model, compiled = shard((2,), "grid", "aot_eager")
    begun = values(model)
    run_step(model, compiled, 0)
    first, tensors = values(model), HookTensors(model)
    assert sorted(tensors.state_dict()) == ["0.weight.residual", "2.weight.residual", "3.weight.residual"]
    residuals = {key: value.to_local().clone() for key, value in tensors.state_dict().items()}  # type: ignore[attr-defined]
    assert all(value.any() for value in residuals.values())
    saved: dict[str, Any] = tensors.state_dict()
    mesh = device_mesh((2,))
    local = torch.zeros(2, *saved["0.weight.residual"].shape[1:]).double()
    cases = {
        "was saved by 4 ranks, and the model is on 2": DTensor.from_local(local, mesh, [Shard(0)]),
        r"was saved as torch.float32 .*, and is to be torch.float64": saved["0.weight.residual"].float(),
        "is to be a DTensor": local,
    }
    for message, value in cases.items():
        with pytest.raises(ValueError, match=message):
            tensors.load_state_dict({**saved, "0.weight.residual": value})
    with pytest.raises(ValueError, match=r"\['0.weight.residual'\] are only in one"):
        tensors.load_state_dict({key: value for key, value in saved.items() if key != "0.weight.residual"})
    assert all(torch.equal(value.to_local(), residuals[key]) for key, value in tensors.state_dict().items())  # type: ignore[attr-defined]
    model.reset_iter_state()
    assert not any(value.to_local().any() for value in tensors.state_dict().values())  # type: ignore[attr-defined]
    with torch.no_grad():
        for param, value in zip(model.parameters(), begun, strict=True):
            param.copy_(distribute_tensor(value, mesh, [Shard(0)]))
    run_step(model, compiled, 0)
    assert all(map(torch.equal, values(model), first))
    model.float()
    for forward in (compiled, model):
        with pytest.raises(RuntimeError, match=r"for \d\.weight .*in torch.float64 .*in torch.float32 .*reset_iter_state"):
            forward(batch(0, 0).float()).sum().backward()
    model.reset_iter_state()
    compiled(batch(0, 0).float()).sum().backward()
    assert {value.dtype for value in tensors.state_dict().values()} == {torch.float32}


def train_blocks() -> list[list[Tensor]]:
    """Return the parameters after each step of blocks that are compiled one by one and share graphs. Runs on every rank."""
    model, mesh = nn.Sequential(*(Block() for _ in range(3))), device_mesh((2,))
    for block in model:
        fully_shard(block, mesh=mesh)
        block.compile(backend=fsdp_backend, options={"lowering": "aot_eager"})
    fully_shard(model, mesh=mesh)
    model.register_comm_hook(DefaultState(mesh.get_group()), HOOKS["grid"]())
    found = []
    for step in range(2):
        run_step(model, model, step)
        found.append(values(model))
    residuals = [value.to_local() for value in HookTensors(model).state_dict().values()]  # type: ignore[attr-defined]
    assert len(residuals) == 3 and not any(torch.equal(residuals[0], other) for other in residuals[1:])
    return found


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(_WIDTHS[0], _WIDTHS[0], bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(x).tanh()


def test_blocks_that_share_a_graph_have_tensors_of_their_own(rank_pools: RankPools) -> None:
    expected = emulate((2,), "grid", steps=2, model=nn.Sequential(*(Block() for _ in range(3))))
    assert_equal(rank_pools[2].run(train_blocks)[0], expected)


def test_reset_and_refusals_of_loading(rank_pools: RankPools) -> None:
    rank_pools[2].run(reset_and_refuse)
    with pytest.raises(ValueError, match="takes a sharded model; Linear is none"):
        HookTensors(nn.Linear(2, 2))


def overflow(system: str) -> tuple[list[bool], list[bool]]:
    """Return whether gradients are finite in a step in which one rank's overflow, and in the next step. Runs on every rank."""
    model, compiled = shard((2,), "int8", system)
    found = []
    for scale in (1.0, torch.inf, 1.0):
        compiled(batch(0, dist.get_rank()) * (scale if dist.get_rank() == 1 else 1.0)).sum().backward()
        found.append([bool(param.grad.full_tensor().isfinite().all()) for param in model.parameters()])  # type: ignore[union-attr]
        model.zero_grad()
    return found[1], found[2]


def test_what_is_not_finite_arrives_once(rank_pools: RankPools) -> None:
    during, after = rank_pools[2].run(overflow, system="aot_eager")[0]
    assert not all(during) and all(after)


def losses(hook: str, steps: int) -> list[float]:
    """Return the losses of a small regression whose gradients ``hook`` reduces. Runs on every rank."""
    torch.manual_seed(0)
    model, mesh = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)), device_mesh((2,))
    fully_shard(model, mesh=mesh)
    hooks = {"coarse": without_return, "feedback": ErrorFeedback(on_a_coarse_grid), "power_sgd": PowerSGD()}
    if hook in hooks:
        model.register_comm_hook(DefaultState(mesh.get_group()), hooks[hook])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    found = []
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(2, 32, 8, generator=generator)
    targets = inputs.sum(-1, keepdim=True).sin()
    for _ in range(steps):
        loss = (model(inputs[dist.get_rank()]) - targets[dist.get_rank()]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def on_a_coarse_grid(state: DefaultState, grad: Tensor, output: Tensor) -> Tensor:
    sent = grad.sign() * (grad.abs() > 0.05) * 0.1
    dist.reduce_scatter_tensor(output, sent, group=state.process_group)
    output.div_(state.world_size)
    return sent


def without_return(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    on_a_coarse_grid(state, grad, output)


@pytest.mark.night
def test_feedback_brings_a_coarse_quantiser_back_to_the_exact_loss(rank_pools: RankPools) -> None:
    final = {}
    for hook in ("exact", "coarse", "feedback"):
        runs = rank_pools[2].run(losses, hook=hook, steps=300)
        final[hook] = sum(run[-1] for run in runs) / 2
    exact, coarse, feedback = final["exact"], final["coarse"], final["feedback"]
    assert abs(feedback - exact) < 0.4 * abs(coarse - exact), final


class _Own:
    """A hook whose tensors and behaviour a test chooses."""

    def __init__(self, made: Any, reduce: Callable[[Tensor, Tensor, HookBucket], Any] = lambda *_: None):
        self._made, self._reduce = made, reduce

    def init_tensors(self, parameter: HookParameter) -> Any:
        return self._made(parameter)

    def __call__(self, state: Any, grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
        output.copy_(grad[: output.numel()])
        self._reduce(grad, output, bucket)


class _TakesTooFew:
    init_tensors = None

    def __call__(self, state: Any, grad: Tensor, output: Tensor) -> None: ...


def _one(parameter: HookParameter) -> dict[str, Tensor]:
    return {"own": torch.zeros(3)}


def _replaces(grad: Tensor, output: Tensor, bucket: HookBucket) -> None:
    bucket.tensors[0]["own"] = bucket.tensors[0]["own"] + 1


def test_refusals(fake_ranks: None) -> None:
    model = fully_shard(nn.Linear(8, 8))
    few = _TakesTooFew()
    few.init_tensors = _one  # type: ignore[assignment]
    cases: list[tuple[Any, type[Exception], str]] = [
        (few, TypeError, r"does not take \(state, grad, output, bucket\)"),
        (_Own(lambda parameter: [torch.zeros(1)]), TypeError, "returns a dictionary of tensors"),
        (_Own(lambda parameter: {"random": torch.zeros(1)}), ValueError, "cannot be called 'random'"),
        (_Own(_one, _replaces), HookNotTraceable, "another tensor in the place of its tensor 'own'"),
        (_Own(_one, lambda grad, output, bucket: bucket.tensors[0]["own"].resize_(5)), HookNotTraceable, "resize_"),
        (_Own(_one, lambda grad, output, bucket: bucket.tensors[0]["own"].sum().item()), HookNotTraceable, "asks for values"),
        (ErrorFeedback(without_return), HookNotTraceable, "wants without_return to return what its message says"),
    ]
    for hook, kind, message in cases:
        with pytest.raises(kind, match=message):
            model.register_comm_hook(DefaultState(dist.group.WORLD), hook)
    with pytest.raises(TypeError, match="a hook without tensors of its own, not PowerSGD"):
        ErrorFeedback(PowerSGD())
    for wrong in (0, True, 1.5):
        with pytest.raises(ValueError, match="a positive number of columns"):
            PowerSGD(rank=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_compression_rate"):
        PowerSGD(min_compression_rate=0)
    model.register_comm_hook(DefaultState(dist.group.WORLD), _Own(_one))
