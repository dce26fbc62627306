from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_compile.comm_hooks import QuantizedReduce
from passes.collectives.block_formats import LARGEST, round_groups
from passes.collectives.rounded_gather import GatherPolicy
from passes.collectives.stochastic_rounding import round_groups_by_chance
from passes.fx.emit import emit
from passes.ir.work import BucketName, Role, Work
from passes.transforms.packed_words import pack_words, words_of
from tests.passes.tracing import PassTestCase

_SHAPES = ((5, 64), (96,), (2, 3, 100), (31, 1))
_ROOT = BucketName.of_unit("root")


def graph_of(
    function: Callable[..., Tensor], values: Sequence[Tensor], device: str = "cuda:0", role: Role = Role.START_GATHER
) -> Graph:
    """Return a graph in which a pass has written ``function(values)``, with the values on a pretended device."""
    with FakeTensorMode() as mode:
        like = [torch.empty(value.shape, dtype=value.dtype, device="meta") for value in values]
        inputs = [FakeTensor(mode, value, torch.device(device)) for value in like]
        graph = make_fx(lambda *tensors: tensors)(*inputs).graph
    placeholders = graph.find_nodes(op="placeholder")
    with graph.inserting_before(graph.output_node()):
        sent = emit(graph, function, placeholders, work=Work(role, _ROOT))
    graph.output_node().args = ((sent,),)
    return graph


def run(graph: Graph, values: Sequence[Tensor]) -> Tensor:
    graph.lint()
    return GraphModule({}, graph)(*values)[0]


def reads_twice(graph: Graph) -> bool:
    """Return whether the largest value of a group is still found number by number."""
    (largest,) = {node.args[0] for node in graph.find_nodes(op="call_function", target=torch.ops.aten.amax.default)}
    return largest.target != torch.ops.aten.maximum.default


