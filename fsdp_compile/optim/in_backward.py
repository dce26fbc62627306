"""Torch's SGD, Adam and AdamW, with a step that is part of backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer

from passes.collectives.layout import REPLICATED
from passes.fx.torch_internals.core import foreach_copy_
from passes.fx.torch_internals.objects import as_local, local_tensor, spec_of, version_of
from passes.ir.update import Update, numbers_tensor, updated

from ..units.own_storage import with_own_storage
from ..units.sharded_param import ShardedParam, params_with_memory
from ..units.updater import Planned
from .torch_step import without_hooks

_CLASSES: tuple[type[Optimizer], ...] = (SGD, Adam, AdamW)
_REFUSED = ("fused", "foreach", "capturable", "differentiable")
#: The most tensors of numbers that are cached. A step needs one for each group and step count of its parameters.
_MOST_NUMBERS = 64


class _StateBuffers:
    """The state of the parameters of one flat storage: a buffer for each name, in storage order, padding included.

    Attributes:
        params: the parameters, in storage order.
        starts: the storage offset of each parameter in a buffer.
        numel: the number of elements of a buffer.
        index: the index of each parameter in the lists.
        counts: the number of steps of each. For SGD, a loaded state counts as one step, as it does not contain the number.
    """

    def __init__(self, params: Sequence[ShardedParam]):
        self.params = sorted(params, key=lambda param: param.offset)
        ends = list(accumulate(param.padded_numel for param in self.params))
        self.starts = [0, *ends[:-1]]
        self.numel = ends[-1]
        self.index = {param: index for index, param in enumerate(self.params)}
        self.counts = [0] * len(self.params)
        self._buffers: dict[str, Tensor] = {}
        self._pieces: dict[str, list[DTensor]] = {}
        self._steps = torch.zeros(len(self.params), dtype=torch.get_default_dtype())
        self._step_of = list(self._steps.unbind())
        self._steps_version = version_of(self._steps)
        self._entries: list[dict[str, Any] | None] = [None] * len(self.params)

    def buffer(self, name: str) -> Tensor:
        if name not in self._buffers:
            flat = self._buffers[name] = self.params[0].shard.detach().new_zeros(self.numel)
            self._pieces[name] = [_piece(flat, *member) for member in zip(self.params, self.starts, strict=True)]
        return self._buffers[name]

    def pieces(self, index: int, update: Update) -> list[DTensor]:
        """Return the state of a parameter: a DTensor for each name in ``update.states``."""
        for name in update.states:
            self.buffer(name)
        return [self._pieces[name][index] for name in update.states]

    def follow(self, index: int, update: Update, entry: dict[str, Any] | None) -> None:
        """Copy ``entry``, a parameter's state in the optimizer, into the buffers: users load, replace and delete entries."""
        pieces = self.pieces(index, update)
        has_entry = bool(entry) and (update.kind == "adam" or (entry or {}).get("momentum_buffer") is not None)
        if not has_entry or entry is None:
            if self._entries[index] is not None:
                self._entries[index] = None
                self._restart(index, pieces)
            return
        if version_of(self._steps) != self._steps_version:
            self.counts = [round(step) for step in self._steps.tolist()]
            self._steps_version = version_of(self._steps)
        known = self._kept(index, update)
        if entry is self._entries[index] and all(entry.get(name) is value for name, value in known.items()):
            return
        name_of = dict(zip(update.states, pieces, strict=True))
        for name, piece in name_of.items():
            value = entry.get(name)
            if value is None:
                local_tensor(piece).zero_()
            elif value is not piece:
                local_tensor(piece).copy_(as_local(value))
        self._set_count(index, round(float(entry["step"])) if update.kind == "adam" else 1)
        entry.update(known)
        self._entries[index] = entry

    def count(self, indices: Sequence[int]) -> None:
        """Increment the step counts of parameters."""
        self._steps[list(indices)] += 1
        self._steps_version = version_of(self._steps)
        for index in indices:
            self.counts[index] += 1

    def publish(self, index: int, update: Update, states: Any) -> None:
        """Add a parameter's state to ``states``, the optimizer's, unless it is there."""
        known = self._kept(index, update)
        if self._entries[index] is None and known:
            entry = self._entries[index] = states[self.params[index].param]
            entry.update(known)

    def _kept(self, index: int, update: Update) -> dict[str, Tensor]:
        kept: dict[str, Tensor] = {"step": self._step_of[index]} if update.kind == "adam" else {}
        return kept | dict(zip(update.states, self.pieces(index, update), strict=True))

    def _restart(self, index: int, pieces: Sequence[DTensor]) -> None:
        for piece in pieces:
            local_tensor(piece).zero_()
        self._set_count(index, 0)

    def _set_count(self, index: int, count: int) -> None:
        self.counts[index] = count
        self._steps[index] = count
        self._steps_version = version_of(self._steps)


