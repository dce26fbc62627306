"""Exposure: the transfers that a graph waits for, and why each was not over by then.

A transfer is a collective, or a copy between device and host.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch.fx import Node

from passes.ir.work import bucket
from passes.models.cost_model import COPIES, transfer_kind

from ..compiler.calls import GraphCall
from .attribution import unit_of_bucket
from .figures import GraphFigures

# Nothing counts as running beside a transfer if compute hides less than 1 / _NEXT_TO_NOTHING of it.
_NEXT_TO_NOTHING = 20

#: The kinds of transfers, in words for sentences.
WORDS = {
    "all_gather": "gather",
    "reduce_scatter": "reduction",
    "all_reduce": "all-reduce",
    "to_device": "copy to the device",
    "to_host": "copy to the host",
}


@dataclass(frozen=True)
class Exposure:
    """A transfer that compute waits for.

    Attributes:
        unit: the unit whose parameters, gradients or activations it carries; several are joined by "+". The model's
            own collectives have "the model itself".
        kind: "all_gather", "reduce_scatter" or "all_reduce"; for a copy, "to_device" or "to_host".
        stage: "forward" or "backward".
        call: the index of the graph call in the step, from 0.
        exposed_ns: how long compute waits for it, in nanoseconds.
        transfer_ns: how long it takes, in nanoseconds, if it does not share its wire.
        cause: "nothing beside it", "link busy", "wire shared" or "compute too short".
        reason: the cause in words.
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
    """List the transfers that a call waits for, in the order of the waits."""
    timeline, transfers, link = figures.timeline, figures.costs.transfer, figures.costs.link
    stage = "backward" if call.is_backward else "forward"
    ended = {(link[collective], timeline.ends[collective]): collective for collective in transfers}
    found = []
    for wait, (waited, collective) in timeline.waits.items():
        queued = timeline.begins[collective] - timeline.arrives[collective]
        ahead = ended.get((link[collective], timeline.begins[collective]))
        took, alone = timeline.ends[collective] - timeline.begins[collective], milliseconds(transfers[collective])
        beside = max(0, timeline.arrives[wait] - timeline.begins[collective])
        if ahead is not None and 2 * queued > waited:
            name = f"{WORDS[transfer_kind(ahead)]} of {unit_of_transfer(ahead, call, figures)}"
            cause, reason = "link busy", f"its link is busy with the {name} until then"
        elif 2 * (took - transfers[collective]) > waited:
            cause = "wire shared"
            reason = f"collectives of other groups on the same wires make it take {milliseconds(took)} instead of {alone}"
        elif _NEXT_TO_NOTHING * beside < transfers[collective]:
            cause = "nothing beside it"
            reason = f"nothing {'precedes' if transfer_kind(collective) in ('all_gather', 'to_device') else 'follows'} it"
        else:
            cause = "compute too short"
            reason = f"what runs beside it hides {milliseconds(beside)} of its {alone}"
        kind, unit = transfer_kind(collective), unit_of_transfer(collective, call, figures)
        found.append(Exposure(unit, kind, stage, index, waited, transfers[collective], cause, reason))
    return found


def unit_of_transfer(transfer: Node, call: GraphCall, figures: GraphFigures) -> str:
    """Return the qualified names of the units that a transfer works for, joined by "+"."""
    if transfer.target in COPIES and bucket(transfer) is None:
        return call.units.get(figures.unit_of[transfer], figures.unit_of[transfer])
    return unit_of_collective(transfer, call.units)


def unit_of_collective(collective: Node, units: Mapping[str, str]) -> str:
    """Return the qualified names of the units that a collective works for, joined by "+".

    Args:
        collective: a node of a graph.
        units: the qualified names of units, by their names in the graph.
    """
    done = bucket(collective)
    if done is None:
        return "the model itself"
    names = dict.fromkeys(unit_of_bucket(name, units) for name in done.unit_buckets)
    return "+".join(units.get(name, name) for name in names)


def milliseconds(ns: float) -> str:
    """Format nanoseconds as milliseconds: three digits, or whole milliseconds from 100 ms on."""
    return f"{ns / 1e6:,.0f} ms" if ns >= 1e8 else f"{ns / 1e6:.3g} ms"
