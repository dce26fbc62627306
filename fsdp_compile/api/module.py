"""The classes that sharding gives to modules.

A module that was passed to ``fully_shard`` becomes an ``FSDP<Class>``; one inside it that registers sharded parameters becomes
a ``Sharded<Class>``. Both are generated subclasses of the module's own class, on which every sharded parameter is a property.
Inside a forward the property returns ``unshard(shard, ...)``; outside, the DTensor parameter, or after ``unshard()`` the full
tensor. Dynamo traces such properties like any other Python code, so its graph holds the operators, and the model's own code
stays as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.compiler import is_compiling

# Imported by name: other code may put our class in the place of torch's in that module.
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from passes.fx.torch_internals.core import TracingContext, disable_dynamo, swap_tensor
from passes.fx.torch_internals.dynamo import OptimizedModule
from passes.ir.ops import unshard, unshard_extension

from ..compiler.traced_forwards import note_traced_forward
from ..runtime.uncompiled import Forward, is_recomputing, read, read_in_forward_of
from ..units.extension import is_extension
from ..units.sharded_param import ShardedParam, model_parallel_attribute, shard_attribute
from ..units.unit import MovedError, Scope, Unit
from .casts import cast_inputs, cast_output
from .composable import UnitState, state_of
from .gradient_controls import GradientControls
from .schedule_controls import ScheduleControls


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that a module belongs to, if it is one's or registers parameters of one."""
    return module.__dict__.get("_fsdp_unit")


def sharded_params_of(module: nn.Module) -> dict[str, ShardedParam]:
    """The sharded parameters that a module registers, by name."""
    return module.__dict__.get("_fsdp_sharded", {})


class _Sharded:
    """The common base of both kinds of classes."""

    _fsdp_unit: Unit
    _fsdp_scope: Scope

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        # A container makes new containers of its own class when it is sliced; they hold no shards of their own.
        original = cls._fsdp_original_class  # type: ignore[attr-defined]
        instance = original.__new__(original)
        instance.__init__(*args, **kwargs)
        return instance

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        if is_compiling() and _leaves(fn, cast(nn.Module, self)):
            # Such as a router that ensures its own precision in forward. The code below cannot be traced.
            return self
        with _SyncAfterApply(self._fsdp_unit), _HideUnchanged(self, fn) as applied:
            return super()._apply(applied, recurse)  # type: ignore[misc]

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        super().requires_grad_(requires_grad)  # type: ignore[misc]
        for module in self.modules():  # type: ignore[attr-defined]
            for sharded in sharded_params_of(module).values():
                sharded.sync_requires_grad()
        return self

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        sharded = sharded_params_of(cast(nn.Module, self)).get(name)
        if sharded is not None:
            sharded.check_replacement(param)
        super().register_parameter(name, param)  # type: ignore[misc]
        if sharded is not None:
            sharded.unit.sync()

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise NotImplementedError(
            f"{type(self).__name__} holds sharded parameters and cannot be copied. Copy the model before sharding, or build "
            "another one and load_state_dict."
        )


def _leaves(fn: Callable[[Tensor], Tensor], module: nn.Module) -> bool:
    """Whether a function returns every tensor of a module and of those inside it unchanged, as ``to`` their own dtype does.

    It is called with shards in the place of parameters: torch refuses to replace a parameter that guards refer to.
    """
    for inner in module.modules():
        sharded = sharded_params_of(inner)
        found = [getattr(inner, shard_attribute(name)) for name in sharded]
        if any(one is None for one in found):
            return False
        others = [param for name, param in inner._parameters.items() if name not in sharded]
        tensors = [*(shard for shard, *_ in found), *others, *inner._buffers.values()]
        if any(tensor is not None and fn(tensor) is not tensor for tensor in tensors):
            return False
    return True


class _SyncAfterApply:
    """Syncs units when the outermost call of ``Module._apply``, which visits modules one by one, is done."""

    _depth = 0
    _touched: dict[Unit, None] = {}  # noqa: RUF012

    def __init__(self, unit: Unit):
        self._unit = unit

    def __enter__(self) -> None:
        _SyncAfterApply._depth += 1
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
    """Hides those parameters of a module from ``Module._apply`` that the function leaves unchanged, as ``to`` their own dtype
    does. It would swap each of them with a new one, which torch refuses for a tensor that guards of a compiled graph refer to.
    """

    def __init__(self, module: Any, fn: Callable[[Tensor], Tensor]):
        self._params: dict[str, nn.Parameter | None] = module._parameters
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


