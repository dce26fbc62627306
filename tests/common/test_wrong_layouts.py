from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from fsdp_compile import fsdp_backend, fully_shard


@pytest.mark.parametrize("dynamic", [False, True])
def test_wrong_strides_are_refused(dynamic: bool, fake_ranks: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def transpose_products(graph: Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=torch.ops.aten.addmm.default):
            value = node.meta["val"]
            node.meta["val"] = value.new_empty_strided(value.shape, (1, value.shape[0]))

    monkeypatch.setattr("passes.pipeline.mixed_precision", transpose_products)
    model = fully_shard(nn.Linear(4, 3), mesh=init_device_mesh("cpu", (8,)))
    compiled = torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}, dynamic=dynamic)
    with pytest.raises(AssertionError, match=r"addmm.* has sizes and strides \[\(5, 3\), \(3, 1\)\], and the graph says"):
        compiled(torch.ones(5, 4))
