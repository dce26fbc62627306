import torch

from passes.collectives.layout import REPLICATED
from passes.ir.interface import FullParameter, Interface
from passes.ir.ops import reshard, unshard, with_unit
from passes.ir.plan import Gather
from passes.ir.work import Role, bucket, role
from passes.transforms.bucket import bucket_gathers, find_buckets
from tests.passes.tracing import PassTestCase


class TestBucketGathers(PassTestCase):
    def test_one_gather_for_a_unit(self) -> None:
        def forward(bias, weight, x):
            # The order of reads is not the order in storage.
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

    def test_resharding_waits_for_a_reader(self) -> None:
        """``reshard`` operators at the top of a graph, like views, do not pull gathers to the top."""

        def forward(first, second, x):
            one = unshard(first, "first", [8, 8], self.shard, unit="first")
            other = unshard(second, "second", [8, 8], self.shard, unit="second")
            return reshard(other, "second", self.replicate), reshard(one, "first", self.replicate), x @ one @ other

        gm = self.trace(forward, torch.zeros(1, 8), torch.zeros(1, 8), torch.zeros(4, 8), names="first second x")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, first: "f32[1, 8]", second: "f32[1, 8]", x: "f32[4, 8]"):
    view: "f32[8]" = aten.view.default(first, [-1])
    all_gather_into_tensor: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view, 8, 'shard')
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_1: "f32[8, 8]" = aten.view.default(wait_tensor, [8, -1])
    view_2: "f32[8, 8]" = aten.view.default(view_1, [8, 8])
    reshard_1: "f32[4, 8]" = fsdp_compile.reshard.default(view_2, 'first', 'replicate')
    mm: "f32[4, 8]" = aten.mm.default(x, view_2)
    view_3: "f32[8]" = aten.view.default(second, [-1])
    all_gather_into_tensor_1: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view_3, 8, 'shard')
    wait_tensor_1: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_4: "f32[8, 8]" = aten.view.default(wait_tensor_1, [8, -1])
    view_5: "f32[8, 8]" = aten.view.default(view_4, [8, 8])
    reshard: "f32[4, 8]" = fsdp_compile.reshard.default(view_5, 'second', 'replicate')
    mm_1: "f32[4, 8]" = aten.mm.default(mm, view_5)
    return (reshard, reshard_1, mm_1)
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
            str(bucket(node)) for node in gm.graph.nodes if role(node) is Role.START_GATHER and not node.name.startswith("view")
        ]
        assert started == ["up", "up.1", "up.2", "down"]

    def test_numbered_names_are_nobody_elses(self) -> None:
        def forward(a, b, c):
            return (
                unshard(a, "up.a", [16], self.shard, unit="up").relu(),
                unshard(b, "up.b", [16], self.shard, unit="up").relu(),
                unshard(c, "up.1.c", [16], self.shard, unit="up.1").relu(),
            )

        gm = self.trace(forward, torch.zeros(2), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2))
        assert [(bucket.unit, str(bucket.name)) for bucket in find_buckets(gm.graph).gathers] == [
            ("up", "up"),
            ("up", "up.2"),
            ("up.1", "up.1"),
        ]

    def test_parameters_are_named_relative_to_their_unit(self) -> None:
        """A unit may have parameters of other modules. Each pair of neighbours has the same names."""

        def forward(a, b, c, d):
            unit = "blocks.2.attention"
            return (
                unshard(a, "blocks.2.attention.weight", [16], self.shard, unit=unit, offset=0).relu(),
                unshard(b, "blocks.2.mlp.weight", [16], self.shard, unit=unit, offset=2).relu(),
                unshard(c, "blocks.3.mlp.weight", [16], self.shard, unit=unit, offset=4).relu(),
                unshard(d, "embedding.weight", [16], self.shard, unit=unit, offset=6).relu(),
            )

        gm = self.trace(forward, *[torch.zeros(2)] * 4)
        (found,) = find_buckets(gm.graph).gathers
        assert found.parameters == ("weight", ".mlp.weight", "..+1.mlp.weight", "...embedding.weight")

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

    def test_a_whole_unit_is_gathered_with_unread_parameters(self) -> None:
        def forward(weight, bias, gate, x):
            full_weight = unshard(weight, "up.weight", [16, 4], self.shard, unit="up", offset=0)
            full_bias = unshard(bias, "up.bias", [16], self.shard, unit="up", offset=8)
            full_gate = unshard(gate, "up.gate", [16], self.shard, unit="up", offset=10)
            (result,) = with_unit([torch.mm(x, full_weight.t())], [full_weight, full_bias, full_gate])
            return result.relu() + full_bias

        gm = self.trace(forward, *map(torch.zeros, ((2, 4), 2, 2, (3, 4))), names="weight bias gate x")
        bucket_gathers(gm.graph)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, weight: "f32[2, 4]", bias: "f32[2]", gate: "f32[2]", x: "f32[3, 4]"):
    view: "f32[8]" = aten.view.default(weight, [-1])
    view_1: "f32[2]" = aten.view.default(bias, [-1])
    view_2: "f32[2]" = aten.view.default(gate, [-1])
    cat: "f32[12]" = aten.cat.default([view, view_1, view_2])
    all_gather_into_tensor: "f32[96]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
    wait_tensor: "f32[96]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_3: "f32[8, 12]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_3, [8, 2, 2], 1)
    getitem_1: "f32[8, 8]" = split_with_sizes[0]
    getitem_2: "f32[8, 2]" = split_with_sizes[1]
    clone: "f32[8, 8]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[16, 4]" = aten._unsafe_view.default(clone, [16, 4])
    clone_1: "f32[8, 2]" = aten.clone.default(getitem_2, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[16]" = aten._unsafe_view.default(clone_1, [16])
    t: "f32[4, 16]" = aten.t.default(_unsafe_view)
    mm: "f32[3, 16]" = aten.mm.default(x, t)
    relu: "f32[3, 16]" = aten.relu.default(mm)
    add: "f32[3, 16]" = aten.add.Tensor(relu, _unsafe_view_1)
    return add
""",
        )

    def test_kept_parameters_of_a_whole_unit_go_out(self) -> None:
        def forward(weight, gate, x):
            full_weight = unshard(weight, "up.weight", [16, 4], self.shard, unit="up", offset=0)
            full_gate = unshard(gate, "up.gate", [16], self.shard, unit="up", offset=8)
            return with_unit([torch.mm(x, full_weight.t())], [full_weight, full_gate])

        gm = self.trace(forward, *map(torch.zeros, ((2, 4), 2, (3, 4))), names="weight gate x")
        interface = Interface(gm.graph)
        bucket_gathers(gm.graph, [Gather.KEEP], interface)
        interface.finish()
        gm.graph.lint()
        assert interface.outputs == [FullParameter(0, 0), FullParameter(0, 1)]

    def test_leaves_the_models_own_collectives_alone(self) -> None:
        def forward(x):
            return torch.ops._c10d_functional.wait_tensor(torch.ops._c10d_functional.all_gather_into_tensor(x, 8, self.shard))

        gm = self.trace(forward, torch.zeros(4), names="x")
        before = self.text(gm.graph)
        bucket_gathers(gm.graph)
        assert self.text(gm.graph) == before


class TestKeptParameters(PassTestCase):
    def planned(self, *plan: Gather) -> tuple[str, Interface]:
        """Bucket the forward of two units by a plan. Return the graph's text and its interface."""

        def forward(bias, weight, down, x):
            up = torch.addmm(
                unshard(bias, "up.bias", [16], self.shard, unit="up", offset=8),
                x,
                unshard(weight, "up.weight", [16, 4], self.shard, unit="up", offset=0).t(),
            )
            return (up @ unshard(down, "down.weight", [16, 4], self.shard, unit="down", offset=0),)

        gm = self.trace(
            forward, torch.zeros(2), torch.zeros(2, 4), torch.zeros(2, 4), torch.zeros(3, 4), names="bias weight down x"
        )
        interface = Interface(gm.graph)
        assert [str(bucket.name) for bucket in find_buckets(gm.graph).gathers] == ["up", "down"]
        bucket_gathers(gm.graph, plan, interface)
        interface.finish()
        return self.text(gm.graph), interface

    def test_kept_parameters_go_out(self) -> None:
        text, interface = self.planned(Gather.KEEP, Gather.GATHER)
        # In the order of storage, not of the graph.
        assert interface.outputs == [FullParameter(0, 0), FullParameter(0, 1)]
        assert interface.inputs == []
        self.assertExpectedInline(
            text,
            """\
def forward(self, bias: "f32[2]", weight: "f32[2, 4]", down: "f32[2, 4]", x: "f32[3, 4]"):
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
    addmm: "f32[3, 16]" = aten.addmm.default(_unsafe_view_1, x, t)
    view_3: "f32[8]" = aten.view.default(down, [-1])
    all_gather_into_tensor_1: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view_3, 8, 'shard')
    wait_tensor_1: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor_1)
    view_4: "f32[8, 8]" = aten.view.default(wait_tensor_1, [8, -1])
    view_5: "f32[16, 4]" = aten.view.default(view_4, [16, 4])
    mm: "f32[3, 4]" = aten.mm.default(addmm, view_5)
    return (mm, _unsafe_view, _unsafe_view_1)
""",
        )

    def test_reused_parameters_come_in(self) -> None:
        text, interface = self.planned(Gather.GATHER, Gather.REUSE)
        assert interface.inputs == [FullParameter(1, 0)]
        assert interface.outputs == []
        self.assertExpectedInline(
            text,
            """\
def forward(self, bias: "f32[2]", weight: "f32[2, 4]", down: "f32[2, 4]", x: "f32[3, 4]", full_down_weight: "f32[16, 4]"):
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
    addmm: "f32[3, 16]" = aten.addmm.default(_unsafe_view_1, x, t)
    mm: "f32[3, 4]" = aten.mm.default(addmm, full_down_weight)
    return (mm,)
""",
        )

    def test_reuse_of_everything_needs_no_collective(self) -> None:
        text, interface = self.planned(Gather.REUSE, Gather.REUSE)
        assert interface.inputs == [FullParameter(0, 0), FullParameter(0, 1), FullParameter(1, 0)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, bias: "f32[2]", weight: "f32[2, 4]", down: "f32[2, 4]", x: "f32[3, 4]", full_up_weight: "f32[16, 4]", full_up_bias: "f32[16]", full_down_weight: "f32[16, 4]"):
    t: "f32[4, 16]" = aten.t.default(full_up_weight)
    addmm: "f32[3, 16]" = aten.addmm.default(full_up_bias, x, t)
    mm: "f32[3, 4]" = aten.mm.default(addmm, full_down_weight)
    return (mm,)
""",
        )
