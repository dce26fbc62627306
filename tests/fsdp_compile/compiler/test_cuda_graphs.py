"""``options={"cudagraphs": True}``: recordings give the same results as programs, also if tensors are held or moved.

These tests run on the CPU, and record operators instead of launches (:mod:`tests.common.replay`). Such a recording reads and
writes the same memory as a CUDA graph, at the same times. With and without recordings, the same operators run in the same
order, so results have to be equal to the bit.
"""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.fx import Graph

from fsdp_compile import fsdp_backend, fully_shard
from fsdp_compile.compiler.cuda_graphs import RecordedProgram
from tests.common import models
from tests.common.distributed import RankPools
from tests.common.microbatches import FLAVOURS, GPT, SMALL, Trainee
from tests.common.parity import shard_units
from tests.common.replay import Counts, ReplayRecorder, recordings_on_cpu

pytestmark = pytest.mark.cuda

# Flavours that differ in which tensors are kept, where, and for how long.
_FLAVOURS = ["unsharded_then_partial", "every_second_block_defers", "keep_unsharded", "flags_between"]

_OPTIONS = {"lowering": "aot_eager", "cudagraphs": True}


@pytest.fixture
def counts(one_rank: None) -> Iterator[Counts]:
    with recordings_on_cpu() as found:
        yield found


class Pair:
    """Two equal models: one with recordings, one without."""

    def __init__(self, build: Callable[[], nn.Module]) -> None:
        self.models: list[nn.Module] = []
        self.forwards: list[Any] = []
        for options in (_OPTIONS, {"lowering": "aot_eager"}):
            torch.manual_seed(0)
            model = build()
            shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)
            self.models.append(model)
            self.forwards.append(torch.compile(model, backend=fsdp_backend, options=options))

    def each(self, what: Callable[[nn.Module, Any], Any]) -> None:
        """Call ``what`` for both models. Results have to be equal, and so have gradients, parameters and buffers after it."""
        given = []
        for model, forward in zip(self.models, self.forwards, strict=True):
            torch.manual_seed(1)
            given.append(
                [what(model, forward), [_local(p.grad) for p in model.parameters()], list(model.state_dict().values())]
            )
        torch.testing.assert_close(*given, rtol=0, atol=0)


