"""Torch's elementwise optimizers, with a step over flat storage."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor
from torch.optim import (
    ASGD,
    SGD,
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from passes.fx.torch_internals.core import global_step_pre_hooks

from ..units.gradient_buffer import GradientBuffer, join_storages
from ..units.sharded_param import ShardedParam, params_with_memory
from .clip import Found
from .run_list import RunList
from .runs import Run, States, find_runs, has_plain_shard, in_order

ELEMENTWISE: tuple[type[Optimizer], ...] = (
    Adadelta,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    ASGD,
    NAdam,
    RAdam,
    RMSprop,
    SGD,
)
_REASONS = {
    "Adafactor": "it keeps sums over the rows and columns of each parameter",
    "Muon": "it orthogonalises each matrix as a whole",
    "LBFGS": "it takes inner products over all parameters, and steps several times in a call",
    "Rprop": "torch's own steps no DTensors, which it would have to where a parameter is in no run",
    "SparseAdam": "it is for sparse gradients, which sharded parameters do not have",
}


class _Group(NamedTuple):
    """What a step does about one of the optimizer's groups.

    Attributes:
        params: its parameters.
        idle: those without gradients.
        runs: the runs of those that have some.
        lists: the rest, which is stepped as it is: a list for each mesh, as operators on lists take no DTensors of several.
        is_final: whether the rest will go on being stepped so.
    """

    params: list[Any]
    idle: list[Any]
    runs: list[Run]
    lists: list[list[Any]]
    is_final: bool

    @classmethod
    def of(cls, params: Sequence[Any], states: States, make: Callable[..., Run]) -> _Group:
        """Cut the parameters of a group into runs."""
        runs, rest, is_final = find_runs([param for param in params if param.grad is not None], states, make)
        lists: defaultdict[Any, list[Any]] = defaultdict(list)
        for param in rest:
            lists[param.device_mesh if isinstance(param, DTensor) else None].append(param)
        idle = [param for param in params if param.grad is None]
        return cls(list(params), idle, runs, list(lists.values()), is_final)

    def is_of(self, params: Sequence[Any]) -> bool:
        """Whether it is of these parameters, with and without gradients."""
        if not self.is_final or len(params) != len(self.params) or not all(map(operator.is_, params, self.params)):
            return False
        rest = (param for params in self.lists for param in params)
        return all(param.grad is None for param in self.idle) and all(param.grad is not None for param in rest)


class Plan:
    """What a step hands to the optimizer in the place of its parameters: for each group, runs, and the rest as it is."""

    def __init__(self, groups: Sequence[dict[str, Any]], states: States, make: Callable[..., Run] = Run):
        self.groups = [_Group.of(group["params"], states, make) for group in groups]
        self.run_list = RunList([run for group in self.groups for run in group.runs], states)
        self.runs = self.run_list.runs
        self.rest = [param for group in self.groups for params in group.lists for param in params]

    def is_of(self, groups: Sequence[dict[str, Any]], states: States, *, was_lent: bool = True) -> bool:
        """Whether the plan is for what there is now: the optimizer's groups, and what it keeps."""
        if len(groups) != len(self.groups):
            return False
        if not all(own.is_of(group["params"]) for own, group in zip(self.groups, groups, strict=True)):
            return False
        return self.run_list.holds(states, was_lent=was_lent)

    def flat_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The optimizer's groups, with their present settings, over runs and what is no member of any."""
        return [
            {**group, "params": params}
            for group, own in zip(groups, self.groups, strict=True)
            for params in ([run.flat for run in own.runs], *own.lists)
        ]

    def flat_states(self, states: States) -> defaultdict[Any, dict[str, Any]]:
        """What the optimizer keeps for these."""
        kept: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        kept.update({run.flat: run.state for run in self.runs})
        kept.update({param: states[param] for param in self.rest if param in states})
        return kept

    def follow(self, kept: States, states: States) -> None:
        """After a step: let the optimizer's own state be what it keeps now."""
        states.update({param: kept[param] for param in self.rest if param in kept})
        self.run_list.follow(states)


