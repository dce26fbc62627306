"""Calls of graphs, as a capture records them: which graph ran for which units, and what lived besides."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.collectives.layout import padded_shard_numel
from passes.ir.symbolic_shards import Piece

from ..runtime.call import Call
from ..units.sharded_param import ShardedParam
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
        layout: its parameters in the order of its storage, and whether an optimizer steps them.
        is_copied: whether its shards are on the host, and copied from there.
    """

    name: str
    parameters: Mapping[str, int]
    shard_bytes: int
    trainable: int
    trainable_bytes: int
    layout: Sequence[tuple[Piece, bool]]
    is_copied: bool = False

    @staticmethod
    def of(unit: Unit, name: str) -> UnitFacts:
        """The facts of a unit as it is, under a name."""
        stepped = [param.local for param in unit.params if param.param.requires_grad]
        return UnitFacts(
            name,
            {param.name: param.shape.numel() for param in unit.params},
            sum(storage.nbytes for storage in unit.storages.values()) + sum(map(_bytes_of_extension, unit.params)),
            sum(local.numel() for local in stepped),
            sum(local.nbytes for local in stepped),
            [(_piece(param), param.param.requires_grad) for param in unit.params if param.extension is None],
            unit.copies,
        )


@dataclass(frozen=True)
class Held:
    """What units hold, apart from shards, between calls.

    Attributes:
        whole_bytes: of what is there as a whole.
        shards: how many shards there are, by full shape, dimension of the cut and bytes of an element.
    """

    whole_bytes: int
    shards: Mapping[tuple[tuple[int, ...], int, int], int]

    def num_bytes(self, ranks: int) -> int:
        """The bytes of that on one of so many ranks."""
        return self.whole_bytes + sum(
            count * padded_shard_numel(shape, dim, ranks) * itemsize for (shape, dim, itemsize), count in self.shards.items()
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
        gradients: the same, for any number of ranks.
        parameter_bytes: gathered parameters that were there when it began.
        released: those of them that it frees as it goes: inputs of the graph by name, with their bytes.
    """

    graph: CapturedGraph
    is_backward: bool
    compilation: object
    units: Mapping[str, str]
    gradient_bytes: int
    gradients: Held
    parameter_bytes: int
    released: Mapping[str, int]

    @property
    def key(self) -> Hashable:
        """Equal for calls of one graph that free the same."""
        return id(self.graph), tuple(self.released)


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
                self.other_bytes += sum(other_bytes(unit) for unit in unit.scope.units if unit.is_root)

    def name_of(self, unit: Unit) -> str:
        """The name of a unit that no other unit has."""
        return self._names[unit]

    def gradient_bytes(self) -> int:
        """The bytes of gradients of all models as they are, without those on the host."""
        return sum(_gradient_bytes(unit) for unit in self._units())

    def gradients(self) -> Held:
        """Gradients of all models as they are."""
        whole, shards = 0, Counter[tuple[tuple[int, ...], int, int]]()
        for unit in self._units():
            for param in unit.params:
                local, unsharded, partial = _gradients(param)
                whole += 0 if unsharded is None else unsharded.nbytes
                for itemsize in (value.dtype.itemsize for value in (local, partial) if value is not None):
                    shards[tuple(param.shape), param.dim, itemsize] += 1
        return Held(whole, shards)

    def parameter_bytes(self) -> int:
        """The bytes of parameters that are gathered already."""
        fulls = [param.state.full(param.param) for unit in self._units() for param in unit.params]
        return sum(full.nbytes for full in fulls if full is not None)

    def _units(self) -> Iterable[Unit]:
        return (unit for scope in self._scopes for unit in scope.units)


def _piece(param: ShardedParam) -> Piece:
    return Piece(tuple(param.shape), param.dim, param.local.dtype, param.offset, param.alignment)


def _bytes_of_extension(param: ShardedParam) -> int:
    return 0 if param.extension is None else param.extension.num_bytes(param.local)


def other_bytes(root: Unit) -> int:
    """What the modules of an outermost unit hold besides shards: buffers, and parameters that are not sharded."""
    values = {id(value): value for module in root.modules for value in (*module.buffers(), *module.parameters())}
    return sum(value.nbytes for value in values.values() if not isinstance(value, DTensor))


def _gradient_bytes(unit: Unit) -> int:
    return sum(value.nbytes for param in unit.params for value in _gradients(param) if value is not None)


def _gradients(param: ShardedParam) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The reduced gradient of a parameter, unless it is on the host; what waits for the reduction; what for the all-reduce."""
    partial = param.state.partial_grad
    local = None if param.unit.copies else getattr(param.param.grad, "_local_tensor", None)
    return local, param.state.unsharded_grad, None if partial is None else partial.tensor()
