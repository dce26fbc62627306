from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from passes.collectives.host_copies import copy_to_device, copy_to_host, fetch, offload, wait_copy, wait_offload
from passes.fx.graph import starts_collective
from passes.models.cost_model import collective_kind, kernels, node_flops, node_ns, traffic_bytes, transfer_ns, unwritten
from passes.models.hardware import Hardware, HostLink, Link, Links, known_hardware
from passes.models.timeline import Costs, simulate
from tests.passes.tracing import PassTestCase

_c10d = torch.ops._c10d_functional

_NEAR = Links(Link(10e-6, 1e9), Link(20e-6, 1e9), Link(30e-6, 1e9))
_FAR = Links(*[Link(100e-6, 1e8)] * 3)
#: One flop a nanosecond (two in bfloat16), ten bytes a nanosecond, a microsecond for each kernel; nodes of four ranks. Copies
#: take two bytes a nanosecond to the device, one to the host.
HARDWARE = Hardware("test", {"float32": 1e9, "bfloat16": 2e9}, 1e10, 1e-6, 4, _NEAR, _FAR, host=HostLink(3e-6, 2e9, 1e9, 1e10))


class TestCostModel(PassTestCase):
    def costs(self, function: Callable[..., Any], *inputs: torch.Tensor) -> str:
        """Return the nodes that cost something, with their time in nanoseconds."""
        graph = self.trace(function, *inputs).graph
        return "".join(f"{node.name} {ns}\n" for node, ns in node_ns(graph, HARDWARE).items() if ns)

    def test_products_cost_flops_or_bytes(self) -> None:
        # In float32, 2 * 4 * 64 * 32 flops and a kernel; in bfloat16, half the time for flops; for the last product, its bytes.
        def function(a, b, row, column):
            return a @ b, a.bfloat16() @ b.bfloat16(), (row @ column)

        inputs = torch.zeros(4, 64), torch.zeros(64, 32), torch.zeros(1, 1000), torch.zeros(1000, 1)
        self.assertExpectedInline(
            self.costs(function, *inputs),
            """\
mm 17384
_to_copy 1154
_to_copy_1 2229
mm_1 9192
mm_2 3000
""",
        )

    def test_a_chain_between_products_is_one_kernel(self) -> None:
        # 1000 floats are read once: 0.4 us, and a kernel. Values inside the chain stay in registers; the result is one number.
        def chain(x):
            return x.relu().exp().sum().cos(), x.view(10, 100).t()

        self.assertExpectedInline(
            self.costs(chain, torch.zeros(1000)),
            """\
relu 1400
""",
        )

    def test_a_value_read_beyond_a_product_is_written_and_read(self) -> None:
        def function(x):
            y = x.relu()
            return (y @ y.t()).exp() + y.sum()

        self.assertExpectedInline(
            self.costs(function, torch.zeros(10, 10)),
            """\
mm 3000
relu 1080
exp 1040
sum_1 40
add 40
""",
        )

    def test_attention_counts_on_every_device(self) -> None:
        def attend(q, k, v):
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]

        q = torch.zeros(1, 1, 8, 16)
        # Two products of 2 * 8 * 8 * 16 flops.
        self.assertExpectedInline(
            self.costs(attend, q, q, q),
            """\
_scaled_dot_product_flash_attention_for_cpu 5096
""",
        )

    def test_attention_counts_each_head_of_the_query(self) -> None:
        def attend(q, k):
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, k)
            return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                output, q, k, k, output, logsumexp, 0.0, False
            )

        graph = self.trace(attend, torch.zeros(1, 4, 8, 16), torch.zeros(1, 2, 8, 16)).graph
        product = 4 * 2 * 8 * 8 * 16
        assert [found[1] for node in graph.nodes if (found := node_flops(node))] == [2 * product, 5 * product]

    def test_attention_has_a_rate_and_skips_what_a_causal_mask_hides(self) -> None:
        def attend(q, k, v):
            causal = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True)
            return causal[0], torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, is_causal=False)[0]

        q = torch.zeros(1, 1, 64, 16)
        graph = self.trace(attend, q, q, q).graph
        hardware = replace(HARDWARE, attention_flops_per_s={"float32": 5e8})
        times = [ns for node, ns in node_ns(graph, hardware).items() if ns]
        flops = 2 * 2 * 64 * 64 * 16
        assert times == [1000 + flops, 1000 + 2 * flops]
        # ``node_flops`` counts masked scores as well.
        assert [product for node in graph.nodes if (product := node_flops(node))] == [("float32", flops)] * 2

    def test_collectives_cost_latency_and_traffic(self) -> None:
        def communicate(x):
            gathered = _c10d.all_gather_into_tensor(x, 8, self.shard)
            scattered = _c10d.reduce_scatter_tensor(x, "sum", 8, self.shard)
            near = _c10d.all_reduce(x, "sum", self.near)
            return [_c10d.wait_tensor(value) for value in (gathered, scattered, near)]

        self.near = torch.distributed.new_group([0, 1]).group_name
        graph = self.trace(communicate, torch.zeros(800)).graph
        times = {node.name: transfer_ns(node, HARDWARE) for node in graph.nodes if starts_collective(node)}
        # The eight ranks span two nodes. All-gather: 7/8 of 25600 bytes; reduce-scatter: of 3200; all-reduce: 2 * 1/2 of 3200.
        assert times == {
            "all_gather_into_tensor": 100_000 + 224_000,
            "reduce_scatter_tensor": 100_000 + 28_000,
            "all_reduce": 30_000 + 3_200,
        }

    def test_a_collective_takes_time_from_what_hides_it(self) -> None:
        link = Link(1e-6, 1e9, taken_s=5e-6, taken_s_per_byte=2e-9)
        hardware = replace(HARDWARE, between_nodes=Links(link, link, link))

        def hide(x, y):
            gathered = _c10d.all_gather_into_tensor(x, 8, self.shard)
            product = y @ y
            return _c10d.wait_tensor(gathered), product

        graph = self.trace(hide, torch.zeros(8), torch.zeros(64, 64)).graph
        timeline = simulate(list(graph.nodes), Costs.of(graph, hardware))
        # 5 us, and 2 ns for each of the 7/8 of 256 bytes. The gather's launch and the product's kernel take 1 us each.
        taken = 5000 + 2 * 224
        assert (timeline.exposed, timeline.total) == (0, 1000 + taken + 1000 + 2 * 64**3)
        # Where no compute runs beside a collective, the time that it takes from compute does not count.
        graph = self.trace(lambda x: _c10d.wait_tensor(_c10d.all_gather_into_tensor(x, 8, self.shard)), torch.zeros(800)).graph
        far = Links(*[replace(_FAR.all_gather, taken_s=5e-6)] * 3)
        timeline = simulate(list(graph.nodes), Costs.of(graph, replace(hardware, between_nodes=far)))
        assert timeline.total == 100_000 + 224_000

    def test_dynamic_sizes_count_with_their_hints_and_add_no_guard(self) -> None:
        environment = ShapeEnv()
        with FakeTensorMode(shape_env=environment) as mode:
            x = mode.from_tensor(torch.zeros(4, 64), static_shapes=False)
            gm = make_fx(lambda x, y: ((x @ y).relu(),), tracing_mode="real")(x, mode.from_tensor(torch.zeros(64, 32)))
        guards = len(environment.guards)
        costs = {node.name: ns for node, ns in node_ns(gm.graph, HARDWARE).items() if ns}
        assert costs["mm"] == 2 * 4 * 64 * 32 + 1000
        assert costs["relu"] == 2 * 4 * 4 * 32 // 10 + 1000 + 0
        assert len(environment.guards) == guards

    def test_waits_expose_what_compute_does_not_hide(self) -> None:
        def overlap(x, y):
            first = _c10d.all_gather_into_tensor(x, 8, self.shard)
            second = _c10d.all_gather_into_tensor(x, 8, self.shard)
            product = y @ y
            return _c10d.wait_tensor(first), product, _c10d.wait_tensor(second)

        graph = self.trace(overlap, torch.zeros(8), torch.zeros(64, 64)).graph
        timeline = simulate(list(graph.nodes), Costs.of(graph, HARDWARE))
        assert timeline.waits == {}
        # Each is in flight for 102.24 us, one after the other. The product takes 525.3 us and hides both.
        assert [timeline.begins[node] for node in graph.nodes if node in timeline.begins] == [0, 102_240]
        assert (timeline.exposed, timeline.total) == (0, 1000 + 1000 + 1000 + 2 * 64**3)
        moved = [node for node in graph.nodes if node.name != "mm"]
        timeline = simulate(moved, Costs.of(graph, HARDWARE))
        assert timeline.exposed == 2 * 102_240 - 2000
        # The first wait lasts for the rest of its gather, the second for a whole gather.
        first, second = timeline.waits
        assert timeline.waits[first] == (102_240 - 2000, first.all_input_nodes[0])
        assert timeline.waits[second] == (102_240, second.all_input_nodes[0])

    def test_copies_cost_startup_and_bytes_by_direction(self) -> None:
        def copy(shard, value):
            there, back = copy_to_device([shard, shard], "cpu"), fetch(shard, "cpu")
            return wait_copy(there), wait_copy(back), copy_to_host(value, True), wait_offload(offload(value), value)

        graph = self.trace(copy, torch.zeros(1000), torch.zeros(4, 500)).graph
        costs = Costs.of(graph, HARDWARE)
        assert {node.name: (costs.transfer[node], costs.link[node], costs.wire[node]) for node in costs.transfer} == {
            "copy_to_device": (3_000 + 4_000, "to_device", "to_device"),
            "fetch": (3_000 + 2_000, "to_device", "to_device"),
            "copy_to_host": (3_000 + 8_000, "to_host", "to_host"),
            "offload": (3_000 + 8_000, "to_host", "to_host"),
        }
        # Compute takes a launch for each copy; waits are free.
        assert {node.name: ns for node, ns in costs.compute.items() if ns} == dict.fromkeys(
            ("copy_to_device", "fetch", "copy_to_host", "offload"), 1000
        )

    def test_each_direction_has_a_stream_beside_those_of_groups(self) -> None:
        def overlap(x, value):
            gathered = _c10d.all_gather_into_tensor(x, 8, self.shard)
            out, other = offload(value), offload(value + 1)
            back = fetch(value, "cpu")
            product = value @ value
            return wait_copy(back), product, wait_offload(other, value), wait_offload(out, value), _c10d.wait_tensor(gathered)

        graph = self.trace(overlap, torch.zeros(8), torch.zeros(32, 32)).graph
        order, costs = list(graph.nodes), Costs.of(graph, HARDWARE)
        timeline = simulate(order, costs)
        node = {node.name: node for node in order}
        # A copy of 4096 bytes takes 3 + 4.096 us out and 3 + 2.048 us back; the second one out waits for the first.
        assert timeline.begins[node["offload"]] == 1000 and timeline.ends[node["offload"]] == 8096
        assert (timeline.begins[node["offload_1"]], timeline.ends[node["offload_1"]]) == (8096, 15_192)
        begins = timeline.arrives[node["fetch"]]
        assert (timeline.begins[node["fetch"]], timeline.ends[node["fetch"]]) == (begins, begins + 5_048)
        # The product hides all copies, and nothing slows the gather down.
        assert set(timeline.waits) == {node["wait_tensor"]}
        assert timeline.ends[node["all_gather_into_tensor"]] == costs.transfer[node["all_gather_into_tensor"]]
        # Without the product, each wait holds compute up until its copy ends.
        timeline = simulate([one for one in order if one.name != "mm"], costs)
        arrives = timeline.arrives[node["wait_copy"]]
        assert timeline.waits[node["wait_copy"]] == (begins + 5_048 - arrives, node["fetch"])
        assert timeline.waits[node["wait_offload"]] == (15_192 - (begins + 5_048), node["offload_1"])
        # The first copy to the host ended before the second.
        assert node["wait_offload_1"] not in timeline.waits

    def test_a_graph_ends_when_its_gradients_are_on_the_host(self) -> None:
        def reduce(value):
            return copy_to_host(value, True).view(10, 100), copy_to_host(value * 2, True), value + 1

        graph = self.trace(reduce, torch.zeros(1000)).graph
        timeline = simulate(list(graph.nodes), Costs.of(graph, HARDWARE))
        *_, last, _, output = graph.nodes
        assert last.target == copy_to_host
        # One copy after the other, from the beginning on.
        assert timeline.total == 2 * (3_000 + 4_000)
        assert timeline.waits == {output: (timeline.total - timeline.arrives[output], last)}

    def test_groups_that_share_wires_slow_each_other_down(self) -> None:
        def overlap(x):
            gathered = _c10d.all_gather_into_tensor(x, 8, self.shard)
            reduced = _c10d.all_reduce(x, "sum", self.across)
            return _c10d.wait_tensor(gathered), _c10d.wait_tensor(reduced)

        self.across, self.near = (torch.distributed.new_group(ranks).group_name for ranks in ([0, 4], [0, 1]))
        graph = self.trace(overlap, torch.zeros(8000)).graph
        costs = Costs.of(graph, HARDWARE)
        timeline = simulate(list(graph.nodes), costs)
        # Both cross the network of the nodes, and take as long as one after the other would.
        alone = sum(costs.transfer.values())
        assert 0 <= max(timeline.ends.values()) - alone <= 2
        # Inside of a node, the other group has wires of its own.
        self.across = self.near
        graph = self.trace(overlap, torch.zeros(8000)).graph
        costs = Costs.of(graph, HARDWARE)
        timeline = simulate(list(graph.nodes), costs)
        assert all(timeline.ends[node] - timeline.begins[node] == transfer for node, transfer in costs.transfer.items())

    def test_attention_takes_time_for_each_score(self) -> None:
        def attend(q, k, v):
            result, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
            back = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
            return back(result, q, k, v, result, sums, 0.0, True)

        # Four heads, 64 queries, 64 keys.
        q = torch.zeros(2, 2, 64, 16)
        graph = self.trace(attend, q, q, q).graph
        plain, with_scores = (node_ns(graph, replace(HARDWARE, score_s=score_s)) for score_s in ({}, {"float32": 1e-9}))
        # All scores count in forward, half of them in the backward, which is causal.
        assert [with_scores[node] - plain[node] for node in graph.nodes if plain[node]] == [4 * 64 * 64, 2 * 64 * 64]

    def test_operations_count_where_they_take_longer_than_memory(self) -> None:
        def function(x):
            return x.exp().sin().sum(1)

        graph = self.trace(function, torch.zeros(10, 100)).graph
        hardware = replace(HARDWARE, operation_s=1e-9)
        # Each works on 1000 elements; exp also reads 4000 bytes, in less than that time.
        assert {node.name: ns for node, ns in node_ns(graph, hardware).items() if ns} == {
            "exp": 2000,
            "sin": 1000,
            "sum_1": 1000,
        }

    def test_time_of_the_host(self) -> None:
        def function(x):
            started = _c10d.all_reduce(x.exp(), "sum", self.shard)
            y = x @ x
            return y * _c10d.wait_tensor(started)

        graph = self.trace(function, torch.zeros(8, 8)).graph
        plain, host = (node_ns(graph, hardware) for hardware in (HARDWARE, replace(HARDWARE, segment_s=1e-3, graph_s=1e-1)))
        more = {node.name: host[node] - plain[node] for node in graph.nodes if host[node] != plain[node]}
        # One segment before the collective, one beside it, one after the wait.
        placed = {node.name: node for node in graph.nodes}
        assert list(placed).index("all_reduce") < list(placed).index("mm") < list(placed).index("wait_tensor")
        assert more == {"exp": 10**6, "mm": 10**6, "mul": 10**6, "output": 10**8}
        # A graph without collectives is not lowered by the library, so the host's time does not count.
        alone = self.trace(lambda x: x @ x, torch.zeros(8, 8)).graph
        assert node_ns(alone, replace(HARDWARE, graph_s=1e-1)) == node_ns(alone, HARDWARE)

    def test_kernels_and_what_they_write(self) -> None:
        def function(x):
            y = x.relu().exp()
            return (y @ y.t()).sin().cos()

        graph = self.trace(function, torch.zeros(10, 10)).graph
        assert [[node.name for node in kernel] for kernel in kernels(graph)] == [["relu", "exp"], ["mm"], ["sin", "cos"]]
        assert {node.name for node in unwritten(graph)} == {"relu", "sin"}

    def test_no_kernel_reaches_across_a_wait(self) -> None:
        def function(x):
            started = _c10d.all_reduce(x, "sum", self.shard)
            return x.sin().cos() * _c10d.wait_tensor(started)

        graph = self.trace(function, torch.zeros(10)).graph
        placed = {node.name: node for node in graph.nodes}
        placed["mul"].prepend(placed["wait_tensor"])
        assert [[node.name for node in kernel] for kernel in kernels(graph)] == [["sin", "cos"], ["mul"]]
        assert {node.name for node in unwritten(graph)} == {"sin"}

    def test_traffic_by_kind(self) -> None:
        def communicate(x):
            gathered = _c10d.all_gather_into_tensor(x, 8, self.shard)
            scattered = _c10d.reduce_scatter_tensor(x, "sum", 8, self.shard)
            reduced = _c10d.all_reduce(x, "sum", self.replicate)
            return gathered, scattered, reduced

        graph = self.trace(communicate, torch.zeros(80)).graph
        sent = {collective_kind(node): traffic_bytes(node) for node in graph.nodes if starts_collective(node)}
        assert sent == {"all_gather": 7 * 320, "reduce_scatter": 7 * 40, "all_reduce": 2 * 320 / 2}

    def test_flops_of_products(self) -> None:
        def function(x):
            return (x.half() @ x.half().t()).relu()

        graph = self.trace(function, torch.zeros(4, 8)).graph
        assert [product for node in graph.nodes if (product := node_flops(node))] == [("float16", 2 * 4 * 8 * 4)]


@pytest.mark.parametrize(
    ("device", "name"),
    [("NVIDIA H100 80GB HBM3", "H100"), ("NVIDIA H200", "H200"), ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA B200", "B200")],
)
def test_devices_of_the_table(device: str, name: str) -> None:
    assert known_hardware("cuda", device).name == name


@pytest.mark.parametrize("device", ["NVIDIA GH200 480GB", "NVIDIA H100 PCIe", "NVIDIA L4", ""])
def test_a_device_that_is_not_in_the_table_is_to_be_measured(device: str) -> None:
    with pytest.raises(ValueError, match=f"'{device or 'cuda'}'.*fsdp_compile.calibrate"):
        known_hardware("cuda", device)


def test_hardware_file(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "hardware.json"
    HARDWARE.save(path)
    assert Hardware.load(path) == HARDWARE
    for text in ("{", "{}", '{"name": 3}', "[]", '{"within_node": {"all_gather": 1}, "between_nodes": {}}'):
        path.write_text(text)
        with pytest.raises(ValueError, match="does not hold the numbers of a machine"):
            Hardware.load(path)
