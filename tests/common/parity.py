"""Training one model three ways and comparing the results.

A :class:`Case` describes a model, how it is sharded and how it is trained. :func:`train_reference` trains
it in one process, unsharded, in float64 and on the global batch. :func:`train_sharded` runs on every rank
and trains it with a given ``fully_shard`` on that rank's part of the batch. Both return a :class:`Run`: the
losses, every step's unsharded gradients, and the parameters after the last step.

Why the AdamW of these tests has ``eps=1e-3``: Adam divides a gradient by its own magnitude, so with the
default ``eps`` of 1e-8 an entry whose exact gradient is zero moves by the full learning rate in a direction
that only rounding decides, and no tolerance would be right. With 1e-3 such entries stay put, while the
others, whose gradients are around 1e-2 to 1, still take Adam's path. A wrong gradient scale cannot hide
behind Adam's normalisation either: the gradients themselves are compared at every step.
"""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.common.distributed import device_mesh

FullyShard: TypeAlias = Callable[..., Any]
Forward: TypeAlias = Callable[[Tensor], Tensor]
Batch: TypeAlias = tuple[Tensor, Tensor]
Compile: TypeAlias = dict[str, Any]

# Absolute floor of the comparison, per element: far below every gradient that matters here.
FLOOR = 1e-8
# Evaluations come after these steps: before the second training step, and once between later steps.
_EVALUATE_AFTER = (0, 2)
_HSDP = ("replicate", "shard")


