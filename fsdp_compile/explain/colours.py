"""Colours of pictures, which differ in print and for most colour-blind eyes, on light and on dark ground."""

from __future__ import annotations

import re

from passes.models.memory_model import Category

from .memory import OPTIMIZER, OTHER, SHARDS
from .tracks import Kind, Span

#: The colour of time in which compute waits.
EXPOSED = "#d62f4b"
#: Colours of collectives and copies by kind, and of graphs by stage.
SORTS = {
    "all_gather": "#3a9a8c",
    "reduce_scatter": "#e08a3c",
    "all_reduce": "#8b6bb8",
    "to_device": "#c9b458",
    "to_host": "#8c6d4f",
    "forward": "#b9c7dd",
    "backward": "#8fa5c7",
}
_OPTIMIZER = "#a8a29a"
_ALONE = "#6d7f99"
_IN_TURN = ("#4f7cac", "#9bbce0")
#: Colours of memory by category, from the bottom of the stack up.
CATEGORIES = {
    SHARDS: "#43597a",
    OPTIMIZER: "#7388a8",
    OTHER: "#b4bfcd",
    Category.PARAMETERS.value: "#3a9a8c",
    Category.ACTIVATIONS.value: "#8fbf7f",
    Category.GRADIENTS.value: "#e08a3c",
    Category.COMMUNICATION.value: "#8b6bb8",
    Category.WORKING.value: "#c9b458",
}


def _of_unit(name: str) -> str:
    """Return the colour of a unit. Units with numbers in their names alternate, so that neighbours differ."""
    numbers = re.findall(r"\d+", name)
    return _IN_TURN[int(numbers[-1]) % len(_IN_TURN)] if numbers else _ALONE


def colour(span: Span) -> str:
    """Return the colour of a span."""
    if span.kind is Kind.WAIT:
        return EXPOSED
    if span.kind is Kind.OPTIMIZER:
        return _OPTIMIZER
    return _of_unit(span.name) if span.kind is Kind.UNIT else SORTS.get(span.sort, _ALONE)
