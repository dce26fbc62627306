"""Small graphs for the tests of passes, on the fake process group: eight ranks in one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import expecttest
import torch
import torch.distributed as dist
from torch._functorch.aot_autograd import aot_function
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.distributed.fake_pg import FakeStore

from passes.ir.work import bucket, role
from passes.pass_runner import graph_text

WORLD_SIZE = 8


class _IsTraced(Exception):
    pass


class PassTestCase(expecttest.TestCase):
    """A test with a fake process group of eight ranks, and a second one of two for replicas."""

    shard: str
    replicate: str

    def setUp(self) -> None:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD_SIZE)
        self.shard = dist.group.WORLD.group_name
        self.replicate = dist.new_group([0, 4]).group_name
        self.addCleanup(dist.destroy_process_group)

    def trace(self, function: Callable[..., Any], *inputs: torch.Tensor, names: str = "") -> GraphModule:
        """Trace a function of tensors; ``names`` are the names for its placeholders."""
        with FakeTensorMode() as mode:
            gm = make_fx(function)(*[mode.from_tensor(tensor) for tensor in inputs])
        for placeholder, name in zip(gm.graph.find_nodes(op="placeholder"), names.split(), strict=bool(names)):
            placeholder._rename(name)
            placeholder.target = name
        gm.graph.eliminate_dead_code()
        gm.recompile()
        return gm

    def partition(self, function: Callable[..., Any], inputs: Sequence[torch.Tensor], partition: Callable[..., Any]) -> None:
        """Trace a function with AOTAutograd, which has ``partition`` cut the joint graph in two. Compile nothing."""

        def compile_nothing(gm: GraphModule, _: Any) -> Any:
            def run(*_: Any) -> Any:
                raise _IsTraced

            return run

        traced = aot_function(function, fw_compiler=compile_nothing, bw_compiler=compile_nothing, partition_fn=partition)
        self.assertRaises(_IsTraced, traced, *inputs)

    def tags(self, text: str) -> str:
        """Return the lines of a graph's text with a tag for the partitioner."""
        return "\n".join(line.strip() for line in text.splitlines() if "  # " in line) + "\n"

    def text(self, graph: Graph) -> str:
        """Return the graph as the goldens show it."""
        graph.lint()
        return graph_text(graph, {self.shard: "shard", self.replicate: "replicate"})

    def outline(self, graph: Graph) -> str:
        """Return one line for each run of nodes with one role and bucket, and for each operator of compute."""
        graph.lint()
        lines: list[str] = []
        for node in graph.nodes:
            if node.op == "call_function":
                line = f"{role(node)} {bucket(node)}" if role(node) else str(node.target).split(".")[1]
                if not lines or lines[-1] != line:
                    lines.append(line)
        return "\n".join(lines) + "\n"
