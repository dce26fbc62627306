"""Calls of graphs, as a capture records them: which graph ran for which units, and what lived besides."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch.distributed.tensor import DTensor

from ..runtime.call import Call
from ..units.unit import Scope, Unit

if TYPE_CHECKING:
    from .capture import CapturedGraph


@dataclass(frozen=True)
class UnitFacts:
    """What a unit holds.

    Attributes:
        name: its qualified name; "root" for the root; with the number of the model for further models.
        parameters: the names of its parameters, each with the number of elements of the full one.
        shard_bytes: this rank's flat storage, padding included.
        trainable, trainable_bytes: the elements of this rank's shards that an optimizer steps, and their bytes.
    """

    name: str
    parameters: Mapping[str, int]
    shard_bytes: int
    trainable: int
    trainable_bytes: int

    @staticmethod
    def of(unit: Unit, name: str) -> UnitFacts:
        """The facts of a unit as it is, under a name."""
        stepped = [param.local for param in unit.params if param.param.requires_grad]
        return UnitFacts(
            name,
            {param.name: param.shape.numel() for param in unit.params},
            sum(storage.nbytes for storage in unit.storages.values()),
            sum(local.numel() for local in stepped),
            sum(local.nbytes for local in stepped),
        )


@dataclass(frozen=True, eq=False)
class GraphCall:
    """One call of a lowered graph.

    Attributes:
        graph: the graph.
        is_backward: whether it is a backward graph.
        compilation: equal for a forward graph and its backward.
        units: the names of units in the graph, each with that of the unit that the call was for: equal blocks share graphs.
        gradient_bytes: gradients that were there when it began: reduced ones, and those that wait for communication.
        parameter_bytes: gathered parameters that were there when it began.
    """

    graph: CapturedGraph
    is_backward: bool
    compilation: object
    units: Mapping[str, str]
    gradient_bytes: int
    parameter_bytes: int


class Census:
    """The sharded models that the calls of a capture were for.

    Attributes:
        units: the facts of their units, in the order of the modules.
        other_bytes: what they hold besides shards: buffers, and parameters that are not sharded.
    """

    def __init__(self) -> None:
        # A capture keeps no model alive.
        self._scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[Unit, str] = weakref.WeakKeyDictionary()
        self.units: list[UnitFacts] = []
        self.other_bytes = 0

    def note(self, call: Call) -> None:
        """Note the models of a call."""
        for unit in call.units.values():
            if unit.scope not in self._scopes:
                self._scopes.add(unit.scope)
                # Names are those within one model.
                suffix = f" of model {len(self._scopes)}" if len(self._scopes) > 1 else ""
                for member in unit.scope.units:
                    self._names[member] = f"{member.name or 'root'}{suffix}"
                    self.units.append(UnitFacts.of(member, self._names[member]))
                self.other_bytes += sum(_other_bytes(unit) for unit in unit.scope.units if unit.is_root)

    def name_of(self, unit: Unit) -> str:
        """The name of a unit that no other unit has."""
        return self._names[unit]

    def gradient_bytes(self) -> int:
        """The bytes of gradients of all models as they are."""
        return sum(_gradient_bytes(unit) for unit in self._units())

    def parameter_bytes(self) -> int:
        """The bytes of parameters that are gathered already."""
        fulls = [param.state.full(param.param) for unit in self._units() for param in unit.params]
        return sum(full.nbytes for full in fulls if full is not None)

    def _units(self) -> Iterable[Unit]:
        return (unit for scope in self._scopes for unit in scope.units)


def _other_bytes(root: Unit) -> int:
    values = {id(value): value for module in root.modules for value in (*module.buffers(), *module.parameters())}
    return sum(value.nbytes for value in values.values() if not isinstance(value, DTensor))


def _gradient_bytes(unit: Unit) -> int:
    total = 0
    for param in unit.params:
        local = getattr(param.param.grad, "_local_tensor", None)
        total += 0 if local is None else local.nbytes
        total += 0 if param.state.unsharded_grad is None else param.state.unsharded_grad.nbytes
        partial = param.state.partial_grad
        total += 0 if partial is None else partial.numel * partial.flat.itemsize
    return total
