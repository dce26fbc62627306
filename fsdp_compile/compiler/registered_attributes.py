"""Attributes that sharded modules register, as Dynamo reads them.

**Time.** If a module has its parameters and submodules in plain dictionaries, Dynamo looks them up directly. Otherwise it
traces ``nn.Module.__getattr__`` for each read. Sharded modules have their parameters in a table of this library. Dynamo gets
the ``unshard`` of a parameter from here, with two guards: one on the shard, one on the identity of all other arguments. Tracing
the table's code would take three times as long, and install a guard for each argument.

**Identity.** Each read is an ``unshard`` in the graph. Code may ask whether two reads are one object (``is``, ``id``), as
models with tied parameters do, or whether one is an ``nn.Parameter``. So Dynamo gets the same variable for the same shard, with
the class of a parameter.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.fx import Node

from passes.fx.torch_internals.core import HigherOrderOperator
from passes.fx.torch_internals.dynamo import (
    AttrSource,
    ConstantVariable,
    GetItemSource,
    GuardBuilder,
    VariableBuilder,
    install_guard,
    wrap_fx_proxy,
)
from passes.fx.torch_internals.patches import call_operator, guard_module_attribute, read_module_attribute
from passes.ir.ops import unshard

from ..units.sharded_param import shard_attribute

# The variables of full parameters in each graph that Dynamo traces, or body of one: by shard, and by the grad mode.
_fulls: WeakKeyDictionary[Any, dict[tuple[Node, bool], Any]] = WeakKeyDictionary()


def _same_for_shard(tx: Any, shard: Any, full: Any) -> Any:
    """Return Dynamo's variable for the first full parameter that was read from a shard, given that of another read."""
    full.class_type = nn.Parameter
    earlier = _fulls.setdefault(tx.output.current_tracer, {})
    return earlier.setdefault((shard.as_proxy().node, torch.is_grad_enabled()), full)


# Without such a check, torch.cond and its like, which compile their bodies in an uncompiled forward, too, fail in backward; or
# torch refuses two shards as inputs that share memory. Bodies of checkpoints may read parameters.
_CLOSED_BODIES = ("cond", "map_impl", "scan", "while_loop", "associative_scan", "invoke_subgraph")


def _check_is_in_no_body(tx: Any, name: str) -> None:
    """Check that Dynamo is not tracing the body of a higher-order operator in which a parameter may not be read.

    Raises:
        RuntimeError: it is. Dynamo would take a ``NotImplementedError`` for one of its own, and go on.
    """
    tracer = tx.output.current_tracer
    while tracer is not None:
        operator = getattr(tracer, "source_target", None)
        if isinstance(operator, HigherOrderOperator) and operator.name() in _CLOSED_BODIES:
            raise RuntimeError(
                f"Parameter {name} is read inside the body of a higher-order operator ({operator.name()}). Read it before, and "
                "pass it in as an operand."
            )
        tracer = tracer.parent


def _call(tx: Any, function: Callable[..., Any], variable: Any, name: str) -> Any:
    """Trace a call of a function of Python with an object and the name of an attribute or an item."""
    return variable.build(tx, function).call_function(tx, [variable, ConstantVariable.create(name)], {})


def _is_active(tx: Any, variable: Any, scope: Any) -> bool:
    """Return whether a forward of a table's scope runs where Dynamo traces, given Dynamo's variable for the table."""
    effects = tx.output.side_effects
    # Tables of a unit have its scope, so the forward that Dynamo traced into has guarded on it.
    known = effects[scope] if scope in effects else _call(tx, getattr, variable, "scope")
    if effects.has_pending_mutation_of_attr(known, "active"):
        return bool(effects.load_attr(known, "active").as_python_constant())
    return bool(_call(tx, getattr, known, "active").as_python_constant())


def _item(tx: Any, variable: Any, table: Any, name: str) -> Any:
    """Return Dynamo's variable for an item of a table. Trace the table's ``__getitem__`` only in rare cases.

    Args:
        tx: the translator, which has the state of Dynamo's trace.
        variable: Dynamo's variable for the table.
        table: the table.
        name: the name of the item.
    """
    if name not in table.sharded:
        return _call(tx, operator.getitem, _call(tx, getattr, variable, "registered"), name)
    _check_is_in_no_body(tx, table.sharded[name].name)
    full = _unshard(tx, variable, table, name)
    return _call(tx, operator.getitem, variable, name) if full is None else full


def _unshard(tx: Any, variable: Any, table: Any, name: str) -> Any | None:
    """Write the ``unshard`` of a parameter into Dynamo's graph, as the table's ``__getitem__`` would.

    The arguments are those of :func:`_item`.

    Returns:
        Dynamo's variable for the full parameter. None where the table may return something else.
    """
    attribute = shard_attribute(name)
    found = vars(table).get(attribute)
    if type(found) is not tuple or len(found) != 2 or variable.source is None:
        return None
    # Traced code may have put a tensor in the parameter's place.
    if tx.output.side_effects.has_pending_mutation(variable) or not _is_active(tx, variable, table.scope):
        return None
    source = AttrSource(variable.source, attribute)
    shard, unshard_args = found
    install_guard(GetItemSource(source, 1).make_guard(GuardBuilder.ID_MATCH))
    shard_variable = VariableBuilder(tx, GetItemSource(source, 0))(shard)
    args, kwargs = unshard_args
    node = tx.output.create_proxy("call_function", unshard, (shard_variable.as_proxy(), *args), dict(kwargs))
    return _same_for_shard(tx, shard_variable, wrap_fx_proxy(tx, node))


def install(kind: type) -> None:
    """Make Dynamo look up, and guard on, attributes of modules with a table of parameters, until ``patches.uninstall()``.

    If the installed torch lacks the private names for this, Dynamo traces the lookup, which is right but slower, and fails at
    a ``hasattr`` of a parameter.

    Args:
        kind: the type of the tables, whose items are the parameters.
    """

    def table_for(module: Any, name: str) -> Any:
        """Return a module's table if it may have the attribute: those of the instance come first."""
        table = vars(module).get("_parameters")
        return table if type(table) is kind and name not in vars(module) else None

    def make_read(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, tx: Any, name: str) -> Any:
            module = self.value
            table = table_for(module, name)
            # Attributes of the class come first, and so do attributes that traced code has set.
            is_registered = table is not None and not hasattr(type(module), name)
            if is_registered and not tx.output.side_effects.has_pending_mutation(self):
                if name in table:
                    return _item(tx, original(self, tx, "_parameters"), table, name)
                if name in vars(module)["_modules"] or name in vars(module)["_buffers"]:
                    return self.manually_trace_nn_module_getattr(tx, name)
            return original(self, tx, name)

        return read

    def make_guard(original: Callable[..., Any]) -> Callable[..., Any]:
        def guard(self: Any, source: Any, base: Any, module: Any, value: Any, base_path: str, path: str, manager: Any) -> Any:
            table = table_for(module, source.member)
            if table is None or source.member not in table:
                return original(self, source, base, module, value, base_path, path, manager)
            # The guard of a ``hasattr``. What traced code reads has guards of its own.
            return base.getattr_manager(attr=source.member, source=path, example_value=value, guard_manager_enum=manager)

        return guard

    def make_call(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            result = original(self, tx, args, kwargs)
            return _same_for_shard(tx, args[0], result) if self.value is unshard else result

        return call

    call_operator.install(make_call)
    for method in read_module_attribute:
        method.install(make_read)
    guard_module_attribute.install(make_guard)
