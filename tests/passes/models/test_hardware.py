import itertools
import json
from pathlib import Path

import pytest

from passes.models.group_layout import GroupLayout
from passes.models.hardware import Hardware, Link, Links, known_hardware, sent_bytes

KINDS = ("all_gather", "reduce_scatter", "all_reduce")
GPUS = [known_hardware("cuda", name) for name in ("A100", "H100", "H200", "B200")]
H100 = GPUS[1]
MIB = 1 << 20


def seconds(hardware: Hardware, kind: str, unsharded_bytes: float, size: int, stride: int = 1) -> float:
    return hardware.transfer_s(kind, sent_bytes(kind, unsharded_bytes, size), GroupLayout(size, stride))


@pytest.mark.parametrize(
    ("ranks", "size", "stride", "per_node", "nodes"),
    [
        ([0, 1, 2, 3], 4, 1, 4, 1),
        (list(range(24)), 24, 1, 8, 3),
        ([3, 11, 19, 27], 4, 8, 1, 4),
        ([0, 4, 8, 12], 4, 4, 2, 2),
        ([1, 5], 2, 4, 2, 1),
        ([0, 64], 2, 64, 1, 2),
        ([5], 1, 1, 1, 1),
        ([0, 1, 16], 3, 8, 1, 3),
    ],
)
def test_how_groups_lie_on_nodes_of_eight(ranks: list[int], size: int, stride: int, per_node: int, nodes: int) -> None:
    layout = GroupLayout.of(ranks)
    assert (layout, layout.per_node(8), layout.nodes(8)) == (GroupLayout(size, stride), per_node, nodes)