class FSDPModule(GradientControls, ScheduleControls, _Sharded):
    """Mixin of modules that were passed to ``fully_shard``.

    They are instances of torch's ``FSDPModule``, too: it stands behind the module's own class among the bases of theirs.
    """

    def _get_fsdp_state(self) -> UnitState | None:
        # Torch's code calls it to find FSDP2's state.
        return state_of(cast(nn.Module, self))


@torch.compiler.assume_constant_result
def _traces_recomputation() -> bool:
    """Return whether a checkpoint recomputes in backward, outside of any unit's forward, the code that Dynamo traces."""
    # Dynamo cannot guard on it. Code that is traced here, and called outside of backward and forward, reads full tensors.
    return is_recomputing()


def _sharded_property(name: str) -> property:
    attribute = shard_attribute(name)

    # Dynamo traces this for each parameter of each layer: every object and attribute on the way costs time, and a guard.
    def read(self: Any) -> Any:
        if not is_compiling():
            return _read_eagerly(self, name)
        if not self._fsdp_scope.active and not _traces_recomputation():
            return self._parameters[name]
        found = getattr(self, attribute)
        if found is None:
            raise RuntimeError(self._fsdp_sharded[name].meta_message())
        shard, args, kwargs = found
        return unshard(shard, *args, **kwargs)

    return property(read)


def _model_parallel_property(name: str) -> property:
    """The property of a parameter that another parallelism has laid out, which reads as its DTensor."""
    piece_of: Any = _sharded_property(name).fget
    attribute = model_parallel_attribute(name)

    def read(self: Any) -> Any:
        piece = piece_of(self)
        if not is_compiling() or not (self._fsdp_scope.active or _traces_recomputation()):
            return piece
        return getattr(self, attribute).wrap(piece)

    return property(read)


def _extension_property(name: str) -> property:
    """The property of a parameter whose local tensor is a subclass with gathers of its own."""
    attribute = shard_attribute(name)

    def read(self: Any) -> Any:
        if not is_compiling():
            return _read_eagerly(self, name)
        if not self._fsdp_scope.active and not _traces_recomputation():
            return self._parameters[name]
        found = getattr(self, attribute)
        if found is None:
            raise RuntimeError(self._fsdp_sharded[name].meta_message())
        shard, args, kwargs, attributes, optional = found
        names = tuple([key for key in optional if attributes[key] is not None])
        return unshard_extension(shard, *args, tensors=[attributes[key] for key in names], names=names, **kwargs)

    return property(read)


@disable_dynamo
def _read_eagerly(module: Any, name: str) -> Any:
    sharded: ShardedParam = module._fsdp_sharded[name]
    if name not in module._parameters:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    registered = module._parameters[name]
    if registered is not sharded.param:
        # torch.func.functional_call puts tensors there.
        return sharded.compute_with(registered) if module._fsdp_scope.active else registered
    is_recomputed = not module._fsdp_scope.active and is_recomputing()
    if not module._fsdp_scope.active and not is_recomputed:
        shown = sharded.state.shown(sharded.param)
        return registered if shown is None else sharded.as_read(shown)
    if sharded.shard.is_meta:
        raise RuntimeError(sharded.meta_message())
    # A container of parameters has no forward that a checkpoint could run again, nor has a module whose parent reads them.
    full = read_in_forward_of(module, sharded) if is_recomputed else read(sharded)
    if full is None:
        sharded.sync_requires_grad()
        full = sharded.gather_alone()
    return sharded.as_read(full)


@torch.compiler.assume_constant_result
def _begin_traced_forward(is_of_root: bool) -> bool:
    """Note, while Dynamo traces, that an outermost forward begins, and check that ``functional_call`` is not traced with it.

    Args:
        is_of_root: whether it is the forward of a root.

    Raises:
        RuntimeError: it is. Only Dynamo sees the tensors that it puts into modules then: traced properties would have to look
            for them, with guards that other calls do not need.
    """
    if swap_tensor.__code__ in (TracingContext.get_traced_code() or ()):
        raise RuntimeError(
            "torch.func.functional_call is traced together with a module that fully_shard sharded, whose shards compiled code "
            "reads whatever functional_call is given. Call it uncompiled, or write values to the parameters."
        )
    note_traced_forward(is_of_root=is_of_root)
    return True


