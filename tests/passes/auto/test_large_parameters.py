from unittest.mock import patch

import torch
from torch.fx import GraphModule

from passes.auto.grouping import Grouping
from passes.auto.large_parameters import separate_large_parameters
from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import Gather, Plan, PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.transforms.bucket import bucket_gathers, find_buckets
from passes.transforms.gradient_sync import synchronize_gradients
from passes.transforms.schedule import find_prefetches, schedule_gathers, schedule_reductions
from tests.passes.tracing import PassTestCase

# A matrix of 1 MiB, and one with a row less on each of the eight ranks.
_LARGE, _SMALL = [512, 512], [504, 512]


def _hook(gradient: torch.Tensor, output: torch.Tensor) -> None:
    output.copy_(gradient.chunk(8)[0])


class TestLargeParameters(PassTestCase):
    def setUp(self) -> None:
        super().setUp()
        # The fake backend computes nothing, so it can stand for any backend.
        pretend = patch("passes.collectives.gloo.backend_of", lambda group, device: "gloo")
        pretend.start()
        self.addCleanup(pretend.stop)

    def forward_graph(self, units: int = 1, dim: int = 0) -> GraphModule:
        """Trace a chain of units, each with a norm's weight and two matrices."""

        def forward(x, *shards):
            for unit in range(units):
                norm, up, down = shards[3 * unit : 3 * unit + 3]
                x = x * unshard(norm, f"{unit}.norm", [512], self.shard, unit=str(unit), offset=0)
                x = (x @ unshard(up, f"{unit}.up", _LARGE, self.shard, unit=str(unit), offset=64, dim=dim)).relu()
                x = x @ unshard(down, f"{unit}.down", _LARGE, self.shard, unit=str(unit), offset=64 + 2**15, dim=dim)
            return (x,)

        matrix = [64, 512] if dim == 0 else [512, 64]
        shards = [torch.zeros(shape) for _ in range(units) for shape in ([64], matrix, matrix)]
        names = " ".join(f"{name}_{unit}" for unit in range(units) for name in ("norm", "up", "down"))
        return self.trace(forward, torch.zeros(3, 512), *shards, names=f"x {names}")

    def backward_graph(self, units: int = 1) -> GraphModule:
        """Trace the gradients of units, each with a large matrix, a smaller one and a norm's weight."""

        def backward(large, small, *shards):
            reduced = []
            for unit in range(units):
                large, small = large.relu(), small.relu()
                for name, grad in ("down", large), ("up", small), ("norm", small[0]):
                    shard = shards[len(reduced)]
                    reduced.append(reduce_grad(grad, shard, f"{unit}.{name}", list(grad.shape), self.shard, unit=str(unit)))
            return reduced

        shards = [torch.zeros(shape) for _ in range(units) for shape in ([64, 512], [63, 512], [64])]
        names = " ".join(f"{name}_{unit}" for unit in range(units) for name in ("down", "up", "norm"))
        return self.trace(backward, torch.zeros(_LARGE), torch.zeros(_SMALL), *shards, names=f"large small {names}")

    def test_large_parameters_are_gathered_alone_without_a_copy(self) -> None:
        gm = self.forward_graph()
        bucket_gathers(gm.graph, groups=separate_large_parameters(find_buckets(gm.graph), Plan((Gather.GATHER,))).gathers)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, x: "f32[3, 512]", norm_0: "f32[64]", up_0: "f32[64, 512]", down_0: "f32[64, 512]"):
    view_6: "f32[64]" = aten.view.default(norm_0, [-1])
    all_gather_into_tensor_2: "f32[512]" = _c10d_functional.all_gather_into_tensor.default(view_6, 8, 'shard')
    wait_tensor_2: "f32[512]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_2)
    view_7: "f32[8, 64]" = aten.view.default(wait_tensor_2, [8, -1])
    view_8: "f32[512]" = aten.view.default(view_7, [512])
    mul: "f32[3, 512]" = aten.mul.Tensor(x, view_8)
    view: "f32[32768]" = aten.view.default(up_0, [-1])
    all_gather_into_tensor: "f32[262144]" = _c10d_functional.all_gather_into_tensor.default(view, 8, 'shard')
    wait_tensor: "f32[262144]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_1: "f32[8, 32768]" = aten.view.default(wait_tensor, [8, -1])
    view_2: "f32[512, 512]" = aten.view.default(view_1, [512, 512])
    mm: "f32[3, 512]" = aten.mm.default(mul, view_2)
    relu: "f32[3, 512]" = aten.relu.default(mm)
    view_3: "f32[32768]" = aten.view.default(down_0, [-1])
    all_gather_into_tensor_1: "f32[262144]" = _c10d_functional.all_gather_into_tensor.default(view_3, 8, 'shard')
    wait_tensor_1: "f32[262144]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_4: "f32[8, 32768]" = aten.view.default(wait_tensor_1, [8, -1])
    view_5: "f32[512, 512]" = aten.view.default(view_4, [512, 512])
    mm_1: "f32[3, 512]" = aten.mm.default(relu, view_5)
    return (mm_1,)