def encoding(policy: GatherPolicy, dtype: torch.dtype) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that encodes shards, padded to blocks. Shards that are not rounded are sent in ``dtype``."""

    def encode(shards: Sequence[Tensor]) -> Tensor:
        gaps = policy.paddings([shard.numel() for shard in shards])
        pieces = [[shard.reshape(-1), shard.new_zeros(gap)] for shard, gap in zip(shards, gaps, strict=True)]
        return policy.encode(shards, torch.cat(list(itertools.chain.from_iterable(pieces))), dtype)

    return encode


def shards_of(dtype: torch.dtype) -> list[Tensor]:
    """Make shards with large, small and negative numbers. One has zeros, another has infinities and NaN."""
    generator = torch.Generator().manual_seed(3)
    shards = [10.0 ** torch.randint(-6, 6, shape, generator=generator) for shape in _SHAPES]
    shards = [shard * torch.randn(shard.shape, generator=generator) for shard in shards]
    shards[0][:2] = 0
    shards[2][0, 0, 3], shards[2][1, 1, 1], shards[2][1, 2, 5] = math.nan, math.inf, -math.inf
    return [shard.to(dtype) for shard in shards]


class TestGathers:
    @pytest.mark.parametrize("sent_dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scale", [128, 32])
    @pytest.mark.parametrize("rounded", LARGEST, ids=str)
    def test_the_bytes_are_the_same(
        self, rounded: torch.dtype, scale: int, dtype: torch.dtype, sent_dtype: torch.dtype
    ) -> None:
        shards, encode = shards_of(dtype), encoding(GatherPolicy(rounded, scale), sent_dtype)
        graph = graph_of(encode, shards)
        pack_words(graph)
        assert not reads_twice(graph)
        assert torch.equal(run(graph, shards), encode(shards))

    def test_rows_of_several_sizes(self) -> None:
        shards, encode = shards_of(torch.float32)[:2], encoding(GatherPolicy(torch.int8, "row"), torch.float32)
        shards.append(shards[0].view(10, 32))
        graph = graph_of(encode, shards)
        pack_words(graph)
        assert len(graph.find_nodes(op="call_function", target=torch.ops.aten.maximum.default)) == 6
        assert torch.equal(run(graph, shards), encode(shards))


class TestReductions:
    @pytest.mark.parametrize("role", [Role.START_REDUCE, Role.ALL_REDUCE], ids=str)
    def test_the_bytes_are_the_same(self, role: Role) -> None:
        hook, pieces = QuantizedReduce(torch.int8), torch.randn(4, 300)
        graph = graph_of(lambda values: hook._encode(values[0]), [pieces], role=role)
        pack_words(graph)
        assert not reads_twice(graph)
        assert torch.equal(run(graph, [pieces]), hook._encode(pieces))


def _nothing_rounded(values: Sequence[Tensor]) -> Tensor:
    return torch.cat([value.reshape(-1).view(torch.uint8) for value in values])


def _by_chance(values: Sequence[Tensor]) -> Tensor:
    rounded, scales = round_groups_by_chance(values[0].view(-1, 64), torch.int8)
    return torch.cat([part.view(-1).view(torch.uint8) for part in (rounded, scales)])


class TestLeavesAlone:
    @pytest.mark.parametrize(
        ("encode", "shapes", "device", "role"),
        [
            (encoding(GatherPolicy(), torch.float32), _SHAPES, "cpu", Role.START_GATHER),
            (encoding(GatherPolicy(scale=50), torch.float32), _SHAPES, "cuda:0", Role.START_GATHER),
            (encoding(GatherPolicy(), torch.bfloat16), ((5, 64), (7,)), "cuda:0", Role.START_GATHER),
            (encoding(GatherPolicy(scale=16), torch.float32), _SHAPES, "cuda:0", Role.START_GATHER),
            (encoding(GatherPolicy(scale="tensor"), torch.float32), ((5, 64), (8,)), "cuda:0", Role.START_GATHER),
            (encoding(GatherPolicy(), torch.float32), _SHAPES, "cuda:0", Role.FINISH_GATHER),
            (_nothing_rounded, _SHAPES, "cuda:0", Role.START_GATHER),
            (_by_chance, ((5, 64),), "cuda:0", Role.START_REDUCE),
        ],
        ids=["CPU", "of fifty", "odd 16 bits", "small", "large", "not sent", "not rounded", "by chance"],
    )
    def test_it(self, encode: Callable[..., Tensor], shapes: Sequence[tuple[int, ...]], device: str, role: Role) -> None:
        graph = graph_of(encode, [torch.zeros(shape) for shape in shapes], device, role)
        graph.eliminate_dead_code()
        before = str(graph)
        pack_words(graph)
        assert str(graph) == before


class TestGraph(PassTestCase):
    def test_words(self) -> None:
        def send(values: Sequence[Tensor]) -> Tensor:
            rounded, scales = round_groups(values[0].view(-1, 32), torch.int8)
            others = [values[1], values[2].to(torch.float32)]
            return torch.cat([part.view(-1).view(torch.uint8) for part in (rounded, scales, *others)])

        graph = graph_of(send, [torch.zeros(64), torch.zeros(3), torch.zeros(2)])
        pack_words(graph)
        self.assertExpectedInline(
            self.text(graph),
            """\
