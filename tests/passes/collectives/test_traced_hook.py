from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import ReduceOp, all_reduce
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from passes.collectives.traced_hook import HookNotTraceable, apply_in_place_hook, apply_reduce_hook
from passes.fx.emit import emit
from tests.common.distributed import RankPools
from tests.passes.tracing import WORLD_SIZE, PassTestCase

# Bound to names of this module, so that replacing functions in torch.distributed would not reach them.
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_only(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad)


def scaled_sum(grad: Tensor) -> None:
    grad.mul_(0.5)
    all_reduce(grad)
    grad.add_(1)


def largest(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output.view(-1, 1), grad.view(-1, 1), op=ReduceOp.MAX)


def gathered_again(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad)
    everything = torch.empty_like(grad)
    all_gather(everything, output)
    torch.sum(everything.view(-1, output.numel()), 0, out=output)


def exchanged(grad: Tensor, output: Tensor) -> None:
    received = torch.empty_like(grad)
    dist.all_to_all_single(received, grad)
    output.copy_(received.view(-1, output.numel()).mean(0))


def quantized(grad: Tensor, output: Tensor) -> None:
    """Reduce in int8: send each rank its shard and a scale, and sum the received shards."""
    scale = grad.abs().amax() / 127
    received = torch.empty_like(grad, dtype=torch.int8)
    dist.all_to_all_single(received, (grad / scale).round().to(torch.int8))
    scales = torch.empty(dist.get_world_size(), device=grad.device)
    all_gather(scales, scale.view(1))
    output.copy_((received.view(-1, output.numel()) * scales[:, None]).sum(0))


def asynchronous(grad: Tensor, output: Tensor) -> None:
    work = all_reduce(grad, async_op=True)
    work.wait()
    rank = dist.get_rank()
    output.copy_(grad[rank * output.numel() :][: output.numel()])


def future(grad: Tensor, output: Tensor) -> None:
    (summed,) = all_reduce(grad, async_op=True).get_future().wait()
    output.copy_(summed.view(-1, output.numel())[dist.get_rank()])


def functional(grad: Tensor, output: Tensor) -> None:
    output[:] = funcol.all_reduce(grad, "sum", dist.group.WORLD).view(-1, output.numel())[dist.get_rank()]


def in_pieces(grad: Tensor, output: Tensor) -> None:
    grad[grad > 1] = 1
    all_reduce(grad[:1])
    output[:1].copy_(grad[:1])
    output[1:] = grad.data.mul_(torch.full_like(grad, 2.0)).sum() / torch.tensor(4.0)


def of_rank_one(grad: Tensor) -> None:
    dist.broadcast(grad, src=1)


