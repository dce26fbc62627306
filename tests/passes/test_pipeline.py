from __future__ import annotations

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from passes.pipeline import run_joint_passes, run_partitioner_passes


def test_joint_graphs_need_not_be_sorted() -> None:
    """Passes and printing accept a graph that Inductor's patterns have changed and not yet sorted."""

    def function(x: Tensor) -> Tensor:
        return x.relu().neg()

    gm = make_fx(function)(torch.ones(2))
    placeholder, relu, neg, _ = gm.graph.nodes
    placeholder.append(neg)
    seen: list[str] = []
    for run in (run_joint_passes, run_partitioner_passes):
        run(gm.graph, lambda *texts: seen.extend(texts))
    gm.graph.lint()
    assert seen
    assert list(gm.graph.nodes)[1:3] == [relu, neg]
