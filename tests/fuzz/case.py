"""A case: a model and a loop, as data that prints as the code that makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any


class _Data:
    """Prints as the call that makes it, without what it has by default."""

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class Block(_Data):
    """A block of a model.

    Attributes:
        kind: a key of :data:`.blocks.KINDS`.
        checkpoint: "around" its call, "inside" of its forward, or none.
        unit: "own"; "nested": and one inside of it; "with next": one of both; or none: a part of the root's.
        reshard: its unit's ``reshard_after_forward``.
    """

    kind: str = "mlp"
    checkpoint: str = ""
    unit: str = "own"
    reshard: bool | int | None = None


@dataclass(frozen=True, repr=False)
class Model(_Data):
    """A model: an embedding, blocks, and a head.

    Attributes:
        blocks: the blocks.
        dtype: of its parameters.
        tied: the head's weight is the embedding's.
        again: the index of a block that is called once more behind the last one; None: none is.
        policy: ``param_dtype`` and ``reduce_dtype`` of all units; None: no policy.
        reshard: the root's ``reshard_after_forward``.
        cut_last: parameters are cut along their last dimension, where ranks divide that.
    """

    blocks: tuple[Block, ...]
    dtype: str = "float64"
    tied: bool = False
    again: int | None = None
    policy: tuple[str | None, ...] | None = None
    reshard: bool | None = None
    cut_last: bool = False


@dataclass(frozen=True, repr=False)
class Micro(_Data):
    """A microbatch: forwards and one backward.

    Attributes:
        sizes: batch and length on each rank.
        skips: the indices of blocks that it leaves out, on all ranks.
        forwards: how many forwards the loss is the sum of.
        between: calls after the last forward and ahead of the backward.
    """

    sizes: tuple[tuple[int, int], ...]
    skips: tuple[int, ...] = ()
    forwards: int = 1
    between: tuple[Call, ...] = ()


@dataclass(frozen=True, repr=False)
class Call(_Data):
    """A call of a method of a sharded module, such as ``set_requires_gradient_sync``.

    Attributes:
        method: its name.
        path: the module; empty: the root.
        args, kwargs: what it takes; modules as :class:`Path`.
    """

    method: str
    path: str = ""
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


@dataclass(frozen=True, repr=False)
class Path(_Data):
    """A module in the arguments of a call."""

    path: str


@dataclass(frozen=True, repr=False)
class Step(_Data):
    """The end of a step: gradients are compared, clipped if so, and the optimizer steps.

    Attributes:
        clip: the norm to clip to.
    """

    clip: float | None = None


@dataclass(frozen=True, repr=False)
class Evaluate(_Data):
    """A forward without gradients, in ``inference_mode`` if so."""

    sizes: tuple[tuple[int, int], ...]
    inference: bool = False


@dataclass(frozen=True, repr=False)
class Freeze(_Data):
    """``requires_grad_`` of a module's parameters."""

    path: str
    requires_grad: bool


@dataclass(frozen=True, repr=False)
class Reload(_Data):
    """Load a state dict, after other values have been written to what it is of.

    Attributes:
        what: "model" (``state_dict``), "full" (torch's ``get_model_state_dict`` of full parameters), or "optimizer".
    """

    what: str = "model"


Event = Micro | Call | Step | Evaluate | Freeze | Reload


def data_ranks(mesh: tuple[int, ...], features: tuple[str, ...]) -> int:
    """Count the ranks of a mesh that have data of their own."""
    return mesh[0] if "tensor parallel" in features else math.prod(mesh)


@dataclass(frozen=True, repr=False)
class Case(_Data):
    """A model, and a loop that trains it.

    Attributes:
        mesh: its shape; two dimensions are replicas and shards.
        model: the model.
        events: the loop.
        optimizer: a key of :data:`.execute.OPTIMIZERS`.
        features: "offload", "rounded", "tensor parallel" (the mesh is of shards, and of ranks that cut layers), "by block" (each
            block is compiled by itself), or keys of :data:`.execute.FEATURES`.
        options: of ``torch.compile``, besides the lowering.
        factor: what gradients are divided by; None: by the number of ranks with data of their own.
    """

    mesh: tuple[int, ...]
    model: Model
    events: tuple[Event, ...]
    optimizer: str = "sgd"
    features: tuple[str, ...] = ()
    options: tuple[tuple[str, Any], ...] = field(default=())
    factor: float | None = None

    @property
    def world(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh)

    @property
    def data_ranks(self) -> int:
        """The number of ranks with data of their own."""
        return data_ranks(self.mesh, self.features)