class TestTracedGraph(PassTestCase):
    def graph(self, hook: Callable[..., Any]) -> str:
        gm = self.trace(lambda grad: apply_reduce_hook(hook, grad, WORLD_SIZE), torch.zeros(16), names="grad")
        return self.text(gm.graph)

    def graph_in_place(self, hook: Callable[..., Any]) -> str:
        gm = self.trace(lambda grad: apply_in_place_hook(hook, grad), torch.zeros(16), names="grad")
        return self.text(gm.graph)

    def test_collective_into_the_output_leaves_nothing_else(self) -> None:
        self.assertExpectedInline(
            self.graph(reduce_scatter_only),
            """\
def forward(self, grad: "f32[16]"):
    reduce_scatter_tensor: "f32[2]" = _c10d_functional.reduce_scatter_tensor.default(grad, 'sum', 8, 'shard')
    wait_tensor: "f32[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return wait_tensor
""",
        )

    def test_in_place_hook(self) -> None:
        self.assertExpectedInline(
            self.graph_in_place(scaled_sum),
            """\
def forward(self, grad: "f32[16]"):
    mul: "f32[16]" = aten.mul.Tensor(grad, 0.5)
    all_reduce: "f32[16]" = _c10d_functional.all_reduce.default(mul, 'sum', 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_reduce)
    add: "f32[16]" = aten.add.Tensor(wait_tensor, 1)
    return add
""",
        )

    def test_views_of_the_arguments(self) -> None:
        self.assertExpectedInline(
            self.graph(largest),
            """\
def forward(self, grad: "f32[16]"):
    view: "f32[16, 1]" = aten.view.default(grad, [-1, 1])
    view_1: "f32[16]" = aten.view.default(view, [-1])
    reduce_scatter_tensor: "f32[2]" = _c10d_functional.reduce_scatter_tensor.default(view_1, 'max', 8, 'shard')
    wait_tensor: "f32[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    view_2: "f32[2, 1]" = aten.view.default(wait_tensor, [2, 1])
    view_3: "f32[2]" = aten.view.default(view_2, [2])
    return view_3
""",
        )

    def test_gather(self) -> None:
        self.assertExpectedInline(
            self.graph(gathered_again),
            """\
def forward(self, grad: "f32[16]"):
    reduce_scatter_tensor: "f32[2]" = _c10d_functional.reduce_scatter_tensor.default(grad, 'sum', 8, 'shard')
    wait_tensor: "f32[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    all_gather_into_tensor: "f32[16]" = _c10d_functional.all_gather_into_tensor.default(wait_tensor, 8, 'shard')
    wait_tensor_1: "f32[16]" = _c10d_functional.wait_tensor.default(all_gather_into_tensor)
    view: "f32[8, 2]" = aten.view.default(wait_tensor_1, [-1, 2])
    sum_1: "f32[2]" = aten.sum.dim_IntList(view, [0])
    return sum_1
""",
        )

    def test_all_to_all(self) -> None:
        self.assertExpectedInline(
            self.graph(exchanged),
            """\
def forward(self, grad: "f32[16]"):
    all_to_all_single: "f32[16]" = _c10d_functional.all_to_all_single.default(grad, [2, 2, 2, 2, 2, 2, 2, 2], [2, 2, 2, 2, 2, 2, 2, 2], 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_to_all_single)
    view: "f32[8, 2]" = aten.view.default(wait_tensor, [-1, 2])
    mean: "f32[2]" = aten.mean.dim(view, [0])
    return mean
""",
        )

    def test_work_is_waited_for_where_it_starts(self) -> None:
        self.assertExpectedInline(
            self.graph(asynchronous),
            """\
def forward(self, grad: "f32[16]"):
    all_reduce: "f32[16]" = _c10d_functional.all_reduce.default(grad, 'sum', 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_reduce)
    slice_1: "f32[16]" = aten.slice.Tensor(wait_tensor, 0, 0, 9223372036854775807)
    slice_2: "f32[2]" = aten.slice.Tensor(slice_1, 0, 0, 2)
    return slice_2
""",
        )

    def test_functional_collective(self) -> None:
        self.assertExpectedInline(
            self.graph(functional),
            """\
def forward(self, grad: "f32[16]"):
    all_reduce: "f32[16]" = _c10d_functional.all_reduce.default(grad, 'sum', 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_reduce)
    view: "f32[8, 2]" = aten.view.default(wait_tensor, [-1, 2])
    select: "f32[2]" = aten.select.int(view, 0, 0)
    return select
""",
        )

    @pytest.mark.skipif(torch.__version__ >= "2.15", reason="torch 2.15 traces a number that is assigned as scalar_tensor")
    def test_pieces_and_numbers(self) -> None:
        self.assertExpectedInline(
            self.graph(in_pieces),
            """\
def forward(self, grad: "f32[16]"):
    empty: "f32[2]" = aten.empty.memory_format([2], dtype = torch.float32, layout = torch.strided, device = device(type='cpu'), pin_memory = False)
    gt: "b8[16]" = aten.gt.Scalar(grad, 1)
    full: "f32[]" = aten.full.default([], 1.0, dtype = torch.float32, device = device(type='cpu'), pin_memory = False)
    index_put: "f32[16]" = aten.index_put.default(grad, [gt], full)
    slice_1: "f32[1]" = aten.slice.Tensor(index_put, 0, 0, 1)
    all_reduce: "f32[1]" = _c10d_functional.all_reduce.default(slice_1, 'sum', 'shard')
    wait_tensor: "f32[1]" = _c10d_functional.wait_tensor.default(all_reduce)
    slice_scatter: "f32[16]" = aten.slice_scatter.default(index_put, wait_tensor, 0, 0, 1)
    slice_2: "f32[1]" = aten.slice.Tensor(slice_scatter, 0, 0, 1)
    slice_scatter_1: "f32[2]" = aten.slice_scatter.default(empty, slice_2, 0, 0, 1)
    full_1: "f32[16]" = aten.full.default([16], 2.0, dtype = torch.float32, layout = torch.strided, device = device(type='cpu'), pin_memory = False)
    alias: "f32[16]" = aten.alias.default(slice_scatter)
    mul: "f32[16]" = aten.mul.Tensor(alias, full_1)
    alias_1: "f32[16]" = aten.alias.default(mul)
    sum_1: "f32[]" = aten.sum.default(alias_1)
    full_2: "f32[]" = aten.full.default([], 4.0, dtype = torch.float32, device = device(type='cpu'), pin_memory = False)
    div: "f32[]" = aten.div.Tensor(sum_1, full_2)
    slice_3: "f32[1]" = aten.slice.Tensor(slice_scatter_1, 0, 1, 9223372036854775807)
    copy: "f32[1]" = aten.copy.default(slice_3, div)
    slice_scatter_2: "f32[2]" = aten.slice_scatter.default(slice_scatter_1, copy, 0, 1, 9223372036854775807)
    return slice_scatter_2
""",
        )

    def test_broadcast(self) -> None:
        self.assertExpectedInline(
            self.graph_in_place(of_rank_one),
            """\
def forward(self, grad: "f32[16]"):
    broadcast: "f32[16]" = _c10d_functional.broadcast.default(grad, 1, 'shard')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(broadcast)
    return wait_tensor
""",
        )

    def test_group(self) -> None:
        replicas = dist.distributed_c10d._resolve_process_group(self.replicate)

        def hook(grad: Tensor) -> None:
            grad.div_(dist.get_world_size(replicas))
            all_reduce(grad, group=replicas)

        self.assertExpectedInline(
            self.graph_in_place(hook),
            """\
def forward(self, grad: "f32[16]"):
    div: "f32[16]" = aten.div.Tensor(grad, 2)
    all_reduce: "f32[16]" = _c10d_functional.all_reduce.default(div, 'sum', 'replicate')
    wait_tensor: "f32[16]" = _c10d_functional.wait_tensor.default(all_reduce)
    return wait_tensor
""",
        )

    def test_emitted_into_a_graph(self) -> None:
        def hook(grad: Tensor, output: Tensor) -> None:
            reduce_scatter(output, grad * torch.arange(grad.numel()))

        gm = self.trace(lambda grad: grad.relu(), torch.zeros(16), names="grad")
        output = gm.graph.output_node()
        with gm.graph.inserting_before(output):
            flat = output.args[0]
            shard = emit(gm.graph, lambda grad: apply_reduce_hook(hook, grad, WORLD_SIZE), flat)
        output.args = (shard,)
        self.assertExpectedInline(
            self.text(gm.graph),
            """\
def forward(self, grad: "f32[16]"):
    relu: "f32[16]" = aten.relu.default(grad)
    iota: "i64[16]" = prims.iota.default(16, start = 0, step = 1, dtype = torch.int64, device = device(type='cpu'), requires_grad = False)
    mul: "f32[16]" = aten.mul.Tensor(relu, iota)
    reduce_scatter_tensor: "f32[2]" = _c10d_functional.reduce_scatter_tensor.default(mul, 'sum', 8, 'shard')
    wait_tensor: "f32[2]" = _c10d_functional.wait_tensor.default(reduce_scatter_tensor)
    return wait_tensor
""",
        )

    def test_in_a_backward_on_another_thread(self) -> None:
        texts = []

        def trace(grad: Tensor) -> None:
            texts.append(self.graph(reduce_scatter_only))

        leaf = torch.ones(2, requires_grad=True)
        leaf.register_hook(trace)
        thread = threading.Thread(target=leaf.sum().backward)
        thread.start()
        thread.join()
        assert texts == [self.graph(reduce_scatter_only)]

    def test_real_tensor_is_not_reduced_while_tracing(self) -> None:
        gm = make_fx(lambda grad: apply_reduce_hook(reduce_scatter_only, grad, WORLD_SIZE))(torch.zeros(16))
        assert [node.name for node in gm.graph.nodes][1:-1] == ["reduce_scatter_tensor", "wait_tensor"]

    def test_hook_that_does_nothing(self) -> None:
        assert "return grad" in self.graph_in_place(lambda grad: None)


