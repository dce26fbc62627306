"""The lowering ``aot_eager``: graphs draw the random numbers that modules draw without compilation."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_compile import fsdp_backend, fully_shard
from tests.common.microbatches import full


class Random(nn.Module):
    """A module that draws numbers through operators of which Inductor has decompositions, and through others."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        drawn = [
            F.dropout(y, 0.5),
            F.rrelu(y, training=True),
            F.gumbel_softmax(y),
            F.scaled_dot_product_attention(*(y[None, None] for _ in range(3)), dropout_p=0.5)[0, 0],
            y * torch.empty_like(y).exponential_(),
            y * torch.bernoulli(y.detach().sigmoid()),
            y * torch.rand_like(y),
        ]
        return torch.stack(drawn).square().sum()


def test_draws_the_numbers_of_eager(one_rank: None) -> None:
    torch.manual_seed(0)
    model = Random()
    whole = copy.deepcopy(model)
    compiled = torch.compile(fully_shard(model), backend=fsdp_backend, options={"lowering": "aot_eager"})
    x = torch.randn(4, 8)
    losses = []
    for forward in (whole, compiled):
        torch.manual_seed(1)
        # The second forward goes on where the first one left the generator.
        losses.append([forward(x) for _ in range(2)])
        sum(losses[-1]).backward()
    torch.testing.assert_close(losses[1], losses[0])
    for param, expected in zip(model.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(full(param.grad), expected.grad)