class FlatOptimizer(Optimizer):
    """What :func:`flat_optimizer` adds to a class of optimizers: stands ahead of it among the bases."""

    _function = "flat_optimizer"
    _plan: Plan | None = None
    _one_buffer = False
    _state_is_lent = True
    _buffers: Sequence[GradientBuffer] = ()
    #: That of the step to come, if nobody can have changed anything since it was looked at.
    _ready: Plan | None = None

    @property
    def state(self) -> Any:
        """As torch's. Each step looks through it for changes, from when somebody has asked for it until nobody holds it."""
        self._state_is_lent = True
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self._state_is_lent = True
        vars(self)["state"] = value

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_one_buffer": self._one_buffer}  # type: ignore[no-untyped-call]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's.

        Raises:
            ValueError: a group is ``differentiable``.
        """
        super().add_param_group(param_group)
        if self.param_groups[-1].get("differentiable"):
            self.param_groups.pop()
            name = class_of_torch(self).__name__
            raise ValueError(
                f"differentiable=True has autograd run through the step, and {self._function}({name}) steps flat tensors that "
                f"autograd does not connect with the parameters. Use torch.optim.{name}."
            )

    def use_one_buffer(self) -> None:
        """Let the shards of all units lie in one buffer from now on, and their gradients in another."""
        self._one_buffer = True
        _join_storages(self._plain_params())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients.

        Args:
            closure: computes gradients and returns a loss, which is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if torch.compiler.is_compiling():
            torch.compiler.disable(self._step_runs)()
        else:
            self._step_runs()
        return loss

    @torch.no_grad()
    def _step_runs(self) -> None:
        step = step_of_torch(self)
        groups, states = self.param_groups, vars(self)["state"]
        plan = self._ready or self._load_gradients(groups, states)
        if plan is None:
            if self._one_buffer:
                self._gather_in_buffers()
            plan = self._plan = Plan(groups, states)
            plan.run_list.load_gradients()
        kept = plan.flat_states(states)
        try:
            step_as(self, step, plan.flat_groups(groups), kept)
        finally:
            plan.follow(kept, states)
            del states, kept
            self._state_is_lent = self._state_is_lent and not plan.run_list.is_alone()

    def _load_gradients(self, groups: Sequence[dict[str, Any]], states: States) -> Plan | None:
        """Give the runs of the plan their gradients. None: there is no plan yet, or it is not for what there is now."""
        plan = self._plan
        if plan is None:
            return None
        # First what clipping has just looked at.
        are_loaded = plan.run_list.load_kept_gradients()
        if not plan.is_of(groups, states, was_lent=self._state_is_lent):
            return None
        if not are_loaded:
            are_loaded = all(buffer.is_whole() for buffer in self._buffers) and plan.run_list.load_gradients()
        return plan if are_loaded else None

    @contextmanager
    def looked_at(self) -> Iterator[Found | None]:
        """Look at the gradients of the step that is called within the ``with`` block, which does not look again.

        Yields:
            What there is to clip. None: the step looks itself, as gradients are not all kept in a buffer, or somebody's code
            runs ahead of it.
        """
        groups, states = self.param_groups, vars(self)["state"]
        plan = None if self._has_other_code_ahead() else self._plan
        found = None if plan is None or plan.rest else plan.run_list.find_kept_gradients()
        if plan is not None and found is not None and plan.is_of(groups, states, was_lent=self._state_is_lent):
            self._ready = plan
        try:
            yield found if self._ready is not None else None
        finally:
            self._ready = None

    def _has_other_code_ahead(self) -> bool:
        """Whether ``step()`` may run something of somebody else's ahead of the step."""
        if global_step_pre_hooks or self._optimizer_step_pre_hooks:
            return True
        own: Any = type(self).step
        present = vars(self).get("step")
        # That of a scheduler only notes that it was called.
        if present is not None and not (hasattr(present, "_wrapped_by_lr_sched") and present.__wrapped__ is own):
            return True
        return _without_hooks(own) is not FlatOptimizer.step

    def _gather_in_buffers(self) -> None:
        """Let shards lie in one buffer, for each dtype and device, and gradients in another."""
        params = self._plain_params()
        _join_storages(params)
        kinds: dict[tuple[torch.dtype, torch.device], list[ShardedParam]] = {}
        for param in sorted(params, key=in_order):
            kinds.setdefault((param.local.dtype, param.local.device), []).append(param)
        present = [(buffer.params, buffer.flat.dtype, buffer.flat.device) for buffer in self._buffers if buffer.is_whole()]
        if present != [(members, *kind) for kind, members in kinds.items()]:
            self._buffers = ()
            self._buffers = [GradientBuffer(members) for members in kinds.values()]

    def _plain_params(self) -> list[ShardedParam]:
        """Those that can be in a run."""
        known = params_with_memory()
        found = (known.get(id(param)) for group in self.param_groups for param in group["params"] if param.requires_grad)
        plain = [each for each in found if each is not None and each.unit.offload is None and has_plain_shard(each)]
        return [each for each in plain if each.is_bound()]


