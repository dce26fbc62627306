"""NCCL: how long its algorithms and protocols take to start, and how much of a link's rate they reach.

NCCL has several algorithms for a collective, and three protocols for each: LL and LL128 synchronise less, which is worth it for
small messages, and reach less of the rate than Simple. It takes the combination that its own model of time says is the fastest,
and so does :func:`ways`. Algorithm and protocol: the model, and all numbers here, are those of NCCL 2.30 (src/graph/tuning.cc,
`ncclTopoTuneModel` and the defaults of its tuner); its measured corrections for trees of medium size are left out.

- A *ring* sends to the next rank in n - 1 steps, and twice that to reduce and gather again. In a ring that visits all ranks
  of a node before it leaves it, all but one for each node are steps over NVLink.
- A *double binary tree*, for all-reduces alone: a chain in each node, and a tree of the nodes, up and down.
- *PAT*, for all-gathers and reduce-scatters of groups with one rank on each node.

Reductions by switches (NVLink SHARP, InfiniBand SHARP) are not modelled: of all-gathers and reduce-scatters, NCCL leaves them
to rings unless buffers are registered; an all-reduce inside of a node of Hopper is a quarter faster with them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One way to run a collective: it takes ``startup_s`` and the traffic over ``bytes_per_s``."""

    startup_s: float
    bytes_per_s: float
    name: str = ""


@dataclass(frozen=True)
class _Protocol:
    """Seconds of an algorithm with a protocol.

    Attributes:
        name: of the protocol.
        base_s: for each collective.
        near_s: for each step over NVLink.
        far_s: for each step over the network.
        lone_s: the same in a ring with one rank on each node.
        overhead_s: the least for a step over NVLink if the ring also crosses the network, as its proxy has to post each.
        near_part, far_part: of the link's rate, inside of a node and beyond.
        far_bytes_per_s: the most beyond a node.
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


# LL flags every four bytes with four more. Inside of a node NCCL limits it to 87.7, 141 and 282 GB/s on Ampere, Hopper and
# Blackwell, which is 0.37 to 0.41 of a ring's rate there; beyond, to 20.4 GB/s with Intel's CPUs. LL128 flags 120 bytes with 8.
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


def ways(kind: str, size: int, nodes: int, bytes_per_s: float) -> Iterator[Way]:
    """The ways of a collective.

    Args:
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        size: ranks of its group, more than one.
        nodes: that these are on, equally many on each.
        bytes_per_s: what a ring reaches with large messages, for the traffic that each rank sends in a ring.
    """
    passes = 2 if kind == "all_reduce" else 1
    for protocol in _RINGS:
        far_s = protocol.lone_s if size == nodes else protocol.far_s
        near_s = protocol.near_s if nodes == 1 else max(protocol.near_s, protocol.overhead_s)
        startup = protocol.base_s + passes * ((size - nodes) * near_s + (nodes - 1) * far_s)
        yield Way(startup, _rate(protocol, nodes, bytes_per_s), f"ring {protocol.name}")
    if kind == "all_reduce":
        for protocol in _TREES:
            startup = protocol.base_s + 2 * ((size // nodes - 1) * protocol.near_s + int(math.log2(nodes)) * protocol.far_s)
            # Its ranks send everything twice, those of a ring (n - 1) / n of that.
            yield Way(startup, _rate(protocol, nodes, bytes_per_s) * (size - 1) / size, f"tree {protocol.name}")
    elif size == nodes:
        startup = _PAT_BASE_S + int(math.log2(nodes)) * _PAT_LEVEL_S + size * _PAT_RANK_S
        yield Way(startup, bytes_per_s * _PAT_PART, "PAT")


def _rate(protocol: _Protocol, nodes: int, bytes_per_s: float) -> float:
    if nodes == 1:
        return bytes_per_s * protocol.near_part
    return min(bytes_per_s * protocol.far_part, protocol.far_bytes_per_s)
