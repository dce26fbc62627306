import torch

from passes.bucket import bucket_gathers, bucket_reductions
from passes.graph import role
from passes.layout import REPLICATED
from passes.ops import reduce_grad, unshard
from tests.passes.tracing import PassTestCase


class TestBucketGathers(PassTestCase):
    def test_one_gather_for_a_unit(self) -> None:
        def forward(bias, weight, x):
            # Read in another order than they lie in storage.
            full_bias = unshard(bias, "up.bias", [16], self.shard, unit="up", offset=8)
            full_weight = unshard(weight, "up.weight", [16, 4], self.shard, unit="up", offset=0)
            return torch.addmm(full_bias, x.relu(), full_weight.t())

        gm = self.trace(forward, torch.zeros(2), torch.zeros(2, 4), torch.zeros(3, 4), names="bias weight x")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, bias: "f32[2]", weight: "f32[2, 4]", x: "f32[3, 4]"):
    relu: "f32[3, 4]" = aten.relu.default(x)
    view: "f32[8]" = aten.view.default(weight, [-1])
    view_1: "f32[2]" = aten.view.default(bias, [-1])
    cat: "f32[10]" = aten.cat.default([view, view_1])
    all_gather_into_tensor: "f32[80]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "f32[80]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[8, 10]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 2], 1)
    getitem: "f32[8, 8]" = split_with_sizes[0]
    getitem_1: "f32[8, 2]" = split_with_sizes[1]
    clone: "f32[8, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[16, 4]" = aten._unsafe_view.default(clone, [16, 4])
    clone_1: "f32[8, 2]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[16]" = aten._unsafe_view.default(clone_1, [16])
    t: "f32[4, 16]" = aten.t.default(_unsafe_view)
    addmm: "f32[3, 16]" = aten.addmm.default(_unsafe_view_1, relu, t)
    return addmm
""",
        )

    def test_uneven_rows_and_columns(self) -> None:
        def forward(rows, columns):
            return (
                unshard(rows, "rows", [13, 4], self.shard, offset=0).relu(),
                unshard(columns, "columns", [3, 16], self.shard, offset=8, dim=1).relu(),
            )

        gm = self.trace(forward, torch.zeros(2, 4), torch.zeros(3, 2), names="rows columns")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, rows: "f32[2, 4]", columns: "f32[3, 2]"):
    view: "f32[8]" = aten.view.default(rows, [-1])
    view_1: "f32[6]" = aten.view.default(columns, [-1])
    cat: "f32[14]" = aten.cat.default([view, view_1])
    all_gather_into_tensor: "f32[112]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "f32[112]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[8, 14]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 6], 1)
    getitem: "f32[8, 8]" = split_with_sizes[0]
    getitem_1: "f32[8, 6]" = split_with_sizes[1]
    clone: "f32[8, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[16, 4]" = aten._unsafe_view.default(clone, [16, 4])
    slice_1: "f32[13, 4]" = aten.slice.Tensor(_unsafe_view, 0, 0, 13)
    view_3: "f32[8, 3, 2]" = aten.view.default(getitem_1, [8, 3, 2])
    permute: "f32[3, 8, 2]" = aten.permute.default(view_3, [1, 0, 2])
    clone_1: "f32[3, 8, 2]" = aten.clone.default(permute, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[3, 16]" = aten._unsafe_view.default(clone_1, [3, 16])
    relu: "f32[13, 4]" = aten.relu.default(slice_1)
    relu_1: "f32[3, 16]" = aten.relu.default(_unsafe_view_1)
    return (relu, relu_1)
""",
        )

    def test_units_dtypes_and_groups_stay_apart(self) -> None:
        def forward(a, b, c, d):
            return (
                unshard(a, "up.a", [16], self.shard, unit="up", offset=0).relu(),
                unshard(b, "up.b", [16], self.shard, unit="up", offset=0).relu(),
                unshard(c, "up.c", [4], self.replicate, unit="up").relu(),
                unshard(d, "down.d", [16], self.shard, unit="down", offset=0).relu(),
            )

        gm = self.trace(
            forward, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2), torch.zeros(2), names="a b c d"
        )
        bucket_gathers(gm.graph)
        started = [
            node.meta["fsdp"] for node in gm.graph.nodes if role(node) == "start_gather" and not node.name.startswith("view")
        ]
        assert started == ["start_gather:up", "start_gather:up.1", "start_gather:up.2", "start_gather:down"]

    def test_scalars_and_unread_parameters_are_not_gathered(self) -> None:
        def forward(scale, unread, x):
            unshard(unread, "unread", [16], self.shard, offset=1)
            return x * unshard(scale, "scale", [], self.shard, offset=0, dim=REPLICATED)

        gm = self.trace(forward, torch.zeros(()), torch.zeros(2), torch.zeros(3), names="scale unread x")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, scale: "f32[]", unread: "f32[2]", x: "f32[3]"):
    mul: "f32[3]" = aten.mul.Tensor(x, scale)
    return mul
