"""What differs between the supported versions of torch (2.11 to 2.13)."""

from __future__ import annotations

try:  # torch >= 2.12
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:
    # torch 2.11 takes any callable after fusion, and keys its cache by the other passes alone.
    CustomSchedulerPass = object  # type: ignore[assignment, misc]

__all__ = ["CustomSchedulerPass"]
