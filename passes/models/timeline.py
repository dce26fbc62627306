"""Timeline: when the nodes of a schedule run, and what is waited for.

Compute runs nodes in their order. Beside it, each process group is a link, which carries one collective after the other. A wait
stops compute until its collective is over; that time is *exposed* communication.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..fx.graph import group_of, starts_collective
from .cost_model import node_ns, transfer_ns
from .hardware import Hardware

_wait = torch.ops._c10d_functional.wait_tensor.default


@dataclass(frozen=True)
class Costs:
    """The costs of the nodes of a graph, in nanoseconds.

    Attributes:
        compute: for each node, the time that it takes from compute.
        transfer: for each collective, on its link.
    """

    compute: Mapping[Node, int]
    transfer: Mapping[Node, int]

    @staticmethod
    def of(graph: Graph, hardware: Hardware) -> Costs:
        """The costs of a graph."""
        transfers = {node: transfer_ns(node, hardware) for node in graph.nodes if starts_collective(node)}
        return Costs(node_ns(graph, hardware), transfers)


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


def _awaited(wait: Node) -> Node:
    source = wait.all_input_nodes[0]
    return source.all_input_nodes[0] if source.target is operator.getitem else source


def simulate(order: Sequence[Node], costs: Costs) -> Timeline:
    """Run nodes in an order."""
    clock = exposed = 0
    free: dict[str, int] = {}
    arrives: dict[Node, int] = {}
    begins: dict[Node, int] = {}
    ends: dict[Node, int] = {}
    waits: dict[Node, tuple[int, Node]] = {}
    for node in order:
        arrives[node] = clock
        if node in costs.transfer:
            begins[node] = max(clock, free.get(group_of(node), 0))
            ends[node] = free[group_of(node)] = begins[node] + costs.transfer[node]
        elif node.target == _wait:
            over = ends.get(_awaited(node), clock)
            if over > clock:
                waits[node] = over - clock, _awaited(node)
                exposed += over - clock
                clock = over
        clock += costs.compute[node]
    return Timeline(arrives, begins, ends, clock, exposed, waits)
