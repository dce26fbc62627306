"""Torch's elementwise optimizers, with a step over flat storage."""

from __future__ import annotations

import functools
import operator
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

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
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
)

from passes.fx.torch_internals.core import global_step_pre_hooks
from passes.fx.torch_internals.objects import is_wrapped_by_scheduler

from ..units.gradient_buffer import GradientBuffer, join_storages
from ..units.sharded_param import ShardedParam, params_with_memory
from .clip import GradientGroups
from .owned_muon import OwnedMuon
from .rounded_step import check_is_in_run, count_of, is_rounded, step_rounded, wide_states
from .run_list import RunList
from .runs import Run, States, find_runs, has_plain_shard, in_order
from .torch_step import step_after, step_as, without_hooks

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
    """One of the optimizer's groups, cut into runs for a step.

    Attributes:
        params: the parameters of the group.
        idle: the parameters without gradients.
        runs: the runs of parameters with gradients.
        lists: the parameters with gradients that are in no run, a list for each mesh: operators on lists take DTensors of one.
        is_final: whether no parameter of ``lists`` can be in a run later.
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
        """Return whether the cut still suits ``params``: the same parameters, of which the same have gradients."""
        if not self.is_final or len(params) != len(self.params) or not all(map(operator.is_, params, self.params)):
            return False
        rest = (param for params in self.lists for param in params)
        return all(param.grad is None for param in self.idle) and all(param.grad is not None for param in rest)


class StepPlan:
    """The tensors that a step hands to the optimizer instead of its parameters: runs, and single parameters in no run."""

    def __init__(self, groups: Sequence[dict[str, Any]], states: States, make: Callable[..., Run] = Run):
        self.groups = [_Group.of(group["params"], states, make) for group in groups]
        self.run_list = RunList([run for group in self.groups for run in group.runs], states)
        self.runs = self.run_list.runs
        self.rest = [param for group in self.groups for params in group.lists for param in params]

    @functools.cached_property
    def places(self) -> dict[int, int]:
        """The index of each parameter among those of the optimizer, by identity."""
        params = (param for group in self.groups for param in group.params)
        return {id(param): index for index, param in enumerate(params)}

    def is_of(self, groups: Sequence[dict[str, Any]], states: States, *, was_lent: bool = True) -> bool:
        """Return whether the plan still suits the optimizer's groups and state. For ``was_lent`` see :meth:`.RunList.holds`."""
        if len(groups) != len(self.groups):
            return False
        if not all(own.is_of(group["params"]) for own, group in zip(self.groups, groups, strict=True)):
            return False
        return self.run_list.holds(states, was_lent=was_lent)

    def flat_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return ``groups`` with their present settings: for each, a group of its runs, and one for each list of parameters."""
        return [
            {**group, "params": params}
            for group, own in zip(groups, self.groups, strict=True)
            for params in ([run.flat for run in own.runs], *own.lists)
        ]

    def flat_states(self, states: States) -> defaultdict[Any, dict[str, Any]]:
        """Return the state of runs and single parameters, to be used with :meth:`flat_groups`."""
        kept: defaultdict[Any, dict[str, Any]] = defaultdict(dict)
        kept.update({run.flat: run.state for run in self.runs})
        kept.update({param: states[param] for param in self.rest if param in states})
        return kept

    def follow(self, kept: States, states: States) -> None:
        """Write ``kept``, the state of :meth:`flat_states` after a step, back into ``states``, the optimizer's own."""
        states.update({param: kept[param] for param in self.rest if param in kept})
        self.run_list.follow(states)


