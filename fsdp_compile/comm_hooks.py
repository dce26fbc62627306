"""Gradient communication hooks, as torch's FSDP1 has them: ``hook(state, grad, output)`` or ``hook(state, grad)``.

The functions compute what those of ``torch.distributed.algorithms._comm_hooks.default_hooks`` compute. Torch's change the
dtype of a tensor by assigning to its ``.data`` and record CUDA streams, which a graph cannot hold; these write values only.
The states are torch's own classes.
"""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import pad

from passes.collectives.layout import padding_to
from passes.collectives.rounded_gather import LARGEST, SCALE, numbers_of, restore_groups, round_groups
from passes.collectives.traced_hook import hook_name
from passes.fx.torch_internals.distributed import DefaultState, LowPrecisionState, default_hooks

__all__ = [
    "BoundHook",
    "DefaultState",
    "LowPrecisionState",
    "QuantizedReduce",
    "allreduce_hook",
    "bf16_compress_hook",
    "bind_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]

_HALVES = (torch.bfloat16, torch.float16)

# torch 2.13 has a new name for it, and warns at the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def allreduce_hook(state: DefaultState, grad: Tensor) -> None:
    """Average the gradient over the ranks, in place.

    Args:
        state: its process group, and its factors, which divide before and after the reduction to keep small dtypes in range.
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
        grad: flat gradient of this rank's batch; overwritten.
        output: flat shard, a world size smaller.
    """
    if state.gradient_predivide_factor > 1:
        grad.div_(state.gradient_predivide_factor)
    _reduce_scatter(output, grad, group=state.process_group)
    if state.gradient_postdivide_factor > 1:
        output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(state: LowPrecisionState, grad: Tensor, output: Tensor | None = None) -> None:
    """Average in float16: :func:`reduce_scatter_hook`, or without an output :func:`allreduce_hook`, on the cast gradient.

    Args:
        state: its ``parameter_type`` is the dtype that the average is cast to; the tensor it is written to keeps its own.
        grad: flat gradient of this rank's batch; overwritten.
        output: flat shard, a world size smaller.
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


@dataclass(frozen=True)
class QuantizedReduce:
    """A hook that averages gradients and sends fewer bytes: ``register_comm_hook(DefaultState(group), QuantizedReduce())``.

    Each rank sends each other one the piece that is reduced there, rounded; that rank sums in float32. A reduce-scatter in low
    precision would round every partial sum. An infinity or NaN makes its block NaN on the rank that reduces it.

    Attributes:
        dtype: ``torch.int8``, ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``, with a scale for each block; or
            ``torch.bfloat16`` or ``torch.float16``, without.
        block: the elements that share a scale.

    Raises:
        ValueError: a dtype or block that there is not.

    Source: "qgZ" of ZeRO++ (Wang et al. 2023), without its hierarchy.
    """

    dtype: torch.dtype = torch.int8
    block: int = 128

    def __post_init__(self) -> None:
        if self.dtype not in (*LARGEST, *_HALVES):
            known = ", ".join(map(str, (*LARGEST, *_HALVES)))
            raise ValueError(f"QuantizedReduce(dtype=...) takes one of {known}, not {self.dtype!r}.")
        if isinstance(self.block, bool) or not isinstance(self.block, int) or self.block < 1:
            raise ValueError(f"QuantizedReduce(block=...) takes a positive number of elements, not {self.block!r}.")

    def __call__(self, state: DefaultState, grad: Tensor, output: Tensor) -> None:
        """Fill ``output`` with this rank's shard of the average.

        Args:
            state: its process group.
            grad: flat gradient of this rank's batch, ``[ranks * n]``.
            output: flat shard, ``[n]``.
        """
        pieces = grad.view(state.world_size, -1)
        sent = pieces.to(self.dtype) if self.dtype in _HALVES else self._encode(pieces)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=state.process_group)
        values = received.to(SCALE) if self.dtype in _HALVES else self._decode(received, pieces.size(1))
        output.copy_(values.sum(0) / state.world_size)

    def _encode(self, pieces: Tensor) -> Tensor:
        """The bytes of each piece and then of its scales, ``[ranks, bytes]``."""
        padded = pad(pieces, (0, padding_to(self.block, pieces.size(1))))
        rounded, scales = round_groups(padded.unflatten(1, (-1, self.block)), self.dtype)
        return torch.cat([rounded.flatten(1).view(torch.uint8), scales.view(torch.uint8)], dim=1)

    def _decode(self, received: Tensor, numel: int) -> Tensor:
        """The pieces that have arrived, ``[ranks, numel]`` in float32."""
        padded = numel + padding_to(self.block, numel)
        rounded, scales = received.split([padded, padded // self.block * SCALE.itemsize], dim=1)
        groups = rounded.view(self.dtype).unflatten(1, (-1, self.block))
        return restore_groups(groups, numbers_of(scales, SCALE)).flatten(1)[:, :numel]


@dataclass(frozen=True, eq=False)
class BoundHook:
    """A hook with its state; equal to itself only, as nothing tells whether two states do the same.

    Attributes:
        name: for messages.
        reduce: fills its second argument with the shard of the reduced gradient; None if the hook takes no output.
        in_place: reduces its argument in place; None if the hook needs an output.
    """

    name: str
    reduce: Callable[[Tensor, Tensor], None] | None
    in_place: Callable[[Tensor], None] | None


_TRACEABLE: dict[Any, Callable[..., None]] = {
    default_hooks.allreduce_hook: allreduce_hook,
    default_hooks.reduce_scatter_hook: reduce_scatter_hook,
    default_hooks.fp16_compress_hook: fp16_compress_hook,
    default_hooks.bf16_compress_hook: bf16_compress_hook,
}


def bind_hook(state: Any, hook: Callable[..., Any]) -> BoundHook:
    """Bind a hook to its state, and find its kind by its parameters. Torch's own hooks are replaced by those of this module.

    Args:
        state: the hook's first argument.
        hook: ``hook(state, grad, output)``, ``hook(state, grad)`` or, if it does both, ``hook(state, grad, output=None)``.

    Raises:
        TypeError: the hook is neither.
    """
    if not callable(hook):
        raise TypeError(f"A communication hook is a function, not {hook!r}")
    if inspect.isroutine(hook):
        hook = _TRACEABLE.get(hook, hook)
    counts = _argument_counts(hook)
    if counts.isdisjoint((2, 3)):
        raise TypeError(
            f"The communication hook {hook_name(hook)!r} takes neither (state, grad, output) nor (state, grad); "
            f"its parameters are {inspect.signature(hook)}"
        )
    bound = functools.partial(hook, state)
    return BoundHook(hook_name(hook), bound if 3 in counts else None, bound if 2 in counts else None)


def _argument_counts(hook: Callable[..., Any]) -> set[int]:
    """Numbers of positional arguments that a hook takes; an option other than ``output=None`` is none of them."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except ValueError as error:
        raise TypeError(f"The parameters of the communication hook {hook_name(hook)!r} are unknown") from error
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return set()
    required = sum(p.default is p.empty for p in positional)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return {count for count in (2, 3) if count >= required}
    accepted = next(
        (index for index, p in enumerate(positional) if p.default is not p.empty and p.default is not None), len(positional)
    )
    return set(range(required, accepted + 1))
