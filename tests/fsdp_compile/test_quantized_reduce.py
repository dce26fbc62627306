"""The hook that sends rounded gradients computes the same sums as plain torch does for values rounded alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import HookNotTraceable, fsdp_backend, fully_shard
from fsdp_compile.comm_hooks import DefaultState, PowerSGD, QuantizedReduce, bind_hook
from fsdp_compile.debug import capture
from passes.collectives.traced_hook import apply_reduce_hook
from tests.common.distributed import RankPools, device_mesh
from tests.common.rounding import LARGEST, rounded_group

_NUMEL, _BLOCK = 21, 8


def _gradient(rank: int, ranks: int, special: float = 0.0) -> Tensor:
    grad = torch.randn(ranks * _NUMEL, generator=torch.Generator().manual_seed(rank))
    # A block of zeros, and a block with a special value that has to arrive.
    grad[:_BLOCK] = 0
    if special and rank == 1:
        grad[_NUMEL + 2] = special
    return grad


def reduce(dtype: torch.dtype, special: float) -> Tensor:
    """Return this rank's part of the average. Runs on every rank."""
    state = DefaultState(dist.group.WORLD)
    bound = bind_hook(state, QuantizedReduce(dtype, _BLOCK))
    assert bound.reduce is not None and bound.name == "QuantizedReduce"
    grad = _gradient(dist.get_rank(), state.world_size, special)
    before = grad.clone()
    result = apply_reduce_hook(bound.reduce, grad, state.world_size)
    assert torch.equal(grad.view(torch.int32), before.view(torch.int32))
    return result


def _expected(rank: int, ranks: int, dtype: torch.dtype, special: float) -> Tensor:
    summed = torch.zeros(_NUMEL)
    for source in range(ranks):
        piece = _gradient(source, ranks, special).view(ranks, -1)[rank]
        if dtype in LARGEST:
            summed = summed + torch.cat([rounded_group(block, dtype) for block in piece.split(_BLOCK)])
        else:
            summed = summed + piece.to(dtype).float()
    return summed / ranks


