"""If one rank runs another program than the others, every rank raises within seconds. If all ranks deviate alike, none does."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fsdp_compile import RankFailed, RanksDisagree, fsdp_backend, fully_shard
from fsdp_compile.runtime.agreement import Agreement, Program
from fsdp_compile.runtime.collective_log import CollectiveLog
from fsdp_compile.runtime.watchdog import Lookout, neighbours
from tests.common.distributed import RankPools, device_mesh, mesh_of_new_groups

pytestmark = pytest.mark.units_apart

# Threads stand for ranks.

_FORWARD = Program("forward graph", ["gather 8"], ["gather 8"])
_BACKWARD = Program("backward graph", ["scatter 8"], ["scatter 8"])
_OTHER_BACKWARD = Program("backward graph", ["scatter 8", "scatter 4"], ["scatter 8", "scatter 4"])
_EAGER = Program("unshard of weight outside of a compiled graph", [], ["[8]"], is_graph=False)
_EAGER_TOO = Program("unshard of bias outside of a compiled graph", [], ["[1]"], is_graph=False)


class Ranks:
    """Collective logs of threads that stand for ranks of one group."""

    def __init__(self, number: int = 2):
        store = dist.HashStore()
        ranks = range(number)
        #: The collectives that each rank has begun.
        self.begun = [0] * number
        self.logs = [
            CollectiveLog(
                Agreement(store, ranks, rank, label="shard", timeout_s=20, warn_after_s=20),
                "no group",
                begun=lambda rank=rank: (self.begun[rank],),  # type: ignore[misc]
            )
            for rank in ranks
        ]
        self._lookouts = [Lookout(log) for log in self.logs]
        self._now = 0.0

    def run(self, *programs: Program | None) -> list[str]:
        """Begin a program on each rank, or nothing where it is None. Return each rank's error, or an empty string."""
        with ThreadPoolExecutor(len(programs)) as pool:
            return list(pool.map(self.run_alone, range(len(programs)), programs))

    def run_alone(self, rank: int, program: Program | None) -> str:
        if program is None:
            return ""
        log = self.logs[rank]
        known = log.know(program)
        try:
            log.ask(known)
        except RanksDisagree as error:
            return str(error)
        log.push(known)
        log.thread = threading.get_ident()
        self.begun[rank] += 1
        return ""

    def end(self, *ranks: int) -> None:
        """End the programs that ranks run."""
        for rank in ranks:
            self.logs[rank].thread = 0

    def asks(self, rank: int, program: Program) -> contextlib.AbstractContextManager[Any]:
        """Make the rank seem to wait in a comparison of ``program``, for the duration of the context."""
        agreement = self.logs[rank].agreement
        return patch.object(agreement, "asking", (agreement.passed + 1, str(program)))

    def look(self) -> list[str]:
        """Run the watchdogs for ten pretended seconds. Return the failure that each rank has found, or an empty string."""
        for _ in range(10):
            self._now += 1
            for log, lookout in zip(self.logs, self._lookouts, strict=True):
                lookout.look(log, self._now)
        return [log.failure for log in self.logs]


@pytest.fixture(autouse=True)
def no_connections() -> Iterator[None]:
    with patch("fsdp_compile.runtime.collective_log.break_connections", lambda name: None):
        yield


def _in_step(number: int = 2, steps: int = 2) -> Ranks:
    """Return ranks that have run some steps together."""
    ranks = Ranks(number)
    for program in [_FORWARD, _BACKWARD] * steps:
        assert ranks.run(*[program] * number) == [""] * number
    return ranks


def _comparisons() -> Any:
    return patch.object(Agreement, "compare", autospec=True, side_effect=Agreement.compare)


