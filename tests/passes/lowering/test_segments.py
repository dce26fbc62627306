import operator

import torch
import torch._inductor.inductor_prims
from torch._inductor.codecache import compiled_fx_graph_hash
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes.ir.interface import Interface
from passes.ir.ops import reduce_grad, unshard
from passes.ir.plan import PlannedReduction
from passes.lowering.segments import cut_into_segments
from passes.transforms.bucket import bucket_gathers
from passes.transforms.gradient_sync import synchronize_gradients
from passes.transforms.schedule import schedule_gathers
from tests.passes.tracing import PassTestCase

_wait = torch.ops._c10d_functional.wait_tensor.default
_all_reduce = torch.ops._c10d_functional.all_reduce.default


class TestSegments(PassTestCase):
    def layers(self, number: int) -> GraphModule:
        """Trace a chain of equal units; each gather starts one unit early."""

        def forward(x, *shards):
            for index, shard in enumerate(shards):
                x = (x @ unshard(shard, f"{index}.weight", [8, 8], self.shard, unit=str(index), offset=0)).relu()
            return x

        names = " ".join(["x", *(f"shard_{index}" for index in range(number))])
        gm = self.trace(forward, torch.zeros(3, 8), *[torch.zeros(1, 8) for _ in range(number)], names=names)
        bucket_gathers(gm.graph)
        schedule_gathers(gm.graph)
        return gm

    def test_equal_layers_share_a_segment(self) -> None:
        outer, segments = cut_into_segments(self.layers(3))
        self.assertExpectedInline(
            self.text(outer),
            """\
def forward(self, x: "f32[3, 8]", shard_0: "f32[1, 8]", shard_1: "f32[1, 8]", shard_2: "f32[1, 8]"):
    view: "f32[8]" = aten.view.default(shard_0, [-1])
    all_gather_into_tensor: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view, 8, 'shard')
    view_3: "f32[8]" = aten.view.default(shard_1, [-1])
    all_gather_into_tensor_1: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view_3, 8, 'shard')
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    segment_0 = self.segment_0(wait_tensor, x)
    getitem: "f32[3, 8]" = segment_0[0]
    view_6: "f32[8]" = aten.view.default(shard_2, [-1])
    all_gather_into_tensor_2: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view_6, 8, 'shard')
    wait_tensor_1: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    segment_1 = self.segment_0(wait_tensor_1, getitem)
    getitem_1: "f32[3, 8]" = segment_1[0]
    wait_tensor_2: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_2)
    segment_2 = self.segment_0(wait_tensor_2, getitem_1)
    getitem_2: "f32[3, 8]" = segment_2[0]
    return getitem_2
""",
        )
        assert list(segments) == ["segment_0"]
        self.assertExpectedInline(
            self.text(segments["segment_0"].graph_module.graph),
            """\
def forward(self, wait_tensor: "f32[64]", x: "f32[3, 8]"):
    view_1: "f32[8, 8]" = aten.view.default(wait_tensor, [8, -1])
    view_2: "f32[8, 8]" = aten.view.default(view_1, [8, 8])
    mm: "f32[3, 8]" = aten.mm.default(x, view_2)
    relu: "f32[3, 8]" = aten.relu.default(mm)
    return (relu,)
""",
        )

    def test_layers_of_different_shapes_do_not(self) -> None:
        def forward(x, a, b):
            x = (x @ unshard(a, "a", [8, 8], self.shard, unit="a", offset=0)).relu()
            return (x @ unshard(b, "b", [8, 16], self.shard, unit="b", offset=0)).relu()

        gm = self.trace(forward, torch.zeros(3, 8), torch.zeros(1, 8), torch.zeros(1, 16))
        bucket_gathers(gm.graph)
        _, segments = cut_into_segments(gm)
        assert len(segments) == 2

    def test_values_that_no_input_tells_apart_do(self) -> None:
        def forward(x):
            x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x * 2, "sum", self.shard))
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x * 3, "sum", self.shard))

        _, segments = cut_into_segments(self.trace(forward, torch.zeros(4)))
        assert len(segments) == 2

    def test_copy_ins_hold_no_parameters(self) -> None:
        """A copy-in is a segment of its own, after the last one that reads parameters (here for the gradient of ``scale``)."""

        def backward(grad, x, *shards):
            full_weight, full_scale = (
                unshard(shard, name, shape, self.shard, unit="up", offset=offset)
                for shard, name, shape, offset in zip(shards, ("weight", "scale"), ([8, 8], [8]), (0, 8), strict=True)
            )
            grads = grad.t() @ x, (grad @ full_weight * full_scale).sum(0)
            return tuple(
                reduce_grad(one, shard, name, one.shape, self.shard, unit="up")
                for one, shard, name in zip(grads, shards, ("weight", "scale"), strict=True)
            )

        inputs = torch.zeros(3, 8), torch.zeros(3, 8), torch.zeros(1, 8), torch.zeros(1)
        gm = self.trace(backward, *inputs, names="grad x weight scale")
        bucket_gathers(gm.graph)
        interface = Interface(gm.graph)
        synchronize_gradients(gm.graph, [PlannedReduction()], interface)
        interface.finish()
        outer, _ = cut_into_segments(gm)
        self.assertExpectedInline(
            self.text(outer),
            """\
def forward(self, grad: "f32[3, 8]", x: "f32[3, 8]", weight: "f32[1, 8]", scale: "f32[1]"):
    segment_0 = self.segment_0(grad, x, weight, scale)
    getitem: "f32[8, 8]" = segment_0[0]
    getitem_1: "f32[9]" = segment_0[1]
    all_gather_into_tensor: "f32[72]" = _c10d_functional.all_gather_into_tensor.default(getitem_1, 8, 'shard')
    wait_tensor: "f32[72]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    segment_1 = self.segment_1(wait_tensor, grad)
    getitem_2: "f32[8]" = segment_1[0]
    segment_2 = self.segment_2(getitem, getitem_2)
    getitem_3: "f32[72]" = segment_2[0]
    reduce_scatter_tensor: "f32[9]" = _c10d_functional.reduce_scatter_tensor.default(getitem_3, 'sum', 8, 'shard')
    wait_tensor_1: "f32[9]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return (None, None, wait_tensor_1)
""",
        )

    def test_cuts_at_the_models_own_collectives(self) -> None:
        def forward(x):
            reduced = torch.ops._c10d_functional.all_reduce(x.exp().sin(), "sum", self.shard)
            return torch.ops._c10d_functional.wait_tensor(reduced).cos()

        outer, segments = cut_into_segments(self.trace(forward, torch.zeros(4), names="x"))
        calls = [node.target for node in outer.nodes if node.op not in ("placeholder", "output")]
        assert calls == ["segment_0", operator.getitem, _all_reduce, _wait, "segment_1", operator.getitem]
        assert len(segments) == 2

    def test_views_between_collectives_stay_outside(self) -> None:
        def forward(x):
            reduced = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", self.shard))
            return torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(reduced.view(2, 2), "sum", self.shard)
            )

        outer, segments = cut_into_segments(self.trace(forward, torch.zeros(4), names="x"))
        assert not segments
        assert torch.ops.aten.view.default in [node.target for node in outer.nodes]

    def test_constants_are_made_where_they_are_read(self) -> None:
        def forward(x):
            ones = torch.ops.aten.full.default([4], 1.0)
            x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x + ones, "sum", self.shard))
            return x + ones

        outer, segments = cut_into_segments(self.trace(forward, torch.zeros(4), names="x"))
        # Both calls run one module, which makes the constant, so neither takes it from the other.
        assert list(segments) == ["segment_0"]
        assert len(outer.find_nodes(op="call_module", target="segment_0")) == 2
        assert not outer.find_nodes(op="call_function", target=torch.ops.aten.full.default)

    def test_random_seeds_do_not_tell_layers_apart(self) -> None:
        prims = torch.ops.prims

        def forward(x):
            seeds = prims.inductor_seeds(2, torch.device("cpu"))
            for index in range(2):
                x = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(x, "sum", self.shard))
                x = x * prims.inductor_random([4], prims.inductor_lookup_seed(seeds, index), "rand")
            return x

        outer, segments = cut_into_segments(self.trace(forward, torch.zeros(4), names="x"))
        assert len(outer.find_nodes(op="call_function", target=prims.inductor_lookup_seed.default)) == 2
        assert len(outer.find_nodes(op="call_module", target="segment_1")) == 2
        assert list(segments) == ["segment_0", "segment_1"]

    def test_the_layout_of_outputs_is_asked_for(self) -> None:
        _, segments = cut_into_segments(self.layers(1))
        (segment,) = segments.values()
        assert segment.graph_module.graph.output_node().meta["user_visible_output_idxs"] == [0]

    def test_views_are_made_of_what_a_segment_gives_out(self) -> None:
        """A segment returns bases, and the program makes the views, also of inputs and for views that the segment reads itself.

        Views without gaps, such as ``t``, are returned as they are.
        """

        def forward(x, y):
            first, second = (x * 2).t().split(2)
            z = y.t()
            reduced = torch.ops._c10d_functional.wait_tensor(
                torch.ops._c10d_functional.all_reduce(first.sin(), "sum", self.shard)
            )
            return reduced + first, second, z.cos(), z[:1]

        outer, segments = cut_into_segments(self.trace(forward, torch.zeros(3, 4), torch.zeros(4, 4), names="x y"))
        self.assertExpectedInline(
            self.text(outer),
            """\
def forward(self, x: "f32[3, 4]", y: "f32[4, 4]"):
    t_1: "f32[4, 4]" = aten.t.default(y)
    segment_0 = self.segment_0(x)
    getitem: "f32[4, 3]" = segment_0[0]
    getitem_1: "f32[2, 3]" = segment_0[1]
    split = aten.split.Tensor(getitem, 2)
    getitem_2: "f32[2, 3]" = split[0]
    getitem_3: "f32[2, 3]" = split[1]
    all_reduce: "f32[2, 3]" = _c10d_functional.all_reduce.default(getitem_1, 'sum', 'shard')
    wait_tensor: "f32[2, 3]" = _c10d_functional.wait_tensor.default(all_reduce)
    segment_1 = self.segment_1(wait_tensor, getitem_2, t_1)
    getitem_4: "f32[2, 3]" = segment_1[0]
    getitem_5: "f32[4, 4]" = segment_1[1]
    slice_1: "f32[1, 4]" = aten.slice.Tensor(t_1, 0, 0, 1)
    return (getitem_4, getitem_3, getitem_5, slice_1)
""",
        )
        self.assertExpectedInline(
            self.text(segments["segment_0"].graph_module.graph),
            """\
def forward(self, x: "f32[3, 4]"):
    mul: "f32[3, 4]" = aten.mul.Tensor(x, 2)
    t: "f32[4, 3]" = aten.t.default(mul)
    split = aten.split.Tensor(t, 2)
    getitem: "f32[2, 3]" = split[0]
    sin: "f32[2, 3]" = aten.sin.default(getitem)
    return (t, sin)
""",
        )

    def test_views_of_constants(self) -> None:
        def forward(x):
            zeros = torch.ops.aten.full.default([1, 4], 0.0).expand(2, 4)
            reduced = torch.ops._c10d_functional.all_reduce(x + zeros, "sum", self.shard)
            return torch.ops._c10d_functional.wait_tensor(reduced), zeros

        outer, _ = cut_into_segments(self.trace(forward, torch.zeros(2, 4), names="x"))
        self.assertExpectedInline(
            self.text(outer),
            """\
def forward(self, x: "f32[2, 4]"):
    full: "f32[1, 4]" = aten.full.default([1, 4], 0.0)
    segment_0 = self.segment_0(x)
    getitem: "f32[2, 4]" = segment_0[0]
    expand: "f32[2, 4]" = aten.expand.default(full, [2, 4])
    all_reduce: "f32[2, 4]" = _c10d_functional.all_reduce.default(getitem, 'sum', 'shard')
    wait_tensor: "f32[2, 4]" = _c10d_functional.wait_tensor.default(all_reduce)
    return (wait_tensor, expand)
""",
        )

    def test_a_symbol_that_its_inputs_do_not_spell_out_is_an_input(self) -> None:
        def forward(x):
            doubled = torch.cat([x, x])
            reduced = torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_reduce(doubled, "sum", self.shard))
            return reduced + 1

        gm = make_fx(forward, tracing_mode="symbolic")(torch.zeros(5))
        outer, segments = cut_into_segments(gm)
        self.assertExpectedInline(
            str(outer).strip(),
            """\
graph():
    %x_1 : [num_users=2] = placeholder[target=x_1]
    %sym_size_int : [num_users=2] = call_function[target=torch.ops.aten.sym_size.int](args = (%x_1, 0), kwargs = {})
    %segment_0 : [num_users=1] = call_module[target=segment_0](args = (%sym_size_int, %x_1), kwargs = {})
    %getitem : [num_users=1] = call_function[target=operator.getitem](args = (%segment_0, 0), kwargs = {})
    %all_reduce : [num_users=1] = call_function[target=torch.ops._c10d_functional.all_reduce.default](args = (%getitem, sum, 0), kwargs = {})
    %wait_tensor : [num_users=1] = call_function[target=torch.ops._c10d_functional.wait_tensor.default](args = (%all_reduce,), kwargs = {})
    %segment_1 : [num_users=1] = call_module[target=segment_1](args = (%sym_size_int, %wait_tensor), kwargs = {})
    %getitem_1 : [num_users=1] = call_function[target=operator.getitem](args = (%segment_1, 0), kwargs = {})
    return getitem_1""",
        )
        # The second segment's tensors have only the size 2 * s, so s is an input.
        assert len(segments["segment_1"].graph_module.graph.find_nodes(op="placeholder")) == 2

    def test_inductors_cache_tells_bounds_of_sizes_apart(self) -> None:
        def key(most):
            def forward(x):
                size = (x > 0).sum().item()
                torch._check(size >= 0)
                torch._check(size <= most)
                return _wait(_all_reduce(x, "sum", self.shard)) + x.new_ones(size).sum()

            gm = make_fx(forward, tracing_mode="symbolic")(torch.zeros(5))
            *_, segment = cut_into_segments(gm)[1].values()
            values = [node.meta["val"] for node in segment.graph_module.graph.find_nodes(op="placeholder")]
            return compiled_fx_graph_hash(segment.graph_module, values, {}, [])[0]

        assert key(32) == key(32) != key(64)

    def test_leaves_the_graph_alone(self) -> None:
        gm = self.layers(2)
        before = self.text(gm.graph)
        cut_into_segments(gm)
        assert self.text(gm.graph) == before
