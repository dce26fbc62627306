import functools
import random

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule

from passes.collectives.gloo import pretending_gloo
from passes.collectives.host_copies import (
    copy_to_device,
    copy_to_host,
    fetch,
    offload,
    wait_copy,
    wait_offload,
)
from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import PlannedReduction
from passes.ir.reduction import Reduction, Sync
from passes.models.cost_model import kernels, unwritten
from passes.models.memory_model import IS_PARAMETER, Category, MemoryModel, live_bytes, mark_freed_inputs, mark_memory
from passes.transforms.bucket import bucket_gathers
from passes.transforms.gradient_sync import synchronize_gradients
from passes.transforms.mixed_precision import mixed_precision
from tests.common.executed_memory import executed
from tests.passes.tracing import PassTestCase

_c10d = torch.ops._c10d_functional


class TestMemoryModel(PassTestCase):
    def timeline(self, graph: Graph) -> str:
        """Return a line for each node: all live bytes, and the bytes of parameters."""
        live = live_bytes(graph)
        return "".join(
            f"{name}: {total} ({parameters})\n" for name, (total, parameters) in zip(live.nodes, live.timeline, strict=True)
        )

    def test_views_share_a_storage_and_outputs_live_on(self) -> None:
        def function(x):
            a = x + 1
            b = a.view(2, 5).t() + 1
            c = b.exp()
            return (c.sum(),)

        self.assertExpectedInline(
            self.timeline(self.trace(function, torch.zeros(10), names="x").graph),
            """\
x: 0 (0)
add: 40 (0)
view: 40 (0)
t: 40 (0)
add_1: 80 (0)
exp: 80 (0)
sum_1: 44 (0)
output: 4 (0)
""",
        )

    def test_a_collective_holds_what_it_reads_until_the_wait(self) -> None:
        def function(x):
            source = x + 1
            started = _c10d.all_reduce(source, "sum", self.shard)
            other = x.exp()
            return (_c10d.wait_tensor(started).sum() + other.sum(),)

        self.assertExpectedInline(
            self.timeline(self.trace(function, torch.zeros(10), names="x").graph),
            """\
x: 0 (0)
add: 40 (0)
all_reduce: 80 (0)
exp: 120 (0)
wait_tensor: 120 (0)
sum_1: 84 (0)
sum_2: 48 (0)
add_1: 12 (0)
output: 4 (0)
""",
        )

    def test_a_bucket_is_doubled_while_it_is_copied_out(self) -> None:
        def forward(x, *shards):
            for index, shard in enumerate(shards):
                x = x @ unshard(shard, str(index), [8, 8], self.shard, unit="up", offset=8 * index)
            return (x,)

        gm = self.trace(forward, torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(1, 8), names="x a b")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.timeline(gm.graph),
            """\
x: 0 (0)
a: 0 (0)
b: 0 (0)
view: 0 (0)
view_1: 0 (0)
cat: 64 (0)
all_gather_into_tensor: 576 (512)
wait_tensor: 576 (512)
view_2: 512 (512)
split_with_sizes: 512 (512)
getitem: 512 (512)
getitem_1: 512 (512)
view_3: 512 (512)
clone: 768 (768)
view_4: 768 (768)
clone_1: 1024 (1024)
mm: 544 (512)
mm_1: 320 (256)
output: 32 (0)
""",
        )

    def test_one_parameter_is_a_view_of_its_buffer(self) -> None:
        gm = self.trace(
            lambda x, a: (x @ unshard(a, "a", [8, 8], self.shard, offset=0),), torch.zeros(1, 8), torch.zeros(1, 8), names="x a"
        )
        bucket_gathers(gm.graph)
        live = live_bytes(gm.graph)
        assert (live.peak, live.peak_parameters) == (4 * 64 + 4 * 8, 4 * 64)

    def test_writing_in_place_makes_no_storage(self) -> None:
        gm = self.trace(lambda x, y: (torch.ops.aten.copy_.default(x, y + 1),), torch.zeros(10), torch.zeros(10), names="x y")
        assert live_bytes(gm.graph).peak == 40

    def test_casts_of_a_copy_in_never_live_unless_they_are_all_of_it(self) -> None:
        """Two gradients are reduced together, and their copy-in does the cast. A third is reduced alone, so its cast lives."""

        def backward(grad, *shards):
            units = ("up", "up", "down")
            return tuple(
                reduce_grad(grad * factor, shard, f"{factor}", [8], self.shard, unit=unit, reduce_dtype=torch.float32)
                for factor, (shard, unit) in enumerate(zip(shards, units, strict=True))
            )

        gm = self.trace(backward, torch.zeros(8, dtype=torch.bfloat16), *(torch.zeros(1) for _ in range(3)), names="grad a b c")
        mixed_precision(gm.graph)
        interface = Interface(gm.graph)
        synchronize_gradients(gm.graph, [PlannedReduction(), PlannedReduction()], interface)
        interface.finish()
        self.assertExpectedInline(
            self.timeline(gm.graph),
            """\
grad: 0 (0)
a: 0 (0)
b: 0 (0)
c: 0 (0)
mul: 16 (0)
mul_1: 32 (0)
convert_element_type_default: 32 (0)
convert_element_type_default_1: 32 (0)
view: 32 (0)
view_1: 32 (0)
cat: 96 (0)
view_2: 64 (0)
reduce_scatter_tensor: 72 (0)
wait_tensor: 72 (0)
mul_2: 24 (0)
convert_element_type_default_2: 56 (0)
view_3: 40 (0)
view_4: 40 (0)
reduce_scatter_tensor_1: 44 (0)
wait_tensor_1: 44 (0)
output: 12 (0)
""",
        )

    def test_inputs_that_backward_frees_live_until_their_last_reader(self) -> None:
        gm = self.trace(
            lambda shard, saved, tangent: ((saved * tangent).exp().sum() + shard.sum(),),
            *(torch.zeros(10) for _ in range(3)),
            names="primals_1 saved tangents_1",
        )
        mark_freed_inputs(gm.graph, [])
        self.assertExpectedInline(
            self.timeline(gm.graph),
            """\
primals_1: 80 (0)
saved: 80 (0)
tangents_1: 80 (0)
mul: 120 (0)
exp: 80 (0)
sum_1: 44 (0)
sum_2: 8 (0)
add: 12 (0)
output: 4 (0)
""",
        )

    def test_categories(self) -> None:
        """Backward reads a saved activation and a shard, and reduces a gradient."""

        def backward(shard, saved, tangents):
            full = unshard(shard, "w", [8, 8], self.shard, unit="up")
            grad = saved.t() @ tangents
            return (tangents @ full.t(), reduce_grad(grad, shard, "w", [8, 8], self.shard, unit="up"))

        gm = self.trace(backward, torch.zeros(1, 8), torch.zeros(16, 8), torch.zeros(16, 8), names="shard saved tangents")
        mark_freed_inputs(gm.graph, [gm.graph.find_nodes(op="placeholder")[0]])
        interface = Interface(gm.graph)
        bucket_gathers(gm.graph)
        synchronize_gradients(gm.graph, [PlannedReduction()], interface)
        interface.finish()
        order = list(gm.graph.nodes)
        model = MemoryModel(gm.graph)
        live, memory = model.live_bytes(order), model.breakdown(order)
        totals = [sum(held) for held in zip(*memory.timeline.values(), strict=True)]
        assert totals == [total for total, _ in live.timeline]
        assert list(memory.timeline[Category.PARAMETERS]) == [parameters for _, parameters in live.timeline]
        most = {category: max(row) for category, row in memory.timeline.items()}
        # The saved activation, the output's gradient and the input's gradient have 512 bytes each; at most two live at once.
        assert most[Category.ACTIVATIONS] == 3 * 512 - 512
        assert most[Category.GRADIENTS] >= 8 * 8 * 4
        assert memory.given_out[Category.ACTIVATIONS] == 512 and memory.given_out[Category.GRADIENTS] == 8 * 4

    def test_saved_parameters_and_what_is_never_written(self) -> None:
        def forward(x):
            return (x.relu().exp(),)

        gm = self.trace(forward, torch.zeros(10), names="x")
        x = gm.graph.find_nodes(op="placeholder")[0]
        x.meta |= {"freed": True, IS_PARAMETER: True}
        memory = MemoryModel(gm.graph, unwritten(gm.graph)).breakdown(list(gm.graph.nodes))
        assert list(memory.timeline[Category.PARAMETERS]) == [40, 40, 0, 0]
        assert list(memory.timeline[Category.WORKING]) == [0, 0, 0, 0]
        assert list(memory.timeline[Category.ACTIVATIONS]) == [0, 0, 40, 40]

    def of_kernels(self, gm: GraphModule) -> list[int]:
        """Return the live bytes at each node, with nodes that fuse counted as one kernel."""
        memory = MemoryModel(gm.graph, unwritten(gm.graph), kernels(gm.graph)).breakdown(list(gm.graph.nodes))
        return [sum(held) for held in zip(*memory.timeline.values(), strict=True)]

    def test_a_kernel_holds_what_it_reads_beside_what_it_writes(self) -> None:
        """The saved value is last read before the node that is written, but in the same kernel."""
        gm = self.trace(
            lambda saved, tangents: (saved.sin() * tangents + tangents.exp(),),
            *(torch.zeros(10) for _ in range(2)),
            names="saved tangents",
        )
        mark_freed_inputs(gm.graph, [])
        assert max(self.of_kernels(gm)) == 3 * 40

    def test_a_kernel_writes_over_what_its_segment_has_made(self) -> None:
        def function(x):
            product = x @ x
            return (product.relu() * 2,)

        gm = self.trace(function, torch.zeros(4, 4), names="x")
        # The caller holds x, so only the product counts, which the kernel writes over.
        assert max(self.of_kernels(gm)) == 64

        gm = self.trace(lambda x: ((x @ x).relu().to(torch.int32),), torch.zeros(4, 4), names="x")
        assert max(self.of_kernels(gm)) == 2 * 64

    def test_a_kernel_does_not_write_over_what_another_segment_has_made(self) -> None:
        def function(x, y):
            started = _c10d.all_reduce(y, "sum", self.shard)
            product = x @ x
            return (product.relu() * _c10d.wait_tensor(started),)

        gm = self.trace(function, torch.zeros(4, 4), torch.zeros(4, 4), names="x y")
        # The product, the result and the all-reduced value.
        assert max(self.of_kernels(gm)) == 3 * 64

    def test_saved_views_of_a_value_are_one_storage(self) -> None:
        def joint(x):
            product = x @ x
            left, right = product.split(2, dim=1)
            return (left, right.t(), product)

        gm = self.trace(joint, torch.zeros(4, 4), names="x")
        mark_memory(gm.graph)
        left, right, product = gm.graph.output_node().args[0]
        backward = Graph()
        saved = [backward.placeholder(node.name) for node in (left, right)]
        for node, of_forward in zip(saved, (left, right), strict=True):
            node.meta = dict(of_forward.meta)
        backward.output(())
        mark_freed_inputs(backward, [])
        model = MemoryModel(backward)
        # Both views keep the whole product alive.
        assert live_bytes(backward).peak == 64 and product.meta["val"].nbytes == 64
        assert model.breakdown(list(backward.nodes)).taken[Category.ACTIVATIONS] == 64

    def test_gradients_that_waited_are_freed_where_they_are_reduced(self) -> None:
        def backward(tangents, shard):
            return (reduce_grad(tangents.exp(), shard, "w", [8, 8], self.shard, unit="up"),)

        for reduction, taken in ((Reduction(has_unsharded=True), 256), (Reduction(Sync.NONE, has_unsharded=True), 0)):
            gm = self.trace(backward, torch.zeros(8, 8), torch.zeros(1, 8), names="tangents shard")
            interface = Interface(gm.graph)
            synchronize_gradients(gm.graph, [PlannedReduction(reduction)], interface)
            interface.finish()
            assert MemoryModel(gm.graph).breakdown(list(gm.graph.nodes)).taken[Category.GRADIENTS] == taken

    def test_copies_of_random_programs_hold_what_their_execution_holds(self) -> None:
        """The model agrees at each node with the execution of random programs of kernels, views and copies."""
        for seed in range(20):
            graph = self.trace(functools.partial(_random_program, random.Random(seed)), torch.zeros(6, 4)).graph
            model = live_bytes(graph)
            assert list(zip(model.nodes, (total for total, _ in model.timeline), strict=True)) == executed(graph)

    def test_categories_of_what_is_copied(self) -> None:
        def function(shard, x, saved):
            there = wait_copy(copy_to_device([shard], "cpu"))
            y = x * there
            copy = wait_offload(offload(y), y)
            back = wait_copy(fetch(saved, "cpu"))
            return copy, copy_to_host(back.exp(), True)

        graph = self.trace(function, *[torch.zeros(10)] * 3, names="shard x saved").graph
        breakdown = MemoryModel(graph).breakdown(order := list(graph.nodes))
        place = {node.name: index for index, node in enumerate(order)}
        live = {
            name: {category: row[place[name]] for category, row in breakdown.timeline.items() if row[place[name]]}
            for name in ("offload", "fetch", "exp", "copy_to_host", "output")
        }
        assert live == {
            "offload": {Category.ACTIVATIONS: 40},
            "fetch": {Category.ACTIVATIONS: 40},
            "exp": {Category.ACTIVATIONS: 40, Category.WORKING: 40},
            "copy_to_host": {Category.WORKING: 40},
            # The source of the copy lives until the host has waited.
            "output": {Category.WORKING: 40},
        }
        assert not any(breakdown.given_out.values())

    def test_gloo_copies_no_gather_on_the_cpu(self) -> None:
        gm = self.trace(
            lambda x, a: (x @ unshard(a, "a", [8, 8], self.shard, offset=0),), torch.zeros(1, 8), torch.zeros(1, 8), names="x a"
        )
        bucket_gathers(gm.graph)
        with pretending_gloo():
            assert live_bytes(gm.graph).peak_parameters == 4 * 64


def _random_program(chance: random.Random, x: Tensor) -> list[Tensor]:
    values, hosts = [x + 1], []
    on_their_way: list[tuple[Tensor, Tensor]] = []
    outputs = []
    for _ in range(12):
        value = chance.choice(values)
        match chance.randrange(7):
            case 0:
                values.append(value.exp())
            case 1:
                values.append(torch.stack([value, chance.choice(values).view(value.shape)]).sum(0))
            case 2:
                values.append(value.view(-1).view(6, 4))
            case 3:
                on_their_way.append((offload(value), value))
            case 4 if on_their_way:
                hosts.append(wait_offload(*on_their_way.pop(chance.randrange(len(on_their_way)))))
            case 5 if hosts:
                values.append(wait_copy(fetch(chance.choice(hosts), "cpu")))
            case 6:
                outputs.append(copy_to_host(value, True))
    return [*outputs, *hosts, values[-1]]