""",
        )

    def test_pieces_of_a_unit_start_together_and_are_waited_for_where_they_are_read(self) -> None:
        gm = self.forward_graph(3)
        bucket_gathers(gm.graph, groups=separate_large_parameters(find_buckets(gm.graph), Plan((Gather.GATHER,) * 3)).gathers)
        schedule_gathers(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather 0/0
start_gather 0/1
start_gather 0/2
start_gather 1/0
start_gather 1/1
start_gather 1/2
finish_gather 0/0
mul
finish_gather 0/1
mm
relu
finish_gather 0/2
mm
start_gather 2/0
start_gather 2/1
start_gather 2/2
finish_gather 1/0
mul
finish_gather 1/1
mm
relu
finish_gather 1/2
mm
finish_gather 2/0
mul
finish_gather 2/1
mm
relu
finish_gather 2/2
mm
""",
        )

    def test_a_prefetch_list_starts_all_pieces_of_a_unit(self) -> None:
        gm = self.forward_graph(3)
        prefetches = find_prefetches(gm.graph, find_buckets(gm.graph), [("0", ("2",))])
        bucket_gathers(gm.graph, groups=separate_large_parameters(find_buckets(gm.graph), Plan((Gather.GATHER,) * 3)).gathers)
        schedule_gathers(gm.graph, prefetches)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
