"""What microbatches leave of a parameter for the next one: gathered values and unfinished gradients."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from .own_storage import with_own_storage

#: What changes with every write to a parameter.
Stamp: TypeAlias = tuple[int, int, int]

_optimizer_steps = 0


def _count_step(*_: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


# Every torch optimizer calls it, also one that writes parameters in a way that autograd does not see.
register_optimizer_step_post_hook(_count_step)


class FlatSlice(NamedTuple):
    """A run of a flat buffer: ``numel`` elements from ``offset`` on."""

    flat: Tensor
    offset: int
    numel: int

    def tensor(self) -> Tensor:
        """The run, a view: ``[numel]``."""
        return self.flat.narrow(0, self.offset, self.numel)


def whole_buffer(slices: Sequence[FlatSlice | None]) -> Tensor | None:
    """The flat buffer that consists of these slices in this order; None if there is no such buffer."""
    first = slices[0]
    end = 0
    for piece in slices:
        if piece is None or first is None or piece.flat is not first.flat or piece.offset != end:
            return None
        end += piece.numel
    return first.flat if first is not None and end == first.flat.numel() else None


class ParamState:
    """The state of one parameter between the graphs that work on it.

    Attributes:
        unsharded_grad: the full gradient of microbatches that did not reduce: full shape, in the dtype of the reduction.
        partial_grad: the padded gradient shard of microbatches that did not all-reduce, in the dtype of the reduction.
        is_unsharded: the gathered parameter is there because of ``unshard()``: its module shows it, and the next forward of
            a unit that reshards after forward frees it.
    """

    def __init__(self) -> None:
        self.unsharded_grad: Tensor | None = None
        self.partial_grad: FlatSlice | None = None
        self.is_unsharded = False
        self._full: Tensor | None = None
        self._shown: Tensor | None = None
        self._full_of: Stamp = (0, 0, 0)
        self._gathering_of: Stamp | None = None

    @property
    def is_accumulating(self) -> bool:
        """Whether gradients of earlier microbatches wait for communication."""
        return self.unsharded_grad is not None or self.partial_grad is not None

    def discard_gradients(self) -> None:
        """Forget gradients that wait for communication."""
        self.unsharded_grad = self.partial_grad = None

    def start_full(self, param: nn.Parameter) -> None:
        """Note that a gather of ``param`` as it is now is in flight."""
        self._gathering_of = stamp(param)

    def keep_full(self, param: nn.Parameter, full: Tensor) -> None:
        """Keep a gathered parameter for as long as ``param`` does not change, from the start of its gather on."""
        self._full, self._full_of = full, self._gathering_of or stamp(param)
        self._shown = self._gathering_of = None

    def full(self, param: nn.Parameter) -> Tensor | None:
        """The gathered parameter, unless there is none or ``param`` has changed since."""
        if self._full is not None and self._full_of != stamp(param):
            self._full, self._shown, self.is_unsharded = None, None, False
        return self._full

    def shown(self, param: nn.Parameter) -> Tensor | None:
        """What the user sees of the gathered parameter that ``unshard()`` left; None if there is none."""
        full = self.full(param)
        if full is None or not self.is_unsharded:
            return None
        if self._shown is None:
            # Not of :meth:`full`: what graphs take and give is theirs, down to the storage.
            self._shown = with_own_storage(full)
        return self._shown

    def will_have_full(self, param: nn.Parameter) -> bool:
        """Whether :meth:`full` gives the parameter once the gather in flight, if there is one, is finished."""
        if self._gathering_of is not None:
            return self._gathering_of == stamp(param)
        return self.full(param) is not None

    def drop_full(self) -> None:
        """Free the gathered parameter, and forget one in flight."""
        self._full = self._shown = self._gathering_of = None
        self.is_unsharded = False


def stamp(param: nn.Parameter) -> Stamp:
    """Changes with every write to a parameter: operators count writes on the DTensor or on its local tensor."""
    return param._version, param._local_tensor._version, _optimizer_steps  # type: ignore[attr-defined]


def set_local(tensor: Any, local: Tensor) -> None:
    """Give a DTensor another local tensor, which lies at offset 0 of its storage. It keeps its identity."""
    tensor._local_tensor = local
    if tensor.storage_offset():
        # A DTensor that was made of a view says that it is at the view's offset.
        tensor.data = DTensor(local, tensor._spec, requires_grad=False)


def set_grad_in(param: nn.Parameter, local: Tensor, piece: FlatSlice) -> None:
    """Let ``param.grad`` be a DTensor of this rank's part, a view in ``piece``; one that is there keeps its identity."""
    grad: Any = param.grad
    local = with_own_storage(local)
    if grad is None:
        grad = param.grad = DTensor(local, param._spec, requires_grad=False)  # type: ignore[attr-defined, assignment]
    set_local(grad, local)
    # On the memory itself, which is free as soon as the user clears the gradient. What stands on a tensor, torch.save saves.
    storage: Any = local.untyped_storage()
    storage._fsdp_lies_in = (weakref.ref(local), piece)


def grad_slice(param: nn.Parameter) -> FlatSlice | None:
    """Where ``param.grad`` lies in a flat buffer; None if the user put it elsewhere."""
    local = getattr(param.grad, "_local_tensor", None)
    if local is None:
        return None
    noted, piece = getattr(local.untyped_storage(), "_fsdp_lies_in", (None, None))
    return piece if noted is not None and noted() is local else None
