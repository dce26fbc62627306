"""Reshard after forward: what backward finds of each gathered parameter.

Runs on the joint graph and speaks to the partitioner, which splits it into forward and backward, through ``recompute`` tags.

- ``reshard_after_forward=True``: the ``unshard`` and everything made of it alone by views and casts is ``MUST_RECOMPUTE``:
  never saved, backward gathers it again. A parameter that backward does not read gets no gather there.
- ``False``: the ``unshard`` is ``MUST_SAVE``: backward reads the parameter that forward gathered.
- a post-forward group (``reshard_after_forward=<int>``): forward also keeps this rank's shard in the smaller group
  (``reshard``, ``MUST_SAVE``) and backward's readers get an ``unshard`` of that (``MUST_RECOMPUTE``).

Leaves alone every other tag: activation checkpointing decides about activations.
"""

from typing import Any

from torch.fx import Graph, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from .graph import derived
from .layout import REPLICATED
from .ops import Unshard, reshard, unshard, unshards, update_args

# Above any id that activation checkpointing hands out, so that the partitioner sees no checkpoint boundary at an unshard
# and leaves its tag in place.
_GRAPH_ID = 1 << 40


def _tag(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _GRAPH_ID


def _backward_nodes(graph: Graph) -> dict[Node, None]:
    """Nodes that depend on a tangent."""
    backward: dict[Node, None] = {}
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if node.op != "output" and (is_tangent or any(source in backward for source in node.all_input_nodes)):
            backward[node] = None
    return backward


def _reshard_to_smaller_group(graph: Graph, full: Node, backward: dict[Node, None]) -> None:
    """Give backward's readers of ``full``, and of what moves and casts make of it, an unshard of a smaller group's shard."""
    spec = Unshard.of(full)
    made_of_it = derived(graph, [full])
    readers = [node for node in backward if any(source in made_of_it for source in node.all_input_nodes)]
    if not readers:
        return
    with graph.inserting_after(full):
        piece = graph.call_function(reshard, (full, spec.name, spec.post_forward_group), {"dim": spec.dim})
    piece.meta["val"] = _fake(piece)
    _tag(piece, CheckpointPolicy.MUST_SAVE)
    with graph.inserting_after(piece):
        again = graph.node_copy(full)
    update_args(again, shard=piece, group=spec.post_forward_group, param_dtype=None, offset=-1, post_forward_group="")
    _tag(again, CheckpointPolicy.MUST_RECOMPUTE)
    copies = {full: again}
    after = again
    for node in list(made_of_it)[1:]:
        with graph.inserting_after(after):
            after = copies[node] = graph.node_copy(node, lambda source: copies.get(source, source))
        _tag(after, CheckpointPolicy.MUST_RECOMPUTE)
    for reader in readers:
        reader.args = map_arg(reader.args, lambda source: copies.get(source, source))
        reader.kwargs = map_arg(reader.kwargs, lambda source: copies.get(source, source))


def _fake(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def reshard_after_forward(graph: Graph) -> None:
    """Tag the unshards of a joint (or an inference) graph for the partitioner. In place."""
    backward = _backward_nodes(graph)
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if not spec.reshard_after_forward:
            _tag(node, CheckpointPolicy.MUST_SAVE)
            continue
        if spec.post_forward_group and spec.dim != REPLICATED:
            _reshard_to_smaller_group(graph, node, backward)
        for made_of_it in derived(graph, [node]):
            _tag(made_of_it, CheckpointPolicy.MUST_RECOMPUTE)
    graph.eliminate_dead_code()


def reuse_post_forward_shards(graph: Graph) -> None:
    """Let all of a backward graph read the smaller group's gather where a parameter has one.

    A forward operation that the partitioner chose to run again in backward still reads the ``unshard`` of the whole group;
    one gather for each parameter is enough. In place.
    """
    # A gather of a saved piece is the one that does not read flat storage.
    smaller = {Unshard.of(node).name: node for node in unshards(graph.nodes) if Unshard.of(node).offset == -1}
    for node in unshards(graph.nodes):
        replacement = smaller.get(Unshard.of(node).name)
        if replacement is not None and node is not replacement:
            first_reader = min(node.users, default=None)
            if first_reader is not None and not replacement < first_reader:
                first_reader.prepend(replacement)
            node.replace_all_uses_with(replacement)
            graph.erase_node(node)