def forward(self, arg0_1: "f32[64]", arg1_1: "f32[3]", arg2_1: "f32[2]"):
    view: "f32[2, 32]" = aten.view.default(arg0_1, [-1, 32])
    abs_1: "f32[2, 32]" = aten.abs.default(view)
    view_9: "f32[2, 8, 4]" = aten.view.default(abs_1, [2, 8, 4])
    select: "f32[2, 8]" = aten.select.int(view_9, -1, 0)
    select_1: "f32[2, 8]" = aten.select.int(view_9, -1, 1)
    select_2: "f32[2, 8]" = aten.select.int(view_9, -1, 2)
    select_3: "f32[2, 8]" = aten.select.int(view_9, -1, 3)
    maximum: "f32[2, 8]" = aten.maximum.default(select, select_1)
    maximum_1: "f32[2, 8]" = aten.maximum.default(select_2, select_3)
    maximum_2: "f32[2, 8]" = aten.maximum.default(maximum, maximum_1)
    amax_1: "f32[2]" = aten.amax.default(maximum_2, [-1])
    div: "f32[2]" = aten.div.Tensor(amax_1, 127.0)
    add: "f32[2]" = aten.add.Tensor(div, 1.1754943508222875e-38)
    unsqueeze: "f32[2, 1]" = aten.unsqueeze.default(add, -1)
    div_1: "f32[2, 32]" = aten.div.Tensor(view, unsqueeze)
    round_1: "f32[2, 32]" = aten.round.default(div_1)
    convert_element_type: "i8[2, 32]" = prims.convert_element_type.default(round_1, torch.int8)
    view_10: "i8[2, 8, 4]" = aten.view.default(convert_element_type, [2, 8, 4])
    select_4: "i8[2, 8]" = aten.select.int(view_10, -1, 0)
    select_5: "i8[2, 8]" = aten.select.int(view_10, -1, 1)
    select_6: "i8[2, 8]" = aten.select.int(view_10, -1, 2)
    select_7: "i8[2, 8]" = aten.select.int(view_10, -1, 3)
    view_11: "u8[2, 8]" = aten.view.dtype(select_4, torch.uint8)
    convert_element_type_1: "i32[2, 8]" = prims.convert_element_type.default(view_11, torch.int32)
    view_12: "u8[2, 8]" = aten.view.dtype(select_5, torch.uint8)
    convert_element_type_2: "i32[2, 8]" = prims.convert_element_type.default(view_12, torch.int32)
    view_13: "u8[2, 8]" = aten.view.dtype(select_6, torch.uint8)
    convert_element_type_3: "i32[2, 8]" = prims.convert_element_type.default(view_13, torch.int32)
    view_14: "u8[2, 8]" = aten.view.dtype(select_7, torch.uint8)
    convert_element_type_4: "i32[2, 8]" = prims.convert_element_type.default(view_14, torch.int32)
    bitwise_left_shift: "i32[2, 8]" = aten.bitwise_left_shift.Tensor_Scalar(convert_element_type_2, 8)
    bitwise_or: "i32[2, 8]" = aten.bitwise_or.Tensor(convert_element_type_1, bitwise_left_shift)
    bitwise_left_shift_1: "i32[2, 8]" = aten.bitwise_left_shift.Tensor_Scalar(convert_element_type_3, 16)
    bitwise_or_1: "i32[2, 8]" = aten.bitwise_or.Tensor(bitwise_or, bitwise_left_shift_1)
    bitwise_left_shift_2: "i32[2, 8]" = aten.bitwise_left_shift.Tensor_Scalar(convert_element_type_4, 24)
    bitwise_or_2: "i32[2, 8]" = aten.bitwise_or.Tensor(bitwise_or_1, bitwise_left_shift_2)
    view_15: "i32[16]" = aten.view.default(bitwise_or_2, [16])
    view_16: "i32[2]" = aten.view.dtype(add, torch.int32)
    view_17: "i32[2]" = aten.view.default(view_16, [2])
    view_18: "i32[3]" = aten.view.dtype(arg1_1, torch.int32)
    view_19: "i32[3]" = aten.view.default(view_18, [3])
    view_20: "i32[2]" = aten.view.dtype(arg2_1, torch.int32)
    view_21: "i32[2]" = aten.view.default(view_20, [2])
    _foreach_mul_scalar = aten._foreach_mul.Scalar([view_19, view_21], 1)
    getitem: "i32[3]" = _foreach_mul_scalar[0]
    getitem_1: "i32[2]" = _foreach_mul_scalar[1]
    cat_1: "i32[23]" = aten.cat.default([view_15, view_17, getitem, getitem_1])
    view_22: "u8[92]" = aten.view.dtype(cat_1, torch.uint8)
    return (view_22,)
""",
        )


def test_a_sign_does_not_spill_into_the_neighbour() -> None:
    numbers = torch.tensor([[-1.0, 2.0, -3.5, -0.0]], dtype=torch.float16)
    assert torch.equal(words_of(numbers, (1, 2)).view(torch.uint8), numbers.view(torch.uint8))
