"""Composable ``checkpoint`` (``torch.distributed._composable.checkpoint``) in modules that are compiled.

Torch's composable ``checkpoint`` registers hooks around a module. Dynamo cannot trace them, and breaks the graph inside of the
checkpoint: forward saves the tensors of compiled code, the recomputation, which is not compiled, saves others, and torch raises
``CheckpointError``. Here the hooks do nothing while Dynamo traces, and the module's forward calls ``torch.utils.checkpoint``,
which Dynamo knows. Uncompiled calls go through torch's hooks.

Source: torch/distributed/_composable/checkpoint_activation.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.compiler import is_dynamo_compiling
from torch.utils.checkpoint import checkpoint

from passes.fx.torch_internals.distributed import CheckpointHooks


class _Calls:
    """The calls of a checkpointed module.

    Attributes:
        is_outside_of_hooks: False while torch's hooks run around a call, as they do in uncompiled code.
    """

    __slots__ = ("is_outside_of_hooks",)

    def __init__(self) -> None:
        self.is_outside_of_hooks = True


def trace_checkpoints(modules: Iterable[nn.Module]) -> None:
    """Make Dynamo trace the composable checkpoints around modules, those inside of these modules not among them."""
    for module in modules:
        hooks = CheckpointHooks.of(module)
        if hooks is not None:
            calls = _Calls()
            hooks.wrap(functools.partial(_begin, calls), functools.partial(_end, calls))
            module.__dict__["forward"] = _forward(module, calls, hooks.options)


def _begin(calls: _Calls, torchs: Callable[..., None]) -> Callable[..., None]:
    def forward_pre_hook(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not is_dynamo_compiling():
            calls.is_outside_of_hooks = False
            torchs(module, args, kwargs)

    return forward_pre_hook


def _end(calls: _Calls, torchs: Callable[..., None]) -> Callable[..., None]:
    def forward_hook(module: nn.Module, inputs: Any, output: Any) -> None:
        if not calls.is_outside_of_hooks:
            calls.is_outside_of_hooks = True
            torchs(module, inputs, output)

    return forward_hook


def _forward(module: nn.Module, calls: _Calls, options: dict[str, Any]) -> Callable[..., Any]:
    own: Callable[..., Any] | None = module.__dict__.get("forward")

    def original(*args: Any, **kwargs: Any) -> Any:
        # Found at each call, as a module may become a unit, which changes its class.
        return module.__class__.forward(module, *args, **kwargs) if own is None else own(*args, **kwargs)

    def forward(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() and calls.is_outside_of_hooks:
            return checkpoint(original, *args, use_reentrant=False, **options, **kwargs)
        return original(*args, **kwargs)

    return forward
