"""Equal layers: find calls of modules in a Dynamo graph that do the same with equal tensors.

:mod:`passes.transforms.repeated_layers` traces one of them for all, :mod:`passes.transforms.cut_layers` leaves out some.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import sympy
import torch
from torch import SymInt, Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.fx import Graph, GraphModule, Node, map_arg

from ..fx.sizes import expression, layout, symbolic_sizes_of
from ..fx.torch_internals.core import FakeTensor
from .ops import Unshard, is_unshard, unshards


class Param(NamedTuple):
    """The arguments of ``unshard`` that differ between equal layers."""

    unit: str
    name: str
    offset: int


class Layer:
    """A call of a module in the Dynamo graph.

    Args:
        nodes: its operations.
        symbols: inputs of the graph that are a symbol, by this symbol.
    """

    def __init__(self, nodes: list[Node], symbols: Mapping[sympy.Symbol, Node]):
        self.nodes, self._symbols = nodes, symbols
        self._inside = set(nodes)

    @property
    def operations(self) -> list[Node]:
        """Its nodes without those that unshard parameters, which may stand at the top of the graph."""
        return [node for node in self.nodes if not is_unshard(node)]

    @property
    def inputs(self) -> list[Node]:
        """Tensors and sizes from outside that its operations read, and the symbols in these.

        AOTAutograd expresses sizes by symbols that are inputs, and takes other sizes from tensors that have them.
        """
        found = dict.fromkeys(source for source in self._outside if mesh_of(source) is None)
        sizes = symbolic_sizes_of(source.meta.get("example_value") for source in found)
        symbols = {symbol for size in sizes for symbol in size.node.expr.free_symbols & self._symbols.keys()}
        return list(found | dict.fromkeys(self._symbols[symbol] for symbol in sorted(symbols, key=str)))

    @property
    def meshes(self) -> list[Node]:
        """Device meshes that its operations read, as in tensor parallelism."""
        return [source for source in self._outside if mesh_of(source) is not None]

    @property
    def _outside(self) -> dict[Node, None]:
        sources = (source for node in self.nodes for source in node.all_input_nodes)
        return dict.fromkeys(source for source in sources if source not in self._inside)

    @property
    def outputs(self) -> list[Node]:
        """Values of the layer that operations outside read."""
        return [node for node in self.nodes if any(self.is_outside(user) for user in node.users)]

    @property
    def params(self) -> list[Param]:
        """The parameters that it unshards."""
        return [Param(spec.unit, spec.name, spec.offset) for spec in map(Unshard.of, unshards(self.nodes))]

    def is_outside(self, node: Node) -> bool:
        """Return whether ``node`` is no operation of the layer."""
        return node not in self._inside

    def is_replaceable(self) -> bool:
        """Return whether other nodes, in the place of the layer's last node, can stand for the layer."""
        last = self.nodes[-1]
        users = [user for node in self.outputs for user in node.users if self.is_outside(user)]
        return (
            bool(self.outputs)
            and all(_is_plain(node.meta.get("example_value")) for node in self.outputs)
            and all(_is_plain(value) or _is_known(value) for value in (node.meta.get("example_value") for node in self.inputs))
            and all(last < user for user in users)
            and self._is_in_one_piece()
        )

    def _is_in_one_piece(self) -> bool:
        """Return whether no other operation lies between the layer's, such as one that leaves a context of the layer's."""
        operations = self.operations
        between = itertools.takewhile(lambda node: node is not operations[-1], _from(operations[0]))
        return all(
            node in self._inside or node.op in ("placeholder", "get_attr") or is_unshard(node) or _is_size(node)
            for node in between
        )

    def key(self) -> Hashable:
        """Return a key that is equal for layers that do the same with equal tensors."""
        names = {node: f"input {index}" for index, node in enumerate(self.inputs)}
        names |= {node: _mesh_name(node) for node in self.meshes}
        values = tuple(_description(node.meta["example_value"]) for node in self.inputs)
        operations = _key_of(self.nodes, names, {})
        return operations, values, tuple(names[node] for node in self.outputs)


def _key_of(nodes: Iterable[Node], names: dict[Node, str], units: dict[str, str]) -> Hashable:
    """Return a key of operations.

    Args:
        nodes: the operations.
        names: a name of each input. Names of the operations are added.
        units: numbered names of units. Those that the operations read are added.
    """
    operations = []
    for index, node in enumerate(nodes):
        names[node] = f"node {index}"
        if is_unshard(node):
            spec = Unshard.of(node)
            units.setdefault(spec.unit, f"unit {len(units)}")
            given: Any = (
                names[spec.shard],
                units[spec.unit],
                spec.offset >= 0,
                *node.args[2:],
                map_arg(_without(node.kwargs, "unit", "offset"), names.__getitem__),
            )
        else:
            given = map_arg((node.args, node.kwargs), names.__getitem__)
        operations.append((node.op, _body_key(node, units) or node.target, repr(given)))
    return tuple(operations)


