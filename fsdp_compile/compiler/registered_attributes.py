"""Attributes that sharded modules register, as Dynamo reads them.

**Time.** If a module has its parameters and submodules in plain dictionaries, Dynamo looks them up directly. Otherwise it
traces ``nn.Module.__getattr__`` for each read, which takes a tenth of its time for a deep model. Sharded modules have their
parameters in a table of this library. For these modules, Dynamo gets the result of the lookup from here.

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
from passes.fx.torch_internals.dynamo import ConstantVariable
from passes.fx.torch_internals.patches import call_operator, guard_module_attribute, read_module_attribute
from passes.ir.ops import unshard

# The variables of full parameters in each graph that Dynamo traces, or body of one: by shard, and by the grad mode.
_read: WeakKeyDictionary[Any, dict[tuple[Node, bool], Any]] = WeakKeyDictionary()


def _same_for_shard(tx: Any, shard: Any, full: Any) -> Any:
    """Return Dynamo's variable for the first full parameter that was read from a shard, given that of another read."""
    full.class_type = nn.Parameter
    earlier = _read.setdefault(tx.output.current_tracer, {})
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
                    if name in table.sharded:
                        _check_is_in_no_body(tx, table.sharded[name].name)
                    key = ConstantVariable.create(name)
                    function = self.build(tx, operator.getitem)
                    return function.call_function(tx, [original(self, tx, "_parameters"), key], {})
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
    read_module_attribute.install(make_read)
    guard_module_attribute.install(make_guard)
