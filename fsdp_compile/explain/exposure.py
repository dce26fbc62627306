"""Exposure: which communication a graph waits for, and why it was not over by then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from passes.fx.graph import group_of
from passes.ir.work import bucket
from passes.models.cost_model import collective_kind

from ..compiler.calls import GraphCall
from .attribution import unit_of_bucket
from .figures import GraphFigures

# Compute that hides less than this part of a collective is none to speak of.
_NEXT_TO_NOTHING = 20

#: What the kinds of collectives are called in sentences.
WORDS = {"all_gather": "gather", "reduce_scatter": "reduction", "all_reduce": "all-reduce"}


@dataclass(frozen=True)
class Exposure:
    """Communication that is waited for.

    Attributes:
        unit: whose parameters or gradients it carries; several are joined by "+".
        kind: "all_gather", "reduce_scatter" or "all_reduce".
        stage: "forward" or "backward".
        call: which graph call of the step, from 0.
        exposed_ns: how long it is waited for.
        transfer_ns: how long it takes.
        cause: "nothing beside it", "link busy", "wire shared" or "compute too short".
        reason: the same in words.
    """

    unit: str
    kind: str
    stage: str
    call: int
    exposed_ns: int
    transfer_ns: int
    cause: str
    reason: str

    def __str__(self) -> str:
        return f"{WORDS[self.kind]} of {self.unit} in {self.stage}"


def exposures(figures: GraphFigures, call: GraphCall, index: int) -> list[Exposure]:
    """What a call waits for, in order."""
    timeline, transfers = figures.timeline, figures.costs.transfer
    stage = "backward" if call.is_backward else "forward"
    ended = {(group_of(collective), timeline.ends[collective]): collective for collective in transfers}
    found = []
    for wait, (waited, collective) in timeline.waits.items():
        queued = timeline.begins[collective] - timeline.arrives[collective]
        ahead = ended.get((group_of(collective), timeline.begins[collective]))
        took, alone = timeline.ends[collective] - timeline.begins[collective], milliseconds(transfers[collective])
        beside = max(0, timeline.arrives[wait] - timeline.begins[collective])
        if ahead is not None and 2 * queued > waited:
            name = f"{WORDS[collective_kind(ahead)]} of {unit_of_collective(ahead, call.units)}"
            cause, reason = "link busy", f"its link is busy with the {name} until then"
        elif 2 * (took - transfers[collective]) > waited:
            cause = "wire shared"
            reason = f"collectives of other groups on the same wires make it take {milliseconds(took)} instead of {alone}"
        elif _NEXT_TO_NOTHING * beside < transfers[collective]:
            cause = "nothing beside it"
            reason = f"nothing {'precedes' if collective_kind(collective) == 'all_gather' else 'follows'} it"
        else:
            cause = "compute too short"
            reason = f"what runs beside it hides {milliseconds(beside)} of its {alone}"
        kind, unit = collective_kind(collective), unit_of_collective(collective, call.units)
        found.append(Exposure(unit, kind, stage, index, waited, transfers[collective], cause, reason))
    return found


def unit_of_collective(collective: Node, units: Mapping[str, str]) -> str:
    """The units that a collective works for, by their own names.

    Args:
        collective: a node of a graph.
        units: the names of units in the graph, with their own.
    """
    done = bucket(collective)
    if done is None:
        return "the model itself"
    names = dict.fromkeys(unit_of_bucket(name, units) for name in done.unit_buckets)
    return "+".join(units.get(name, name) for name in names)


def milliseconds(ns: float) -> str:
    """A time, to be read: three digits."""
    return f"{ns / 1e6:,.0f} ms" if ns >= 1e8 else f"{ns / 1e6:.3g} ms"
