"""The choice among trials, on its own: what trials say of graphs is tested on whole models."""

from __future__ import annotations

import random

import pytest

from passes.auto.memory_budget import SAVE, BudgetTooLow, Choice, StepPolicy, Trial


def trial(peak_bytes: int, time_ns: int, kept: int = 0) -> Trial:
    units = tuple(f"blocks.{index}" for index in range(4))
    return Trial(StepPolicy(units[:kept], units[kept:], 0, 4, SAVE), peak_bytes, time_ns)


@pytest.mark.parametrize("seed", range(200))
def test_the_fastest_that_fits(seed: int) -> None:
    numbers = random.Random(seed)
    trials = [trial(numbers.randint(1, 20), numbers.randint(1, 20)) for _ in range(numbers.randint(1, 12))]
    times = []
    for limit in range(min(one.peak_bytes for one in trials), 22):
        chosen = Choice.of(trials, limit).chosen
        fitting = [one for one in trials if one.peak_bytes <= limit]
        assert chosen in fitting and chosen.time_ns == min(one.time_ns for one in fitting)
        assert chosen.peak_bytes == min(one.peak_bytes for one in fitting if one.time_ns == chosen.time_ns)
        assert chosen in Choice.of(trials, limit).frontier()
        times.append(chosen.time_ns)
    assert times == sorted(times, reverse=True)


def test_of_equals_the_first() -> None:
    trials = [trial(10, 5, kept=1), trial(10, 5, kept=2), trial(9, 6)]
    assert Choice.of(trials, 10).chosen is trials[0]
    assert Choice.of(trials, 9).chosen is trials[2]


def test_frontier_leaves_out_what_no_budget_chooses() -> None:
    trials = [trial(10, 5), trial(12, 5), trial(8, 7), trial(9, 8), trial(20, 1)]
    assert Choice.of(trials, 10).frontier() == [trial(8, 7), trial(10, 5), trial(20, 1)]


def test_nothing_fits() -> None:
    with pytest.raises(BudgetTooLow, match=r"= 7 bytes is too low.*that needs least needs 8 bytes"):
        Choice.of([trial(10, 5), trial(8, 7)], 7)
