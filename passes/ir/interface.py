"""The interface of a lowered graph: what it takes and gives besides the inputs and outputs that autograd knows of.

State that a graph reads or updates (flat storage, gathered parameters, gradient accumulators, divide factors) enters as extra
placeholders behind the others; what a graph leaves for the next one goes out as extra outputs. Neither names a parameter:
equal blocks may share a graph, so that the runtime finds parameters by the shards among the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node


@dataclass(frozen=True)
class StorageRun:
    """An input: neighbouring shards of flat storage.

    Attributes:
        placeholder: index of an input that is a shard which lies in that storage.
        offset, numel: where the run begins there, and how long it is, in elements.
    """

    placeholder: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FullParameter:
    """An input or output: a gathered parameter that lives between graphs.

    Attributes:
        bucket: index among the graph's buckets of gathers.
        position: which of the bucket's parameters.
    """

    bucket: int
    position: int


@dataclass(frozen=True)
class UnshardedGradient:
    """An input or output: a full gradient of earlier microbatches.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: which of the group's parameters.
    """

    reduction: int
    position: int


@dataclass(frozen=True)
class PartialGradient:
    """An input or output: the flat shard of a reduction over the shard group only, which waits for the replicas'."""

    reduction: int


@dataclass(frozen=True)
class ReducedGradient:
    """An input or output: the flat shard of averaged gradients, that of ``param.grad``."""

    reduction: int


@dataclass(frozen=True)
class DivideFactor:
    """An input: a divide factor of a reduction, of that number."""

    reduction: int
    number: int


@dataclass(frozen=True)
class HookTensor:
    """An input: a communication hook's tensor for a parameter, which the graph updates in place.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: which of the group's parameters.
        name: what the hook calls it.
    """

    reduction: int
    position: int
    name: str


@dataclass(frozen=True)
class UpdatedRun:
    """An input: neighbouring shards of flat storage, which the graph updates in place.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: which of the group's parameters is the first.
        numel: how long the run is, in elements.
    """

    reduction: int
    position: int
    numel: int


@dataclass(frozen=True)
class OptimizerState:
    """An input: what an optimizer keeps for an :class:`UpdatedRun`, under this name; updated in place."""

    reduction: int
    position: int
    numel: int
    name: str


@dataclass(frozen=True)
class UpdateNumbers:
    """An input: the numbers of the update of an :class:`UpdatedRun`, by its first parameter."""

    reduction: int
    position: int


#: An extra input.
InputSlot = (
    StorageRun
    | FullParameter
    | UnshardedGradient
    | PartialGradient
    | ReducedGradient
    | DivideFactor
    | HookTensor
    | UpdatedRun
    | OptimizerState
    | UpdateNumbers
)
#: An extra output.
OutputSlot = FullParameter | UnshardedGradient | PartialGradient | ReducedGradient


@dataclass
class Interface:
    """The extra inputs and outputs of a graph, in their order.

    Attributes:
        graph: the graph that they are added to.
        num_outputs: outputs that the graph had without the extra ones.
        inputs, outputs: what was added.
        output_nodes: the nodes of ``outputs``.
        reduction_groups: the gradients that each collective reduces, by the index of a bucket and the position there.
    """

    graph: Graph
    num_outputs: int = 0
    inputs: list[InputSlot] = field(default_factory=list)
    outputs: list[OutputSlot] = field(default_factory=list)
    output_nodes: list[Node] = field(default_factory=list)
    reduction_groups: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    _last: Node | None = None

    def __post_init__(self) -> None:
        self.num_outputs = len(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def add_input(self, name: str, value: Tensor, slot: InputSlot) -> Node:
        """A new placeholder behind all others, with this fake value."""
        if self._last is None:
            self._last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(self._last):
            self._last = self.graph.placeholder(name)
        # Two factors of a bucket ask for the same name; the node's is unique.
        self._last.target = self._last.name
        self._last.meta["val"] = value
        self.inputs.append(slot)
        return self._last

    def add_output(self, node: Node, slot: OutputSlot) -> None:
        """Give ``node`` out behind all other outputs, once :meth:`finish` is called."""
        self.output_nodes.append(node)
        self.outputs.append(slot)

    def finish(self) -> None:
        """Write the extra outputs into the graph."""
        output = self.graph.output_node()
        kept: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        output.args = ((*kept, *self.output_nodes),)
