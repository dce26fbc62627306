from __future__ import annotations

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch.fx import Graph, GraphModule

from passes.auto import auto_schedule
from passes.auto.auto_schedule import AutoSchedule
from passes.auto.grouping import Grouping, groupings
from passes.collectives import gloo
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.ir.work import bucket, role
from passes.models.hardware import Hardware, Link, Links
from passes.models.memory_model import live_bytes
from passes.pipeline import run_passes
from passes.transforms.bucket import find_buckets, whole_buckets
from tests.passes.tracing import PassTestCase


def machine(latency_s: float, bytes_per_s: float = 1e8, taken_s: float = 0.0) -> Hardware:
    """Return a slow machine: a product of 64 x 8 by 8 x 8 takes 8.2 us; kernels and memory cost next to nothing."""
    link = Link(latency_s, bytes_per_s, taken_s)
    links = Links(link, link, link)
    return Hardware("slow", {"float32": 1e9}, 1e15, 1e-9, 8, links, links)


#: Gathers a weight of 8 x 8 in 2.3 us, with hardly any latency.
FAST_LINK = machine(latency_s=1e-7)
#: Gathers a weight of 8 x 8 in 12 us, nearly all of it latency.
LATE_LINK = machine(latency_s=1e-5)


class TestAutoSchedule(PassTestCase):
    def forward_graph(self, *layers: int) -> GraphModule:
        """Trace a chain of units; ``layers`` are the numbers of products, one weight each, of the units."""

        def forward(x, *shards):
            remaining = iter(shards)
            for index, products in enumerate(layers):
                for product in range(products):
                    name, place = f"{index}.{product}", {"unit": str(index), "offset": 8 * product}
                    x = (x @ unshard(next(remaining), name, [8, 8], self.shard, **place)).relu()
            return [x]

        return self.trace(forward, torch.zeros(64, 8), *[torch.zeros(1, 8) for _ in range(sum(layers))])

    def backward_graph(self, units: int, **policy: str) -> GraphModule:
        """Trace a chain of products with gathered weights, and reduce a gradient of each."""

        def backward(grad, x, *shards):
            reduced = []
            for index, shard in enumerate(shards):
                grad = grad @ unshard(shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), offset=0)
                reduced.append(reduce_grad(x @ grad, shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), **policy))
            return reduced

        return self.trace(backward, torch.zeros(64, 8), torch.zeros(8, 64), *[torch.zeros(1, 8) for _ in range(units)])

    def plan(self, graph: Graph, reductions: list[Reduction] | None = None, classes: list[int] | None = None) -> Plan:
        buckets = find_buckets(graph)
        made = reductions or [Reduction()] * len(buckets.reductions)
        return Plan((Gather.GATHER,) * len(buckets.gathers), tuple(map(PlannedReduction, made, classes or [0] * len(made))))

    def schedule(self, gm: GraphModule, hardware: Hardware, limit: int | None = None, plan: Plan | None = None) -> str:
        """Schedule a graph. Return one line for each run of nodes with one role and bucket, and one for each product."""
        is_backward = bool(find_buckets(gm.graph).reductions)
        plan = plan or self.plan(gm.graph)
        run_passes(gm, plan, is_backward=is_backward, auto=AutoSchedule(hardware, limit))
        gm.graph.lint()
        lines: list[str] = []
        for node in gm.graph.nodes:
            line = f"{role(node)} {bucket(node)}" if role(node) else "mm"
            if (role(node) and line not in lines[-1:]) or node.target == torch.ops.aten.mm.default:
                lines.append(line)
        return "\n".join(lines) + "\n"

    def check_limits(self, make: Callable[[], GraphModule], *machines: Hardware) -> None:
        """Check that schedules of a graph keep limits between the least that is possible and what a free schedule takes."""
        for hardware in machines:
            with pytest.raises(ValueError, match="too low") as error:
                self.schedule(make(), hardware, 1)
            least = int(str(error.value).split(" bytes at once")[0].rpartition(" ")[2])
            free = make()
            self.schedule(free, hardware)
            most = live_bytes(free.graph).peak
            assert least < most
            for limit in range(least, most + 1, max(1, (most - least) // 3)):
                gm = make()
                self.schedule(gm, hardware, limit)
                assert live_bytes(gm.graph).peak <= limit

    def test_gathers_start_as_late_as_hides_them(self) -> None:
        self.assertExpectedInline(
            self.schedule(self.forward_graph(2, 2, 2), FAST_LINK),
            """\
start_gather 0/0
start_gather 0/1
finish_gather 0/0
mm
start_gather 1/0
finish_gather 0/1
mm
start_gather 1/1
finish_gather 1/0
mm
start_gather 2/0
finish_gather 1/1
mm
start_gather 2/1
finish_gather 2/0
mm
finish_gather 2/1
mm
""",
        )

    def test_a_slow_link_is_never_idle_and_holds_no_queue(self) -> None:
        self.assertExpectedInline(
            self.schedule(self.forward_graph(1, 1, 1, 1), machine(1e-7, 1e7)),
            """\
start_gather 0
start_gather 1
finish_gather 0
mm
start_gather 2
finish_gather 1
mm
start_gather 3
finish_gather 2
mm
finish_gather 3
mm
""",
        )

    def test_small_gathers_merge_where_latency_counts(self) -> None:
        self.assertExpectedInline(
            self.schedule(self.forward_graph(1, 1, 1, 1, 1, 1), LATE_LINK),
            """\
start_gather 0+1+2+3
start_gather 4+5
finish_gather 0+1+2+3
mm
mm
mm
mm
finish_gather 4+5
mm
mm
""",
        )

    def test_small_gathers_merge_where_they_take_time_from_compute(self) -> None:
        # Apart, all gathers but the first would be hidden.
        self.assertExpectedInline(
            self.schedule(self.forward_graph(1, 1, 1, 1), machine(latency_s=2e-6, taken_s=4e-6)),
            """\
start_gather 0+1+2+3
finish_gather 0+1+2+3
mm
mm
mm
mm
""",
        )

    def test_small_gathers_merge_across_a_large_one(self) -> None:
        def forward(x, *shards):
            for unit, (shard, width) in enumerate(zip(shards, (8, 512, 512, 8), strict=True)):
                weight = unshard(shard, f"{unit}.weight", [8, width], self.shard, unit=str(unit), offset=0)
                x = x + (x @ weight).sum(1, keepdim=True)
            return [x]

        graph = self.trace(forward, torch.zeros(64, 8), *[torch.zeros(1, width) for width in (8, 512, 512, 8)]).graph
        plan = self.plan(graph)
        default = Grouping(tuple(whole_buckets(find_buckets(graph).gathers)), ())
        found = groupings(graph, find_buckets(graph), plan, default, LATE_LINK, smallest=False)
        assert Grouping((((0, 0), (3, 0)), ((1, 0),), ((2, 0),)), ()) in found

    def test_a_large_unit_splits(self) -> None:
        # Only the first piece is exposed: products hide the others.
        self.assertExpectedInline(
            self.schedule(self.forward_graph(4), FAST_LINK),
            """\
start_gather 0/0
start_gather 0/1
finish_gather 0/0
mm
start_gather 0/2
finish_gather 0/1
mm
start_gather 0/3
finish_gather 0/2
mm
finish_gather 0/3
mm
""",
        )

    def test_a_limit_delays_gathers(self) -> None:
        free = self.forward_graph(1, 1, 1)
        self.schedule(free, LATE_LINK)
        limit = live_bytes(free.graph).peak - 1
        limited = self.forward_graph(1, 1, 1)
        outline = self.schedule(limited, LATE_LINK, limit)
        assert live_bytes(limited.graph).peak <= limit
        self.assertExpectedInline(
            outline,
            """\
start_gather 0
start_gather 1
finish_gather 0
mm
finish_gather 1
mm
start_gather 2
finish_gather 2
mm
""",
        )

    def test_reductions_overlap_and_gathers_go_first(self) -> None:
        self.assertExpectedInline(
            self.schedule(self.backward_graph(3), machine(4e-6)),
            """\
start_gather 0
start_gather 1
finish_gather 0
mm
mm
start_reduce 0
start_gather 2
finish_gather 1
mm
mm
finish_reduce 0
start_reduce 1
finish_gather 2
mm
mm
finish_reduce 1
start_reduce 2
finish_reduce 2
""",
        )

    def test_reductions_merge_if_their_plans_and_factors_are_equal(self) -> None:
        gm = self.backward_graph(5)
        reductions = [Reduction(), Reduction(), Reduction(), Reduction(), Reduction(has_grad=True)]
        plan = self.plan(gm.graph, reductions, [0, 0, 2, 2, 2])
        starts = [line for line in self.schedule(gm, LATE_LINK, plan=plan).splitlines() if line.startswith("start_reduce")]
        assert starts == ["start_reduce 0+1", "start_reduce 2+3", "start_reduce 4"]

    def test_accumulated_gradients_and_hooks_keep_their_buckets(self) -> None:
        def keep(grad: torch.Tensor, output: torch.Tensor) -> None:
            output.copy_(grad[:8])

        gm = self.backward_graph(4)
        plan = self.plan(gm.graph, [Reduction(Sync.NONE)] * 2 + [Reduction(comm_hook=keep)] * 2)
        starts = [line for line in self.schedule(gm, LATE_LINK, plan=plan).splitlines() if line.startswith("start_reduce")]
        assert starts == ["start_reduce 2", "start_reduce 3"]

    def test_replicas_are_reduced_when_their_shards_are_there(self) -> None:
        gm = self.backward_graph(3, replicate_group=self.replicate)
        self.assertExpectedInline(
            self.schedule(gm, FAST_LINK),
            """\
start_gather 0
start_gather 1
finish_gather 0
mm
mm
start_reduce 0
start_gather 2
finish_gather 1
mm
mm
all_reduce 0
start_reduce 1
finish_gather 2
mm
mm
all_reduce 1
finish_reduce 0
start_reduce 2
all_reduce 2
finish_reduce 1
finish_reduce 2
""",
        )

    def test_of_what_is_as_good_it_takes_the_least_memory(self) -> None:
        peaks = []
        for as_good in (50, 10**9):
            gm = self.backward_graph(6)
            with patch.object(auto_schedule, "_AS_GOOD", as_good):
                self.schedule(gm, machine(1e-7, 1e9, taken_s=1e-7))
            peaks.append(live_bytes(gm.graph).peak)
        assert peaks[0] < peaks[1]

    def test_never_above_the_limit(self) -> None:
        self.check_limits(lambda: self.forward_graph(3, 1, 2), FAST_LINK, LATE_LINK)
        self.check_limits(lambda: self.backward_graph(4), FAST_LINK, LATE_LINK)

    def test_never_above_the_limit_where_pieces_are_summed_after_a_wait(self) -> None:
        """Over Gloo the ranks' pieces of a gradient are summed after the wait, which may need more than any other place."""
        shapes = [[64, 8], [8, 32], [32, 8]]

        def backward(grad, x, *shards):
            reduced = []
            for index, (shard, shape) in enumerate(zip(shards, shapes, strict=True)):
                place = {"unit": str(index), "offset": 0}
                grad = grad @ unshard(shard, f"{index}.weight", shape, self.shard, **place)
                reduced.append(reduce_grad(x[: shape[0]] @ grad, shard, f"{index}.weight", shape, self.shard, unit=str(index)))
            return reduced

        def make() -> GraphModule:
            shards = [torch.zeros(rows // 8, columns) for rows, columns in shapes]
            return self.trace(backward, torch.zeros(8, 64), torch.zeros(64, 8), *shards)

        with patch.object(gloo, "backend_of", lambda group, device: "gloo"):
            self.check_limits(make, machine(latency_s=1e-7, bytes_per_s=1e9))

    def test_an_impossible_limit_names_the_least_and_the_unit(self) -> None:
        with pytest.raises(ValueError) as error:
            self.schedule(self.forward_graph(1, 2), FAST_LINK, 300)
        self.assertExpectedInline(
            str(error.value),
            """options['memory_limit'] = 300 is too low: with nothing in flight and every parameter by itself, a graph of this model still needs 4352 bytes at once, most of them for unit 1. Raise the limit to that at least, or have less live at once: smaller parameters in that unit, a smaller batch, activation checkpointing.""",
        )

    def test_is_deterministic(self) -> None:
        assert self.schedule(self.backward_graph(6), LATE_LINK, 9000) == self.schedule(self.backward_graph(6), LATE_LINK, 9000)

    def test_refuses_explicit_settings(self) -> None:
        gm = self.forward_graph(1, 1)
        gathers = (Gather.GATHER,) * 2
        with pytest.raises(ValueError, match=r"the root, 1 has a list of .*Clear it with an empty list"):
            self.schedule(gm, FAST_LINK, plan=Plan(gathers, prefetch=(("", ("1",)), ("1", ()))))
        with pytest.raises(ValueError, match="set_reduce_scatter_max_input_buffers was called"):
            self.schedule(gm, FAST_LINK, plan=Plan(gathers, max_pending_reductions=1))
        # Refused settings leave the graph unchanged.
        assert len(find_buckets(gm.graph).gathers) == 2

    def test_leaves_a_graph_without_buckets_alone(self) -> None:
        gm = self.trace(lambda x: [x.relu()], torch.zeros(3), names="x")
        before = [node.name for node in gm.graph.nodes]
        self.schedule(gm, FAST_LINK, 100, Plan())
        assert [node.name for node in gm.graph.nodes] == before
