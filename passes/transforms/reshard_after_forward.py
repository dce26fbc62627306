"""Reshard after forward: keep, reshard or gather again each parameter that backward reads.

``reshard_after_forward``, in the joint graph, tags nodes for the partitioner, which splits it into forward and backward:

Before: every ``unshard`` has its unit's ``reshard_after_forward`` as an argument.
After:  ``recompute`` tags tell the partitioner:

- ``reshard_after_forward=True``: the ``unshard``, and everything made of it alone by views and casts, is ``MUST_RECOMPUTE``.
  They are never saved, and backward gathers the parameter again. Backward does not gather a parameter that it does not read.
  So it is for a parameter that graphs read where it is stored, whatever ``reshard_after_forward``: that it was written since
  forward can be told of the shard, and not of a view that forward saved.
- ``False``: the ``unshard`` is ``MUST_SAVE``: backward reads the parameter that forward gathered.
- a post-forward group (``reshard_after_forward=<int>``): this rank's shard in the smaller group (``reshard``) is ``MUST_SAVE``.
  Readers get ``tie(unshard, reshard)``, which the partitioner may run again in backward. If the parameter is rounded for its
  gather, the shard is a part of the gathered bytes (``reshard_rounded``), which :mod:`~passes.transforms.bucket` finds.

``resolve_ties``, in the forward and the backward graph:

Before: ties.
After:  in backward, if the smaller group's shard was saved, an ``unshard`` of that shard. Else the parameter itself.

Leaves alone every other tag: activation checkpointing decides about activations.
"""

from typing import Any

from torch.fx import Graph, Node, map_arg
from torch.utils.checkpoint import CheckpointPolicy

from ..collectives.functional import group_size
from ..collectives.layout import REPLICATED, padded_shard_shape
from ..collectives.rounded_gather import is_rounded
from ..fx.graph import derived
from ..ir.ops import Unshard, reshard, reshard_rounded, tie, unshards, update_args

# Above any id that activation checkpointing hands out, so that the partitioner sees no checkpoint boundary at an unshard
# and leaves its tag in place.
_GRAPH_ID = 1 << 40


def _tag(node: Node, policy: CheckpointPolicy) -> None:
    node.meta["recompute"] = policy
    node.meta["ac_graph_id"] = _GRAPH_ID


def _tie_to_smaller_shard(graph: Graph, full: Node) -> Node:
    """Tie ``full`` to its shard in the post-forward group, for all readers of ``full``. Return the tie."""
    spec = Unshard.of(full)
    with graph.inserting_after(full):
        if _is_rounded(spec):
            args = ([full], spec.name, spec.shape, spec.group, spec.post_forward_group)
            piece = graph.call_function(reshard_rounded, args, {"dim": spec.dim, "sent_as": spec.sent_as})
        else:
            piece = graph.call_function(reshard, (full, spec.name, spec.post_forward_group), {"dim": spec.dim})
    piece.meta["val"] = _fake(piece)
    _tag(piece, CheckpointPolicy.MUST_SAVE)
    with graph.inserting_after(piece):
        tied = graph.call_function(tie, (full, piece))
    tied.meta = dict(full.meta)
    full.replace_all_uses_with(tied, delete_user_cb=lambda user: user not in (piece, tied))
    return tied


def _is_rounded(spec: Unshard) -> bool:
    return bool(spec.sent_as) and is_rounded(padded_shard_shape(spec.shape, spec.dim, group_size(spec.group)))


def _is_read_where_stored(full: Node, spec: Unshard) -> bool:
    return spec.dim == REPLICATED and not spec.device and full.meta["val"].dtype == spec.shard.meta["val"].dtype


def _fake(node: Node) -> Any:
    args, kwargs = map_arg((node.args, node.kwargs), lambda source: source.meta["val"])
    return node.target(*args, **kwargs)  # type: ignore[operator]


def reshard_after_forward(graph: Graph) -> None:
    """Tag the unshards of a joint (or an inference) graph for the partitioner. In place."""
    roots = []
    for node in unshards(graph.nodes):
        spec = Unshard.of(node)
        if not spec.reshard_after_forward and not _is_read_where_stored(node, spec):
            _tag(node, CheckpointPolicy.MUST_SAVE)
            continue
        roots.append(node)
        if spec.post_forward_group and spec.dim != REPLICATED:
            roots.append(_tie_to_smaller_shard(graph, node))
    for made_of_them in derived(graph, roots):
        _tag(made_of_them, CheckpointPolicy.MUST_RECOMPUTE)


def resolve_ties(graph: Graph) -> None:
    """Replace the ties of a forward or backward graph. In place.

    If the smaller group's shard was saved, a gather over this group replaces the tie; else the parameter does.
    """
    for node in graph.find_nodes(op="call_function", target=tie):
        full, piece = node.args
        if piece.op == "placeholder":
            spec = Unshard.of(full)
            with graph.inserting_before(node):
                gathered = graph.node_copy(full)
            update_args(
                gathered,
                shard=piece,
                group=spec.post_forward_group,
                param_dtype=None,
                offset=-1,
                post_forward_group="",
                device="",
            )
            if spec.sent_as:
                update_args(gathered, param_dtype=full.meta["val"].dtype, encoded_over=spec.group)
            full = gathered
        node.replace_all_uses_with(full)
        graph.erase_node(node)
    graph.eliminate_dead_code()