def calls_item(grad: Tensor, output: Tensor) -> None:
    grad.div_(grad.norm().item())
    reduce_scatter(output, grad)


def branches(grad: Tensor, output: Tensor) -> None:
    if grad.isnan().any():
        grad.zero_()
    reduce_scatter(output, grad)


def selects(grad: Tensor, output: Tensor) -> None:
    output.fill_(grad[grad > 0].sum())


def assigns_data(grad: Tensor, output: Tensor) -> None:
    grad.data = grad.data.to(torch.bfloat16)


def rounds_randomly(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad.add_(torch.rand_like(grad)).floor())


def resizes(grad: Tensor, output: Tensor) -> None:
    output.resize_(4)


def reshapes(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad)
    output.unsqueeze_(0)


def sends(grad: Tensor, output: Tensor) -> None:
    dist.send(grad, dst=1)


def weighs(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad, op=dist._make_nccl_premul_sum(0.5))


def returns(grad: Tensor, output: Tensor) -> Tensor:
    return grad[: output.numel()]


def returns_work(grad: Tensor, output: Tensor) -> Any:
    return reduce_scatter(output, grad, async_op=True)


def writes_nothing(grad: Tensor, output: Tensor) -> None:
    all_reduce(grad)


def fails(grad: Tensor, output: Tensor) -> None:
    raise KeyError("missing")


