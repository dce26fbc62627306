"""The search for a policy and the choice among trials, with made-up trials. Real trials are tested on whole models."""

from __future__ import annotations

import itertools
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from passes.auto.memory_budget import BudgetTooLow, Choice, search
from passes.auto.step_policy import RECOMPUTE_CHEAP, SAVE, Activation, OpenChoices, StepPolicy, Trial


def trial(peak_bytes: int, time_ns: int, kept: int = 0) -> Trial:
    units = tuple(f"blocks.{index}" for index in range(4))
    return Trial(StepPolicy(units[:kept], units[kept:], (), 4, SAVE), peak_bytes, time_ns)


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


# The search, for steps whose bytes and time are sums.


def open_choices(num_nodes: int = 100, offloads: tuple[int, ...] = (), in_nodes: tuple[str, ...] = ()) -> OpenChoices:
    host_bytes = 1 << 20 if offloads else 0
    return OpenChoices(
        ("d", "c", "b", "a"), (0, 1, 2, 3), 4, (SAVE, RECOMPUTE_CHEAP), num_nodes, offloads, in_nodes, host_bytes
    )


def attempt_with(seed: int, activations: int = 1) -> Callable[[StepPolicy], Trial]:
    """Return a function that tries a policy on a random model of a step.

    Bytes and time are sums of random numbers: of kept units, recomputed regions, cheap operators, and ``activations``
    activations of each region.
    """
    numbers = random.Random(seed)
    kept = {unit: (numbers.randint(1, 100), -numbers.randint(1, 100)) for unit in "abcd"}
    again = {number: (-numbers.randint(1, 100), numbers.randint(1, 100)) for number in range(4)}
    cheap = -numbers.randint(1, 100), numbers.randint(1, 100)
    copied = {number: [(numbers.randint(4, 100), numbers.randint(1, 100)) for _ in range(activations)] for number in range(4)}
    in_nodes = {unit: numbers.randint(1, 100) for unit in "abcd"}

    def attempt(policy: StepPolicy) -> Trial:
        parts: list[Sequence[int]] = [kept[unit] for unit in policy.kept] + [again[number] for number in policy.recomputed]
        # A copy within a node takes a fourth of the bytes, and saves ``saved`` percent of the time.
        parts += [
            (kept[unit][0] // 4, kept[unit][1] * saved // 100) for unit, saved in in_nodes.items() if unit in policy.in_nodes
        ]
        parts += [cheap] if policy.activation_budget == RECOMPUTE_CHEAP else []
        can_wait = []
        for number, values in copied.items():
            # A recomputed region saves only its input.
            saved = [(values[0][0] // 4, values[0][1] // 4)] if number in policy.recomputed else values
            for place, (nbytes, copying) in enumerate(saved):
                can_wait.append(Activation(number, place, f"{number}.{place}", nbytes))
                if policy.waits(number, place):
                    parts.append((-nbytes, copying))
        peak, time = (1000 + sum(part[index] for part in parts) for index in range(2))
        host_bytes = sum(saved.nbytes for saved in can_wait if policy.waits(saved.region, saved.place))
        return Trial(policy, peak, time, host_bytes, tuple(can_wait))

    return attempt


def every_policy(choices: OpenChoices) -> list[StepPolicy]:
    subsets = [
        [subset for size in range(len(values) + 1) for subset in itertools.combinations(values, size)]
        for values in (choices.units, choices.regions, choices.offloads, choices.in_nodes)
    ]
    every = [
        choices.policy(kept, recomputed, budget, offloaded, in_nodes)
        for kept, recomputed, offloaded, in_nodes, budget in itertools.product(*subsets, choices.activation_budgets)
    ]
    return list(dict.fromkeys(every))


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(5, 20))])
@pytest.mark.parametrize(
    ("offloads", "in_nodes", "policies"),
    [((), (), 512), ((0, 1, 2, 3), (), 8192), ((), ("d", "c", "b", "a"), 2592)],
    ids=["device", "host", "nodes"],
)
def test_search_comes_close_to_the_best(offloads: tuple[int, ...], in_nodes: tuple[str, ...], policies: int, seed: int) -> None:
    """For each budget, the search is compared with the best of all policies. Random sizes are harder than equal layers."""
    attempt, choices = attempt_with(seed), open_choices(30, offloads, in_nodes)
    best = [attempt(policy) for policy in every_policy(choices)]
    assert len(best) == len({trial.policy for trial in best}) == policies
    found, grid = search(choices, attempt), [attempt(policy) for policy in choices.grid()]
    assert len(found) == len({trial.policy for trial in found}) and set(grid) <= set(found) <= set(best)
    times: dict[str, list[int]] = {}
    for optimum in Choice.of(best, 1 << 20).frontier():
        for name, trials in (("grid", grid), ("search", found)):
            fitting = [trial.time_ns for trial in trials if trial.peak_bytes <= optimum.peak_bytes]
            times.setdefault(name, []).append(min(fitting, default=1 << 20) - optimum.time_ns)
    hits = {name: sum(not lost for lost in all_lost) / len(all_lost) for name, all_lost in times.items()}
    assert hits["search"] >= 0.95 > 0.5 > hits["grid"] and max(times["search"]) <= 0.05 * 1000


