"""Fully sharded data parallelism (FSDP) as torch.compile graph passes. See README.md for a first example."""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .backend import fsdp_backend
from .capture import Capture, CapturedGraph, CapturedPass, capture
from .module import FSDPModule, register_fsdp_forward_method
from .sharding import fully_shard, sync_module_states

__all__ = [
    "Capture",
    "CapturedGraph",
    "CapturedPass",
    "FSDPModule",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "capture",
    "fsdp_backend",
    "fully_shard",
    "register_fsdp_forward_method",
    "sync_module_states",
]
