"""Reads of what sharded modules register, when Dynamo traces them.

Dynamo looks up parameters and submodules at once where a module has them in plain dictionaries. Where it has them in anything
else, it traces ``nn.Module.__getattr__`` for each read, which takes a tenth of its time for a deep model. For modules whose
parameters are in a table of ours, it is told here what that would find.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

from passes.fx.torch_internals.dynamo import ConstantVariable
from passes.fx.torch_internals.patches import read_module_attribute


def install(kind: type) -> None:
    """Show Dynamo the attributes of modules with a table of parameters, until ``patches.uninstall()``.

    Without the private names that it takes, Dynamo traces the lookup: that is right, and slower.

    Args:
        kind: the type of tables, which have the parameters as items.
    """

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, tx: Any, name: str) -> Any:
            module = self.value
            own = vars(module)
            table = own.get("_parameters")
            # Attributes of the class or instance come first; and one that traced code sets.
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
