"""Options and modes of Inductor that users give to ``fsdp_backend`` through ``torch.compile``."""

from __future__ import annotations

import typing
from collections.abc import Callable, Mapping
from typing import Any

from passes.fx.torch_internals.inductor import inductor_config, list_mode_options

#: The name of Inductor's option for CUDA graphs.
CUDAGRAPHS = "triton.cudagraphs"

_PLACED = "fsdp_backend places and joins collectives itself: see options['schedule'] and options['min_bucket_bytes']"
# Options that would have no effect, or undo a pass of this backend: for each, a test for bad values, and the reason.
_CONTRADICTING: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "freezing": (bool, "parameters that are frozen into the code cannot be sharded"),
    "use_joint_graph_passes": (lambda value: not value, "passes of fsdp_backend run among these"),
    "reorder_for_compute_comm_overlap": (bool, _PLACED),
    "bucket_all_gathers_fx": (lambda value: value != "none", _PLACED),
    "bucket_reduce_scatters_fx": (lambda value: value != "none", _PLACED),
    "bucket_all_reduces_fx": (lambda value: value != "none", _PLACED),
    "aten_distributed_optimizations.enable_overlap_scheduling": (bool, _PLACED),
    "aten_distributed_optimizations.collective_bucketing": (bool, _PLACED),
}


def is_inductors(key: str) -> bool:
    """Return whether Inductor has an option of this name. As in ``torch.compile``, dashes count as underscores."""
    return _name(key) in inductor_config.get_config_copy()  # type: ignore[attr-defined]


def of_mode(mode: str) -> dict[str, Any]:
    """Return the options that a mode of ``torch.compile`` stands for.

    Raises:
        ValueError: there is no such mode.
    """
    known = list_mode_options()
    if mode not in known:
        raise ValueError(f"There is no mode={mode!r}; there are: {', '.join(known)}.")
    return dict(known[mode])


def asks_for_cudagraphs(settings: Mapping[str, Any]) -> bool:
    """Return whether these settings, or else Inductor's global configuration, turn CUDA graphs on."""
    return bool(settings.get(CUDAGRAPHS, inductor_config.triton.cudagraphs))


def checked(options: Mapping[str, Any]) -> dict[str, Any]:
    """Check options of Inductor as ``torch.compile`` does. Return them by their names in Inductor's configuration.

    Raises:
        ValueError: a value has the wrong type, or contradicts what ``fsdp_backend`` does.
    """
    settings = {}
    for key, value in options.items():
        name = _name(key)
        kind: Any = inductor_config.get_type(name)  # type: ignore[attr-defined]
        # isinstance rejects generic types. torch.compile skips the check for them, too.
        if typing.get_origin(kind) is None and not isinstance(value, kind):
            raise ValueError(f"options[{key!r}] is an option of Inductor and must be of type {kind.__name__}, not {value!r}.")
        contradicts, reason = _CONTRADICTING.get(name, (lambda _: False, ""))
        if contradicts(value):
            raise ValueError(f"options[{key!r}] = {value!r} of Inductor contradicts fsdp_backend: {reason}.")
        settings[name] = value
    return settings


def _name(key: str) -> str:
    return key.replace("-", "_")
