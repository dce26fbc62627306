"""Calls of graphs, as a capture records them: the graph, the units, and the memory outside of the graph."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.distributed.tensor import DTensor

from passes.collectives.layout import padded_shard_numel
from passes.fx.torch_internals.objects import local_of
from passes.ir.symbolic_shards import StoredParam

from ..runtime.call import Call
from ..units.sharded_param import ShardedParam
from ..units.unit import Scope, Unit
from .captured_graph import CapturedGraph


@dataclass(frozen=True)
class UnitFacts:
    """The name, parameters and sizes of a unit.

    Attributes:
        name: qualified name; "root" for the root. Further models of a capture append their number.
        parameters: the number of elements of each full parameter, by the parameter's name.
        shard_bytes: bytes of this rank's flat storage, padding included, and of shards with an all-gather extension.
        trainable, trainable_bytes: elements and bytes of this rank's shards of parameters that require gradients.
        layout: the parameters in the order of the flat storage, each with whether it requires a gradient. Parameters with an
            extension are left out.
        is_copied: whether the shards are on the host, and copied from there.
    """

    name: str
    parameters: Mapping[str, int]
    shard_bytes: int
    trainable: int
    trainable_bytes: int
    layout: Sequence[tuple[StoredParam, bool]]
    is_copied: bool = False

    @staticmethod
    def of(unit: Unit, name: str) -> UnitFacts:
        """Collect the facts of a unit in its present state, under a name."""
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
class GradientCounts:
    """Gradients that units hold between calls, counted for any number of ranks.

    Attributes:
        whole_bytes: bytes of full gradients, which are the same for any number of ranks.
        shards: the number of sharded gradients, by full shape, sharded dimension and bytes of an element.
    """

    whole_bytes: int
    shards: Mapping[tuple[tuple[int, ...], int, int], int]

    def num_bytes(self, ranks: int) -> int:
        """Return the bytes on one rank if parameters are sharded over ``ranks`` ranks."""
        return self.whole_bytes + sum(
            count * padded_shard_numel(shape, dim, ranks) * itemsize for (shape, dim, itemsize), count in self.shards.items()
        )


@dataclass(frozen=True, eq=False)
class GraphCall:
    """One call of a lowered graph.

    Attributes:
        graph: the graph.
        is_backward: whether it is a backward graph.
        compilation: one object for a forward graph and its backward graph.
        units: the name of each unit that the call is for, by its name in the graph. Equal blocks share graphs.
        gradient_bytes: bytes of gradients that exist when the call begins: reduced ones, and those that wait for communication.
        gradients: the same gradients, counted for any number of ranks.
        parameter_bytes: bytes of gathered parameters that exist when the call begins.
        released: gathered parameters that the graph frees during the call: the bytes of each, by the name of its graph input.
    """

    graph: CapturedGraph
    is_backward: bool
    compilation: object
    units: Mapping[str, str]
    gradient_bytes: int
    gradients: GradientCounts
    parameter_bytes: int
    released: Mapping[str, int]

    @property
    def key(self) -> Hashable:
        """A key that is equal for calls of one graph that free the same inputs."""
        return id(self.graph), tuple(self.released)


class Census:
    """The sharded models of a capture's calls.

    Attributes:
        units: the facts of the models' units, in the order of the modules.
        other_bytes: bytes of the models' buffers, and of parameters that are not sharded.
        copies: for units, by name, the number of equal units that graphs leave out. Bytes between calls count these, too.
    """

    def __init__(self) -> None:
        self.copies: Mapping[str, int] = {}
        # Weak references: a capture keeps no model alive.
        self._scopes: weakref.WeakSet[Scope] = weakref.WeakSet()
        self._names: weakref.WeakKeyDictionary[Unit, str] = weakref.WeakKeyDictionary()
        self.units: list[UnitFacts] = []
        self.other_bytes = 0

    def note(self, call: Call) -> None:
        """Add the models of a call, unless they are known."""
        for unit in call.units.values():
            if unit.scope not in self._scopes:
                self._scopes.add(unit.scope)
                # Names are unique only within one model.
                suffix = f" of model {len(self._scopes)}" if len(self._scopes) > 1 else ""
                for member in unit.scope.units:
                    self._names[member] = f"{member.name or 'root'}{suffix}"
                    self.units.append(UnitFacts.of(member, self._names[member]))
                self.other_bytes += sum(other_bytes(unit) for unit in unit.scope.units if unit.is_root)

    def name_of(self, unit: Unit) -> str:
        """Return a unit's name, which is unique among all models."""
        return self._names[unit]

    def gradient_bytes(self) -> int:
        """Return the bytes of all models' present gradients, without those on the host."""
        return sum(self._times(unit) * _gradient_bytes(unit) for unit in self._units())

    def gradients(self) -> GradientCounts:
        """Count all models' present gradients, without reduced ones on the host, for any number of ranks."""
        whole, shards = 0, Counter[tuple[tuple[int, ...], int, int]]()
        for unit in self._units():
            times = self._times(unit)
            for param in unit.params:
                local, unsharded, partial = _gradients(param)
                whole += 0 if unsharded is None else times * unsharded.nbytes
                for itemsize in (value.dtype.itemsize for value in (local, partial) if value is not None):
                    shards[tuple(param.shape), param.dim, itemsize] += times
        return GradientCounts(whole, shards)

    def parameter_bytes(self, params: Iterable[ShardedParam] | None = None) -> int:
        """Return the bytes of parameters, of all models' by default, that are gathered at present."""
        given = (param for unit in self._units() for param in unit.params) if params is None else params
        fulls = [(self._times(param.unit), param.state.full(param.param)) for param in given]
        return sum(times * full.nbytes for times, full in fulls if full is not None)

    def _times(self, unit: Unit) -> int:
        """Return the number of units that a unit stands for."""
        return 1 + self.copies.get(unit.name or "root", 0)

    def _units(self) -> Iterable[Unit]:
        return (unit for scope in self._scopes for unit in scope.units)


def _piece(param: ShardedParam) -> StoredParam:
    return StoredParam(tuple(param.shape), param.dim, param.local.dtype, param.offset, param.alignment)


def _bytes_of_extension(param: ShardedParam) -> int:
    return 0 if param.extension is None else param.extension.num_bytes(param.local)


def other_bytes(root: Unit) -> int:
    """Return the bytes that modules of a root unit hold besides shards: buffers, and parameters that are not sharded."""
    values = {id(value): value for module in root.modules for value in (*module.buffers(), *module.parameters())}
    return sum(value.nbytes for value in values.values() if not isinstance(value, DTensor))


def _gradient_bytes(unit: Unit) -> int:
    return sum(value.nbytes for param in unit.params for value in _gradients(param) if value is not None)


def _gradients(param: ShardedParam) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the reduced gradient (None on the host), the unreduced one, and the one that waits for an all-reduce."""
    partial = param.state.partial_grad
    local = None if param.unit.copies else local_of(param.param.grad)
    return local, param.state.unsharded_grad, None if partial is None else partial.tensor()