def _piece(flat: Tensor, param: ShardedParam, start: int) -> DTensor:
    padded = flat.narrow(0, start, param.padded_numel).view(param.padded_shape)
    return DTensor(with_own_storage(param.unpad(padded)), spec_of(param.param), requires_grad=False)


class _UpdateSlot(NamedTuple):
    """A parameter as its update needs it.

    Attributes:
        buffers: the buffers with its state.
        place: its index in ``buffers``.
        group: its group, for the settings.
        group_number: the index of the group.
        update: the kind of update.
    """

    buffers: _StateBuffers
    place: int
    group: dict[str, Any]
    group_number: int
    update: Update


#: Includes copies of optimizers, as copying a model copies the optimizers of its parameters.
_living: WeakSet[Optimizer] = WeakSet()


def living_optimizers() -> bool:
    """Return whether an optimizer exists that updates parameters in backward, or did so before ``remove()``."""
    return bool(_living)


class OptimizerInBackward(Optimizer):
    """The mixin of :func:`optimizer_in_backward`, which stands before the torch class among the bases."""

    _state_buffers: dict[Any, _StateBuffers] | None = None
    _groups: tuple[list[int], dict[int, tuple[int, dict[str, Any]]]] | None = None
    _tensors: dict[Any, Tensor] | None = None

    def __new__(cls, *_: Any, **__: Any) -> OptimizerInBackward:
        made = super().__new__(cls)
        _living.add(made)
        return made

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's. Its parameters are updated in backward from now on.

        Raises:
            ValueError: backward cannot update with an option of the group, or cannot update a parameter.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_options(group)
            found = [_sharded(param, self) for param in group["params"]]
        except ValueError:
            self.param_groups.pop()
            raise
        for sharded in found:
            if sharded is not None:
                sharded.updater = self
                sharded.unit.updates = True
        self._state_buffers = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Step the parameters that have a gradient, as torch's. Parameters that backward has updated have none.

        Args:
            closure: computes gradients and returns a loss, which is returned.
        """
        step: Any = without_hooks(_base(self).step)
        return step(self, closure)

    def remove(self) -> None:
        """Stop updating parameters in backward: gradients stay in ``param.grad``, and ``step()`` steps their parameters."""
        for param in params_with_memory().values():
            if param.updater is self:
                param.updater = None

    @property
    def _step_supports_amp_scaling(self) -> bool:
        # ``GradScaler.step`` reads this attribute first, so the error is raised here.
        raise RuntimeError(
            "optimizer_in_backward updates parameters by the gradients of the loss that backward is called on, which a "
            "GradScaler has scaled, and unscales only afterwards. Train in bfloat16, or use torch.optim's optimizer with a "
            "GradScaler."
        )

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:
        pass

    # The methods that backward calls (:class:`fsdp_compile.units.updater.Updater`).

    @torch.no_grad()
    def planned(self, param: ShardedParam) -> Planned:
        found = self._find(param)
        found.buffers.follow(found.place, found.update, self.state.get(param.param))
        return Planned(found.update, (id(self), found.group_number, self._count(found)))

    def numbers(self, param: ShardedParam) -> Tensor:
        found = self._find(param)
        numbers = found.update.numbers(found.group, self._count(found))
        key = numbers, param.shard.dtype, param.shard.device
        known = self._tensors
        if known is None or len(known) >= _MOST_NUMBERS:
            known = self._tensors = {}
        if key not in known:
            known[key] = numbers_tensor(*key)
        return known[key]

    def state_run(self, param: ShardedParam, numel: int, name: str) -> Tensor:
        found = self._find(param)
        return found.buffers.buffer(name).narrow(0, found.buffers.starts[found.place], numel)

    @torch.no_grad()
    def updated(self, params: Sequence[ShardedParam]) -> None:
        by_buffers: dict[int, tuple[_StateBuffers, list[int]]] = {}
        for param in params:
            found = self._find(param)
            found.buffers.publish(found.place, found.update, self.state)
            by_buffers.setdefault(id(found.buffers), (found.buffers, []))[1].append(found.place)
            param.param.grad = None
            param.state.was_updated = True
        for buffers, indices in by_buffers.values():
            buffers.count(indices)
        # Makes parameters that were gathered before the update stale, and tells autograd of the write.
        increment_version([param.local for param in params])

    @torch.no_grad()
    def update(self, param: ShardedParam) -> None:
        self.planned(param)
        found = self._find(param)
        gradient: Any = param.param.grad
        kept = [param.local, *(local_tensor(piece) for piece in found.buffers.pieces(found.place, found.update))]
        local, *states = kept
        new = updated(local, local_tensor(gradient), self.numbers(param), states, update=found.update)
        foreach_copy_(kept, new)
        self.updated([param])

    def _count(self, found: _UpdateSlot) -> int:
        count = found.buffers.counts[found.place]
        return count if found.update.kind == "adam" else min(count, 1)

    def _find(self, param: ShardedParam) -> _UpdateSlot:
        known = self._state_buffers
        if known is None:
            known = self._state_buffers = {}
        key = id(param.unit), param.shard.dtype, param.shard.device
        buffers = known.get(key)
        if buffers is None or param not in buffers.index:
            own = [each for each in param.unit.params if each.updater is self and each.shard.dtype == param.shard.dtype]
            # After a cast or move of the model, the key is another. Drop the buffers of the old key.
            for left in [left for left, other in known.items() if not other.index.keys().isdisjoint(own)]:
                del known[left]
            buffers = known[key] = _StateBuffers(own)
        number, group = self._group_of(param)
        return _UpdateSlot(buffers, buffers.index[param], group, number, self._update_of(group))

    def _group_of(self, param: ShardedParam) -> tuple[int, dict[str, Any]]:
        present = [id(group) for group in self.param_groups]
        if self._groups is None or self._groups[0] != present:
            # Loading a state dict replaces the groups.
            of = {id(each): (number, group) for number, group in enumerate(self.param_groups) for each in group["params"]}
            self._groups = present, of
        found = self._groups[1].get(id(param.param))
        if found is None:
            raise RuntimeError(
                f"Parameter {param.name} has been replaced since optimizer_in_backward was called with it "
                "(load_state_dict(assign=True)). Load first, and make the optimizer then."
            )
        return found

    def _update_of(self, group: Mapping[str, Any]) -> Update:
        maximize = bool(group["maximize"])
        if isinstance(self, SGD):
            return Update("sgd", has_momentum=group["momentum"] != 0, nesterov=bool(group["nesterov"]), maximize=maximize)
        decoupled = bool(group.get("decoupled_weight_decay", isinstance(self, AdamW)))
        return Update("adam", amsgrad=bool(group["amsgrad"]), decoupled=decoupled, maximize=maximize)

    def _check_options(self, group: Mapping[str, Any]) -> None:
        for name in _REFUSED:
            if group.get(name):
                raise ValueError(
                    f"optimizer_in_backward({_base(self).__name__}, ..., {name}={group[name]!r}): the update is compiled "
                    f"into the backward, one kernel for a unit. Leave {name} out, or use torch.optim.{_base(self).__name__}."
                )


def _sharded(param: Any, updater: OptimizerInBackward) -> ShardedParam | None:
    """Find the sharded parameter that backward is to update. None: ``fully_shard`` did not shard it, so ``step`` steps it.

    Raises:
        ValueError: backward cannot update the parameter.
    """
    if isinstance(param, DTensor) and local_tensor(param).is_meta:
        raise ValueError(
            f"A parameter of shape {tuple(param.shape)} is on the meta device. Give the model memory (to_empty) ahead of "
            "optimizer_in_backward."
        )
    found = params_with_memory().get(id(param))
    if found is None or found.param is not param:
        return None
    reason = _refusal(found, updater)
    if reason:
        raise ValueError(f"optimizer_in_backward cannot update parameter {found.name}: {reason}")
    return found


def _refusal(param: ShardedParam, updater: OptimizerInBackward) -> str:
    if param.updater is not None and param.updater is not updater:
        return "another optimizer does already. Call remove() on that one, or leave the parameter out."
    if param.unit.offload is not None:
        return (
            "its shard is on the host (offload_policy=CPUOffloadPolicy()), and gradients are on the device. Shard without the "
            "policy, or use torch.optim."
        )
    if param.extension is not None:
        return "it is a tensor subclass with an all-gather of its own, which lies in no flat storage. Use torch.optim for it."
    if param.dim == REPLICATED and param.shape:
        # Backward reads it where it is stored, perhaps after the update.
        return "every rank has it whole (placement='ddp'). Use the placement 'zero1', or torch.optim for it."
    if param.dim == REPLICATED:
        return "it is a scalar, which every rank has whole. Make it a tensor with one element, or use torch.optim for it."
    if param.param.is_complex():
        return "it is complex. Use torch.optim for it."
    return ""


def _base(optimizer: OptimizerInBackward) -> type[Optimizer]:
    return next(base for base in type(optimizer).__mro__ if base in _IN_BACKWARD)


_IN_BACKWARD: dict[type[Optimizer], type[Optimizer]] = {}
for _class in _CLASSES:
    _name = f"{_class.__name__}InBackward"
    _IN_BACKWARD[_class] = globals()[_name] = type(
        _name, (OptimizerInBackward, _class), {"__module__": __name__, "__doc__": _class.__doc__}
    )


def optimizer_in_backward(optimizer_class: type[Optimizer], params: Any, **options: Any) -> Optimizer:
    """Make an optimizer whose step is part of backward: gradients update parameters once they are reduced, and are freed.

    In a compiled backward, one kernel over flat storage updates a bucket after its reduction. So gradients of all parameters
    never exist at once. Uncompiled models are updated when their backward ends. After the last backward of a step, every
    sharded parameter is updated, and its ``grad`` is None.

    The result is an instance of a subclass of ``optimizer_class``. Its groups, settings, state and state dicts are torch's, so
    schedulers and checkpoints work with it. ``step()`` may be called as usual. It steps parameters that have a gradient:
    ``fully_shard`` did not shard them, or the user set the gradient. ``zero_grad()`` has nothing to do. ``remove()`` ends the
    updates.

    Microbatches: nothing is updated while a unit does not synchronise (``set_requires_gradient_sync(False)``), or while another
    backward is to follow (``set_is_last_backward(False)``). An existing ``grad`` is added to the gradient of the last backward.
    Gradients cannot be clipped or unscaled, as they are gone when backward ends. The model keeps the optimizer alive.

    Args:
        optimizer_class: ``torch.optim.SGD``, ``Adam`` or ``AdamW``.
        params: parameters, named parameters or groups, as the class takes them.
        options: options of the class, except ``fused``, ``foreach``, ``capturable`` and ``differentiable``.

    Raises:
        TypeError: ``optimizer_class`` is another class.
        ValueError: one of the excepted options is set; a parameter is on the host or on the meta device, has an all-gather
            extension, is whole on every rank or complex, or another such optimizer updates it; the class refuses an argument.
    """
    made: Any = _IN_BACKWARD.get(optimizer_class)
    if made is None:
        known = ", ".join(each.__name__ for each in _CLASSES)
        name = getattr(optimizer_class, "__name__", str(optimizer_class))
        raise TypeError(
            f"optimizer_in_backward cannot compile the update of {name}. It knows, of torch.optim: {known}. For others "
            "register hooks (Tensor.register_post_accumulate_grad_hook), which run when backward ends; or call step() after it."
        )
    optimizer: Optimizer = made(params, **options)
    return optimizer
