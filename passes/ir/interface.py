"""The interface of a lowered graph: the inputs and outputs that autograd does not know of.

State that a graph reads or updates (flat storage, gathered parameters, gradient accumulators, divide factors) enters by extra
placeholders after the others. Values for later graphs leave by extra outputs. No extra input or output names a parameter, as
equal blocks may share a graph. The runtime finds parameters by the shards among the inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from .work import BucketName


@dataclass(frozen=True)
class StorageRun:
    """An input: a run of neighbouring shards in flat storage.

    Attributes:
        placeholder: index of an input that is a shard in that storage.
        offset, numel: start of the run in the storage, and its length, in elements.
    """

    placeholder: int
    offset: int
    numel: int


@dataclass(frozen=True)
class FullParameter:
    """An input or output: a gathered parameter that lives between graphs.

    Attributes:
        bucket: index among the graph's gather buckets.
        position: index of the parameter in the bucket.
    """

    bucket: int
    position: int


@dataclass(frozen=True)
class NodeShards:
    """An input or output: the flat node shards of parameters that are gathered together, which live between graphs.

    Attributes:
        members: the parameters, each by the index of its bucket among the graph's gather buckets, and its position there.
    """

    members: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class UnshardedGradient:
    """An input or output: a full gradient that accumulates over microbatches.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: index of the parameter in the group.
    """

    reduction: int
    position: int


@dataclass(frozen=True)
class PartialGradient:
    """An input or output: a partial result, the flat shard of gradients that the replicas have not all-reduced yet.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
    """

    reduction: int


@dataclass(frozen=True)
class ReducedGradient:
    """An input or output: the flat shard of averaged gradients, whose pieces are the parameters' ``param.grad``.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
    """

    reduction: int


@dataclass(frozen=True)
class DivideFactor:
    """An input: a divide factor of a reduction.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        number: index of the factor among those of the reduction.
    """

    reduction: int
    number: int


@dataclass(frozen=True)
class HookTensor:
    """An input: a communication hook's tensor for a parameter, which the graph updates in place.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: index of the parameter in the group.
        name: the tensor's name in the hook; for a hook over replicas with the prefix ``OVER_REPLICAS``.
    """

    reduction: int
    position: int
    name: str


@dataclass(frozen=True)
class UpdatedRun:
    """An input: a run of neighbouring shards in flat storage, which the graph updates in place.

    Attributes:
        reduction: index among the graph's ``reduction_groups``.
        position: index in the group of the run's first parameter.
        numel: length of the run, in elements.
    """

    reduction: int
    position: int
    numel: int


@dataclass(frozen=True)
class OptimizerState:
    """An input: optimizer state for an :class:`UpdatedRun`, which the graph updates in place.

    Attributes:
        reduction, position, numel: as for the :class:`UpdatedRun`.
        name: torch's name of the state, such as "exp_avg".
    """

    reduction: int
    position: int
    numel: int
    name: str


@dataclass(frozen=True)
class UpdateNumbers:
    """An input: the numbers of an update (:meth:`passes.ir.update.Update.numbers`) for an :class:`UpdatedRun`.

    Attributes:
        reduction, position: as for the :class:`UpdatedRun`.
    """

    reduction: int
    position: int


#: An extra input.
InputSlot = (
    StorageRun
    | FullParameter
    | NodeShards
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
OutputSlot = FullParameter | NodeShards | UnshardedGradient | PartialGradient | ReducedGradient


@dataclass
class Interface:
    """The extra inputs and outputs of a graph, in their order.

    Attributes:
        graph: the graph that they are added to.
        num_outputs: the number of outputs without the extra ones.
        inputs, outputs: the slots of the added inputs and outputs.
        output_nodes: the nodes of ``outputs``.
        reduction_groups: for each reduction, its gradients, each by the index of its bucket and its position there.
        members: for each bucket, by whether it is gathered and by its name, its parameters in the order in which its
            collectives have them: each by its unit's bucket, and by its name within the unit.
    """

    graph: Graph
    num_outputs: int = 0
    inputs: list[InputSlot] = field(default_factory=list)
    outputs: list[OutputSlot] = field(default_factory=list)
    output_nodes: list[Node] = field(default_factory=list)
    reduction_groups: list[tuple[tuple[int, int], ...]] = field(default_factory=list)
    members: dict[tuple[bool, BucketName], tuple[tuple[str, str], ...]] = field(default_factory=dict)
    _last: Node | None = None

    def __post_init__(self) -> None:
        self.num_outputs = len(self.graph.output_node().args[0])  # type: ignore[arg-type]

    def add_input(self, name: str, value: Tensor, slot: InputSlot) -> Node:
        """Add a placeholder after all others, with a fake value. Returns the placeholder."""
        if self._last is None:
            self._last = self.graph.find_nodes(op="placeholder")[-1]
        with self.graph.inserting_after(self._last):
            self._last = self.graph.placeholder(name)
        # Two factors of a bucket ask for the same name; FX makes the node's name unique.
        self._last.target = self._last.name
        self._last.meta["val"] = value
        self.inputs.append(slot)
        return self._last

    def add_output(self, node: Node, slot: OutputSlot) -> None:
        """Add ``node`` after all other outputs. :meth:`finish` writes it into the graph."""
        self.output_nodes.append(node)
        self.outputs.append(slot)

    def finish(self) -> None:
        """Write the extra outputs into the graph."""
        output = self.graph.output_node()
        kept: list[Any] = list(output.args[0])  # type: ignore[arg-type]
        output.args = ((*kept, *self.output_nodes),)
