"""Timeline: when the nodes of a schedule run, and how long they wait.

Compute runs nodes in their order. Beside it, each process group is a link, which carries one collective at a time. Groups that
use the same wires slow each other down (``in_flight.py``). Copies to the device and copies to the host have a link each, and
share nothing. A wait stops compute until its transfer is over; that time is *exposed*. At the end of a graph, compute waits for
copies to the host without a wait in the graph. These are gradients, for which the host waits there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Graph, Node

from ..collectives.host_copies import copy_to_host, wait_copy, wait_offload
from ..fx.graph import group_of, memory_of, starts_collective
from .cost_model import COPIES, is_transfer, layout_of, node_ns, transfer_kind, transfer_ns
from .hardware import Hardware
from .in_flight import InFlight

_WAITS = {torch.ops._c10d_functional.wait_tensor.default, wait_copy, wait_offload}


@dataclass(frozen=True)
class Costs:
    """The costs of the nodes of a graph, in nanoseconds.

    Attributes:
        compute: for each node, its time on the computing side.
        transfer: for each collective and each copy between host and device, its time in flight if it has its wire for itself.
        link: for each transfer, the name of its link: its process group, or "to_device" or "to_host".
        wire: for each transfer, the name of its wire, which transfers of other links may share.
    """

    compute: Mapping[Node, int]
    transfer: Mapping[Node, int]
    link: Mapping[Node, str]
    wire: Mapping[Node, str]

    @property
    def collectives(self) -> int:
        """The number of transfers that are collectives."""
        return sum(map(starts_collective, self.transfer))

    @staticmethod
    def of(graph: Graph, hardware: Hardware) -> Costs:
        """Compute the costs of the nodes of a graph."""
        transfers = {node: transfer_ns(node, hardware) for node in graph.nodes if is_transfer(node)}
        links = {node: transfer_kind(node) if node.target in COPIES else group_of(node) for node in transfers}
        wires = {node: link if node.target in COPIES else hardware.wire(layout_of(link)) for node, link in links.items()}
        return Costs(node_ns(graph, hardware), transfers, links, wires)


@dataclass(frozen=True)
class Timeline:
    """The times of a schedule, in nanoseconds.

    Attributes:
        arrives: for each node, when the computing side reaches it.
        begins, ends: for each transfer, when it begins and ends on its link.
        total: when the last node is done.
        exposed: the time within ``total`` in which the computing side waits.
        waits: for each node that stops compute, how long it waits, and for which transfer.
    """

    arrives: Mapping[Node, int]
    begins: Mapping[Node, int]
    ends: Mapping[Node, int]
    total: int
    exposed: int
    waits: Mapping[Node, tuple[int, Node]]


def awaited(node: Node) -> list[Node]:
    """Return the transfers that a node waits for.

    A wait has one transfer. The output of a graph waits for the copies to the host among the graph's results. Other nodes wait
    for none.
    """
    if node.op == "output":
        return [source for source in map(memory_of, node.all_input_nodes) if source.target == copy_to_host]
    return [memory_of(node.all_input_nodes[0])] if node.target in _WAITS else []


def simulate(order: Sequence[Node], costs: Costs) -> Timeline:
    """Simulate nodes that run in an order.

    A wait before the start of its transfer takes no time. Such orders occur while a schedule is made.
    """
    clock = exposed = 0
    in_flight: InFlight[Node] = InFlight()
    arrives: dict[Node, int] = {}
    waits: dict[Node, tuple[int, Node]] = {}
    for node in order:
        arrives[node] = clock
        if node in costs.transfer:
            in_flight.start(node, clock, costs.transfer[node], costs.link[node], costs.wire[node])
        ends = {transfer: in_flight.end(transfer) for transfer in awaited(node) if transfer in in_flight}
        last = max(ends, key=ends.__getitem__, default=None)
        if last is not None and ends[last] > clock:
            waits[node] = ends[last] - clock, last
            exposed += ends[last] - clock
            clock = ends[last]
        clock += costs.compute[node]
    in_flight.finish()
    return Timeline(arrives, in_flight.begins, in_flight.ends, clock, exposed, waits)
