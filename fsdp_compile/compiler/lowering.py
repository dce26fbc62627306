"""The interface of a lowering: how graphs that the passes have been over become functions.

``options["lowering"]`` names one of those that ``fsdp_compile/compiler/options.py`` lists. All in which they differ is said
here; what they have in common, agreement of the ranks for one, is in ``fsdp_compile/compiler/prepared_graph.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch.fx import Graph, GraphModule

from passes.fx.size_guards import Assumptions

from ..runtime.planned_graph import BoxedFunction


@dataclass(frozen=True)
class Lowered:
    """A graph that can be called.

    Attributes:
        function: takes the graph's inputs as a list, which it empties, and gives the graph's outputs.
        code: the source of the function and of what it calls; None: none was generated.
    """

    function: BoxedFunction
    code: str | None = None


class Lowering(ABC):
    """Makes functions of scheduled graphs.

    An object serves one graph of Dynamo: the forward and the backward graph that come of it, and their variants for all plans.

    Attributes:
        config_patches: settings of Inductor, whose passes run over joint graphs with every lowering.
        preparing_passes: passes over a graph for this lowering's sake, ahead of its plans.
        final_passes: passes that graphs end with for this lowering's sake.
        fuses: whether it makes one kernel of several operators, so that values between them are never written.
    """

    config_patches: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    preparing_passes: ClassVar[Sequence[Callable[[Graph], None]]] = ()
    final_passes: ClassVar[Sequence[Callable[[Graph], None]]] = ()
    fuses: ClassVar[bool] = True

    def prepare(self, device_types: set[str]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Begin, in the background, what takes time and does not depend on the graph. Called before it is traced.

        Args:
            device_types: where its parameters are.
        """

    def compile_unsharded(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compile a graph of Dynamo in which nothing is sharded, without the passes; None: let it go through them as well."""
        return None

    @abstractmethod
    def lower(
        self, gm: GraphModule, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> Lowered:
        """Make a function of a forward or backward graph.

        Runs while Dynamo's lock is held, in the contexts of the graph's compilation, whenever it is called with a new plan.

        Args:
            gm: the graph, with its collectives in the order in which they are to start; not to be changed. It may be kept.
            is_backward: which of the two it is.
            inductor_kwargs: what ``compile_fx`` says of the whole graph to ``compile_fx_inner``.
            assumptions: what is decided about sizes. Code of an earlier lowering may be used if they admit its conditions.
        """
