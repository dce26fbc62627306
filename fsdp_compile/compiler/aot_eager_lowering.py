"""The lowering ``aot_eager``: run the operators of the scheduled graph one by one, for debugging."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.fx import GraphModule

from passes.fx.size_guards import Assumptions

from ..runtime.planned_graph import boxed
from .lowering import Lowered, Lowering


class AotEagerLowering(Lowering):
    """The lowering that runs a graph as the passes leave it."""

    # Inductor replaces random operators by ones that take a seed. Run one by one, those ignore the seed: a checkpoint would
    # draw other numbers in backward.
    config_patches: ClassVar[Mapping[str, Any]] = {"fallback_random": True}
    fuses: ClassVar[bool] = False

    def lower(
        self, gm: GraphModule, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> Lowered:
        gm.recompile()
        return Lowered(boxed(lambda args: gm(*_emptied(args))))


def _emptied(args: list[Any]) -> list[Any]:
    taken = list(args)
    args.clear()
    return taken