_weights = torch.ones(16)


def reads_another_tensor(grad: Tensor, output: Tensor) -> None:
    reduce_scatter(output, grad * _weights)


@pytest.mark.parametrize(
    ("hook", "reason"),
    [
        (calls_item, "asks for values of a tensor .*_local_scalar_dense"),
        (branches, "asks for values of a tensor"),
        (selects, "asks for values of a tensor .*index"),
        (assigns_data, r"assigns to \.data.*copy_"),
        (rounds_randomly, r"draws random numbers \(aten.rand_like"),
        (resizes, "calls aten.resize_"),
        (reshapes, r"made its result torch.float32 \[1, 2\]"),
        (sends, "calls c10d.send, .*Use all_reduce"),
        (weighs, "reduces with PREMUL_SUM"),
        (returns, "returned a tensor.*in place"),
        (returns_work, "returned a Work.*wait"),
        (writes_nothing, "never wrote its output"),
        (fails, "raised KeyError: 'missing'"),
        (reads_another_tensor, "a tensor other than its arguments"),
    ],
)
def test_refusals(fake_ranks: None, hook: Callable[..., Any], reason: str) -> None:
    with FakeTensorMode() as mode:
        flat = mode.from_tensor(torch.zeros(16))
    with pytest.raises(HookNotTraceable, match=f"(?s)'{hook.__name__}'.*{reason}") as raised:
        make_fx(lambda grad: apply_reduce_hook(hook, grad, WORLD_SIZE))(flat)
    if hook is fails:
        assert isinstance(raised.value.__cause__, KeyError)


class _SlottedState:
    __slots__ = ("step",)

    def __init__(self) -> None:
        self.step = 0


class _Counting:
    calls = 0

    def __call__(self, grad: Tensor) -> None:
        self.calls += 1


