"""Random models under random loops: fixed seeds show no difference, and faults are found and shrunk."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from unittest import mock

import pytest

from tests.common.distributed import RankPools
from tests.common.stored_graphs import storing

from .__main__ import script
from .case import *  # noqa: F403 (what a printed case is made of)
from .case import Block, Call, Case, Freeze, Micro, Model, Path, Step
from .compare import check
from .draw import draw
from .generate import generate
from .shrink import is_sound, shrink, simpler


def check_seeds(seeds: range, mesh: tuple[int, ...], system: str, is_small: bool) -> dict[int, list[str]]:
    """Return the differences from whole parameters by seed; a job for ranks."""
    cases = {seed: draw(seed, mesh, compiled=system != "eager", is_small=is_small) for seed in seeds}
    # Small models try the policies with which a search for a budget begins, and no neighbours of these.
    with mock.patch("passes.auto.memory_budget._MOST_NODES", 0) if is_small else nullcontext():
        return {seed: found for seed, case in cases.items() if (found := check(case, system))}


@pytest.mark.parametrize("first", range(0, 20, 4))
def test_small_models(first: int, rank_pools: RankPools) -> None:
    seeds = range(first, first + 4)
    assert rank_pools[2].run(check_seeds, seeds=seeds, mesh=(2,), system="aot_eager", is_small=True) == [{}, {}]


@pytest.mark.night
@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
@pytest.mark.parametrize(
    ("system", "seeds"),
    [
        # Tests of a minute or less share the work among processes.
        *(("eager", range(first, first + 20)) for first in range(100, 200, 20)),
        *(("aot_eager", range(first, first + 4)) for first in (100, 120)),
        *(("inductor", range(first, first + 1)) for first in (100, 120)),
    ],
)
def test_models(system: str, seeds: range, mesh: tuple[int, ...], rank_pools: RankPools) -> None:
    world = draw(seeds[0], mesh, compiled=False).world
    assert rank_pools[world].run(check_seeds, seeds=seeds, mesh=mesh, system=system, is_small=False) == [{}] * world


def check_stored(seeds: range, mesh: tuple[int, ...], system: str) -> list[list[str]]:
    """Return the differences of frames that are found in caches, in the place of a second process; a job for ranks."""
    cases = [draw(seed, mesh, compiled=True) for seed in seeds]
    with storing(frames=True):
        return [found for case in cases for _ in range(2) if (found := check(case, system))]


@pytest.mark.night
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize(("system", "count"), [("aot_eager", 2), ("inductor", 1)])
def test_stored_frames(system: str, count: int, mesh: tuple[int, ...], rank_pools: RankPools) -> None:
    world = draw(300, mesh, compiled=True).world
    assert rank_pools[world].run(check_stored, seeds=range(300, 300 + count), mesh=mesh, system=system) == [[]] * world


@pytest.mark.cuda
@pytest.mark.night
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_cuda_code(seed: int, mesh: tuple[int, ...]) -> None:
    case = draw(seed, mesh, compiled=True)
    cut_last = all(block.kind != "extended" for block in case.model.blocks)
    generate(replace(case, model=replace(case.model, cut_last=cut_last)))


# Faults are found.


def check_with_fault(case: Case, method: str) -> bool:
    """Return whether a call that whole parameters ignore shows as a difference; a job for ranks."""
    return bool(check(replace(case, events=(Call(method, "blocks.0", (1.0,)), *case.events)), "eager"))


def test_finds_a_wrong_factor(rank_pools: RankPools) -> None:
    case = Case((2,), Model((Block("tied"), Block("gains"))), (Micro(((2, 3),)), Step()))
    assert rank_pools[2].run(check_with_fault, case=case, method="set_gradient_divide_factor") == [True, True]
    assert rank_pools[2].run(check_seeds, seeds=range(40, 42), mesh=(2,), system="eager", is_small=True) == [{}, {}]


@pytest.mark.parametrize("seed", range(50))
def test_cases_are_equal_everywhere_and_print_as_code(seed: int) -> None:
    case = draw(seed, (2, 2), compiled=True)
    assert case == draw(seed, (2, 2), compiled=True) == eval(repr(case))
    compile(script(case, "eager", "whole"), "script", "exec")
    assert is_sound(case)


def test_shrinks_to_what_matters() -> None:
    """Shrinks a fault that needs a checkpointed block of one kind, and a call of a method of another block."""

    def fails(case: Case) -> bool:
        at = [f"blocks.{index}" for index, block in enumerate(case.model.blocks) if block.kind == "experts"]
        looped = any(block.kind == "looped" and block.checkpoint for block in case.model.blocks)
        return looped and any(isinstance(event, Call) and event.path in at for event in case.events)

    blocks = (Block("mlp"), Block("looped", "around", reshard=True), Block("gains"), Block("experts", unit="nested"))
    call = Call("set_modules_to_forward_prefetch", "blocks.3", ((Path("blocks.0"), Path("blocks.1")),))
    events = (Freeze("blocks.0", False), Micro(((3, 5), (1, 8)), (0, 2), 2), call, Step(0.5), Micro(((2, 2),), (3,)))
    case = Case((2,), Model(blocks, "float32", tied=True, again=2), events * 2, "adamw", ("hook",), (("min_bucket_bytes", 0),))
    found = shrink(case, fails)
    looped, experts = Block("looped", "around", ""), Block("experts", "", "")
    assert found.model == Model((looped, experts), "float32"), "a dtype is not simpler than another"
    call = Call("set_modules_to_forward_prefetch", "blocks.1", ((Path("blocks.0"),),))
    assert found.events == (Micro(((2, 2),)), call) or found.events == (call, Micro(((2, 2),)))
    assert (found.optimizer, found.features, found.options) == ("sgd", (), ())


def test_what_is_simpler_is_valid() -> None:
    """Events and ``again`` name only blocks that exist."""
    for seed in range(30):
        for case in simpler(draw(seed, (2,), compiled=False)):
            blocks = len(case.model.blocks)
            for event in case.events:
                paths = [event.path] if isinstance(event, Call | Freeze) else []
                paths += (
                    [one.path for one in event.args[0] if isinstance(one, Path)]
                    if isinstance(event, Call) and event.args and isinstance(event.args[0], tuple)
                    else []
                )
                assert all(not path or int(path.split(".")[1]) < blocks for path in paths)
                assert not isinstance(event, Micro) or all(index < blocks for index in event.skips)
            assert case.model.again is None or case.model.again < blocks
