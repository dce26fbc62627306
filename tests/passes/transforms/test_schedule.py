from collections.abc import Mapping, Sequence

import torch
from torch.fx import Graph, GraphModule

from passes.collectives.divide_factors import Averaging
from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.ir.update import Update, UpdateTarget
from passes.transforms.bucket import bucket_gathers, find_buckets
from passes.transforms.flat_storage import flat_storage, locate_shards
from passes.transforms.gradient_sync import synchronize_gradients
from passes.transforms.schedule import find_prefetches, schedule_gathers, schedule_reductions
from tests.passes.tracing import PassTestCase


class TestSchedule(PassTestCase):
    def forward_graph(self, units: int) -> GraphModule:
        """Trace a chain of units, one product each."""

        def forward(x, *shards):
            for index, shard in enumerate(shards):
                weight = unshard(shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), offset=0)
                x = (x @ weight).relu()
            return (x,)

        shards = [torch.zeros(1, 8) for _ in range(units)]
        return self.trace(forward, torch.zeros(3, 8), *shards)

    def backward_graph(self, units: int, **policy: str) -> GraphModule:
        """Trace a chain of gradients, each of which is reduced."""

        def backward(grad, *shards):
            reduced = []
            for index, shard in enumerate(shards):
                grad = grad.relu()
                reduced.append(reduce_grad(grad, shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), **policy))
            return reduced

        return self.trace(backward, torch.zeros(8, 8), *[torch.zeros(1, 8) for _ in range(units)])

    def synchronize(self, graph: Graph, reduction: Reduction | None = None) -> None:
        """Synchronize the gradients of every bucket by the same ``reduction``."""
        interface = Interface(graph)
        synchronize_gradients(
            graph, [PlannedReduction(reduction or Reduction())] * len(find_buckets(graph).reductions), interface
        )
        interface.finish()

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

    def test_copies_begin_where_the_copy_before_has_arrived(self) -> None:
        """Units 2 and 3 are on the host. The copy of unit 2 starts at the top, that of unit 3 at the gather of unit 2."""

        def forward(x, *shards):
            for index, shard in enumerate(shards):
                device = {"device": "cpu"} if index in (2, 3) else {}
                weight = unshard(shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), offset=0, **device)
                x = (x @ weight).relu()
            return (x,)

        gm = self.trace(forward, torch.zeros(3, 8), *[torch.zeros(1, 8) for _ in range(4)])
        bucket_gathers(gm.graph)
        schedule_gathers(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
copy_to_device 2
start_gather 0
start_gather 1
finish_gather 0
mm
relu
copy_to_device 3
start_gather 2
finish_gather 1
mm
relu
start_gather 3
finish_gather 2
mm
relu
finish_gather 3
mm
relu
""",
        )

    def gathers(self, gm: GraphModule, lists: Mapping[str, Sequence[str]], plan: Sequence[Gather] | None = None) -> str:
        """Bucket and schedule the gathers of a graph with these prefetch lists. Return its outline."""
        interface = Interface(gm.graph)
        prefetches = find_prefetches(gm.graph, find_buckets(gm.graph), list(lists.items()))
        bucket_gathers(gm.graph, plan, interface)
        interface.finish()
        schedule_gathers(gm.graph, prefetches)
        return self.outline(gm.graph)

    def test_lists_of_the_next_unit_are_the_default(self) -> None:
        lists = {"0": ["1"], "1": ["2"]}
        assert self.gathers(self.forward_graph(3), lists) == self.gathers(self.forward_graph(3), {})

    def test_lists_start_two_units_ahead(self) -> None:
        self.assertExpectedInline(
            self.gathers(self.forward_graph(4), {"0": ["1", "2"], "1": ["2", "3"]}),
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

    def test_lists_start_four_units_ahead(self) -> None:
        lists = {str(unit): [str(unit + ahead) for ahead in range(1, 5)] for unit in range(6)}
        self.assertExpectedInline(
            self.gathers(self.forward_graph(6), lists),
            """\
start_gather 0
start_gather 1
start_gather 2
start_gather 3
start_gather 4
finish_gather 0
mm
relu
start_gather 5
finish_gather 1
mm
relu
finish_gather 2
mm
relu
finish_gather 3
mm
relu
finish_gather 4
mm
relu
finish_gather 5
mm
relu
""",
        )

    def test_uneven_lists(self) -> None:
        """The first unit lists two units, the second one that is already in flight, and the third lists three."""
        self.assertExpectedInline(
            self.gathers(self.forward_graph(6), {"0": ["1", "2"], "1": ["2"], "2": ["3", "4", "5"]}),
            """\
start_gather 0
start_gather 1
start_gather 2
finish_gather 0
mm
relu
finish_gather 1
mm
relu
start_gather 3
start_gather 4
start_gather 5
finish_gather 2
mm
relu
finish_gather 3
mm
relu
finish_gather 4
mm
relu
finish_gather 5
mm
relu
""",
        )

    def test_skipping_ahead_leaves_a_unit_to_its_own_wait(self) -> None:
        self.assertExpectedInline(
            self.gathers(self.forward_graph(4), {"0": ["2", "3"]}),
            """\
start_gather 0
start_gather 2
start_gather 3
finish_gather 0
mm
relu
start_gather 1
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

    def test_lists_hold_their_order_and_what_has_run_stays(self) -> None:
        """Lists may name a unit twice, units that are already gathered, and their own unit."""
        self.assertExpectedInline(
            self.gathers(self.forward_graph(4), {"0": ["2", "1", "2"], "1": ["0", "1", "3"]}),
            """\
start_gather 0
start_gather 2
start_gather 1
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

    def test_a_list_replaces_the_default_also_if_it_names_nothing_here(self) -> None:
        self.assertExpectedInline(
            self.gathers(self.forward_graph(3), {"0": ["elsewhere"]}),
            """\
start_gather 0
finish_gather 0
mm
relu
start_gather 1
start_gather 2
finish_gather 1
mm
relu
finish_gather 2
mm
relu
""",
        )

    def test_all_buckets_of_a_unit_start_together(self) -> None:
        def forward(x, *shards):
            for unit in ("a", "b"):
                x = x @ unshard(shards[0], f"{unit}.weight", [8, 8], self.shard, unit=unit, offset=0)
                x = x * unshard(shards[1], f"{unit}.scale", [8], self.shard, unit=unit, offset=0, param_dtype=torch.float32)
                shards = shards[2:]
            return (x,)

        shards = [torch.zeros(1, 8), torch.zeros(1, dtype=torch.float64)] * 2
        gm = self.trace(forward, torch.zeros(3, 8), *shards)
        self.assertExpectedInline(
            self.gathers(gm, {"a": ["b"]}),
            """\
start_gather a.1
start_gather a
start_gather b.1
start_gather b
finish_gather a.1
mm
finish_gather a
mul
finish_gather b.1
mm
finish_gather b
mul
""",
        )

    def test_a_reused_unit_starts_its_list_where_it_computes(self) -> None:
        gm = self.forward_graph(4)
        plan = [Gather.GATHER, Gather.REUSE, Gather.GATHER, Gather.GATHER]
        self.assertExpectedInline(
            self.gathers(gm, {"0": ["elsewhere"], "1": ["3"]}, plan),
            """\
start_gather 0
finish_gather 0
mm
relu
start_gather 3
mm
relu
start_gather 2
finish_gather 2
mm
relu
finish_gather 3
mm
relu
""",
        )

    def test_a_unit_without_gathers_starts_its_list_at_its_first_gradient(self) -> None:
        def backward(grad, shard_a, shard_b, saved):
            grad = grad.relu()
            grad_a = saved @ grad
            grad = (grad @ unshard(shard_b, "b.weight", [8, 8], self.shard, unit="b", offset=0)).exp()
            return (
                reduce_grad(grad_a, shard_a, "a.weight", [8, 8], self.shard, unit="a"),
                grad @ unshard(shard_b, "c.weight", [8, 8], self.shard, unit="c", offset=0),
            )

        gm = self.trace(backward, *[torch.zeros(8, 8), torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(8, 8)])
        self.assertExpectedInline(
            self.gathers(gm, {"a": ["c"], "b": ["elsewhere"]}),
            """\
start_gather b
relu
start_gather c
mm
finish_gather b
mm
exp
reduce_grad
finish_gather c
mm
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

    def test_reductions_hold_as_many_gradients_as_they_may(self) -> None:
        for limit in (1, 3):
            gm = self.backward_graph(4)
            self.synchronize(gm.graph)
            schedule_reductions(gm.graph, max_pending_reductions=limit)
            assert _most_pending(gm.graph) == limit

    def test_a_limit_lets_replicas_hold_more_gradients(self) -> None:
        gm = self.backward_graph(3, replicate_group=self.replicate)
        self.synchronize(gm.graph)
        schedule_reductions(gm.graph, max_pending_reductions=2)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0
relu
start_reduce 1
relu
all_reduce 0
start_reduce 2
finish_reduce 0
all_reduce 1
finish_reduce 1
all_reduce 2
finish_reduce 2
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


def _most_pending(graph: Graph) -> int:
    """Return the most reduce-scatters that are in flight at once."""
    pending = most = 0
    for node in graph.nodes:
        pending += node.target == torch.ops._c10d_functional.reduce_scatter_tensor.default
        pending -= node.target == torch.ops._c10d_functional.wait_tensor.default
        most = max(most, pending)
    return most


class TestUpdates(PassTestCase):
    def scheduled(self, numels: Sequence[int]) -> list[str]:
        """Schedule a backward that updates parameters. Return its outline.

        It gathers the parameters of the first unit, with ``numels`` elements in a shard, after their gradients and those of two
        other units.
        """

        offsets = [sum(numels[:index]) for index in range(len(numels))]

        def backward(grad, b, c, *shards):
            of_a = list(zip(shards, numels, offsets, strict=True))
            gradients = [
                reduce_grad(grad.exp()[: 8 * numel].clone(), shard, f"a.{offset}", [8 * numel], self.shard, unit="a")
                for shard, numel, offset in of_a
            ]
            for unit, shard in (("b", b), ("c", c)):
                grad = grad.cos()
                gradients.append(reduce_grad(grad[:16].clone(), shard, f"{unit}.0", [16], self.shard, unit=unit))
            fulls = [
                unshard(shard, f"a.{offset}", [8 * numel], self.shard, unit="a", offset=offset) for shard, numel, offset in of_a
            ]
            return *gradients, torch.cat(fulls).tanh()

        gm = self.trace(backward, torch.zeros(64), torch.zeros(2), torch.zeros(2), *(torch.zeros(numel) for numel in numels))
        plain = Update("sgd")
        of_a = tuple(UpdateTarget(offset, numel, plain, 0) for offset, numel in zip(offsets, numels, strict=True))
        interface = Interface(gm.graph)
        locations = locate_shards(gm.graph)
        bucket_gathers(gm.graph, None, interface)
        reduction = Reduction(averaging=Averaging("avg", "avg"), updates=True)
        others = (UpdateTarget(0, 2, plain, 0),)
        plan = [PlannedReduction(reduction, updates=updates) for updates in (of_a, others, others)]
        synchronize_gradients(gm.graph, plan, interface)
        interface.finish()
        flat_storage(gm.graph, locations, interface)
        schedule_gathers(gm.graph)
        schedule_reductions(gm.graph)
        gm.graph.lint()
        return self.outline(gm.graph).splitlines()

    def test_no_update_is_ahead_of_the_end_of_a_gather(self) -> None:
        """Neither for a single shard, nor for two that are gathered as a run of storage."""
        for numels in ([4], [2, 3]):
            lines = self.scheduled(numels)
            # The reduction is waited for before the second unit after it starts to reduce.
            assert lines.index("finish_reduce a") < lines.index("start_reduce c") < lines.index("finish_gather a")
            assert lines.index("finish_gather a") < lines.index("update a")
            # Nothing delays the updates of other units.
            assert lines.index("finish_reduce b") + 1 == lines.index("update b")