def regression_batch(step: int, rank: int, world: int, sizes: Sequence[int] = (3,), dim: int = 8, out: int = 4) -> Batch:
    """Return inputs and targets of this rank; ``sizes`` are the batch sizes of successive steps."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    size = sizes[step % len(sizes)]
    return torch.randn(size, dim, generator=generator), torch.randn(size, out, generator=generator)


def token_batch(step: int, rank: int, world: int, vocab: int = 16, length: int = 6) -> Batch:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    tokens = torch.randint(vocab, (2, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def squared_error(forward: Forward, batch: Batch) -> Tensor:
    inputs, targets = batch
    return F.mse_loss(forward(inputs).to(targets.dtype), targets)


def next_token_loss(forward: Forward, batch: Batch) -> Tensor:
    tokens, targets = batch
    return F.cross_entropy(forward(tokens).flatten(0, 1), targets.flatten())


def adamw(parameters: Iterable[nn.Parameter], **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-3, **options)


def shard_units(model: nn.Module, mesh: DeviceMesh, fully_shard: FullyShard, **options: Any) -> None:
    """Shard in the usual layout: every block a unit, then the root with the other parameters."""
    for block in model.get_submodule("blocks").children():
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def compile_whole(model: nn.Module, options: Compile) -> Forward:
    return torch.compile(model, **options)


@dataclass(frozen=True)
class Case:
    """A model, its sharding and its training."""

    name: str
    build: Callable[[], nn.Module]
    shard: Callable[[nn.Module, DeviceMesh, FullyShard], None] = shard_units
    batch: Callable[[int, int, int], Batch] = regression_batch
    loss: Callable[[Forward, Batch], Tensor] = squared_error
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw
    compile: Callable[[nn.Module, Compile], Forward] = compile_whole
    steps: int = 5
    # Backward passes per step, each on a batch of its own.
    accumulate: int = 1
    clip_norm: float | None = None
    # A context such as torch.no_grad in which the model is evaluated between steps.
    evaluation: Callable[[], contextlib.AbstractContextManager[Any]] | None = None
    # Converts the model after sharding.
    dtype: torch.dtype | None = None
    # Build on the meta device, allocate after sharding, then initialise the shards.
    meta: bool = False
    # Names of parameters that ``shard`` leaves out; the training loop reduces their gradients itself.
    ignored: frozenset[str] = frozenset()
    worlds: tuple[int, ...] = (2, 4)
    # HSDP: the number of replicas.
    replicas: int = 1
    # Tensor parallelism: how many ranks share each batch, and a function that lays the model out over them before sharding.
    tensor_parallel: int = 1
    parallelize: Callable[[nn.Module, DeviceMesh], None] | None = None
    # False if torch's own FSDP2 does not support the case.
    fsdp2: bool = True
    # Relative error against the float64 reference and against FSDP2. None: not comparable.
    reference_rtol: float | None = 1e-5
    fsdp2_rtol: float = 1e-5
    # By lowering: the error against FSDP2, where the lowering may round differently from FSDP2's eager operators.
    lowered_rtol: Mapping[str, float] = field(default_factory=dict)
    # World sizes on which the case also runs with the inductor lowering.
    inductor_worlds: tuple[int, ...] = ()


@dataclass
class Run:
    losses: list[float] = field(default_factory=list)
    evaluations: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    # By parameter name, then by step; without the steps in which the parameter got no gradient.
    gradients: dict[str, dict[int, Tensor]] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    # Placements, mesh and local shape of every parameter and of its gradient, on this rank.
    layout: dict[str, str] = field(default_factory=dict)
    # This rank's own gradients of ignored parameters.
    local_gradients: dict[str, Tensor] = field(default_factory=dict)
    # Graphs that Dynamo captured.
    graphs: int = 0


def compiled_beside_whole(
    build: Callable[[], nn.Module], fully_shard: FullyShard, options: Compile
) -> tuple[nn.Module, Forward, nn.Module]:
    """Build a model in float64. Return it sharded as one unit, its compiled forward, and the same model whole and uncompiled."""
    torch.manual_seed(0)
    model, whole = build().double(), build().double()
    whole.load_state_dict(model.state_dict())
    fully_shard(model)
    return model, compile_whole(model, options), whole


def assert_same_gradients(model: nn.Module, whole: nn.Module) -> None:
    """Check that a sharded model has the gradients of the whole one, and where it has none, none. Both are in float64."""
    for (name, one), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        gradient: Any = one.grad if one.grad is None else one.grad.full_tensor()  # type: ignore[attr-defined]
        assert (gradient is None) == (other.grad is None), name
        if gradient is not None:
            torch.testing.assert_close(gradient, other.grad, rtol=1e-9, atol=1e-12, msg=name)


def _snapshot(tensor: Tensor) -> Tensor:
    return tensor.detach().clone()


def _full(history: Sequence[Tensor]) -> list[Tensor]:
    """Return the unsharded tensors of successive steps, gathered by one collective for all steps."""
    first = history[0]
    if not isinstance(first, DTensor):
        return list(history)
    if not all(type(placement) in (Shard, Replicate) for placement in first.placements):
        return [tensor.full_tensor() for tensor in history if isinstance(tensor, DTensor)]
    local = [tensor.to_local() for tensor in history if isinstance(tensor, DTensor)]
    shape = (len(history), *first.shape)
    stacked = DTensor.from_local(
        torch.stack(local),
        first.device_mesh,
        [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in first.placements],
        run_check=False,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )
    return list(stacked.full_tensor().unbind())


def _describe(tensor: Tensor | None) -> str:
    if isinstance(tensor, DTensor):
        local = tuple(tensor.to_local().shape)
        return f"{tensor.dtype} {tensor.placements} on {tuple(tensor.device_mesh.shape)}, local {local}"
    return "None" if tensor is None else f"{tensor.dtype}, not distributed"


def _cast(batch: Batch, dtype: torch.dtype | None) -> Batch:
    """Cast a batch for a model of this dtype; targets keep at least float32, for the loss."""
    inputs, targets = batch
    if dtype is not None and inputs.is_floating_point():
        return inputs.to(dtype), targets.to(torch.promote_types(dtype, torch.float32))
    return batch


def _train(
    case: Case,
    model: nn.Module,
    forward: Forward,
    batch_at: Callable[[int], Batch],
    reduce: Callable[[Tensor], None] | None = None,
) -> Run:
    run = Run()
    optimizer = case.optimizer(model.parameters())
    history: dict[str, list[Tensor]] = defaultdict(list)
    steps: dict[str, list[int]] = defaultdict(list)
    for step in range(case.steps):
        for micro in range(case.accumulate):
            loss = case.loss(forward, batch_at(step * case.accumulate + micro))
            loss.backward()
            run.losses.append(loss.item())
        if reduce is not None:
            for name, parameter in model.named_parameters():
                if name in case.ignored and parameter.grad is not None:
                    run.local_gradients[f"{step}.{name}"] = parameter.grad.clone()
                    reduce(parameter.grad)
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                history[name].append(_snapshot(parameter.grad))
                steps[name].append(step)
        if step == 0:
            run.layout = {name: f"{_describe(p)}; gradient {_describe(p.grad)}" for name, p in model.named_parameters()}
        if case.clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), case.clip_norm)
            run.norms.append(_full([norm])[0].item())
        optimizer.step()
        optimizer.zero_grad()
        if case.evaluation is not None and step in _EVALUATE_AFTER:
            model.eval()
            with case.evaluation():
                run.evaluations.append(case.loss(forward, batch_at(step + 100)).item())
            model.train()
    for name, parameter in model.named_parameters():
        run.parameters[name] = _full([_snapshot(parameter)])[0]
        run.gradients[name] = dict(zip(steps[name], _full(history[name]), strict=True)) if steps[name] else {}
    for name, buffer in model.named_buffers():
        value = buffer.detach().clone()
        if reduce is not None and value.is_floating_point():
            reduce(value)
        run.buffers[name] = value
    return run


def train_reference(case: Case, world: int) -> Run:
    """Train in this process alone, in float64, on the batches of all ranks concatenated."""

    def batch_at(step: int) -> Batch:
        inputs, targets = zip(*(case.batch(step, rank, world) for rank in range(world)), strict=True)
        return _cast((torch.cat(inputs), torch.cat(targets)), torch.float64)

    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = case.build().double()
    return _train(case, model, model, batch_at)


def _initialise_shards(model: nn.Module, values: nn.Module) -> None:
    """Initialise parameters in place, as an init function does, but with known values.

    Random numbers for a DTensor depend on how it is sharded, so they are copied from ``values``. The parameters
    that an init function would fill with a constant are filled by one.
    """
    with torch.no_grad():
        for (name, parameter), value in zip(model.named_parameters(), values.parameters(), strict=True):
            if name.endswith("norm.weight"):
                nn.init.ones_(parameter)
            elif name.endswith("norm.bias"):
                nn.init.zeros_(parameter)
            else:
                assert isinstance(parameter, DTensor)
                parameter.copy_(distribute_tensor(value.detach(), parameter.device_mesh, parameter.placements))
        for buffer, initial in zip(model.buffers(), values.buffers(), strict=True):
            buffer.copy_(initial)


class Place:
    """The place of a run: this rank's CPU."""

    device = "cpu"

    def mesh(self, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
        return device_mesh(shape, names)

    def module(self, build: Callable[[], nn.Module]) -> nn.Module:
        """Build a module there."""
        return build()

    def batch(self, make: Callable[[], Batch]) -> Batch:
        """Make a batch there."""
        return make()

    def average(self, tensor: Tensor) -> None:
        """Average a tensor over all ranks, in place."""
        dist.all_reduce(tensor)
        tensor.div_(dist.get_world_size())


def train_sharded(
    case: Case, fully_shard: FullyShard, compile_options: Compile | None = None, place: Place | None = None
) -> Run:
    """Train on this rank's batches; every rank of the default process group calls this.

    ``compile_options`` are the arguments of ``torch.compile``; without them, the model runs eagerly. Every
    rank returns its final parameters, which have to be the same; the other full tensors are rank 0's only.
    """
    place = place or Place()
    mesh, tensor_parallel = _meshes(case, place)
    world = mesh.size()
    rank = dist.get_rank() // case.tensor_parallel

    torch.manual_seed(0)
    with torch.device("meta" if case.meta else "cpu"):
        model = place.module(case.build)
    if case.parallelize is not None:
        case.parallelize(model, tensor_parallel)
    case.shard(model, mesh, fully_shard)
    if case.meta:
        model.to_empty(device=place.device)
        torch.manual_seed(0)
        _initialise_shards(model, case.build())
    if case.dtype is not None:
        model.to(case.dtype)
    plain = {name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)}
    assert plain == case.ignored, f"parameters that are not distributed: {sorted(plain)}"

    def batch_at(step: int) -> Batch:
        return place.batch(lambda: _cast(case.batch(step, rank, world), case.dtype))

    if compile_options is None:
        run = _train(case, model, model, batch_at, place.average)
    else:
        counters = torch._dynamo.utils.counters["stats"]
        before = counters["unique_graphs"]
        # Past its limit of recompilations Dynamo runs a frame eagerly, which would test nothing.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            run = _train(case, model, case.compile(model, compile_options), batch_at, place.average)
        run.graphs = counters["unique_graphs"] - before
    if dist.get_rank() != 0:
        run.gradients, run.buffers = {}, {}
    return run