def _local(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.to_local()  # type: ignore[operator]


def _descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter -= 0.1 * parameter.grad
    model.zero_grad()


def _step(model: nn.Module, forward: Any) -> Tensor:
    loss = forward(torch.randn(3, 8)).square().mean()
    loss.backward()
    _descend(model)
    return loss.detach()


def _warm(pair: Pair, counts: Counts) -> None:
    for _ in range(3):
        pair.each(_step)
    unrecorded, recorded, replayed = counts.take()
    assert unrecorded == 2 and 2 <= recorded <= replayed == 4


def test_steps_replay(counts: Counts) -> None:
    """Steps replay, also while the user holds the last step's loss and drops gradients late."""
    pair = Pair(models.MLP)
    _warm(pair, counts)
    held: dict[int, Tensor] = {}

    def step(model: nn.Module, forward: Any) -> Tensor:
        out = forward(torch.randn(3, 8))
        model.zero_grad()
        loss = held[id(model)] = out.square().mean()
        loss.backward()
        return out

    for _ in range(4):
        pair.each(step)
    assert counts.take() == (0, 0, 8)


def test_a_second_forward_before_the_backward(counts: Counts) -> None:
    pair = Pair(models.MLP)
    _warm(pair, counts)

    def two(model: nn.Module, forward: Any) -> list[Tensor]:
        outs = [forward(torch.randn(3, 8)) for _ in range(2)]
        for out in outs:
            out.square().mean().backward()
        return outs

    pair.each(two)
    # The second forward runs without a recording, as the first one's activations are held. So does the second
    # backward, which is the first that adds to gradients.
    unrecorded, _, replayed = counts.take()
    assert (unrecorded, replayed) == (2, 2)
    pair.each(_zero)
    for _ in range(3):
        pair.each(_step)
    assert counts.take() == (0, 0, 6)


def _zero(model: nn.Module, forward: Any) -> None:
    model.zero_grad()


def test_gradients_that_are_zeroed_in_place(counts: Counts) -> None:
    pair = Pair(models.MLP)

    def step(model: nn.Module, forward: Any) -> None:
        forward(torch.randn(3, 8)).square().mean().backward()
        model.zero_grad(set_to_none=False)

    for _ in range(4):
        pair.each(step)
    counts.take()
    for _ in range(3):
        pair.each(step)
    assert counts.take() == (0, 0, 6)


def test_inference_between_steps(counts: Counts) -> None:
    pair = Pair(models.MLP)
    _warm(pair, counts)

    @torch.no_grad()
    def infer(model: nn.Module, forward: Any) -> Tensor:
        return forward(torch.randn(3, 8))

    for _ in range(3):
        pair.each(infer)
        pair.each(_step)
    unrecorded, _, replayed = counts.take()
    assert (unrecorded, replayed) == (1, 8)


def test_buffers_are_written_and_moved(counts: Counts) -> None:
    """A replay writes to the present memory of buffers, also after the user has replaced them."""
    pair = Pair(models.Buffers)
    _warm(pair, counts)

    def replace(model: nn.Module, forward: Any) -> None:
        model.mean = torch.full_like(model.mean, 0.5)
        model.steps = model.steps + 1

    for _ in range(3):
        pair.each(replace)
        pair.each(_step)
        pair.each(_step)
    unrecorded, _, replayed = counts.take()
    assert (unrecorded, replayed) == (0, 12)


def test_gradients_that_overlap_with_themselves(counts: Counts) -> None:
    """The gradient of a sum is one number, expanded to all elements."""
    pair = Pair(models.MLP)

    def step(model: nn.Module, forward: Any) -> None:
        forward(torch.randn(3, 8)).sum().backward()
        _descend(model)

    for _ in range(4):
        pair.each(step)
    assert counts.take()[2] == 6


def test_outputs_live_as_long_as_they_are_held(counts: Counts, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Large outputs are lent. While a view of one is held, the output is not overwritten and its memory stays."""
    monkeypatch.setattr("fsdp_compile.compiler.cuda_graphs.SMALL_BYTES", 0)
    pair = Pair(models.MLP)
    with caplog.at_level(logging.WARNING):
        _warm(pair, counts)
    assert not caplog.records
    out = pair.forwards[0](torch.randn(3, 8))
    assert counts.take() == (0, 0, 1)
    view, values = out.detach()[1:], out.detach()[1:].clone()
    del out
    for _ in range(2):
        pair.each(_step)
    # Neither forward nor backward replays, in both steps.
    assert counts.take() == (4, 0, 0)
    forward, backward = (record.getMessage() for record in caplog.records)
    assert "the forward graph that takes shard_blocks_0_up_weight first launched its kernels one by one" in forward
    assert forward.endswith("an output of its latest call is still held.")
    assert backward.endswith("so did the graph that it takes tensors from.")
    del pair
    torch._dynamo.reset()
    gc.collect()
    others = [torch.full((3, 8), torch.nan) for _ in range(1000)]
    assert torch.equal(view, values)
    del others


def test_graph_breaks(counts: Counts) -> None:
    """Steps of several graphs replay. One graph takes outputs of another, and some have no sharded parameter."""
    pair = Pair(models.GraphBreaks)
    for _ in range(3):
        pair.each(_step)
    counts.take()
    pair.each(_step)
    unrecorded, recorded, replayed = counts.take()
    assert (unrecorded, recorded) == (0, 0) and replayed >= 6


@pytest.mark.night
def test_microbatches(counts: Counts) -> None:
    """Flavours of gradient accumulation replay, three steps of each on one model."""
    trainees = [Trainee(system, (1, 1), GPT.build) for system in ("recorded", "aot_eager")]
    for name in _FLAVOURS:
        counts.take()
        runs = []
        for trainee in trainees:
            trainee.reset()
            run = trainee.train(GPT, [FLAVOURS[name]] * 3, count=False)
            runs.append([run.losses, run.gradients, run.parameters])
        torch.testing.assert_close(*runs, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}")
        # Three steps of four microbatches, forward and backward.
        unrecorded, _, replayed = counts.take()
        assert unrecorded + replayed == 24 and replayed >= 18, name


def _train_both() -> Any:
    """Train with and without recordings. Every rank calls this."""
    schedule = FLAVOURS["keep_unsharded"]
    calls = itertools.count(dist.get_rank())
    with recordings_on_cpu() as counts, pytest.MonkeyPatch.context() as patch:
        # Every third call runs without a recording, and not the same calls on all ranks.
        patch.setattr(ReplayRecorder, "is_recording", lambda self: next(calls) % 3 == 0)
        trainees = [Trainee(system, (2,), SMALL.build) for system in ("recorded", "aot_eager")]
        runs = [trainee.train(SMALL, [schedule] * 3, count=False) for trainee in trainees]
        return *[(run.losses, run.gradients, run.parameters) for run in runs], counts.take()


def test_ranks_differ_in_what_they_record(rank_pools: RankPools) -> None:
    """Each rank decides alone which of its calls replay a recording. All communicate alike."""
    for recorded, plain, (unrecorded, _, replayed) in rank_pools[2].run(_train_both):
        torch.testing.assert_close(recorded, plain, rtol=0, atol=0)
        assert unrecorded + replayed == 24 and replayed >= 8


class TestProgram:
    """``RecordedProgram`` without a model."""

    @staticmethod
    def program(function: Callable[..., Sequence[Any]], recorder: type[ReplayRecorder] = ReplayRecorder) -> RecordedProgram:
        graph = Graph()
        graph.output(())
        return RecordedProgram(lambda args: function(*args), recorder(), graph, "the graph")

    def test_outputs_that_are_inputs(self, counts: Counts) -> None:
        """Outputs that are inputs stay the same objects. Views of inputs are views of their present memory."""
        program = self.program(lambda a, b: (a, b[1], None, a + b, 7, b))
        for _ in range(4):
            a, b = torch.randn(2, 3), torch.randn(2, 3)
            results = program([a, b])
            assert results[0] is a and results[5] is b and results[2] is None and results[4] == 7
            assert torch.equal(results[1], b[1]) and results[1].data_ptr() == b[1].data_ptr()
            assert torch.equal(results[3], a + b)
            del results
        assert counts.take()[2] == 3

    def test_outputs_in_one_memory(self, counts: Counts) -> None:
        def two_views(a: Tensor) -> list[Tensor]:
            both = torch.stack([a, 2 * a])
            return [both[0], both[1].view(3, 2)]

        program = self.program(two_views)
        a = torch.randn(2, 3)
        for _ in range(3):
            first, second = program([a])
            assert torch.equal(first, a) and torch.equal(second, (2 * a).view(3, 2))
        # At the third call, outputs of the second were held.
        assert counts.take() == (2, 1, 1)
        assert first.untyped_storage()._cdata == second.untyped_storage()._cdata
        del first
        assert torch.equal(program([a])[1], (2 * a).view(3, 2))

    def test_inputs_that_never_settle(self, counts: Counts) -> None:
        """Two recordings take turns in lending to a third, which copies its inputs, rather than be recorded for each turn."""
        lenders = [self.program(lambda a: [a + 1]), self.program(lambda a: [a + 2])]
        reader = self.program(lambda a: [a * 3])
        a = torch.randn(2, 3)
        for _ in range(12):
            for number, lender in enumerate(lenders, 1):
                results = reader(list(lender([a])))
                assert torch.equal(results[0], (a + number) * 3)
                del results
        _, recorded, replayed = counts.take()
        assert recorded <= 2 + 6
        assert replayed >= 2 * 24 - 6

    def test_a_failure_to_record_says_what_failed(self) -> None:
        class Failing(ReplayRecorder):
            def record(self, run: Callable[[], None]) -> Callable[[], None]:
                raise RuntimeError("operation not permitted when stream is capturing")

        program = self.program(lambda: (), Failing)
        program([])
        for _ in range(2):
            with pytest.raises(RuntimeError, match=r"the graph cannot be recorded.*stream is capturing\nCompile without"):
                program([])

    def test_whoever_records_already_gets_launches(self, counts: Counts) -> None:
        class Recording(ReplayRecorder):
            def is_recording(self) -> bool:
                return True

        program = self.program(lambda a: (a + 1,), Recording)
        for _ in range(3):
            assert program([torch.ones(2)])[0].sum() == 4
        assert counts.take() == (3, 0, 0)


def test_no_cuda_graphs_on_the_cpu(one_rank: None) -> None:
    model = models.MLP()
    shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)
    compiled = torch.compile(model, backend=fsdp_backend, options={"cudagraphs": True})
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="parameters are on cpu, where there are no CUDA graphs"):
        compiled(torch.randn(3, 8))


@pytest.mark.parametrize(
    ("dynamic", "there", "reason"),
    [
        (True, torch.device("cpu"), "is only known when it runs"),
        (False, torch.device("meta"), r"(nothing is known of|is on meta)"),
    ],
    ids=["dynamic", "device"],
)
def test_what_is_not_recorded_warns(dynamic: bool, there: torch.device, reason: str, counts: Counts) -> None:
    model = models.MLP()
    shard_units(model, init_device_mesh("cpu", (1,)), fully_shard)

    @torch.compile(backend=fsdp_backend, options=_OPTIONS, dynamic=dynamic)
    def forward(x: Tensor) -> Any:
        return model(x), x.new_ones(2, device=there)

    with pytest.warns(UserWarning, match=rf"the forward graph .* does not become a CUDA graph, because .*{reason}"):
        for size in (3, 4, 5):
            forward(torch.randn(size, 8))
    assert counts.take() == (0, 0, 0)
