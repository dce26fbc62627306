from collections.abc import Callable

import torch
from torch import Tensor
from torch.fx import Graph

from passes.fx.emit import emit
from passes.ir.ops import reduce_grad
from passes.transforms.refresh_layouts import TracedValues, refresh_layouts
from tests.passes.tracing import PassTestCase


def padded(x: Tensor, weight: Tensor) -> Tensor:
    """Compute a product of which each row is padded to eight elements."""
    return torch.mm(x, torch.nn.functional.pad(weight, (0, 2)))[:, :6]


class TestRefreshLayouts(PassTestCase):
    def refreshed(self, function: Callable[..., object], *inputs: Tensor) -> Graph:
        """Trace a function, pad its first product, and refresh the layouts."""
        graph = self.trace(function, *inputs).graph
        traced = TracedValues(graph)
        product = graph.find_nodes(op="call_function", target=torch.ops.aten.mm.default)[0]
        with graph.inserting_before(product):
            product.replace_all_uses_with(emit(graph, padded, *product.args))
        graph.erase_node(product)
        refresh_layouts(graph, traced)
        return graph

    def strides(self, graph: Graph) -> dict[str, tuple[int, ...]]:
        """Return the strides of the product and what follows it."""
        nodes = list(graph.nodes)
        first = next(index for index, node in enumerate(nodes) if node.name == "slice_1")
        return {node.name: node.meta["val"].stride() for node in nodes[first:-1]}

    def test_operators_that_permit_the_strides_have_them(self) -> None:
        def forward(x, weight):
            y = (x @ weight).view(2, 2, 6)
            return y.transpose(1, 2).exp()

        graph = self.refreshed(forward, torch.zeros(4, 3), torch.zeros(3, 6))
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x_1: "f32[4, 3]", weight_1: "f32[3, 6]"):
    constant_pad_nd: "f32[3, 8]" = aten.constant_pad_nd.default(weight_1, [0, 2], 0.0)
    mm_1: "f32[4, 8]" = aten.mm.default(x_1, constant_pad_nd)
    slice_1: "f32[4, 6]" = aten.slice.Tensor(mm_1, 1, 0, 6)
    view: "f32[2, 2, 6]" = aten.view.default(slice_1, [2, 2, 6])
    transpose: "f32[2, 6, 2]" = aten.transpose.int(view, 1, 2)
    exp: "f32[2, 6, 2]" = aten.exp.default(transpose)
    return exp
""",
        )
        assert self.strides(graph) == {"slice_1": (8, 1), "view": (16, 8, 1), "transpose": (16, 1, 8), "exp": (12, 1, 6)}

    def test_a_view_an_output_and_an_operator_outside_the_core_read_a_copy(self) -> None:
        def forward(x, weight):
            y = x @ weight
            reduced = reduce_grad(y, x, "w", [4, 6], self.shard)
            return y.view(2, 12), y.t(), reduced

        graph = self.refreshed(forward, torch.zeros(4, 3), torch.zeros(3, 6))
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x_1: "f32[4, 3]", weight_1: "f32[3, 6]"):
    constant_pad_nd: "f32[3, 8]" = aten.constant_pad_nd.default(weight_1, [0, 2], 0.0)
    mm_1: "f32[4, 8]" = aten.mm.default(x_1, constant_pad_nd)
    slice_1: "f32[4, 6]" = aten.slice.Tensor(mm_1, 1, 0, 6)
    clone: "f32[4, 6]" = aten.clone.default(slice_1, memory_format = torch.contiguous_format)
    reduce_grad: "f32[4, 3]" = fsdp_compile.reduce_grad.default(clone, x_1, 'w', [4, 6], 'shard')
    clone_1: "f32[4, 6]" = aten.clone.default(slice_1, memory_format = torch.contiguous_format)
    view: "f32[2, 12]" = aten.view.default(clone_1, [2, 12])
    t: "f32[6, 4]" = aten.t.default(slice_1)
    permute: "f32[4, 6]" = aten.permute.default(t, [1, 0])
    clone_2: "f32[4, 6]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
    permute_1: "f32[6, 4]" = aten.permute.default(clone_2, [1, 0])
    return (view, permute_1, reduce_grad)
""",
        )

    def test_an_operator_that_stands_for_another_keeps_its_own_strides(self) -> None:
        def forward(x):
            return (torch.zeros(4, 6) + x.t()).view(24)

        graph = self.trace(forward, torch.zeros(6, 4)).graph
        traced = TracedValues(graph)
        # As Inductor leaves out zeros that are added.
        (total,) = graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
        transposed = total.args[1]
        total.replace_all_uses_with(transposed)
        transposed.meta.update(total.meta)
        graph.eliminate_dead_code()
        refresh_layouts(graph, traced)
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x_1: "f32[6, 4]"):
    t: "f32[4, 6]" = aten.t.default(x_1)
    clone: "f32[4, 6]" = aten.clone.default(t, memory_format = torch.contiguous_format)
    view: "f32[24]" = aten.view.default(clone, [24])
    return view
""",
        )
        assert transposed.meta["val"].stride() == (1, 4)

    def test_an_operator_that_a_pattern_gave_no_value_gets_one(self) -> None:
        def forward(x):
            return x.exp(), x.new_zeros(2, 3)

        graph = self.trace(forward, torch.zeros(6, 4)).graph
        traced = TracedValues(graph)
        (zeros,) = graph.find_nodes(op="call_function", target=torch.ops.aten.new_zeros.default)
        with graph.inserting_before(zeros):
            inserted = graph.call_function(torch.ops.aten.empty_strided.default, ([2, 3], [1, 2]))
        zeros.replace_all_uses_with(inserted)
        graph.erase_node(zeros)
        refresh_layouts(graph, traced)
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, x_1: "f32[6, 4]"):
    exp: "f32[6, 4]" = aten.exp.default(x_1)
    empty_strided_default: "f32[2, 3]" = aten.empty_strided.default([2, 3], [1, 2])
    clone: "f32[2, 3]" = aten.clone.default(empty_strided_default, memory_format = torch.contiguous_format)
    return (exp, clone)
""",
        )
        assert inserted.meta["val"].stride() == (1, 2)

    def test_leaves_alone_what_follows_no_replaced_operator(self) -> None:
        def forward(x, weight):
            return (x @ weight).view(2, 12), x.t().exp()

        graph = self.trace(forward, torch.zeros(4, 3), torch.zeros(3, 6)).graph
        before = self.text(graph), [node.meta.get("val") for node in graph.nodes]
        refresh_layouts(graph, TracedValues(graph))
        after = self.text(graph), [node.meta.get("val") for node in graph.nodes]
        assert before[0] == after[0]
        assert all(one is other for one, other in zip(before[1], after[1], strict=True))
