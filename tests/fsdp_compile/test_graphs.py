"""The graphs and the generated code of a whole model, on the fake process group: eight ranks in one process."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any, cast

import expecttest
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_compile import FSDPModule, MixedPrecisionPolicy, fsdp_backend, fully_shard
from fsdp_compile.debug import Capture, capture

_all_gather = torch.ops._c10d_functional.all_gather_into_tensor.default
_reduce_scatter = torch.ops._c10d_functional.reduce_scatter_tensor.default
_all_reduce = torch.ops._c10d_functional.all_reduce.default


class Attention(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, depth: int = 4, width: int = 16, vocabulary: int = 32, context: int = 8):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.zeros(context, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


pytestmark = [pytest.mark.units_apart, pytest.mark.usefixtures("fake_ranks")]


@functools.cache
def compile_gpt(lowering: str = "aot_eager", hsdp: bool = False, depth: int = 2, **policy: Any) -> Capture:
    """Return the graphs of one training step of a GPT of ``depth + 1`` units. Equal calls return the same graphs."""
    names = ("replicate", "shard") if hsdp else ("shard",)
    mesh = init_device_mesh("cpu", (2, 4) if hsdp else (8,), mesh_dim_names=names)
    torch.manual_seed(0)
    model = GPT(depth)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **policy)
    fully_shard(model, mesh=mesh, **policy)
    compiled = torch.compile(model, backend=fsdp_backend, fullgraph=True, options={"lowering": lowering})
    with capture() as captured:
        compiled(torch.zeros(2, 8, dtype=torch.long)).sum().backward()
    return captured


def count(captured: Capture, target: Any) -> tuple[int, int]:
    """Count the calls of an operator in the forward and in the backward graph."""
    assert (len(captured.forward), len(captured.backward)) == (1, 1)
    graphs = (captured.forward[0].graph_module.graph, captured.backward[0].graph_module.graph)
    forward, backward = (len(graph.find_nodes(op="call_function", target=target)) for graph in graphs)
    return forward, backward


def test_units_are_gathered_and_reduced_once() -> None:
    captured = compile_gpt()
    # Backward gathers only blocks: the root keeps its parameters.
    assert count(captured, _all_gather) == (3, 2)
    assert count(captured, _reduce_scatter) == (0, 3)
    assert count(captured, _all_reduce) == (0, 0)


def test_replicas_are_reduced_once_a_unit() -> None:
    captured = compile_gpt(hsdp=True)
    assert count(captured, _all_gather) == (3, 2)
    assert count(captured, _reduce_scatter) == (0, 3)
    assert count(captured, _all_reduce) == (0, 3)


@pytest.mark.parametrize(("policy", "backward_gathers"), [(True, 3), (False, 0), (2, 3), (None, 2)])
def test_reshard_after_forward(policy: bool | int | None, backward_gathers: int) -> None:
    captured = compile_gpt(reshard_after_forward=policy)
    assert count(captured, _all_gather) == (3, backward_gathers)


def test_backward_gathers_no_parameter_that_it_does_not_read() -> None:
    backward = compile_gpt().backward[0].graph_module.graph
    gathered = sum(node.meta["val"].numel() for node in backward.find_nodes(op="call_function", target=_all_gather))
    block = Block(16)
    read = sum(p.numel() for name, p in block.named_parameters() if not name.endswith("bias"))
    # norm1's and norm2's activations are recomputed from their weight and bias.
    # A bias between two weights is gathered with them, which saves a copy. The last bias is not gathered.
    assert gathered <= 2 * (sum(p.numel() for p in block.parameters()) - block.down.bias.numel())
    assert gathered >= 2 * read


@pytest.mark.parametrize("depth", [2, 9], ids=["unfolded", "folded"])
def test_gradients_that_depend_on_no_tangent_are_reduced_in_backward(depth: int) -> None:
    """The derivative of ``trunc`` is zero, whatever comes from later layers."""

    class Truncated(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x + super().forward(x).trunc()

    mesh = init_device_mesh("cpu", (8,))
    model = nn.Sequential(*(fully_shard(Truncated(8, 8), mesh=mesh) for _ in range(depth)))
    compiled = torch.compile(fully_shard(model, mesh=mesh), backend=fsdp_backend, options={"lowering": "aot_eager"})
    with capture() as captured:
        compiled(torch.ones(2, 8)).sum().backward()
    assert count(captured, _reduce_scatter) == (0, depth)
    assert all(param.grad is not None and not param.grad.full_tensor().any() for param in model.parameters())


def test_no_unsharded_parameter_is_saved_when_resharding() -> None:
    captured = compile_gpt(reshard_after_forward=True)
    saved = captured.forward[0].graph_module.graph.output_node().args[0][1:]
    assert not any(map(_made_of_gathers_alone, saved))


def _made_of_gathers_alone(node: torch.fx.Node) -> bool:
    """Return whether a node is computed from gathered parameters alone."""
    if node.op == "placeholder":
        return False
    if node.target == _all_gather:
        return True
    return bool(node.all_input_nodes) and all(map(_made_of_gathers_alone, node.all_input_nodes))


def test_kept_parameters_are_saved() -> None:
    saved = compile_gpt(reshard_after_forward=False).forward[0].graph_module.graph.output_node().args[0][1:]
    assert any(map(_made_of_gathers_alone, saved))


@pytest.mark.parametrize("policy", [True, False, 2])
def test_groups_are_named_after_the_mesh(policy: bool | int) -> None:
    captured = compile_gpt(hsdp=True, depth=1, reshard_after_forward=policy)
    forward, backward = captured.forward[0].readable(), captured.backward[0].readable()
    groups = set(re.findall(r"_c10d_functional\.\w+\.default\(.*'(\w+)'\)", forward + backward))
    groups |= set(re.findall(r"fsdp_compile\.reshard\.default\(.*, '(\w+)'\)", forward))
    assert groups == {"shard", "replicate"} | ({"post_forward"} if policy == 2 else set())


def test_graphs_are_the_same_every_time() -> None:
    texts = []
    for _ in range(2):
        torch._dynamo.reset()
        captured = compile_gpt.__wrapped__(depth=1, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        names = {f"'{group}'" for group in captured.forward[0].group_names}
        text = captured.forward[0].readable() + captured.backward[0].readable()
        assert not any(name in text for name in names)
        texts.append(text)
    assert texts[0] == texts[1]


def outline(code: str) -> str:
    """List the collectives, waits and segments of a program, in order."""
    lines: list[str] = []
    gathers = 0
    buffers: dict[str, str] = {}
    for line in code[: code.index("return")].splitlines():
        waited = re.match(r"\s+\w+ = torch.ops._c10d_functional.wait_tensor.default\((\w+)\)", line)
        started = re.match(r"\s+(\w+) = torch.ops._c10d_functional.(\w+).default\((.*)", line)
        if waited:
            lines.append(f"wait {buffers[waited[1]]}")
        elif started:
            kind = started[2].replace("all_gather_into_tensor", "gather").replace("reduce_scatter_tensor", "reduce")
            buffers[started[1]] = f"{kind} {gathers}"
            lines.append(f"start {buffers[started[1]]}")
            gathers += 1
        elif found := re.search(r"(segment_\d+)\(inputs\)", line):
            lines.append(found[1])
    return "\n".join(lines) + "\n"


class TestGeneratedCode(expecttest.TestCase):
    @pytest.mark.inductor
    def test_prefetches_survive_inductor(self) -> None:
        captured = compile_gpt("inductor", depth=3)
        forward, backward = captured.forward[0].code, captured.backward[0].code
        assert forward is not None and backward is not None
        self.assertExpectedInline(
            outline(forward),
            """\