def test_only_what_is_new_asks() -> None:
    ranks = Ranks()
    with _comparisons() as compare:
        for program in (_FORWARD, _BACKWARD, _FORWARD, _BACKWARD):
            ranks.run(program, program)
        # Each graph, and forward after backward, on both ranks.
        assert compare.call_count == 2 * 3
        for program in (_FORWARD, _BACKWARD, _FORWARD):
            ranks.run(program, program)
        assert compare.call_count == 2 * 3
        for program in (_EAGER, _EAGER_TOO, _EAGER, _BACKWARD, _FORWARD, _EAGER):
            ranks.run(program, program)
        # From a graph to an operator and back, but not between operators.
        assert compare.call_count == 2 * 5


def test_operators_alone_ask_nothing() -> None:
    ranks = Ranks()
    with _comparisons() as compare:
        for program in (_EAGER, _EAGER_TOO, _EAGER):
            ranks.run(program, program)
    assert compare.call_count == 0


def test_both_ask_for_something_else() -> None:
    errors = _in_step().run(_EAGER, _OTHER_BACKWARD)
    assert errors[0] == errors[1]
    assert "\n  rank 0: unshard of weight outside of a compiled graph\n" in errors[0]
    assert "\n  rank 1: backward graph that begins with 1: scatter 8; 2: scatter 4 (in a backward graph" in errors[0]


def test_both_ask_for_the_same_after_something_else() -> None:
    ranks = _in_step()
    for rank, program in enumerate((_FORWARD, _BACKWARD)):
        # As if the ranks had not compared these programs.
        ranks.logs[rank].push(ranks.logs[rank].know(program))
    errors = ranks.run(_EAGER, _EAGER)
    assert errors[0] == errors[1]
    assert "\n  rank 0: forward graph (program 5 over this group" in errors[0]
    assert "\n  rank 1: backward graph (program 5 over this group" in errors[0]


@pytest.mark.parametrize("asking", [0, 1])
@pytest.mark.parametrize("asked", [_EAGER, _OTHER_BACKWARD], ids=["operator", "graph"])
def test_one_asks_while_the_other_is_within_a_program(asking: int, asked: Program) -> None:
    ranks = _in_step()
    ranks.run_alone(1 - asking, _FORWARD)
    with ranks.asks(asking, asked):
        (failure, other) = ranks.look()
    assert failure == other
    assert f"\n  rank {asking}: {asked} (about to run, as program 5)\n" in failure
    assert f"\n  rank {1 - asking}: forward graph that begins with 1: gather 8 (program 5 over this group)\n" in failure
    assert ranks.run(_FORWARD, _FORWARD) == [failure] * 2


def test_one_asks_while_the_other_runs_on_outside_of_graphs() -> None:
    ranks = _in_step()
    for program in (_EAGER, _EAGER_TOO):
        ranks.run(program, program)
    ranks.run_alone(0, _EAGER)
    with ranks.asks(1, _OTHER_BACKWARD):
        failure, _ = ranks.look()
    assert "rank 0: unshard of weight outside of a compiled graph (program 7 over this group)" in failure
    assert "rank 1: backward graph that begins with 1: scatter 8; 2: scatter 4 (about to run, as program 7)" in failure


def test_what_both_ran_before_at_other_places() -> None:
    ranks = _in_step()
    for program in (_FORWARD, _OTHER_BACKWARD, _FORWARD, _BACKWARD, _FORWARD):
        ranks.run(program, program)
    # Both programs are known, so no rank compares.
    assert ranks.run_alone(0, _BACKWARD) == ranks.run_alone(1, _OTHER_BACKWARD) == ""
    failure, other = ranks.look()
    assert failure == other
    assert "rank 0: backward graph that begins with 1: scatter 8 (program 10" in failure
    assert "rank 1: backward graph that begins with 1: scatter 8; 2: scatter 4 (program 10" in failure


def test_slow_ranks_are_waited_for() -> None:
    ranks = _in_step(3)
    ranks.run_alone(0, _FORWARD)
    assert ranks.look() == [""] * 3
    ranks.run_alone(1, _FORWARD)
    assert ranks.look() == [""] * 3
    ranks.run_alone(2, _FORWARD)
    with ranks.asks(1, _OTHER_BACKWARD):
        assert ranks.look() == [""] * 3