class FlatOptimizer(Optimizer):
    """The mixin of :func:`flat_optimizer`, which stands before the torch class among the bases."""

    _function = "flat_optimizer"
    _plan: StepPlan | None = None
    _one_buffer = False
    _state_is_lent = True
    _buffers: Sequence[GradientBuffer] = ()
    #: The seed of stochastic rounding; None: parameters are rounded to the nearest.
    _rounding_seed: int | None = None
    #: The number of steps, for optimizers whose state does not tell it.
    _rounded_steps = 0
    #: The plan of the next step, while :meth:`grouped_gradients` has checked it and nothing can have changed since.
    _ready: StepPlan | None = None

    @property
    def state(self) -> Any:
        """The optimizer's state, as torch's. After a read, steps check for changes until only the optimizer holds the state."""
        self._state_is_lent = True
        return vars(self)["state"]

    @state.setter
    def state(self, value: Any) -> None:
        self._state_is_lent = True
        vars(self)["state"] = value

    def __getstate__(self) -> dict[str, Any]:
        own = ("_one_buffer", "_rounding_seed", "_rounded_steps")
        return {**super().__getstate__(), **{name: getattr(self, name) for name in own}}  # type: ignore[no-untyped-call]

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict, as torch's. With stochastic rounding, float32 states of bfloat16 parameters stay float32."""
        super().load_state_dict(state_dict)
        if self._rounding_seed is not None:
            for param, wide in wide_states(self, state_dict).items():
                self.state[param].update(wide)

    def round_by_chance(self, seed: int) -> None:
        """Step bfloat16 parameters in float32 from now on, and round them up or down at random."""
        self._rounding_seed = seed

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, as torch's.

        Raises:
            ValueError: the group is ``differentiable``.
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
        """Move the shards of all units into one buffer for each dtype and device. Gradients get buffers in the next step."""
        self._one_buffer = True
        _join_storages(self._plain_params())

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the parameters that have gradients.

        Args:
            closure: computes gradients and returns a loss, which is returned.
        """
        return step_after(closure, self._step_runs)

    @torch.no_grad()
    def _step_runs(self) -> None:
        step = step_of_torch(self)
        groups, states = self.param_groups, vars(self)["state"]
        plan = self._ready or self._load_gradients(groups, states)
        if plan is None:
            if self._one_buffer:
                self._gather_in_buffers()
            plan = self._plan = StepPlan(groups, states)
            plan.run_list.load_gradients()
        kept = plan.flat_states(states)
        try:
            if self._rounding_seed is None:
                step_as(self, step, plan.flat_groups(groups), kept)
            else:
                self._step_by_chance(step, plan, kept, self._rounding_seed)
        finally:
            plan.follow(kept, states)
            del states, kept
            self._state_is_lent = self._state_is_lent and not plan.run_list.is_alone()

    def _step_by_chance(self, step: Callable[[Optimizer], Any], plan: StepPlan, kept: States, seed: int) -> None:
        """Step as torch, but the runs in bfloat16 one by one, so that one of them exists in float32 at a time."""
        rounded = {id(run.flat) for run in plan.runs if is_rounded(run)}
        for param in (*plan.rest, *(run.params[0] for run in plan.runs if id(run.flat) not in rounded)):
            check_is_in_run(param)
        groups = self.param_groups
        others = [
            {**group, "params": [param for param in group["params"] if id(param) not in rounded]}
            for group in plan.flat_groups(groups)
        ]
        step_as(self, step, others, kept)
        for group, own in zip(groups, plan.groups, strict=True):
            for run in own.runs:
                if id(run.flat) in rounded:
                    count = count_of(self, run)
                    count = self._rounded_steps if count is None else count
                    step_rounded(self, step, run, group, plan.places[id(run.params[0])], seed, count)
        self._rounded_steps += 1

    def _load_gradients(self, groups: Sequence[dict[str, Any]], states: States) -> StepPlan | None:
        """Set the gradients of the plan's runs. None: there is no plan, or it does not suit the present groups or gradients."""
        plan = self._plan
        if plan is None:
            return None
        # Gradients before the rest, as clipping has just read them.
        are_loaded = plan.run_list.load_kept_gradients()
        if not plan.is_of(groups, states, was_lent=self._state_is_lent):
            return None
        if not are_loaded:
            are_loaded = all(buffer.is_whole() for buffer in self._buffers) and plan.run_list.load_gradients()
        return plan if are_loaded else None

    @contextmanager
    def grouped_gradients(self) -> Iterator[GradientGroups | None]:
        """Check gradients once for clipping and for the step that is called within the ``with`` block.

        Yields:
            The gradients, grouped for clipping. None: the step checks gradients itself, as some do not stay in a buffer, or
            other code may run before the step.
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
        """Return whether ``step()`` may run other code before the step itself, such as a hook."""
        if global_step_pre_hooks or self._optimizer_step_pre_hooks:
            return True
        own: Any = type(self).step
        present = vars(self).get("step")
        if present is not None and not (is_wrapped_by_scheduler(present) and present.__wrapped__ is own):
            return True
        return without_hooks(own) is not FlatOptimizer.step

    def _gather_in_buffers(self) -> None:
        """Move shards into one buffer for each dtype and device, and gradients into another."""
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
        """Return the trainable parameters on the device that can be in a run."""
        known = params_with_memory()
        found = (known.get(id(param)) for group in self.param_groups for param in group["params"] if param.requires_grad)
        plain = [each for each in found if each is not None and each.unit.offload is None and has_plain_shard(each)]
        return [each for each in plain if each.is_bound()]


def _join_storages(params: Iterable[ShardedParam]) -> None:
    """Move the shards of units into one buffer, in the order in which backward reduces gradients: root, last unit, and so on.

    A reduction of several units then yields gradients in the order of the buffer.
    """
    units = list(dict.fromkeys(param.unit for param in params))[::-1]
    units.sort(key=lambda unit: not unit.is_root)
    join_storages(units)


def class_of_torch(optimizer: FlatOptimizer) -> type[Optimizer]:
    """Return the class of ``torch.optim`` that ``optimizer`` was made from."""
    return next(base for base in type(optimizer).__mro__ if base in _FLAT)


def step_of_torch(optimizer: FlatOptimizer) -> Callable[[Optimizer], Any]:
    """Return ``step`` of the torch class without hooks. Hooks have run already, with the parameters instead of runs."""
    return without_hooks(class_of_torch(optimizer).step)


# The classes are attributes of this module, so that optimizers can be pickled.
FlatMuon = type("FlatMuon", (OwnedMuon, Muon), {"__module__": __name__, "__doc__": Muon.__doc__})
_FLAT: dict[type[Optimizer], type[Optimizer]] = {}
for _class in ELEMENTWISE:
    _name = f"Flat{_class.__name__}"
    _FLAT[_class] = globals()[_name] = type(_name, (FlatOptimizer, _class), {"__module__": __name__, "__doc__": _class.__doc__})


def check_elementwise(optimizer_class: type[Optimizer], function: str) -> None:
    """Raise a TypeError if ``optimizer_class`` has no elementwise step; ``function`` is named in the message."""
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


def flat_optimizer(
    optimizer_class: type[Optimizer],
    params: Any,
    *,
    one_buffer: bool = False,
    stochastic_rounding: int | None = None,
    **options: Any,
) -> Optimizer:
    """Make one of torch's optimizers with a step over runs of flat storage, or over whole matrices on their owners.

    The result is an instance of a subclass of ``optimizer_class``. Its groups hold the parameters, and its state has DTensors
    for each. Schedulers, hooks, ``GradScaler`` and state dicts work as with torch's optimizer, and values are the same, element
    by element. A parameter without gradient is not stepped. A parameter is stepped singly, as by torch, if ``fully_shard`` did
    not shard it or its local tensor is a subclass or not contiguous.

    During a step, gradients that do not lie in storage order have a copy that does. Such gradients were replaced, or several
    collectives have reduced the gradients of their unit.

    ``torch.optim.Muon`` has no runs: :mod:`fsdp_compile.optim.owned_muon` says what its step does.

    Args:
        optimizer_class: ``torch.optim.AdamW``, ``Adam``, ``SGD``, ``NAdam``, ``RAdam``, ``Adamax``, ``Adadelta``, ``Adagrad``,
            ``RMSprop``, ``ASGD`` or ``Muon``.
        params: parameters, named parameters or groups, as the class takes them.
        one_buffer: keep the shards of all units in one buffer for each dtype and device, and their gradients in another, which
            stays between steps. A model in one group and without padding is then one run. Shards move when the optimizer is
            made, or in the next step if they have no memory yet. While they move, they exist twice.
        stochastic_rounding: a seed, equal on all ranks: bfloat16 parameters are stepped in float32, with float32 states, and
            rounded up or down at random (:mod:`fsdp_compile.optim.rounded_step`). None: all is in the parameter's dtype.
        options: options of the class (``lr``, ``weight_decay``, ``fused``, ...).

    Raises:
        TypeError: ``optimizer_class`` is another class, whose step is not known to be elementwise.
        ValueError: ``differentiable=True``; an argument that the class refuses; ``one_buffer`` or ``stochastic_rounding`` for
            Muon, or a parameter for it that is no matrix.
    """
    if stochastic_rounding is not None and (isinstance(stochastic_rounding, bool) or not isinstance(stochastic_rounding, int)):
        raise TypeError(f"flat_optimizer(stochastic_rounding=...) takes a seed, an int, not {stochastic_rounding!r}.")
    if optimizer_class is Muon:
        if one_buffer or stochastic_rounding is not None:
            raise ValueError(
                "flat_optimizer(Muon) steps matrices, not runs: leave out one_buffer=True and stochastic_rounding=..."
            )
        return cast("Optimizer", FlatMuon(params, **options))
    check_elementwise(optimizer_class, "flat_optimizer")
    make: Any = _FLAT[optimizer_class]
    optimizer: FlatOptimizer = make(params, **options)
    if stochastic_rounding is not None:
        optimizer.round_by_chance(stochastic_rounding)
    if one_buffer:
        optimizer.use_one_buffer()
    return optimizer
