"""Torch's elementwise optimizers, with the states of shards on the host, and steps on the device.

A step goes bucket by bucket. A bucket has parts of runs whose states fit into a share of the bytes that a step may have on the
device. While a bucket is stepped, the states of the next are copied to the device, and those of the previous one back. So
three buckets of states are on the device at once, and both directions of the bus are used all the time.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import ASGD, SGD, Adadelta, Adagrad, Adam, Adamax, AdamW, NAdam, Optimizer, RAdam, RMSprop

from passes.collectives.host_copies import copies_to
from passes.fx.torch_internals.objects import as_local

from ..units.sharded_param import ShardedParam, params_with_memory
from .flat_optimizer import ELEMENTWISE, FlatOptimizer, StepPlan, check_elementwise, class_of_torch, step_of_torch
from .host_runs import HOST, HostBucket, HostRun, Part
from .runs import has_plain_shard
from .torch_step import step_as

#: For each class, the number of state tensors of a parameter's size that it keeps, by the settings of the group.
_KEPT: Mapping[type[Optimizer], Callable[[Mapping[str, Any]], int]] = {
    Adadelta: lambda group: 2,
    Adagrad: lambda group: 1,
    Adam: lambda group: 2 + group["amsgrad"],
    Adamax: lambda group: 2,
    AdamW: lambda group: 2 + group["amsgrad"],
    ASGD: lambda group: 1,
    NAdam: lambda group: 2,
    RAdam: lambda group: 2,
    RMSprop: lambda group: 1 + (group["momentum"] > 0) + group["centered"],
    SGD: lambda group: int(group["momentum"] != 0),
}
#: Shares of ``bytes_in_flight``: three buckets of states, and the gradients of one bucket in storage order.
_SHARES = 4
_LEAST_BYTES_IN_FLIGHT = 16 << 10
# Runs are cut at multiples of so many elements, as fused kernels round elements after the last full vector differently.
_ALIGNMENT = 64


class _Undispatched:
    """A wrapper for a tensor of a state dict, which torch would otherwise cast to the device of its parameter."""

    def __init__(self, value: DTensor):
        self._value = value

    def for_param(self, param: Any, known: Mapping[int, ShardedParam]) -> Tensor:
        """Cast the tensor as torch does, on the device that keeps it. Without a parameter, return it unchanged."""
        if not isinstance(param, Tensor):
            return self._value
        dtype = param.dtype if param.is_floating_point() else self._value.dtype
        return self._value.to(dtype=dtype, device=HOST if _is_kept_on_host(param, known) else param.device)


def _hold_back(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    def held_back(entry: Any) -> Any:
        if not isinstance(entry, dict):
            return entry
        return {name: _Undispatched(value) if isinstance(value, DTensor) else value for name, value in entry.items()}

    return {**state_dict, "state": {key: held_back(entry) for key, entry in state_dict["state"].items()}}


class OffloadedOptimizer(FlatOptimizer):
    """The mixin of :func:`offload_optimizer`, which stands before the torch class among the bases."""

    _function = "offload_optimizer"
    _pin_memory = True
    _bytes_in_flight = 256 << 20

    def __init__(self, params: Any, *, pin_memory: bool, bytes_in_flight: int, **options: Any):
        if bytes_in_flight < _LEAST_BYTES_IN_FLIGHT:
            raise ValueError(
                f"bytes_in_flight={bytes_in_flight} is room for less than {_ALIGNMENT} elements of each of {_SHARES} buckets. "
                f"Let it be {_LEAST_BYTES_IN_FLIGHT} at least; a copy is fast from some MiB on."
            )
        self._pin_memory, self._bytes_in_flight = pin_memory, bytes_in_flight
        super().__init__(params, **options)
        known = params_with_memory()
        # Adagrad has made its states already.
        for param, entry in self.state.items():
            if _is_kept_on_host(param, known):
                entry.update({name: kept.to(HOST) for name, kept in entry.items() if isinstance(kept, DTensor)})

    @property
    def device_state_bytes(self) -> int:
        """Bytes of states on the devices of the parameters between steps, without scalars. Known before the first step.

        These are states of trainable parameters that cannot be in a run, and all states on a device without memory of its own.
        """
        return self._state_bytes()[0]

    @property
    def step_bytes(self) -> int:
        """The most bytes that ``step()`` adds on the device: states in flight, and gradients that it copies into storage order.

        Known before the first step. With ``foreach=True``, or with neither ``foreach`` nor ``fused`` given, torch's kernels
        take more for intermediate results: about the bytes of a bucket's states.
        """
        _, passing, params = self._state_bytes()
        most = self._bytes_in_flight // _SHARES
        return min(passing, (_SHARES - 1) * most) + min(params, most)

    def _state_bytes(self) -> tuple[int, int, int]:
        """Return the bytes of states on the device, of states on the host, and of parameters with states on the host."""
        known, kind = params_with_memory(), class_of_torch(self)
        on_device = on_host = params = 0
        for group in self.param_groups:
            for param in group["params"]:
                local = as_local(param)
                nbytes = local.numel() * local.itemsize
                if not param.requires_grad:
                    continue
                if _is_kept_on_host(param, known):
                    on_host += _KEPT[kind](group) * nbytes
                    params += nbytes
                else:
                    on_device += _KEPT[kind](group) * nbytes
        return on_device, on_host, params

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's.

        Raises:
            ValueError: the group is ``differentiable``; a parameter is on the host, or updated in backward.
        """
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1]["params"])
        except ValueError:
            self.param_groups.pop()
            raise

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, as torch's. States of shards go to the host, and are never all on the device in between."""
        # Registered last, so that hooks of users see tensors. ``__setstate__`` unwraps them on the host.
        handle = self.register_load_state_dict_pre_hook(_hold_back)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()

    def __getstate__(self) -> dict[str, Any]:
        own = {"_pin_memory": self._pin_memory, "_bytes_in_flight": self._bytes_in_flight}
        return {**super().__getstate__(), **own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        known = params_with_memory()
        for param, entry in state.get("state", {}).items():
            for name, value in entry.items() if isinstance(entry, dict) else ():
                if isinstance(value, _Undispatched):
                    entry[name] = value.for_param(param, known)
        super().__setstate__(state)

    @torch.no_grad()
    def _step_runs(self) -> None:
        groups, states = self.param_groups, self.state
        plan = self._plan
        if plan is None or not plan.is_of(groups, states) or not all(run.has_gradients() for run in _runs(plan)):
            _check([param for group in groups for param in group["params"]])
            plan = self._plan = StepPlan(groups, states, functools.partial(HostRun, pin_memory=self._pin_memory))
        step = step_of_torch(self)
        kept: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        buckets = list(self._buckets(plan))
        try:
            if plan.rest:
                kept.update({param: _on_device_of(param, states[param]) for param in plan.rest if param in states})
                rest = [
                    {**group, "params": params} for group, own in zip(groups, plan.groups, strict=True) for params in own.lists
                ]
                step_as(self, step, rest, kept)
            self._step_buckets(buckets, step)
        finally:
            # The host waits here for all copies. ``state`` is a plain dictionary: users may hold its tensors, and other threads
            # may save them, so nothing could wait later, when a tensor is read. The wait costs the time of the last two
            # buckets' copies, and the next forward is launched after the step instead of beside it. Both are small compared
            # with the copies of all states, and the first gather of forward reads stepped shards anyway.
            for bucket in buckets:
                bucket.end()
            for run in _runs(plan):
                run.drop_unfinished()
            plan.follow(kept, states)

    def _step_buckets(self, buckets: Sequence[HostBucket], step: Callable[[Optimizer], Any]) -> None:
        groups = self.param_groups
        for index, bucket in enumerate(buckets):
            if index == 0:
                bucket.fetch()
            if index + 1 < len(buckets):
                # Begins when the previous bucket has been stepped, and runs beside the step of this one.
                buckets[index + 1].fetch()
            bucket.step(self, step, groups)
            bucket.give_back()
            if index:
                # Freed before the next fetch, which may reuse the memory.
                buckets[index - 1].free()

    def _buckets(self, plan: StepPlan) -> Iterator[HostBucket]:
        """Yield buckets of the parts of all runs, in order, each with as many parts as fit."""
        most, kind = self._bytes_in_flight // _SHARES, class_of_torch(self)
        bucket, left = None, 0
        for index, (group, own) in enumerate(zip(self.param_groups, plan.groups, strict=True)):
            for run in own.runs:
                assert isinstance(run, HostRun)
                numel, itemsize = run.flat.numel(), run.flat.itemsize
                kept = sum(value.itemsize for value in run.state.values() if value.dim())
                nbytes = max(kept, _KEPT[kind](group) * itemsize, itemsize)
                size = max(most // nbytes // _ALIGNMENT * _ALIGNMENT, _ALIGNMENT) if run.copies else max(numel, 1)
                for start in range(0, max(numel, 1), size):
                    part = Part(index, run, start, min(size, numel - start))
                    if bucket is None or bucket.device != run.device or part.numel * nbytes > left:
                        if bucket is not None:
                            yield bucket
                        bucket, left = HostBucket(run.device), most
                    bucket.parts.append(part)
                    left -= part.numel * nbytes
        if bucket is not None:
            yield bucket


def _runs(plan: StepPlan) -> Iterator[HostRun]:
    for run in plan.runs:
        assert isinstance(run, HostRun)
        yield run


def _is_kept_on_host(param: Any, known: Mapping[int, ShardedParam]) -> bool:
    """Return whether states of ``param`` go to the host: its shard lies in flat storage, on a device with memory of its own."""
    found = known.get(id(param))
    return found is not None and found.param is param and has_plain_shard(found) and copies_to(found.local.device)


def _on_device_of(param: Any, entry: dict[str, Any]) -> dict[str, Any]:
    """Move the states of a parameter that is in no run now to its device, where torch expects them."""
    for name, value in entry.items():
        if isinstance(value, DTensor) and value.device != param.device:
            entry[name] = value.to(param.device)
    return entry


def _check(params: Sequence[Any]) -> None:
    known = params_with_memory()
    for param in params:
        found = known.get(id(param))
        if found is None or found.param is not param:
            continue
        if found.unit.offload is not None:
            raise ValueError(
                f"offload_optimizer cannot step parameter {found.name}: its shard is on the host "
                "(offload_policy=CPUOffloadPolicy()), and what an optimizer keeps for it is there already. Use torch.optim or "
                "flat_optimizer."
            )
        if found.updater is not None:
            raise ValueError(
                f"offload_optimizer cannot step parameter {found.name}: optimizer_in_backward updates it, whose states are on "
                "the device. Call remove() on that one, or leave the parameter out."
            )


# The classes are attributes of this module, so that optimizers can be pickled.
_OFFLOADED: dict[type[Optimizer], type[Optimizer]] = {}
for _class in ELEMENTWISE:
    _name = f"Offloaded{_class.__name__}"
    _OFFLOADED[_class] = globals()[_name] = type(
        _name, (OffloadedOptimizer, _class), {"__module__": __name__, "__doc__": _class.__doc__}
    )


def offload_optimizer(
    optimizer_class: type[Optimizer],
    params: Any,
    *,
    pin_memory: bool = True,
    bytes_in_flight: int = OffloadedOptimizer._bytes_in_flight,
    **options: Any,
) -> OffloadedOptimizer:
    """Make one of torch's elementwise optimizers with its states on the host; parameters and gradients are on the device.

    The result is a :func:`.flat_optimizer`, with the same values, except that the DTensors in ``optimizer.state`` have their
    local tensors on the host. Scalars (``step``) are where torch has them. ``load_state_dict`` puts states on the host.

    ``step()`` goes bucket by bucket. It copies states to the device, steps them there by torch's kernels, and copies them back,
    while states of the next bucket are copied. When ``step()`` returns, all changed states are on the host.

    States of parameters that cannot be in a run stay on the device. Those are parameters that ``fully_shard`` did not shard, or
    whose local tensors are subclasses or not contiguous. If a gradient is not laid out as its parameter, the parameter's states
    are on the device until a step finds both laid out alike. On a CPU there is one memory, and nothing is copied.

    Args:
        optimizer_class: ``torch.optim.AdamW``, ``Adam``, ``SGD``, ``NAdam``, ``RAdam``, ``Adamax``, ``Adadelta``, ``Adagrad``,
            ``RMSprop`` or ``ASGD``. Adagrad makes its states on the device, all at once, when it is made.
        params: parameters, named parameters or groups, as the class takes them.
        pin_memory: whether states are in pinned memory, from which the device copies by itself. With False, copies block the
            thread that steps.
        bytes_in_flight: the most bytes that a step may have on the device, at least 16 KiB: three buckets of states, and the
            gradients of one bucket if they do not lie in storage order.
        options: options of the class (``lr``, ``weight_decay``, ``fused``, ...).

    Returns:
        An instance of a subclass of ``optimizer_class``, with two properties of its own. ``device_state_bytes``: bytes of
        states that stay on the device. ``step_bytes``: the most bytes that a step takes in addition.

    Raises:
        TypeError: ``optimizer_class`` is another class, whose step is not known to be elementwise.
        ValueError: ``differentiable=True``; a parameter whose shard is on the host (``CPUOffloadPolicy``), or that
            ``optimizer_in_backward`` updates; ``bytes_in_flight`` below 16 KiB; an argument that the class refuses.
    """
    check_elementwise(optimizer_class, "offload_optimizer")
    make: Any = _OFFLOADED[optimizer_class]
    optimizer: OffloadedOptimizer = make(params, pin_memory=pin_memory, bytes_in_flight=bytes_in_flight, **options)
    return optimizer
