"""Gradient communication hooks.

Hooks of torch's FSDP1 are ``hook(state, grad, output)`` or ``hook(state, grad)``. Hooks with tensors of their own are
``hook(state, grad, output, bucket)``. The states are torch's own classes.
"""

from passes.collectives.stateful_hook import HookBucket, HookParameter
from passes.fx.torch_internals.distributed import DefaultState, LowPrecisionState

from .bind import BoundHook, bind_hook
from .checkpoint import HookTensors
from .default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook
from .error_feedback import ErrorFeedback
from .power_sgd import PowerSGD
from .quantized_reduce import QuantizedReduce

__all__ = [
    "BoundHook",
    "DefaultState",
    "ErrorFeedback",
    "HookBucket",
    "HookParameter",
    "HookTensors",
    "LowPrecisionState",
    "PowerSGD",
    "QuantizedReduce",
    "allreduce_hook",
    "bf16_compress_hook",
    "bind_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]