def _body_key(node: Node, units: dict[str, str]) -> Hashable | None:
    """Return a key of the graph that a node of a higher-order operator reads, such as a checkpoint's; None: there is none."""
    body = getattr(node.graph.owning_module, str(node.target), None) if node.op == "get_attr" else None
    if not isinstance(body, GraphModule):
        return None
    inputs = body.graph.find_nodes(op="placeholder")
    names = {input: f"input {index}" for index, input in enumerate(inputs)}
    return _key_of((inner for inner in body.graph.nodes if inner not in names), names, units)


def equal_layers(graph: Graph, min_layers: int, is_wanted: Callable[[Layer], bool]) -> list[list[Layer]]:
    """Return lists of equal layers, in the order of the graph. Of nested modules, take the outermost with enough equal calls.

    Args:
        graph: a Dynamo graph.
        min_layers: the fewest layers of a list.
        is_wanted: whether a layer can be used.
    """
    taken: set[Node] = set()
    found = []
    symbols = {
        size.node.expr: node
        for node in graph.find_nodes(op="placeholder")
        if isinstance(size := node.meta.get("example_value"), SymInt) and size.node.expr.is_Symbol
    }
    stacks = {node: list(node.meta.get("nn_module_stack", {}).values()) for node in graph.nodes if node.op != "placeholder"}
    for depth in range(max(map(len, stacks.values()), default=0)):
        by_module: dict[Hashable, list[Node]] = defaultdict(list)
        for node, stack in stacks.items():
            if len(stack) > depth and node not in taken and not is_unshard(node) and not _is_size(node):
                by_module[stack[depth][0]].append(node)
        if len(by_module) < min_layers:
            continue
        by_key: dict[Hashable, list[Layer]] = defaultdict(list)
        for nodes in by_module.values():
            layer = Layer([*_own_unshards(nodes), *nodes], symbols)
            if is_wanted(layer):
                by_key[layer.key()].append(layer)
        for layers in by_key.values():
            if len(layers) >= min_layers:
                found.append(layers)
                taken.update(node for layer in layers for node in layer.nodes)
    return found


def mesh_of(node: Node) -> DeviceMesh | None:
    """Return the device mesh that is the value of ``node``; None if the value is something else."""
    value = node.meta.get("example_value")
    # Dynamo traces with a stand-in for the mesh.
    real = getattr(value, "real_obj", value)
    return real if isinstance(real, DeviceMesh) else None


def _own_unshards(nodes: Sequence[Node]) -> list[Node]:
    """Return the unshards that only ``nodes`` read. These unshards stand at the top of the graph."""
    inside = set(nodes)
    sources = dict.fromkeys(source for node in nodes for source in node.all_input_nodes)
    return [source for source in unshards(sources) if inside.issuperset(source.users)]


def _without(mapping: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in mapping.items() if key not in keys}


def _from(node: Node) -> Iterator[Node]:
    """Yield ``node`` and all nodes after it in the graph."""
    while node.op != "root":
        yield node
        node = node.next


def _is_plain(value: Any) -> bool:
    """Return whether ``value`` is an ordinary dense tensor whose sizes do not depend on data."""
    return (
        isinstance(value, Tensor)
        and type(value) in (FakeTensor, torch.nn.Parameter)
        and value.layout == torch.strided
        and all(map(_is_known, symbolic_sizes_of([value])))
    )


def _is_size(node: Node) -> bool:
    """Return whether an operation of Dynamo's graph computes a size. Dynamo shares these among layers."""
    return isinstance(node.meta.get("example_value"), SymInt)


def _is_known(value: Any) -> bool:
    """Return whether ``value`` is a symbolic size that does not depend on data."""
    return isinstance(value, SymInt) and value.node.hint is not None


def _mesh_name(node: Node) -> str:
    """Return a name that is equal for slices of a mesh with the same dimensions."""
    mesh = mesh_of(node)
    assert mesh is not None
    return f"mesh {mesh.mesh_dim_names} {[group.group_name for group in mesh.get_all_groups()]}"


def _description(value: Tensor | SymInt) -> Hashable:
    return expression(value) if isinstance(value, SymInt) else (*layout(value), value.dtype, value.device, value.requires_grad)
