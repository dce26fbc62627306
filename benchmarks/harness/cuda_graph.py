"""Capture a function as one CUDA graph.

A step of ``fsdp_backend`` can become one CUDA graph: forward, backward and whatever follows. Activations, gathered parameters
and gradients then stay in memory of that graph.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UP_RUNS = 3


def capture(function: Callable[[], object], forget: Callable[[], object]) -> Callable[[], None]:
    """Record the launches of a function, and return a function that replays them.

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
    # The graph has a memory pool of its own, and cannot use memory that the allocator has cached.
    torch.cuda.empty_cache()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        function()
    return graph.replay
