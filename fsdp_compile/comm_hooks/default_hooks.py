"""Torch's hooks, written so that a graph can hold them.

The functions compute the same as those of ``torch.distributed.algorithms._comm_hooks.default_hooks``. Torch's functions change
the dtype of a tensor by assigning to its ``.data``, and record CUDA streams, which a graph cannot hold. The functions here only
write values.
"""

import torch
import torch.distributed as dist
from torch import Tensor

from passes.fx.torch_internals.distributed import DefaultState, LowPrecisionState

from ..torch_versions import reduce_scatter


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Average the gradient over the ranks, in place.

    Args:
        state: has the process group, and factors to divide by before and after the reduction, which keep small dtypes in range.
        grad: gradient of this rank's batch.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    if state.gradient_postdivide_factor > 1:
        grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: Tensor, output: Tensor) -> None:
    """Average the gradient over the ranks and fill ``output`` with this rank's shard.

    Args:
        state: as in :func:`allreduce_hook`.
        grad: flat gradient of this rank's batch, ``[ranks * n]``; overwritten.
        output: flat shard, ``[n]``.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    reduce_scatter(output, grad, group=state.process_group)
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in float16: :func:`reduce_scatter_hook`, or without an output :func:`allreduce_hook`, on the cast gradient.

    Args:
        state: as in :func:`allreduce_hook`. The average is cast to ``state.parameter_type``, and then written to ``output`` or
            ``grad``, whose dtype stays.
        grad: flat gradient of this rank's batch, ``[ranks * n]``; overwritten. Of any size without an output.
        output: flat shard, ``[n]``.
    """
    _low_precision_hook(torch.float16, state, grad, output)


def bf16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in bfloat16; see :func:`fp16_compress_hook`."""
    _low_precision_hook(torch.bfloat16, state, grad, output)


def _low_precision_hook(dtype: torch.dtype, state: LowPrecisionState, grad: Tensor, output: Tensor | None) -> None:
    compressed = grad.to(dtype)
    if output is None:
        allreduce_hook(state, compressed)
        grad.copy_(compressed.to(state.parameter_type))
    else:
        reduced = torch.empty_like(output, dtype=dtype)
        reduce_scatter_hook(state, compressed, reduced)
        output.copy_(reduced.to(state.parameter_type))
