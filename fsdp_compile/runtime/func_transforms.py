"""Transforms of ``torch.func`` that compute gradients, called in an uncompiled forward.

They refuse all saved-tensor hooks around them, also those of units (:mod:`.uncompiled`). So the hooks of units are removed
while a transform runs. What autograd saves there keeps the full parameters in memory until backward.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch.compiler import is_dynamo_compiling

from passes.fx.torch_internals.patches import gradient_transforms

from .uncompiled import without_hooks_of_units


def install() -> None:
    """Make the transforms remove the hooks of units, until ``patches.uninstall()``. Hooks of others are still refused."""

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def transform(*args: Any, **kwargs: Any) -> Any:
            if is_dynamo_compiling():
                return original(*args, **kwargs)
            with without_hooks_of_units():
                return original(*args, **kwargs)

        return transform

    for method in gradient_transforms:
        method.install(make)
