import torch

from passes.bucket import bucket_gathers
from passes.flat_storage import flat_storage, locate_shards
from passes.interface import Interface, Slot
from passes.mixed_precision import mixed_precision
from passes.ops import unshard
from tests.passes.tracing import PassTestCase


class TestFlatStorage(PassTestCase):
    def run_passes(self, offsets: tuple[int, int, int], **policy: torch.dtype) -> tuple[str, list[Slot]]:
        """The graph of a unit of three parameters of eight elements a shard, which lie at these offsets."""

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
        assert runs == [Slot("storage", index=0, offset=0, numel=24)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_a: "f32[24]"):
    all_gather_into_tensor: "f32[192]" = _c10d_functional.all_gather_into_tensor.default(run_0_a, 8, 'shard')
""",
        )

    def test_a_cast_is_one_pass_over_the_run(self) -> None:
        text, runs = self.run_passes((0, 8, 16), param_dtype=torch.bfloat16)
        assert runs == [Slot("storage", index=0, offset=0, numel=24)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_a: "f32[24]"):
    convert_element_type_default_3: "bf16[24]" = prims.convert_element_type.default(run_0_a, torch.bfloat16)
    all_gather_into_tensor: "bf16[192]" = _c10d_functional.all_gather_into_tensor.default(convert_element_type_default_3, 8, 'shard')
""",
        )

    def test_a_gap_splits_a_run(self) -> None:
        # As in backward, which does not read what lies at 8.
        text, runs = self.run_passes((0, 16, 24))
        assert runs == [Slot("storage", index=1, offset=16, numel=16)]
        self.assertExpectedInline(
            text,
            """\
def forward(self, shard_a: "f32[8]", shard_b: "f32[8]", shard_c: "f32[8]", run_0_b: "f32[16]"):
    view: "f32[8]" = aten.view.default(shard_a, [-1])
    cat: "f32[24]" = aten.cat.default([view, run_0_b])
    all_gather_into_tensor: "f32[192]" = _c10d_functional.all_gather_into_tensor.default(cat, 8, 'shard')
""",
        )

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
