"""Graphs of sharding on top of tensor parallelism, with eight pretended ranks: four shards of two pieces."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import expecttest
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, CapturedGraph, capture, cuda_code, cuda_outline
from fsdp_compile.explain import explain

pytestmark = pytest.mark.units_apart

MESH = {"dp": 4, "tp": 2}


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def shard(model: Any, mesh: DeviceMesh) -> None:
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def graphs_of(blocks: int, *sizes: tuple[int, ...], **options: Any) -> Capture:
    """Return the graphs of training on batches of these sizes, (4,) by default, without the feature dimension."""
    model = nn.Sequential(*(Block() for _ in range(blocks)))
    shard(model, init_device_mesh("cpu", tuple(MESH.values()), mesh_dim_names=tuple(MESH)))
    compiled = torch.compile(model, backend=fsdp_backend, fullgraph=True, options={"lowering": "aot_eager", **options})
    with capture() as captured:
        for size in sizes or ((4,),):
            compiled(torch.ones(*size, 8)).sum().backward()
    return captured


def text_of(graph: CapturedGraph) -> str:
    """Return the text of a graph without parts that differ between versions of torch.

    These are device meshes, which are inputs from torch 2.12 on, and numbers in names, which count optimised-away nodes.
    """
    signature, body = graph.readable().split("\n", 1)
    names: dict[str, str] = {}
    numbers: Counter[str] = Counter()
    for name in re.findall(r"^    (\w+)(?:: .*)? = ", body, re.M):
        base = re.sub(r"_\d+$", "", name)
        names[name] = f"{base}_{numbers[base]}" if numbers[base] else base
        numbers[base] += 1
    body = re.sub(r"(?<!\.)\b\w+\b", lambda name: names.get(name[0], name[0]), body).replace("None, ", "")
    return re.sub(r"primals_\d+, ", "", signature) + "\n" + body


@pytest.mark.usefixtures("fake_ranks")
def test_lengths_change() -> None:
    """The second graph has symbols, and serves all other sizes. torch's own backends raise a RecursionError."""
    captured = graphs_of(2, (4, 4), (4, 5), (4, 9), (4, 12))
    assert len(captured.forward) == len(captured.backward) == 2


@pytest.mark.usefixtures("fake_ranks")
def test_memory_budget() -> None:
    """Graphs take the mesh of the tensor parallel layers, of which the partitioner asks the size."""
    captured = graphs_of(2, memory_budget=1 << 30)
    assert len(captured.forward) == len(captured.backward) == 1


@pytest.mark.usefixtures("fake_ranks")
class TestGraphs(expecttest.TestCase):
    def test_forward_of_a_block(self) -> None:
        """The block's pieces have one gather over "dp". The sum over "tp" is the model's own."""
        self.assertExpectedInline(
            text_of(graphs_of(1).forward[0]),
            """\
def forward(self, primals_1: "f32[4, 8]", shard_0_up_weight: "f32[2, 8]", shard_0_down_weight: "f32[2, 8]", run_0_0_up_weight: "f32[32]"):
    all_gather_into_tensor: "f32[128]" = _c10d_functional.all_gather_into_tensor.default(run_0_0_up_weight, 4, 'shard')
    wait_tensor: "f32[128]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view: "f32[4, 32]" = aten.view.default(wait_tensor, [4, -1])
    split_with_sizes = aten.split_with_sizes.default(view, [16, 16], 1)
    getitem: "f32[4, 16]" = split_with_sizes[0]
    getitem_1: "f32[4, 16]" = split_with_sizes[1]
    clone: "f32[4, 16]" = aten.clone.default(getitem, memory_format = torch.contiguous_format)
    _unsafe_view: "f32[8, 8]" = aten._unsafe_view.default(clone, [8, 8])
    clone_1: "f32[4, 16]" = aten.clone.default(getitem_1, memory_format = torch.contiguous_format)
    _unsafe_view_1: "f32[8, 8]" = aten._unsafe_view.default(clone_1, [8, 8])
    permute: "f32[8, 8]" = aten.permute.default(_unsafe_view, [1, 0])
    mm: "f32[4, 8]" = aten.mm.default(primals_1, permute)
    relu: "f32[4, 8]" = aten.relu.default(mm)
    permute_1: "f32[8, 8]" = aten.permute.default(_unsafe_view_1, [1, 0])
    mm_1: "f32[4, 8]" = aten.mm.default(relu, permute_1)
    all_reduce: "f32[4, 8]" = _c10d_functional.all_reduce.default(mm_1, 'sum', 'tp')
    wait_tensor_1: "f32[4, 8]" = _c10d_functional.wait_tensor.default(all_reduce)
    add: "f32[4, 8]" = aten.add.Tensor(primals_1, wait_tensor_1)
    return (add, primals_1, shard_0_up_weight, shard_0_down_weight, relu)
""",
        )

    def test_backward_of_a_block(self) -> None:
        """The second weight is gathered again; both gradients are scattered over "dp" together."""
        self.assertExpectedInline(
            text_of(graphs_of(1).backward[0]),
            """\
def forward(self, primals_1: "f32[4, 8]", shard_0_up_weight: "f32[2, 8]", shard_0_down_weight: "f32[2, 8]", relu: "f32[4, 8]", tangents_1: "f32[4, 8]", factor_0: "f32[]"):
    view: "f32[16]" = aten.view.default(shard_0_down_weight, [-1])
    all_gather_into_tensor: "f32[64]" = _c10d_functional.all_gather_into_tensor.default(view, 4, 'shard')
    permute: "f32[8, 4]" = aten.permute.default(tangents_1, [1, 0])
    mm: "f32[8, 8]" = aten.mm.default(permute, relu)
    wait_tensor: "f32[64]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view_1: "f32[4, 16]" = aten.view.default(wait_tensor, [4, -1])
    view_2: "f32[8, 8]" = aten.view.default(view_1, [8, 8])
    permute_1: "f32[8, 8]" = aten.permute.default(view_2, [1, 0])
    permute_2: "f32[8, 8]" = aten.permute.default(permute_1, [1, 0])
    mm_1: "f32[4, 8]" = aten.mm.default(tangents_1, permute_2)
    le: "b8[4, 8]" = aten.le.Scalar(relu, 0)
    full_default: "f32[]" = aten.full.default([], 0.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'), pin_memory = False)
    where: "f32[4, 8]" = aten.where.self(le, full_default, mm_1)
    permute_3: "f32[8, 4]" = aten.permute.default(where, [1, 0])
    mm_2: "f32[8, 8]" = aten.mm.default(permute_3, primals_1)
    view_3: "f32[4, 16]" = aten.view.default(mm_2, [4, -1])
    view_4: "f32[4, 16]" = aten.view.default(mm, [4, -1])
    cat: "f32[4, 32]" = aten.cat.default([view_3, view_4], 1)
    view_5: "f32[128]" = aten.view.default(cat, [-1])
    reduce_scatter_tensor: "f32[32]" = _c10d_functional.reduce_scatter_tensor.default(view_5, 'sum', 4, 'shard')
    wait_tensor_1: "f32[32]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    div: "f32[32]" = aten.div.Tensor(wait_tensor_1, factor_0)
    return (div)
""",
        )


