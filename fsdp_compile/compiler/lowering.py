"""The interface of a lowering, which makes functions of graphs after the passes.

``options["lowering"]`` is a key of ``LOWERINGS`` in ``fsdp_compile/compiler/options.py``. Lowerings differ only in what this
interface defines. Their common part, such as the agreement of the ranks, is in ``fsdp_compile/compiler/prepared_graph.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar

from torch.fx import GraphModule

from passes.fx.size_guards import Assumptions
from passes.pass_runner import Pass
from passes.pipeline import GraphOfPlan, PartitionedGraph

from ..runtime.planned_graph import BoxedFunction


@dataclass(frozen=True)
class Lowered:
    """A graph that can be called.

    Attributes:
        function: takes the graph's inputs as a list, which it empties, and returns the graph's outputs.
        code: source of the function and of the segments that it calls; None: no code was generated.
        stored: what :meth:`Lowering.load` makes the function of in another process, and can be pickled. None: nothing can be
            stored.
    """

    function: BoxedFunction
    code: str | None = None
    stored: Any = None


class Lowering(ABC):
    """The interface of a lowering, which makes functions of scheduled graphs.

    An object serves one Dynamo graph: its forward and its backward graph, and their variants for all plans.

    Attributes:
        config_patches: settings of Inductor, whose passes run over joint graphs with every lowering.
        preparing_passes: passes that this lowering needs, which run over a graph once, before any plan.
        final_passes: passes that this lowering needs, which run last, for each plan.
        fuses: whether it fuses operators into kernels, so that values between them are never written to memory.
    """

    config_patches: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    preparing_passes: ClassVar[Sequence[Pass[PartitionedGraph]]] = ()
    final_passes: ClassVar[Sequence[Pass[GraphOfPlan]]] = ()
    fuses: ClassVar[bool] = True

    def prepare(self, device_types: set[str]) -> None:  # noqa: B027 (most have nothing to prepare)
        """Start slow work that does not depend on the graph, in the background. Called before the graph is traced.

        Args:
            device_types: device types of the graph's parameters.
        """

    def compile_unsharded(self, gm: GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any] | None:
        """Compile a Dynamo graph without sharded parameters, without the passes. None: run the passes over it, too."""
        return None

    @abstractmethod
    def lower(
        self, gm: GraphModule, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> Lowered:
        """Make a function of a forward or backward graph.

        Called for each new plan, even long after tracing, with Dynamo's lock held, in the contexts of the graph's compilation.

        Args:
            gm: the graph, with its collectives in the order in which they are to start. Do not change it; keeping it is fine.
            is_backward: whether it is a backward graph.
            inductor_kwargs: keywords of ``compile_fx_inner`` for any part of the graph.
            assumptions: what is decided about sizes. Code of an earlier lowering may be reused if ``assumptions`` admits its
                conditions.
        """

    def load(
        self, stored: Any, *, is_backward: bool, inductor_kwargs: Mapping[str, Any], assumptions: Assumptions
    ) -> BoxedFunction | None:
        """Make a function of what :meth:`lower` stored, in another process.

        Args:
            stored: see :class:`Lowered`.
            is_backward, inductor_kwargs: as for :meth:`lower`.
            assumptions: what is decided about sizes. Conditions of what was stored have been admitted.

        Returns:
            The function; None: something that it needs is not stored any more.
        """
        return None
