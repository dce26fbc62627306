"""Capture a function as one CUDA graph.

This is how a step of ``fsdp_backend`` is meant to become a CUDA graph: forward, backward and whatever follows, as a whole, so
that activations, gathered parameters and gradients stay where they are between the kernels of a step and nobody else has to
know where.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UP_RUNS = 3


def capture(function: Callable[[], object], forget: Callable[[], object]) -> Callable[[], None]:
    """Record what a function launches, and give what launches it again.

    Nothing of the function's Python runs again: inputs are read from the memory they had, and gradients are written to
    the memory that they got in the capture.

    Args:
        function: waits for nothing that the device does, and copies nothing from the host's pageable memory.
        forget: run ahead of the capture; drops gradients, so that the capture makes them rather than adds to them.

    Raises:
        RuntimeError: something in the function cannot be captured.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP_RUNS):
            function()
            forget()
    torch.cuda.current_stream().wait_stream(side)
    # What the other runs left cached is no use to the graph, which has a pool of its own.
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