class TestOutline(expecttest.TestCase):
    @pytest.mark.cuda
    def test_outline_of_a_block_on_cuda(self) -> None:
        code = cuda_code(nn.Sequential(Block(64)), torch.empty(4, 64), MESH, shard=shard)
        self.assertExpectedInline(
            cuda_outline(code.forward[0]) + "\n" + cuda_outline(code.backward[0]),
            """\
all_gather 0 over shard: f32[2048] -> f32[8192]
wait all_gather 0
foreach kernel: f32[8192] -> f32[4, 1024], f32[4, 1024]
mm: f32[4, 64], f32[64, 64] -> f32[4, 64]
pointwise kernel: f32[4, 64] -> f32[4, 64]
mm: f32[4, 64], f32[64, 64] -> f32[4, 64]
all_reduce sum over tp: f32[4, 64] -> f32[4, 64]
wait all_reduce
pointwise kernel: f32[4, 64], f32[4, 64] -> f32[4, 64]

all_gather 0 over shard: f32[1024] -> f32[4096]
mm: f32[64, 4], f32[4, 64] -> f32[64, 64]
wait all_gather 0
mm: f32[4, 64], f32[64, 64] -> f32[4, 64]
pointwise kernel: f32[4, 64], f32[4, 64] -> f32[4, 64]
mm: f32[64, 4], f32[4, 64] -> f32[64, 64]
foreach kernel: f32[64, 64], f32[64, 64] -> f32[4, 1024], f32[4, 1024]
reduce_scatter 0 avg over shard: f32[8192] -> f32[2048]
wait reduce_scatter 0
""",
        )


def collectives(text: str) -> list[str]:
    """List the collectives of a printed graph at their starts, and the waits for them."""
    found, names = [], {}
    for line in text.splitlines():
        if "_c10d_functional" in line:
            value, operator = line.strip().split(":")[0], line.split("_c10d_functional.")[1].split(".")[0]
            if operator == "wait_tensor":
                found.append(f"wait {names[line.split('(')[-1].rstrip(')')]}")
            else:
                names[value] = f"{operator} over {line.split(chr(39))[-2]}"
                found.append(names[value])
    return found


def test_gathers_start_ahead_of_the_sums_that_they_hide_behind(fake_ranks: None) -> None:
    """The second block is gathered while the first one computes, and while the first one sums over "tp"."""
    gather, total = "all_gather_into_tensor over shard", "all_reduce over tp"
    summed = [total, f"wait {total}"]
    assert collectives(graphs_of(2).forward[0].readable()) == [
        gather,
        gather,
        f"wait {gather}",
        *summed,
        f"wait {gather}",
        *summed,
    ]


def test_a_report_names_what_the_model_communicates() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(Block(256) for _ in range(3)))
    report = explain(model, torch.empty(64, 256, device="meta"), MESH, "h100", shard=shard, suggest=False)
    assert report.mesh == {"shard": 4, "tp": 2}
    of_block = 2 * 256 * 512 * 4
    assert [unit.shard_bytes for unit in report.units if unit.shard_bytes] == [of_block // 8] * 3
    # Sums over two ranks of a block's products in forward, and in backward of all blocks but the first.
    assert report.total.all_reduced_bytes == (3 + 2) * 64 * 256 * 4
    with pytest.raises(ValueError, match="formulae for FSDP and HSDP alone"):
        _ = report.formulae


@pytest.mark.parametrize("mesh_shape", [{}, {"dp": 0}, {"dp": "two"}])
def test_a_mesh_that_is_none(mesh_shape: Any) -> None:
    with pytest.raises(ValueError, match=r"must be .* or sizes by name"):
        explain(nn.Sequential(Block()), torch.empty(4, 8), mesh_shape, "h100", shard=shard)


def test_sharding_by_default_knows_no_names() -> None:
    with pytest.raises(ValueError, match=r"cannot tell which dimensions .* shard: give shard="):
        explain(nn.Sequential(Block()), torch.empty(4, 8), MESH, "h100")
