"""The part of a plan that users set with the methods of :mod:`fsdp_compile.api.schedule_controls`."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

from passes.transforms.schedule import default_max_pending_reductions

from ..units.unit import Unit

logger = logging.getLogger(__name__)


def _list_of(unit: Unit, is_backward: bool) -> tuple[Unit, ...]:
    return unit.backward_prefetch if is_backward else unit.forward_prefetch


def prefetch_lists(
    units: Mapping[str, Unit], gathering: Sequence[str], *, is_backward: bool
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Collect the prefetch lists that have an effect in a graph.

    Args:
        units: the units of the graph by name.
        gathering: names of the units that the graph gathers.
        is_backward: take the lists for backward rather than those for forward.

    Returns:
        For each such list the name of its unit, and the names of the listed units that the graph gathers.
    """
    names: dict[Unit, str] = {}
    found = []
    for name, unit in units.items():
        listed = _list_of(unit, is_backward)
        if listed:
            names = names or {other: other_name for other_name, other in units.items()}
            targets = tuple(dict.fromkeys(names[other] for other in listed if names.get(other) in gathering))
            # A list without a target still replaces the default, if the default would have a target.
            if targets or (name in gathering and len(set(gathering)) > 1):
                found.append((name, targets))
    return tuple(found)


def log_idle_lists(units: Mapping[str, Unit], *, is_backward: bool) -> None:
    """Log the units whose lists have no effect in a graph because the graph uses none of their parameters."""
    present = set(units.values())
    scopes = dict.fromkeys(unit.scope for unit in units.values())
    idle = [unit for scope in scopes for unit in scope.units if unit not in present and _list_of(unit, is_backward)]
    if idle:
        logger.info(
            "A %s graph of %s does not prefetch what the lists of %s say: it uses none of their parameters.",
            "backward" if is_backward else "forward",
            ", ".join(unit.name or "the root" for unit in units.values()),
            ", ".join(unit.name or "the root" for unit in idle),
        )


def max_pending_reductions(units: Iterable[Unit]) -> int | None:
    """Return how many reduce-scatters of these units may be in flight: their largest limit, or None if no limit is set."""
    limits = dict.fromkeys(
        (unit.flags.max_pending_reductions, default_max_pending_reductions(replicated=bool(mesh.replicate_group)))
        for unit in units
        for mesh in unit.meshes
    )
    if all(limit is None for limit, _ in limits):
        return None
    return max(default if limit is None else limit for limit, default in limits)


def must_not_gather(unit: Unit, names: Sequence[str]) -> str:
    """Return the error message for a backward that must gather a unit in spite of ``set_unshard_in_backward(False)``."""
    return (
        f"set_unshard_in_backward(False) was called on {unit.name or 'the root'}, but backward reads {', '.join(names)}, "
        "which has to be gathered for it. Leave the flag at True: backward gathers only what it reads."
    )
