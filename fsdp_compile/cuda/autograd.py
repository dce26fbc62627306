"""``run_backward``: the autograd engine in Python, for fake tensors on a device that torch's build does not support.

torch's engine adds gradients up on the stream of their device, so it cannot run without the device.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from passes.fx.torch_internals.core import _engine_run_backward as _engine
from passes.fx.torch_internals.core import unset_fake_temporarily
from passes.fx.torch_internals.objects import input_metadata, sequence_number

from ..runtime.gradients import set_accumulates_elsewhere

# For each backward that runs, innermost last: whether it accumulates into leaves.
_accumulating: list[bool] = []


def accumulates_in_python() -> bool | None:
    """Return whether the innermost backward of this module accumulates into leaves; None: no such backward runs."""
    return _accumulating[-1] if _accumulating else None


set_accumulates_elsewhere(accumulates_in_python)


def run_backward(
    outputs: Sequence[Tensor | GradientEdge],
    gradients: Sequence[Tensor | None],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Tensor | GradientEdge] = (),
    allow_unreachable: bool = False,
    accumulate_grad: bool = False,
) -> tuple[Tensor | None, ...]:
    """Compute gradients, in the order in which torch's engine would call the nodes.

    Hooks on nodes and on tensors that are no leaves do not run. Saved tensors are not freed.

    Args:
        outputs: the tensors or edges where backward starts.
        gradients: the gradients of ``outputs``.
        keep_graph: ignored: the graph is always kept.
        create_graph: record the operations of backward for another backward.
        inputs: the tensors or edges whose gradients to return; may be empty.
        allow_unreachable: ignored: the gradient of an input that is not reached is None.
        accumulate_grad: accumulate into the leaves.

    Returns:
        The gradients of ``inputs``.

    Source: torch/csrc/autograd/engine.cpp. The signature is that of torch's engine.
    """
    backward = _Backward(inputs)
    starts = list(zip(map(_edge, outputs), gradients, strict=True))

    def run() -> None:
        _accumulating.append(accumulate_grad)
        try:
            with torch.set_grad_enabled(create_graph):
                backward.run(starts, accumulate_grad)
        finally:
            _accumulating.pop()

    if accumulate_grad:
        _inside_of_engine(run)
    else:
        run()
    return tuple(backward.results)


def _edge(value: Tensor | GradientEdge) -> GradientEdge:
    return get_gradient_edge(value) if isinstance(value, Tensor) else value


class _Call(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, function: Callable[[], None]) -> Tensor:
        ctx.function = function
        return anchor.clone()

    @staticmethod
    def backward(ctx: Any, *_: Any) -> tuple[None, None]:
        ctx.function()
        return None, None


def _inside_of_engine(function: Callable[[], None]) -> None:
    """Call ``function`` inside a backward of torch's engine, so that a graph task and final callbacks exist."""
    with torch.enable_grad(), unset_fake_temporarily():
        anchor = torch.zeros((), device="cpu", requires_grad=True)
        called = _Call.apply(anchor, function)
    _engine((called,), (torch.ones((), device="cpu"),), False, False, (), allow_unreachable=True, accumulate_grad=True)


class _Backward:
    """One run over a graph of nodes."""

    def __init__(self, inputs: Sequence[Tensor | GradientEdge]):
        self.results: list[Tensor | None] = [None] * len(inputs)
        self._wanted: dict[Any, list[tuple[int, int]]] = {}
        for position, edge in enumerate(map(_edge, inputs)):
            self._wanted.setdefault(edge.node, []).append((position, edge.output_nr))
        self._buffers: dict[Any, list[Tensor | None]] = {}

    def run(self, starts: Iterable[tuple[GradientEdge, Tensor | None]], accumulate_grad: bool) -> None:
        starts = list(starts)
        pending = _dependencies([edge.node for edge, _ in starts])
        for edge, gradient in starts:
            self._add(edge.node, edge.output_nr, gradient)
        ready = [_Ready(node) for node, count in pending.items() if count == 0]
        heapq.heapify(ready)
        while ready:
            node = heapq.heappop(ready).node
            for (following, index), gradient in zip(node.next_functions, self._call(node, accumulate_grad), strict=True):
                if following is None:
                    continue
                self._add(following, index, gradient)
                pending[following] -= 1
                if pending[following] == 0:
                    heapq.heappush(ready, _Ready(following))

    def _call(self, node: Any, accumulate_grad: bool) -> Sequence[Tensor | None]:
        gradients = self._buffers.pop(node, [])
        for position, index in self._wanted.get(node, ()):
            self.results[position] = gradients[index] if gradients else None
        nothing = [None] * len(node.next_functions)
        if all(gradient is None for gradient in gradients) or not (node.next_functions or accumulate_grad):
            return nothing
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            results = node(*gradients)
            return (results if isinstance(results, tuple) else (results,)) if node.next_functions else nothing
        # An autograd.Function in Python is applied, not called. It also returns something for arguments that are no tensors.
        results = node.apply(*self._materialized(node, gradients))
        results = results if isinstance(results, tuple) else (results,)
        needed = iter([result for result, is_needed in zip(results, node.needs_input_grad, strict=False) if is_needed])
        return [None if following is None else next(needed) for following, _ in node.next_functions]

    def _materialized(self, node: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Return the gradients that an autograd.Function in Python gets: zeros for each output without gradient.

        ``set_materialize_grads(False)`` asks for None instead. The node does not expose this setting, and zeros give the same
        result.
        """
        return [
            torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device) if gradient is None else gradient
            for gradient, expected in zip(gradients, input_metadata(node), strict=True)
        ]

    def _add(self, node: Any, index: int, gradient: Tensor | None) -> None:
        buffer = self._buffers.setdefault(node, [None] * len(input_metadata(node)))
        if gradient is None:
            return
        expected = input_metadata(node)[index]
        # Derivative formulas leave it to the engine to undo broadcasting and type promotion.
        # A list of sizes in some versions of torch.
        shape = torch.Size(expected.shape)
        # Numbers of dimensions first: else a symbolic size is compared with a size of another dimension, which adds a guard.
        if gradient.dim() != len(shape) or gradient.shape != shape:
            gradient = gradient.sum_to_size(shape)
        if gradient.dtype != expected.dtype:
            gradient = gradient.to(expected.dtype)
        earlier = buffer[index]
        buffer[index] = gradient if earlier is None else earlier + gradient


class _Ready:
    """A node that can run. Nodes of leaves come first, then the nodes that were recorded last."""

    def __init__(self, node: Any):
        self.node = node
        self._order = sequence_number(node)

    def __lt__(self, other: _Ready) -> bool:
        return self._order > other._order


def _dependencies(roots: Sequence[Any]) -> dict[Any, int]:
    """Count the edges that lead to each node that ``roots`` reach."""
    counts = dict.fromkeys(roots, 0)
    stack = list(counts)
    seen = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for following, _ in node.next_functions:
            if following is not None:
                counts[following] = counts.get(following, 0) + 1
                stack.append(following)
    return counts
