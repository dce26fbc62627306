"""Values between segments, and from forward to backward, have the traced layout, even if Inductor would choose another."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import fsdp_backend, fully_shard


class FirstOfSwapped(nn.Module):
    """A module that reads only the first feature: a view with gaps, of a value whose layout Inductor may choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        swapped = self.first(x).permute(2, 0, 1) + 1
        return self.second(swapped[:1])


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("each", "lengths"),
    [(True, (3,)), (False, (3, 5))],
    ids=["between units", "saved for backward, lengths change"],
)
def test_views_with_gaps(each: bool, lengths: tuple[int, ...], one_rank: None) -> None:
    torch.manual_seed(0)
    model = FirstOfSwapped()
    reference = copy.deepcopy(model)
    mesh = init_device_mesh("cpu", (1,))
    for layer in (model.first, model.second) if each else ():
        fully_shard(layer, mesh=mesh)
    compiled = torch.compile(fully_shard(model, mesh=mesh), backend=fsdp_backend)
    for length in lengths:
        x = torch.randn(length, 4, 8)
        for system in (compiled, reference):
            system(x).square().sum().backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), expected.grad)  # type: ignore[union-attr]
