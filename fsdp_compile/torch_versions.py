"""Names and rules that differ between versions of torch. All follow the installed version."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp
from torch import nn
from torch.compiler import is_exporting
from torch.distributed.fsdp import MixedPrecisionPolicy

from passes.fx.torch_internals.aot import functorch_config
from passes.fx.torch_internals.core import CompileContext

_FROM_2_15 = torch.__version__ >= "2.15"

# torch 2.13 has new names for both functions, and warns about the old ones.
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# None with torch 2.11, which lacks the class.
DataParallelMeshDims: Any = getattr(torch.distributed.fsdp, "DataParallelMeshDims", None)

# The class of the handle that ``finalize_backward(async_op=True)`` returns, from torch 2.15 on.
GradientReductionHandle: Any = getattr(torch.distributed.fsdp, "GradientReductionHandle", object)

# The config of AOTAutograd with which the partitioner takes a ``DeviceMesh`` in a graph, which tensor parallel layers read, for
# one without memory. torch 2.13 refuses to give it a size under an ``activation_memory_budget``; 2.11 has no such option.
MESHES_WITHOUT_MEMORY: dict[str, Any] = {
    name: True for name in ("unsafe_treat_script_objects_as_zero_size",) if hasattr(functorch_config, name)
}

# Whether ``reset_iter_state`` also discards ``param.grad``.
RESET_DISCARDS_GRADIENTS = _FROM_2_15


def in_compilation() -> bool:
    """Return whether this thread compiles or exports, so that what runs for real belongs to a trace.

    ``torch.compiler.is_compiling`` is not enough for code that runs for real: while a thread compiles, it is true in every
    thread from torch 2.13 on, and in none before. Dynamo cannot trace this function. Callers that it traces ask
    ``is_dynamo_compiling()`` first, a constant for it. To trace a function that asks both takes up to a tenth of its time.
    """
    return CompileContext.try_get() is not None or is_exporting()


def reduce_dtype(policy: MixedPrecisionPolicy, param_dtype: torch.dtype) -> torch.dtype | None:
    """Return the dtype that gradients are reduced in. None: they keep their dtype, the compute dtype of the parameter.

    Args:
        policy: the policy of the parameter's unit.
        param_dtype: dtype of the parameter itself, not ``policy.param_dtype``.
    """
    if policy.reduce_dtype is None and policy.param_dtype is not None and _FROM_2_15:
        return param_dtype
    return policy.reduce_dtype


def param_dtype(policy: MixedPrecisionPolicy, param: nn.Parameter, name: str) -> torch.dtype | None:
    """Return the dtype that a parameter computes in by a policy. None: its own.

    Args:
        policy: the policy of the parameter's unit. With torch 2.15, its ``param_dtype_override_fn`` decides.
        param: the parameter, not sharded yet.
        name: its name, for errors.

    Raises:
        ValueError: the function returns a dtype that is neither the policy's nor the parameter's.
    """
    override: Any = getattr(policy, "param_dtype_override_fn", None)
    found: torch.dtype | None = None if override is None else override(param)
    if found not in (None, policy.param_dtype, param.dtype):
        raise ValueError(
            f"MixedPrecisionPolicy(param_dtype_override_fn=...) returned {found!r} for parameter {name}. It may return the "
            f"parameter's dtype, {param.dtype}; or None or param_dtype, {policy.param_dtype}."
        )
    return policy.param_dtype if found is None else found
