"""The lowering ``aot_eager``: operators of the scheduled graph one by one, to debug with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch.fx import GraphModule

from passes.fx.size_guards import Assumptions

from ..runtime.planned_graph import boxed
from .lowering import Lowered, Lowering


class AotEagerLowering(Lowering):
    """Runs the graph as the passes leave it."""

    # Inductor's random numbers come from seeds, which its operators ignore where no kernel is made of them: a checkpoint would
    # draw others in backward.
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
