"""Communication hooks with tensors of their own, and with random numbers.

The tensors belong to parameters, not to buckets. So a hook finds a parameter's tensors again, whichever parameters a graph or
uncompiled code reduces together. A hook makes a parameter's tensors once, then reads them and writes to them in place. In a
graph the tensors are inputs, which the graph updates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..fx.torch_internals.core import FakeTensorMode, _disable_current_modes
from .layout import REPLICATED, padded_shard_numel, padded_shard_shape

#: The name of the random numbers' key and count among the tensors of a parameter.
RANDOM = "random"

#: The prefix of the names of tensors that belong to a hook over replicas.
OVER_REPLICAS = "replicas."


@dataclass(frozen=True)
class HookParameter:
    """A parameter whose gradient a hook reduces. For a hook over replicas, the parameter is a flat shard, of one rank.

    Attributes:
        shape: shape of the full gradient.
        dim: the dimension that is cut into shards; -1 for a scalar, which each rank holds whole.
        ranks: the number of shards.
        dtype, device: dtype and device of the reduction.
    """

    shape: tuple[int, ...]
    dim: int
    ranks: int
    dtype: torch.dtype
    device: torch.device

    @property
    def piece_shape(self) -> list[int]:
        """The shape of each shard, padded to be the same on all ranks."""
        return padded_shard_shape(self.shape, self.dim, self.ranks)

    @property
    def numel(self) -> int:
        """The number of elements of each padded shard."""
        return padded_shard_numel(self.shape, self.dim, self.ranks)

    @property
    def is_cut(self) -> bool:
        return self.dim != REPLICATED


@dataclass(frozen=True)
class HookBucket:
    """The parameters whose gradients are reduced together, and the hook's tensors.

    Attributes:
        parameters: the parameters, in the order of their gradients in the flat gradient.
        tensors: for each parameter, the tensors of ``init_tensors`` by name, to be read, and written to in place.
    """

    parameters: tuple[HookParameter, ...]
    tensors: tuple[dict[str, Tensor], ...]

    def pieces(self, flat: Tensor) -> list[Tensor]:
        """Cut a tensor like the flat gradient, ``[ranks * n]``, into views for each parameter, ``[ranks, numel]``."""
        rows = flat.view(self.parameters[0].ranks, -1)
        return list(rows.split([parameter.numel for parameter in self.parameters], dim=1))

    def flat(self, name: str) -> Tensor:
        """Join the parameters' tensors of this name, each ``[ranks, numel]``, into one like the gradient, ``[ranks * n]``."""
        found = [tensors[name] for tensors in self.tensors]
        return (found[0] if len(found) == 1 else torch.cat(found, dim=1)).reshape(-1)

    def write(self, name: str, flat: Tensor) -> None:
        """Write the pieces of a tensor like the gradient, ``[ranks * n]``, to the parameters' tensors of this name."""
        for tensors, piece in zip(self.tensors, self.pieces(flat), strict=True):
            tensors[name].copy_(piece)


@dataclass(frozen=True, eq=False)
class StatefulHook:
    """A hook with tensors of its own, random numbers, or both; equal to itself only.

    Attributes:
        reduce: ``reduce(grad, output, bucket)``, without ``init`` ``reduce(grad, output)``. In place:
            ``reduce(grad, None, bucket)``, without ``init`` ``reduce(grad)``.
        init: makes the tensors of a parameter, by name; None: the hook has none.
        draws: whether the hook draws random numbers.
        in_place: whether the hook writes its result into the gradient.
        seed: the seed of its random numbers.
    """

    reduce: Callable[..., None]
    init: Callable[[HookParameter], dict[str, Tensor]] | None = None
    draws: bool = False
    in_place: bool = False
    seed: int = 0
    _made: dict[tuple[HookParameter, ...], list[tuple[int, str, Tensor]]] = field(default_factory=dict, init=False, repr=False)

    def new_tensors(self, parameter: HookParameter) -> dict[str, Tensor]:
        """Make the hook's tensors for a parameter, by name; without the random numbers.

        Raises:
            TypeError: the hook makes something else than a dictionary of tensors.
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
        """Make the bucket that the hook is called with.

        Args:
            parameters: the parameters.
            tensors: the tensors of all parameters, without the random numbers.
            names: for each tensor, the index of its parameter, and its name.
        """
        found: list[dict[str, Tensor]] = [{} for _ in parameters]
        for tensor, (place, name) in zip(tensors, names, strict=True):
            found[place][name] = tensor
        return HookBucket(tuple(parameters), tuple(found))


def tensors_of_hook(hook: StatefulHook, parameters: Sequence[HookParameter]) -> list[tuple[int, str, Tensor]]:
    """List the tensors that a hook takes for a bucket.

    A hook that draws takes the random numbers of the bucket's first parameter, as the first entry.

    Returns:
        For each tensor, the index of its parameter, its name, and a fake tensor of its shape and dtype.
    """
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
