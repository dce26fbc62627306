"""The state of a parameter between microbatches: gathered values and unfinished gradients."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from passes.fx.torch_internals.objects import local_of, local_tensor, set_local_tensor, spec_of, version_of

from .own_storage import with_own_storage

#: A value that changes with every write to a parameter.
Stamp: TypeAlias = tuple[int, int, int]

_optimizer_steps = 0
#: Optimizers without DTensors, each with its number of parameters.
_of_others: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()


def _count_step(optimizer: Optimizer, *_: object) -> None:
    """Count a step, unless the optimizer has no DTensors. Such a one may step on some ranks only."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if _of_others.get(optimizer) == count:
        return
    if any(isinstance(param, DTensor) for group in optimizer.param_groups for param in group["params"]):
        global _optimizer_steps
        _optimizer_steps += 1
    else:
        _of_others[optimizer] = count


def optimizer_steps() -> int:
    """Return the number of steps so far of all optimizers with DTensors."""
    return _optimizer_steps


# Torch calls the hook after every optimizer's step, also if the writes raise no version counter.
register_optimizer_step_post_hook(_count_step)


class FlatSlice(NamedTuple):
    """A run of a flat buffer: ``numel`` elements from ``offset`` on."""

    flat: Tensor
    offset: int
    numel: int

    def tensor(self) -> Tensor:
        """Return the run, ``[numel]``: a view, or the buffer itself if the run is all of it."""
        return self.flat if self.numel == self.flat.numel() else self.flat.narrow(0, self.offset, self.numel)

    def is_followed_by(self, other: FlatSlice) -> bool:
        """Return whether ``other`` begins where this run ends, in the same buffer."""
        return self.flat is other.flat and self.offset + self.numel == other.offset


class MadeByHook(NamedTuple):
    """The tensors that a communication hook keeps for a parameter.

    Attributes:
        made_for: dtype and device of the reductions that the tensors are for.
        tensors: the tensors by name.
    """

    made_for: tuple[torch.dtype, torch.device]
    tensors: dict[str, Tensor]


def joined(slices: Sequence[FlatSlice | None]) -> Tensor | None:
    """Return the part of a flat buffer that consists of these slices, in this order; None if they are no neighbours."""
    found = [piece for piece in slices if piece is not None]
    parts = neighbours(found) if len(found) == len(slices) else []
    return parts[0].tensor() if len(parts) == 1 else None


def cut(flat: Tensor, numels: Iterable[int]) -> list[FlatSlice]:
    """Cut a flat buffer into slices of these numbers of elements."""
    slices, offset = [], 0
    for numel in numels:
        slices.append(FlatSlice(flat, offset, numel))
        offset += numel
    return slices


def neighbours(slices: Iterable[FlatSlice]) -> list[FlatSlice]:
    """Merge consecutive slices that are neighbours in a buffer."""
    found: list[FlatSlice] = []
    for piece in slices:
        if found and found[-1].is_followed_by(piece):
            found[-1] = found[-1]._replace(numel=found[-1].numel + piece.numel)
        else:
            found.append(piece)
    return found


class GradientStore(Protocol):
    """A buffer that keeps the gradients of parameters from step to step (:class:`~.gradient_buffer.GradientBuffer`)."""

    def store(self, indices: Sequence[int], flat: Tensor) -> bool:
        """Copy a flat shard into the buffer, as gradients of parameters that have none. Return whether that was possible."""