def _join_storages(params: Iterable[ShardedParam]) -> None:
    """Let the shards of units lie in one buffer in the order in which backward reduces their gradients: the root's first, then
    those of the last unit. What reduces several units at once then leaves gradients as they are to lie."""
    units = list(dict.fromkeys(param.unit for param in params))[::-1]
    units.sort(key=lambda unit: not unit.is_root)
    join_storages(units)


def class_of_torch(optimizer: FlatOptimizer) -> type[Optimizer]:
    """The class that it was made of."""
    return next(base for base in type(optimizer).__mro__ if base in _FLAT)


def step_of_torch(optimizer: FlatOptimizer) -> Callable[[Optimizer], Any]:
    """The step of that class, without the hooks: they have run, with the parameters rather than what stands for them."""
    return _without_hooks(class_of_torch(optimizer).step)


def _without_hooks(step: Any) -> Callable[[Optimizer], Any]:
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step  # type: ignore[no-any-return]


def step_as(
    optimizer: FlatOptimizer, step: Callable[[Optimizer], Any], groups: list[dict[str, Any]], kept: defaultdict[Any, Any]
) -> None:
    """Have an optimizer step other groups than its own, with what is kept for these."""
    attributes = vars(optimizer)
    own = {name: attributes[name] for name in ("param_groups", "state")} | {"_state_is_lent": optimizer._state_is_lent}
    attributes |= {"param_groups": groups, "state": kept}
    try:
        step(optimizer)
    finally:
        attributes |= own


# Of this module by their names, so that optimizers can be pickled.
_FLAT: dict[type[Optimizer], type[Optimizer]] = {}
for _class in ELEMENTWISE:
    _name = f"Flat{_class.__name__}"
    _FLAT[_class] = globals()[_name] = type(_name, (FlatOptimizer, _class), {"__module__": __name__, "__doc__": _class.__doc__})


def check_elementwise(optimizer_class: type[Optimizer], function: str) -> None:
    """Raise a TypeError for a class that a function, which steps runs, cannot step."""
    if optimizer_class in _FLAT:
        return
    name = getattr(optimizer_class, "__name__", str(optimizer_class))
    reason = _REASONS.get(name, "its step is not known to be elementwise")
    known = ", ".join(known.__name__ for known in ELEMENTWISE)
    raise TypeError(
        f"{function} cannot step {name}: {reason}. A run of flat storage has the elements of many parameters, all of "
        f"which have to be stepped alike, each by itself. Use {name}(params, ...); {function} takes, of torch.optim: "
        f"{known}."
    )


def flat_optimizer(optimizer_class: type[Optimizer], params: Any, *, one_buffer: bool = False, **options: Any) -> Optimizer:
    """One of torch's elementwise optimizers, with a step over runs of flat storage instead of parameters one by one.

    The result is an instance of a subclass of ``optimizer_class``. Its groups hold the parameters, its state has a DTensor for
    each: schedulers, hooks, ``GradScaler`` and state dicts are as with torch's, and so are the values, element by element. A
    parameter without gradient is not stepped. A parameter that is not sharded by ``fully_shard``, or whose local tensor is a
    subclass, is stepped as torch would. While a step runs, gradients that do not lie in the order of storage have a copy that
    does: those that were replaced, and those of a unit that several collectives have reduced.

    Args:
        optimizer_class: ``torch.optim.AdamW``, ``Adam``, ``SGD``, ``NAdam``, ``RAdam``, ``Adamax``, ``Adadelta``, ``Adagrad``,
            ``RMSprop`` or ``ASGD``.
        params: parameters, named parameters or groups, as the class takes them.
        one_buffer: let the shards of all units lie in one buffer, for each dtype and device, and their gradients in another,
            which stays between steps: then a model is one run, but for groups and padding. Shards move there when the optimizer
            is made, or with the next step if they have no memory yet, and meanwhile are there twice.
        options: those of the class (``lr``, ``weight_decay``, ``fused``, ...).

    Raises:
        TypeError: an optimizer of another class, whose step is not known to be elementwise.
        ValueError: ``differentiable=True``; what the class refuses.
    """
    check_elementwise(optimizer_class, "flat_optimizer")
    make: Any = _FLAT[optimizer_class]
    optimizer: FlatOptimizer = make(params, **options)
    if one_buffer:
        optimizer.use_one_buffer()
    return optimizer
