"""Full parameters in a graph of Dynamo's: which of them the graph writes to, or gives to code outside of it.

Values that share memory with a full parameter are known by Dynamo's fake tensors, which share it, too, and count writes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from passes.fx.graph import placeholder_index
from passes.fx.torch_internals.core import get_unwrapped, is_functorch_wrapped_tensor, is_traceable_wrapper_subclass
from passes.fx.torch_internals.objects import mark_as_parameter, storage_id, version_of
from passes.ir.ops import Unshard, unshards

from ..runtime.graph_inputs import sharded_param
from ..runtime.lent_parameters import lend


class FullParameters:
    """The full parameters in a graph that Dynamo has just captured.

    Args:
        gm: the graph, ahead of all passes.
        example_inputs: the graph's inputs.

    Attributes:
        outputs: the index of the shard among the inputs, for each output that shares memory with a full parameter.
    """

    def __init__(self, gm: GraphModule, example_inputs: Sequence[Any]):
        self._gm = gm
        self._inputs = example_inputs
        self._index_of = placeholder_index(gm.graph)
        self._reads = {_memory(node): node for node in unshards(gm.graph.nodes)}
        self._reads.pop(None, None)
        outputs: Any = gm.graph.output_node().args[0]
        reads = [self._reads.get(_memory(node)) if isinstance(node, Node) else None for node in outputs]
        self.outputs = {place: self._shard_of(read) for place, read in enumerate(reads) if read is not None}

    def _shard_of(self, read: Node) -> int:
        return self._index_of[Unshard.of(read).shard]

    def check_writes(self) -> None:
        """Check that the graph writes to no parameter from outside of its unit, where the write would have to be kept.

        Raises:
            NotImplementedError: it does.
        """
        if not self._reads:
            return
        for node in _written(self._gm):
            read = self._reads.get(_memory(node))
            if read is not None and self._is_outside(read):
                param = sharded_param(self._inputs[self._shard_of(read)])
                raise NotImplementedError(
                    f"A compiled forward writes to parameter {param.name}, whose unit does not run at that point. Write to it "
                    "between forwards, or in a function with the decorator torch.compiler.disable, from which it is kept."
                )

    def _is_outside(self, read: Node) -> bool:
        """Return whether the code that reads the parameter is outside of the unit's modules."""
        shard = Unshard.of(read).shard
        if sharded_param(self._inputs[self._shard_of(read)]).unit.is_root:
            return False
        owner = _path(shard.meta["grapharg"].source.name.partition("._parameters")[0])
        unit = owner[: len(owner) - Unshard.of(read).name.count(".")]
        stack = [_path(path) for path, _ in read.meta.get("nn_module_stack", {}).values()]
        # The code of the frame itself has an empty stack. A path of one name is that of the frame's module.
        return stack[-1][: len(unit)] != unit if stack else len(unit) > 1


def lend_outputs(compiled: Callable[..., Any], given: Mapping[int, int]) -> Callable[..., Any]:
    """Wrap the function of a part of a forward, so that what is written to full parameters that it returns is kept.

    Args:
        compiled: the function.
        given: :attr:`FullParameters.outputs`.
    """
    if not given:
        return compiled

    def call(*args: Any) -> Any:
        results = compiled(*args)
        for place, index in given.items():
            mark_as_parameter(results[place])  # An ``nn.Parameter`` for ``isinstance``, as in the graph.
            lend(sharded_param(args[index]), results[place])
        return results

    return call


def _written(gm: GraphModule) -> Iterator[Node]:
    """Yield the nodes in whose memory operators of a graph, or of graphs inside it, write."""
    for module in gm.modules():
        graph = getattr(module, "graph", None)
        for node in graph.nodes if isinstance(graph, Graph) else ():
            name = getattr(node.target, "__name__", "")
            if name.startswith("_foreach_") and name.endswith("_"):
                # With fake tensors, these count no write.
                yield from node.args[0]
            elif isinstance(value := node.meta.get("example_value"), Tensor) and version_of(value) > 0:
                yield node


def _memory(node: Node) -> int | None:
    """Return a number for the memory of a node's value; None: it is no plain tensor."""
    value = node.meta.get("example_value")
    while isinstance(value, Tensor) and is_functorch_wrapped_tensor(value):
        value = get_unwrapped(value)
    if not isinstance(value, Tensor) or is_traceable_wrapper_subclass(value) or value.layout != torch.strided:
        return None
    return storage_id(value)


def _path(source: str) -> list[str]:
    """Return the names in a path of modules, such as ``L['self']._modules['layers']._modules['0']``, or shorter forms of it."""
    return [name for name in re.findall(r"\w+", source) if name not in ("L", "_modules")]
