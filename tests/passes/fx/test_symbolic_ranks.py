"""Collectives that are traced with a symbol for the number of ranks have the right sizes for any number."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.collectives.functional import group_ranks, group_size, start_reduce_scatter
from passes.collectives.gather import finish_gather, start_gather
from passes.collectives.gloo import pretending_gloo
from passes.collectives.layout import padded_shard_shape
from passes.fx.emit import emit
from passes.fx.sizes import num_bytes, sizes_at
from passes.fx.symbolic_ranks import overridden_size, ranks_at, symbolic_ranks
from passes.fx.torch_internals.core import FakeTensorMode

_c10d = torch.ops._c10d_functional
_SHAPES = [[13, 4], [8]]


def group() -> str:
    return dist.group.WORLD.group_name  # type: ignore[union-attr]


def placeholders(graph: Graph, mode: FakeTensorMode, shapes: list[Any]) -> list[Node]:
    nodes = [graph.placeholder(f"value_{index}") for index in range(len(shapes))]
    for node, shape in zip(nodes, shapes, strict=True):
        with mode:
            node.meta["val"] = torch.empty(shape)
    return nodes


def write_gather(graph: Graph, mode: FakeTensorMode) -> list[Node]:
    shards = placeholders(graph, mode, [padded_shard_shape(shape, 0, group_size(group())) for shape in _SHAPES])
    started = emit(graph, start_gather, shards, group=group())
    return [started, *emit(graph, finish_gather, started, shapes=_SHAPES, dims=[0, 0], group=group())]


def write_reduction(graph: Graph, mode: FakeTensorMode) -> list[Node]:
    grads = placeholders(graph, mode, _SHAPES)
    return [emit(graph, start_reduce_scatter, grads, dims=[0, 0], group=group(), op="sum")]


@pytest.mark.parametrize("is_gloo", [False, True], ids=["nccl", "gloo"])
@pytest.mark.parametrize("write", [write_gather, write_reduction])
def test_sizes_are_those_of_any_number_of_ranks(fake_ranks: None, write: Any, is_gloo: bool) -> None:
    env = ShapeEnv()
    mode, graph = FakeTensorMode(shape_env=env), Graph()
    with pytest.MonkeyPatch.context() as patch:
        if is_gloo:
            patch.setattr("passes.collectives.gloo._pretending", [True])
        with symbolic_ranks(env, {group(): ("S", 8)}) as symbols:
            values = write(graph, mode)
        # The first dimensions are 13 and 8: 8 ranks and 2 ranks divide one of them, 5 ranks neither.
        for ranks in (8, 5, 2):
            dist.destroy_process_group()
            dist.init_process_group("fake", rank=0, world_size=ranks, store=dist.HashStore())
            with sizes_at({symbols["S"].node.expr: ranks}):
                sizes = [num_bytes(value.meta["val"]) for value in values]
            counted = [num_bytes(value.meta["val"]) for value in write(Graph(), FakeTensorMode())]
            assert sizes == counted
    # The operators that stand in for torch's collectives while tracing are not in the graph.
    assert {
        node.target.namespace for node in graph.nodes if node.op == "call_function" and hasattr(node.target, "namespace")
    } <= {
        "aten",
        "_c10d_functional",
        "prims",
    }


def test_nothing_stays(fake_ranks: None) -> None:
    with symbolic_ranks(ShapeEnv(), {group(): ("S", 8)}):
        assert isinstance(group_size(group()), torch.SymInt)
    assert overridden_size(group()) is None
    with ranks_at({group(): range(0, 64, 16), "absent": range(3)}):
        assert group_size(group()) == 4
        assert list(group_ranks(group())) == [0, 16, 32, 48]
        assert group_size("absent") == 3
    assert group_size(group()) == 8
    with pretending_gloo(), pytest.raises(RuntimeError, match="absent"):
        group_size("absent")


def test_values_of_a_graph_that_runs_are_untouched(fake_ranks: None) -> None:
    graph = Graph()
    with FakeTensorMode():
        shard = torch.empty(4, 3)
    node = graph.placeholder("shard")
    node.meta["val"] = shard
    emit(graph, start_gather, [node], group=group())
    (gather,) = graph.find_nodes(op="call_function", target=_c10d.all_gather_into_tensor.default)
    value: Tensor = gather.meta["val"]
    assert gather.args[1] == 8
    assert value.shape == (8 * 12,)
