"""``run_backward``: what the autograd engine does, in Python, for fake tensors on a device that torch's build knows nothing of.

torch's engine adds gradients up on the stream of their device, so it cannot run where there is none.
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

from ..runtime.gradients import set_accumulates_elsewhere

# Of the backwards under way, innermost last: whether they accumulate into the leaves.
_accumulating: list[bool] = []


def accumulates_in_python() -> bool | None:
    """Whether the backward that this module runs accumulates into the leaves; None: it runs none, torch's engine may."""
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

    Hooks on nodes and on tensors that are no leaves do not run; saved tensors are not freed.

    Args:
        outputs: where backward starts.
        gradients: theirs.
        keep_graph: ignored: the graph is always kept.
        create_graph: record what the nodes do.
        inputs: whose gradients to return; none: accumulate into the leaves.
        allow_unreachable: ignored: an input that is not reached has None.
        accumulate_grad: accumulate into the leaves.

    Returns:
        The gradients of ``inputs``.

    Source: torch/csrc/autograd/engine.cpp, whose signature it has.
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
    """Call a function from a backward of torch's engine: its task and its final callbacks are there, as in a real backward."""
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
        # A function in Python: it is applied, not called, and returns something for arguments that are no tensors, too.
        results = node.apply(*self._materialized(node, gradients))
        results = results if isinstance(results, tuple) else (results,)
        needed = iter([result for result, is_needed in zip(results, node.needs_input_grad, strict=False) if is_needed])
        return [None if following is None else next(needed) for following, _ in node.next_functions]

    def _materialized(self, node: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """What a function in Python is given: zeros where an output has no gradient.

        Also if it asked for None instead (``set_materialize_grads``), which it does not tell; zeros have the same result.
        """
        return [
            torch.zeros(expected.shape, dtype=expected.dtype, device=expected.device) if gradient is None else gradient
            for gradient, expected in zip(gradients, node._input_metadata, strict=True)
        ]

    def _add(self, node: Any, index: int, gradient: Tensor | None) -> None:
        buffer = self._buffers.setdefault(node, [None] * len(node._input_metadata))
        if gradient is None:
            return
        expected = node._input_metadata[index]
        # Formulas leave it to the engine to undo broadcasting and promotion.
        if gradient.shape != expected.shape:
            gradient = gradient.sum_to_size(expected.shape)
        if gradient.dtype != expected.dtype:
            gradient = gradient.to(expected.dtype)
        earlier = buffer[index]
        buffer[index] = gradient if earlier is None else earlier + gradient


class _Ready:
    """A node that can run. Those that were recorded last come first; nodes of leaves, before all."""

    def __init__(self, node: Any):
        self.node = node
        self._order = node._sequence_nr()

    def __lt__(self, other: _Ready) -> bool:
        return self._order > other._order


def _dependencies(roots: Sequence[Any]) -> dict[Any, int]:
    """For each node that is reached, how many edges lead to it."""
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
