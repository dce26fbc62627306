"""NCCL: the startup time of its algorithms and protocols, and the part of a link's rate that they reach.

NCCL has several algorithms for a collective, and three protocols for each. LL and LL128 synchronise less than Simple, which
pays for small messages, but they reach less of the rate. NCCL takes the combination that is the fastest by its own model of
time. :func:`algorithms` yields all combinations, of which the fastest counts. The model and all numbers are those of NCCL 2.30
(src/graph/tuning.cc, `ncclTopoTuneModel` and the defaults of its tuner). NCCL's measured corrections for trees of medium size
are left out.

- A *ring* of n ranks sends to the next rank in n - 1 steps; an all-reduce takes twice as many. A ring visits all ranks of a
  node before it leaves the node, so all steps but one for each node are over NVLink.
- A *double binary tree*, for all-reduces alone: a chain in each node, and a tree of the nodes, up and down.
- *PAT*, for all-gathers and reduce-scatters of groups with one rank on each node.

Reductions by switches (NVLink SHARP, InfiniBand SHARP) are not modelled. Unless buffers are registered, NCCL uses rings for
all-gathers and reduce-scatters. An all-reduce inside of a node of Hopper is a quarter faster with switches.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class CollectiveAlgorithm:
    """One way to run a collective, which takes ``startup_s + traffic / bytes_per_s`` seconds."""

    startup_s: float
    bytes_per_s: float
    name: str = ""


@dataclass(frozen=True)
class _Protocol:
    """The times and rates of an algorithm with one protocol.

    Attributes:
        name: the name of the protocol.
        base_s: seconds for each collective.
        near_s: seconds for each step over NVLink.
        far_s: seconds for each step over the network.
        lone_s: seconds for each step over the network in a ring with one rank on each node.
        overhead_s: the least seconds for a step over NVLink if the ring also crosses the network, whose proxy posts each step.
        near_part, far_part: the part of the link's rate that it reaches, inside of a node and between nodes.
        far_bytes_per_s: the highest rate between nodes.
    """

    name: str
    base_s: float
    near_s: float
    far_s: float
    lone_s: float = 0.0
    overhead_s: float = 0.0
    near_part: float = 1.0
    far_part: float = 1.0
    far_bytes_per_s: float = math.inf


# LL flags every four bytes with four more. Inside of a node, NCCL limits LL to 87.7, 141 and 282 GB/s on Ampere, Hopper and
# Blackwell, which is 0.37 to 0.41 of a ring's rate there. Between nodes, it limits LL to 20.4 GB/s with Intel's CPUs. LL128
# flags every 120 bytes with 8.
_LL_NEAR, _LL_FAR, _LL_MOST = 0.39, 0.5, 20.4e9
_RINGS = (
    _Protocol("LL", 6.6e-6, 0.6e-6, 2.7e-6, 5.0e-6, 1e-6, _LL_NEAR, _LL_FAR, _LL_MOST),
    _Protocol("LL128", 14e-6, 1.9e-6, 4.0e-6, 8.5e-6, 1e-6, 0.92, 0.92),
    _Protocol("Simple", 8.4e-6, 3.4e-6, 14e-6, 14e-6, 3e-6),
)
_TREES = (
    _Protocol("LL", 6.8e-6, 0.6e-6, 5.0e-6, near_part=0.92 / 3.8, far_part=0.92 / 3.8, far_bytes_per_s=_LL_MOST),
    _Protocol("LL128", 14e-6, 1.25e-6, 8.5e-6, near_part=0.92 * 7 / 9, far_part=0.92 * 120 / 128),
    _Protocol("Simple", 8.4e-6, 4.0e-6, 14e-6, near_part=0.92, far_part=0.92),
)
_PAT_BASE_S, _PAT_LEVEL_S, _PAT_RANK_S, _PAT_PART = 8e-6, 14e-6 / 3.5, 2.8e-6, 0.75


def algorithms(kind: str, size: int, nodes: int, bytes_per_s: float) -> Iterator[CollectiveAlgorithm]:
    """Yield the ways to run a collective: the combinations of algorithm and protocol.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        size: the number of ranks of its group, at least two.
        nodes: the number of nodes, which have equally many of the ranks.
        bytes_per_s: the rate of a ring with large messages, in bytes that each rank sends in a ring.
    """
    passes = 2 if kind == "all_reduce" else 1
    for protocol in _RINGS:
        far_s = protocol.lone_s if size == nodes else protocol.far_s
        near_s = protocol.near_s if nodes == 1 else max(protocol.near_s, protocol.overhead_s)
        startup = protocol.base_s + passes * ((size - nodes) * near_s + (nodes - 1) * far_s)
        yield CollectiveAlgorithm(startup, _rate(protocol, nodes, bytes_per_s), f"ring {protocol.name}")
    if kind == "all_reduce":
        for protocol in _TREES:
            startup = protocol.base_s + 2 * ((size // nodes - 1) * protocol.near_s + int(math.log2(nodes)) * protocol.far_s)
            # Rates are for a ring's traffic. Ranks of a tree send everything twice, those of a ring (n - 1) / n of that.
            yield CollectiveAlgorithm(startup, _rate(protocol, nodes, bytes_per_s) * (size - 1) / size, f"tree {protocol.name}")
    elif size == nodes:
        startup = _PAT_BASE_S + int(math.log2(nodes)) * _PAT_LEVEL_S + size * _PAT_RANK_S
        yield CollectiveAlgorithm(startup, bytes_per_s * _PAT_PART, "PAT")


def _rate(protocol: _Protocol, nodes: int, bytes_per_s: float) -> float:
    if nodes == 1:
        return bytes_per_s * protocol.near_part
    return min(bytes_per_s * protocol.far_part, protocol.far_bytes_per_s)