def train_with(case: Case, system: str) -> Run:
    """Train on this rank's batches: with "fsdp2", with the library uncompiled ("eager"), or with the name of a lowering."""
    if system == "fsdp2":
        return train_sharded(case, torch.distributed.fsdp.fully_shard)
    from fsdp_compile import fsdp_backend, fully_shard

    if system == "eager":
        return train_sharded(case, fully_shard)
    return train_sharded(case, fully_shard, {"backend": fsdp_backend, "options": {"lowering": system}})


def describe_values(tensor: Any) -> str:
    """Describe a tensor's kind and, if it is a DTensor, its layout and this rank's values."""
    if not isinstance(tensor, DTensor):
        return f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)}"
    local = tensor.to_local()
    return (
        f"{type(tensor).__name__} {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} {tensor.placements} "
        f"mesh {tensor.device_mesh.mesh.tolist()} {tensor.device_mesh.mesh_dim_names} "
        f"local {tuple(local.shape)} {local.stride()} {local.tolist()}"
    )


def _meshes(case: Case, place: Place) -> tuple[DeviceMesh, DeviceMesh]:
    """Return the mesh that the case is sharded on, and the mesh of tensor parallelism."""
    world = dist.get_world_size() // case.tensor_parallel
    shape, names = ((world,), ("shard",)) if case.replicas == 1 else ((case.replicas, world // case.replicas), _HSDP)
    if case.tensor_parallel == 1:
        mesh = place.mesh(shape, names)
        return mesh, mesh
    mesh = place.mesh((*shape, case.tensor_parallel), (*names, "tp"))
    return mesh[names], mesh["tp"]


def _mean(runs: Sequence[Run], quantity: str) -> list[float]:
    return torch.tensor([getattr(run, quantity) for run in runs], dtype=torch.float64).mean(0).tolist()


def _error(actual: Tensor, expected: Tensor, rtol: float) -> str | None:
    if actual.shape != expected.shape:
        return f"has shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    error, norm = torch.linalg.vector_norm(actual - expected), torch.linalg.vector_norm(expected)
    # Negated, so that a NaN is an error.
    if not error <= rtol * norm + FLOOR * expected.numel() ** 0.5:
        return f"has relative error {error / norm:.1e} (limit {rtol:.0e}; norm {norm:.1e})"
    return None


def compare(actual: Sequence[Run], expected: Run | Sequence[Run], rtol: float) -> None:
    """Assert that the ranks' runs agree with a reference, or with the ranks' runs of another system.

    A tensor's error is the norm of the difference relative to the expected norm.
    """
    others = [expected] if isinstance(expected, Run) else expected
    errors: list[str] = []

    def check(what: str, ours: Tensor, theirs: Tensor) -> None:
        error = _error(ours, theirs, rtol)
        if error is not None:
            errors.append(f"{what} {error}")

    for quantity in ("losses", "evaluations", "norms"):
        means, expected_means = _mean(actual, quantity), _mean(others, quantity)
        assert len(means) == len(expected_means), quantity
        for step, (mean, expected_mean) in enumerate(zip(means, expected_means, strict=True)):
            check(f"{quantity}[{step}]", torch.tensor(mean), torch.tensor(expected_mean))
    run, other = actual[0], others[0]
    assert run.parameters.keys() == other.parameters.keys()
    assert run.buffers.keys() == other.buffers.keys()
    for name, gradients in run.gradients.items():
        expected_gradients = other.gradients[name]
        if gradients.keys() != expected_gradients.keys():
            errors.append(f"{name} has gradients at steps {[*gradients]}, expected {[*expected_gradients]}")
            continue
        for step, gradient in gradients.items():
            check(f"step {step}: gradient of {name}", gradient, expected_gradients[step])
    for name, parameter in run.parameters.items():
        check(f"final {name}", parameter, other.parameters[name])
    for rank in range(1, len(actual)):
        for name, parameter in actual[rank].parameters.items():
            if not torch.equal(parameter, run.parameters[name]):
                errors.append(f"final {name} differs between rank {rank} and rank 0")
    for name, buffer in run.buffers.items():
        check(f"final buffer {name}", buffer, other.buffers[name])

    if not isinstance(expected, Run):
        for rank, (ours, theirs) in enumerate(zip(actual, expected, strict=True)):
            for name, layout in ours.layout.items():
                if layout != theirs.layout[name]:
                    errors.append(f"rank {rank}: {name} is {layout}, expected {theirs.layout[name]}")
            for name, gradient in ours.local_gradients.items():
                check(f"rank {rank}: local gradient {name}", gradient, theirs.local_gradients[name])
    if errors:
        shown = "\n".join(errors[:20])
        raise AssertionError(f"{len(errors)} differences, of which the first are:\n{shown}")
