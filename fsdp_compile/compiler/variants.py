"""The variants of a graph: what it is lowered to, for each plan and for sets of sizes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from passes.ir.plan import Plan

from ..runtime.planned_graph import Variant
from ..runtime.planner import Planner
from ..runtime.schedule_settings import log_idle_lists
from ..units.unit import Unit
from .prepared_graph import LoweredGraph

logger = logging.getLogger(__name__)

#: A warning is logged at so many variants of one plan for different sizes: as many as Dynamo compiles of a frame.
_MANY_VARIANTS = 8


class Variants:
    """The variants of a forward or backward graph.

    Args:
        planner: the graph's planner.
        lower: lowers the graph for a plan and for the sizes of a call's inputs. The inputs are None where Dynamo guards sizes.
    """

    def __init__(
        self,
        planner: Planner,
        lower: Callable[[Plan, Sequence[Any] | None], LoweredGraph],
    ):
        self._planner = planner
        self._lower = lower
        self._by_plan: dict[Plan, list[Variant]] = {}

    def find(self, plan: Plan, units: Mapping[str, Unit], args: Sequence[Any] | None) -> Variant:
        """Return the variant for a plan, and lower the graph if there is none.

        Args:
            plan: the plan.
            units: the units that the graph works for, by their names in the graph.
            args: the inputs of the call; None: Dynamo is compiling the frame, and takes guards.

        Raises:
            RuntimeError: the sizes of the call do not fulfil conditions that compiled code relies on.
        """
        variants = self._by_plan.get(plan)
        if variants is None:
            found = self._by_plan
            if plan.has_hooks:
                # Models of the same classes share this graph, each with hooks of its own.
                found = next(iter(units.values())).scope.with_hooks.setdefault(self, {})
            variants = found.setdefault(plan, [])
        for variant in variants:
            if variant.guard is None or (args is not None and variant.guard(args)):
                return variant
        is_backward = self._planner.is_backward
        log_idle_lists(units, is_backward=is_backward)
        made = self._lower(plan, args)
        groups = made.reduction_groups
        regrouped = groups if groups != self._planner.inputs.reduction_groups else None
        communicating = self._planner.communicating(plan)
        variants.append(Variant(made.function, made.inputs, made.outputs, made.run, regrouped, made.guard, communicating))
        if len(variants) == _MANY_VARIANTS:
            logger.warning(
                "A %s graph has been compiled for %d sets of sizes, and goes on so: its code is for %s.",
                "backward" if is_backward else "forward",
                len(variants),
                made.guard,
            )
        return variants[-1]