def test_large_graphs_are_tried_less() -> None:
    attempt = attempt_with(0)
    sizes = [len(search(open_choices(num_nodes), attempt)) for num_nodes in (100, 1000, 1 << 20)]
    assert sizes[0] > sizes[1] == 30 > sizes[2] == len(open_choices().grid()) == 20


@pytest.mark.parametrize("seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(5, 20))])
def test_the_host_makes_no_step_slower(seed: int) -> None:
    """Policies that are found without a host are also found with one, even if few policies are tried."""
    attempt = attempt_with(seed)
    without, granted = (search(open_choices(500, offloads), attempt) for offloads in ((), (0, 1, 2, 3)))
    assert len(without) < len(granted) and set(without) < set(granted)


def test_what_the_host_cannot_hold_is_no_trial() -> None:
    choices = replace(open_choices(offloads=(0, 1, 2, 3)), host_bytes=60)
    found = search(choices, attempt_with(0))
    assert 0 < max(trial.host_bytes for trial in found) <= 60


def small_choices(num_nodes: int = 10, host_bytes: int = 1 << 20) -> OpenChoices:
    return OpenChoices(("b", "a"), (0, 1, 2), 3, (SAVE, RECOMPUTE_CHEAP), num_nodes, (0, 1, 2), (), host_bytes)


def with_every_activation(attempt: Callable[[StepPolicy], Trial], policies: Sequence[StepPolicy]) -> list[Trial]:
    """Try policies with every subset of their waiting activations on the device."""
    found = []
    for whole in map(attempt, policies):
        for size in range(len(whole.waiting) + 1):
            stay = itertools.combinations(whole.waiting, size)
            found += [attempt(replace(whole.policy, on_device=tuple(sorted(values)))) for values in stay]
    return found


@pytest.mark.parametrize("seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.night) for seed in range(2, 6))])
@pytest.mark.parametrize(("host_bytes", "least_found"), [(1 << 20, 0.95), (150, 0.75)], ids=["large host", "small host"])
def test_search_finds_single_activations(host_bytes: int, least_found: float, seed: int) -> None:
    """The search finds the best of all subsets of three activations for each region.

    If the host holds only some of them, there are two limits to fill, and the best is found less often.
    """
    attempt, choices = attempt_with(seed, activations=3), small_choices(host_bytes=host_bytes)
    policies = every_policy(choices)
    best = with_every_activation(attempt, [one for one in policies if one.offloaded in ((), choices.offloads)])
    optima = Choice.of(list(filter(choices.allow, best)), 1 << 20).frontier()
    tried = {"search": search(choices, attempt), "whole": [one for one in map(attempt, policies) if choices.allow(one)]}
    assert all(one.host_bytes <= host_bytes for one in tried["search"])
    hits: dict[str, float] = {}
    for name, trials in tried.items():
        fitting = [[one.time_ns for one in trials if one.peak_bytes <= optimum.peak_bytes] for optimum in optima]
        found = [min(times, default=1 << 20) - optimum.time_ns for times, optimum in zip(fitting, optima, strict=True)]
        hits[name] = found.count(0) / len(optima)
    assert hits["search"] >= least_found > 0.3 > hits["whole"]
    assert min(one.peak_bytes for one in tried["search"]) <= 1.05 * optima[0].peak_bytes


def test_parts_of_what_all_regions_save() -> None:
    """Each region sends its largest activations that fit into a third, or two thirds, of its bytes.

    There are no such policies if regions are recomputed, or if only some of them wait on the host.
    """
    choices = small_choices()
    sizes = {0: (10, 50, 30), 1: (90, 5, 5)}

    def trial_of(policy: StepPolicy) -> Trial:
        saved = [Activation(number, place, "", nbytes) for number, each in sizes.items() for place, nbytes in enumerate(each)]
        return Trial(policy, 1000, 1000, 0, tuple(saved))

    def sent(policy: StepPolicy) -> list[int]:
        return [activation.nbytes for activation in trial_of(policy).waiting]

    found = list(choices.partial_offloads(trial_of(choices.policy("ba", (), SAVE, (0, 1)))))
    assert [sent(policy) for policy in found] == [[30, 5, 5], [10, 50, 5, 5]]
    for recomputed, offloaded in (((), ()), ((), (0,)), ((1,), (0, 1))):
        assert not list(choices.partial_offloads(trial_of(choices.policy("ba", recomputed, SAVE, offloaded))))


def test_grid_of_the_host() -> None:
    """In the grid, the first regions wait on the host: all that they save, or the inputs if they are recomputed."""
    choices = open_choices(offloads=(0, 1, 2, 3))
    added = choices.grid()[len(open_choices().grid()) :]
    assert {one.kept for one in added} == {("d",), ("d", "c", "b", "a")}
    found = {(one.activation_budget, one.recomputed, one.offloaded) for one in added}
    first = [(0,), (0, 1), (0, 1, 2)]
    assert found == {
        case for some in first for case in ((SAVE, (), some), (RECOMPUTE_CHEAP, (), some), (RECOMPUTE_CHEAP, some, some))
    }


def test_what_is_near() -> None:
    policy = StepPolicy(("d", "c"), ("b", "a"), (0,), 4, SAVE)
    near = list(open_choices().near(Trial(policy, 1, 1)))
    assert near[:2] == [policy, StepPolicy(("d", "c"), ("b", "a"), (0,), 4, RECOMPUTE_CHEAP)]
    assert (
        StepPolicy(("c",), ("d", "b", "a"), (0,), 4, SAVE) in near and StepPolicy(("d", "b"), ("c", "a"), (0,), 4, SAVE) in near
    )
    assert StepPolicy(("d", "c"), ("b", "a"), (), 4, SAVE) in near and StepPolicy(("d", "c"), ("b", "a"), (3,), 4, SAVE) in near
    assert all(one.regions == 4 and sorted(one.kept + one.resharded) == list("abcd") for one in near)


def test_activations_that_are_near() -> None:
    """Neighbours move a single activation, or equal ones of all regions, to or from the host; or they exchange two."""
    choices = small_choices()
    each = {number: [Activation(number, place, f"{number}.{place}", 10) for place in range(2)] for number in range(2)}
    policy = choices.policy("ba", (), SAVE, (0, 1), on_device=[each[0][1]])
    assert policy.waits(0, 0) and not policy.waits(0, 1) and policy.waits(1, 1) and not policy.waits(2, 0)
    trial = Trial(policy, 1, 1, 30, (*each[0], *each[1]))
    assert trial.waiting == [each[0][0], *each[1]]
    near = list(choices.near(trial))
    same = [one for one in near if one.kept == ("b", "a") and not one.recomputed and one.activation_budget == SAVE]
    found = {one.on_device for one in same if one.offloaded == (0, 1)}
    alone = {(each[0][1], one) for one in each[1]}
    assert found == {(), (each[0][0],), (each[0][1],), *alone, *((one,) for one in each[1])}
    # A region without waiting activations has no activation in ``on_device``.
    assert {one.on_device for one in same if one.offloaded == (1,)} == {(), (each[1][0],)}
    assert {one.on_device for one in same if one.offloaded == (0,)} == {(each[0][1],)}
    # A region that changes has none there either.
    assert {one.on_device for one in near if one.recomputed == (0,)} == {()}
    assert {one.on_device for one in near if one.recomputed == (1,)} == {(each[0][1],)}


def test_what_is_near_in_nodes() -> None:
    """A unit is kept whole, kept within the node, or not kept. Neighbours change one unit, or any two, in any way."""
    choices = open_choices(in_nodes=("d", "c", "b", "a"))
    policy = choices.policy(("d",), (), SAVE, in_nodes=("c",))
    assert policy == StepPolicy(("d",), ("c", "b", "a"), (), 4, SAVE, (), ("c",))

    def places(one: StepPolicy) -> str:
        return "".join("k" if unit in one.kept else "n" if unit in one.in_nodes else "-" for unit in "dcba")

    found = {places(one) for one in choices.near(Trial(policy, 1, 1))}
    every = map("".join, itertools.product("kn-", repeat=4))
    assert found == {one for one in every if sum(map(operator.ne, one, places(policy))) <= 2}


def test_nothing_open() -> None:
    """One policy is tried if the user has decided about all units, and torch's own setting about activations."""
    choices = OpenChoices((), (), 3, (0.5,), 100)
    assert [trial.policy for trial in search(choices, attempt_with(0))] == [StepPolicy((), (), (), 3, 0.5)]
