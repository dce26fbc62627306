"""Inductor's kernels write all elements if a loop cannot be split into equal parts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fsdp_compile.compiler.loop_splits import even_loop_splits
from passes.fx.torch_internals.inductor import inductor_config

pytestmark = pytest.mark.inductor


def decode(rounded: Tensor, scales: Tensor, numel: int) -> Tensor:
    values = rounded.view(torch.int8).unflatten(1, (-1, 32)).float() * scales.unsqueeze(-1)
    return values.flatten(1).narrow(1, 0, numel).contiguous()


def test_a_last_block_that_is_not_full() -> None:
    rounded, scales = torch.arange(4 * 544).to(torch.uint8).view(4, 544), torch.arange(1.0, 69).view(4, 17)
    torch._dynamo.reset()
    compiled = torch.compile(decode, dynamic=False)
    with inductor_config.patch(force_disable_caches=True), even_loop_splits():
        found = [compiled(rounded, scales, numel) for numel in (520, 544)]
    for values, numel in zip(found, (520, 544), strict=True):
        assert torch.equal(values, decode(rounded, scales, numel))
