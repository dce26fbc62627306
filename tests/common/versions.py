"""Features of newer versions of torch that the installed one may lack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_common


def needs_fsdp2(method: str) -> pytest.MarkDecorator:
    """Skip a test that compares with a method of torch's own FSDP2, if the installed torch lacks it."""
    missing = not hasattr(FSDPModule, method)
    return pytest.mark.skipif(missing, reason=f"FSDP2 of torch {torch.__version__} has no {method}")


#: Skip tests in which ``shard_placement_fn`` returns a mesh, if torch has no type for that.
needs_placements_with_a_mesh = pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason=f"torch {torch.__version__} has no ShardPlacementResult"
)
#: Skip tests of ``dp_mesh_dims`` if torch has no such argument.
needs_mesh_dims = pytest.mark.skipif(
    not hasattr(torch.distributed.fsdp, "DataParallelMeshDims"), reason=f"torch {torch.__version__} has no DataParallelMeshDims"
)


@dataclass(frozen=True)
class NewerPolicy(MixedPrecisionPolicy):
    """A policy with a setting of torch 2.15."""

    param_dtype_override_fn: Callable[[nn.Parameter], torch.dtype | None] | None = None
