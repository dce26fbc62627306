import torch
from torch.fx import Graph, GraphModule

from passes.bucket import bucket_gathers, reduction_buckets
from passes.gradient_sync import synchronize_gradients
from passes.graph import bucket, role
from passes.interface import Interface
from passes.ops import reduce_grad, unshard
from passes.schedule import schedule_gathers, schedule_reductions
from passes.sync_plan import Reduction, Sync
from tests.passes.tracing import PassTestCase


class TestSchedule(PassTestCase):
    def forward_graph(self, units: int) -> GraphModule:
        """A chain of units, one product each."""

        def forward(x, *shards):
            for index, shard in enumerate(shards):
                weight = unshard(shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), offset=0)
                x = (x @ weight).relu()
            return x

        shards = [torch.zeros(1, 8) for _ in range(units)]
        return self.trace(forward, torch.zeros(3, 8), *shards)

    def backward_graph(self, units: int, **policy: str) -> GraphModule:
        """A chain of gradients, each reduced."""

        def backward(grad, *shards):
            reduced = []
            for index, shard in enumerate(shards):
                grad = grad.relu()
                reduced.append(reduce_grad(grad, shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), **policy))
            return reduced

        return self.trace(backward, torch.zeros(8, 8), *[torch.zeros(1, 8) for _ in range(units)])

    def synchronize(self, graph: Graph, reduction: Reduction | None = None) -> None:
        """Give every bucket the same plan."""
        interface = Interface(graph)
        synchronize_gradients(graph, [reduction or Reduction()] * len(reduction_buckets(graph)), interface)
        interface.finish()

    def outline(self, graph: Graph) -> str:
        """One line for each stretch of nodes with one role, compute by its operators."""
        graph.lint()
        lines: list[str] = []
        for node in graph.nodes:
            if node.op == "call_function":
                line = f"{role(node)} {bucket(node)}" if role(node) else str(node.target).split(".")[1]
                if not lines or lines[-1] != line:
                    lines.append(line)
        return "\n".join(lines) + "\n"

    def test_gathers_start_one_unit_ahead(self) -> None:
        gm = self.forward_graph(3)
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather 0
finish_gather 0
mm
relu
start_gather 1
finish_gather 1
mm
relu
start_gather 2
finish_gather 2
mm
relu
""",
        )
        schedule_gathers(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather 0
start_gather 1
finish_gather 0
mm
relu
start_gather 2
finish_gather 1
mm
relu
finish_gather 2
mm
relu
""",
        )

    def test_gathers_start_two_units_ahead(self) -> None:
        gm = self.forward_graph(4)
        bucket_gathers(gm.graph)
        schedule_gathers(gm.graph, prefetch=2)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather 0
start_gather 1
start_gather 2
finish_gather 0
mm
relu
start_gather 3
finish_gather 1
mm
relu
finish_gather 2
mm
relu
finish_gather 3
mm
relu
""",
        )

    def test_a_single_gather_starts_at_the_top(self) -> None:
        def forward(x, shard):
            return x.relu().exp() @ unshard(shard, "weight", [8, 8], self.shard, offset=0)

        gm = self.trace(forward, torch.zeros(3, 8), torch.zeros(1, 8), names="x shard")
        bucket_gathers(gm.graph)
        schedule_gathers(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather root
relu
exp
finish_gather root
mm
""",
        )

    def test_reductions_finish_late_but_hold_two_gradients(self) -> None:
        gm = self.backward_graph(4)
        self.synchronize(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0
finish_reduce 0
relu
start_reduce 1
finish_reduce 1
relu
start_reduce 2
finish_reduce 2
relu
start_reduce 3
finish_reduce 3
""",
        )
        schedule_reductions(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0
relu
start_reduce 1
relu
finish_reduce 0
start_reduce 2
relu
finish_reduce 1
start_reduce 3
finish_reduce 2
finish_reduce 3
""",
        )

    def test_all_reduces_go_on_until_the_end(self) -> None:
        gm = self.backward_graph(3, replicate_group=self.replicate)
        self.synchronize(gm.graph)
        schedule_reductions(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0
relu
all_reduce 0
start_reduce 1
relu
all_reduce 1
start_reduce 2
finish_reduce 0
finish_reduce 1
all_reduce 2
finish_reduce 2
""",
        )

    def test_a_hook_may_leave_nothing_to_finish(self) -> None:
        def scale(grad: torch.Tensor, output: torch.Tensor) -> None:
            output.copy_(grad[:8] * 2)

        gm = self.backward_graph(2)
        self.synchronize(gm.graph, Reduction(comm_hook=scale))
        schedule_reductions(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0
relu
start_reduce 1
""",
        )

    def test_accumulated_gradients_stay_where_they_are(self) -> None:
        gm = self.backward_graph(2)
        self.synchronize(gm.graph, Reduction(Sync.NONE, has_unsharded=True))
        schedule_reductions(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
accumulate 0
relu
accumulate 1
""",
        )

    def test_leaves_a_graph_without_buckets_alone(self) -> None:
        gm = self.trace(lambda x: x.relu(), torch.zeros(3), names="x")
        before = self.text(gm.graph)
        schedule_gathers(gm.graph)
        schedule_reductions(gm.graph)
        assert self.text(gm.graph) == before
