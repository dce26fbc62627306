"""Dtypes that single parameters compute in, by name. They refine the ``MixedPrecisionPolicy`` of a unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Literal, TypeAlias

import torch
from torch import nn

#: A dtype, or the dtype that the parameter has.
Choice: TypeAlias = torch.dtype | Literal["keep"]
ParamDtypes: TypeAlias = Mapping[str, Choice] | Callable[[str, nn.Parameter], Choice | None]


def check_param_dtypes(given: ParamDtypes | None) -> None:
    """Raise a TypeError if ``given`` is neither a function nor a mapping from patterns to dtypes."""
    if given is None or callable(given):
        return
    if not isinstance(given, Mapping):
        raise TypeError(f"fully_shard(param_dtypes=...) takes a mapping or a function (name, parameter), not {given!r}.")
    for pattern, choice in given.items():
        _check(choice, f"fully_shard(param_dtypes=...) has {choice!r} for {pattern!r}")


def param_dtype_of(given: ParamDtypes, name: str, param: nn.Parameter) -> torch.dtype | None:
    """Return the dtype that a parameter is to compute in; None: the policy decides.

    Args:
        given: the user's argument.
        name: the parameter's name in the module that is sharded.
        param: the parameter, not sharded yet.

    Raises:
        TypeError: a function returns something else than a floating-point dtype, "keep" or None.
    """
    if callable(given):
        choice = given(name, param)
        if choice is not None:
            _check(choice, f"fully_shard(param_dtypes=...) returned {choice!r} for parameter {name}")
    else:
        # "*.gate.weight" also means a gate of the module itself.
        choice = next(
            (given[pattern] for pattern in given if any(fnmatchcase(text, pattern) for text in (name, f".{name}"))), None
        )
    return param.dtype if choice == "keep" else choice


def _check(choice: object, what: str) -> None:
    if choice != "keep" and not (isinstance(choice, torch.dtype) and choice.is_floating_point):
        raise TypeError(f"{what}: give a floating-point dtype, such as torch.float32, or 'keep' for the parameter's own.")
