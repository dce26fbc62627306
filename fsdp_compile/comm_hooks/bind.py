"""Communication hooks bound to their states, as ``register_comm_hook`` stores them."""

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from passes.collectives.stateful_hook import HookParameter
from passes.collectives.traced_hook import hook_name
from passes.fx.torch_internals.distributed import default_hooks

from .default_hooks import allreduce_hook, bf16_compress_hook, fp16_compress_hook, reduce_scatter_hook


@dataclass(frozen=True, eq=False)
class BoundHook:
    """A hook with its state; equal to itself only, as two states cannot be compared.

    Attributes:
        name: for messages.
        reduce: fills its second argument with the shard of the reduced gradient; None if the hook takes no output.
        in_place: reduces its argument in place; None if the hook needs an output.
        init: makes the hook's tensors for a parameter; ``reduce`` then has a third argument, a ``HookBucket`` with tensors of
            parameters. None: the hook has no tensors.
    """

    name: str
    reduce: Callable[..., None] | None
    in_place: Callable[[Tensor], None] | None
    init: Callable[[HookParameter], dict[str, Tensor]] | None = None


_TRACEABLE: dict[Any, Callable[..., None]] = {
    default_hooks.allreduce_hook: allreduce_hook,
    default_hooks.reduce_scatter_hook: reduce_scatter_hook,
    default_hooks.fp16_compress_hook: fp16_compress_hook,
    default_hooks.bf16_compress_hook: bf16_compress_hook,
}


def bind_hook(state: Any, hook: Callable[..., Any]) -> BoundHook:
    """Bind a hook to its state, and find its kind by its parameters. Torch's hooks are replaced by traceable ones.

    Args:
        state: the hook's first argument.
        hook: ``hook(state, grad, output)``, ``hook(state, grad)`` or, if it does both, ``hook(state, grad, output=None)``;
            with a method ``init_tensors(parameter)``: ``hook(state, grad, output, bucket)``.

    Raises:
        TypeError: the hook is not callable, or has another signature.
    """
    if not callable(hook):
        raise TypeError(f"A communication hook is a function, not {hook!r}")
    if inspect.isroutine(hook):
        hook = _TRACEABLE.get(hook, hook)
    counts = _argument_counts(hook)
    bound = functools.partial(hook, state)
    init = getattr(hook, "init_tensors", None)
    if init is not None:
        if 4 not in counts:
            raise TypeError(
                f"The communication hook {hook_name(hook)!r} has tensors of its own (init_tensors), and does not take "
                f"(state, grad, output, bucket); its parameters are {inspect.signature(hook)}"
            )
        return BoundHook(hook_name(hook), bound, None, init)
    if counts.isdisjoint((2, 3)):
        raise TypeError(
            f"The communication hook {hook_name(hook)!r} takes neither (state, grad, output) nor (state, grad); "
            f"its parameters are {inspect.signature(hook)}"
        )
    return BoundHook(hook_name(hook), bound if 3 in counts else None, bound if 2 in counts else None)


def _argument_counts(hook: Callable[..., Any]) -> set[int]:
    """Return the possible numbers of positional arguments of a hook. Options other than ``output=None`` do not count."""
    try:
        parameters = inspect.signature(hook).parameters.values()
    except ValueError as error:
        raise TypeError(f"The parameters of the communication hook {hook_name(hook)!r} are unknown") from error
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if any(p.kind is p.KEYWORD_ONLY and p.default is p.empty for p in parameters):
        return set()
    required = sum(p.default is p.empty for p in positional)
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return {count for count in (2, 3, 4) if count >= required}
    accepted = next(
        (index for index, p in enumerate(positional) if p.default is not p.empty and p.default is not None), len(positional)
    )
    return set(range(required, accepted + 1))
