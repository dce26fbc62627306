"""The unsharded model, compiled, with its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch._functorch import config as functorch_config
from torch.fx import Graph, GraphModule

from passes.fx.graph import copy_of
from passes.fx.torch_internals.inductor import compile_fx, compile_fx_inner
from passes.models.cost_model import node_ns
from passes.models.hardware import Hardware

from .systems import Setting, System


class RecordedGraphs:
    """The forward and backward graphs of a model, as Inductor gets them."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []

    def backend(self, gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compile with Inductor, and record the graphs. A backend for ``torch.compile``."""
        # A hit in AOTAutograd's cache would show no graphs.
        with functorch_config.patch(enable_autograd_cache=False):
            return compile_fx(gm, inputs, inner_compile=self._compile)  # type: ignore[no-any-return]

    def _compile(self, gm: GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        # A copy, as Inductor changes the graph.
        self._graphs.append(copy_of(gm.graph))
        return compile_fx_inner(gm, inputs, **kwargs)

    def step_seconds(self, microbatches: int, model: nn.Module, hardware: Hardware) -> float:
        """Predict the seconds of a step with SGD by the cost model.

        Raises:
            RuntimeError: there is not exactly one forward and one backward graph. Both have to run first.
        """
        if len(self._graphs) != 2:
            raise RuntimeError(f"expected a forward and a backward graph, there are {len(self._graphs)}")
        computing = sum(sum(node_ns(graph, hardware).values()) for graph in self._graphs)
        updated = 3 * sum(parameter.nbytes for parameter in model.parameters())
        return microbatches * computing / 1e9 + updated / hardware.bytes_per_s


def build_recorded(setting: Setting, dtype: torch.dtype) -> tuple[System, RecordedGraphs]:
    """Build the unsharded model in a dtype. Return it with its graphs."""
    graphs = RecordedGraphs()
    model = setting.size.build(setting.device).to(dtype)
    return System(model, torch.compile(model, backend=graphs.backend)), graphs