def _in_unit(forward: Callable[..., Any], casts: bool) -> Callable[..., Any]:
    """Wrap a forward so that parameters read as full tensors while it runs.

    Args:
        forward: the function; its first argument is the module.
        casts: apply the policy's casts of inputs and outputs (the unit's own forward).
    """

    @functools.wraps(forward)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        scope = self._fsdp_scope
        was_active = scope.active
        if was_active and not casts:
            return forward(self, *args, **kwargs)
        unit = self._fsdp_unit
        policy = unit.mp_policy
        uncompiled = None if is_compiling() else Forward(unit, self, casts)
        if not was_active:
            # torch 2.11 traces no write inside of a checkpoint.
            scope.active = True
        try:
            if is_compiling() and not was_active:
                _begin_traced_forward(casts and unit.is_root)
                # Asking is what has Dynamo guard on it.
                bool(scope.optimizer_state)
            if casts:
                args, kwargs = cast_inputs(policy, args, kwargs)
            result = forward(self, *args, **kwargs)
            if casts:
                result = cast_output(policy, result)
            if uncompiled is not None:
                uncompiled.returns(result, (args, kwargs))
            return result
        finally:
            if not was_active:
                scope.active = False
            if uncompiled is not None:
                uncompiled.end()

    return wrapped


@functools.cache
def _make_class(
    original: type[nn.Module],
    names: tuple[str, ...],
    model_parallel: tuple[str, ...],
    is_unit: bool,
    extended: tuple[str, ...] = (),
) -> type[nn.Module]:
    base, prefix = (FSDPModule, "FSDP") if is_unit else (_Sharded, "Sharded")
    namespace: dict[str, Any] = {name: _sharded_property(name) for name in names}
    namespace |= {name: _model_parallel_property(name) for name in model_parallel}
    namespace |= {name: _extension_property(name) for name in extended}
    if not issubclass(original, OptimizedModule):
        # The forward of a wrapper runs that of its module.
        namespace["forward"] = _in_unit(original.forward, casts=is_unit)
    namespace["_fsdp_original_class"] = original
    namespace["__module__"] = original.__module__
    bases = (base, original, TorchFSDPModule) if is_unit else (base, original)
    return type(f"{prefix}{original.__name__}", bases, namespace)


def swap_class(module: nn.Module, unit: Unit, is_unit: bool) -> None:
    """Make ``module`` an instance of its generated class, in place.

    Args:
        module: a module that the unit was made of, or one inside it that registers parameters of it.
        unit: the unit.
        is_unit: whether it is one of the former, which become ``FSDP<Class>``; others become ``Sharded<Class>``.
    """
    module._fsdp_unit = unit  # type: ignore[assignment]
    module._fsdp_scope = unit.scope  # type: ignore[assignment]
    original: Any = type(module)
    params = sharded_params_of(module)
    model_parallel = tuple(name for name, sharded in params.items() if sharded.model_parallel is not None)
    extended = tuple(name for name, sharded in params.items() if is_extension(sharded.local))
    module.__class__ = _make_class(original, tuple(params), model_parallel, is_unit, extended)
    if "forward" in module.__dict__:
        # A forward patched onto the instance hides the class's.
        _wrap_on_instance(module, "forward", casts=is_unit)
    module.register_load_state_dict_post_hook(lambda _module, _keys: unit.sync())


def swap_class_of_wrapper(wrapper: OptimizedModule) -> None:
    """Make the wrapper that ``torch.compile`` returned for a sharded module an ``FSDPModule``, too.

    It has the attributes of the module inside, and so its unit.
    """
    original: Any = type(wrapper)
    wrapper.__class__ = cast("type[OptimizedModule]", _make_class(original, (), (), True))


def _wrap_on_instance(module: nn.Module, name: str, casts: bool) -> None:
    """Make a module's own method read full parameters. It keeps its signature."""
    method = getattr(module, name)
    wrapped = _in_unit(lambda self, *args, **kwargs: method(*args, **kwargs), casts)
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
        _wrap_on_instance(module, method_name, casts=True)
