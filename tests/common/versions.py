"""Features of newer versions of torch that the installed one may lack."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.fsdp import FSDPModule


def needs_fsdp2(method: str) -> pytest.MarkDecorator:
    """Skip what compares with a method of torch's own FSDP2 where there is none."""
    missing = not hasattr(FSDPModule, method)
    return pytest.mark.skipif(missing, reason=f"FSDP2 of torch {torch.__version__} has no {method}")