@pytest.mark.parametrize("hardware", GPUS, ids=lambda hardware: hardware.name)
@pytest.mark.parametrize("kind", KINDS)
def test_more_bytes_and_more_ranks_take_longer(hardware: Hardware, kind: str) -> None:
    sizes = [2, 4, 8, 16, 64, 512, 16_384]
    for unsharded, stride in itertools.product((1.0, 1e6, 1e9), (1, 8)):
        times = [seconds(hardware, kind, unsharded, size, stride) for size in sizes]
        assert times == sorted(times) and times[0] < times[-1]
        assert all(seconds(hardware, kind, 2 * unsharded, size, stride) > times[index] for index, size in enumerate(sizes))
    # One rank on each node has one network adapter, eight have eight.
    assert seconds(hardware, kind, 1e8, 16, 8) > seconds(hardware, kind, 1e8, 16, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_sent_to_oneself(kind: str) -> None:
    assert sent_bytes(kind, 1e9, 1) == 0
    assert H100.transfer_s(kind, 0.0, GroupLayout(1)) == H100.taken_s(kind, 0.0, GroupLayout(1)) == 0.0


def test_large_messages_reach_the_rate_of_what_they_cross() -> None:
    def bus_rate(kind: str, size: int, stride: int = 1) -> float:
        return sent_bytes(kind, 2.0**40, size) / seconds(H100, kind, 2.0**40, size, stride)

    ring = H100.within_node.all_gather.bytes_per_s
    for kind in KINDS:
        assert bus_rate(kind, 8) == pytest.approx(ring, rel=1e-3)
        # A ring through nodes leaves each node by its eight adapters. These limit the rate, unless NVLink is slower.
        assert bus_rate(kind, 32) == pytest.approx(min(ring, 8 * 47e9), rel=2e-3)
        # A group of every eighth rank has one adapter on each node, a group of every fourth rank two.
        assert bus_rate(kind, 4, 8) == pytest.approx(ring / 8, rel=1e-3)
        assert bus_rate(kind, 4, 4) == pytest.approx(ring / 4, rel=1e-3)


@pytest.mark.parametrize(
    ("hardware", "size", "mib", "measured_s"),
    # Published bus bandwidths of all-reduces in rings (ml-engineering, network): one node of H200 up to the size at which its
    # switches reduce, four nodes of H200 with Elastic Fabric Adapters, one and four nodes of B200.
    [
        (GPUS[2], 8, 1, 1.75 * MIB / 39.93e9),
        (GPUS[2], 8, 16, 1.75 * 16 * MIB / 219.89e9),
        (GPUS[2], 8, 16 << 10, 1.75 * (16 << 30) / 367.61e9),
        (GPUS[2], 32, 4 << 10, 1.9375 * (4 << 30) / 364.65e9),
        (GPUS[3], 8, 64, 1.75 * 64 * MIB / 400.60e9),
        (GPUS[3], 32, 1 << 10, 1.9375 * (1 << 30) / 361.99e9),
        (GPUS[3], 32, 16 << 10, 1.9375 * (16 << 30) / 381.80e9),
    ],
)
def test_close_to_published_measurements(hardware: Hardware, size: int, mib: int, measured_s: float) -> None:
    assert seconds(hardware, "all_reduce", mib * MIB, size) == pytest.approx(measured_s, rel=0.4 if mib < 1024 else 0.1)


def test_starting_dominates_small_messages_at_scale() -> None:
    # NCCL's ring has a step for each rank, its tree two steps for each doubling of the number of nodes.
    rings = [H100.transfer_s("all_gather", 1e3, GroupLayout(size)) for size in (1024, 16_384)]
    assert rings[1] == pytest.approx(16 * rings[0], rel=0.05)
    trees = [H100.transfer_s("all_reduce", 1e3, GroupLayout(size)) for size in (1024, 16_384)]
    assert trees[1] - trees[0] == pytest.approx(2 * 4 * 5e-6, rel=1e-3)


def test_copies_of_newer_devices_are_faster() -> None:
    rates = [hardware.host.to_device_bytes_per_s for hardware in GPUS]
    assert rates == sorted(rates) and rates[0] < rates[1]
    assert H100.host.copy_s("to_host", 55e9) == pytest.approx(1.0, rel=1e-3)


def test_files_without_rates_of_copies_have_a_default(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    H100.save(path)
    assert Hardware.load(path) == H100
    values = json.loads(path.read_text())
    del values["host"]
    path.write_text(json.dumps(values))
    assert Hardware.load(path).host == GPUS[0].host


def test_time_in_flight_and_bytes_are_taken_from_compute() -> None:
    link = Link(1e-5, 1e9, taken_s=1e-6, taken_s_per_byte=1e-10, taken_part=0.25)
    hardware = Hardware("test", {"float32": 1e9}, 1e10, 0.0, 8, Links(link, link, link), Links(link, link, link))
    assert hardware.taken_s("all_gather", 1e6, GroupLayout(8)) == pytest.approx(1e-6 + 1e-4 + 0.25 * (1e-5 + 1e-3))


def test_a_link_without_a_library_costs_what_was_measured() -> None:
    links = Links(*[Link(1e-4, 1e9, hop_s=1e-5)] * 3)
    hardware = Hardware("test", {"float32": 1e9}, 1e10, 0.0, 2, links, links)
    assert hardware.transfer_s("all_gather", 1e6, GroupLayout(2)) == pytest.approx(1e-4 + 1e-3)
    assert hardware.transfer_s("all_gather", 1e6, GroupLayout(6)) == pytest.approx(1e-4 + 4e-5 + 1e-3)
    # A group of every second rank has half of the node's network.
    assert hardware.transfer_s("all_gather", 1e6, GroupLayout(2, 2)) == pytest.approx(1e-4 + 2e-3)
    assert hardware.knee_bytes("all_gather", GroupLayout(2)) == pytest.approx(1e5)


def test_the_knee_is_where_starting_is_half() -> None:
    for kind, size in itertools.product(KINDS, (8, 128)):
        knee = H100.knee_bytes(kind, GroupLayout(size))
        way = max(H100.algorithms(kind, GroupLayout(size)), key=lambda way: way.bytes_per_s)
        assert 2 * way.startup_s == pytest.approx(way.startup_s + knee / way.bytes_per_s)
    assert H100.knee_bytes("all_gather", GroupLayout(1)) == 0


def test_attention_has_a_rate_of_its_own_where_one_is_known() -> None:
    assert H100.rate("bfloat16", attention=True) < H100.rate("bfloat16") < H100.peak("bfloat16")
    assert H100.rate("float32", attention=True) == H100.rate("float32")
    assert H100.rate("int8") == H100.rate("float32")


def test_files_of_earlier_calibrations_load(tmp_path: Path) -> None:
    path = tmp_path / "hardware.json"
    link = {"latency_s": 3e-4, "bytes_per_s": 7e8, "taken_s": 1e-4, "taken_s_per_byte": 1e-9}
    links = {"all_gather": link, "reduce_scatter": link, "all_reduce": link}
    values = {"flops_per_s": {"float32": 5e10}, "bytes_per_s": 1e10, "kernel_s": 5e-6, "ranks_per_node": 2}
    path.write_text(json.dumps({"name": "cpu", **values, "within_node": links, "between_nodes": links}))
    hardware = Hardware.load(path)
    assert hardware.transfer_s("all_gather", 7e5, GroupLayout(2)) == pytest.approx(3e-4 + 1e-3)
    assert hardware.taken_s("all_gather", 7e5, GroupLayout(2)) == pytest.approx(1e-4 + 7e-4)
    for machine in (hardware, *GPUS):
        machine.save(path)
        assert Hardware.load(path) == machine
