"""Steps of bfloat16 parameters in float32, whose results are rounded up or down at random.

A bfloat16 has eight bits, so that a step smaller than 1/512 of a parameter is lost if it is rounded to the nearest. Rounded by
chance, the mean of many steps is right, and no float32 copy of parameters is needed.

States are float32. Random numbers depend on the seed, the number of steps, the parameters of a run, and the rank within the
group that shards. So replicas round alike.

Source: torchao's ``bf16_stochastic_round``; Gupta et al., arXiv 1502.02551.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Optimizer

from passes.collectives.layout import REPLICATED
from passes.fx.torch_internals.objects import local_tensor

from .runs import Run
from .torch_step import step_as

_NARROW = torch.bfloat16
#: The bits of a float32 that a bfloat16 lacks.
_LOST_BITS = 16


def is_rounded(run: Run) -> bool:
    """Return whether a run's step is rounded by chance."""
    return run.flat.dtype == _NARROW


def check_is_in_run(param: Any) -> None:
    """Raise a RuntimeError if a parameter in no run would have to be rounded by chance."""
    if param.dtype.is_floating_point and param.dtype.itemsize < 4:
        layout = f" ({param.placements} on {param.device_mesh})" if isinstance(param, DTensor) else ""
        raise RuntimeError(
            f"A parameter of shape {tuple(param.shape)} and dtype {param.dtype}{layout} cannot be rounded by chance: "
            "flat_optimizer(stochastic_rounding=...) rounds bfloat16 parameters that fully_shard has sharded, with gradients "
            "of their dtype and contiguous local tensors. Give the parameter an optimizer of its own, or make it float32."
        )


def step_rounded(
    optimizer: Optimizer,
    step: Callable[[Optimizer], Any],
    run: Run,
    group: Mapping[str, Any],
    place: int,
    seed: int,
    count: int,
) -> None:
    """Step one run in float32, and round the result by chance.

    Args:
        optimizer: the optimizer.
        step: the step of its torch class.
        run: the run, with a gradient. Its state becomes float32.
        group: the settings.
        place: the index of the run's first parameter among those of the optimizer.
        seed: the seed; equal on all ranks.
        count: the number of steps before this one.
    """
    wide = run.flat.float()
    gradient = run.flat.grad
    assert gradient is not None
    wide.grad = gradient.float()
    # A state dict may have been saved by torch's optimizer, in bfloat16.
    narrow = {name: value for name, value in run.state.items() if isinstance(value, Tensor) and value.dtype == _NARROW}
    run.state.update({name: value.float() for name, value in narrow.items()})
    kept: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
    kept[wide] = run.state
    step_as(optimizer, step, [{**group, "params": [wide]}], kept)
    run.flat.copy_(_rounded(wide, seed, count, place, run.sharded[0].mesh.shard_rank))
    # Scalars are whole on each rank, and have to stay equal.
    start = 0
    for index, (param, numel) in enumerate(zip(run.sharded, run.numels, strict=True)):
        if param.dim == REPLICATED and param.mesh.shard_size > 1:
            piece = slice(start, start + numel)
            run.flat[piece] = _rounded(wide[piece], seed, count, place + index, -1)
        start += numel


def _rounded(wide: Tensor, *key: int) -> Tensor:
    """Round float32 numbers to bfloat16, up or down at random. ``key`` decides the random numbers. NaN and infinities stay."""
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    generator = torch.Generator(wide.device).manual_seed(int.from_bytes(digest, "little") >> 1)
    chance = torch.randint(1 << _LOST_BITS, wide.shape, dtype=torch.int32, device=wide.device, generator=generator)
    bits = (wide.view(torch.int32) + chance) >> _LOST_BITS << _LOST_BITS
    return torch.where(wide.isfinite(), bits.view(torch.float32), wide).to(_NARROW)


def count_of(optimizer: Optimizer, run: Run) -> int | None:
    """Return the number of steps that a run's state tells. None for SGD, whose state does not contain the number."""
    return None if isinstance(optimizer, SGD) else int(run.state.get("step", 0))


def wide_states(optimizer: Optimizer, given: Mapping[str, Any]) -> dict[Any, dict[str, Any]]:
    """Return the float32 states of bfloat16 parameters in a state dict, which ``load_state_dict`` has rounded to bfloat16.

    Args:
        optimizer: the optimizer that has loaded the state dict.
        given: the state dict.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    found: dict[Any, dict[str, Any]] = {}
    for param, number in zip(params, numbers, strict=True):
        if param.dtype != _NARROW:
            continue
        entry = given["state"].get(number) or {}
        wide = {name: value for name, value in entry.items() if isinstance(value, Tensor) and _is_wide(value, param)}
        if wide:
            found[param] = {name: value.to(local_tensor(param).device) for name, value in wide.items()}
    return found


def _is_wide(value: Tensor, param: Tensor) -> bool:
    return value.dtype == torch.float32 and value.shape == param.shape and value.dim() > 0
