"""The hook that sends rounded gradients sums what plain torch sums of values rounded alike."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import capture, fsdp_backend, fully_shard
from fsdp_compile.comm_hooks import DefaultState, QuantizedReduce, bind_hook
from passes.collectives.traced_hook import apply_reduce_hook
from tests.common.distributed import RankPools, device_mesh
from tests.common.rounding import LARGEST, rounded_group

_NUMEL, _BLOCK = 21, 8


def _gradient(rank: int, ranks: int, special: float = 0.0) -> Tensor:
    grad = torch.randn(ranks * _NUMEL, generator=torch.Generator().manual_seed(rank))
    # A block of zeros; and one with a value that has to arrive.
    grad[:_BLOCK] = 0
    if special and rank == 1:
        grad[_NUMEL + 2] = special
    return grad


def reduce(dtype: torch.dtype, special: float) -> Tensor:
    """A job: what this rank gets of the average."""
    state = DefaultState(dist.group.WORLD)
    bound = bind_hook(state, QuantizedReduce(dtype, _BLOCK))
    assert bound.reduce is not None and bound.in_place is None and bound.name == "QuantizedReduce"
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
    # It arrives with who reduces it, and nowhere else.
    assert [not result.isfinite().all() for result in results] == [False, bool(special), False, False]


def train(lowering: str, hook: QuantizedReduce | None) -> tuple[dict[str, Tensor], list[tuple[torch.dtype, int]]]:
    """A job: the gradients of a step, and what its reductions send."""
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


@pytest.mark.parametrize("lowering", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
def test_in_a_graph(rank_pools: RankPools, lowering: str) -> None:
    exact, ((_, everything),) = rank_pools[2].run(train, lowering=lowering, hook=None)[0]
    grads, ((dtype, num_bytes),) = rank_pools[2].run(train, lowering=lowering, hook=QuantizedReduce())[0]
    assert dtype == torch.uint8 and num_bytes <= 0.27 * everything
    for name, grad in grads.items():
        # Half a step of a 127th of the largest value.
        error = (grad - exact[name]).abs().max() / exact[name].abs().max()
        assert 0 < error < 0.02, name


def test_refuses_what_there_is_not() -> None:
    with pytest.raises(ValueError, match=r"one of torch\.int8, .*torch\.float16, not torch\.int32"):
        QuantizedReduce(torch.int32)
    for block in (0, -1, True, 1.5, "row"):
        with pytest.raises(ValueError, match="a positive number of elements"):
            QuantizedReduce(block=block)  # type: ignore[arg-type]
