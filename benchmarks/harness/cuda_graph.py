"""Capture a function as one CUDA graph.

A step of ``fsdp_backend`` can become one CUDA graph: forward, backward and whatever follows. Activations, gathered parameters
and gradients then stay in the graph's memory.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_WARM_UP_RUNS = 3


def capture(function: Callable[[], object], forget: Callable[[], object]) -> Callable[[], None]:
    """Record the launches of a function, and return a function that replays them.

    A replay runs none of the function's Python. It reads inputs from the memory that they had, and writes gradients to the
    memory that they got in the capture.

    Args:
        function: must not wait for the device, nor copy from the host's pageable memory.
        forget: drops gradients. It runs before the capture, so that the capture makes gradients instead of adding to them.

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
