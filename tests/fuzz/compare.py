"""The comparison of two systems' runs of a case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .case import Case, Micro
from .execute import EventRecord, execute

# Relative to the largest entry of the tensor, and of all tensors: a gradient near zero may be a sum of large summands.
_TOLERANCE = {"float64": (1e-8, 1e-10), "float32": (2e-3, 1e-4)}


def _differ(name: str, ours: Tensor | None, theirs: Tensor | None, bound: tuple[float, float], scale: float) -> list[str]:
    if ours is None or theirs is None:
        there = "no gradient" if ours is None else "a gradient"
        return [] if ours is theirs else [f"{name} has {there}"]
    if ours.shape != theirs.shape:
        return [f"{name} has shape {tuple(ours.shape)}, not {tuple(theirs.shape)}"]
    if not ours.numel():
        return []
    error = (ours.double() - theirs.double()).abs().max().item()
    most = bound[0] * theirs.double().abs().max().item() + bound[1] * scale
    # Negated, so that NaN differs.
    return [] if error <= most else [f"{name} is off by {error:.2e} (at most {most:.1e})"]


def _tensors(
    what: str, ours: Mapping[str, Tensor | None] | None, theirs: Mapping[str, Tensor | None] | None, bound: tuple[float, float]
) -> list[str]:
    if ours is None or theirs is None:
        return []
    scale = max((tensor.abs().max().item() for tensor in theirs.values() if tensor is not None and tensor.numel()), default=0.0)
    return [line for name in theirs for line in _differ(f"{what} of {name}", ours[name], theirs[name], bound, scale)]


def _tolerance(case: Case, device: str) -> tuple[float, float]:
    # torch's CUDA kernels for weight norm take the square root in float32 (native/cuda/WeightNorm.cu); compiled code does not.
    kinds = {block.kind for block in case.model.blocks}
    rounded = "routed" in kinds or (device == "cuda" and "parametrized" in kinds)
    return _TOLERANCE["float32" if rounded or "float32" in (case.model.dtype, *(case.model.policy or ())) else "float64"]


def differences(case: Case, ours: Sequence[EventRecord], theirs: Sequence[EventRecord], device: str = "cpu") -> list[str]:
    """Return the differences of two runs on a device in the first event that differs."""
    bound = _tolerance(case, device)
    for number, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        found = []
        for what in ("loss", "norm"):
            values = [getattr(seen, what) for seen in (one, other)]
            if None not in values:
                found += _differ(what, *(torch.tensor([value]) for value in values), bound, 0.0)
        found += _tensors("gradient", one.grads, other.grads, bound)
        found += _tensors("parameter", one.params, other.params, bound)
        if one.local and other.local and isinstance(one.event, Micro):
            found += _tensors("local gradient", one.local, other.local, bound)
        if found:
            return [f"event {number}, {one.event}: {line}" for line in found]
    return []


def check(case: Case, system: str, oracle: str = "whole", device: str = "cpu") -> list[str]:
    """Run a case with a system and with an oracle, and return the differences on all ranks. Every rank calls this.

    The oracle is "whole" or another system, and the device one, as for :func:`.execute.execute`.
    """
    found = differences(case, execute(case, system, device), execute(case, oracle, device), device)
    # Every rank gets all differences, so that ranks stop at the same case.
    everywhere: list[list[str]] = [[] for _ in range(case.world)]
    dist.all_gather_object(everywhere, found)
    return [f"rank {rank}: {line}" for rank, lines in enumerate(everywhere) for line in lines]