class ParamState:
    """The state of one parameter between the graphs that work on it.

    Attributes:
        unsharded_grad: the full gradient of microbatches that did not reduce: full shape, in the dtype of the reduction.
        partial_grad: the padded gradient shard of microbatches that did not all-reduce, in the dtype of the reduction.
        hook_tensors: the tensors of communication hooks, by the prefix of their names: empty, or that of hooks over replicas.
        is_unsharded: ``unshard()`` gathered the parameter. Its module shows the full tensor, and the next forward of a unit
            that reshards after forward frees it.
        uses: for a parameter that is updated in backward: how many forwards have read it and wait for their backward, as far as
            is known. No graph may update the parameter before the last of these backwards.
        was_updated: the parameter was updated in backward since the last forward that read it.
        read_at: the versions of the parameter in the last forward that read it where it is stored, and needs a backward; None:
            there was none.
        gradient_slot: the buffer that keeps its gradient from step to step, and the index of its gradient there; None: there is
            no such buffer.
    """

    def __init__(self) -> None:
        self.unsharded_grad: Tensor | None = None
        self.partial_grad: FlatSlice | None = None
        self.hook_tensors: dict[str, MadeByHook] = {}
        self.is_unsharded = False
        self.uses = 0
        self.was_updated = False
        self.read_at: tuple[int, int] | None = None
        self.gradient_slot: tuple[weakref.ReferenceType[GradientStore], int] | None = None
        self._full: Tensor | None = None
        self._shown: Tensor | None = None
        self._full_of: Stamp = (0, 0, 0)
        self._gathering_of: Stamp | None = None
        self._node_shard: FlatSlice | None = None
        self._node_shard_of: Stamp = (0, 0, 0)

    @property
    def is_accumulating(self) -> bool:
        """True while gradients of earlier microbatches wait for communication."""
        return self.unsharded_grad is not None or self.partial_grad is not None

    def discard_gradients(self) -> None:
        """Drop gradients that wait for communication."""
        self.unsharded_grad = self.partial_grad = None

    def discard_hook_tensors(self) -> None:
        """Drop the tensors of communication hooks. The next reduction makes new ones."""
        self.hook_tensors = {}

    def start_full(self, param: nn.Parameter) -> None:
        """Record that a gather of ``param``, with its present values, is in flight."""
        self._gathering_of = stamp(param)

    def keep_full(self, param: nn.Parameter, full: Tensor) -> None:
        """Keep a gathered parameter until ``param`` changes. A change during the gather counts, too."""
        self._full, self._full_of = full, self._gathering_of or stamp(param)
        self._shown = self._gathering_of = None

    def full(self, param: nn.Parameter) -> Tensor | None:
        """Return the gathered parameter; None if there is none, or ``param`` has changed since the gather."""
        if self._full is not None and self._full_of != stamp(param):
            self._full, self._shown, self.is_unsharded = None, None, False
        return self._full

    def shown(self, param: nn.Parameter) -> Tensor | None:
        """Return the full tensor that users see after ``unshard()``, outside of a forward; None if there is none."""
        full = self.full(param)
        if full is None or not self.is_unsharded:
            return None
        if self._shown is None:
            # Users do not get the tensor of :meth:`full`, whose storage graphs may take over.
            self._shown = with_own_storage(full) if type(full) is Tensor else full
        return self._shown

    def will_have_full(self, param: nn.Parameter) -> bool:
        """Return whether :meth:`full` will return a tensor once the gather in flight, if any, is finished."""
        if self._gathering_of is not None:
            return self._gathering_of == stamp(param)
        return self.full(param) is not None

    def keep_node_shard(self, param: nn.Parameter, piece: FlatSlice) -> None:
        """Keep the node shard of the parameter for later graphs (hybrid sharding)."""
        self._node_shard, self._node_shard_of = piece, stamp(param)

    def node_shard(self, param: nn.Parameter) -> FlatSlice | None:
        """Return the node shard. None if there is none, or the parameter has changed since: then it is freed."""
        if self._node_shard is not None and self._node_shard_of != stamp(param):
            self._node_shard = None
        return self._node_shard

    def drop_node_shard(self) -> None:
        """Free the node shard."""
        self._node_shard = None

    def drop_full(self) -> None:
        """Free the gathered parameter, and forget a gather in flight."""
        self._full = self._shown = self._gathering_of = None
        self.is_unsharded = False


def stamp(param: nn.Parameter) -> Stamp:
    """Return the stamp of a parameter now. Operators count writes on the DTensor, or on its local tensor."""
    return version_of(param), version_of(local_tensor(param)), _optimizer_steps


def set_local(tensor: Any, local: Tensor) -> None:
    """Replace the local tensor of a DTensor by one at offset 0 of its storage. The DTensor keeps its identity."""
    set_local_tensor(tensor, local)
    if tensor.storage_offset() or tensor.device != local.device:
        # A DTensor keeps the offset and the device of the tensor that it was made from.
        tensor.data = DTensor(local, spec_of(tensor), requires_grad=False)


def set_grad_in(param: nn.Parameter, local: Tensor, piece: FlatSlice) -> None:
    """Make ``param.grad`` a DTensor with the local gradient ``local``, which lies in ``piece``.

    If there is a gradient, it keeps its identity.
    """
    grad: Any = param.grad
    local = with_own_storage(local)
    if grad is None:
        grad = param.grad = DTensor(local, spec_of(param), requires_grad=False)  # type: ignore[assignment]
    set_local(grad, local)
    note_slice(local, piece)


def note_slice(local: Tensor, piece: FlatSlice) -> None:
    """Record which run of a flat buffer ``local`` is, a tensor with a storage of its own."""
    # An attribute of the storage goes when the user clears the gradient. torch.save would save one of the tensor.
    storage: Any = local.untyped_storage()
    storage._fsdp_lies_in = (weakref.ref(local), piece)


def noted_slice(local: Tensor) -> FlatSlice | None:
    """Return the run that :func:`note_slice` recorded; None if there is none, or another tensor has the storage now."""
    noted, piece = getattr(local.untyped_storage(), "_fsdp_lies_in", (None, None))
    return piece if noted is not None and noted() is local else None


def grad_slice(param: nn.Parameter) -> FlatSlice | None:
    """Return the run of a flat buffer that ``param.grad`` lies in; None without a gradient, or if the user replaced it."""
    local = local_of(param.grad)
    return None if local is None else noted_slice(local)


def is_laid_out_alike(gradient: Any, param: Any) -> bool:
    """Return whether ``gradient`` is a DTensor with the mesh, placements, local shape and dtype of ``param``."""
    if not isinstance(gradient, DTensor) or type(local_tensor(gradient)) is not Tensor:
        return False
    local = local_tensor(gradient)
    alike = gradient.device_mesh == param.device_mesh and gradient.placements == param.placements
    return alike and local.shape == local_tensor(param).shape and local.dtype == local_tensor(param).dtype
