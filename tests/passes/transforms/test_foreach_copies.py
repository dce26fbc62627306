from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph
from torch.fx.experimental.proxy_tensor import make_fx

from passes.collectives.functional import start_reduce_scatter
from passes.fx.emit import emit
from passes.ir.ops import unshard
from passes.ir.work import BucketName, Role, Work
from passes.transforms.bucket import bucket_gathers
from passes.transforms.foreach_copies import copy_in_together, copy_out_together
from tests.passes.tracing import PassTestCase


class ForeachTestCase(PassTestCase):
    def trace_on(self, device: str, function: Callable[..., Any], *shapes: list[int], names: str) -> Graph:
        """Trace a function of tensors with these shapes on a pretended device; ``names`` are the names for placeholders."""
        with FakeTensorMode() as mode:
            inputs = [FakeTensor(mode, torch.empty(shape, device="meta"), torch.device(device)) for shape in shapes]
            gm = make_fx(function)(*inputs)
        for placeholder, name in zip(gm.graph.find_nodes(op="placeholder"), names.split(), strict=True):
            placeholder._rename(name)
            placeholder.target = name
        return gm.graph


class TestCopyOut(ForeachTestCase):
    def gathered(self, device: str) -> Graph:
        def forward(weight, bias, scale, x):
            full_weight = unshard(weight, "weight", [512, 1024], self.shard, offset=0)
            full_bias = unshard(bias, "bias", [512], self.shard, offset=65536)
            full_scale = unshard(scale, "scale", [1024], self.shard, offset=65600)
            return torch.addmm(full_bias, x * full_scale, full_weight.t())

        graph = self.trace_on(device, forward, [64, 1024], [64], [128], [3, 1024], names="weight bias scale x")
        bucket_gathers(graph)
        copy_out_together(graph)
        return graph

    def test_small_parameters_are_copied_together(self) -> None:
        self.assertExpectedInline(
            self.text(self.gathered("cuda:0")),
            """\
def forward(self, weight: "f32[64, 1024]", bias: "f32[64]", scale: "f32[128]", x: "f32[3, 1024]"):
    view: "f32[65536]" = aten.view.default(weight, [-1])
    view_1: "f32[64]" = aten.view.default(bias, [-1])
    view_2: "f32[128]" = aten.view.default(scale, [-1])
    cat: "f32[65728]" = aten.cat.default([view, view_1, view_2])
    all_gather_into_tensor: "f32[525824]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "f32[525824]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_3: "f32[8, 65728]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_3, [65536, 64, 128], 1)
    getitem: "f32[8, 65536]" = split_with_sizes[0]
    getitem_1: "f32[8, 64]" = split_with_sizes[1]
    getitem_2: "f32[8, 128]" = split_with_sizes[2]
    clone: "f32[8, 65536]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[512, 1024]" = aten._unsafe_view.default(clone, [512, 1024])
    _foreach_mul_scalar = aten._foreach_mul.Scalar([getitem_1, getitem_2], 1)
    getitem_3: "f32[8, 64]" = _foreach_mul_scalar[0]
    getitem_4: "f32[8, 128]" = _foreach_mul_scalar[1]
    _unsafe_view_1: "f32[512]" = aten._unsafe_view.default(getitem_3, [512])
    _unsafe_view_2: "f32[1024]" = aten._unsafe_view.default(getitem_4, [1024])
    mul: "f32[3, 1024]" = aten.mul.Tensor(x, _unsafe_view_2)
    t: "f32[1024, 512]" = aten.t.default(_unsafe_view)
    addmm: "f32[3, 512]" = aten.addmm.default(_unsafe_view_1, mul, t)
    return addmm
""",
        )

    def test_a_parameter_that_is_cut_along_another_dimension_has_its_own_copy(self) -> None:
        """A foreach copy would have the strides of the piece, which cannot be viewed as the parameter."""

        def forward(weight, bias, scale):
            full_weight = unshard(weight, "weight", [16, 64], self.shard, offset=0, dim=1)
            full_bias = unshard(bias, "bias", [64], self.shard, offset=128)
            full_scale = unshard(scale, "scale", [64], self.shard, offset=136)
            return full_weight, full_bias, full_scale

        graph = self.trace_on("cuda:0", forward, [16, 8], [8], [8], names="weight bias scale")
        bucket_gathers(graph)
        copy_out_together(graph)
        (clone,) = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
        assert clone.meta["val"].shape == (16, 8, 8)
        (together,) = graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_mul.Scalar)
        assert [value.shape for value in together.meta["val"]] == [(8, 8), (8, 8)]

    def test_on_the_cpu_each_has_its_own_copy(self) -> None:
        graph = self.gathered("cpu")
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)) == 3


