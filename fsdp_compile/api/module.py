"""Units as modules: generated classes, and methods of the modules inside.

A module that was passed to ``fully_shard`` becomes an ``FSDP<Class>``, a generated subclass of its own class, whose forward
reads full parameters. Modules inside it keep their classes. A module that registers sharded parameters has a table of them in
the place of ``_parameters`` (:mod:`.parameters`). If its class is not generated, its instance has three methods of its own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_dynamo_compiling

# Imported by name, as other code may replace torch's class in that module by this library's.
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from passes.fx.torch_internals.dynamo import OptimizedModule
from passes.fx.torch_internals.objects import compiled_call, own_buffers, own_parameters, set_compiled_call

from ..compiler.traced_forwards import note_outermost_forward
from ..runtime.group_logs import record_failed_forward, settle
from ..runtime.lent_parameters import end_loans
from ..runtime.uncompiled import UncompiledForward, is_recomputing
from ..torch_versions import in_compilation
from ..units.sharded_param import ShardedParam, params_with_memory, shard_attribute
from ..units.unit import MovedError, Scope, Unit
from .casts import cast_inputs, cast_output
from .composable import UnitState, state_of
from .gradient_controls import GradientControls
from .parameters import ShardedParameters, sharded_params_of, table_of
from .schedule_controls import ScheduleControls
from .whole_units import with_unit_of


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of a module that was passed to ``fully_shard`` or registers sharded parameters; None for others."""
    own: Unit | None = module.__dict__.get("_fsdp_unit")
    table = table_of(module)
    return table.unit if own is None and table is not None else own


def set_scope(module: nn.Module, scope: Scope) -> None:
    """Set the scope whose running forwards make a module's parameters read as full tensors."""
    if "_fsdp_scope" in module.__dict__:
        module._fsdp_scope = scope  # type: ignore[assignment]
    table = table_of(module)
    if table is not None:
        table.scope = scope


