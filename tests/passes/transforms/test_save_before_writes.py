from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Interpreter

from passes.transforms.save_before_writes import save_before_writes
from tests.passes.tracing import PassTestCase


class TestSaveBeforeWrites(PassTestCase):
    def passed(self, saved: Any, x: torch.Tensor, buffer: torch.Tensor) -> Graph:
        """Return the graph of a function that saves tensors and writes to the buffer, after the pass.

        What the graph saves has to be what it was before the write, in the same strides.
        """

        def forward(x, buffer):
            found = saved(buffer)
            new = buffer + x
            buffer.copy_(new)
            return new, *found

        expected = [tensor.clone() for tensor in saved(buffer)]
        strides = [tensor.stride() for tensor in saved(buffer)]
        gm = self.trace(forward, x, buffer, names="x buffer")
        graph = gm.graph
        (write,) = graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
        # As AOTAutograd writes it, for which inputs have one value each.
        graph.output_node().replace_input_with(write, write.args[0])
        save_before_writes(graph)
        values = [node.meta["val"] for node in graph.output_node().args[0][1:]]
        found = Interpreter(gm, graph=graph).run(x, buffer)[1:]
        torch.testing.assert_close(list(found), expected, rtol=0, atol=0)
        assert [value.stride() for value in values] == [value.stride() for value in found] == strides
        return graph

    def test_an_input_and_a_view_of_it_are_saved_as_they_were(self) -> None:
        graph = self.passed(lambda buffer: (buffer, buffer[0].expand(2, 4)), torch.ones(3, 4), torch.rand(3, 4))
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x: "f32[3, 4]", buffer: "f32[3, 4]"):
    clone: "f32[3, 4]" = aten.clone.default(buffer)
    select_1: "f32[4]" = aten.select.int(clone, 0, 0)
    expand_1: "f32[2, 4]" = aten.expand.default(select_1, [2, 4])
    add: "f32[3, 4]" = aten.add.Tensor(buffer, x)
    copy_: "f32[3, 4]" = aten.copy_.default(buffer, add)
    return (add, clone, expand_1)
""",
        )

    def test_a_slice_keeps_its_strides(self) -> None:
        graph = self.passed(lambda buffer: (buffer,), torch.ones(3, 2), torch.rand(3, 4)[:, ::2])
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x: "f32[3, 2]", buffer: "f32[3, 2]"):
    new_zeros: "f32[11]" = aten.new_zeros.default(buffer, [11], pin_memory = False)
    as_strided_scatter: "f32[11]" = aten.as_strided_scatter.default(new_zeros, buffer, [3, 2], [4, 2])
    as_strided: "f32[3, 2]" = aten.as_strided.default(as_strided_scatter, [3, 2], [4, 2])
    add: "f32[3, 2]" = aten.add.Tensor(buffer, x)
    copy_: "f32[3, 2]" = aten.copy_.default(buffer, add)
    return (add, as_strided)
""",
        )

    def test_a_view_whose_size_the_graph_computes(self) -> None:
        def forward(x, buffer):
            row = buffer[0].expand(3, 4)
            new = buffer + x
            buffer.copy_(new)
            return new, row

        buffer = torch.rand(3, 4)
        expected = buffer[:1].expand(3, 4).clone()
        gm = self.trace(forward, torch.ones(3, 4), buffer, names="x buffer")
        graph = gm.graph
        x, _ = graph.find_nodes(op="placeholder")
        (view,) = graph.find_nodes(op="call_function", target=torch.ops.aten.expand.default)
        with graph.inserting_before(view):
            rows = graph.call_function(torch.ops.aten.sym_size.int, (x, 0))
        rows.meta["val"] = 3
        view.args = (view.args[0], [rows, 4])
        save_before_writes(graph)
        graph.lint()
        _, saved = Interpreter(gm, graph=graph).run(torch.ones(3, 4), buffer)
        torch.testing.assert_close(saved, expected, rtol=0, atol=0)

    def test_leaves_alone(self) -> None:
        def forward(x, buffer, weight):
            new = buffer * x
            buffer.copy_(new)
            return new, x, weight.t()

        gm = self.trace(forward, torch.ones(3, 4), torch.rand(3, 4), torch.rand(2, 2), names="x buffer weight")
        before = self.text(gm.graph)
        save_before_writes(gm.graph)
        self.assertEqual(self.text(gm.graph), before)
