"""Attributes that sharded modules register, as Dynamo reads them.

If a module has its parameters and submodules in plain dictionaries, Dynamo looks them up directly. Otherwise it traces
``nn.Module.__getattr__`` for each read, which takes a tenth of its time for a deep model. Sharded modules have their parameters
in a table of this library. For these modules, Dynamo gets the result of the lookup from here.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from passes.fx.torch_internals.dynamo import ConstantVariable
from passes.fx.torch_internals.patches import guard_module_attribute, read_module_attribute


def install(kind: type) -> None:
    """Make Dynamo look up, and guard on, attributes of modules with a table of parameters, until ``patches.uninstall()``.

    If the installed torch lacks the private names for this, Dynamo traces the lookup, which is right but slower, and fails at
    a ``hasattr`` of a parameter.

    Args:
        kind: the type of the tables, whose items are the parameters.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, tx: Any, name: str) -> Any:
            module = self.value
            own = vars(module)
            table = own.get("_parameters")
            # Attributes of the class or instance come first, and so do attributes that traced code has set.
            is_registered = type(table) is kind and name not in own and not hasattr(type(module), name)
            if is_registered and not tx.output.side_effects.has_pending_mutation(self):
                if name in table:
                    key = ConstantVariable.create(name)
                    function = self.build(tx, operator.getitem)
                    return function.call_function(tx, [original(self, tx, "_parameters"), key], {})
                if name in own["_modules"] or name in own["_buffers"]:
                    return self.manually_trace_nn_module_getattr(tx, name)
            return original(self, tx, name)

        return read

    read_module_attribute.install(make)

    def make_guard(original: Callable[..., Any]) -> Callable[..., Any]:
        # With torch's names, as it passes some by keyword.
        def guard(
            self: Any,
            source: Any,
            base_guard_manager: Any,
            base_example_value: Any,
            example_value: Any,
            base_source_name: str,
            source_name: str,
            guard_manager_enum: Any,
        ) -> Any:
            own, name = vars(base_example_value), source.member
            table = own.get("_parameters")
            is_registered = type(table) is kind and name not in own
            if is_registered and name in table:
                # The guard of a ``hasattr``. What traced code reads has guards of its own.
                return base_guard_manager.getattr_manager(
                    attr=name, source=source_name, example_value=example_value, guard_manager_enum=guard_manager_enum
                )
            return original(
                self,
                source,
                base_guard_manager,
                base_example_value,
                example_value,
                base_source_name,
                source_name,
                guard_manager_enum,
            )

        return guard

    guard_module_attribute.install(make_guard)