def test_a_question_that_was_answered_is_of_the_past() -> None:
    ranks = _in_step()
    with ranks.asks(0, _EAGER):
        assert ranks.look() == ["", ""]
    # The first rank's post still says that it waits in a comparison.
    ranks.logs[0].thread = 0
    assert ranks.run(_EAGER, _EAGER) == ["", ""]
    ranks.logs[0].thread = 0
    assert ranks.look() == ["", ""]


def test_failures_go_to_groups_that_share_programs() -> None:
    ranks, others = _in_step(), _in_step()
    for one, other in zip(ranks.logs, others.logs, strict=True):
        one.family = other.family = {one, other}
    ranks.run_alone(0, _FORWARD)
    with ranks.asks(1, _EAGER):
        failure, _ = ranks.look()
    assert failure and others.look() == [failure] * 2
    assert others.logs[0].agreement.failure() == failure


@pytest.mark.parametrize("number", [1, 2])
def test_a_rank_is_in_a_collective_of_torch_instead(number: int) -> None:
    """Rank 1 has completed as many programs as rank 0 or one less, and is in the barrier of a checkpoint."""
    ranks = _in_step()
    ranks.end(1)
    if number == 2:
        ranks.run(_FORWARD, _FORWARD)
        ranks.end(0, 1)
    ranks.run_alone(0, _BACKWARD if number == 2 else _FORWARD)
    assert ranks.look() == ["", ""]
    ranks.begun[1] += 1
    # It may only be slow after that.
    assert ranks.look() == ["", ""]
    with patch("fsdp_compile.runtime.collective_log.is_in_collective", lambda: True):
        failure, other = ranks.look()
    assert failure == other
    assert f"\n  rank 1: {_FORWARD if number == 2 else _BACKWARD} (program {4 if number == 1 else 5}), and another" in failure


def test_both_have_run_a_collective_of_torch() -> None:
    ranks = _in_step()
    ranks.end(0, 1)
    ranks.begun = [number + 1 for number in ranks.begun]
    # Rank 1 has posted that it is in the collective, which rank 0 has left.
    with patch("fsdp_compile.runtime.collective_log.is_in_collective", lambda: True):
        assert ranks.look() == ["", ""]
        ranks.run_alone(0, _FORWARD)
        assert ranks.look() == ["", ""]


def test_messages_between_two_ranks_make_counts_useless() -> None:
    ranks = _in_step()
    ranks.end(1)
    # Rank 1 has sent something to a third rank.
    ranks.begun[1] += 5
    ranks.run(_FORWARD, _FORWARD)
    ranks.end(0)
    ranks.run_alone(0, _BACKWARD)
    assert ranks.look() == ["", ""]


def _meet(ranks: Ranks, *meeting: int) -> None:
    for rank in meeting:
        ranks.end(rank)
        ranks.logs[rank].record_exception("OutOfMemoryError: in a test")


_MET = "\n  rank 1: OutOfMemoryError: in a test\n"


def test_an_exception_on_all_ranks() -> None:
    ranks = _in_step()
    for _ in range(2):
        _meet(ranks, 0, 1)
        # It ends a program and the forward around it.
        _meet(ranks, 0, 1)
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(CollectiveLog.settle, ranks.logs))
        assert ranks.run(_FORWARD, _FORWARD) == ["", ""] == ranks.look()


@pytest.mark.parametrize("does", ["waits in the program", "ran the next", "raises at another place", "waits in a comparison"])
def test_an_exception_on_one_rank(does: str) -> None:
    ranks = _in_step()
    ranks.run(_FORWARD, _FORWARD)
    _meet(ranks, 1)
    if does == "waits in the program":
        # Beyond the collective with which rank 1 left it.
        ranks.begun[0] += 1
    elif does == "ran the next":
        ranks.run_alone(0, _BACKWARD)
    elif does == "raises at another place":
        ranks.run_alone(0, _BACKWARD)
        _meet(ranks, 0)
    with ranks.asks(0, _OTHER_BACKWARD) if does == "waits in a comparison" else contextlib.nullcontext():
        failures = ranks.look()
    assert failures[0] == failures[1]
    assert _MET in f"{failures[0]}\n"
    for log in ranks.logs:
        with pytest.raises(RankFailed, match="A rank has failed"):
            log.check()


