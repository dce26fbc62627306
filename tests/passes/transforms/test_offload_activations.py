from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from passes.ir.ops import unshard
from passes.models.memory_model import IS_OFFLOADED, mark_memory
from passes.pass_runner import graph_text
from passes.transforms import offload_activations as offload_activations_pass
from passes.transforms.offload_activations import copy_activations, mark_regions, offload_activations, offload_saved
from tests.common.copy_engine import copying
from tests.passes.tracing import PassTestCase


class TestOffloadActivations(PassTestCase):
    def partitioned(self, policy: CheckpointPolicy | None, operator: Any) -> tuple[str, Graph, Graph]:
        """Run the pass on three layers of two products, and partition them.

        Returns:
            The text of the joint graph with its tags, and the forward and backward graphs with copies.
        """
        found: list[Any] = []

        def layer(x, shard, unit):
            weight = unshard(shard, f"{unit}.weight", [8, 8], self.shard, unit=unit, offset=0, reshard_after_forward=False)
            return x + (x @ weight).sigmoid().view(8, 3).view(3, 8) @ weight

        def forward(first, second, third, x):
            for shard, unit in ((first, "a"), (second, "b"), (third, "c")):
                x = layer(x, shard, unit)
            return x

        def partition(gm: GraphModule, joint_inputs: Any, **kwargs: Any) -> Any:
            mark_memory(gm.graph)
            for node in gm.graph.nodes:
                if node.target == operator and policy is not None:
                    node.meta["recompute"] = policy
            offload_activations(gm.graph)
            found.append(graph_text(gm.graph, {self.shard: "shard"}, tags=True))
            parts = min_cut_rematerialization_partition(gm, joint_inputs, **kwargs)
            for is_backward, part in enumerate(parts):
                copy_activations(part.graph, is_backward=bool(is_backward))
                found.append(part.graph)
            return parts

        shards = [torch.zeros(1, 8, requires_grad=True) for _ in range(3)]
        x = torch.zeros(3, 8, requires_grad=True)
        with copying():
            self.partition(forward, [*shards, x], partition)
        return found[0], found[1], found[2]

    def test_copies(self) -> None:
        """Views of offloaded values are recomputed. The first layer's copy is waited for before the third's starts."""
        text, forward, backward = self.partitioned(CheckpointPolicy.MUST_CPU_OFFLOAD, torch.ops.aten.sigmoid.default)
        self.assertExpectedInline(
            self.tags(text),
            """\
sigmoid: "f32[3, 8]" = aten.sigmoid.default(mm)  # MUST_SAVE
detach: "f32[3, 8]" = aten.detach.default(sigmoid)  # MUST_RECOMPUTE
view: "f32[8, 3]" = aten.view.default(sigmoid, [8, 3])  # MUST_RECOMPUTE
view_1: "f32[3, 8]" = aten.view.default(view, [3, 8])  # MUST_RECOMPUTE
sigmoid_1: "f32[3, 8]" = aten.sigmoid.default(mm_2)  # MUST_SAVE
detach_1: "f32[3, 8]" = aten.detach.default(sigmoid_1)  # MUST_RECOMPUTE
view_2: "f32[8, 3]" = aten.view.default(sigmoid_1, [8, 3])  # MUST_RECOMPUTE
view_3: "f32[3, 8]" = aten.view.default(view_2, [3, 8])  # MUST_RECOMPUTE
sigmoid_2: "f32[3, 8]" = aten.sigmoid.default(mm_4)  # MUST_SAVE
detach_2: "f32[3, 8]" = aten.detach.default(sigmoid_2)  # MUST_RECOMPUTE
view_4: "f32[8, 3]" = aten.view.default(sigmoid_2, [8, 3])  # MUST_RECOMPUTE
view_5: "f32[3, 8]" = aten.view.default(view_4, [3, 8])  # MUST_RECOMPUTE
t: "f32[8, 3]" = aten.t.default(view_5)  # MUST_RECOMPUTE
detach_3: "f32[3, 8]" = aten.detach.default(detach_2)  # MUST_RECOMPUTE
t_4: "f32[8, 3]" = aten.t.default(view_3)  # MUST_RECOMPUTE
detach_4: "f32[3, 8]" = aten.detach.default(detach_1)  # MUST_RECOMPUTE
t_8: "f32[8, 3]" = aten.t.default(view_1)  # MUST_RECOMPUTE
detach_5: "f32[3, 8]" = aten.detach.default(detach)  # MUST_RECOMPUTE
""",
        )
        self.assertExpectedInline(
            self.text(forward),
            """\
def forward(self, primals_1: "f32[1, 8]", primals_2: "f32[1, 8]", primals_3: "f32[1, 8]", primals_4: "f32[3, 8]"):
    unshard: "f32[8, 8]" = fsdp_compile.unshard.default(primals_1, 'a.weight', [8, 8], 'shard', unit = 'a', offset = 0, reshard_after_forward = False)
    mm: "f32[3, 8]" = aten.mm.default(primals_4, unshard)
    sigmoid: "f32[3, 8]" = aten.sigmoid.default(mm)
    view: "f32[8, 3]" = aten.view.default(sigmoid, [8, 3])
    view_1: "f32[3, 8]" = aten.view.default(view, [3, 8])
    mm_1: "f32[3, 8]" = aten.mm.default(view_1, unshard)
    offload: "f32[3, 8]" = fsdp_host.offload.default(sigmoid)
    add: "f32[3, 8]" = aten.add.Tensor(primals_4, mm_1)
    unshard_1: "f32[8, 8]" = fsdp_compile.unshard.default(primals_2, 'b.weight', [8, 8], 'shard', unit = 'b', offset = 0, reshard_after_forward = False)
    mm_2: "f32[3, 8]" = aten.mm.default(add, unshard_1)
    sigmoid_1: "f32[3, 8]" = aten.sigmoid.default(mm_2)
    view_2: "f32[8, 3]" = aten.view.default(sigmoid_1, [8, 3])
    view_3: "f32[3, 8]" = aten.view.default(view_2, [3, 8])
    mm_3: "f32[3, 8]" = aten.mm.default(view_3, unshard_1)
    offload_1: "f32[3, 8]" = fsdp_host.offload.default(sigmoid_1)
    add_1: "f32[3, 8]" = aten.add.Tensor(add, mm_3)
    unshard_2: "f32[8, 8]" = fsdp_compile.unshard.default(primals_3, 'c.weight', [8, 8], 'shard', unit = 'c', offset = 0, reshard_after_forward = False)
    mm_4: "f32[3, 8]" = aten.mm.default(add_1, unshard_2)
    sigmoid_2: "f32[3, 8]" = aten.sigmoid.default(mm_4)
    view_4: "f32[8, 3]" = aten.view.default(sigmoid_2, [8, 3])
    view_5: "f32[3, 8]" = aten.view.default(view_4, [3, 8])
    mm_5: "f32[3, 8]" = aten.mm.default(view_5, unshard_2)
    wait_offload: "f32[3, 8]" = fsdp_host.wait_offload.default(offload, sigmoid)
    offload_2: "f32[3, 8]" = fsdp_host.offload.default(sigmoid_2)
    add_2: "f32[3, 8]" = aten.add.Tensor(add_1, mm_5)
    t_1: "f32[8, 8]" = aten.t.default(unshard_2)
    t_2: "f32[8, 3]" = aten.t.default(add_1)
    t_5: "f32[8, 8]" = aten.t.default(unshard_1)
    t_6: "f32[8, 3]" = aten.t.default(add)
    t_9: "f32[8, 8]" = aten.t.default(unshard)
    t_10: "f32[8, 3]" = aten.t.default(primals_4)
    wait_offload_1: "f32[3, 8]" = fsdp_host.wait_offload.default(offload_1, sigmoid_1)
    wait_offload_2: "f32[3, 8]" = fsdp_host.wait_offload.default(offload_2, sigmoid_2)
    return (add_2, primals_1, primals_2, primals_3, wait_offload, wait_offload_1, wait_offload_2, t_1, t_2, t_5, t_6, t_9, t_10)
""",
        )
        self.assertExpectedInline(
            self.text(backward),
            """\
def forward(self, primals_1: "f32[1, 8]", primals_2: "f32[1, 8]", primals_3: "f32[1, 8]", sigmoid: "f32[3, 8]", sigmoid_1: "f32[3, 8]", sigmoid_2: "f32[3, 8]", t_1: "f32[8, 8]", t_2: "f32[8, 3]", t_5: "f32[8, 8]", t_6: "f32[8, 3]", t_9: "f32[8, 8]", t_10: "f32[8, 3]", tangents_1: "f32[3, 8]"):
    fetch: "f32[3, 8]" = fsdp_host.fetch.default(sigmoid_2, 'cpu')
    fetch_1: "f32[3, 8]" = fsdp_host.fetch.default(sigmoid_1, 'cpu')
    wait_copy: "f32[3, 8]" = fsdp_host.wait_copy.default(fetch)
    view_4: "f32[8, 3]" = aten.view.default(wait_copy, [8, 3])
    view_5: "f32[3, 8]" = aten.view.default(view_4, [3, 8])
    t: "f32[8, 3]" = aten.t.default(view_5)
    mm_6: "f32[8, 8]" = aten.mm.default(t, tangents_1)
    mm_7: "f32[3, 8]" = aten.mm.default(tangents_1, t_1)
    view_6: "f32[8, 3]" = aten.view.default(mm_7, [8, 3])
    view_7: "f32[3, 8]" = aten.view.default(view_6, [3, 8])
    detach_2: "f32[3, 8]" = aten.detach.default(wait_copy)
    detach_3: "f32[3, 8]" = aten.detach.default(detach_2)
    sigmoid_backward: "f32[3, 8]" = aten.sigmoid_backward.default(view_7, detach_3)
    mm_8: "f32[8, 8]" = aten.mm.default(t_2, sigmoid_backward)
    mm_9: "f32[3, 8]" = aten.mm.default(sigmoid_backward, t_1)
    add_3: "f32[3, 8]" = aten.add.Tensor(tangents_1, mm_9)
    add_4: "f32[8, 8]" = aten.add.Tensor(mm_6, mm_8)
    reduce_grad: "f32[1, 8]" = fsdp_compile.reduce_grad.default(add_4, primals_3, 'c.weight', [8, 8], 'shard', unit = 'c')
    fetch_2: "f32[3, 8]" = fsdp_host.fetch.default(sigmoid, 'cpu')
    wait_copy_1: "f32[3, 8]" = fsdp_host.wait_copy.default(fetch_1)
    view_2: "f32[8, 3]" = aten.view.default(wait_copy_1, [8, 3])
    view_3: "f32[3, 8]" = aten.view.default(view_2, [3, 8])
    t_4: "f32[8, 3]" = aten.t.default(view_3)
    mm_10: "f32[8, 8]" = aten.mm.default(t_4, add_3)
    mm_11: "f32[3, 8]" = aten.mm.default(add_3, t_5)
    view_8: "f32[8, 3]" = aten.view.default(mm_11, [8, 3])
    view_9: "f32[3, 8]" = aten.view.default(view_8, [3, 8])
    detach_1: "f32[3, 8]" = aten.detach.default(wait_copy_1)
    detach_4: "f32[3, 8]" = aten.detach.default(detach_1)
    sigmoid_backward_1: "f32[3, 8]" = aten.sigmoid_backward.default(view_9, detach_4)
    mm_12: "f32[8, 8]" = aten.mm.default(t_6, sigmoid_backward_1)
    mm_13: "f32[3, 8]" = aten.mm.default(sigmoid_backward_1, t_5)
    add_5: "f32[3, 8]" = aten.add.Tensor(add_3, mm_13)
    add_6: "f32[8, 8]" = aten.add.Tensor(mm_10, mm_12)
    reduce_grad_1: "f32[1, 8]" = fsdp_compile.reduce_grad.default(add_6, primals_2, 'b.weight', [8, 8], 'shard', unit = 'b')
    wait_copy_2: "f32[3, 8]" = fsdp_host.wait_copy.default(fetch_2)
    view: "f32[8, 3]" = aten.view.default(wait_copy_2, [8, 3])
    view_1: "f32[3, 8]" = aten.view.default(view, [3, 8])
    t_8: "f32[8, 3]" = aten.t.default(view_1)
    mm_14: "f32[8, 8]" = aten.mm.default(t_8, add_5)
    mm_15: "f32[3, 8]" = aten.mm.default(add_5, t_9)
    view_10: "f32[8, 3]" = aten.view.default(mm_15, [8, 3])
    view_11: "f32[3, 8]" = aten.view.default(view_10, [3, 8])
    detach: "f32[3, 8]" = aten.detach.default(wait_copy_2)
    detach_5: "f32[3, 8]" = aten.detach.default(detach)
    sigmoid_backward_2: "f32[3, 8]" = aten.sigmoid_backward.default(view_11, detach_5)
    mm_16: "f32[8, 8]" = aten.mm.default(t_10, sigmoid_backward_2)
    mm_17: "f32[3, 8]" = aten.mm.default(sigmoid_backward_2, t_9)
    add_7: "f32[3, 8]" = aten.add.Tensor(add_5, mm_17)
    add_8: "f32[8, 8]" = aten.add.Tensor(mm_14, mm_16)
    reduce_grad_2: "f32[1, 8]" = fsdp_compile.reduce_grad.default(add_8, primals_1, 'a.weight', [8, 8], 'shard', unit = 'a')
    return (reduce_grad_2, reduce_grad_1, reduce_grad, add_7)
""",
        )

    def test_leaves_alone_parameters_and_outputs(self) -> None:
        for operator, policy in ((torch.ops.aten.add.Tensor, CheckpointPolicy.PREFER_CPU_OFFLOAD), (unshard, None)):
            text, forward, _ = self.partitioned(policy or CheckpointPolicy.MUST_CPU_OFFLOAD, operator)
            copied = [node.args[0].name for node in forward.nodes if str(node.target) == "fsdp_host.offload.default"]
            # The result of the last addition is an output.
            self.assertEqual(copied, ["add", "add_1"] if policy else [])
            self.assertNotIn("OFFLOAD", text)

    def test_leaves_alone_what_has_no_such_tag(self) -> None:
        for policy in (None, CheckpointPolicy.MUST_SAVE):
            _, forward, backward = self.partitioned(policy, torch.ops.aten.sigmoid.default)
            self.assertNotIn("fsdp_host", self.text(forward) + self.text(backward))


