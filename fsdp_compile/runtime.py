"""What runs around a lowered graph: extra inputs are bound before it, gradients land after it.

A lowered graph does not know which parameters it works on: equal blocks may share one. The shards among its inputs say it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.fx import Graph, Node

from passes.flat_storage import Run
from passes.ops import ReduceGrad, reduce_grad, reduce_grads

from .gradients import land_gradients
from .unit import ShardedParam

#: Takes its arguments as a list, which it empties.
BoxedFunction = Callable[[list[Any]], Any]


def boxed(function: Callable[[list[Any]], Any]) -> BoxedFunction:
    """Mark a function as one that takes its arguments as a list."""
    function._boxed_call = True  # type: ignore[attr-defined]
    return function


def sharded_param(shard: Any) -> ShardedParam:
    """The parameter that a graph input is the shard of.

    Raises:
        RuntimeError: the input is none, as when a saved-tensor hook replaced what backward finds.
    """
    found = getattr(shard, "_fsdp_sharded_param", None)
    if found is None:
        raise RuntimeError(
            "A compiled graph of a sharded model was called with an input that is not the shard it was compiled for. "
            "torch.autograd.graph.saved_tensors_hooks around a sharded model are not supported."
        )
    return found


def storage_run(shard: Tensor, run: Run) -> Tensor:
    """The run of flat storage around a shard that a graph takes as an extra input: ``[run.numel]``."""
    return sharded_param(shard).unit.storages[shard.dtype].narrow(0, run.offset, run.numel)


def bind_forward(lowered: BoxedFunction, runs: Sequence[Run]) -> BoxedFunction:
    """A forward graph's callable, from the lowered one and the runs that it takes in addition."""

    def forward(args: list[Any]) -> Any:
        args.extend([storage_run(args[run.member], run) for run in runs])
        return lowered(args)

    return boxed(forward)


def gradient_outputs(graph: Graph) -> list[tuple[int, int]]:
    """Which outputs of a backward graph are reduced gradients: (output, index of the placeholder of their shard).

    To be asked before the passes replace ``reduce_grad`` nodes.
    """
    placeholders = {node: index for index, node in enumerate(graph.find_nodes(op="placeholder"))}
    shards = {node: ReduceGrad.of(node).shard for node in reduce_grads(graph.nodes)}
    outputs: Sequence[Any] = graph.output_node().args[0]  # type: ignore[assignment]
    found = []
    for index, output in enumerate(outputs):
        if isinstance(output, Node):
            shard = _shard_of_gradient(output, shards)
            if shard is not None:
                found.append((index, placeholders[shard]))
    return found


def _shard_of_gradient(output: Node, shards: dict[Node, Node]) -> Node | None:
    if output.target == reduce_grad:
        return shards[output]
    # A shard that was unsharded twice (in a subgraph that deduplication does not look into) has a sum of reductions.
    if output.all_input_nodes and all(source.target == reduce_grad for source in output.all_input_nodes):
        return shards[output.all_input_nodes[0]]
    return None


def bind_backward(lowered: BoxedFunction, runs: Sequence[Run], gradients: Sequence[tuple[int, int]]) -> BoxedFunction:
    """A backward graph's callable: it lands the gradients of shards in ``param.grad`` and gives autograd None for them."""

    def backward(args: list[Any]) -> list[Any]:
        params = [sharded_param(args[member]) for _, member in gradients]
        args.extend([storage_run(args[run.member], run) for run in runs])
        outputs = list(lowered(args))
        land_gradients(params, [outputs[index] for index, _ in gradients])
        for index, _ in gradients:
            outputs[index] = None
        return outputs

    return boxed(backward)