start_gather 0/0
start_gather 0/1
start_gather 0/2
start_gather 2/0
start_gather 2/1
start_gather 2/2
finish_gather 0/0
mul
finish_gather 0/1
mm
relu
finish_gather 0/2
mm
start_gather 1/0
start_gather 1/1
start_gather 1/2
finish_gather 1/0
mul
finish_gather 1/1
mm
relu
finish_gather 1/2
mm
finish_gather 2/0
mul
finish_gather 2/1
mm
relu
finish_gather 2/2
mm
""",
        )

    def test_large_gradients_are_sent_from_where_they_are(self) -> None:
        gm = self.backward_graph()
        interface = Interface(gm.graph)
        groups = separate_large_parameters(find_buckets(gm.graph), Plan(reductions=(PlannedReduction(),))).reductions
        synchronize_gradients(gm.graph, [PlannedReduction()], interface, groups)
        interface.finish()
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, large: "f32[512, 512]", small: "f32[504, 512]", down_0: "f32[64, 512]", up_0: "f32[63, 512]", norm_0: "f32[64]"):
    relu: "f32[512, 512]" = aten.relu.default(large)
    view: "f32[8, 32768]" = aten.view.default(relu, [8, -1])
    view_1: "f32[262144]" = aten.view.default(view, [-1])
    all_to_all_single: "f32[262144]" = _c10d_functional.all_to_all_single.default(view_1, [32768, 32768, 32768, 32768, 32768, 32768, 32768, 32768], [32768, 32768, 32768, 32768, 32768, 32768, 32768, 32768], 'shard')
    wait_tensor: "f32[262144]" = _c10d_functional.wait_tensor.default(all_to_all_single)
    view_2: "f32[8, 32768]" = aten.view.default(wait_tensor, [8, -1])
    sum_1: "f32[32768]" = aten.sum.dim_IntList(view_2, [0])
    relu_1: "f32[504, 512]" = aten.relu.default(small)
    select: "f32[512]" = aten.select.int(relu_1, 0, 0)
    view_3: "f32[8, 32256]" = aten.view.default(relu_1, [8, -1])
    view_4: "f32[8, 64]" = aten.view.default(select, [8, -1])
    cat: "f32[8, 32320]" = aten.cat.default([view_3, view_4], 1)
    view_5: "f32[258560]" = aten.view.default(cat, [-1])
    all_to_all_single_1: "f32[258560]" = _c10d_functional.all_to_all_single.default(view_5, [32320, 32320, 32320, 32320, 32320, 32320, 32320, 32320], [32320, 32320, 32320, 32320, 32320, 32320, 32320, 32320], 'shard')
    wait_tensor_1: "f32[258560]" = _c10d_functional.wait_tensor.default(all_to_all_single_1)
    view_6: "f32[8, 32320]" = aten.view.default(wait_tensor_1, [8, -1])
    sum_2: "f32[32320]" = aten.sum.dim_IntList(view_6, [0])
    return (None, None, None, sum_1, sum_2)
""",
        )

    def test_gradients_are_held_unit_by_unit(self) -> None:
        gm = self.backward_graph(4)
        plan = (PlannedReduction(),) * 4
        interface = Interface(gm.graph)
        synchronize_gradients(
            gm.graph, plan, interface, separate_large_parameters(find_buckets(gm.graph), Plan(reductions=plan)).reductions
        )
        interface.finish()
        schedule_reductions(gm.graph)
        self.assertExpectedInline(
            self.outline(gm.graph),
            """\
relu
start_reduce 0/0
relu
select
start_reduce 0/1
relu
start_reduce 1/0
relu
select
start_reduce 1/1
relu
finish_reduce 0/0
finish_reduce 0/1
start_reduce 2/0
relu
select
start_reduce 2/1
relu
finish_reduce 1/0
finish_reduce 1/1
start_reduce 3/0
relu
select
start_reduce 3/1
finish_reduce 2/0
finish_reduce 2/1
finish_reduce 3/0
finish_reduce 3/1
""",
        )

    def test_together_where_a_copy_is_needed_anyway_or_cheap_or_a_hook_sees_the_bucket(self) -> None:
        whole = (((0, 0), (0, 1), (0, 2)),)
        forward, backward = self.forward_graph().graph, self.backward_graph().graph
        gather = Plan((Gather.GATHER,))
        assert len(separate_large_parameters(find_buckets(forward), gather).gathers) == 3
        assert separate_large_parameters(find_buckets(self.forward_graph(dim=1).graph), gather) == Grouping(whole, ())
        assert separate_large_parameters(find_buckets(forward), Plan((Gather.REUSE,))) == Grouping((), ())
        with patch("passes.collectives.gloo.backend_of", lambda group, device: "nccl"):
            assert separate_large_parameters(find_buckets(forward), gather) == Grouping(whole, ())
        assert len(separate_large_parameters(find_buckets(backward), Plan(reductions=(PlannedReduction(),))).reductions) == 2
        for reduction in Reduction(Sync.NONE), Reduction(comm_hook=_hook), Reduction(all_reduce_hook=torch.Tensor.zero_):
            assert separate_large_parameters(
                find_buckets(backward), Plan(reductions=(PlannedReduction(reduction),))
            ) == Grouping((), whole)
