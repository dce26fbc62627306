import weakref
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from passes.ir.work import BucketName, Role, Work, mark
from passes.lowering.program import write_program
from passes.lowering.segments import cut_into_segments
from tests.passes.tracing import PassTestCase

_c10d = torch.ops._c10d_functional


class TestProgram(PassTestCase):
    def graph(self) -> GraphModule:
        """Trace compute, an all-reduce in flight over more compute, and compute that reads both results."""

        def forward(x, y):
            reduced = _c10d.all_reduce(x.exp(), "sum", self.shard)
            z = y.sin().cos()
            return _c10d.wait_tensor(reduced) * z, None

        return self.trace(forward, torch.zeros(4), torch.zeros(4), names="x y")

    def write(self, gm: GraphModule, segments: dict[str, Any] | None = None) -> Any:
        outer, cut = cut_into_segments(gm)
        run = {name: (lambda inputs, module=segment.graph_module: module(*inputs)) for name, segment in cut.items()}
        program = write_program(outer, gm)
        return program.source, program.link(segments or run)

    def test_frees_after_the_last_use_and_in_flight_at_the_wait(self) -> None:
        source, _ = self.write(self.graph())
        self.assertExpectedInline(
            source.replace(f"'{self.shard}'", "'shard'"),
            """\
def call(args):
    x, y, = args
    args.clear()
    inputs = [x]
    del x
    getitem, = segment_0(inputs)
    all_reduce = torch.ops._c10d_functional.all_reduce.default(getitem, 'sum', 'shard')
    inputs = [y]
    del y
    getitem_1, = segment_1(inputs)
    wait_tensor = torch.ops._c10d_functional.wait_tensor.default(all_reduce)
    del getitem, all_reduce
    inputs = [wait_tensor, getitem_1]
    del wait_tensor, getitem_1
    getitem_2, = segment_2(inputs)
    return [getitem_2, None]
""",
        )

    def test_an_all_reduce_of_a_scattered_shard_makes_no_copy(self) -> None:
        def forward(x, y):
            scattered = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(x, "sum", 8, self.shard))
            # The caller owns ``y``, so its all-reduce must not write in place.
            reduced = _c10d.all_reduce(scattered, "sum", self.replicate), _c10d.all_reduce(y, "sum", self.replicate)
            return [_c10d.wait_tensor(each) for each in reduced]

        source, _ = self.write(self.trace(forward, torch.zeros(8), torch.zeros(4), names="x y"))
        assert "all_reduce_.default(wait_tensor," in source
        assert "all_reduce.default(y," in source

    def test_takes_the_results_of_a_collective_apart(self) -> None:
        def forward(x, y):
            gathered = _c10d.all_gather_into_tensor_coalesced([x, y], 8, self.shard)
            return [_c10d.wait_tensor(each) for each in gathered]

        gm = self.trace(forward, torch.zeros(4), torch.zeros(2), names="x y")
        _, function = self.write(gm)
        assert [result.shape for result in function([torch.ones(4), torch.ones(2)])] == [(32,), (16,)]

    def test_names_the_collectives_of_buckets_in_profiles(self) -> None:
        gm = self.graph()
        all_reduce, wait = (node for node in gm.graph.nodes if "_c10d_functional" in str(node.target))
        block = BucketName.of_unit("blocks.0")
        mark(all_reduce, Work(Role.ALL_REDUCE, block))
        mark(wait, Work(Role.FINISH_REDUCE, block))
        _, function = self.write(gm)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function([torch.randn(4), torch.randn(4)])
        names = [event.name for event in profile.events() if "FSDP" in event.name]
        assert names == ["FSDP::all_reduce (blocks.0)", "FSDP::all_reduce wait (blocks.0)"]

    def test_computes_what_the_graph_computes(self) -> None:
        gm = self.graph()
        _, function = self.write(gm)
        inputs = torch.randn(4), torch.randn(4)
        args: list[Tensor] = list(inputs)
        result, nothing = function(args)
        assert args == [] and nothing is None
        torch.testing.assert_close(result, gm(*inputs)[0])

    def test_segments_are_the_last_to_hold_their_inputs(self) -> None:
        def forward(x):
            return [_c10d.wait_tensor(_c10d.all_reduce(x.exp(), "sum", self.shard))]

        gm = self.trace(forward, torch.zeros(4), names="x")
        outer, _ = cut_into_segments(gm)
        alive: list[bool] = []

        def segment(inputs: list[Tensor]) -> tuple[Tensor]:
            seen = weakref.ref(inputs[0])
            result = inputs[0].exp()
            inputs.clear()
            alive.append(seen() is not None)
            return (result,)

        write_program(outer, gm).link({"segment_0": segment})([torch.zeros(4)])
        assert alive == [False]

    def test_reads_attributes_of_the_module(self) -> None:
        gm = self.graph()
        gm.register_buffer("two", torch.full([4], 2.0))
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            two = gm.graph.get_attr("two")
            two.meta["val"] = gm.graph.find_nodes(op="placeholder")[0].meta["val"]
            doubled = gm.graph.call_function(torch.ops.aten.mul.Tensor, (output.args[0][0], two))  # type: ignore[index]
        doubled.meta["val"] = two.meta["val"]
        output.args = ((doubled, two),)
        gm.recompile()
        _, function = self.write(gm)
        inputs = torch.randn(4), torch.randn(4)
        result, two_itself = function(list(inputs))
        torch.testing.assert_close(result, gm(*inputs)[0])
        assert two_itself is gm.two
