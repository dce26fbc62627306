import random

from passes.models.in_flight import InFlight


def test_a_group_carries_one_after_the_other() -> None:
    flight: InFlight[str] = InFlight()
    flight.start("a", 10, 100, "shard", "node")
    flight.start("b", 20, 50, "shard", "node")
    assert flight.end("b") == 160
    flight.start("c", 200, 5, "shard", "node")
    flight.finish()
    assert (flight.begins, flight.ends) == ({"a": 10, "b": 110, "c": 200}, {"a": 110, "b": 160, "c": 205})
    assert "a" in flight and "d" not in flight


def test_groups_on_one_wire_share_it() -> None:
    flight: InFlight[str] = InFlight()
    flight.start("gather", 0, 100, "shard", "network")
    flight.start("reduce", 40, 100, "replicate", "network")
    # The gather runs alone for 40, then its last 60 at half the rate. The reduction then has 40 left.
    assert flight.end("gather") == 160
    assert flight.end("reduce") == 200


def test_groups_on_different_wires_do_not() -> None:
    flight: InFlight[str] = InFlight()
    flight.start("gather", 0, 100, "shard", "node")
    flight.start("reduce", 40, 100, "replicate", "network")
    flight.finish()
    assert flight.ends == {"gather": 100, "reduce": 140}


def test_what_is_queued_in_a_group_shares_nothing_yet() -> None:
    flight: InFlight[str] = InFlight()
    flight.start("a", 0, 100, "shard", "network")
    flight.start("b", 0, 100, "shard", "network")
    flight.start("c", 0, 30, "replicate", "network")
    flight.finish()
    assert flight.ends == {"c": 60, "a": 130, "b": 230}
    assert flight.begins == {"a": 0, "b": 130, "c": 0}


def test_a_wire_is_busy_for_the_sum_of_what_it_carries() -> None:
    chance = random.Random(0)
    for _ in range(50):
        flight: InFlight[int] = InFlight()
        durations = [chance.randrange(1000) for _ in range(8)]
        for index, duration in enumerate(durations):
            flight.start(index, 0, duration, f"group {chance.randrange(3)}", "network")
        flight.finish()
        # Times are rounded up to whole nanoseconds whenever a transfer ends, by less than one for each of the three groups.
        assert sum(durations) <= max(flight.ends.values()) <= sum(durations) + 3 * len(durations)
        assert all(flight.ends[index] - flight.begins[index] >= duration for index, duration in enumerate(durations))