""",
        )

    def test_leaves_the_models_own_collectives_alone(self) -> None:
        def forward(x):
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 8, self.shard))

        gm = self.trace(forward, torch.zeros(4), names="x")
        before = self.text(gm.graph)
        bucket_gathers(gm.graph)
        bucket_reductions(gm.graph)
        assert self.text(gm.graph) == before


class TestBucketReductions(PassTestCase):
    def test_one_reduction_after_the_last_gradient(self) -> None:
        def backward(grad, x, weight, bias):
            grad_bias = reduce_grad(grad.sum(0), bias, "up.bias", [16], self.shard, unit="up")
            grad_weight = reduce_grad(grad.t() @ x, weight, "up.weight", [16, 4], self.shard, unit="up")
            return grad_weight, grad_bias, grad.relu()

        gm = self.trace(
            backward, torch.zeros(3, 16), torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(2), names="grad x weight bias"
        )
        bucket_reductions(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[3, 16]", x: "f32[3, 4]", weight: "f32[2, 4]", bias: "f32[2]"):
    sum_1: "f32[16]" = aten.sum.dim_IntList(grad, [0])
    t: "f32[16, 3]" = aten.t.default(grad)
    mm: "f32[16, 4]" = aten.mm.default(t, x)
    view: "f32[8, 2]" = aten.view.default(sum_1, [8, -1])
    view_1: "f32[8, 8]" = aten.view.default(mm, [8, -1])
    cat: "f32[8, 10]" = aten.cat.default([view, view_1], 1)
    view_2: "f32[80]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor: "f32[10]" = _c10d_functional.reduce_scatter_tensor.default(view_2, 'sum', 8, 'shard')
    wait_tensor: "f32[10]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[10]" = aten.div.Tensor(wait_tensor, 8.0)
    split_with_sizes = aten.split_with_sizes.default(div, [2, 8])
    getitem: "f32[2]" = split_with_sizes[0]
    getitem_1: "f32[8]" = split_with_sizes[1]
    view_3: "f32[2]" = aten.view.default(getitem, [2])
    view_4: "f32[2, 4]" = aten.view.default(getitem_1, [2, 4])
    relu: "f32[3, 16]" = aten.relu.default(grad)
    return (view_4, view_3, relu)
""",
        )

    def test_replicas_are_reduced_after_shards(self) -> None:
        def backward(grad, weight):
            return reduce_grad(grad, weight, "weight", [13, 4], self.shard, replicate_group=self.replicate)

        gm = self.trace(backward, torch.zeros(13, 4), torch.zeros(2, 4), names="grad weight")
        bucket_reductions(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[13, 4]", weight: "f32[2, 4]"):
    constant_pad_nd: "f32[16, 4]" = aten.constant_pad_nd.default(grad, [0, 0, 0, 3])
    view: "f32[8, 8]" = aten.view.default(constant_pad_nd, [8, -1])
    view_1: "f32[64]" = aten.view.default(view, [-1])
    reduce_scatter_tensor: "f32[8]" = _c10d_functional.reduce_scatter_tensor.default(view_1, 'sum', 8, 'shard')
    wait_tensor: "f32[8]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    all_reduce: "f32[8]" = _c10d_functional.all_reduce.default(wait_tensor, 'sum', 'replicate')
    wait_tensor_1: "f32[8]" = _c10d_functional.wait_tensor.default(all_reduce)
    div: "f32[8]" = aten.div.Tensor(wait_tensor_1, 16.0)
    view_2: "f32[2, 4]" = aten.view.default(div, [2, 4])
    return view_2
""",
        )

    def test_half_precision_divides_on_either_side(self) -> None:
        def backward(grad, weight):
            return reduce_grad(grad, weight, "weight", [16], self.shard)

        gm = self.trace(
            backward, torch.zeros(16, dtype=torch.float16), torch.zeros(2, dtype=torch.float16), names="grad weight"
        )
        bucket_reductions(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f16[16]", weight: "f16[2]"):
    view: "f16[8, 2]" = aten.view.default(grad, [8, -1])
    view_1: "f16[16]" = aten.view.default(view, [-1])
    div: "f16[16]" = aten.div.Tensor(view_1, 4.0)
    reduce_scatter_tensor: "f16[2]" = _c10d_functional.reduce_scatter_tensor.default(div, 'sum', 8, 'shard')
    wait_tensor: "f16[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div_1: "f16[2]" = aten.div.Tensor(wait_tensor, 2.0)
    view_2: "f16[2]" = aten.view.default(div_1, [2])
    return view_2
""",
        )