class TestCopyIn(ForeachTestCase):
    def reduced(self, device: str, function: Callable[..., Any] = start_reduce_scatter, **constants: Any) -> Graph:
        graph = self.trace_on(device, lambda a, b, factor: (a, b), [16, 4], [16], [], names="a b factor")
        a, b, factor = graph.find_nodes(op="placeholder")
        with graph.inserting_before(graph.output_node()):
            flat = emit(
                graph, function, [a, b], [], [factor], work=Work(Role.START_REDUCE, BucketName.of_unit("root")), **constants
            )
        graph.output_node().args = ((flat,),)
        graph.eliminate_dead_code()
        copy_in_together(graph)
        return graph

    def test_divisions_are_done_ahead_of_joining(self) -> None:
        graph = self.reduced("cuda:0", dims=[0, 0], group=self.shard, op="sum")
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, a: "f32[16, 4]", b: "f32[16]", factor: "f32[]"):
    view: "f32[8, 8]" = aten.view.default(a, [8, -1])
    view_1: "f32[8, 2]" = aten.view.default(b, [8, -1])
    div_tensor: "f32[8, 8]" = aten.div.Tensor(view, factor)
    div_tensor_1: "f32[8, 2]" = aten.div.Tensor(view_1, factor)
    _foreach_mul_scalar = aten._foreach_mul.Scalar([div_tensor, div_tensor_1], 1)
    getitem: "f32[8, 8]" = _foreach_mul_scalar[0]
    getitem_1: "f32[8, 2]" = _foreach_mul_scalar[1]
    cat: "f32[8, 10]" = aten.cat.default([getitem, getitem_1], 1)
    view_2: "f32[80]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    return (reduce_scatter_tensor,)
""",
        )

    def test_what_is_computed_of_the_whole_stays_behind(self) -> None:
        def normalize(grads: list[Tensor], *_: Any) -> Tensor:
            flat = torch.cat([grad.reshape(8, -1) for grad in grads], 1)
            return flat / flat.abs().amax()

        self.assertExpectedInline(
            self.text(self.reduced("cuda:0", normalize)),
            """\
def forward(self, a: "f32[16, 4]", b: "f32[16]", factor: "f32[]"):
    view: "f32[8, 8]" = aten.view.default(a, [8, -1])
    view_1: "f32[8, 2]" = aten.view.default(b, [8, -1])
    _foreach_mul_scalar = aten._foreach_mul.Scalar([view, view_1], 1)
    getitem: "f32[8, 8]" = _foreach_mul_scalar[0]
    getitem_1: "f32[8, 2]" = _foreach_mul_scalar[1]
    cat: "f32[8, 10]" = aten.cat.default([getitem, getitem_1], 1)
    abs_1: "f32[8, 10]" = aten.abs.default(cat)
    amax: "f32[]" = aten.amax.default(abs_1)
    div: "f32[8, 10]" = aten.div.Tensor(cat, amax)
    return (div,)
""",
        )

    def test_on_the_cpu_nothing_changes(self) -> None:
        graph = self.reduced("cpu", dims=[0, 0], group=self.shard, op="sum")
        assert not graph.find_nodes(op="call_function", target=torch.ops.aten._foreach_mul.Scalar)
