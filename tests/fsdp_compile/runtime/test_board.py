"""Positions of ranks tell whether two have parted. ``test_collective_log.py`` has the cases in which watchdogs compare them."""

from __future__ import annotations

from fsdp_compile.runtime.board import IN_TORCH, Position, Step, difference


def _steps(*titles: str) -> list[Step]:
    return [Step(number, title, 10 * number, begun=(number,)) for number, title in enumerate(titles)]


def test_a_position_is_text_in_the_store() -> None:
    position = Position(3, 1 << 63, "forward graph", (1, 2), (4, "backward graph"), (5, 6), IN_TORCH, "train.py:8", (2, 7, "E"))
    assert Position.unpack(position.pack().encode()) == position


def test_a_rank_that_is_stuck_leaves_a_program_that_another_has_left() -> None:
    steps = _steps("nothing", "forward", "backward")
    post = Position(3, 30, "OutOfMemoryError: here", (3,), exception=(3, 30, "OutOfMemoryError: here"))
    # It may be slow, and meet the exception, too.
    assert difference(steps, post, 0) is None
    found = difference(steps, post, 0, is_stuck=True)
    assert found is not None
    assert (found.own, found.other, found.failed) == ("backward (program 2 over this group)", "OutOfMemoryError: here", "other")
    # The exception is of another program.
    assert difference(steps[:2], post, 0, is_stuck=True) is None


def test_a_rank_that_is_ahead_has_met_an_exception_or_not() -> None:
    steps = [*_steps("nothing", "forward"), Step(2, "exception", 20, error="OutOfMemoryError: here")]
    assert difference(steps, Position(5, 50, "forward", (5,), exception=(2, 20, "OutOfMemoryError: there")), 0) is None
    found = difference(steps, Position(5, 50, "forward", (5,)), 0)
    assert found is not None
    assert (found.own, found.failed) == ("OutOfMemoryError: here", "own")