def test_a_rank_that_met_an_exception_waits_for_slow_ranks() -> None:
    ranks = _in_step()
    ranks.run(_FORWARD, _FORWARD)
    _meet(ranks, 1)
    # Rank 0 may still meet it.
    assert ranks.look() == ["", ""]
    with ThreadPoolExecutor(1) as pool:
        settling = pool.submit(ranks.logs[1].settle)
        time.sleep(0.1)
        assert not settling.done()
        _meet(ranks, 0)
        ranks.look()
        settling.result()


def test_a_rank_that_left_the_job_looks_no_more(one_rank: None) -> None:
    """Groups of its next job may have the names of those of this one, and must not be closed."""
    log, world = _in_step().logs[0], dist.group.WORLD
    lookout = Lookout(log)
    lookout.look(log, 1.0)
    dist.group.WORLD = None
    try:
        with pytest.raises(RuntimeError, match="left the job"):
            lookout.look(log, 2.0)
    finally:
        dist.group.WORLD = world


def test_many_ranks_compare_themselves_with_some() -> None:
    found = [neighbours(range(1000), rank) for rank in range(1000)]
    reached, new = {0}, {0}
    while new:
        new = {rank for known in new for rank in found[known]} - reached
        reached |= new
    assert len(reached) == 1000
    assert max(map(len, found)) < 24
    assert [neighbours(range(4), rank) for rank in range(4)] == [[1, 2, 3], [0, 2, 3], [0, 1, 3], [0, 1, 2]]


# Real ranks.

# Usually a second or two; much more where many processes share a core.
_SOON_S = 20


