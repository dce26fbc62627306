import torch
from torch.utils import _pytree as pytree

from passes.ir.interface import InputSlot, Interface, StorageRun
from passes.ir.ops import unshard
from passes.transforms.bucket import bucket_gathers
from passes.transforms.flat_storage import flat_storage, locate_shards
from passes.transforms.mixed_precision import mixed_precision
from tests.passes.tracing import PassTestCase


class TestFlatStorage(PassTestCase):
    def run_passes(self, offsets: tuple[int, int, int], **policy: torch.dtype) -> tuple[str, list[InputSlot]]:
        """Run the passes on a unit with three shards of eight elements at ``offsets``.

        Returns:
            The graph's text before the first wait, and the inputs that were added.
        """

        def forward(a, b, c):
            return [
                unshard(shard, name, [64], self.shard, unit="up", offset=offset, **policy).relu()
                for shard, name, offset in zip((a, b, c), "abc", offsets, strict=True)
            ]

        gm = self.trace(forward, torch.zeros(8), torch.zeros(8), torch.zeros(8), names="shard_a shard_b shard_c")
        locations = locate_shards(gm.graph)
        mixed_precision(gm.graph)
        bucket_gathers(gm.graph)
        interface = Interface(gm.graph)
        flat_storage(gm.graph, locations, interface)
        text = self.text(gm.graph)
        return text[: text.index("wait_tensor")].rpartition("\n")[0] + "\n", interface.inputs

    def test_a_bucket_of_neighbours_is_gathered_in_place(self) -> None:
        text, runs = self.run_passes((0, 8, 16))
        assert runs == [StorageRun(0, 0, 24)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_a: "f32[24]"):
    all_gather_into_tensor: "f32[192]" = _c10d_functional.all_gather_into_tensor.default(run_0_a, 8, 'shard')
""",
        )

    def test_a_cast_is_one_pass_over_the_run(self) -> None:
        text, runs = self.run_passes((0, 8, 16), param_dtype=torch.bfloat16)
        assert runs == [StorageRun(0, 0, 24)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_a: "f32[24]"):
    convert_element_type_default_3: "bf16[24]" = prims.convert_element_type.default(run_0_a, torch.bfloat16)
    all_gather_into_tensor: "bf16[192]" = _c10d_functional.all_gather_into_tensor.default(convert_element_type_default_3, 8, 'shard')
""",
        )

    def test_a_gap_splits_a_run(self) -> None:
        # As in a backward that does not read the parameter at offset 8.
        text, runs = self.run_passes((0, 16, 24))
        assert runs == [StorageRun(1, 16, 16)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_b: "f32[16]"):
    view: "f32[8]" = aten.view.default(shard_a, [-1])
    cat: "f32[24]" = aten.cat.default([view, run_0_b])
    all_gather_into_tensor: "f32[192]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
""",
        )

    def test_a_small_gap_is_gathered_along(self) -> None:
        def forward(a, b, x):
            weight = unshard(a, "a", [64], self.shard, unit="up", offset=0)
            # Between them lies a bias with two elements in each shard, which nothing reads.
            return weight * x, unshard(b, "b", [64], self.shard, unit="up", offset=10) * x

        gm = self.trace(forward, torch.zeros(8), torch.zeros(8), torch.zeros(64), names="shard_a shard_b x")
        locations = locate_shards(gm.graph)
        bucket_gathers(gm.graph)
        interface = Interface(gm.graph)
        flat_storage(gm.graph, locations, interface)
        assert interface.inputs == [StorageRun(0, 0, 18)]
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", x: "f32[64]", run_0_a: "f32[18]"):
    all_gather_into_tensor: "f32[144]" = _c10d_functional.all_gather_into_tensor.default(run_0_a, 8, 'shard')
    wait_tensor: "f32[144]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_2: "f32[8, 18]" = aten.view.default(wait_tensor, [8, -1])
    split_with_sizes = aten.split_with_sizes.default(view_2, [8, 2, 8], 1)
    getitem: "f32[8, 8]" = split_with_sizes[0]
    getitem_2: "f32[8, 8]" = split_with_sizes[2]
    clone: "f32[8, 8]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[64]" = aten._unsafe_view.default(clone, [64])
    clone_1: "f32[8, 8]" = aten.clone.default(getitem_2, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[64]" = aten._unsafe_view.default(clone_1, [64])
    mul: "f32[64]" = aten.mul.Tensor(_unsafe_view, x)
    mul_1: "f32[64]" = aten.mul.Tensor(_unsafe_view_1, x)
    return (mul, mul_1)
""",
        )
        for node in gm.graph.nodes:
            if node.op == "call_function" and "val" in node.meta:
                args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
                made = pytree.tree_leaves(node.target(*args, **kwargs))  # type: ignore[operator]
                said = pytree.tree_leaves(node.meta["val"])
                assert [each.shape for each in made] == [each.shape for each in said], node.format_node()

    def test_storages_of_different_dtypes_are_no_neighbours(self) -> None:
        def forward(a, b):
            return [
                unshard(a, "a", [64], self.shard, unit="up", offset=0, param_dtype=torch.bfloat16).relu(),
                unshard(b, "b", [64], self.shard, unit="up", offset=8, param_dtype=torch.bfloat16).relu(),
            ]

        gm = self.trace(forward, torch.zeros(8), torch.zeros(8, dtype=torch.float16), names="shard_a shard_b")
        locations = locate_shards(gm.graph)
        mixed_precision(gm.graph)
        bucket_gathers(gm.graph)
        interface = Interface(gm.graph)
        flat_storage(gm.graph, locations, interface)
        assert interface.inputs == []

    def test_leaves_shards_without_neighbours_alone(self) -> None:
        text, runs = self.run_passes((0, 16, 32))
        assert runs == []
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]"):
    view: "f32[8]" = aten.view.default(shard_a, [-1])
    view_1: "f32[8]" = aten.view.default(shard_b, [-1])
    view_2: "f32[8]" = aten.view.default(shard_c, [-1])
    cat: "f32[24]" = aten.cat.default([view, view_1, view_2])
    all_gather_into_tensor: "f32[192]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
""",
        )