@pytest.mark.parametrize("special", [0.0, torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", [*LARGEST, torch.bfloat16, torch.float16], ids=str)
def test_values(rank_pools: RankPools, dtype: torch.dtype, special: float) -> None:
    results = rank_pools[4].run(reduce, dtype=dtype, special=special)
    for rank, result in enumerate(results):
        torch.testing.assert_close(result, _expected(rank, 4, dtype, special), rtol=1e-6, atol=1e-7, equal_nan=True)
    # The special value arrives at the rank that reduces it, and nowhere else.
    assert [not result.isfinite().all() for result in results] == [False, bool(special), False, False]


def train(lowering: str, hook: QuantizedReduce | None) -> tuple[dict[str, Tensor], list[tuple[torch.dtype, int]]]:
    """Return the gradients of a step, and the dtype and bytes of each message of its reductions. Runs on every rank."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    mesh = device_mesh((dist.get_world_size(),))
    fully_shard(model, mesh=mesh)
    if hook is not None:
        model.register_comm_hook(DefaultState(mesh.get_group()), hook)
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": lowering})
    torch.manual_seed(dist.get_rank())
    with capture() as graphs:
        compiled(torch.randn(8, 32)).square().sum().backward()
    graph = graphs.backward[0].graph_module.graph
    target = torch.ops._c10d_functional.all_to_all_single.default
    values = [node.args[0].meta["val"] for node in graph.find_nodes(op="call_function", target=target)]
    grads = {name: param.grad.full_tensor() for name, param in model.named_parameters()}
    return grads, [(value.dtype, value.nbytes) for value in values]


@pytest.mark.parametrize("lowering", ["aot_eager", "inductor"])
def test_in_a_graph(rank_pools: RankPools, lowering: str) -> None:
    exact, ((_, everything),) = rank_pools[2].run(train, lowering=lowering, hook=None)[0]
    grads, ((dtype, num_bytes),) = rank_pools[2].run(train, lowering=lowering, hook=QuantizedReduce())[0]
    assert dtype == torch.uint8 and num_bytes <= 0.27 * everything
    for name, grad in grads.items():
        # Half a step, where a step is a 127th of the largest value.
        error = (grad - exact[name]).abs().max() / exact[name].abs().max()
        assert 0 < error < 0.02, name


def _hierarchical(
    shape: tuple[int, int], system: str, flag: str, by_chance: bool = False
) -> tuple[list[Tensor], dict[tuple[str, torch.dtype], int]]:
    """Return gradients of two microbatches rounded over replicas only, and the bytes of messages. Runs on every rank."""
    torch.manual_seed(0)
    mesh = device_mesh(shape)
    # Units of one parameter, as rounding blocks run through a whole bucket. Rows of 7 are padded over shards and replicas.
    model = nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 5, bias=False))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    group = mesh.get_group("replicate")
    model.register_comm_hook(DefaultState(group), QuantizedReduce(torch.int8, _BLOCK, by_chance), over="replicas")
    forward = model if system == "eager" else torch.compile(model, backend=fsdp_backend, options={"lowering": system})
    sent: dict[tuple[str, torch.dtype], int] = {}
    with capture() as graphs:
        for microbatch in range(2):
            if flag:
                getattr(model, flag)(microbatch == 1)
            forward(_inputs(microbatch, dist.get_rank())).square().sum().backward()
    for graph in graphs.backward:
        for node in graph.graph_module.graph.nodes:
            if "_c10d_functional" in str(node.target) and "wait" not in str(node.target):
                value, kind = node.args[0].meta["val"], graph.group_names[node.args[-1]]
                sent[kind, value.dtype] = sent.get((kind, value.dtype), 0) + value.nbytes
    return [param.grad.full_tensor() for param in model.parameters()], sent  # type: ignore[union-attr]


def _inputs(microbatch: int, rank: int) -> Tensor:
    return torch.randn(3, 7, generator=torch.Generator().manual_seed(10 * microbatch + rank))


def _blocks_rounded(values: Tensor) -> Tensor:
    return torch.cat([rounded_group(block, torch.int8) for block in values.split(_BLOCK)])


def _all_reduced(replicas: list[Tensor]) -> Tensor:
    """Average replicas with two roundings: of the values that are sent to be summed, and of the averages."""
    count, numel = len(replicas), replicas[0].numel()
    padded = [torch.cat([flat, flat.new_zeros(-numel % count)]).view(count, -1) for flat in replicas]
    averages = [sum(_blocks_rounded(pieces[place]) for pieces in padded) / count for place in range(count)]
    return torch.cat([_blocks_rounded(average) for average in averages])[:numel]


def _expected_hierarchical(shape: tuple[int, int], flag: str) -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(7, 11, bias=False), nn.Tanh(), nn.Linear(11, 5, bias=False))
    params = list(model.parameters())
    replicas, shards = shape

    def averages(microbatch: int) -> list[list[Tensor]]:
        """Return each replica's averages over its shard group."""
        grads = [
            torch.autograd.grad(model(_inputs(microbatch, rank)).square().sum(), params) for rank in range(replicas * shards)
        ]
        groups = [grads[replica * shards : (replica + 1) * shards] for replica in range(replicas)]
        return [[sum(of) / shards for of in zip(*group, strict=True)] for group in groups]  # type: ignore[misc]

    def reduced(values: list[list[Tensor]]) -> list[Tensor]:
        found = []
        for of_replicas in zip(*values, strict=True):
            rows = of_replicas[0].size(0)
            padded = [torch.cat([full, full.new_zeros(-rows % shards, full.size(1))]).chunk(shards) for full in of_replicas]
            pieces = [_all_reduced([parts[shard].flatten() for parts in padded]) for shard in range(shards)]
            found.append(torch.cat(pieces).view(-1, of_replicas[0].size(1))[:rows])
        return found

    first, second = averages(0), averages(1)
    if flag:
        summed = [[a + b for a, b in zip(one, other, strict=True)] for one, other in zip(first, second, strict=True)]
        return reduced(summed)
    return [a + b for a, b in zip(reduced(first), reduced(second), strict=True)]


@pytest.mark.parametrize(
    ("shape", "system", "flag"),
    [
        ((2, 2), "aot_eager", "set_requires_all_reduce"),
        ((2, 1), "eager", ""),
        ((2, 2), "eager", "set_requires_gradient_sync"),
        pytest.param((2, 2), "inductor", "", marks=pytest.mark.night),
    ],
)
def test_over_replicas_alone(rank_pools: RankPools, shape: tuple[int, int], system: str, flag: str) -> None:
    results = rank_pools[shape[0] * shape[1]].run(_hierarchical, shape=shape, system=system, flag=flag)
    expected = _expected_hierarchical(shape, flag)
    for grads, _ in results:
        # All replicas have the same gradients, to the bit.
        assert all(map(torch.equal, grads, results[0][0]))
        for actual, wanted in zip(grads, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-6)
    kinds = set(results[0][1])
    assert kinds == (set() if system == "eager" else {("shard", torch.float32), ("replicate", torch.uint8)})


@pytest.mark.night
def test_by_chance_over_replicas(rank_pools: RankPools) -> None:
    options = {"shape": (2, 1), "system": "aot_eager", "flag": ""}
    (grads, _), (others, _) = rank_pools[2].run(_hierarchical, by_chance=True, **options)
    plain = rank_pools[2].run(_hierarchical, **options)[0][0]
    for grad, other, rounded in zip(grads, others, plain, strict=True):
        assert torch.equal(grad, other) and not torch.equal(grad, rounded)
        # Two roundings in each of two microbatches.
        assert (grad - rounded).abs().max() < 4 * 2 / 127 * rounded.abs().max()


def _forgets(state: DefaultState, grad: Tensor, output: Tensor) -> None: ...


def _all_reduces(state: DefaultState, grad: Tensor) -> None:
    dist.all_reduce(grad, group=state.process_group)


def test_refusals_over_replicas(fake_ranks: None) -> None:
    state = DefaultState(dist.group.WORLD)
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (8,)))
    with pytest.raises(ValueError, match="has no replicas for QuantizedReduce"):
        model.register_comm_hook(state, QuantizedReduce(), over="replicas")
    with pytest.raises(ValueError, match="takes 'shards' or 'replicas', not 'nodes'"):
        model.register_comm_hook(state, QuantizedReduce(), over="nodes")
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (8, 1)))
    with pytest.raises(TypeError, match="over replicas takes"):
        model.register_comm_hook(state, _forgets, over="replicas")
    with pytest.raises(HookNotTraceable, match="PowerSGD reduces over shards, not over replicas"):
        model.register_comm_hook(state, PowerSGD(), over="replicas")
    model.register_comm_hook(state, _all_reduces)
    with pytest.raises(ValueError, match="QuantizedReduce has nothing to do"):
        model.register_comm_hook(state, QuantizedReduce(), over="replicas")
    model = fully_shard(nn.Linear(8, 8), mesh=init_device_mesh("cpu", (4, 2)))
    model.register_comm_hook(state, QuantizedReduce(), over="replicas")
    with pytest.raises(ValueError, match="a communication hook over replicas already"):
        model.register_comm_hook(state, QuantizedReduce(), over="replicas")


def test_refuses_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"one of torch\.int8, .*torch\.float16, not torch\.int32"):
        QuantizedReduce(torch.int32)
    for block in (0, -1, True, 1.5, "row"):
        with pytest.raises(ValueError, match="a positive number of elements"):
            QuantizedReduce(block=block)  # type: ignore[arg-type]
