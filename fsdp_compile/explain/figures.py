"""Figures of one lowered graph on one machine, by the models of :mod:`passes.models`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from passes.fx.graph import starts_collective
from passes.ir.work import bucket
from passes.models.cost_model import kernels, node_flops, traffic_bytes, transfer_kind, unwritten
from passes.models.hardware import Hardware
from passes.models.memory_model import Breakdown, MemoryModel
from passes.models.timeline import Costs, Timeline, simulate

from ..compiler.calls import GraphCall, UnitFacts
from .attribution import NO_UNIT, shares, units_of_nodes


@dataclass(eq=False)
class UnitFigures:
    """The figures of one unit in a graph; see :class:`~fsdp_compile.explain.parts.UnitReport`.

    Times are in nanoseconds. ``sent`` has bytes by kind of transfer.
    """

    sent: dict[str, float] = field(default_factory=dict)
    compute: float = 0.0
    transfer: float = 0.0
    exposed: float = 0.0
    kernels: int = 0
    collectives: float = 0.0


@dataclass(eq=False)
class GraphFigures:
    """The figures of one graph.

    Attributes:
        order: its nodes, in order.
        costs, timeline: the costs of its nodes, and when they run.
        sent: for each collective, the bytes that the rank sends; for each copy between device and host, the bytes that it
            copies.
        kernels: its kernels, each as a list of nodes.
        memory: its live bytes.
        flops: the flops of its products, by dtype.
        units: the figures of its units, by their names in the graph.
        unit_of: the unit of each node, by its name in the graph.
    """

    order: Sequence[Node]
    costs: Costs
    timeline: Timeline
    sent: Mapping[Node, float]
    kernels: Sequence[Sequence[Node]]
    memory: Breakdown
    flops: Mapping[str, int]
    units: Mapping[str, UnitFigures]
    unit_of: Mapping[Node, str]

    @staticmethod
    def of(call: GraphCall, facts: Sequence[UnitFacts], hardware: Hardware) -> GraphFigures:
        """Compute the figures of the graph of ``call``."""
        graph = call.graph.graph_module.graph
        order = list(graph.nodes)
        costs = Costs.of(graph, hardware)
        timeline = simulate(order, costs)
        flops: Counter[str] = Counter()
        for product in map(node_flops, order):
            if product is not None:
                flops[product[0]] += product[1]
        memory = MemoryModel(graph, unwritten(graph), kernels(graph), call.released).breakdown(order)
        unit_of = units_of_nodes(graph, call.units, facts, is_backward=call.is_backward)
        found = kernels(graph)
        sent = {collective: traffic_bytes(collective) for collective in costs.transfer}
        units = _by_unit(costs, timeline, sent, found, unit_of, call.units, {unit.name: unit.shard_bytes for unit in facts})
        return GraphFigures(order, costs, timeline, sent, found, memory, flops, units, unit_of)


def _by_unit(
    costs: Costs,
    timeline: Timeline,
    sent: Mapping[Node, float],
    kernels: Sequence[Sequence[Node]],
    unit_of: Mapping[Node, str],
    names: Collection[str],
    shard_bytes: Mapping[str, int],
) -> dict[str, UnitFigures]:
    units: dict[str, UnitFigures] = {}

    def figures(name: str) -> UnitFigures:
        return units.setdefault(name, UnitFigures())

    def parts(collective: Node) -> dict[str, float]:
        done = bucket(collective)
        return {unit_of.get(collective, NO_UNIT): 1.0} if done is None else shares(done, names, shard_bytes)

    for node, compute in costs.compute.items():
        if compute:
            figures(unit_of[node]).compute += compute
    for kernel in kernels:
        figures(unit_of[kernel[0]]).kernels += 1
    for collective, transfer in costs.transfer.items():
        kind, traffic = transfer_kind(collective), sent[collective]
        for name, share in parts(collective).items():
            figures(name).sent[kind] = figures(name).sent.get(kind, 0.0) + traffic * share
            figures(name).transfer += transfer * share
            figures(name).collectives += share * starts_collective(collective)
    for waited, collective in timeline.waits.values():
        for name, share in parts(collective).items():
            figures(name).exposed += waited * share
    return units