start gather 0
start gather 1
wait gather 0
segment_0
start gather 2
wait gather 1
segment_1
start gather 3
wait gather 2
segment_1
wait gather 3
segment_2
""",
        )
        self.assertExpectedInline(
            outline(backward),
            """\
segment_0
start gather 0
segment_1
start gather 1
wait gather 0
segment_2
segment_3
start reduce 2
segment_0
start gather 3
wait gather 1
segment_2
segment_3
start reduce 4
wait gather 3
segment_4
wait reduce 2
segment_5
segment_3
start reduce 5
segment_6
wait reduce 4
segment_5
segment_7
start reduce 6
wait reduce 5
segment_5
wait reduce 6
segment_8
""",
        )

    @pytest.mark.night
    @pytest.mark.inductor
    def test_casts_of_gradients_keep_no_reduction_waiting(self) -> None:
        policies = (MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        plain, mixed = (compile_gpt("inductor", depth=2, mp_policy=policy).backward[0].code for policy in policies)
        assert plain is not None and mixed is not None
        # Casts before gathers are separate compute. Collectives and waits have the same order.
        assert [line for line in outline(mixed).splitlines() if " " in line] == [
            line for line in outline(plain).splitlines() if " " in line
        ]

    def test_half_precision_is_cast_around_collectives(self) -> None:
        captured = compile_gpt(depth=1, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
        backward = captured.backward[0]
        dtypes = {
            target: {node.args[0].meta["val"].dtype for node in graph.find_nodes(op="call_function", target=target)}
            for graph in (backward.graph_module.graph,)
            for target in (_all_gather, _reduce_scatter)
        }
        assert dtypes == {_all_gather: {torch.bfloat16}, _reduce_scatter: {torch.float32}}


class TwoUnits:
    """A compiled sharded model of two units, and its optimizer."""

    def __init__(self, *, hsdp: bool = False, lowering: str = "aot_eager", **policy: Any):
        names = ("replicate", "shard") if hsdp else ("shard",)
        mesh = init_device_mesh("cpu", (2, 4) if hsdp else (8,), mesh_dim_names=names)
        self.model = nn.Sequential(nn.Linear(8, 48), nn.ReLU(), nn.Linear(48, 8, bias=False))
        fully_shard(self.model[0], mesh=mesh, **policy)
        fully_shard(self.model, mesh=mesh, **policy)
        self.root = cast(FSDPModule, self.model)
        self.units = [cast(FSDPModule, self.model[0]), self.root]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._compiled = torch.compile(self.model, backend=fsdp_backend, options={"lowering": lowering})

    def step(self) -> None:
        self._compiled(torch.ones(3, 8)).sum().backward()


def traces(captured: Capture) -> int:
    """Count how often Dynamo has traced the model."""
    return sum(step.stage == "dynamo" for step in captured.passes)


def test_flags_lower_each_plan_once() -> None:
    training = TwoUnits(hsdp=True)
    root = training.root

    def no_sync() -> None:
        root.set_requires_gradient_sync(False)
        root.set_is_last_backward(False)

    def sync() -> None:
        root.set_requires_gradient_sync(True)
        root.set_is_last_backward(True)

    def scatter_only() -> None:
        training.model.zero_grad()
        root.set_requires_all_reduce(False)
        for unit in training.units:
            unit.set_force_sum_reduction_for_comms(True)

    def all_reduce() -> None:
        root.set_requires_all_reduce(True)

    def divide_by(factor: float) -> Callable[[], None]:
        def change() -> None:
            for unit in training.units:
                unit.set_gradient_divide_factor(factor)

        return change

    steps: list[tuple[str, Callable[[], Any]]] = [
        ("reduce", lambda: None),
        ("reduce into param.grad", divide_by(3)),
        ("no sync, first", no_sync),
        ("no sync, later", lambda: None),
        ("reduce accumulated gradients into param.grad", sync),
        ("scatter only, first", scatter_only),
        ("scatter only, later", divide_by(7)),
        ("all-reduce with partial results", all_reduce),
        ("reduce", training.model.zero_grad),
        ("no sync, first", no_sync),
    ]
    plans = set()
    with capture() as captured:
        for plan, change in steps:
            change()
            training.step()
            plans.add(plan)
            assert len(captured.backward) == len(plans), plan
    assert len(plans) == 8
    assert (traces(captured), len(captured.forward)) == (1, 1)


@pytest.mark.parametrize("reduce_dtype", [torch.float32, torch.float16])
def test_divide_factor_lowers_nothing(reduce_dtype: torch.dtype) -> None:
    training = TwoUnits(mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
    with capture() as captured:
        for factor in (2, 8, 3.7, 1, 70000):
            for unit in training.units:
                unit.set_gradient_divide_factor(factor)
            training.model.zero_grad()
            training.step()
    assert (traces(captured), len(captured.forward), len(captured.backward)) == (1, 1, 1)


def gathers(captured: Capture) -> tuple[list[int], list[int]]:
    """Count the all-gathers of each forward and each backward graph."""
    forward, backward = (
        [len(graph.graph_module.graph.find_nodes(op="call_function", target=_all_gather)) for graph in graphs]
        for graphs in (captured.forward, captured.backward)
    )
    return forward, backward


def test_keeping_parameters_adds_two_forwards() -> None:
    training = TwoUnits(reshard_after_forward=True)
    with capture() as captured:
        training.step()
        assert gathers(captured) == ([2], [1])
        training.model.zero_grad()
        training.root.set_reshard_after_backward(False)
        training.step()
        # Forward gathers and keeps; the backward of the same step finds the kept parameters.
        assert gathers(captured) == ([2, 2], [1, 0])
        training.model.zero_grad()
        training.step()
        assert gathers(captured) == ([2, 2, 0], [1, 0])
        for _ in range(2):
            # The step makes the kept parameters stale.
            training.optimizer.step()
            training.model.zero_grad()
            training.step()
        training.root.set_reshard_after_backward(True)
        training.optimizer.step()
        training.model.zero_grad()
        training.step()
        assert gathers(captured) == ([2, 2, 0], [1, 0])
    assert traces(captured) == 1
    gathering, keeping, reusing = (len(graph.graph_module.graph.output_node().args[0]) for graph in captured.forward)
    assert keeping == gathering + 3
    assert reusing == gathering


def test_reshard_after_forward_traces_anew_once() -> None:
    training = TwoUnits(reshard_after_forward=True)
    traced = []
    with capture() as captured:
        for reshard in (True, False, False, True, False):
            training.root.set_reshard_after_forward(reshard)
            training.model.zero_grad()
            training.step()
            traced.append(traces(captured))
    assert traced == [1, 2, 2, 2, 2]
    assert gathers(captured) == ([2, 2], [1, 0])


@pytest.mark.inductor
def test_gradients_are_cast_where_they_are_added() -> None:
    training = TwoUnits(lowering="inductor", mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    training.root.set_requires_gradient_sync(False)
    with capture() as captured:
        training.step()
        training.step()
    code = captured.backward[1].code
    assert code is not None
    kernels = [line.strip() for line in code.splitlines() if re.match(r"\s+cpp_fused\w*\(.*unsharded_", line)]
    for accumulator in ("unsharded_0_weight", "unsharded_0_bias", "unsharded_2_weight"):
        assert sum(accumulator in kernel for kernel in kernels) == 1
    # The graph allocates only bfloat16 memory, for products, and no float32 gradient.
    allocated = re.findall(r"empty_strided_cpu\(.*, (torch\.\w+)\)", code)
    assert set(allocated) == {"torch.bfloat16"}
