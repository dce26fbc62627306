"""Fully sharded data parallelism (FSDP) as torch.compile graph passes. See README.md for a first example.

:mod:`fsdp_compile.debug` shows what compilation makes of a model, and :mod:`fsdp_compile.explain` predicts a training step.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, UnshardHandle

from passes.collectives.divide_factors import gradient_divide_factors
from passes.collectives.rounded_gather import GatherPolicy
from passes.collectives.traced_hook import HookNotTraceable

from . import comm_hooks
from .api.module import FSDPModule, register_fsdp_forward_method
from .api.partial_offload import PartialCPUOffloadPolicy
from .api.patch_fsdp2 import patch_fsdp2
from .api.schedule_controls import share_comm_ctx
from .api.sharding import fully_shard, replicate, sync_module_states
from .compiler.backend import fsdp_backend
from .compiler.precompiled_file import NotPrecompiled
from .optim.clip import clip_grad_norm_
from .optim.clip_and_step import clip_and_step
from .optim.flat_optimizer import flat_optimizer
from .optim.in_backward import optimizer_in_backward
from .optim.matrix_optimizer import MatrixOptimizer, MatrixShard
from .optim.offload import offload_optimizer
from .precompiled import load_precompiled, precompile, save_precompiled
from .runtime.agreement import RankFailed, RanksDisagree
from .torch_versions import DataParallelMeshDims, GradientReductionHandle

__all__ = [
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "FSDPModule",
    "GatherPolicy",
    "GradientReductionHandle",
    "HookNotTraceable",
    "MatrixOptimizer",
    "MatrixShard",
    "MixedPrecisionPolicy",
    "NotPrecompiled",
    "OffloadPolicy",
    "PartialCPUOffloadPolicy",
    "RankFailed",
    "RanksDisagree",
    "UnshardHandle",
    "clip_and_step",
    "clip_grad_norm_",
    "comm_hooks",
    "flat_optimizer",
    "fsdp_backend",
    "fully_shard",
    "gradient_divide_factors",
    "load_precompiled",
    "offload_optimizer",
    "optimizer_in_backward",
    "patch_fsdp2",
    "precompile",
    "register_fsdp_forward_method",
    "replicate",
    "save_precompiled",
    "share_comm_ctx",
    "sync_module_states",
]