class Model(nn.Module):
    """A model of layers of equal size, so that messages of one would fit another."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.is_loud = False

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if self.is_loud:
            print(end="")
        return self.second(x)


def _exceed_recompile_limit(model: Model, compiled: Any) -> None:
    torch._dynamo.config.recompile_limit = 1


def _force_eager(model: Model, compiled: Any) -> None:
    torch.compiler.set_stance("force_eager")


def _break_graph(model: Model, compiled: Any) -> None:
    model.is_loud = True


def _keep_gradients(model: Model, compiled: Any) -> None:
    model.set_requires_gradient_sync(False)


def _freeze(model: Model, compiled: Any) -> None:
    model.first.weight.requires_grad_(False)


_DEVIATIONS: dict[str, Callable[[Model, Any], None]] = {
    function.__name__: function for function in (_exceed_recompile_limit, _force_eager, _break_graph, _keep_gradients, _freeze)
}


@contextlib.contextmanager
def _settings() -> Iterator[None]:
    """Restore, after the block, the settings that deviations change."""
    limit = torch._dynamo.config.recompile_limit
    try:
        yield
    finally:
        torch._dynamo.config.recompile_limit = limit
        torch.compiler.set_stance("default")


def _trainee(mesh: DeviceMesh) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model()
    for module in (model.first, model.second, model):
        fully_shard(module, mesh=mesh)
    return model, torch.compile(model, backend=fsdp_backend, options={"lowering": "aot_eager"}, dynamic=False)


def _outcome(step: Callable[[], Any]) -> tuple[str, float]:
    """Return the error, or an empty string, and the seconds that the step took."""
    start = time.monotonic()
    try:
        step()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def _deviate(mesh_shape: tuple[int, ...], name: str, odd_ranks: Sequence[int]) -> list[tuple[str, float]]:
    """Run two equal steps, then two in which ``odd_ranks`` deviate. Return the outcomes of these. Every rank calls this."""
    model, compiled = _trainee(mesh_of_new_groups(mesh_shape))
    for _ in range(2):
        compiled(torch.ones(2, 8)).sum().backward()
    with _settings():
        if dist.get_rank() in odd_ranks:
            _DEVIATIONS[name](model, compiled)
        return [_outcome(lambda: compiled(torch.ones(3, 8)).sum().backward()) for _ in range(2)]


_GRAPH = "graph that begins with 1: all_gather_into_tensor 36 x float32 over shard, bucket first"
_OPERATOR = "unshard of first outside of a compiled graph"
# The program that the odd rank is about to run, and the one that the others are in.
_SIDES = {
    "_exceed_recompile_limit": (_OPERATOR, f"forward {_GRAPH}"),
    "_force_eager": (_OPERATOR, f"forward {_GRAPH}"),
    "_break_graph": (f"forward {_GRAPH} (about", f"forward {_GRAPH}; 2: all_gather"),
    "_keep_gradients": ("backward graph that begins with 1: all_gather", "; 3: all_to_all_single 72 x float32 over shard"),
    # The step has another size, so all ranks compile anew. The call that finds the frozen parameter runs uncompiled all the same.
    "_freeze": ("unshard of first.weight outside of a compiled graph", f"forward {_GRAPH}"),
}


def _check(error: str, sides: dict[str, str], kind: type[RanksDisagree] = RanksDisagree) -> None:
    assert f"{kind.__name__}: " in error
    for who, what in sides.items():
        assert any(what in line for line in error.splitlines() if line.startswith(f"  {who}: ")), (who, what, error)


@pytest.mark.parametrize("odd_rank", [0, pytest.param(1, marks=pytest.mark.night)])
@pytest.mark.parametrize("name", _DEVIATIONS)
def test_one_rank_deviates(own_rank_pools: RankPools, name: str, odd_rank: int) -> None:
    odd, others = _SIDES[name]
    for first, second in own_rank_pools[2].run(_deviate, mesh_shape=(2,), name=name, odd_ranks=[odd_rank]):
        _check(first[0], {f"rank {odd_rank}": odd, f"rank {1 - odd_rank}": others})
        # The groups are unusable now, and every call raises the reason.
        _check(second[0], {f"rank {odd_rank}": odd})
        assert max(first[1], second[1]) < _SOON_S


@pytest.mark.parametrize("odd_ranks", [[3], pytest.param([2, 3], marks=pytest.mark.night)])
def test_with_replicas(own_rank_pools: RankPools, odd_ranks: list[int]) -> None:
    for (error, seconds), _ in own_rank_pools[4].run(_deviate, mesh_shape=(2, 2), name="_force_eager", odd_ranks=odd_ranks):
        # If both ranks of a shard group deviate, the replicas disagree.
        operator = _OPERATOR if len(odd_ranks) == 1 else "outside of a compiled graph"
        assert "RanksDisagree" in error and operator in error and "ward graph that begins with" in error
        assert seconds < _SOON_S


def _alternate() -> list[tuple[str, float]]:
    """Run two kinds of backward alike, then another kind on each rank. Return the outcomes. Every rank calls this."""
    model, compiled = _trainee(mesh_of_new_groups((2,)))
    outcomes = []
    for synchronised in (True, False, True, True, False, False, True, dist.get_rank() == 0):
        model.set_requires_gradient_sync(synchronised)
        outcomes.append(_outcome(lambda: compiled(torch.ones(2, 8)).sum().backward()))
    return outcomes


def test_ranks_choose_among_known_graphs(own_rank_pools: RankPools) -> None:
    for *before, (error, seconds) in own_rank_pools[2].run(_alternate):
        assert not any(message for message, _ in before)
        _check(error, {"rank 0": "backward graph", "rank 1": "backward graph"})
        assert seconds < _SOON_S


def _return() -> list[tuple[str, float]]:
    """Run uncompiled alike, then compiled on one rank. Later, call ``unshard`` on one rank. Every rank calls this."""
    outcomes = []
    model, compiled = _trainee(mesh_of_new_groups((2,)))
    with _settings():
        torch.compiler.set_stance("force_eager")
        for _ in range(2):
            outcomes.append(_outcome(lambda: compiled(torch.ones(2, 8)).sum().backward()))
        if dist.get_rank() == 1:
            torch.compiler.set_stance("default")
        outcomes.append(_outcome(lambda: compiled(torch.ones(2, 8)).sum().backward()))
    model, compiled = _trainee(mesh_of_new_groups((2,)))
    for gathers in (True, True, False, False, True, dist.get_rank() == 0):
        if gathers:
            model.first.unshard(async_op=True)
        outcomes.append(_outcome(lambda: compiled(torch.ones(2, 8)).sum().backward()))
    return outcomes


def test_ranks_that_were_allowed_to_run_uncompiled(own_rank_pools: RankPools) -> None:
    for *alike, (returned, seconds), first, second, third, fourth, fifth, (ahead, later) in own_rank_pools[2].run(_return):
        assert not any(message for message, _ in (*alike, first, second, third, fourth, fifth))
        _check(returned, {"rank 0": _OPERATOR, "rank 1": f"forward {_GRAPH}"})
        _check(ahead, {"rank 0": "unshard() of first outside of a compiled graph", "rank 1": f"forward {_GRAPH}"})
        assert max(seconds, later) < _SOON_S


class Counter:
    """A counter of comparisons in the context."""

    def __enter__(self) -> Counter:
        self._patch = _comparisons()
        self._compare = self._patch.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._patch.stop()

    def take(self) -> int:
        number = self._compare.call_count
        self._compare.reset_mock()
        return number


def _together(name: str, late_s: float) -> int:
    """Deviate on all ranks, one of them late, and check gradients. Every rank calls this.

    Return the number of comparisons in the last step.
    """
    model, compiled = _trainee(device_mesh((2,)))
    reference = Model()
    reference.load_state_dict({key: value.full_tensor() for key, value in model.state_dict().items()})

    def step(size: int) -> None:
        batch = torch.arange(8.0 * size).view(size, 8) / 10
        for forward in (reference, compiled):
            forward(batch).square().sum().backward()
        for (key, ours), theirs in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert (ours.grad is None) is (theirs.grad is None), key
            if theirs.grad is not None:
                torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad, msg=key)
                ours.grad = theirs.grad = None

    with _settings(), Counter() as counter:
        step(2)
        _DEVIATIONS[name](model, compiled)
        if name == "_freeze":
            reference.first.weight.requires_grad_(False)
        if dist.get_rank() == 1:
            time.sleep(late_s)
        for _ in range(3):
            step(3)
        assert counter.take() > 0
        step(3)
        return counter.take()


@pytest.mark.parametrize(
    ("name", "late_s"), [("_exceed_recompile_limit", 0), ("_force_eager", 3), ("_break_graph", 0), ("_freeze", 0)]
)
def test_what_all_ranks_do_is_right_and_asks_once(own_rank_pools: RankPools, name: str, late_s: float) -> None:
    assert own_rank_pools[2].run(_together, name=name, late_s=late_s) == [0, 0]


def _train_uncompiled() -> int:
    model, _ = _trainee(mesh_of_new_groups((2,)))
    with Counter() as counter:
        for _ in range(3):
            model(torch.ones(2, 8)).sum().backward()
        return counter.take()


def test_a_model_that_is_not_compiled_asks_nothing(own_rank_pools: RankPools) -> None:
    assert own_rank_pools[2].run(_train_uncompiled) == [0, 0]


class _Raises(torch.autograd.Function):
    """The identity. Its backward raises if told to."""

    told = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        _raise_if_told()
        return grad


def _raise_if_told(*_: Any) -> None:
    if _Raises.told:
        raise torch.OutOfMemoryError("in backward")


def _fail_in_backward(is_compiled: bool, where: str, failing: Sequence[int]) -> tuple[list[tuple[str, float]], list[Tensor]]:
    """Train four steps. In the third, backward raises on ranks of ``failing``, which catch that. Every rank calls this.

    Return the outcomes, and this rank's rows of parameters after the last step.
    """
    model, compiled = _trainee(mesh_of_new_groups((2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if where == "hook":
        model.first.weight.register_post_accumulate_grad_hook(_raise_if_told)
    x = torch.ones(2, 8, requires_grad=True)

    def step() -> None:
        # The backward of the input comes after all collectives.
        (compiled if is_compiled else model)(x if where == "hook" else _Raises.apply(x)).square().sum().backward()
        optimizer.step()

    outcomes = []
    for number in range(4):
        _Raises.told = number == 2 and dist.get_rank() in failing
        outcomes.append(_outcome(step))
        optimizer.zero_grad()
    # No collective: torch's cache has an equal mesh of another test, whose connections are closed.
    return outcomes, [param.to_local().detach() for param in model.parameters()]  # type: ignore[attr-defined]


@pytest.mark.parametrize("where", ["hook", "input"])
@pytest.mark.parametrize("is_compiled", [False, True])
def test_one_rank_goes_on_after_a_backward_that_failed(own_rank_pools: RankPools, is_compiled: bool, where: str) -> None:
    """It has skipped an optimizer step, so parameters would differ."""
    sides = {"rank 0": "forward graph" if is_compiled else "unshard of ", "rank 1": "OutOfMemoryError: in backward ("}
    if where == "input":
        # Autograd does not say what a function of the user raised.
        sides["rank 1"] = "an exception that ended a backward"
    results = own_rank_pools[2].run(_fail_in_backward, is_compiled=is_compiled, where=where, failing=[1])
    for rank, (outcomes, _) in enumerate(results):
        *before, (failed, _), (after, seconds) = outcomes
        assert [error for error, _ in before] == ["", ""]
        assert failed == ("OutOfMemoryError: in backward" if rank else "")
        _check(after, sides, RankFailed)
        assert seconds < _SOON_S


def _save_after_a_failed_hook() -> tuple[str, float]:
    """Fail in a hook of rank 1, after all collectives, and catch that. Return what comes of saving. Every rank calls this."""
    group = dist.new_group([0, 1])
    torch.manual_seed(0)
    model = fully_shard(Model(), mesh=DeviceMesh.from_group(group, "cpu"))
    model.first.weight.register_post_accumulate_grad_hook(_raise_if_told)
    _Raises.told = dist.get_rank() == 1
    with contextlib.suppress(torch.OutOfMemoryError):
        model(torch.ones(2, 8)).sum().backward()
    _Raises.told = False

    def save() -> None:
        model.state_dict()
        dist.barrier(group=group)

    return _outcome(save)


def test_no_rank_saves_after_an_exception_on_one_rank(own_rank_pools: RankPools) -> None:
    (first, first_s), (second, second_s) = own_rank_pools[2].run(_save_after_a_failed_hook)
    _check(second, {"rank 1": "OutOfMemoryError: in backward (test_collective_log.py:"}, RankFailed)
    # Torch's barrier fails, as connections are closed; the message is that of the side that notices first.
    assert "gloo" in first or "pair closure" in first
    assert not first.startswith("RankFailed")
    assert max(first_s, second_s) < _SOON_S


@pytest.mark.parametrize("is_compiled", [False, True])
def test_all_ranks_go_on_after_a_backward_that_failed(own_rank_pools: RankPools, is_compiled: bool) -> None:
    torch.manual_seed(0)
    reference = Model()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1)
    for _ in range(3):
        reference(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    results = own_rank_pools[2].run(_fail_in_backward, is_compiled=is_compiled, where="input", failing=[0, 1])
    for rank, (outcomes, params) in enumerate(results):
        assert [error for error, _ in outcomes] == ["", "", "OutOfMemoryError: in backward", ""]
        for ours, theirs in zip(params, reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.chunk(2)[rank].detach())
