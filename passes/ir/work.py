"""The work of a node: its role, and the bucket that it works for. Passes mark the nodes that they insert, for later passes.

The work of nodes decides which nodes the schedule may move, where kernels end, and the names of collectives in profiles and
messages. Work is converted to text only when it is printed.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from torch.fx import Graph, Node

from ..fx.emit import WORK
from ..fx.graph import is_collective, is_host_copy


class Role(Enum):
    """The part of a node in the communication of its bucket.

    Attributes:
        COPY_TO_DEVICE: starts the copy of shards that are kept on the host.
        GATHER_NODE: starts the all-gather of node shards, from one rank of each node.
        START_GATHER: copies shards in, and starts the all-gather.
        FINISH_GATHER: waits for the all-gather, and cuts the parameters out.
        UNPACK: cuts the parameters of one unit out of the buffer of a gather that several units share.
        ACCUMULATE: adds gradients to those of earlier microbatches, without communication.
        START_REDUCE: copies gradients in, and starts the reduce-scatter.
        ALL_REDUCE: finishes the reduce-scatter, and starts the all-reduce, or second reduce-scatter, over replicas.
        FINISH_REDUCE: waits for the last collective, and makes the gradient that is stored.
        UPDATE: updates parameters and optimizer state in place.
        COPY_TO_HOST: starts the copy of the gradient to the host, if it is stored there.
    """

    COPY_TO_DEVICE = "copy_to_device"
    GATHER_NODE = "gather_node"
    START_GATHER = "start_gather"
    FINISH_GATHER = "finish_gather"
    UNPACK = "unpack"
    ACCUMULATE = "accumulate"
    START_REDUCE = "start_reduce"
    ALL_REDUCE = "all_reduce"
    FINISH_REDUCE = "finish_reduce"
    UPDATE = "update"
    COPY_TO_HOST = "copy_to_host"

    def __str__(self) -> str:
        return self.value


# A key in ``node.meta``; see :func:`mark_gradient`.
_GRADIENT_OF = "fsdp_gradient_of"

#: The roles that cut parameters out of a gathered buffer.
MAKES_PARAMETERS = (Role.FINISH_GATHER, Role.UNPACK)


@dataclass(frozen=True)
class BucketName:
    """The name of a bucket, made of the names of units' buckets.

    Attributes:
        parts: for each unit's bucket of which this bucket has parameters, its name and the number of the piece; None: this
            bucket has the whole unit's bucket.
    """

    parts: tuple[tuple[str, int | None], ...]

    @staticmethod
    def of_unit(name: str) -> BucketName:
        """Make the name of a unit's whole bucket."""
        return BucketName(((name, None),))

    @property
    def unit_buckets(self) -> tuple[str, ...]:
        """The names of the units' buckets that this bucket has parameters of."""
        return tuple(name for name, _ in self.parts)

    def __str__(self) -> str:
        return "+".join(name if piece is None else f"{name}/{piece}" for name, piece in self.parts)


@dataclass(frozen=True)
class Work:
    """The work of a node: its role, and the bucket that it works for."""

    role: Role
    bucket: BucketName

    def __str__(self) -> str:
        return f"{self.role} {self.bucket}"


def mark(node: Node, work: Work) -> None:
    """Record a node's work in its ``meta``."""
    node.meta[WORK] = work


def work(node: Node) -> Work | None:
    """Return a node's work; None for nodes of the model."""
    return node.meta.get(WORK)


def role(node: Node) -> Role | None:
    """Return the role of a node that works for a bucket; None for nodes of the model."""
    found = work(node)
    return None if found is None else found.role


def bucket(node: Node) -> BucketName | None:
    """Return the bucket that a node works for; None for nodes of the model."""
    found = work(node)
    return None if found is None else found.bucket


def mark_gradient(node: Node, name: BucketName) -> None:
    """Record in ``meta`` that a node of the model makes a gradient of a bucket, which is stored as it is."""
    node.meta[_GRADIENT_OF] = name


def gradient_of(node: Node) -> BucketName | None:
    """Return the bucket whose gradient a node of the model makes; None: no other node tells, or it makes none."""
    return node.meta.get(_GRADIENT_OF)


def nodes_of(graph: Graph, wanted: Role) -> dict[BucketName, list[Node]]:
    """Return the nodes of one role by bucket, in graph order."""
    found: dict[BucketName, list[Node]] = {}
    for node in graph.nodes:
        done = work(node)
        if done is not None and done.role is wanted:
            found.setdefault(done.bucket, []).append(node)
    return found


def kernel_boundaries(graph: Graph) -> set[Node]:
    """Return the nodes that no kernel spans: nodes before and after them are not fused.

    They are collectives, copies between host and device, and the first node of

    - each reduction's copy-in. A kernel that copied gradients in and also read a parameter would hold a gathered buffer, the
      gradients and their copy at once.
    - each unit's ``UNPACK``. So kernels end where they would if each unit had a gather of its own, and equal units share
      kernels.
    - each update that does not just follow the wait for its gradients. Inductor does not know that an update writes to memory
      that gathers read. So no node before the update may be in one kernel with it.
    """
    first = {nodes[0] for role in (Role.START_REDUCE, Role.UNPACK) for nodes in nodes_of(graph, role).values()}
    first |= {nodes[0] for nodes in nodes_of(graph, Role.UPDATE).values() if not _is_behind_its_wait(nodes[0])}
    return first | {node for node in graph.nodes if is_collective(node) or is_host_copy(node)}


def _is_behind_its_wait(update: Node) -> bool:
    """Return whether only work of its own bucket stands between an update and the bucket's last collective or wait."""
    node = update.prev
    while node.op == "call_function" and bucket(node) == bucket(update) and not is_collective(node):
        node = node.prev
    return is_collective(node) and bucket(node) == bucket(update)
