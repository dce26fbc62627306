"""Cases: a model and a training loop, as data that prints as the code that makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any


class _Data:
    """A dataclass that prints as the call that makes it, without arguments that have their defaults."""

    def __repr__(self) -> str:
        given = [(one.name, getattr(self, one.name)) for one in fields(self) if getattr(self, one.name) != one.default]  # type: ignore[arg-type]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class Block(_Data):
    """A block of a model.

    Attributes:
        kind: a key of :data:`.blocks.KINDS`.
        checkpoint: "around" the block's call, "inside" of its forward, or empty for no checkpoint.
        unit: "own" (a unit), "nested" (the first child is another unit), "with next" (one unit with the next block), or empty
            (the parameters are the root's).
        reshard: the unit's ``reshard_after_forward``.
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
        dtype: the dtype of parameters, as a name.
        tied: whether the head's weight is the embedding's.
        again: the index of a block that is called once more after the last one; None: no block.
        policy: ``param_dtype`` and ``reduce_dtype`` of all units; None: no policy.
        reshard: the root's ``reshard_after_forward``.
        cut_last: whether parameters are sharded on their last dimension where the number of ranks divides it.
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
        sizes: (batch, length) for each rank with data of its own, or one pair for all ranks.
        skips: the indices of blocks that the microbatch leaves out, on all ranks.
        forwards: the number of forwards; the loss is the sum of theirs.
        between: calls after the last forward and before the backward.
    """

    sizes: tuple[tuple[int, int], ...]
    skips: tuple[int, ...] = ()
    forwards: int = 1
    between: tuple[Call, ...] = ()


@dataclass(frozen=True, repr=False)
class Call(_Data):
    """A call of a method of a sharded module, such as ``set_requires_gradient_sync``.

    Attributes:
        method: the name of the method.
        path: the module; empty: the root.
        args, kwargs: the arguments; modules are given as :class:`Path`.
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
    """The end of a step: gradients are recorded and clipped, and the optimizer steps.

    Attributes:
        clip: the norm to clip to; None: no clipping.
    """

    clip: float | None = None


@dataclass(frozen=True, repr=False)
class Evaluate(_Data):
    """A forward without gradients: under ``inference_mode`` if ``inference``, else under ``no_grad``."""

    sizes: tuple[tuple[int, int], ...]
    inference: bool = False


@dataclass(frozen=True, repr=False)
class Freeze(_Data):
    """A call of ``requires_grad_`` of a module."""

    path: str
    requires_grad: bool


@dataclass(frozen=True, repr=False)
class Reload(_Data):
    """A state dict that is taken, and loaded after its tensors in the model or optimizer have been overwritten.

    Attributes:
        what: "model" (``state_dict``), "full" (torch's ``get_model_state_dict`` of full parameters), or "optimizer".
    """

    what: str = "model"


Event = Micro | Call | Step | Evaluate | Freeze | Reload


def data_ranks(mesh: tuple[int, ...], features: tuple[str, ...]) -> int:
    """Return the number of ranks of a mesh that have data of their own."""
    return mesh[0] if "tensor parallel" in features else math.prod(mesh)


@dataclass(frozen=True, repr=False)
class Case(_Data):
    """A model, and a loop that trains it.

    Attributes:
        mesh: the shape of the mesh; two dimensions are replicas and shards.
        model: the model.
        events: the loop.
        optimizer: a key of :data:`.execute.OPTIMIZERS`.
        features: "offload", "rounded", "tensor parallel" (the mesh dimensions are shards and tensor-parallel ranks), "by block"
            (each block is compiled by itself), "uneven" (gates are open on every other rank, and the flag for unused parameters
            is set), "other order" (ranks take turns in reading some weights in another order), "padded" (matrix products are padded),
            "low thresholds" (a few bytes make a parameter large, and a unit not small), a placement (:data:`.execute.PLACEMENTS`), or keys of :data:`.execute.FEATURES`.
        options: options of ``torch.compile``, besides the lowering.
        factor: the divide factor of gradients; None: the number of ranks with data of their own.
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
