"""Fully sharded data parallelism (FSDP) as torch.compile graph passes. See README.md for a first example."""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from passes.divide_factors import gradient_divide_factors
from passes.traced_hook import HookNotTraceable

from . import comm_hooks
from .agreement import RanksDisagree
from .backend import fsdp_backend
from .capture import Capture, CapturedGraph, CapturedPass, capture
from .cuda_code import CudaCode, cuda_code
from .cuda_outline import cuda_outline
from .module import FSDPModule, register_fsdp_forward_method
from .replace import replacing_fsdp2
from .schedule_controls import share_comm_ctx
from .sharding import fully_shard, sync_module_states
from .torch_versions import DataParallelMeshDims, GradientReductionHandle

__all__ = [
    "CPUOffloadPolicy",
    "Capture",
    "CapturedGraph",
    "CapturedPass",
    "CudaCode",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "HookNotTraceable",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "RanksDisagree",
    "UnshardHandle",
    "capture",
    "comm_hooks",
    "cuda_code",
    "cuda_outline",
    "fsdp_backend",
    "fully_shard",
    "gradient_divide_factors",
    "register_fsdp_forward_method",
    "replacing_fsdp2",
    "share_comm_ctx",
    "sync_module_states",
]