def _count(state: Any, grad: Tensor) -> None:
    state.step += 1


def _record(state: Any, grad: Tensor) -> None:
    state.norms.append(grad.norm())


def _remember(state: Any, grad: Tensor) -> None:
    state["last"] = grad


@pytest.mark.parametrize(
    ("hook", "changed"),
    [
        (functools.partial(_count, SimpleNamespace(step=0)), "SimpleNamespace.step"),
        (functools.partial(_count, _SlottedState()), "_SlottedState.step"),
        (functools.partial(_record, SimpleNamespace(norms=[])), r"SimpleNamespace.norms\[0\]"),
        (functools.partial(_remember, {}), r"dict\['last'\]"),
        (_Counting(), "_Counting.calls"),
    ],
)
def test_refuses_a_change_of_state(fake_ranks: None, hook: Callable[[Tensor], None], changed: str) -> None:
    with pytest.raises(HookNotTraceable, match=f"changed {changed}. Change it outside of the hook"):
        make_fx(lambda grad: apply_in_place_hook(hook, grad))(torch.zeros(16))


def test_without_tracing_the_hook_just_runs(fake_ranks: None) -> None:
    state = SimpleNamespace(step=0)
    flat = torch.ones(16)
    apply_in_place_hook(functools.partial(_count, state), flat)
    halved = apply_in_place_hook(lambda grad: grad.mul_(0.5 if grad.sum() > 1 else 2), flat)
    assert state.step == 1
    assert halved.equal(torch.full((16,), 0.5)) and flat.equal(torch.ones(16))
    with pytest.raises(HookNotTraceable, match="returned a tensor"):
        apply_reduce_hook(returns, flat, WORLD_SIZE)


def _traced(function: Callable[..., Tensor], flat: Tensor) -> GraphModule:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(flat)
    return make_fx(lambda grad: function(flat=grad))(fake)


_REDUCE = [reduce_scatter_only, largest, gathered_again, exchanged, quantized, asynchronous, future, functional, in_pieces]
_IN_PLACE = [scaled_sum, of_rank_one]


def _run_eager_and_traced() -> list[tuple[str, Tensor, Tensor, bool]]:
    """Return for each hook: its name, its eager result, its graph's result, and whether both left the input alone."""
    functions = {hook.__name__: functools.partial(apply_reduce_hook, hook, world_size=2) for hook in _REDUCE}
    functions |= {hook.__name__: functools.partial(apply_in_place_hook, hook) for hook in _IN_PLACE}
    results = []
    for name, function in functions.items():
        flat = torch.arange(6.0).sub(2) * (1 + dist.get_rank())
        before = flat.clone()
        eager = function(flat=flat)
        traced = _traced(function, flat)(flat)
        results.append((name, eager, traced, flat.equal(before)))
    return results


def test_two_ranks(rank_pools: RankPools) -> None:
    ranks = rank_pools[2].run(_run_eager_and_traced)
    for results in ranks:
        for name, eager, traced, untouched in results:
            assert untouched, name
            assert torch.equal(eager, traced), (name, eager, traced)
    # The gradients are g and 2g.
    grad = torch.arange(6.0) - 2
    for rank, results in enumerate(ranks):
        eager = {name: value for name, value, _, _ in results}
        shard = (3 * grad).chunk(2)[rank]
        for name in ("reduce_scatter_only", "asynchronous", "future", "functional"):
            assert eager[name].equal(shard), name
        torch.testing.assert_close(eager["quantized"], shard, rtol=0, atol=3 * 3 / 127)
        assert eager["largest"].equal(torch.maximum(grad, 2 * grad).chunk(2)[rank])
        assert eager["gathered_again"].equal(sum((3 * grad).chunk(2)))
        assert eager["exchanged"].equal(1.5 * grad.chunk(2)[rank])
        assert eager["scaled_sum"].equal(1.5 * grad + 1)
        assert eager["of_rank_one"].equal(2 * grad)
