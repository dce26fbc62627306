"""Formulae of one graph: the demand of each node on a machine, and the lifetime of each storage, as expressions."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
from torch.fx import Node

from passes.fx.graph import group_of, starts_collective
from passes.fx.symbolic_ranks import sizes_of_groups
from passes.fx.torch_internals.core import sympy_functions as functions
from passes.models.cost_model import COPIES, DEMANDED, Demand, collective_kind, demands, kernels, traffic_bytes, unwritten
from passes.models.memory_model import Lifetime, MemoryModel

from ..compiler.calls import GraphCall, UnitFacts
from .attribution import units_of_nodes
from .symbolic import SymbolicGraph


@dataclass(frozen=True, eq=False)
class GraphFormulae:
    """The formulae of one graph: expressions in the symbols of :data:`~fsdp_compile.explain.expressions.SYMBOLS`, or numbers.

    Attributes:
        order: the nodes of the graph, in order.
        demands: the demand of each node on the computing side.
        traffic: the bytes that the rank sends for each collective.
        kinds: the kind of each collective: "all_gather", "reduce_scatter" or "all_reduce".
        groups: the process group of each collective.
        storages: the storages of the graph, each with its bytes and lifetime.
        unit_of: the unit of each node, by its name in the graph.
    """

    order: Sequence[Node]
    demands: Mapping[Node, Demand]
    traffic: Mapping[Node, Any]
    kinds: Mapping[Node, str]
    groups: Mapping[Node, str]
    storages: Sequence[Lifetime]
    unit_of: Mapping[Node, str]

    @staticmethod
    def of(call: GraphCall, facts: Sequence[UnitFacts], sizes: Mapping[str, Any]) -> GraphFormulae:
        """Derive the formulae of the graph of ``call``.

        Args:
            call: a call of a symbolic graph.
            facts: the facts of the model's units.
            sizes: the number of ranks of each process group, by the group's name.

        Raises:
            NotImplementedError: the graph copies between device and host.
        """
        assert isinstance(call.graph, SymbolicGraph)
        graph = call.graph.graph_module.graph
        order = list(graph.nodes)
        if any(node.target in COPIES for node in order):
            raise NotImplementedError(
                "There are no formulae for a step with copies between device and host, as of activations that wait on the host "
                "(MUST_CPU_OFFLOAD, PREFER_CPU_OFFLOAD) or of shards (CPUOffloadPolicy): explain it at the sizes that you mean."
            )
        collectives = [node for node in order if starts_collective(node)]
        with call.graph.symbolically(), sizes_of_groups(sizes):
            asked = demands(graph)
            traffic = {node: traffic_bytes(node) for node in collectives}
            storages = MemoryModel(graph, unwritten(graph), kernels(graph), call.released).lifetimes(order)
        return GraphFormulae(
            order=order,
            demands={
                node: replace(one, **{name: usual(getattr(one, name)) for name in DEMANDED}) for node, one in asked.items()
            },
            traffic={node: usual(sent) for node, sent in traffic.items()},
            kinds={node: collective_kind(node) for node in collectives},
            groups={node: group_of(node) for node in collectives},
            storages=[replace(storage, num_bytes=usual(storage.num_bytes)) for storage in storages],
            unit_of=units_of_nodes(graph, call.units, facts, is_backward=call.is_backward),
        )


# Functions that torch writes sizes with, and what they are in functions of sympy.
_USUAL: Mapping[Any, Any] = {
    functions.FloorDiv: lambda base, divisor: sympy.floor(base / divisor),
    functions.CleanDiv: lambda base, divisor: base / divisor,
    functions.IntTrueDiv: lambda base, divisor: base / divisor,
    functions.FloatTrueDiv: lambda base, divisor: base / divisor,
    functions.CeilToInt: sympy.ceiling,
    functions.FloorToInt: sympy.floor,
    functions.TruncToInt: sympy.floor,
    functions.PowByNatural: sympy.Pow,
    functions.Mod: sympy.Mod,
    functions.PythonMod: sympy.Mod,
    functions.ToFloat: lambda value: value,
    functions.Max: sympy.Max,
    functions.Min: sympy.Min,
}


def usual(expression: Any) -> Any:
    """Replace torch's own functions in an expression by functions of sympy. Numbers stay as they are."""
    return _usual(expression) if isinstance(expression, sympy.Expr) else expression


@functools.lru_cache(maxsize=4096)
def _usual(expression: Any) -> Any:
    for own, other in _USUAL.items():
        if expression.has(own):
            expression = expression.replace(own, other)
    return expression