def _apply(module: nn.Module, original: Callable[..., Any], fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Call ``module._apply``, and make units follow the parameters that it moves or casts."""
    if (is_dynamo_compiling() or in_compilation()) and _leaves_unchanged(fn, module):
        # A router may cast itself to its own precision in forward. The code below cannot be traced.
        return module
    with _SyncAfterApply(unit_of(module)), _HideUnchanged(module, fn) as applied:
        original(applied, recurse)
    return module


def _register_parameter(module: nn.Module, original: Callable[..., None], name: str, param: nn.Parameter | None) -> None:
    """Register a parameter. In the place of a sharded parameter, it must be sharded alike."""
    table = table_of(module)
    if table is None or name not in table.sharded:
        original(name, param)
    elif table.was_read(name, param):
        # A parametrization that a forward removes puts back the full tensor that it read.
        table[name] = param
    else:
        sharded = table.sharded[name]
        sharded.check_replacement(param)
        original(name, param)
        sharded.unit.sync()


def _get_parameter(module: nn.Module, original: Callable[[str], nn.Parameter], target: str) -> Any:
    """Return a parameter by its name. Tables are read directly, as ``nn.Module`` refuses the full tensors of a forward."""
    path, _, name = target.rpartition(".")
    table = table_of(module.get_submodule(path))
    return table[name] if table is not None and name in table else original(target)


_METHODS: dict[str, Callable[..., Any]] = {
    "_apply": _apply,
    "register_parameter": _register_parameter,
    "get_parameter": _get_parameter,
}


def _leaves_unchanged(fn: Callable[[Tensor], Tensor], module: nn.Module) -> bool:
    """Return whether ``fn`` leaves all tensors of a module and of modules inside unchanged, as ``to`` their own dtype does.

    ``fn`` gets shards in the place of parameters, as torch refuses to replace a parameter that guards refer to.
    """
    for inner in module.modules():
        params: dict[str, Any] = own_parameters(inner)
        found: list[Any] = []
        table = table_of(inner)
        if table is not None:
            found = [getattr(table, shard_attribute(name)) for name in table.sharded]
            if any(one is None for one in found):
                return False
            params = {name: param for name, param in table.registered.items() if name not in table.sharded}
        tensors = [*(shard for shard, *_ in found), *params.values(), *own_buffers(inner).values()]
        if any(tensor is not None and fn(tensor) is not tensor for tensor in tensors):
            return False
    return True


class _SyncAfterApply:
    """A context that syncs units at the end of the outermost ``Module._apply``, which visits modules one by one."""

    _depth = 0
    _touched: dict[Unit, None] = {}  # noqa: RUF012

    def __init__(self, unit: Unit | None):
        self._unit = unit

    def __enter__(self) -> None:
        _SyncAfterApply._depth += 1
        if self._unit is not None:
            _SyncAfterApply._touched[self._unit] = None

    def __exit__(self, *_: Any) -> None:
        _SyncAfterApply._depth -= 1
        if _SyncAfterApply._depth == 0:
            touched, _SyncAfterApply._touched = _SyncAfterApply._touched, {}
            moved = []
            for unit in touched:
                try:
                    unit.sync()
                except MovedError as error:
                    moved.append(error)
            if moved:
                raise moved[0]


class _HideUnchanged:
    """A context that hides from ``Module._apply`` the parameters that ``fn`` leaves unchanged, as ``to`` their own dtype does.

    ``Module._apply`` would swap each of these parameters with a new one, which torch refuses for a tensor that guards of a
    compiled graph refer to.
    """

    def __init__(self, module: Any, fn: Callable[[Tensor], Tensor]):
        self._params: dict[str, nn.Parameter | None] = getattr(own_parameters(module), "registered", own_parameters(module))
        self._sharded = tuple(sharded_params_of(module))
        self._fn = fn
        self._changed: dict[int, Tensor] = {}
        self._unchanged: dict[str, nn.Parameter] = {}

    @torch.no_grad()
    def __enter__(self) -> Callable[[Tensor], Tensor]:
        for name in self._sharded:
            param = self._params.get(name)
            if param is None:
                continue
            result = self._fn(param)
            if result is not param:
                self._changed[id(param)] = result
                continue
            if param.grad is not None:
                param.grad = self._fn(param.grad)
            self._unchanged[name] = param
            self._params[name] = None
        return lambda tensor: self._changed.pop(id(tensor)) if id(tensor) in self._changed else self._fn(tensor)

    def __exit__(self, *_: Any) -> None:
        self._params.update(self._unchanged)


class FSDPModule(GradientControls, ScheduleControls):
    """The mixin of modules that were passed to ``fully_shard``.

    The modules are instances of torch's ``FSDPModule``, too. It comes after the module's own class among the bases.
    """

    _fsdp_unit: Unit
    _fsdp_scope: Scope

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # Slicing a container calls its class. A slice holds no shards of its own, and so is of the original class.
        original = cls._fsdp_original_class  # type: ignore[attr-defined]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        return _apply(cast(nn.Module, self), super()._apply, fn, recurse)  # type: ignore[misc]

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        _register_parameter(cast(nn.Module, self), super().register_parameter, name, param)  # type: ignore[misc]

    def get_parameter(self, target: str) -> Any:
        return _get_parameter(cast(nn.Module, self), super().get_parameter, target)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        for module in self.modules():  # type: ignore[attr-defined]
            for sharded in sharded_params_of(module).values():
                sharded.note_requires_grad()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} holds sharded parameters and cannot be copied. Copy the model before sharding, or build "
            "another one and load_state_dict."
        )

    def compile(self, *args: Any, **kwargs: Any) -> None:
        super().compile(*args, **kwargs)  # type: ignore[misc]
        compiled = compiled_call(self)
        set_compiled_call(self, _wrap_compiled_call(compiled, self))

    def _get_fsdp_state(self) -> UnitState | None:
        # Torch's code calls this method to find FSDP2's state.
        return state_of(cast(nn.Module, self))


def sync_before_trace() -> None:
    """Pass on to shards that parameters were frozen or unfrozen since sharding, or got an extension.

    Dynamo reads and guards shards.
    """
    params = params_with_memory().values()
    for unit in dict.fromkeys(param.unit for param in params):
        # The unit may be of another model. Its own calls raise.
        with contextlib.suppress(NotImplementedError, TypeError, ValueError):
            unit.follow_extensions()
    for param in params:
        param.sync_requires_grad()


@torch.compiler.assume_constant_result
def _begin_traced_forward(is_of_root: bool) -> bool:
    """Record, while Dynamo traces, that an outermost forward begins, and whether it is the forward of a root."""
    sync_before_trace()
    note_outermost_forward(is_of_root=is_of_root)
    return True


def _in_unit(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a forward so that parameters read as full tensors while it runs, and the policy casts inputs and outputs.

    Args:
        forward: the function; its first argument is the module.
    """

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self._fsdp_scope
        was_active = scope.active
        unit = self._fsdp_unit
        policy = unit.mp_policy
        is_traced = is_dynamo_compiling() or in_compilation()
        uncompiled = None if is_traced else UncompiledForward.begin(unit, self)
        if not was_active:
            # Not written if it is True already: torch 2.11 traces no write inside of a checkpoint.
            scope.active = True
        try:
            if is_traced and not was_active:
                _begin_traced_forward(unit.is_root)
                # Reading it makes Dynamo guard on it.
                bool(scope.optimizer_state)
            args, kwargs = cast_inputs(policy, args, kwargs)
            result = cast_output(policy, forward(self, *args, **kwargs))
            if is_traced and unit.flags.reduce_scatter_unused_params:
                result = with_unit_of(unit, result)
            if uncompiled is not None:
                uncompiled.returns(result, (args, kwargs))
            return result
        finally:
            if not was_active:
                scope.active = False
                if scope.tied_reads:
                    scope.tied_reads.clear()
                if scope.lent:
                    end_loans(scope)
            if uncompiled is not None:
                uncompiled.end()

    # Dynamo counts compilations, and learns which sizes change, by code object. All units would share one.
    code = wrapped.__code__  # type: ignore[attr-defined]
    wrapped.__code__ = code.replace(co_name=f"unit_{forward.__qualname__.replace('.', '_')}")  # type: ignore[attr-defined]
    return wrapped


def _wrap_compiled_call(compiled: Callable[..., Any], module: Any) -> Callable[..., Any]:
    """Wrap the compiled call of a unit. Its scope is active in a recomputation, and an exception is recorded.

    Dynamo guards on the scope's state, which is active in the root's forward. Without the wrapper, Dynamo compiles everything
    twice, and each function has a limit. If the limit is reached between a forward and its recomputation, the two save
    different tensors.

    Args:
        compiled: the compiled call.
        module: the unit's module.
    """

    @functools.wraps(compiled)
    def call(*args: Any, **kwargs: Any) -> Any:
        if is_dynamo_compiling() or in_compilation():
            return compiled(*args, **kwargs)
        scope: Scope = module._fsdp_scope
        activates = not scope.active and not module._fsdp_unit.is_root and is_recomputing()
        if activates:
            scope.active = True
        try:
            return compiled(*args, **kwargs)
        except BaseException as error:
            record_failed_forward(error, scope.groups)
            raise
        finally:
            if activates:
                scope.active = False

    return call


@functools.cache
def _unit_class(original: type[nn.Module]) -> type[nn.Module]:
    namespace: dict[str, Any] = {"_fsdp_original_class": original, "__module__": original.__module__}
    if not issubclass(original, OptimizedModule):
        # The forward of a wrapper calls that of its module, which is wrapped.
        namespace["forward"] = _in_unit(original.forward)
    return type(f"FSDP{original.__name__}", (FSDPModule, original, TorchFSDPModule), namespace)


def shard_parameters(module: nn.Module, unit: Unit, sharded: dict[str, ShardedParam]) -> None:
    """Put a table of sharded parameters in the place of a module's ``_parameters``, with their DTensors registered.

    While a forward runs, the module reads full tensors from the table.

    Args:
        module: the module that registers the parameters.
        unit: the unit that the module belongs to.
        sharded: the parameters by their names in the module.
    """
    registered = own_parameters(module)
    for name, param in sharded.items():
        registered[name] = param.param
    module.__dict__["_parameters"] = ShardedParameters(registered, sharded, unit)


def add_methods(module: nn.Module, unit: Unit) -> None:
    """Give a module inside a unit the methods of an :class:`FSDPModule` that it needs. The module keeps its class."""
    registers = bool(sharded_params_of(module))
    if registers:
        module.register_load_state_dict_post_hook(lambda _module, _keys: unit.sync())
    for name, method in _METHODS.items():
        if name not in module.__dict__ and (registers or method is _get_parameter):
            module.__dict__[name] = functools.partial(method, module, getattr(module, name))


def make_unit(module: nn.Module, unit: Unit) -> None:
    """Make a module that was passed to ``fully_shard`` an ``FSDP<Class>``, in place."""
    module._fsdp_unit = unit  # type: ignore[assignment]
    module._fsdp_scope = unit.scope  # type: ignore[assignment]
    original: Any = type(module)
    module.__class__ = _unit_class(original)
    if "forward" in module.__dict__:
        # A forward patched onto the instance hides the class's.
        _wrap_on_instance(module, "forward")
    if compiled_call(module) is not None:
        set_compiled_call(module, _wrap_compiled_call(compiled_call(module), module))
    module.register_load_state_dict_post_hook(lambda _module, _keys: unit.sync())
    # After an exception on one rank alone, the shards of the ranks may be of different steps.
    module.register_state_dict_pre_hook(lambda *_: settle(unit.groups))


def swap_class_of_wrapper(wrapper: OptimizedModule) -> None:
    """Make the wrapper that ``torch.compile`` returned for a sharded module an ``FSDPModule``, too.

    The wrapper has the attributes of the module inside, and so its unit.
    """
    original: Any = type(wrapper)
    wrapper.__class__ = cast("type[OptimizedModule]", _unit_class(original))
    wrapper.forward = _wrap_compiled_call(wrapper.forward, wrapper)


def _wrap_on_instance(module: nn.Module, name: str) -> None:
    """Make a method of one module read full parameters. The method keeps its signature."""
    method = getattr(module, name)
    wrapped = _in_unit(lambda self, *args, **kwargs: method(*args, **kwargs))
    setattr(module, name, functools.wraps(method)(lambda *args, **kwargs: wrapped(module, *args, **kwargs)))


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Make a method other than ``forward``, such as ``generate``, read full parameters, too.

    Args:
        module: a module that ``fully_shard`` sharded.
        method_name: the name of its method.

    Raises:
        AttributeError: the module has no such method.

    Source: ``torch.distributed.fsdp.register_fsdp_forward_method``.
    """
    if not callable(getattr(module, method_name, None)):
        raise AttributeError(f"{type(module).__name__} has no method {method_name!r} to register.")
    if isinstance(module, FSDPModule):
        _wrap_on_instance(module, method_name)
