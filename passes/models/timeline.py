"""Timeline: when the nodes of a schedule run, and what is waited for.

Compute runs nodes in their order. Beside it, each process group is a link, which carries one collective after the other; groups
that use the same wires slow each other down (``in_flight.py``). A wait stops compute until its collective is over; that time is
*exposed* communication.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..fx.graph import group_of, starts_collective
from .cost_model import layout_of, node_ns, transfer_ns
from .hardware import Hardware
from .in_flight import InFlight

_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Costs:
    """The costs of the nodes of a graph, in nanoseconds.

    Attributes:
        compute: for each node, the time that it takes from compute.
        transfer: for each collective, on its link, with nothing else on its wire.
        wire: for each collective, what it shares with those of other groups.
    """

    compute: Mapping[Node, int]
    transfer: Mapping[Node, int]
    wire: Mapping[Node, str]

    @staticmethod
    def of(graph: Graph, hardware: Hardware) -> Costs:
        """The costs of a graph."""
        transfers = {node: transfer_ns(node, hardware) for node in graph.nodes if starts_collective(node)}
        wires = {node: hardware.wire(layout_of(group_of(node))) for node in transfers}
        return Costs(node_ns(graph, hardware), transfers, wires)


@dataclass(frozen=True)
class Timeline:
    """A schedule in time, in nanoseconds.

    Attributes:
        arrives: when the computing side comes to each node.
        begins, ends: when each collective is on its link.
        total: when the last node is done.
        exposed: how much of it the computing side waits.
        waits: for each wait, how long, and for which collective; those that hold nothing up are left out.
    """

    arrives: Mapping[Node, int]
    begins: Mapping[Node, int]
    ends: Mapping[Node, int]
    total: int
    exposed: int
    waits: Mapping[Node, tuple[int, Node]]


def is_wait(node: Node) -> bool:
    """Whether a node waits for a collective."""
    return node.target == _wait


def awaited(wait: Node) -> Node:
    """What a wait is for."""
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def simulate(order: Sequence[Node], costs: Costs) -> Timeline:
    """Run nodes in an order. What is waited for ahead of its start, as while a schedule is made, holds nothing up."""
    clock = exposed = 0
    in_flight: InFlight[Node] = InFlight()
    arrives: dict[Node, int] = {}
    waits: dict[Node, tuple[int, Node]] = {}
    for node in order:
        arrives[node] = clock
        if node in costs.transfer:
            in_flight.start(node, clock, costs.transfer[node], group_of(node), costs.wire[node])
        elif is_wait(node) and awaited(node) in in_flight:
            over = in_flight.end(awaited(node))
            if over > clock:
                waits[node] = over - clock, awaited(node)
                exposed += over - clock
                clock = over
        clock += costs.compute[node]
    in_flight.finish()
    return Timeline(arrives, in_flight.begins, in_flight.ends, clock, exposed, waits)
