"""Communication hooks with tensors of their own, and with random numbers.

The tensors belong to parameters, not to buckets: whichever parameters a graph, or uncompiled code, reduces together, a hook
finds what it left for each of them. A hook makes a parameter's tensors once, reads them and writes to them in place; in a graph
they are inputs, which the graph updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..fx.torch_internals.core import FakeTensorMode, _disable_current_modes
from .layout import REPLICATED, padded_shard_numel, padded_shard_shape

#: The name of the key of random numbers among the tensors of a parameter.
RANDOM = "random"

#: What the names of tensors begin with that a hook over replicas has.
OVER_REPLICAS = "replicas."


@dataclass(frozen=True)
class HookParameter:
    """A parameter whose gradient a hook reduces.

    Attributes:
        shape: of its full gradient.
        dim: the dimension that is cut into shards; -1 for a scalar, which each rank holds whole.
        ranks: the number of shards.
        dtype, device: of the reduction.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def piece_shape(self) -> list[int]:
        """Shape of each shard, padded to the same on all ranks."""
        return padded_shard_shape(self.shape, self.dim, self.ranks)

    @property
    def numel(self) -> int:
        """The elements of a shard."""
        return padded_shard_numel(self.shape, self.dim, self.ranks)

    @property
    def is_cut(self) -> bool:
        return self.dim != REPLICATED


@dataclass(frozen=True)
class HookBucket:
    """The parameters whose gradients are reduced together, and the hook's tensors.

    Attributes:
        parameters: in the order in which their gradients stand in the flat one.
        tensors: for each of them what ``init_tensors`` made, to be read, and written to in place.
    """

    parameters: tuple[HookParameter, ...]
    tensors: tuple[dict[str, Tensor], ...]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """The runs of each parameter in a tensor ``[ranks * n]`` like the gradient, views: ``[ranks, numel]`` each."""
        rows = flat.view(self.parameters[0].ranks, -1)
        return list(rows.split([parameter.numel for parameter in self.parameters], dim=1))

    def flat(self, name: str) -> Tensor:
        """The parameters' tensors of that name, ``[ranks, numel]`` each, as one like the gradient: ``[ranks * n]``."""
        found = [tensors[name] for tensors in self.tensors]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).reshape(-1)

    def write(self, name: str, flat: Tensor) -> None:
        """Write the runs of a tensor like the gradient, ``[ranks * n]``, to the parameters' tensors of that name."""
        for tensors, piece in zip(self.tensors, self.pieces(flat), strict=True):
            tensors[name].copy_(piece)


@dataclass(frozen=True, eq=False)
class StatefulHook:
    """A hook that is called with tensors; equal to itself only.

    Attributes:
        reduce: ``reduce(grad, output, bucket)``; without ``init`` ``reduce(grad, output)``; in place
            ``reduce(grad, None, bucket)`` or ``reduce(grad)``.
        init: makes the tensors of a parameter, by name; None: it has none.
        draws: whether it draws random numbers.
        in_place: whether it leaves its result in the gradient.
        seed: what its random numbers begin with.
    """

    reduce: Callable[..., None]
    init: Callable[[HookParameter], dict[str, Tensor]] | None = None
    draws: bool = False
    in_place: bool = False
    seed: int = 0
    _made: dict[tuple[HookParameter, ...], list[tuple[int, str, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def new_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        """What the hook makes for a parameter.

        Raises:
            TypeError: it is no dictionary of tensors.
            ValueError: a tensor has the name of the random numbers.
        """
        made = {} if self.init is None else self.init(parameter)
        if not isinstance(made, dict) or not all(isinstance(tensor, Tensor) for tensor in made.values()):
            raise TypeError(f"init_tensors of a communication hook returns a dictionary of tensors, not {made!r}.")
        if RANDOM in made:
            raise ValueError(f"A tensor of a communication hook cannot be called {RANDOM!r}, as its random numbers are.")
        return made

    def bucket(
        self, parameters: Sequence[HookParameter], tensors: Sequence[Tensor], names: Sequence[tuple[int, str]]
    ) -> HookBucket:
        """The bucket of some parameters.

        Args:
            parameters: the parameters.
            tensors: the tensors, without the random numbers.
            names: for each tensor, the place of its parameter, and its name.
        """
        found: list[dict[str, Tensor]] = [{} for _ in parameters]
        for tensor, (place, name) in zip(tensors, names, strict=True):
            found[place][name] = tensor
        return HookBucket(tuple(parameters), tuple(found))


def tensors_of_hook(hook: StatefulHook, parameters: Sequence[HookParameter]) -> list[tuple[int, str, Tensor]]:
    """What a hook is called with for a bucket: fake tensors, each with the place of its parameter, and its name. The first
    parameter's random numbers are those of the bucket."""
    key = tuple(parameters)
    if key not in hook._made:
        hook._made[key] = _make_fake(hook, parameters)
    return hook._made[key]


def _make_fake(hook: StatefulHook, parameters: Sequence[HookParameter]) -> list[tuple[int, str, Tensor]]:
    found = []
    with _disable_current_modes(), FakeTensorMode():
        if hook.draws:
            found.append((0, RANDOM, torch.zeros(3, dtype=torch.int64, device=parameters[0].device)))
        for place, parameter in enumerate(parameters):
            found += [(place, name, tensor) for name, tensor in hook.new_tensors(parameter).items()]
    return found