class TestOffloadSaved(PassTestCase):
    def marked(self, saved: tuple[str, ...], outputs: tuple[str, ...] = (), least: int = 1, engine: bool = True) -> list[str]:
        """Return the names of the saved values that go to the host, from a graph of three sigmoids.

        All values but the second sigmoid's may wait there.
        """

        def function(x):
            first = x.sigmoid()
            return first.view(8, 3), first.t(), first.sigmoid(), first.t().sigmoid()

        forward = make_fx(function)(torch.zeros(3, 8)).graph
        nodes = {node.name: node for node in forward.nodes}
        forward.output_node().args = (tuple(nodes[name] for name in outputs + saved),)
        region = list(nodes.values())
        mark_regions([[], region])
        backward = Graph()
        for name in saved:
            backward.placeholder(name)
        with copying() if engine else nullcontext(), mock.patch.object(offload_activations_pass, "_LEAST_BYTES", least):
            can_wait = offload_saved(forward, backward, len(outputs), lambda _, place: region[place].name != "sigmoid_1")
        found = [[node.name for node in graph.nodes if IS_OFFLOADED in node.meta] for graph in (forward, backward)]
        self.assertEqual(set(found[0]), set(found[1]))
        self.assertEqual([node.name for node, _, _ in can_wait if node.name != "sigmoid_1"], found[1])
        for node, number, place in can_wait:
            self.assertEqual((number, region[place].name), (1, node.name))
        return found[1]

    def test_what_the_budget_named(self) -> None:
        self.assertEqual(self.marked(("sigmoid_2", "sigmoid_1", "t")), ["sigmoid_2", "t"])

    def test_memory_that_has_to_stay(self) -> None:
        """Values stay if their memory is saved twice, or belongs to an output or an input: a copy would free nothing."""
        self.assertEqual(self.marked(("view", "t")), [])
        self.assertEqual(self.marked(("t", "sigmoid_2"), outputs=("view",)), ["sigmoid_2"])
        self.assertEqual(self.marked(("x_1",)), [])

    def test_little_is_not_worth_two_copies(self) -> None:
        self.assertEqual(self.marked(("sigmoid",), least=3 * 8 * 4), ["sigmoid"])
        self.assertEqual(self.marked(("sigmoid",), least=3 * 8 * 4 + 1), [])

    def test_a_device_without_an_engine(self) -> None:
        self.assertEqual(self.marked(("sigmoid",), engine=False), [])
