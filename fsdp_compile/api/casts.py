"""Casts of the inputs and outputs of a unit's forward, by its mixed-precision policy."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from passes.fx.torch_internals.core import pytree


def cast_inputs(policy: MixedPrecisionPolicy, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Cast floating-point tensors among positional and keyword arguments to the dtype that parameters compute in."""
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return args, kwargs
    return _cast_floating((args, kwargs), policy.param_dtype)


def cast_output(policy: MixedPrecisionPolicy, output: Any) -> Any:
    """Cast floating-point tensors in the output of a forward to the policy's output dtype."""
    return output if policy.output_dtype is None else _cast_floating(output, policy.output_dtype)


def _cast_floating(tree: Any, dtype: torch.dtype) -> Any:
    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(cast, tree)
