"""Products that Inductor pads: values after them have other strides than traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import capture
from tests.common.distributed import RankPools, device_mesh
from tests.common.padded_products import padded_products

WIDTH = 6


class Block(nn.Module):
    """Two products. The second one's result is the output, or is flattened, which its strides do not permit."""

    def __init__(self, *, flattens: bool) -> None:
        super().__init__()
        self.flattens = flattens
        self.up, self.down = nn.Linear(WIDTH, 10), nn.Linear(10, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return y.flatten(1).sin().view(x.shape) if self.flattens else y


def blocks(*flattens: bool) -> Any:
    torch.manual_seed(0)
    return nn.Sequential(*(Block(flattens=each) for each in flattens))


def shard(model: Any, world: int) -> Any:
    for block in model:
        fully_shard(block, mesh=device_mesh((world,)))
    return fully_shard(model, mesh=device_mesh((world,)))


def train(flattens: tuple[bool, ...]) -> None:
    """Check outputs, with their strides, and gradients against whole parameters. Runs on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    alone, model = (blocks(*flattens) for _ in range(2))
    compiled = torch.compile(shard(model, world), backend=fsdp_backend)
    with padded_products() as products:
        for batch, length in ((2, 3), (3, 5), (4, 2)):
            inputs = torch.randn(world, batch, length, WIDTH)
            out = compiled(inputs[rank])
            out.square().mean().backward()
            expected = [alone(x) for x in inputs]
            (sum(y.square().mean() for y in expected) / world).backward()
            torch.testing.assert_close(out, expected[rank])
            assert out.stride() == expected[rank].stride()
            for (name, param), other in zip(model.named_parameters(), alone.parameters(), strict=True):
                torch.testing.assert_close(param.grad.full_tensor(), other.grad, rtol=1e-4, atol=1e-6, msg=name)
            model.zero_grad()
            alone.zero_grad()
    assert products


@pytest.mark.inductor
@pytest.mark.parametrize(
    "flattens",
    [
        pytest.param((True, False), id="view and output"),
        pytest.param((True,) * 9, id="folded views", marks=pytest.mark.night),
        pytest.param((False,) * 9, id="folded outputs", marks=pytest.mark.night),
    ],
)
def test_trains_as_with_whole_parameters(rank_pools: RankPools, flattens: tuple[bool, ...]) -> None:
    rank_pools[2].run(train, flattens=flattens)


@pytest.mark.parametrize("depth", [2, 9], ids=["unfolded", "folded"])
def test_graphs_do_not_depend_on_what_a_rank_measures(fake_ranks: None, depth: int) -> None:
    def graphs() -> tuple[str, ...]:
        torch._dynamo.reset()
        compiled = torch.compile(shard(blocks(*[False] * depth), 8), backend=fsdp_backend, options={"lowering": "aot_eager"})
        with capture() as captured:
            compiled(torch.ones(2, 3, WIDTH)).sum().backward()
        return tuple(graph.readable() for graph in (*captured.forward, *captured.backward))

    with padded_products() as products:
        padded = graphs()
    assert padded == graphs()
    assert not products, "the joint graph was padded"
